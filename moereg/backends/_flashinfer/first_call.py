"""Announces kernels that compile at the first call of a layer's sizes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator
from typing import Final

import torch

from moereg.runtime.progress import long_wait
from moereg.spec.problem import MoEProblem

__all__ = ["first_call"]

logger: Final = logging.getLogger("moereg")

_DONE: Final[set[tuple[str, MoEProblem, Hashable]]] = set()
"""Backends, problems and sizes that this process has called."""


@contextlib.contextmanager
def first_call(
    backend: str,
    problem: MoEProblem,
    seconds: float,
    avoid: str,
    *,
    on: torch.Tensor,
    size: Hashable = None,
    size_seconds: float = 0.0,
) -> Iterator[None]:
    """Announces the wait of a layer's first call in this process, until one call has succeeded.

    Args:
        backend: The kernels' backend.
        problem: The layer.
        seconds: Estimated wait if nothing was compiled before.
        avoid: As in `long_wait`.
        on: A tensor of the call; if its device is capturing a CUDA graph, a warning says so.
        size: Sizes that kernels are specialized for besides the problem, or None.
        size_seconds: Estimated wait for another size of a problem, which shares some kernels.
    """
    key = (backend, problem, size)
    if key in _DONE:
        yield
        return
    tokens = f", {on.shape[-2]} tokens" if size is not None else ""
    what = f"compiling kernels of {backend} for {problem}{tokens}"
    if on.is_cuda and torch.cuda.is_current_stream_capturing():
        logger.warning("%s while a CUDA graph is captured, which may fail; call the layer once before", what)
    is_known = any(done[:2] == key[:2] for done in _DONE)
    with long_wait(what, size_seconds if is_known else seconds, avoid):
        yield
    _DONE.add(key)
