"""Pauses Python's garbage collector while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_LOCK: Final = threading.Lock()

_RUNNING: Final[list[bool]] = []
"""One entry per running `collecting_later`, in all threads: whether the collector was on before the first one."""


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Pauses collection of reference cycles, in all threads, until the context ends.

    Otherwise an allocation in the context may destroy an older CUDA graph, which CUDA forbids during capture: it fails
    with `cudaErrorStreamCaptureInvalidated`. `torch.cuda.graph` collects beforehand if TORCH_CUDAGRAPH_GC says so,
    which takes longer than most captures and prevents nothing during one.
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
