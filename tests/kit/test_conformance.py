"""Every promise of every registered cell that runs here; the checks come from the registry alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moereg.registry import BackendCell
from moereg.selection.loader import list_backends
from moereg.spec.problem import MoEProblem
from moereg.testing import cases, checks, gradients
from moereg.testing.check import CHECK_KINDS, Check
from moereg.testing.suite import list_suite
from tests.support.kit import runnable_cells

pytestmark = pytest.mark.usefixtures("one_thread")
SUITES = {name: list_suite(name) for name in list_backends()}
CELLS = runnable_cells()


def kinds_of(cell: BackendCell, check: Check) -> tuple[object, object]:
    """Kinds of interpreted checks: one of each of the first runs in `make test`, one of each of the second at all.

    `moereg verify` and the tests on a GPU run the rest, and all faults: test_faults.py plants those on the reference.
    """
    name, is_batched = cell.class_name, cell.experts.output_form == "per_expert"
    match check.kind:
        case "numbers" | "gradients":
            problem = MoEProblem.from_dict(json.loads(check.argument)["problem"])
            if check.kind == "gradients":
                return (name, bool(problem.adapter_rank)), check
            # Every codec has tests of its own, and a batched class has the kernels of the standard one.
            if problem.quant.weight is None:
                return name if is_batched else (name, problem.dtype, problem.has_bias), check
            is_first = problem.quant == cell.schemes[0] and not is_batched
            first, computes = (name, problem.has_bias) if is_first else name, cell.scheme_for(problem.quant)
            if is_batched or (fmt := computes.weight) is None:
                return first, name
            codec = fmt.dtype, fmt.scale_dtype, fmt.symmetric, computes.activation
            return first, (name, codec, problem.hidden_size % 2)
        case "faults":
            return None, None
        case "rounding":
            return (None, None) if is_batched else (name, name)
        case "reload":
            return name, name
        case "compile":
            form = cell.experts.output_form  # What is traced is the call of one operator, the same for all cells.
            return form, form
    return check, check


def promises() -> list[Any]:
    """A parameter for each check of each cell that runs here."""
    found: list[Any] = []
    seen: set[object] = {(level, kind, None) for level in ("first", "rest") for kind in CHECK_KINDS}
    for suite in SUITES.values():
        names = {name: name.find() for name in suite.running}
        for check in suite.checks:
            # Choosing is asked of in a process that has imported nothing yet: test_verify.py.
            if check.cell not in names or check.kind == "deciding":
                continue
            first, rest = kinds_of(names[check.cell], check)
            marks = [pytest.mark.gpu] if check.kind in ("graph", "synchronization") else []
            if check.cell in suite.report.imitated:
                keys = ("first", check.kind, first), ("rest", check.kind, rest)
                if seen.issuperset(keys):
                    continue
                marks += [pytest.mark.slow] if keys[0] in seen else []
                seen.update(keys)
            found.append(pytest.param(check, marks=marks, id=check.id))
    return found


@pytest.mark.parametrize("check", promises())
def test_a_promise_is_kept(check: Check) -> None:
    check.run()


def test_every_cell_runs_here_or_says_why_not() -> None:
    for suite in SUITES.values():
        for cell, reasons in suite.report.idle.items():
            assert reasons, f"{cell} neither runs here nor says why"
    assert any(suite.running for suite in SUITES.values()), "no registered cell runs on this machine"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.name}-{cell.class_name}-{cell.rules[0]}")
def test_predicates_of_built_in_cells_refuse_nothing_that_facts_claim(cell: BackendCell) -> None:
    platform = cases.runnable_platform(cell)
    assert cases.accepted_problems(cell, platform) == list(dict.fromkeys(cases.claimed_problems(cell)))


def test_verifying_runs_every_check_of_the_kit() -> None:
    listed = {check.kind for check in SUITES["torch"].checks} | {"graph", "synchronization", "drawn"}
    assert listed == set(CHECK_KINDS)
    tested = {name.removeprefix("check_") for name in (*vars(checks), *vars(gradients)) if name.startswith("check_")}
    # Of the names that differ, a layer and a case are what is drawn; a capture is part of several checks.
    assert len(tested - {"case", "layer", "drawn_gradients", "capture"}) == len(CHECK_KINDS) - len({"drawn"})
