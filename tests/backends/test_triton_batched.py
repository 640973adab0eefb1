"""The batched format of the Triton backend against torch: interpreted on a CPU, compiled where there is a CUDA device.

Tolerances as in `triton_cases`; two roundings, of the intermediate and of the output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moereg.backends.triton_moe import TritonBatchedExperts, TritonExperts
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.facts import fact_reasons
from moereg.kernels.rows.block_map import BlockMap, batch_workspace_numel, plan_batches
from moereg.kernels.sizes import SPREAD_HEAVY
from moereg.problem import MoEProblem
from moereg.testing.interpreter import patch_interpreter
from moereg.weights import PermutedWeights
from tests.kernels.references import block_map_reference
from tests.kernels.triton_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    SM90,
    Guarded,
    bound,
    make_problem,
    make_weights,
    on_gpu,
    random,
    relative_error,
)

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE == "cpu":
        patch_interpreter()


def make_plan(
    counts: list[int], max_tokens: int, block_m: int, slack: int = 0, tall: int = 0, heavy_first: int = False
) -> BlockMap:
    """`plan_batches` in a workspace of garbage, with a guard behind it."""
    needed = batch_workspace_numel(len(counts), max_tokens, block_m)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    expert_num_tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    plan = plan_batches(
        expert_num_tokens, max_tokens, block_m, workspace[:needed], slack, tall=tall, heavy_first=heavy_first
    )
    assert (workspace[needed:] == -(2**30)).all(), "plan_batches wrote behind its workspace"
    assert expert_num_tokens.tolist() == counts
    return plan


def tiles(plan: BlockMap) -> list[tuple[int, int, int]]:
    """(expert, first row, end of the expert's rows) of the tiles in use."""
    used = int(plan.num_blocks)
    assert plan.tile_counters.tolist() == [0, 0]
    columns = (plan.block_expert[:used], plan.block_row[:used], plan.block_end[:used])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plan_covers_every_valid_row_once(data: st.DataObject) -> None:
    max_tokens = data.draw(st.integers(1, 200), "max_tokens")
    block_m = data.draw(st.sampled_from([16, 32, 64]), "block_m")
    slack, tall = data.draw(st.sampled_from([(0, 0), (8, 0), (32, 0), (0, 64), (0, 128)]), "slack and tall")
    assume(tall == 0 or tall > block_m)
    # Counts beyond the room for an expert are wrong, and must not lead out of its rows.
    count = st.integers(-3, max_tokens + 3) | st.sampled_from([0, max_tokens, -(2**31), 2**31 - 1])
    counts = data.draw(st.lists(count, min_size=1, max_size=40), "counts")
    heavy_first = tall == 0 and data.draw(st.sampled_from([False, True, SPREAD_HEAVY]), "heavy_first")
    plan = make_plan(counts, max_tokens, block_m, slack, tall, heavy_first)
    found = tiles(plan)
    assert len(found) <= plan.max_blocks
    rows = []
    held = [min(max(count, 0), max_tokens) for count in counts]
    num_tall = int(plan.num_tall) if tall else 0
    for place, (expert, row, end) in enumerate(found):
        last = expert not in {other for other, _, _ in found[place + 1 :]}
        height = tall if place < num_tall else block_m
        assert (place < num_tall) == (tall > 0 and held[expert] > block_m)
        assert end - row <= height + slack or not last
        rows += [(expert, r) for r in range(row, end if last else row + height)]
    order = list(range(len(held)))
    if heavy_first == SPREAD_HEAVY:
        rows.sort()
    elif heavy_first:
        # More than one tile, then one, then half of one at most.
        order.sort(key=lambda e: 0 if held[e] > block_m + slack else 1 if held[e] > block_m / 2 else 2)
    assert (rows if tall == 0 else sorted(rows)) == [(e, e * max_tokens + i) for e in order for i in range(held[e])]
    offsets = torch.arange(len(counts)) * max_tokens
    assert found == tiles(block_map_reference(torch.tensor(held), offsets, block_m, slack, tall, heavy_first))


def test_plan_workspace_grows_with_tokens() -> None:
    sizes = [batch_workspace_numel(60, max_tokens, 16) for max_tokens in range(1, 2000)]
    assert sizes == sorted(sizes)
    assert batch_workspace_numel(60, 100, 128) <= batch_workspace_numel(60, 100, 16)


def spread(kind: str, num_experts: int, max_tokens: int) -> list[int]:
    """Rows of each expert."""
    generator = torch.Generator().manual_seed(num_experts * 10_000 + max_tokens)
    if kind == "empty":
        return [0] * num_experts
    if kind == "full":
        return [max_tokens] * num_experts
    if kind == "alternating":
        return [max_tokens * (1 - expert % 2) for expert in range(num_experts)]
    counts: list[int] = torch.randint(0, max_tokens + 1, (num_experts,), generator=generator).tolist()
    return counts


@dataclasses.dataclass
class Batches:
    """A layer with rows by expert, NaN behind each expert's."""

    problem: MoEProblem
    max_tokens: int
    kind: str = "uneven"

    def __post_init__(self) -> None:
        problem = self.problem
        experts, hidden, dtype = problem.num_local_experts, problem.hidden_size, problem.torch_dtype
        self.weights = make_weights(problem)
        counts = spread(self.kind, experts, self.max_tokens)
        self.counts = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        self.hidden_states = random(experts, self.max_tokens, hidden, dtype=dtype, seed=4)
        self.hidden_states[~self.valid] = math.nan

    @property
    def valid(self) -> torch.Tensor:
        """[E, max_T], which rows count."""
        return torch.arange(self.max_tokens, device=DEVICE) < self.counts[:, None]

    @property
    def inputs(self) -> ExpertInputs:
        # The experts look at no route in this format.
        none = torch.empty(0, self.problem.top_k, device=DEVICE)
        return ExpertInputs(self.hidden_states, none, none.int(), expert_num_tokens=self.counts)

    def permuted(self) -> PermutedWeights:
        return TritonBatchedExperts(self.problem, SM90).permute_weights(self.weights, self.problem)

    def run(self) -> torch.Tensor:
        """Runs the backend on poisoned buffers; checks that nothing around them is written and no input changes."""
        problem = self.problem
        experts = TritonBatchedExperts(problem, SM90)
        assert fact_reasons(experts.facts, problem) == []
        assert experts.unsupported_reasons(problem, SM90) == []
        dtype = problem.torch_dtype
        out = Guarded(problem.num_local_experts, self.max_tokens, problem.hidden_size, dtype=dtype)
        shapes = experts.workspace_shapes(problem, self.max_tokens)
        workspaces = [Guarded(*shape, dtype=dtype) for shape in shapes]
        before = self.hidden_states.clone(), self.counts.clone()
        experts.apply(out.tensor, self.inputs, self.permuted(), *(workspace.tensor for workspace in workspaces))
        for guarded in (out, *workspaces):
            guarded.check()
        assert torch.equal(self.hidden_states[self.valid], before[0][self.valid])
        assert self.hidden_states[~self.valid].isnan().all()
        assert torch.equal(self.counts, before[1])
        # Any row of an expert with rows may have been written, but none of an expert without.
        assert out.tensor[self.counts == 0].isnan().all(), "a kernel wrote to the rows of another expert"
        return out.tensor

    def reference(self) -> torch.Tensor:
        """[valid rows, H] in fp32 from canonical weights, expert by expert."""
        weights, rows = self.weights, []
        for expert, count in enumerate(self.counts.tolist()):
            x = self.hidden_states[expert, :count].float() @ weights.w13[expert].float().T
            if weights.w13_bias is not None:
                x += weights.w13_bias[expert].float()
            y = self.problem.activation(x) @ weights.w2[expert].float().T
            rows.append(y if weights.w2_bias is None else y + weights.w2_bias[expert].float())
        return torch.cat(rows)

    def check(self) -> None:
        """Valid rows against the reference."""
        rows = self.run()[self.valid]
        if rows.numel():
            error = relative_error(rows, self.reference())
            assert error < bound(self.problem.torch_dtype, 2), error


def batched_problem(
    num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, **keywords: Any
) -> MoEProblem:
    return make_problem(
        num_experts, top_k, hidden_size, intermediate_size, dtype, activation_format="batched", **keywords
    )


LAYERS = {
    "one_row_each": (batched_problem(4, 2, 64, 64, BF16), 1, "full"),
    "one_row_at_most": (batched_problem(8, 2, 64, 64, FP16), 1, "alternating"),
    "two_rows": (batched_problem(4, 2, 255, 129, BF16), 2, "uneven"),
    "no_rows": (batched_problem(4, 2, 72, 40, BF16, has_bias=True), 17, "empty"),
    "uneven": (batched_problem(8, 2, 64, 64, BF16), 17, "uneven"),
    "full": (batched_problem(4, 2, 72, 40, BF16), 63, "full"),
    "alternating": (batched_problem(5, 1, 64, 64, FP16), 63, "alternating"),
    "fp32": (batched_problem(8, 3, 130, 88, FP32, has_bias=True, activation="gelu"), 9, "uneven"),
    "fp32_many_rows": (batched_problem(2, 2, 72, 64, FP32), 63, "uneven"),
    "fp16": (batched_problem(8, 3, 72, 40, FP16, activation="gelu_tanh", has_bias=True), 17, "uneven"),
    "swigluoai": (batched_problem(4, 2, 130, 88, BF16, activation="swigluoai", has_bias=True), 17, "uneven"),
    "relu2": (batched_problem(8, 2, 72, 40, BF16, activation="relu2", has_bias=True), 17, "uneven"),
    "silu_limit": (batched_problem(4, 2, 64, 64, FP16, activation="silu(limit=0.5)"), 17, "uneven"),
    "one_expert": (batched_problem(1, 1, 64, 128, BF16), 63, "full"),
    "some_local": (batched_problem(60, 8, 64, 40, BF16, num_local_experts=15, placement="map"), 9, "uneven"),
    "many_experts": (batched_problem(160, 8, 64, 40, BF16), 2, "uneven"),
    "scaled_inputs": (batched_problem(4, 1, 130, 64, BF16, apply_router_weight_on_input=True), 17, "uneven"),
}


@pytest.mark.few(most=10)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    Batches(*LAYERS[name]).check()


@pytest.mark.parametrize("counts", [[-5, 40, 3, 17], [2**31 - 1, -(2**31), 0, 17]])
def test_counts_out_of_range_are_clamped(counts: list[int]) -> None:
    layer = Batches(batched_problem(4, 2, 64, 64, BF16), 17)
    layer.hidden_states = random(4, 17, 64, dtype=BF16)
    layer.counts = torch.tensor([min(max(count, 0), 17) for count in counts], dtype=torch.int32, device=DEVICE)
    layer.hidden_states[~layer.valid] = math.nan
    clamped = layer.run()[layer.valid]
    assert relative_error(clamped, layer.reference()) < bound(BF16, 2)
    valid = layer.valid
    experts = TritonBatchedExperts(layer.problem, SM90)
    inputs = dataclasses.replace(layer.inputs, expert_num_tokens=torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    out = Guarded(4, 17, 64, dtype=BF16)
    workspaces = [
        torch.empty(shape, dtype=BF16, device=DEVICE) for shape in experts.workspace_shapes(layer.problem, 17)
    ]
    experts.apply(out.tensor, inputs, layer.permuted(), *workspaces)
    out.check()
    assert torch.equal(out.tensor[valid], clamped)


def test_rows_that_do_not_count_change_no_bit() -> None:
    layer = Batches(*LAYERS["uneven"])
    poisoned = layer.run()[layer.valid]
    assert torch.equal(layer.run()[layer.valid], poisoned)
    experts = TritonBatchedExperts(layer.problem, SM90)
    inputs = dataclasses.replace(layer.inputs, hidden_states=layer.hidden_states.nan_to_num(nan=3.0))
    out = torch.zeros_like(layer.hidden_states)
    workspaces = [
        torch.zeros(shape, dtype=BF16, device=DEVICE) for shape in experts.workspace_shapes(layer.problem, 17)
    ]
    experts.apply(out, inputs, layer.permuted(), *workspaces)
    assert torch.equal(out[layer.valid], poisoned)


def test_weights_are_those_of_the_standard_format() -> None:
    problem = batched_problem(4, 2, 72, 40, BF16, has_bias=True)
    layer = Batches(problem, 1)
    standard = TritonExperts(dataclasses.replace(problem, activation_format="standard"), SM90)
    assert TritonBatchedExperts.layouts == TritonExperts.layouts
    others = standard.permute_weights(layer.weights, standard.problem)
    permuted = layer.permuted()
    assert permuted.layout == others.layout
    assert permuted.per_expert.keys() == others.per_expert.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in permuted.per_expert.items())


def test_workspaces_grow_with_tokens() -> None:
    problem = batched_problem(64, 8, 64, 40, BF16)
    experts = TritonBatchedExperts(problem, SM90)
    sizes = [experts.workspace_shapes(problem, max_tokens) for max_tokens in range(1, 3000, 7)]
    for index in (0, 1):
        numels = [math.prod(shapes[index]) for shapes in sizes]
        assert numels == sorted(numels)


@pytest.mark.parametrize(
    ("platform", "activation_format", "request_", "backend", "experts"),
    [
        ("cuda:sm90", "batched", {}, "triton", "TritonBatchedExperts"),
        ("cuda:sm90", "standard", {}, "triton", "TritonExperts"),
        ("cuda:sm80", "batched", {}, "triton", "TritonBatchedExperts"),
        ("cuda:sm100", "batched", {"require": "triton"}, "triton", "TritonBatchedExperts"),
        ("rocm:gfx942", "batched", {}, "triton", "TritonBatchedExperts"),
        ("cuda:sm90", "batched", {"require": "torch"}, "torch", "TorchBatchedExperts"),
        ("cuda:sm90", "batched", {"deny": "triton"}, "torch", "TorchBatchedExperts"),
        ("cuda:sm75", "batched", {}, "torch", "TorchBatchedExperts"),
        ("cpu", "batched", {}, "torch", "TorchPackedBatchedExperts"),
    ],
)
def test_selection(platform: str, activation_format: str, request_: dict[str, Any], backend: str, experts: str) -> None:
    problem = MoEProblem(
        num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8, activation_format=activation_format
    )
    selection = select_backend(problem, platform=platform, **request_)
    assert selection.winner is not None
    assert (selection.backend, selection.winner.experts) == (backend, experts)
    other = {"batched": "TritonExperts", "standard": "TritonBatchedExperts"}[activation_format]
    (rejected,) = (decision for decision in selection.decisions if decision.experts == other)
    assert "activation_format" in {reason.code for reason in rejected.reasons}


def test_batched_format_asks_for_all_that_the_standard_one_takes() -> None:
    standard, batched = TritonExperts.facts, TritonBatchedExperts.facts
    assert (standard.activation_formats, batched.activation_formats) == ({"standard"}, {"batched"})
    assert dataclasses.replace(standard, activation_formats=frozenset({"batched"})) == batched


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["uneven", "alternating", "full"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "max_tokens", "hidden_size", "intermediate_size", "dtype", "keywords"),
    [
        # On Hopper the Gluon kernels run 16-bit layers from over 40 of max_T * K / E on.
        (128, 8, 1, 2048, 768, BF16, {}),
        (128, 8, 64, 2048, 768, BF16, {}),
        (128, 8, 700, 2048, 768, BF16, {}),
        (64, 8, 400, 2048, 1408, BF16, {}),
        (32, 4, 517, 2880, 2880, BF16, {"activation": "swigluoai", "has_bias": True}),
        (16, 4, 1001, 520, 320, FP16, {"activation": "gelu_tanh"}),
        (8, 8, 65, 256, 128, BF16, {"activation": "gelu"}),
        (8, 2, 2049, 1024, 1856, BF16, {"activation": "relu2"}),
        (16, 2, 700, 511, 511, BF16, {"has_bias": True}),
        (16, 2, 333, 512, 704, FP32, {"has_bias": True}),
        (64, 8, 511, 1024, 511, BF16, {"num_local_experts": 16, "placement": "map"}),
    ],
)
def test_layer_large(
    num_experts: int,
    top_k: int,
    max_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
    kind: str,
) -> None:
    problem = batched_problem(num_experts, top_k, hidden_size, intermediate_size, dtype, **keywords)
    layer = Batches(problem, max_tokens, kind)
    layer.check()
    assert torch.equal(layer.run()[layer.valid], layer.run()[layer.valid])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("max_tokens", [24, 300])
def test_layer_replays_in_a_graph_without_synchronizing(max_tokens: int) -> None:
    problem = batched_problem(16, 4, 256, 128, BF16)
    layer = Batches(problem, max_tokens)
    experts, permuted = TritonBatchedExperts(problem, SM90), layer.permuted()
    out = torch.empty(16, max_tokens, 256, dtype=BF16, device=DEVICE)
    shapes = experts.workspace_shapes(problem, max_tokens)
    workspaces = [torch.empty(shape, dtype=BF16, device=DEVICE) for shape in shapes]
    inputs = layer.inputs
    experts.apply(out, inputs, permuted, *workspaces)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts.apply(out, inputs, permuted, *workspaces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for seed in (5, 6):
        # Same storage, other contents: the graph must follow the counts, which only the device knows.
        layer.counts.copy_(layer.counts.roll(seed))
        layer.hidden_states.copy_(random(16, max_tokens, 256, dtype=BF16, seed=seed))
        layer.hidden_states[~layer.valid] = math.nan
        out.fill_(math.nan)
        graph.replay()
        assert relative_error(out[layer.valid], layer.reference()) < bound(BF16, 2)
