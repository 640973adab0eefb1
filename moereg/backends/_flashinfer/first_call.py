"""Announces kernels that compile at a layer's first call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

import torch

from moereg.runtime.progress import long_wait
from moereg.spec.problem import MoEProblem

__all__ = ["first_call"]

logger: Final = logging.getLogger("moereg")

_DONE: Final[set[tuple[str, MoEProblem]]] = set()
"""Backends and problems that this process has called."""


@contextlib.contextmanager
def first_call(
    backend: str,
    problem: MoEProblem,
    seconds: float,
    avoid: str,
    *,
    on: torch.Tensor,
) -> Iterator[None]:
    """Announces the wait of a layer's first call in this process, until one call has succeeded.

    Args:
        backend: The kernels' backend.
        problem: The layer.
        seconds: Estimated wait if nothing was compiled before.
        avoid: As in `long_wait`.
        on: A tensor of the call; if its device is capturing a CUDA graph, a warning says so.
    """
    key = (backend, problem)
    if key in _DONE:
        yield
        return
    what = f"compiling kernels of {backend} for {problem}"
    if on.is_cuda and torch.cuda.is_current_stream_capturing():
        logger.warning("%s while a CUDA graph is captured, which may fail; call the layer once before", what)
    with long_wait(what, seconds, avoid):
        yield
    _DONE.add(key)
