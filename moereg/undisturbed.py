"""Python's garbage collector waits while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collecting_later"]


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Nothing that only a cycle of references keeps is destroyed before its body has ended.

    An older graph among it would be, at some allocation of the body. CUDA permits that to no thread that captures, and
    the capture fails with `cudaErrorStreamCaptureInvalidated`. `torch.cuda.graph` collects beforehand where
    TORCH_CUDAGRAPH_GC says so, which takes longer than most captures, and prevents nothing during one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
