"""Backends that only the board has: another one's class with something switched off, to show what that gives."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from moereg.registry import REGISTRY, BackendCell
from moereg.selection.loader import load_backends

__all__ = ["UNTUNED", "register", "untuned"]

UNTUNED: Final = "_untuned"

# Backends whose implementation times its library's tactics if its `has_tactics` says that there are any.
_TUNED: Final = ("flashinfer_cutlass",)


def register() -> None:
    """Registers them, once; a request has to name them."""
    cells = load_backends().cells
    if not any(cell.name.endswith(UNTUNED) for cell in cells):
        tuned = [cell for cell in cells if cell.name in _TUNED]
        kinds = {cell.experts: _without_tactics(cell.experts) for cell in tuned}
        REGISTRY.publish([untuned(cell, kinds[cell.experts]) for cell in tuned])


def untuned(cell: BackendCell, experts: type[Any]) -> BackendCell:
    """A cell as another backend, which takes the first tactic of its library."""
    return dataclasses.replace(cell, name=f"{cell.name}{UNTUNED}", experts=experts, opt_in=True)


def _without_tactics(experts: type[Any]) -> type[Any]:
    def _load(self: Any) -> Any:
        implementation = experts._load(self)
        implementation.has_tactics = False
        return implementation

    return type(f"Untuned{experts.__name__}", (experts,), {"_load": _load, "__module__": experts.__module__})
