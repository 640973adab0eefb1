"""Python's garbage collector waits while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_LOCK: Final = threading.Lock()

_RUNNING: Final[list[bool]] = []
"""For each body of `collecting_later` that runs, in all threads: whether Python collected before the first of them."""


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Nothing that only a cycle of references keeps is destroyed before its body has ended, in whatever thread.

    An older graph among it would be, at some allocation of the body. CUDA permits that to no thread that captures, and
    the capture fails with `cudaErrorStreamCaptureInvalidated`. `torch.cuda.graph` collects beforehand where
    TORCH_CUDAGRAPH_GC says so, which takes longer than most captures, and prevents nothing during one.
    """
    with _LOCK:
        _RUNNING.append(_RUNNING[-1] if _RUNNING else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            was_enabled = _RUNNING.pop()
            if was_enabled and not _RUNNING:
                gc.enable()
