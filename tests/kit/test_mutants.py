"""The generator of faults makes the faults that it says, and the script that plants them tells caught from survived."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.mutants.generate import faults_in
from tests.mutants.mutant import ROOT, read_table

OF_EXPRESSIONS = {
    "a and b and c": {"(b and c)", "(a and c)", "(a and b)"},
    "a or b": {"(a)", "(b)"},
    "a < b": {"(a <= b)"},
    "a > 1": {"(a >= 1)", "(a > 2)"},
    "not a <= b": {"(a > b)", "not (a < b)"},
    "a in ('x', 'y')": {"a in ('y',)", "a in ('x',)"},
    "any(f(x) for x in xs)": {"(all((f(x) for x in xs)))", "any(f(x) for x in (list(xs)[:1]))"},
    "itertools.combinations(xs, 2)": {"(itertools.pairwise(xs))"},
    "text.strip()": {"(text)"},
    "(*xs, 1)": {"(*(list(xs)[:1]), 1)"},
    "xs[:n]": {"(xs)"},
    "frozenset({1, 2})": {"frozenset(({2}))", "frozenset(({1}))"},
    "a if b else c": {"a if (False) else c"},
    "a * b": {"(a)"},
    "'a' + b": set(),
    "f'{a and b}'": set(),
    "f(1, b=(2, 3))": set(),
}


@pytest.mark.parametrize("source", OF_EXPRESSIONS)
def test_faults_of_an_expression(source: str) -> None:
    expected = {text.replace("('y',)", "(('y',))").replace("('x',)", "(('x',))") for text in OF_EXPRESSIONS[source]}
    assert {fault.planted_in(source) for fault in faults_in("module.py", source)} == expected


def test_faults_of_statements() -> None:
    source = """
def f(xs: tuple[int, str] | None, y: int = a or b) -> "c or d":
    é = 1
    with lock, torch.no_grad(): run()
    for x in xs:
        if x: return
    assert x or y
    raise ValueError(x or y)
if TYPE_CHECKING:
    z = a or b
"""
    planted = [(fault.line, fault.old, fault.new) for fault in faults_in("module.py", source)]
    nothing = "(__import__('contextlib').nullcontext())"
    assert planted == [
        (2, "a or b", "(b)"),
        (2, "a or b", "(a)"),
        (4, "lock", nothing),
        (4, "torch.no_grad()", nothing),
        (5, "xs", "(list(xs)[:1])"),
        (6, "x", "(False)"),
    ]


@functools.cache
def _functions(path: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def test_faults_that_only_a_gpu_shows_can_be_planted_and_name_tests_that_are_there() -> None:
    """If you move a text or a test, move it in the table too."""
    mutants = read_table(ROOT / "tests" / "mutants" / "gpu.txt")
    assert mutants
    for mutant in mutants:
        planted = mutant.planted_in((ROOT / mutant.file).read_text(encoding="utf-8"))
        if mutant.file.endswith(".py"):
            ast.parse(planted)
        for test in mutant.tests:
            path, _, name = test.partition("::")
            function = name.partition("[")[0].rpartition("::")[2]
            assert not name or function in _functions(path), f"{mutant.name!r} names {test}"
        assert mutant.tests, mutant.name
