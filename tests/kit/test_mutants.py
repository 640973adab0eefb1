"""The tables of mutants fit the tree, and the script that plants them tells caught from survived."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, load_tables
from tests.mutants.run import BROKEN, CAUGHT, NOT_APPLICABLE, SURVIVED, TIMEOUT, copy_tree, judge_one

ROOT = Path(__file__).parents[2]
TABLES = {**load_tables(), **load_tables(on_gpu=True)}
MUTANTS = [(area, mutant) for area, mutants in TABLES.items() for mutant in mutants]


def test_every_area_has_mutants() -> None:
    assert all(TABLES.values())
    assert sum(area != "gpu" for area, _ in MUTANTS) >= 120
    for area, mutants in TABLES.items():
        names = [mutant.name for mutant in mutants]
        assert len(set(names)) == len(names), area


@functools.cache
def _functions(path: str) -> frozenset[str]:
    """Names of the tests of a file; those of a class begin with its name, as in node ids."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {
        f"{each.name}::{node.name}" for each in classes for node in each.body if isinstance(node, ast.FunctionDef)
    }
    return frozenset(functions | methods)


@pytest.mark.parametrize("area", sorted(TABLES))
def test_every_mutant_can_be_planted_and_names_tests_that_are_there(area: str) -> None:
    """If you move a text or a test, move it here too, so that `make mutants` stays current."""
    wrong = []
    for mutant in TABLES[area]:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        try:
            planted = mutant.planted_in(text)
        except ValueError as error:
            wrong.append(str(error))
            continue
        assert planted != text, mutant.name
        if mutant.file.endswith(".py"):
            ast.parse(planted)
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or (name and name.partition("[")[0] not in _functions(path)):
                wrong.append(f"{mutant.name!r} names {test}, which is not there")
    assert not wrong, f"correct tests/mutants/areas/{area}.txt: " + "; ".join(wrong)


SUM = "def add(a, b):\n    return a + b\n"
TEST = "import time\nfrom numbers_ import add\n\ndef test_add():\n    assert add(2, 3) == 5\n    {more}\n"


@pytest.mark.parametrize(
    ("outcome", "old", "new", "test", "more"),
    [
        (CAUGHT, "a + b", "a - b", "test_add", ""),
        (SURVIVED, "a + b", "b + a", "test_add", ""),
        (TIMEOUT, "a + b", "b + a", "test_add", "time.sleep(100)"),
        (NOT_APPLICABLE, "a * b", "a - b", "test_add", ""),
        (NOT_APPLICABLE, "a", "c", "test_add", ""),
        # A test that does not exist fails in a way that says nothing about the mutant.
        (BROKEN, "a + b", "a - b", "test_sub", ""),
    ],
    ids=["caught", "survived", "timeout", "not found", "found often", "no such test"],
)
def test_what_becomes_of_a_mutant(tmp_path: Path, outcome: str, old: str, new: str, test: str, more: str) -> None:
    tree = tmp_path / "tree"
    (tree / ".git").mkdir(parents=True)
    (tree / "numbers_.py").write_text(SUM)
    (tree / "test_numbers_.py").write_text(TEST.format(more=more))
    copy = copy_tree(tree, tmp_path / "copy")
    assert not (copy / ".git").exists()
    mutant = Mutant("a fault", "numbers_.py", old, new, (f"test_numbers_.py::{test}",))
    verdict = judge_one(copy, mutant, limit_s=5.0 if outcome == TIMEOUT else 60.0)
    assert verdict.outcome == outcome, verdict
    if outcome == CAUGHT:
        assert verdict.detail == "test_numbers_.py::test_add"
    assert (copy / "numbers_.py").read_text() == (tree / "numbers_.py").read_text() == SUM
