"""The Triton kernels of quantized weights and activations against torch: interpreted on a CPU, or on a CUDA device.

Codes and scales have to be those of `moereg.quantize`, bit for bit. Products are compared with fp64 on restored codes:
the only roundings are those of sums and, of 16-bit outputs, one of the output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import triton

from moereg.backends._loaded import Call
from moereg.backends._triton import quantized, quantized_schedules
from moereg.backends._triton.recorded import Recorded
from moereg.backends._triton.work import gate_up_epilogue
from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.experts import ExpertInputs
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.quantized.operands import CodedOutput, QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.products import quantized_down_gemm, quantized_gate_up_gemm, steps
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.prepare_finalize.wire import CodedWire
from moereg.quantize import (
    Quantized,
    activation_scale,
    dequantize_activations,
    dequantize_weights,
    quantize_activations,
    quantize_weights,
)
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantFormat, QuantScheme, get_scheme
from moereg.testing.cases import default_device
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights
from moereg.weights.layouts import round_up
from moereg.weights.permuted import ExpertWeights
from tests.kernels.triton_cases import make_batched_plan
from tests.support.experts_run import apply_experts
from tests.support.tensors import split_columns

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Values that no list of names holds: kernels read the fields.
E5M2 = QuantFormat("float8_e5m2", (1, WHOLE))
OTHERS = (
    QuantScheme("e5m2_token", E5M2, E5M2),
    QuantScheme("e4m3_g64", None, QuantFormat("float8_e4m3fn", (1, 64))),
    QuantScheme("int8_g128", None, QuantFormat("int8", (1, 128))),
    QuantScheme("int8_tensor", None, QuantFormat("int8", (WHOLE, WHOLE))),
    QuantScheme("int8_static", None, QuantFormat("int8", (WHOLE, WHOLE), static=True)),
)
NAMED = ("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", "int8_w8a8")
# Products with scales of float8_e4m3fn, as the cells say. Before, the interpreter has none with scales at all.
MULTIPLIES_NVFP4 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
if MULTIPLIES_NVFP4 or DEVICE.type != "cpu":
    NAMED += ("mxfp8",)
if MULTIPLIES_NVFP4:
    NAMED += ("nvfp4",)
SCHEMES = (*map(get_scheme, NAMED), *OTHERS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(DEVICE)


def implementation(problem: MoEProblem) -> quantized.Standard:
    found = TritonQuantizedExperts(problem, SM90).implementation
    assert isinstance(found, quantized.Standard)
    return found


def row_format(scheme: QuantScheme) -> RowFormat:
    return quantized.row_format(scheme.activation)


def make_rows(fmt: RowFormat, num_rows: int, columns: int) -> QuantizedRows:
    """Codes and scales that nothing has written yet, 77 and 0.5 everywhere."""
    padded = round_up(columns, CODE_PAD)
    num_bytes = padded // 2 if fmt.dtype == torch.uint8 else padded
    q = torch.full((num_rows, num_bytes), 77, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)
    scale = torch.full((num_rows, fmt.num_groups(padded)), 77 if fmt.e8m0 else 0.5, device=DEVICE)
    own = torch.full((num_rows,), 0.5, device=DEVICE) if fmt.global_scale else None
    return QuantizedRows(q, scale.to(fmt.scale_dtype), fmt.group, own)


def select(rows: QuantizedRows, which: Any) -> QuantizedRows:
    """Some of the rows."""
    own = None if rows.global_scale is None else rows.global_scale[which]
    return QuantizedRows(rows.q[which], rows.scale[which], rows.group, own)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, with one NaN for all."""
    if tensor.dtype == FP32:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
        return tensor.view(torch.int32)
    raw = tensor.view(torch.uint8).int()
    return torch.where(tensor.float().isnan(), 127, raw) if tensor.dtype.is_floating_point else raw


