"""A fault in the source, and the table of those that only a GPU shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault in the source.

    Args:
        name: The fault, in a few words.
        file: Relative to the root of the tree.
        line: Its first line, from 1.
        start: Where `old` begins, in characters from the beginning of the file.
        old: Text of the file.
        new: Its replacement. The file stays valid Python.
        tests: Node ids, of which at least one has to fail. They run in this order and stop at the first that fails.
    """

    name: str
    file: str
    line: int
    start: int
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault."""
        assert text.startswith(self.old, self.start), f"{self.file}:{self.line} has changed"
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def __str__(self) -> str:
        """Where it is and what it changes, on one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {self.name}: {old} -> {new}"


def read_table(table: Path, root: Path = ROOT) -> tuple[Mutant, ...]:
    """The mutants of a file, which are written as hunks of a diff.

    `[file] tests` heads a block. A row of it is `name @ test`, with more tests behind it where they are needed; `::`
    begins one in the block's file of tests. `~ old ~> new` follows, or, where that is longer than a line, lines of
    `old` with `-`, of `new` with `+` and of both with a space. `#` begins a comment.

    Raises:
        ValueError: if a file does not have the text of a row exactly once.
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
    return tuple(
        _placed(root, name, file, _side(hunk, "-"), _side(hunk, "+"), tests) for name, file, tests, hunk in rows
    )


def _placed(root: Path, name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    text = (root / file).read_text(encoding="utf-8")
    if (count := text.count(old)) != 1:
        raise ValueError(f"{file} has the text of {name!r} {count} times, needs it once")
    start = text.index(old)
    return Mutant(name, file, text.count("\n", 0, start) + 1, start, old, new, tests)


def _side(hunk: list[str], sign: str) -> str:
    return "\n".join(line[2:] for line in hunk if line[0] in (sign, " "))
