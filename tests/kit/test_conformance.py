"""Every registered cell against the reference; the cases come from the registry alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from moereg.discovery import current_platform
from moereg.dispatch import Request, evaluate
from moereg.quant import QuantScheme
from moereg.registry import BackendCell
from moereg.testing import cases, checks, listing, problems
from moereg.testing.cases import Case
from moereg.testing.check import KINDS
from moereg.testing.interpreter import patch_interpreter

DEVICE = cases.default_device()
pytestmark = pytest.mark.usefixtures("one_thread")
CASES = cases.registered_cases()
CELLS = cases.runnable_cells()


def name_of(cell: BackendCell) -> str:
    return f"{cell.name}-{cell.class_name}-{cell.rules[0]}"


_T = TypeVar("_T", BackendCell, Case)


def quickly(items: Iterable[_T], kind: Callable[[_T], object]) -> list[Any]:
    """Parameters of which the slow tests get all but the first of a kind, where kernels are interpreted."""
    seen, found = set(), []
    for item in items:
        imitated = item.is_imitated if isinstance(item, Case) else cases.is_imitated(item)
        is_slow = imitated and kind(item) in seen
        if imitated:
            seen.add(kind(item))
        found.append(pytest.param(item, marks=pytest.mark.slow) if is_slow else item)
    return found


def one_of_a_class() -> list[BackendCell]:
    """All cells, but where kernels are interpreted the first of each class."""
    firsts = {cell.class_name: cell for cell in reversed(CELLS)}
    return [cell for cell in CELLS if not cases.is_imitated(cell) or firsts[cell.class_name] is cell]


def is_run_with_all_calls(case: Case) -> bool:
    """The first of a class in the standard format; the batched one shares its kernels, and drawn layers have more."""
    first = next(other for other in CASES if other.cell.class_name == case.cell.class_name)
    return case == first and case.cell.experts.output_form != "per_expert"


def kind_of_case(case: Case) -> object:
    """Cases of which one is enough: of quantized weights sizes and facts, which are drawn too, and schemes alike.

    And all schemes but the first of a batched class, which has its codecs from the standard one.
    """
    name, problem = case.cell.class_name, case.problem
    if problem.quant == case.cell.schemes[0]:
        return case if problem.quant.weight is None else (name, problem.has_bias)
    if case.cell.experts.output_form == "per_expert" or problem.hidden_size % 2:
        return name
    fmt, activation = case.computes.weight, case.computes.activation
    return (name, fmt and (fmt.dtype, fmt.scale_dtype, fmt.symmetric), activation)


def each_scheme(
    wanted: Callable[[QuantScheme], bool], schemes: Callable[[BackendCell], list[QuantScheme]], has_quick: bool = True
) -> Any:
    """Parametrizes with cells and schemes, of which one of an interpreted class in the standard format may be quick."""
    seen, found = set(), []
    for cell in CELLS:
        for scheme in filter(wanted, schemes(cell)):
            is_batched = cell.experts.output_form == "per_expert"
            is_slow = cases.is_imitated(cell) and (is_batched or cell.class_name in seen or not has_quick)
            seen.add(cell.class_name)
            marks = [pytest.mark.slow] if is_slow else []
            found.append(pytest.param(cell, scheme, marks=marks, id=f"{name_of(cell)}-{scheme.name}"))
    return pytest.mark.parametrize(("cell", "scheme"), found)


each_cell = pytest.mark.parametrize("cell", CELLS, ids=name_of)


@pytest.fixture(autouse=True)
def _patched_interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


@pytest.mark.parametrize("case", quickly(CASES, kind_of_case), ids=lambda case: case.id)
def test_numbers_within_the_claim(case: Case) -> None:
    checks.check_numbers(case, is_run_with_all_calls(case))


@each_cell
def test_rejects_just_outside_the_claim(cell: BackendCell) -> None:
    checks.check_rejections(cell)


# test_faults.py plants every fault on the reference; numbers of interpreted kernels are compared above.
@each_scheme(lambda scheme: True, cases.fault_schemes, has_quick=False)
def test_planted_faults_are_caught(cell: BackendCell, scheme: QuantScheme) -> None:
    checks.check_faults_are_caught(cell, scheme)


@each_scheme(lambda scheme: scheme.activation is not None, lambda cell: list(cell.schemes))
def test_activations_are_rounded_as_claimed(cell: BackendCell, scheme: QuantScheme) -> None:
    checks.check_activations_are_rounded(cell, scheme)


@each_cell
def test_permute_leaves_the_canonical_weights(cell: BackendCell) -> None:
    checks.check_permute(cell)


@pytest.mark.parametrize("cell", quickly(CELLS, lambda cell: cell.class_name), ids=name_of)
def test_reload_changes_the_result_in_place(cell: BackendCell) -> None:
    checks.check_reload(cell)


@each_cell
def test_workspaces_grow_with_tokens(cell: BackendCell) -> None:
    checks.check_workspaces_grow(cell)


@each_cell
def test_equal_inputs_give_equal_bits_where_claimed(cell: BackendCell) -> None:
    if not cell.facts.deterministic:
        pytest.skip(f"{cell.name} ({cell.class_name}) does not claim it")
    if cases.is_imitated(cell):
        pytest.skip("an interpreter runs programs one after another, always in the same order")
    checks.check_equal_bits(cell)


# What is traced is the call of one operator, the same for all cells; interpreted, its run is that of the checks above.
@pytest.mark.parametrize("cell", quickly(one_of_a_class(), lambda cell: cell.experts.output_form), ids=name_of)
def test_compiles_without_a_graph_break(cell: BackendCell) -> None:
    checks.check_compiles(cell)


@pytest.mark.gpu
@each_cell
def test_graph_replay_equals_eager_where_claimed(cell: BackendCell) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("; ".join(reason.text for reason in _here(cell)) or "needs a CUDA device")
    if not cell.facts.graph_capture:
        pytest.skip(f"{cell.name} ({cell.class_name}) does not claim it")
    checks.check_graph_replay(cell)


@pytest.mark.gpu
@each_cell
def test_no_host_synchronization(cell: BackendCell) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("; ".join(reason.text for reason in _here(cell)) or "needs a CUDA device")
    checks.check_no_synchronization(cell)


def _here(cell: BackendCell) -> tuple[object, ...]:
    return evaluate(cell, cases.first_case(cell).problem, current_platform(), Request()).reasons


def test_every_cell_runs_here_or_says_why_not() -> None:
    for name, reasons in cases.unverifiable_cells().items():
        assert reasons, f"{name} neither runs here nor says why"
    assert CASES, "no registered cell runs on this machine"


@each_cell
def test_predicates_of_built_in_cells_refuse_nothing_that_facts_claim(cell: BackendCell) -> None:
    platform = cases.runnable_platform(cell)
    assert platform is not None
    assert problems.accepted_problems(cell, platform) == list(dict.fromkeys(problems.claimed_problems(cell)))


def test_verifying_runs_every_check_of_the_kit() -> None:
    listed = {check.kind for check in listing.list_suite("torch").checks} | {"graph", "synchronization", "drawn"}
    assert listed == set(KINDS)
    tested = {name.removeprefix("check_") for name in checks.__all__ if name.startswith("check_")}
    # Of the names that differ, a layer and a case are what is drawn.
    assert len(tested - {"case", "layer"}) == len(KINDS) - len({"deciding", "drawn"})


def test_cases_follow_the_registry(isolated_registry: object) -> None:
    from moereg.registry import register_moe_backend
    from tests.support.fakes import FakeExperts

    register_moe_backend(name="fresh", priority=1, quant_schemes=("unquantized",), platforms=("*",))(FakeExperts)
    fresh = [case for case in cases.registered_cases() if case.cell.name == "fresh"]
    assert fresh, "a new backend has to be tested with no other edit"
    checks.check_numbers(fresh[0], is_first=True)
