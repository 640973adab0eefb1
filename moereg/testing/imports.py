"""Watches which modules are imported, and on whose behalf."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

__all__ = ["ImportWatch", "watched_imports"]


@dataclasses.dataclass
class ImportWatch:
    """The top-level packages that were imported, each with the modules whose code waited for that.

    A finder of modules that finds none.
    """

    importers: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Notes who imports a package, and leaves finding it to the others."""
        if "." not in name:
            waiting = set()
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                waiting.add(str(frame.f_globals.get("__name__", "")))
                frame = frame.f_back
            self.importers.setdefault(name, frozenset(waiting))
        return None

    def imported_by(self, package: str) -> set[str]:
        """Top-level packages that a package imported, directly or not, and that are there."""
        return {
            name
            for name, waiting in self.importers.items()
            if sys.modules.get(name) is not None and any(f"{module}.".startswith(f"{package}.") for module in waiting)
        }


@contextlib.contextmanager
def watched_imports() -> Iterator[ImportWatch]:
    """Watches what is imported inside for the first time."""
    watch = ImportWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield watch
    finally:
        sys.meta_path.remove(watch)
