"""`python -m tests.project.docstrings`: docstrings that open with a relative word, which read as translated; exit 1."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("moereg", "plugins", "benches")
OPENINGS: Final = ("Of", "What", "Where", "Which", "Who", "Whose")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a statement: docstrings, and those below constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def main() -> int:
    """Prints a line for each such docstring."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: a docstring must not open with {words[0]}, got {' '.join(words[:6])!r}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(ast.parse(file.read_text()))
        if (words := text.split()) and words[0] in OPENINGS
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
