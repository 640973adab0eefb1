"""The type of a fault in the source, and the place of the tables of faults."""

from __future__ import annotations

import dataclasses
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
    """Mutants by area, which is the name of a table in `areas`.

    Args:
        on_gpu: Those that only a GPU shows, in tables whose names begin with gpu, instead of those that a CPU does.
    """
    tables = sorted((Path(__file__).parent / "areas").glob("*.txt"))
    return {table.stem: read_table(table) for table in tables if table.stem.startswith("gpu") == on_gpu}


def read_table(table: Path) -> tuple[Mutant, ...]:
    """The mutants of a file, which are written as hunks of a diff.

    `[file] tests` heads a block. A row of it is `name @ test`, with more tests behind it where they are needed; `::`
    begins one in the block's file of tests. `~ old ~> new` follows, or, where that is longer than a line, lines of
    `old` with `-`, of `new` with `+` and of both with a space. `#` begins a comment.
    """
    file = home = ""
    rows: list[tuple[str, str, tuple[str, ...], list[str]]] = []
    for line in table.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            file, home = line[1:].split("] ")
        elif line.startswith(("-", "+", " ")):
            rows[-1][-1].append(line)
        elif line.startswith("~ "):
            old, new = line[2:].split(" ~> ")
            rows[-1][-1].extend((f"- {old}", f"+ {new}"))
        elif not line.startswith("#"):
            name, *tests = line.split(" @ ")
            rows.append((name, file, tuple(home + test if test.startswith("::") else test for test in tests), []))
    return tuple(Mutant(name, file, _side(hunk, "-"), _side(hunk, "+"), tests) for name, file, tests, hunk in rows)


def _side(hunk: list[str], sign: str) -> str:
    return "\n".join(line[2:] for line in hunk if line[0] in (sign, " "))