def assert_same(found: QuantizedRows, expected: Quantized, columns: int) -> None:
    """Codes and scales of the same rows, and zeros behind the codes."""
    if expected.scale_2 is not None:
        assert_same_e2m1(found, expected, columns)
        return
    assert torch.equal(bits(found.q[:, :columns]), bits(expected.q))
    scale = expected.scale
    if scale.dtype == torch.float8_e8m0fnu:
        assert torch.equal(found.scale[:, : scale.shape[1]], scale.view(torch.uint8))
    else:
        wanted = scale.expand(len(found.q), 1) if scale.dim() == 0 else scale
        assert torch.equal(bits(found.scale[:, : wanted.shape[1]]), bits(wanted.contiguous()))
    behind = found.q[:, columns:].float()
    assert ((behind == 0) | behind.isnan() & found.scale.float().isnan().any()).all()


def assert_same_e2m1(found: QuantizedRows, expected: Quantized, columns: int) -> None:
    """The same of packed codes, but for codes without a meaning, those of groups whose scale is NaN."""
    scale_2 = expected.scale_2.expand(len(found.q), 1)
    assert torch.equal(bits(found.global_scale), bits(scale_2[:, 0].contiguous()))
    num_groups, num_bytes = expected.scale.shape[1], -(-columns // 2)
    assert torch.equal(bits(found.scale[:, :num_groups]), bits(expected.scale))
    defined = ~(expected.scale.float() * scale_2).isnan().repeat_interleave(8, 1)[:, :num_bytes]
    assert torch.equal(found.q[:, :num_bytes][defined], expected.q[defined])
    assert (found.q[:, num_bytes:] == 0).all()
    # Scales of groups that are only padding are finite, since they are multiplied.
    assert (found.scale[:, num_groups:].float().isfinite() | scale_2.isnan()).all()


def one_route_a_row(num_rows: int) -> RouteIds:
    return RouteIds(torch.zeros(num_rows, 1, dtype=torch.int32, device=DEVICE), None, 1, 1)


def quantizer(fmt: RowFormat, static_scale: torch.Tensor | None = None) -> Quantizer:
    """With room for the largest magnitudes where one scale spans the rows."""
    amax = torch.full((AMAX_PROGRAMS,), 77, dtype=torch.int32, device=DEVICE) if fmt.spans_rows else None
    return Quantizer(fmt, static_scale, amax)


def quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    routes: RouteIds | None = None,
    *,
    static_scale: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> QuantizedRows:
    """By the kernel, all rows."""
    fmt = row_format(scheme)
    out = make_rows(fmt, len(x), x.shape[1])
    own = one_route_a_row(len(x)) if routes is None else routes
    quantize_rows(out, x, quantizer(fmt, static_scale), own, topk_weights=topk_weights)
    return out


def interesting_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows of every magnitude, ties between codes, zeros and subnormal numbers."""
    x = random(12, columns) * torch.logspace(-9, 3, 12, base=4, device=DEVICE).unsqueeze(1)
    x[3] = torch.arange(columns, device=DEVICE) / 16 - 7
    x[3, 0] = 448.0  # A scale of 1, so that the others are ties of e4m3 and int8's halves.
    x[4] = torch.arange(columns, device=DEVICE) / 2 - 63.5
    x[4, 0] = 127.0
    x[5] = 0
    x[6] = 1e-40
    x[7, : columns // 2] = 0
    x[8] *= 1e-30
    return x.to(dtype)


def check_codes(x: torch.Tensor, scheme: QuantScheme) -> None:
    static = torch.tensor([0.03], device=DEVICE) if row_format(scheme).static else None
    expected = quantize_activations(x, scheme, None if static is None else static[0])
    assert_same(quantize(x, scheme, static_scale=static), expected, x.shape[1])


@pytest.mark.few
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("columns", "dtype"), [(384, BF16), (130, FP16), (1500, FP32), (64, BF16)])
def test_codes_and_scales_are_those_of_quantize(scheme: QuantScheme, columns: int, dtype: torch.dtype) -> None:
    check_codes(interesting_rows(columns, dtype), scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_infinity_and_nan_are_those_of_quantize(scheme: QuantScheme) -> None:
    x = random(5, 260)
    x[1, 3], x[2, 200], x[3, 130], x[3, 0] = math.inf, math.nan, -math.inf, math.nan
    check_codes(x, scheme)


def test_one_scale_spans_the_rows_that_count() -> None:
    """Tokens with a route to a local expert; the others, however large, do not matter."""
    scheme = get_scheme("fp8_tensor_dynamic")
    x = random(6, 100).to(BF16)
    x[2], x[4] = 1e4, math.nan
    ids = torch.tensor([[0, 9], [3, -1], [3, 4], [1, 0], [-1, 7], [5, 1]], dtype=torch.int32, device=DEVICE)
    expert_map = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32, device=DEVICE)
    found = quantize(x, scheme, RouteIds(ids, expert_map, 6, 3))
    counted = [0, 3, 5]
    expected = quantize_activations(x, scheme, activation_scale(x[counted].float().abs().amax(), scheme))
    assert_same(found, expected, 100)


def test_routing_weights_multiply_and_round_first() -> None:
    scheme = get_scheme("fp8_block128")
    x, weights = random(5, 130).to(BF16), random(5, 1).abs()
    expected = quantize_activations((x.float() * weights).to(BF16), scheme)
    assert_same(quantize(x, scheme, topk_weights=weights), expected, 130)


def rows_that_count(counts: list[int], max_tokens: int) -> torch.Tensor:
    """[E, max_T]."""
    held = torch.tensor(counts, device=DEVICE).unsqueeze(1)
    return torch.arange(max_tokens, device=DEVICE) < held


def quantize_batches(
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
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("columns", "dtype"), [(384, BF16), (130, FP16), (1500, FP32)])
@pytest.mark.parametrize("other", [math.nan, pytest.param(1e4, marks=pytest.mark.slow)])  # NaN shows what 1e4 does.
def test_codes_and_scales_of_batches_are_those_of_quantize(
    scheme: QuantScheme, columns: int, dtype: torch.dtype, other: float
) -> None:
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = torch.full((len(valid), columns), other, dtype=dtype, device=DEVICE)
    x[valid] = torch.cat([interesting_rows(columns, dtype), random(7, columns).to(dtype)])
    static = None
    if row_format(scheme).static:
        static = torch.tensor([0.03, 0.04, 0.05], device=DEVICE)
    found = quantize_batches(x, scheme, make_batched_plan(COUNTS, MAX_TOKENS, 16), static_scale=static)
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


def test_one_static_scale_is_for_all_of_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.kernels.quantized.rows_batched._ROW_PROGRAMS", 3)
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = random(len(valid), 130)
    x[~valid] = math.nan
    scheme, static = get_scheme("fp8_tensor_static"), torch.tensor([0.03], device=DEVICE)
    found = quantize_batches(x, scheme, make_batched_plan(COUNTS, MAX_TOKENS, 16), static_scale=static)
    assert_same(select(found, valid), quantize_activations(x[valid], scheme, static[0]), 130)
    assert (found.q[~valid].view(torch.uint8) == 77).all()


CONFIG = GroupedGemmConfig(block_m=16, block_n=64, block_k=64, group_m=2, num_warps=4, num_stages=2)
WIDE = dataclasses.replace(CONFIG, block_n=128, block_k=128, mask_rows=True)
MATRIX_SCHEMES = (*map(get_scheme, NAMED), QuantScheme("e5m2_token", E5M2, E5M2))


def make_problem(scheme: QuantScheme, hidden: int, intermediate: int, **keywords: Any) -> MoEProblem:
    sizes = {"num_experts": 4, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": scheme, **keywords})


def make_stage_weights(problem: MoEProblem) -> ExpertWeights:
    plain = make_plain_weights(problem, DEVICE)
    fmt = problem.quant.activation
    static = torch.linspace(0.02, 0.05, 4, device=DEVICE) if fmt is not None and fmt.static else None
    return quantize_weights(plain, problem.quant, a13_scale=static, a2_scale=static)


def restored(rows: QuantizedRows, scheme: QuantScheme, columns: int) -> torch.Tensor:
    """The numbers of the kernels' codes."""
    fmt = scheme.activation
    if rows.global_scale is not None:
        return dequantize_activations(Quantized(rows.q, rows.scale, rows.global_scale[:, None]), scheme, columns, FP64)
    scale = rows.scale if fmt.group[1] == WHOLE else rows.scale[:, : -(-columns // fmt.group[1])]
    if rows.scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    values = rows.q[:, :columns].double()
    spread = scale.double() if fmt.group[1] == WHOLE else scale.double().repeat_interleave(fmt.group[1], 1)[:, :columns]
    return values * spread


@dataclasses.dataclass
class Stage:
    """A layer's operands as its kernels take them; `built` makes them, which takes a second."""

    scheme: QuantScheme
    hidden: int
    intermediate: int
    config: GroupedGemmConfig
    activation: str = "silu"
    has_bias: bool = False
    direct: bool = False

    def __post_init__(self) -> None:
        activation, bias = self.activation, self.has_bias
        self.problem = make_problem(self.scheme, self.hidden, self.intermediate, activation=activation, has_bias=bias)
        self.layer = implementation(self.problem)
        self.fmt = self.layer.row_format
        if self.scheme.activation is not None and self.scheme.activation.group[1] not in (WHOLE, 16, 32):
            self.config = dataclasses.replace(self.config, block_k=128)

    def built(self) -> Stage:
        """Itself."""
        self.weights = make_stage_weights(self.problem)
        self.w13, self.w2 = dequantize_weights(self.weights, torch.float64)
        self.permuted = self.layer.permute_weights(self.weights)
        num_tokens = 16 if self.direct else 21
        inputs = make_inputs(self.problem, num_tokens, "unmapped", DEVICE)
        self.topk_ids, self.topk_weights = inputs.topk_ids, inputs.topk_weights
        self.num_routes = num_tokens * 2
        if self.direct:
            self.plan: Any = DirectRoutes(self.topk_ids, None, 4, 16)
        else:
            workspace = self.topk_ids.new_empty(route_workspace_numel(num_tokens, 2, 4, 16))
            self.plan = sort_routes(self.topk_ids, None, 4, 4, 16, workspace)
        ids = self.topk_ids.flatten()
        self.valid = (ids >= 0) & (ids < 4)
        # Row of each valid route, and the route.
        self.routes = torch.nonzero(self.valid).flatten()
        self.rows = self.routes if self.direct else self.plan.route_row[self.routes].long()
        self.experts = ids[self.routes].long()
        x = inputs.hidden_states
        if self.fmt.static:
            static = self.weights.a13_scale
            self.tokens = make_rows(self.fmt, self.num_routes, self.hidden)
            quantize_rows(self.tokens, x, Quantizer(self.fmt, static), RouteIds(self.topk_ids, None, 4, 4))
        else:
            self.tokens = quantize(x, self.scheme)
        return self

    def gate_up(self, out: torch.Tensor | CodedOutput) -> None:
        quantized_gate_up_gemm(
            out,
            self.tokens,
            self.layer.matrices(self.permuted, "w13"),
            self.plan,
            self.config,
            gate_up_epilogue(self.problem, self.permuted),
            top_k=2,
            by_route=self.fmt.static,
        )

    def expected(self) -> torch.Tensor:
        """The first GEMM's result for each valid route, [routes, I] in fp64."""
        x = restored(self.tokens, self.scheme, self.hidden)
        x = x[self.routes if self.fmt.static else self.routes // 2]
        x = torch.einsum("rk,rnk->rn", x, self.w13[self.experts])
        if self.weights.w13_bias is not None:
            x += self.weights.w13_bias[self.experts].double()
        return self.problem.activation(x)


STAGES = [Stage(scheme, 130, 200, CONFIG) for scheme in MATRIX_SCHEMES]
STAGES += [Stage(scheme, 256, 128, WIDE, "swigluoai", has_bias=True) for scheme in MATRIX_SCHEMES]
STAGES += [Stage(scheme, 130, 72, WIDE, "relu2", has_bias=True, direct=True) for scheme in MATRIX_SCHEMES]


# A fixture of the module: the tests of one stage follow each other, and a process builds only the stages that it runs.
@pytest.fixture(
    scope="module", params=STAGES, ids=lambda stage: f"{stage.scheme.name}-{stage.hidden}-{stage.activation}"
)
def stage(request: pytest.FixtureRequest) -> Stage:
    found: Stage = request.param
    return found.built()


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan, device=DEVICE)


@pytest.mark.few(most=8)
def test_gate_up_gemm(stage: Stage) -> None:
    padded = round_up(stage.intermediate, CODE_PAD)
    out = poisoned(stage.num_routes, padded)
    stage.gate_up(out)
    found = out[stage.rows]
    assert relative_error(found[:, : stage.intermediate], stage.expected()) < 2e-6
    assert (found[:, stage.intermediate :] == 0).all()
    untouched = torch.ones(stage.num_routes, dtype=torch.bool, device=DEVICE)
    untouched[stage.rows] = False
    assert out[untouched].isnan().all(), "rows that are not in use were written to"


@pytest.mark.few(most=8)
def test_codes_of_the_first_gemm_are_those_of_its_rounded_output(stage: Stage) -> None:
    """Fused or not, the intermediate is quantized where the reference does it, by the same rules."""
    padded = round_up(stage.intermediate, CODE_PAD)
    plain = torch.full((stage.num_routes, padded), math.nan, dtype=BF16, device=DEVICE)
    stage.gate_up(plain)
    expected = plain[stage.rows][:, : stage.intermediate]
    found = make_rows(stage.fmt, stage.num_routes, stage.intermediate)
    own = RouteIds(stage.topk_ids, None, 4, 4) if stage.direct else stage.plan
    static = stage.permuted.get("a2_scale")
    if stage.fmt.fits_tile(stage.config.block_n):
        stage.gate_up(CodedOutput(found, quantizer(stage.fmt, static), BF16))
    else:
        quantize_rows(found, plain, quantizer(stage.fmt), own)
    in_use = select(found, stage.rows)
    if static is None:
        assert_same(in_use, quantize_activations(expected, stage.scheme), stage.intermediate)
    else:
        codes = quantize_activations(expected, stage.scheme, static[stage.experts].unsqueeze(1))
        assert torch.equal(bits(in_use.q[:, : stage.intermediate]), bits(codes.q))
        assert torch.equal(in_use.scale[:, 0], static[stage.experts])
    untouched = torch.ones(stage.num_routes, dtype=torch.bool, device=DEVICE)
    untouched[stage.rows] = False
    assert (found.q[untouched].view(torch.uint8) == 77).all(), "rows that are not in use were written to"


@pytest.mark.few(most=8)
def test_down_gemm(stage: Stage) -> None:
    x = random(stage.num_routes, stage.intermediate)
    if stage.fmt.static:
        static = torch.tensor([0.03], device=DEVICE)
        rows = quantize(x, stage.scheme, static_scale=static)
    else:
        rows = quantize(x, stage.scheme)
    out = poisoned(stage.num_routes, stage.hidden)
    bias = stage.permuted.get("w2_bias")
    w2 = stage.layer.matrices(stage.permuted, "w2")
    quantized_down_gemm(out, rows, w2, stage.plan, stage.config, bias=bias, topk_weights=stage.topk_weights)
    x = restored(rows, stage.scheme, stage.intermediate)[stage.rows]
    expected = torch.einsum("rk,rnk->rn", x, stage.w2[stage.experts])
    if bias is not None:
        expected += bias[stage.experts].double()
    expected *= stage.topk_weights.flatten()[stage.routes, None].double()
    assert relative_error(out[stage.routes], expected) < 2e-6
    assert out[~stage.valid].isnan().all()


@pytest.mark.few(most=3)
@pytest.mark.parametrize("scheme", MATRIX_SCHEMES, ids=lambda scheme: scheme.name)
def test_two_steps_a_turn_give_the_same_bits(scheme: QuantScheme) -> None:
    """Groups of columns are scaled as they were; only loads move."""
    stage = Stage(scheme, 1024, 128, WIDE).built()
    static = torch.tensor([0.03], device=DEVICE) if stage.fmt.static else None
    x = quantize(random(stage.num_routes, 1024), scheme, static_scale=static)
    w13 = stage.layer.matrices(stage.permuted, "w13")
    one_matrix = w13
    if w13.global_scale is not None:
        # The second product is of one half.
        one_matrix = dataclasses.replace(w13, global_scale=w13.global_scale[:, :1].contiguous())
    found = []
    for block_k in (128, 256):
        stage.config = dataclasses.replace(WIDE, block_k=block_k)
        out, down = poisoned(stage.num_routes, 128), poisoned(stage.num_routes, 256)
        stage.gate_up(out)
        quantized_down_gemm(down, x, one_matrix, stage.plan, stage.config)
        assert out[stage.rows].isfinite().all()
        assert down[stage.routes].isfinite().all()
        found.append((out, down))
    for one, two in zip(*found, strict=True):
        assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize(
    ("depth", "block_k", "expected"),
    [(1024, 256, (128, 2)), (768, 256, (128, 1)), (1152, 256, (128, 1)), (1024, 64, (64, 1))],
)
def test_several_steps_a_turn_where_a_row_has_enough(depth: int, block_k: int, expected: tuple[int, int]) -> None:
    assert steps(dataclasses.replace(CONFIG, block_k=block_k), depth) == expected


def test_permuted_weights_are_views_where_nothing_is_padded() -> None:
    problem = make_problem(get_scheme("fp8_block128"), 256, 128)
    weights = make_weights(problem, DEVICE)
    permuted = TritonQuantizedExperts(problem, SM90).permute_weights(weights, problem)
    for name, tensor in weights.tensors().items():
        assert permuted[name].data_ptr() == tensor.data_ptr(), name


@pytest.mark.parametrize("per_half", [False, True])
def test_one_scale_a_matrix_becomes_one_a_half(per_half: bool) -> None:
    problem = make_problem(get_scheme("fp8_tensor_dynamic"), 130, 200)
    weights = make_weights(problem, DEVICE)
    w13_scale = torch.rand(4, 2, device=DEVICE) if per_half else torch.rand(4, device=DEVICE)
    weights = dataclasses.replace(weights, w13_scale=w13_scale)
    layer = TritonQuantizedExperts(problem, SM90)
    permuted = layer.permute_weights(weights, problem)
    assert torch.equal(permuted["w13_scale"].squeeze(2), w13_scale.view(4, -1).expand(4, 2))
    assert permuted["w2_scale"].shape == (4, 1, 1)
    assert implementation(problem).matrices(permuted, "w13").group_rows == 200
    assert permuted["w13"].shape == (4, 400, 256)
    assert permuted["w2"].shape == (4, 130, 256)
    assert (permuted["w13"].float()[:, :, 130:] == 0).all()


def test_one_static_scale_for_all_experts_is_shared() -> None:
    """Then a token is quantized once and not for each of its routes."""
    problem = make_problem(get_scheme("fp8_tensor_static"), 130, 72)
    weights = dataclasses.replace(
        make_weights(problem, DEVICE),
        a13_scale=torch.tensor(0.02, device=DEVICE),
        a2_scale=torch.tensor(0.03, device=DEVICE),
    )
    layer = TritonQuantizedExperts(problem, SM90)
    permuted = layer.permute_weights(weights, problem)
    assert permuted["a13_scale"].shape == (1,)
    assert permuted["a2_scale"].shape == (4,)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_tokens"), [(130, 192, 5), (200, 100, 20), (64, 320, 5), (257, 1, 20)]
)
def test_blocks_that_do_not_divide(hidden: int, intermediate: int, num_tokens: int, activation: str) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    problem = MoEProblem(num_experts=3, top_k=2, quant="fp8_block128", activation=activation, **sizes)
    weights, layer = make_weights(problem, DEVICE), TritonQuantizedExperts(problem, SM90)
    inputs = make_inputs(problem, num_tokens, "uniform", DEVICE)
    out = apply_experts(layer, ExpertInputs(*inputs.call), layer.permute_weights(weights, problem))
    bound = layer_tolerance(problem, num_tokens)
    assert relative_error(out, reference_experts(problem, weights, *inputs.call)) < bound
    assert weights.w13_scale is not None
    if weights.w13_scale.shape[1] > 1:
        other = dataclasses.replace(weights, w13_scale=weights.w13_scale.roll(1, 1))
        assert relative_error(out, reference_experts(problem, other, *inputs.call)) > bound


def arrived(problem: MoEProblem, hidden_states: torch.Tensor, keeps_codes: bool) -> tuple[torch.Tensor, Any]:
    """The tokens behind the wire."""
    wire = CodedWire(problem, problem.quant, keeps_codes)
    sent = torch.cat(wire.encode(hidden_states), dim=1)
    received = wire.decode(split_columns(sent, wire.widths))
    return received.hidden_states, received.hidden_scale


# A row of 136 columns has to be filled up to 256; 20 tokens are sorted, 5 are not.
@pytest.mark.parametrize(
    ("scheme", "num_tokens", "hidden_size"),
    [
        ("fp8_block128", 5, 256),
        ("int8_w8a8", 20, 136),
        pytest.param("fp8_block128", 20, 136, marks=pytest.mark.slow),
        pytest.param("fp8_channel_token", 20, 136, marks=pytest.mark.slow),
        pytest.param("fp8_channel_token", 5, 256, marks=pytest.mark.slow),
    ],
)
def test_codes_give_the_bits_of_tokens_that_are_rounded_again(
    scheme: str, num_tokens: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MoEProblem(
        num_experts=4, hidden_size=hidden_size, intermediate_size=128, top_k=2, quant=scheme, dtype="bfloat16"
    )
    layer = TritonQuantizedExperts(problem, SM90)
    assert layer.input_form == "quantized"
    permuted = layer.permute_weights(make_weights(problem, DEVICE), problem)
    inputs = make_inputs(problem, num_tokens, "uniform", DEVICE)
    hidden_states, weights, ids = inputs.call
    rounded: list[int] = []
    quantize = quantized_schedules.quantize_rows

    def counted(out: Any, x: torch.Tensor, *rest: Any, **keywords: Any) -> None:
        rounded.append(x.shape[1])
        quantize(out, x, *rest, **keywords)

    monkeypatch.setattr(quantized_schedules, "quantize_rows", counted)
    found = []
    received = [(hidden_states, None), *(arrived(problem, hidden_states, keeps_codes) for keeps_codes in (False, True))]
    for rows, scales in received:
        rounded.clear()
        found.append(apply_experts(layer, ExpertInputs(rows, weights, ids, hidden_scale=scales), permuted))
        # Nothing rounds tokens a second time.
        assert (hidden_size in rounded) is (scales is None)
    assert torch.isfinite(found[0]).all()
    assert received[2][1] is not None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_recording_knows_the_scales_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie elsewhere in each call; and a call without them is another recording."""
    problem = MoEProblem(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, quant="fp8_block128")
    layer = TritonQuantizedExperts(problem, SM90)
    permuted = layer.permute_weights(make_weights(problem, DEVICE), problem)
    inputs = make_inputs(problem, 3, "uniform", DEVICE)
    known: list[dict[str, torch.Tensor | None]] = []

    def run(self: Recorded, call: Call) -> None:
        known.append({name: call.weights.get(name) for name in self.recorded_weights})

    monkeypatch.setattr(Recorded, "run", run)
    rows, scales = arrived(problem, inputs.hidden_states, keeps_codes=True)
    nothing = torch.empty(0, device=DEVICE)
    for hidden_states, hidden_scale in ((rows, scales), (inputs.hidden_states, None)):
        given = ExpertInputs(hidden_states, inputs.topk_weights, inputs.topk_ids, hidden_scale=hidden_scale)
        layer.apply(torch.empty_like(inputs.hidden_states), given, permuted, nothing, nothing)
    assert known[0].pop("hidden_scale") is scales
    assert known[1].pop("hidden_scale") is None
    assert known[0].keys() == known[1].keys()
    assert all(known[0][name] is known[1][name] for name in known[0])
    assert permuted.get("hidden_scale") is None
