"""8-bit weights and activations in the batched format: interpreted on a CPU, compiled where there is a CUDA device.

The layer is compared with `moereg.reference`: a row of the batched format is a token with one choice.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moereg.backends.triton_moe import TritonQuantizedBatchedExperts, TritonQuantizedExperts
from moereg.dispatch import explain_backends
from moereg.experts import ExpertInputs
from moereg.facts import fact_reasons
from moereg.kernels.quantized.operands import QuantizedRows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.rows.block_map import BlockMap
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme, get_scheme
from moereg.quantize import quantize_activations
from moereg.reference import reference_experts, relative_error
from moereg.testing.faults import plant_faults
from moereg.testing.inputs import make_weights
from moereg.testing.interpreter import patch_interpreter
from moereg.tolerances import tolerance
from moereg.weights import ExpertWeights
from tests.backends.test_triton_batched import make_plan
from tests.backends.test_triton_quantized import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    NAMED,
    OTHERS,
    SM90,
    assert_same,
    bits,
    interesting_rows,
    make_problem,
    make_rows,
    quantizer,
    random,
    row_format,
    select,
)
from tests.kernels.triton_cases import Guarded, on_gpu

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it, and NaN too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

each_scheme = pytest.mark.parametrize("scheme", [*map(get_scheme, NAMED), *OTHERS], ids=lambda scheme: scheme.name)
each_named = pytest.mark.parametrize("scheme", NAMED)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


def rows_that_count(counts: list[int], max_tokens: int) -> torch.Tensor:
    """[E, max_T]."""
    held = torch.tensor(counts, device=DEVICE).unsqueeze(1)
    return torch.arange(max_tokens, device=DEVICE) < held


def quantize(
    x: torch.Tensor, scheme: QuantScheme, plan: BlockMap, static_scale: torch.Tensor | None = None
) -> QuantizedRows:
    """By the kernel, the rows of the plan."""
    fmt = row_format(scheme)
    out = make_rows(fmt, len(x), x.shape[1])
    quantize_batched_rows(out, x, quantizer(fmt, static_scale), plan)
    return out


# Rows of three experts with room for 20: more than a tile, none, and one. 12 of the rows that count are interesting.
COUNTS, MAX_TOKENS = [18, 0, 1], 20


@pytest.mark.few
@each_scheme
@pytest.mark.parametrize(("columns", "dtype"), [(384, BF16), (130, FP16), (1500, FP32)])
@pytest.mark.parametrize("other", [math.nan, pytest.param(1e4, marks=pytest.mark.slow)])  # NaN shows what 1e4 does.
def test_codes_and_scales_are_those_of_quantize(
    scheme: QuantScheme, columns: int, dtype: torch.dtype, other: float
) -> None:
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = torch.full((len(valid), columns), other, dtype=dtype, device=DEVICE)
    x[valid] = torch.cat([interesting_rows(columns, dtype), random(7, columns).to(dtype)])
    static = None
    if row_format(scheme).static:
        static = torch.tensor([0.03, 0.04, 0.05], device=DEVICE)
    found = quantize(x, scheme, make_plan(COUNTS, MAX_TOKENS, 16), static_scale=static)
    in_use = select(found, valid)
    if static is None:
        assert_same(in_use, quantize_activations(x[valid], scheme), columns)
    else:
        own = static.repeat_interleave(torch.tensor(COUNTS, device=DEVICE))
        expected = quantize_activations(x[valid], scheme, own.unsqueeze(1))
        assert torch.equal(bits(in_use.q[:, :columns]), bits(expected.q))
        assert torch.equal(in_use.scale[:, 0], own)
    assert (found.q[~valid].view(torch.uint8) == 77).all(), "rows that do not count were written to"
    assert (found.scale[~valid].float() == (77 if scheme.name == "mxfp8" else 0.5)).all()


def test_more_rows_than_programs_are_all_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.kernels.quantized.rows_batched._ROW_PROGRAMS", 3)
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = random(len(valid), 130)
    x[~valid] = math.nan
    scheme = get_scheme("fp8_channel_token")
    found = quantize(x, scheme, make_plan(COUNTS, MAX_TOKENS, 16))
    in_use = select(found, valid)
    assert_same(in_use, quantize_activations(x[valid], scheme), 130)
    assert (found.q[~valid].view(torch.uint8) == 77).all()


def test_one_static_scale_is_for_the_rows_of_all_experts() -> None:
    scheme = get_scheme("fp8_tensor_static")
    x = random(3 * MAX_TOKENS, 130)
    static = torch.tensor([0.03], device=DEVICE)
    found = quantize(x, scheme, make_plan([MAX_TOKENS] * 3, MAX_TOKENS, 16), static_scale=static)
    assert_same(found, quantize_activations(x, scheme, static[0]), 130)


def batched_problem(scheme: str, hidden: int = 130, intermediate: int = 200, **keywords: Any) -> MoEProblem:
    return make_problem(get_scheme(scheme), hidden, intermediate, activation_format="batched", **keywords)


@dataclasses.dataclass
class Batches:
    """A layer with rows by expert; those behind an expert's count are NaN."""

    problem: MoEProblem
    counts: list[int]
    max_tokens: int

    def __post_init__(self) -> None:
        # The conformance kit's router knows tokens, which are the same in either format.
        self.weights = make_weights(self.problem, DEVICE)
        shape = (self.problem.num_local_experts, self.max_tokens, self.problem.hidden_size)
        held = [min(max(count, 0), self.max_tokens) for count in self.counts]
        self.valid = rows_that_count(held, self.max_tokens)
        self.experts = torch.nonzero(self.valid)[:, 0]
        self.hidden_states = random(*shape).to(self.problem.torch_dtype)
        self.hidden_states[~self.valid] = math.nan

    def run(self, weights: ExpertWeights | None = None, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """[rows that count, H], on poisoned buffers; checks that nothing is written around them or to an input."""
        problem = self.problem
        layer = TritonQuantizedBatchedExperts(problem, SM90)
        assert fact_reasons(layer.facts, problem) == []
        x = self.hidden_states if hidden_states is None else hidden_states
        counts = torch.tensor(self.counts, dtype=torch.int32, device=DEVICE)
        before = bits(x.float()).clone()
        none = torch.empty(0, problem.top_k, device=DEVICE)
        inputs = ExpertInputs(x, none, none.int(), expert_num_tokens=counts)
        out = Guarded(*x.shape, dtype=problem.torch_dtype)
        shapes = layer.workspace_shapes(problem, self.max_tokens)
        workspaces = [Guarded(*shape, dtype=problem.torch_dtype) for shape in shapes]
        permuted = layer.permute_weights(self.weights if weights is None else weights, problem)
        layer.apply(out.tensor, inputs, permuted, *(workspace.tensor for workspace in workspaces))
        for guarded in (out, *workspaces):
            guarded.check()
        assert torch.equal(bits(x.float()), before)
        assert counts.tolist() == self.counts
        # Any row of an expert with rows may have been written, but none of an expert without.
        assert out.tensor[~self.valid.any(1)].isnan().all(), "a kernel wrote to the rows of another expert"
        return out.tensor[self.valid]

    def reference(self) -> torch.Tensor:
        """[rows that count, H] in fp32."""
        problem = dataclasses.replace(
            self.problem,
            num_experts=self.problem.num_local_experts,
            num_local_experts=self.problem.num_local_experts,
            placement="contiguous",
            top_k=1,
            activation_format="standard",
        )
        x = self.hidden_states[self.valid]
        ones = torch.ones(len(x), 1, device=DEVICE)
        return reference_experts(problem, self.weights, x, ones, self.experts.int().unsqueeze(1))

    def bound(self) -> float:
        """Tolerance for a kernel that differs only in the order of sums."""
        numel = int(self.valid.sum()) * self.problem.hidden_size
        return tolerance(self.problem.quant, self.problem.dtype, numel, rounds_as_reference=True)

    def check(self) -> None:
        found = self.run()
        if len(found):
            error = relative_error(found, self.reference())
            assert error < self.bound(), error


LAYERS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "one_row_at_most": ({}, [1, 0, 1, 1], 1),
    "empty": ({"has_bias": True}, [0, 0, 0, 0], 5),
    "skewed": ({"has_bias": True}, [0, 17, 0, 1], 17),
    "clamped": ({"activation": "silu(limit=0.5)", "dtype": "float16"}, [3, 0, 9, 2], 9),
    "some_local": ({"num_experts": 8, "num_local_experts": 3, "placement": "map"}, [2, 5, 0], 5),
}


