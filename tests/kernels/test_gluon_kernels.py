"""The Gluon kernels against torch, on a Hopper GPU only: Gluon has no interpreter.

Tolerances of 16-bit kernels are as in `triton_cases`: each rounds once. Layers of packed weights and of 8-bit codes
must agree with the reference within the scheme's tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._loaded import Call
from moereg.backends._triton.packed import HopperPacked
from moereg.backends._triton.quantized_schedules import Hopper
from moereg.bench.inputs import random_call
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.hopper.config import CONFIG_RULES, FIVE_BODIES, THREE_BODIES, TWO_BODIES
from moereg.kernels.hopper.packed_config import PACKED_RULES
from moereg.kernels.rows.block_map import batch_workspace_numel, plan_batches
from moereg.kernels.rows.reduce import copy_rows, reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_expert_map, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.kernels.references import (
    copy_rows_reference,
    down_reference,
    gate_up_reference,
    reduce_routes_reference,
    sort_routes_reference,
)
from tests.kernels.triton_cases import assert_plans_equal, make_plan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

if HOPPER:
    from moereg.kernels.hopper.gemm import down_gemm, gate_up_gemm

TOLERANCE = {torch.bfloat16: 2.0**-8 / math.sqrt(3) * 1.2, torch.float16: 2.0**-11 / math.sqrt(3) * 1.2}


def nans(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def normal(*shape: int, std: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(std=std)


def room(columns: int) -> int:
    """Columns of a workspace for rows of so many."""
    return -(-columns // 64) * 64


def route(tokens: int, experts: int, top_k: int, skew: float) -> torch.Tensor:
    popularity = -skew * torch.log(torch.randperm(experts, device="cuda") + 1.0)
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, device="cuda")))
    return (noise + popularity).topk(top_k, dim=1).indices.int()


def operands_of(
    experts: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    gated: bool = True,
    has_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, GateUpEpilogue]:
    """w13, w2, the bias of w2, and what follows the first product."""
    columns = (2 if gated else 1) * inter
    w13 = normal(experts, columns, hidden, std=2 * hidden**-0.5, dtype=dtype)
    w2 = normal(experts, hidden, inter, std=inter**-0.5, dtype=dtype)
    b13, b2 = (normal(experts, size, std=1.0, dtype=dtype) if has_bias else None for size in (columns, hidden))
    # Low enough that many numbers are clamped.
    clamps = {"alpha": 1.702, "beta": 1.0, "limit": 1.5} if activation == "swigluoai" else {}
    return w13, w2, b2, GateUpEpilogue(ActivationConstant(activation, gated, **clamps), b13)


def assert_equal_bits(runs: list[tuple[torch.Tensor, ...]]) -> None:
    for buffers in zip(*runs, strict=True):
        assert all(torch.equal(buffers[0].view(torch.int16), other.view(torch.int16)) for other in buffers[1:])


# rule, copied, tokens, global and local experts, top_k, hidden, intermediate, dtype, activation, gated, skew, bias.
# Few, because each takes seconds to compile.
CASES = [
    (3, False, 500, 8, 8, 2, 512, 360, torch.bfloat16, "silu", True, 0.0, False),
    (3, False, 1000, 16, 16, 4, 448, 200, torch.bfloat16, "swigluoai", True, 1.0, True),
    (4, True, 3000, 32, 16, 4, 1288, 744, torch.bfloat16, "gelu_tanh", True, 0.0, True),
    (7, False, 4000, 16, 16, 4, 520, 192, torch.float16, "silu", True, 0.3, False),
    (8, False, 3000, 16, 16, 4, 1024, 1848, torch.bfloat16, "relu2", False, 0.0, False),
    (8, False, 4000, 16, 16, 4, 512, 328, torch.bfloat16, "silu", True, 1.0, True),
    (7, False, 1, 8, 8, 2, 256, 128, torch.bfloat16, "gelu", True, 0.0, False),
    (0, False, 256, 8, 8, 2, 520, 360, torch.bfloat16, "silu", True, 1.0, True),
    (2, False, 1024, 128, 64, 8, 520, 184, torch.bfloat16, "silu", True, 1.0, True),
    (2, False, 600, 16, 16, 2, 448, 384, torch.float16, "relu2", False, 0.0, False),
    (5, False, 3000, 64, 64, 4, 512, 320, torch.bfloat16, "silu", True, 1.0, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_of_kernels(case: tuple[Any, ...]) -> None:
    rule, copied, tokens, experts, local, top_k, hidden, inter, dtype, activation, gated, skew, has_bias = case
    torch.manual_seed(tokens + rule)
    gate_up, down, heavy_first = CONFIG_RULES[rule].gate_up, CONFIG_RULES[rule].down, CONFIG_RULES[rule].heavy_first
    ids = route(tokens, experts, top_k, skew)
    expert_map = None
    if local < experts:
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        expert_map[5 : 5 + local] = torch.arange(local, dtype=torch.int32, device="cuda")
    given = ids, expert_map, experts, local, gate_up.block_m
    plan = make_plan(*given, slack=gate_up.slack, heavy_first=heavy_first)
    reference = sort_routes_reference(*given, gate_up.slack, heavy_first=heavy_first)
    assert_plans_equal(plan, reference)
    valid = reference.sorted_routes.numel()

    routes = tokens * top_k
    rows = tokens_in = torch.randn(tokens, hidden, device="cuda").to(dtype)
    w13, w2, b2, epilogue = operands_of(local, hidden, inter, dtype, activation, gated, has_bias)
    weights = torch.rand(tokens, top_k, device="cuda")
    if copied:
        rows = nans(routes, hidden, dtype=dtype)
        copy_rows(rows, tokens_in, plan.route_row)
        assert torch.equal(rows[:valid], copy_rows_reference(tokens_in, plan.route_row))

    runs = []
    for _ in range(3):
        # A sort leaves the counters at zero, and the GEMMs use them up.
        plan.tile_counters.zero_()
        mid, sorted_rows = (nans(GUARD_ROWS + routes, columns, dtype=dtype) for columns in (room(inter), hidden))
        gate_up_gemm(mid, rows, w13, plan, gate_up, epilogue, top_k=None if copied else top_k)
        mid[:, inter:] = math.nan
        down_gemm(sorted_rows, mid, w2, plan, down, bias=b2)
        out = nans(tokens, hidden, dtype=dtype)
        reduce_sorted_rows(out, sorted_rows[GUARD_ROWS:], plan.route_row, weights)
        runs.append((mid, sorted_rows, out))
    assert_equal_bits(runs)
    mid, sorted_rows, out = runs[0]
    for buffer in (mid, sorted_rows):
        assert buffer[:GUARD_ROWS].isnan().all()
        assert buffer[GUARD_ROWS + valid :].isnan().all()
    expected = gate_up_reference(tokens_in, w13, plan, epilogue, top_k=top_k)
    assert relative_error(mid[GUARD_ROWS:, :inter][:valid], expected) <= TOLERANCE[dtype]
    by_route = down_reference(mid[GUARD_ROWS:], w2, plan, bias=b2)
    expected = by_route[plan.sorted_routes[:valid].long()]
    assert relative_error(sorted_rows[GUARD_ROWS:][:valid], expected) <= TOLERANCE[dtype]
    expected = reduce_routes_reference(by_route * weights.flatten()[:, None], plan.route_expert, tokens)
    assert relative_error(out, expected) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("copied", [False, True], ids=["by_token", "boxes"])
@pytest.mark.parametrize(
    ("rule", "bodies"),
    [
        *itertools.product((3, 7), (FIVE_BODIES, 0b11110, THREE_BODIES, TWO_BODIES, 0b11100)),
        (0, FIVE_BODIES),
        (2, THREE_BODIES),
        (2, TWO_BODIES),
    ],
)
def test_tiles_of_every_body(rule: int, bodies: int, copied: bool) -> None:
    gate_up, down = (replace(config, bodies=bodies) for config in (CONFIG_RULES[rule].gate_up, CONFIG_RULES[rule].down))
    quarter, slack, hidden, inter = gate_up.block_m // 4, gate_up.slack, 256, 128
    most = [quarter, 2 * quarter, 2 * quarter + slack, 4 * quarter, 4 * quarter + slack]
    # The fewest and the most rows of each, and two tiles of which the second has each.
    counts = torch.tensor(
        [1, *(rows + more for rows in most for more in (0, 1)), *(rows + 4 * quarter for rows in most)]
    )
    experts, routes = len(counts), int(counts.sum())
    torch.manual_seed(rule)
    ids = torch.arange(experts).repeat_interleave(counts)[torch.randperm(routes)][:, None].int().cuda()
    given = ids, None, experts, experts, gate_up.block_m
    plan = make_plan(*given, slack=slack, heavy_first=True)
    assert_plans_equal(plan, sort_routes_reference(*given, slack, heavy_first=True))
    tokens = torch.randn(routes, hidden, device="cuda").bfloat16()
    rows = tokens[plan.sorted_routes.long()] if copied else tokens
    w13, w2, _, epilogue = operands_of(experts, hidden, inter)
    mid = nans(GUARD_ROWS + routes, inter, dtype=torch.bfloat16)
    out = nans(GUARD_ROWS + routes, hidden, dtype=torch.bfloat16)
    gate_up_gemm(mid, rows, w13, plan, gate_up, epilogue, top_k=None if copied else 1)
    down_gemm(out, mid, w2, plan, down)
    first = gate_up_reference(tokens, w13, plan, epilogue, top_k=1)
    second = down_reference(mid[GUARD_ROWS:], w2, plan)[plan.sorted_routes.long()]
    for start, rows_of_expert in zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True):
        held = slice(start, start + rows_of_expert)
        assert relative_error(mid[GUARD_ROWS:][held], first[held]) <= TOLERANCE[torch.bfloat16], rows_of_expert
        assert relative_error(out[GUARD_ROWS:][held], second[held]) <= TOLERANCE[torch.bfloat16], rows_of_expert


@pytest.mark.parametrize("rule", {rule.down: number for number, rule in enumerate(CONFIG_RULES)}.values())
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_are_weighted_before_they_are_stored(rule: int, has_bias: bool) -> None:
    """Rows of some 1e5 or 1e-5 in float16, weights that make them about 1, and NaN for routes that no expert takes."""
    torch.manual_seed(rule)
    down, hidden, inter, dtype = CONFIG_RULES[rule].down, 520, 328, torch.float16
    quarter = down.block_m // 4
    whole = down.block_m + down.slack
    counts = torch.tensor([1, quarter, quarter + 1, 2 * quarter + down.slack, 3 * quarter, 0, whole])
    counts = torch.cat([counts, counts + down.block_m])
    experts, valid = len(counts), int(counts.sum())
    routes = valid + 7
    ids = torch.arange(experts + 1).repeat_interleave(torch.cat([counts, torch.tensor([7])]))
    ids = ids[torch.randperm(routes)][:, None].int().cuda()
    plan = make_plan(ids, None, experts, experts, down.block_m, slack=down.slack)
    scale = torch.where(torch.arange(experts + 1, device="cuda") % 2 == 0, 1e5, 1e-5)
    weights = (torch.rand(routes, 1, device="cuda") + 0.5) / scale[ids.long()]
    weights[ids == experts] = math.nan
    mid = nans(GUARD_ROWS + routes, inter, dtype=dtype)
    mid[GUARD_ROWS:][:valid].normal_()
    w2 = normal(experts, hidden, inter, std=inter**-0.5, dtype=torch.float32)
    w2 = (w2 * scale[:experts, None, None]).to(dtype)
    bias = (torch.randn(experts, hidden, device="cuda") * scale[:experts, None]).float() if has_bias else None
    out = nans(GUARD_ROWS + routes, hidden, dtype=dtype)
    down_gemm(out, mid, w2, plan, down, bias=bias, topk_weights=weights)
    for unused in (out[:GUARD_ROWS], out[GUARD_ROWS + valid :]):
        assert unused.isnan().all()
    order = plan.sorted_routes[:valid].long()
    unweighted = down_reference(mid[GUARD_ROWS:], w2, plan, bias=bias)[order]
    expected = unweighted * weights[order]
    assert unweighted.abs().amax() > 65504
    for first in range(0, valid, quarter):
        rows = slice(first, first + quarter)
        assert relative_error(out[GUARD_ROWS:][:valid][rows], expected[rows]) <= TOLERANCE[dtype], first


# rule, experts, max_T, hidden, intermediate, dtype, activation, gated, bias.
BATCHED_CASES = [
    (3, 8, 100, 520, 360, torch.bfloat16, "silu", True, False),
    (3, 6, 30, 256, 128, torch.bfloat16, "gelu", True, False),
    (3, 8, 300, 448, 200, torch.bfloat16, "swigluoai", True, True),
    (4, 6, 545, 1288, 744, torch.float16, "gelu_tanh", True, True),
    (4, 6, 1000, 1024, 440, torch.bfloat16, "relu2", False, False),
    # More tiles than a GPU has multiprocessors.
    (4, 12, 2000, 2048, 512, torch.bfloat16, "silu", True, False),
]


@pytest.mark.parametrize("case", BATCHED_CASES, ids=str)
def test_batched_kernels(case: tuple[Any, ...]) -> None:
    rule, experts, max_tokens, hidden, inter, dtype, activation, gated, has_bias = case
    torch.manual_seed(max_tokens + rule)
    gate_up, down = CONFIG_RULES[rule].gate_up, CONFIG_RULES[rule].down
    counts = torch.randint(0, max_tokens + 1, (experts,), dtype=torch.int32, device="cuda")
    # Whole experts next to empty ones: the box of the last rows must not reach into the neighbor.
    counts[:4] = torch.tensor([max_tokens, 0, max_tokens - 1, 0])
    valid = torch.arange(max_tokens, device="cuda") < counts[:, None]
    workspace = torch.empty(batch_workspace_numel(experts, max_tokens, 16), dtype=torch.int32, device="cuda")
    heavy_first = CONFIG_RULES[rule].heavy_first
    plan = plan_batches(counts, max_tokens, gate_up.block_m, workspace, slack=gate_up.slack, heavy_first=heavy_first)

    rows = torch.randn(experts, max_tokens, hidden, device="cuda").to(dtype)
    rows[~valid] = math.nan
    w13, w2, b2, epilogue = operands_of(experts, hidden, inter, dtype, activation, gated, has_bias)

    runs = []
    for _ in range(3):
        plan.tile_counters.zero_()
        mid = nans(experts, max_tokens, room(inter), dtype=dtype)
        out = nans(experts + 1, max_tokens, hidden, dtype=dtype)
        gate_up_gemm(mid, rows.view(-1, hidden), w13, plan, gate_up, epilogue, top_k=None)
        mid[..., inter:] = math.nan
        down_gemm(out[:experts], mid, w2, plan, down, bias=b2)
        for buffer in (mid[counts == 0], out[:experts][counts == 0], out[experts]):
            assert buffer.isnan().all(), "a kernel wrote to the rows of another expert"
        runs.append((mid[valid], out[:experts][valid]))
    assert_equal_bits(runs)
    # The same rows as routes: one a row, and to no expert where a row does not count.
    ids = torch.where(valid, torch.arange(experts, device="cuda")[:, None], -1).int().view(-1, 1)
    routes = sort_routes_reference(ids, None, experts, experts, gate_up.block_m, gate_up.slack)
    mid, found = runs[0]
    expected = gate_up_reference(rows.view(-1, hidden), w13, routes, epilogue, top_k=1)
    assert relative_error(mid[:, :inter], expected) <= TOLERANCE[dtype]
    expected = down_reference(mid, w2, routes, bias=b2)[valid.flatten()]
    assert relative_error(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("by_token", [True, False])
def test_no_local_expert_is_chosen(by_token: bool) -> None:
    tokens, experts, top_k, hidden, inter = 400, 8, 4, 256, 128
    gate_up, down = CONFIG_RULES[3].gate_up, CONFIG_RULES[3].down
    expert_map = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
    # Its workspace holds numbers that as offsets would reach far outside of every tensor.
    plan = make_plan(
        route(tokens, experts, top_k, 0.0), expert_map, experts, experts, gate_up.block_m, slack=gate_up.slack
    )
    assert int(plan.num_blocks) == 0
    routes = tokens * top_k
    rows = torch.randn(tokens if by_token else routes, hidden, device="cuda").bfloat16()
    w13, w2, _, epilogue = operands_of(experts, hidden, inter)
    mid = nans(GUARD_ROWS + routes, inter, dtype=torch.bfloat16)
    out = nans(GUARD_ROWS + routes, hidden, dtype=torch.bfloat16)
    gate_up_gemm(mid, rows, w13, plan, gate_up, epilogue, top_k=top_k if by_token else None)
    down_gemm(out, mid, w2, plan, down)
    torch.cuda.synchronize()
    assert mid.isnan().all()
    assert out.isnan().all()


@pytest.mark.parametrize("activation_format", ["standard", "batched"])
def test_a_repeated_call_equals_a_first_one_on_other_tensors(activation_format: str) -> None:
    sizes = {"num_experts": 16, "hidden_size": 512, "intermediate_size": 328, "top_k": 4}
    problem = MoEProblem(**sizes, activation_format=activation_format)
    given = {"std": 0.1, "dtype": torch.bfloat16}
    weights = ExpertWeights(w13=normal(16, 656, 512, **given), w2=normal(16, 512, 328, **given))
    selection = select_backend(problem, require="triton")
    kernel = make_kernel(problem, weights, selection)
    # One launch sorts up to 4,096 routes.
    for tokens in (1, 16, 64, 500, 3000):
        calls = [
            (
                torch.randn(tokens, 512, device="cuda").to(torch.bfloat16),
                torch.rand(tokens, 4, device="cuda"),
                route(tokens, 16, 4, 0.5),
            )
            for _ in range(2)
        ]
        kernel(*calls[0])
        repeated = kernel(*calls[1])
        # Repeated launches also see workspaces that moved, since other tensors hold the pool's memory meanwhile.
        num_bytes = WORKSPACES.num_bytes
        WORKSPACES.release()
        others = [torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda") for _ in range(3)]
        moved = kernel(*calls[1])
        assert all((other == 255).all() for other in others), "a kernel wrote into workspaces that were given back"
        first = make_kernel(problem, weights, selection)(*calls[1])
        assert torch.equal(repeated, first)
        assert torch.equal(moved, first)
        assert not torch.equal(first, kernel(*calls[0]))


MXFP4, NVFP4, INT4, INT4_ROWS = "mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_g128", "int4_w4a16_gall"
PACKED_INT8, BLOCK, CHANNEL, INT8 = "int8_w8a16", "fp8_block128", "fp8_channel_token", "int8_w8a8"
GIVEN, DYNAMIC = "fp8_tensor_static", "fp8_tensor_dynamic"
BIASED, MAPPED = {"has_bias": True}, {"num_local_experts": 8, "placement": "map"}
FP16, ON_INPUT = {"dtype": "float16"}, {"apply_router_weight_on_input": True}

# Scheme, tokens, experts, top_k, hidden, intermediate, activation, what else the problem says, and of packed weights
# the rule. Few, because each takes seconds to compile.
LAYER_CASES: list[tuple[str, int, int, int, int, int, str, dict[str, Any], int | None]] = [
    (MXFP4, 130, 8, 2, 256, 192, "swigluoai", BIASED, 0),
    (NVFP4, 150, 8, 2, 264, 320, "silu", {}, 0),
    (INT4, 130, 8, 2, 512, 384, "silu", {}, 0),
    (PACKED_INT8, 130, 8, 2, 328, 200, "silu", BIASED, 0),
    (MXFP4, 301, 8, 2, 520, 328, "silu", BIASED, 1),
    (INT4_ROWS, 301, 8, 2, 320, 256, "gelu_tanh", {}, 1),
    (PACKED_INT8, 301, 8, 2, 456, 320, "relu2", BIASED, 1),
    (NVFP4, 600, 16, 4, 512, 320, "silu", MAPPED, 2),
    (INT4, 600, 8, 2, 520, 384, "swigluoai", BIASED, 2),
    (PACKED_INT8, 600, 8, 2, 256, 256, "silu", {}, 2),
    # More routes than one launch sorts.
    (MXFP4, 2101, 8, 2, 256, 328, "relu2", {}, 3),
    (INT4, 900, 8, 2, 640, 192, "silu", {}, 3),
    (PACKED_INT8, 900, 8, 2, 328, 320, "gelu", BIASED, 3),
    (BLOCK, 512, 4, 2, 512, 384, "silu", {}, None),
    # A short last block of columns, of the reduced dimension, and of rows; an odd number of steps.
    (BLOCK, 613, 8, 4, 328, 128, "silu", BIASED, None),
    (BLOCK, 700, 8, 4, 648, 256, "swigluoai", BIASED, None),
    (BLOCK, 700, 8, 4, 512, 384, "relu2", BIASED, None),
    (BLOCK, 900, 4, 1, 256, 256, "gelu_tanh", ON_INPUT, None),
    (BLOCK, 900, 16, 4, 512, 256, "silu", MAPPED, None),
    (BLOCK, 800, 4, 2, 512, 384, "gelu", FP16, None),
    # More routes than one launch sorts, and no multiple of 16.
    (BLOCK, 2101, 8, 2, 256, 128, "silu", {}, None),
    (CHANNEL, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (CHANNEL, 700, 4, 2, 648, 200, "relu2", FP16, None),
    (INT8, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (INT8, 700, 8, 4, 1096, 520, "swigluoai", {"num_local_experts": 4, "placement": "contiguous"}, None),
    # Few rows an expert: weights are asked for early where there are as many steps as slots, right guesses and wrong.
    (BLOCK, 100, 8, 4, 1032, 640, "silu", BIASED, None),
    (BLOCK, 301, 16, 4, 520, 512, "swigluoai", MAPPED, None),
    (BLOCK, 220, 8, 4, 640, 1152, "gelu_tanh", FP16, None),
    # Many: the first warpgroup leads.
    (BLOCK, 700, 8, 4, 1032, 640, "relu2", {}, None),
    # One scale a tensor: codes leave the first product where it is given, and need all rows where it is not.
    (GIVEN, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (GIVEN, 700, 4, 2, 648, 200, "relu2", FP16, None),
    (GIVEN, 900, 16, 4, 512, 256, "swigluoai", MAPPED, None),
    (GIVEN, 900, 4, 1, 256, 256, "gelu_tanh", ON_INPUT, None),
    (DYNAMIC, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (DYNAMIC, 900, 16, 4, 512, 256, "relu2", MAPPED, None),
]


def kernel_of(problem: MoEProblem) -> tuple[MoEKernel, ExpertWeights]:
    device = torch.device("cuda")
    weights, expert_map = make_weights(problem, device), make_expert_map(problem, device)
    return make_kernel(problem, weights, select_backend(problem, require="triton"), expert_map=expert_map), weights


def worst_row(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Each token by itself, so that one wrong row does not drown in the others."""
    return ((out.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1)).max()


