"""How many registers a kernel may take. The bounds were recorded with one version of Triton."""

from __future__ import annotations

from typing import Final

import triton

__all__ = ["register_bound"]

_RECORDED_WITH: Final = "3.8."
_MOST: Final = 255


def register_bound(recorded: int) -> int:
    """The recorded bound; with another Triton up to a sixth more."""
    is_same = triton.__version__.startswith(_RECORDED_WITH)
    return recorded if is_same else min(recorded + recorded // 6, _MOST)