# The slow tests have the other layers of all schemes but the first, since the schemes share most of the code.
@pytest.mark.few(most=6)
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        pytest.param(scheme, name, marks=[] if name == "skewed" or scheme == NAMED[0] else [pytest.mark.slow])
        for scheme in NAMED
        for name in LAYERS
    ],
)
def test_layer_rounds_where_the_reference_does(scheme: str, name: str) -> None:
    keywords, counts, max_tokens = LAYERS[name]
    Batches(batched_problem(scheme, **keywords), counts, max_tokens).check()


@pytest.mark.parametrize("scheme", ["fp8_block128", "int8_w8a8"])
@pytest.mark.parametrize("activation", ["relu2", "swigluoai", "gelu_tanh"])
def test_other_activations(scheme: str, activation: str) -> None:
    Batches(batched_problem(scheme, activation=activation, has_bias=True), [4, 0, 1, 2], 4).check()


@pytest.mark.parametrize(("max_tokens", "counts"), [(40, [40, 1, 0, 33]), (80, [80, 0, 2, 17]), (130, [129, 0, 3, 0])])
@pytest.mark.parametrize(
    "scheme", ["fp8_block128", pytest.param("fp8_tensor_dynamic", marks=pytest.mark.slow)]
)  # The latter takes twice as long, for the launch configurations of the former.
def test_higher_tiles(scheme: str, max_tokens: int, counts: list[int]) -> None:
    """Every number of rows that picks another launch configuration."""
    Batches(batched_problem(scheme, 64, 64), counts, max_tokens).check()


