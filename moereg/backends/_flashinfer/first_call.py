"""Kernels that compile at the first call of a layer's sizes say so before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from moereg.problem import MoEProblem
from moereg.waiting import long_wait

__all__ = ["first_call"]

_BEGUN: Final[set[tuple[str, MoEProblem]]] = set()
"""Backends and problems whose first call of this process has been announced."""


@contextlib.contextmanager
def first_call(backend: str, problem: MoEProblem, seconds: float, avoid: str) -> Iterator[None]:
    """Announces the wait of a layer's first call in a process; later calls pass.

    Args:
        backend: Whose kernels.
        problem: The layer.
        seconds: Estimate, where nothing was compiled before.
        avoid: As in `long_wait`.
    """
    key = (backend, problem)
    if key in _BEGUN:
        yield
        return
    _BEGUN.add(key)
    with long_wait(f"compiling kernels of {backend} for {problem}", seconds, avoid):
        yield
