"""The type of a fault in the source, and the place of the tables of faults."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault in the source.

    Args:
        name: The fault, in a few words; unique.
        file: Relative to the root of the tree.
        old: Text that the file has exactly once.
        new: Its replacement. The file stays valid Python.
        tests: Node ids, of which at least one has to fail. They run in this order and stop at the first that fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: if the file does not have `old` exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the text of {self.name!r} {count} times, needs it once")
        return text.replace(self.old, self.new)


def load_tables(on_gpu: bool = False) -> dict[str, tuple[Mutant, ...]]:
    """Mutants by area, which is the name of a module of `tests.mutants.areas`.

    Args:
        on_gpu: Those that only a GPU shows, instead of those that a CPU does.
    """
    package = Path(__file__).parent / "areas"
    areas = [module.name for module in pkgutil.iter_modules([str(package)])]
    return {
        area: importlib.import_module(f"tests.mutants.areas.{area}").MUTANTS
        for area in areas
        if area.startswith("gpu") == on_gpu
    }