def test_scale_of_all_rows_is_that_of_the_rows_that_count() -> None:
    """The largest number decides every row's bits; a larger one in a row that does not count decides nothing."""
    layer = Batches(batched_problem("fp8_tensor_dynamic"), [3, 0, 1, 2], 4)
    poisoned = layer.run()
    large = layer.hidden_states.nan_to_num(nan=1e4)
    assert torch.equal(layer.run(hidden_states=large), poisoned)
    layer.hidden_states[2, 0, 5] = 60.0
    assert not torch.equal(layer.run()[:3], poisoned[:3])
    layer.check()


# Slow: interpreted, 10 s a scheme; that the bound is close enough, test_faults shows of the reference.
@pytest.mark.slow
@each_named
def test_planted_faults_show(scheme: str) -> None:
    layer = Batches(batched_problem(scheme, has_bias=True), [4, 1, 3, 2], 4)
    reference, bound = layer.reference(), layer.bound()
    for name, faulty in plant_faults(layer.weights):
        # As in the standard format.
        assert relative_error(layer.run(faulty), reference) > (2 if scheme == "nvfp4" else 3) * bound, name


def test_one_static_scale_for_all_experts() -> None:
    layer = Batches(batched_problem("fp8_tensor_static"), [3, 0, 1, 2], 4)
    shared = {"a13_scale": torch.tensor(0.02, device=DEVICE), "a2_scale": torch.tensor(0.03, device=DEVICE)}
    layer.weights = dataclasses.replace(layer.weights, **shared)
    layer.check()


@pytest.mark.parametrize("counts", [[-5, 9, 3, 2], [2**31 - 1, -(2**31), 0, 2]])
def test_counts_out_of_range_are_clamped(counts: list[int]) -> None:
    Batches(batched_problem("fp8_channel_token"), counts, 4).check()


@pytest.mark.parametrize("scheme", [*NAMED])
def test_workspaces_grow_with_tokens(scheme: str) -> None:
    problem = batched_problem(scheme, num_experts=64, top_k=8)
    layer = TritonQuantizedBatchedExperts(problem, SM90)
    sizes = [layer.workspace_shapes(problem, max_tokens) for max_tokens in range(1, 3000, 7)]
    for index in (0, 1):
        numels = [math.prod(shapes[index]) for shapes in sizes]
        assert numels == sorted(numels)


def test_batched_format_takes_all_that_the_standard_one_does() -> None:
    standard, batched = TritonQuantizedExperts.facts, TritonQuantizedBatchedExperts.facts
    assert (standard.activation_formats, batched.activation_formats) == ({"standard"}, {"batched"})
    assert dataclasses.replace(standard, activation_formats=frozenset({"batched"})) == batched
    assert TritonQuantizedBatchedExperts.layouts == TritonQuantizedExperts.layouts


@pytest.mark.parametrize("platform", ["cuda:sm80", "cuda:sm89", "cuda:sm90", "cuda:sm100", "rocm:gfx942"])
@each_named
def test_cells_are_those_of_the_standard_format(scheme: str, platform: str) -> None:
    decided = []
    for activation_format in ("standard", "batched"):
        problem = dataclasses.replace(batched_problem(scheme), activation_format=activation_format)
        own = {"standard": "TritonQuantizedExperts", "batched": "TritonQuantizedBatchedExperts"}[activation_format]
        decisions = explain_backends(problem, platform, require="triton").decisions
        decided.append([(d.accepted, d.cell.priority, d.tier) for d in decisions if d.cell and d.experts == own])
    assert decided[0] == decided[1] != []


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["uneven", "one_expert", "full"])
@pytest.mark.parametrize("max_tokens", [1, 64, 700])
@each_named
def test_layer_large(scheme: str, max_tokens: int, kind: str) -> None:
    counts = {
        "uneven": [max_tokens * (expert % 5) // 4 for expert in range(32)],
        "one_expert": [0] * 7 + [max_tokens] + [0] * 24,
        "full": [max_tokens] * 32,
    }[kind]
    problem = batched_problem(scheme, 2048, 768, num_experts=32, top_k=4)
    layer = Batches(problem, counts, max_tokens)
    layer.check()
    assert torch.equal(layer.run(), layer.run())
