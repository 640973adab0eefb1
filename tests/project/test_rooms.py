"""How many rooms the package has, how long a chain of imports between them is, and how many files a choice enters."""

from __future__ import annotations

import ast
import collections
import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.project.files_entered import ROOT

MOST_MODULES, MOST_PACKAGES, LONGEST_CHAIN = 8, 18, 12
MOST_FILES = {"select_backend": 14, "make_kernel": 20}


def imports_by_room(package: Path) -> dict[str, set[str]]:
    """The rooms that each module or package in a package's root imports, also inside functions and for annotations."""
    rooms: dict[str, set[str]] = collections.defaultdict(set)
    for path in package.rglob("*.py"):
        room = path.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms[room] |= {name.split(".")[1] for name in names if name.startswith(f"{package.name}.")} - {room}
    return {room: found for room, found in rooms.items() if not room.startswith("__")}


def longest_chain(rooms: dict[str, set[str]]) -> tuple[str, ...]:
    @functools.cache
    def below(room: str) -> tuple[str, ...]:
        return (room, *max(map(below, rooms.get(room, ())), key=len, default=()))

    return max(map(below, rooms), key=len)


def test_rooms() -> None:
    rooms = imports_by_room(ROOT)
    modules = [room for room in rooms if (ROOT / f"{room}.py").is_file() and not room.startswith("_")]
    packages = [room for room in rooms if (ROOT / room / "__init__.py").is_file()]
    assert len(modules) <= MOST_MODULES, sorted(modules)
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    assert len(chain := longest_chain(rooms)) <= LONGEST_CHAIN, " imports ".join(chain)


def test_files_that_a_choice_enters() -> None:
    """In a process of its own, where nothing was asked before, and with the check at first use, as users have it."""
    command = [sys.executable, "-m", "tests.project.files_entered"]
    env = {name: value for name, value in os.environ.items() if name != "MOEREG_ADMISSION"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent, env=env)
    found = {line.partition(": ")[0]: int(line.split()[1]) for line in ran.stdout.splitlines() if not line[0].isspace()}
    assert found.keys() == MOST_FILES.keys()
    assert all(found[name] <= most for name, most in MOST_FILES.items()), ran.stdout