@pytest.mark.parametrize("case", LAYER_CASES, ids=[f"{case[0]}-{case[6]}-{case[1]}-{case[4]}" for case in LAYER_CASES])
def test_layers(case: tuple[str, int, int, int, int, int, str, dict[str, Any], int | None]) -> None:
    scheme, tokens, experts, top_k, hidden, inter, activation, keywords, rule = case
    problem = MoEProblem(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        top_k=top_k,
        quant=scheme,
        activation=activation,
        **keywords,
    )
    kernel, weights = kernel_of(problem)
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(tokens))
    inputs = ExpertInputs(call.hidden_states, call.topk_weights, call.topk_ids)
    nothing = torch.empty(0, device="cuda")
    schedule = kernel.experts.implementation.select(Call(nothing, inputs, kernel.weights, nothing, nothing))  # type: ignore[attr-defined]
    assert isinstance(schedule, Hopper if rule is None else HopperPacked), "the case is not for these kernels"
    assert rule is None or schedule.config is PACKED_RULES[rule]
    outs = []
    for _ in range(3):
        WORKSPACES.release()  # The next one is poisoned again.
        outs.append(kernel(*call, out=torch.full_like(call.hidden_states, math.nan)))
    truth = reference_experts(problem, weights, *call, expert_map=kernel.expert_map)
    assert relative_error(outs[0], truth) <= tolerance(problem.quant, problem.dtype, tokens * hidden)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def check_counts(scheme: str, size: int, *borders: Sequence[int]) -> None:
    """First most tokens go to one expert; then counts lie about the borders of tiles."""
    problem = MoEProblem(num_experts=8, hidden_size=size, intermediate_size=size, top_k=1, quant=scheme)
    kernel, weights = kernel_of(problem)
    for counts in ((900, 0, 0, 0, 0, 0, 0, 37), *borders):
        experts = torch.arange(8, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
        order = torch.randperm(len(experts), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        ids = experts[order].int().unsqueeze(1)
        call = random_call(problem, len(ids), "uniform", torch.Generator("cuda").manual_seed(3))
        out = kernel(call.hidden_states, call.topk_weights, ids, out=torch.full_like(call.hidden_states, math.nan))
        truth = reference_experts(problem, weights, call.hidden_states, call.topk_weights, ids)
        bound = tolerance(problem.quant, problem.dtype, len(ids) * size)
        assert relative_error(out, truth) <= bound, counts
        assert float(worst_row(out, truth)) <= 4 * bound, counts


@pytest.mark.parametrize("rule", PACKED_RULES)
def test_experts_of_few_and_of_many_rows_of_packed_weights(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.backends._triton.packed.select_packed_config", lambda _rows: rule)
    m, slack = rule.down.block_m, rule.down.slack
    check_counts(MXFP4, 256, (m // 2, m // 2 + 1, m, m + 1, m + slack, m + slack + 1, 2 * m + slack, 1))


@pytest.mark.parametrize("scheme", [BLOCK, CHANNEL, INT8, GIVEN, DYNAMIC])
def test_experts_of_few_and_of_many_rows_of_codes(scheme: str) -> None:
    for size in (256, 640):
        check_counts(scheme, size, (1, 63, 64, 65, 127, 128, 129, 300), (192, 193, 1, 2, 3, 256, 257, 0))


@pytest.mark.parametrize("tokens", [100, 400])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_gates_far_from_zero(activation: str, tokens: int) -> None:
    """Sigmoids that are 0 and 1, gates close to 0, and a token that is NaN, with both rules of block scales."""
    sizes = {"num_experts": 8, "hidden_size": 640, "intermediate_size": 640, "top_k": 4}
    problem = MoEProblem(**sizes, quant=BLOCK, activation=activation)
    kernel, weights = kernel_of(problem)
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(4))
    call.hidden_states[::3] *= 1e4
    call.hidden_states[1::3] *= 1e-4
    truth = reference_experts(problem, weights, *call)
    call.hidden_states[7] = math.nan
    out = kernel(*call, out=torch.zeros_like(call.hidden_states))
    assert out[7].isnan().all()
    sound = torch.arange(tokens, device="cuda") != 7
    assert out[sound].isfinite().all()
    assert float(worst_row(out[sound], truth[sound])) <= 4 * tolerance(problem.quant, problem.dtype, tokens * 640)
