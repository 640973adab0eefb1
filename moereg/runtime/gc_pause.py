"""Python's garbage collector waits while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

__all__ = ["collecting_later"]


class _Captures:
    """Bodies of `collecting_later` that run, in all threads.

    Attributes:
        lock: Held while the others change.
        running: How many there are.
        was_enabled: Whether Python collected before the first of them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.was_enabled = False


_CAPTURES: Final = _Captures()


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Nothing that only a cycle of references keeps is destroyed before its body has ended, in whatever thread.

    An older graph among it would be, at some allocation of the body. CUDA permits that to no thread that captures, and
    the capture fails with `cudaErrorStreamCaptureInvalidated`. `torch.cuda.graph` collects beforehand where
    TORCH_CUDAGRAPH_GC says so, which takes longer than most captures, and prevents nothing during one.
    """
    with _CAPTURES.lock:
        if not _CAPTURES.running:
            _CAPTURES.was_enabled = gc.isenabled()
            gc.disable()
        _CAPTURES.running += 1
    try:
        yield
    finally:
        with _CAPTURES.lock:
            _CAPTURES.running -= 1
            if not _CAPTURES.running and _CAPTURES.was_enabled:
                gc.enable()
