"""How many registers a kernel may take, and what it may spill. The bounds were recorded with one version of Triton."""

from __future__ import annotations

from typing import Final

import triton

__all__ = ["register_bound", "spill_bound"]

_RECORDED_WITH: Final = "3.8."
_IS_SAME: Final = triton.__version__.startswith(_RECORDED_WITH)
_MOST: Final = 255


def register_bound(recorded: int) -> int:
    """The recorded bound; with another Triton up to a sixth more."""
    return recorded if _IS_SAME else min(recorded + recorded // 6, _MOST)


def spill_bound(recorded: int) -> int:
    """The recorded bytes; with another Triton up to four words more."""
    return recorded if _IS_SAME else recorded + 16
