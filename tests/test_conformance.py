"""Every registered cell against the reference; the cases come from the registry alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from moereg.discovery import load_backends
from moereg.dispatch import Request, evaluate
from moereg.quant import QuantScheme
from moereg.reference import reference_experts, relative_error
from moereg.registry import BackendCell
from moereg.testing.faults import plant_faults
from moereg.testing.interpreter import patch_interpreter
from moereg.testing.tolerances import tolerance
from moereg.workspace import WORKSPACES
from tests import conformance
from tests.conformance import Case, Inputs

DEVICE = conformance.test_device()
pytestmark = pytest.mark.usefixtures("one_thread")
CASES = conformance.registered_cases()
CELLS = [cell for cell in load_backends().cells if conformance.runnable_platform(cell) is not None]
CELLS_THAT_ROUND = [cell for cell in CELLS if any(scheme.activation is not None for scheme in cell.schemes)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.name}-{cell.class_name}-{cell.rules[0]}")


@pytest.fixture(autouse=True)
def _patched_interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


def _reference(
    case: Case, inputs: Inputs, kernel_map: torch.Tensor | None, computes: QuantScheme | None = None
) -> torch.Tensor:
    return reference_experts(
        case.problem,
        conformance.make_weights(case.problem, DEVICE),
        inputs.hidden_states,
        inputs.topk_weights,
        inputs.topk_ids,
        expert_map=kernel_map,
        computes=computes or case.computes,
    )


def _bound(case: Case, num_tokens: int) -> float:
    return tolerance(case.computes, case.problem.dtype, num_tokens * case.problem.hidden_size)


def _first_case(cell: BackendCell, wanted: Callable[[Case], bool] = lambda case: True) -> Case | None:
    return next((case for case in CASES if case.cell == cell and wanted(case)), None)


@each_case
def test_numbers_within_the_claim(case: Case) -> None:
    kernel = conformance.build(case, DEVICE)
    for num_tokens, routing in conformance.calls_of(case, DEVICE, is_first=case is _first_case(case.cell)):
        inputs = conformance.make_inputs(case.problem, num_tokens, routing, DEVICE, seed=num_tokens)
        given = inputs.clone()
        WORKSPACES.release()  # The next one is poisoned again.
        out = torch.full_like(inputs.hidden_states, float("nan"))
        returned = kernel(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, out)
        error = relative_error(out, _reference(case, inputs, kernel.expert_map))
        bound = _bound(case, num_tokens)
        assert error <= bound, f"T={num_tokens} {routing}: error {error:.2e}, bound {bound:.0e}"
        assert returned is out
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            assert torch.equal(getattr(inputs, name), getattr(given, name)), f"{name} was written to"


@each_cell
def test_rejects_just_outside_the_claim(cell: BackendCell) -> None:
    platform = conformance.runnable_platform(cell)
    assert platform is not None
    for code, problem in conformance.rejected_problems(cell):
        decision = evaluate(cell, problem, platform, Request(require=(cell.name,)))
        assert code in {reason.code for reason in decision.reasons}, (code, problem, decision.reasons)
        assert all(reason.text[0].islower() for reason in decision.reasons)


@each_cell
def test_planted_faults_are_caught(cell: BackendCell) -> None:
    for scheme in conformance.fault_schemes(cell, DEVICE):
        case = _first_case(cell, lambda case, quant=scheme: case.problem.quant == quant and case.problem.has_bias)
        case = case or _first_case(cell, lambda case, quant=scheme: case.problem.quant == quant)
        assert case is not None, scheme
        weights = conformance.make_weights(case.problem, DEVICE)
        num_tokens = conformance.fault_tokens(case, DEVICE)
        inputs = conformance.make_inputs(case.problem, num_tokens, "uniform", DEVICE)
        truth = _reference(case, inputs, conformance.make_expert_map(case.problem, DEVICE))
        # Bounds of quantised activations are wide, since a kernel may round before the quantiser.
        margin = 10 if case.computes.activation is None else 1.5
        for fault, faulty in plant_faults(weights):
            out = conformance.build(case, DEVICE, faulty)(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
            assert relative_error(out, truth) > margin * _bound(case, num_tokens), (scheme.name, fault)


@pytest.mark.parametrize("cell", CELLS_THAT_ROUND, ids=lambda cell: f"{cell.name}-{cell.class_name}-{cell.rules[0]}")
def test_activations_are_rounded_as_claimed(cell: BackendCell) -> None:
    """The bounds of quantised activations are wide enough for ones kept at 16 bits, so these are ruled out here."""
    for scheme in [scheme for scheme in cell.schemes if scheme.activation is not None]:
        case = _first_case(cell, lambda case, quant=scheme: case.problem.quant == quant)
        assert case is not None, scheme
        inputs = conformance.make_inputs(case.problem, 17, "uniform", DEVICE)
        kernel = conformance.build(case, DEVICE)
        out = kernel(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
        kept = dataclasses.replace(scheme, name=f"{scheme.name} with 16-bit activations", activation=None)
        errors = [
            relative_error(out, _reference(case, inputs, kernel.expert_map, computes)) for computes in (scheme, kept)
        ]
        assert errors[0] < errors[1], scheme.name


@each_cell
def test_permute_leaves_the_canonical_weights(cell: BackendCell) -> None:
    case = _first_case(cell)
    assert case is not None
    weights = conformance.make_weights(case.problem, DEVICE)
    given = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    kernel = conformance.build(case, DEVICE, weights)
    for name, tensor in weights.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8))
    assert kernel.weights.layout in cell.experts.layouts


@each_cell
def test_reload_changes_the_result_in_place(cell: BackendCell) -> None:
    case = _first_case(cell)
    assert case is not None
    kernel = conformance.build(case, DEVICE)
    inputs = conformance.make_inputs(case.problem, 17, "uniform", DEVICE)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    before = kernel(*arguments)
    kernel.reload(conformance.make_weights(case.problem, DEVICE, seed=7))
    assert relative_error(kernel(*arguments), before.float()) > 0.1
    kernel.reload(conformance.make_weights(case.problem, DEVICE))
    assert torch.equal(kernel(*arguments), before)


@each_cell
def test_workspaces_grow_with_tokens(cell: BackendCell) -> None:
    case = _first_case(cell)
    assert case is not None
    experts = cell.experts(case.problem, case.platform)
    sizes = [
        [torch.Size(shape).numel() for shape in experts.workspace_shapes(case.problem, num_tokens)]
        for num_tokens in range(1, 700, 7)
    ]
    assert sizes == sorted(sizes)
    assert all(
        small <= large for one, other in itertools.pairwise(sizes) for small, large in zip(one, other, strict=True)
    )


@each_cell
def test_equal_inputs_give_equal_bits_where_claimed(cell: BackendCell) -> None:
    if not cell.facts.deterministic:
        pytest.skip(f"{cell.name} ({cell.class_name}) does not claim it")
    case = _first_case(cell)
    assert case is not None
    kernel = conformance.build(case, DEVICE)
    inputs = conformance.make_inputs(case.problem, 63, "skewed", DEVICE)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    first = kernel(*arguments)
    repeats = 100 if DEVICE.type == "cuda" else 3
    busy = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    filler = torch.randn(2048, 2048, device=DEVICE) if busy else None
    for _ in range(repeats):
        if busy is not None and filler is not None:
            with torch.cuda.stream(busy):
                filler @ filler
        assert torch.equal(kernel(*arguments), first)


@each_cell
def test_compiles_without_a_graph_break(cell: BackendCell) -> None:
    case = _first_case(cell)
    assert case is not None
    kernel = conformance.build(case, DEVICE)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def layer(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return kernel(hidden_states * 2, topk_weights, topk_ids) + 1

    for num_tokens in (17, 5):
        inputs = conformance.make_inputs(case.problem, num_tokens, "uniform", DEVICE)
        eager = kernel(inputs.hidden_states * 2, inputs.topk_weights, inputs.topk_ids) + 1
        assert torch.equal(layer(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids), eager)


@pytest.mark.gpu
@each_cell
def test_graph_replay_equals_eager_where_claimed(cell: BackendCell) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("; ".join(reason.text for reason in _here(cell)) or "needs a CUDA device")
    if not cell.facts.graph_capture:
        pytest.skip(f"{cell.name} ({cell.class_name}) does not claim it")
    case = _first_case(cell)
    assert case is not None
    kernel = conformance.build(case, DEVICE)
    inputs = conformance.make_inputs(case.problem, 63, "uniform", DEVICE)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    kernel(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*arguments)
    for seed in (3, 4):
        fresh = conformance.make_inputs(case.problem, 63, "skewed", DEVICE, seed)
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, kernel(fresh.hidden_states, fresh.topk_weights, fresh.topk_ids))


@pytest.mark.gpu
@each_cell
def test_no_host_synchronisation(cell: BackendCell) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("; ".join(reason.text for reason in _here(cell)) or "needs a CUDA device")
    case = _first_case(cell)
    assert case is not None
    kernel = conformance.build(case, DEVICE)
    inputs = conformance.make_inputs(case.problem, 63, "uniform", DEVICE)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    kernel(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _here(cell: BackendCell) -> tuple[object, ...]:
    platform = conformance.current_platform()
    return evaluate(cell, next(iter(conformance.claimed_problems(cell))), platform, Request()).reasons


def test_every_cell_runs_here_or_says_why_not() -> None:
    for name, reasons in conformance.unverifiable_cells().items():
        assert reasons, f"{name} neither runs here nor says why"
    assert CASES, "no registered cell runs on this machine"


def test_cases_follow_the_registry(isolated_registry: object) -> None:
    from moereg.registry import register_moe_backend
    from tests.fakes import FakeExperts

    register_moe_backend(name="fresh", priority=1, quant_schemes=("unquantized",), platforms=("*",))(FakeExperts)
    fresh = [case for case in conformance.registered_cases() if case.cell.name == "fresh"]
    assert fresh, "a new backend has to be tested with no other edit"
    kernel = conformance.build(fresh[0], DEVICE)
    inputs = conformance.make_inputs(fresh[0].problem, 5, "uniform", DEVICE)
    out = kernel(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    assert relative_error(out, _reference(fresh[0], inputs, kernel.expert_map)) < 1e-2
