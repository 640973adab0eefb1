"""Cells that plugins register while they are imported: collected by module, and published at once when one has loaded.

A module that fails leaves nothing, whoever imported it. A module that another plugin imported first, for instance to
subclass its class, still comes in under its own entry point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import NamedTuple

from moereg.entry_points import Owner, Owners, PluginPoint
from moereg.registry import BackendCell, BackendRegistry, collecting_with

__all__ = ["Collection"]


class _Pending(NamedTuple):
    """A cell that is not visible yet.

    Attributes:
        cell: The cell.
        module: The module that registered it.
        body: What `sys.modules` had under that name then, None for nothing: a failed import removes it.
        home: The entry point that brings it; None where its distribution has none.
    """

    cell: BackendCell
    module: str
    body: object
    home: PluginPoint | None

    @property
    def stands(self) -> bool:
        """Whether its module has not failed."""
        return self.body is None or self.module in sys.modules


class Collection:
    """What the modules of plugins registered and no entry point has published."""

    def __init__(self, registry: BackendRegistry) -> None:
        self.registry = registry
        self.owners = Owners()
        self._importer: PluginPoint | None = None
        self._pending: list[_Pending] = []

    @contextlib.contextmanager
    def importing(self, point: PluginPoint) -> Iterator[None]:
        """Inside, cells that this thread registers in the registry are collected."""
        self._importer = point
        try:
            with collecting_with(self):
                yield
        finally:
            self._importer = None
            self._pending = [pending for pending in self._pending if pending.stands]

    def owner_of(self, module: str) -> Owner | None:
        """The distribution of a module that registers."""
        return self.owners.of(module, self._importer)

    def collect(self, cell: BackendCell, module: str) -> None:
        """Keeps a cell; a module that runs once more registers all its cells anew."""
        body = sys.modules.get(module)
        self._pending = [other for other in self._pending if other.module != module or other.body is body]
        home = self.owners.home(module, cell.name, self._importer)
        self._pending.append(_Pending(cell, module, body, home))

    def take(self, point: PluginPoint) -> tuple[list[BackendCell], list[BackendCell]]:
        """What an entry point brings, which is no longer pending.

        Returns:
            Its cells, and those visible cells whose place they take: registered by a direct import of its modules,
            before their distribution was known.
        """
        mine = [pending.cell for pending in self._pending if pending.home == point]
        self._pending = [pending for pending in self._pending if pending.home != point]
        early = [cell for cell in self.registry.cells if self._is_early(cell, point)]
        origin, version = point.owner
        return mine + [dataclasses.replace(cell, origin=origin, origin_version=version) for cell in early], early

    def _is_early(self, cell: BackendCell, point: PluginPoint) -> bool:
        module = cell.experts.__module__
        return (cell.origin, cell.origin_version) == (module, "") and self.owners.home(module, cell.name) == point

    def take_homeless(self) -> list[list[BackendCell]]:
        """The cells of modules whose distribution has no entry point for them, by module; no longer pending."""
        found: dict[str, list[BackendCell]] = {}
        for pending in self._pending:
            if pending.home is None:
                found.setdefault(pending.module, []).append(pending.cell)
        self._pending = [pending for pending in self._pending if pending.home is not None]
        return list(found.values())
