"""How many rooms the package has, how long a chain of imports between them is, and how many files a choice enters.

`python -m tests.project.test_rooms` prints the files.
"""

from __future__ import annotations

import ast
import collections
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import moereg
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

ROOT: Final = Path(moereg.__file__).parent
# `spec/` holds values that everything reads, and what a backend does with its weights is the backend's.
NOT_COUNTED: Final = ("spec", "backends", "kernels")
MOST_MODULES, MOST_PACKAGES, LONGEST_CHAIN = 8, 18, 12
MOST_FILES = {"select_backend": 14, "make_kernel": 23}


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


def files_entered(call: Callable[[], Any]) -> list[str]:
    """The modules whose functions the second of two calls enters: discovery, imports and caches do not count."""
    entered: dict[str, None] = {}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            entered.setdefault(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    call()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path for path in entered if path.partition("/")[0] not in NOT_COUNTED]


def measure() -> dict[str, list[str]]:
    """The files of `select_backend`, and of `make_kernel` with its selection, of a small problem."""
    problem = MoEProblem(num_experts=4, hidden_size=32, intermediate_size=32, top_k=2)
    weights = ExpertWeights(
        w13=torch.randn(4, 64, 32, dtype=torch.bfloat16), w2=torch.randn(4, 32, 32, dtype=torch.bfloat16)
    )
    selection = moereg.select_backend(problem)
    return {
        "select_backend": files_entered(lambda: moereg.select_backend(problem)),
        "make_kernel": files_entered(lambda: moereg.make_kernel(problem, weights, selection)),
    }


def test_files_that_a_choice_enters() -> None:
    """In a process of its own, where nothing was asked before, and with the check at first use, as users have it."""
    command = [sys.executable, "-m", "tests.project.test_rooms"]
    env = {name: value for name, value in os.environ.items() if name != "MOEREG_ADMISSION"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent, env=env)
    found = json.loads(ran.stdout)
    assert found.keys() == MOST_FILES.keys()
    assert all(len(found[name]) <= most for name, most in MOST_FILES.items()), ran.stdout


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
