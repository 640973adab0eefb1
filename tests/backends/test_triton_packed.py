"""The Triton kernels on packed weights against torch: interpreted on a CPU, or on a CUDA device.

Products are compared with fp64 on restored weights. Restored weights are exact, so the only roundings are those of
sums.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moereg.backends._triton import packed
from moereg.backends._triton.packed import fold_scales
from moereg.backends.triton_moe import TritonPackedExperts
from moereg.bench.inputs import random_weights
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig, SinglePair
from moereg.kernels.gemm.grouped import down_gemm
from moereg.kernels.gemm.rules import PACKED_RULES, select_config
from moereg.kernels.gemm.single import down_single, share_slices
from moereg.kernels.packed.weights import STEP, PackedMatrix
from moereg.kernels.rows.direct import DirectRoutes
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform
from moereg.quantize import dequantize_weights
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import default_device
from moereg.weights.layouts import round_up
from moereg.weights.permuted import ExpertWeights
from tests.backends.test_triton_one_launch import run, small_inputs, small_problem

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")
GROUPS = ("g32", "g64", "g128", "gall")
SCHEMES = (
    *(f"int4_w4a16_{group}{zero_points}" for group in GROUPS for zero_points in ("", "_zp")),
    "int8_w8a16",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)

# Columns shared by warps on the matrix units, and a step cut into slices, one a warp.
TILE = GroupedGemmConfig(block_m=16, block_n=16, block_k=STEP, group_m=1, num_warps=4, num_stages=2, mask_rows=True)
CONFIGS = {
    "warps_share_columns": TILE,
    "long_step": dataclasses.replace(TILE, block_k=2 * STEP),
    "slices": dataclasses.replace(TILE, num_warps=2, slices=2),
}
SINGLE = dataclasses.replace(TILE, block_m=1, num_warps=8, slices=8)


def plain_problem(scheme: str, num_experts: int, dtype: str = "bfloat16") -> MoEProblem:
    """Rows of 200 elements, which neither a step nor a block divides, and 24 columns, no whole number of tiles."""
    sizes = {"num_experts": num_experts, "top_k": 1, "hidden_size": 24, "intermediate_size": 200}
    return MoEProblem(**sizes, dtype=dtype, quant=scheme, activation="relu2")


def make_weights(problem: MoEProblem) -> ExpertWeights:
    return random_weights(problem, torch.Generator().manual_seed(0), DEVICE)


def packed_w2(problem: MoEProblem, weights: ExpertWeights) -> PackedMatrix:
    """The second matrix as the backend gives it to the kernels."""
    experts = packed.Standard(TritonPackedExperts(problem, SM90))
    _, w2 = experts.matrices(experts.permute_weights(weights))
    assert isinstance(w2, PackedMatrix)
    return w2


# Slow where it is about neither: how products are cut up does not depend on the dtype.
@pytest.mark.few
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param(
            dtype,
            config,
            id=f"{dtype}-{name}",
            marks=[pytest.mark.slow] if dtype == "float16" and name != "warps_share_columns" else [],
        )
        for dtype in ("bfloat16", "float16")
        for name, config in CONFIGS.items()
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_restored_weights(scheme: str, dtype: str, config: GroupedGemmConfig) -> None:
    problem = plain_problem(scheme, 2, dtype)
    weights = make_weights(problem)
    restored = dequantize_weights(weights, torch.float64)[1]
    num_tokens = 5
    topk_ids = torch.tensor([[1], [0], [1], [1], [0]], dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(num_tokens, round_up(200, 64), dtype=problem.torch_dtype, device=DEVICE)
    rows[:, :200] = torch.randn(num_tokens, 200, generator=torch.Generator().manual_seed(1)).to(rows)
    out = torch.empty(num_tokens, 24, device=DEVICE)
    plan = DirectRoutes(topk_ids, None, 2, config.block_m)
    down_gemm(out, rows, packed_w2(problem, weights), plan, config)
    for token, (expert,) in enumerate(topk_ids.tolist()):
        terms = restored[expert] * rows[token, :200].double()
        bound = terms.abs().sum(1) * 2**-21
        assert ((out[token].double() - terms.sum(1)).abs() <= bound).all()


# Schemes restore weights, which the products above show; one of them shows how several tokens share slices.
@pytest.mark.few(most=2)
@pytest.mark.parametrize(
    ("scheme", "num_tokens"),
    [
        pytest.param(scheme, num_tokens, marks=[pytest.mark.slow] if num_tokens > 1 and number else [])
        for number, scheme in enumerate(("int4_w4a16_g32_zp", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16"))
        for num_tokens in (1, 3)
    ],
)
def test_slices_give_the_layer(scheme: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem(scheme)
    config = CONFIGS["slices"]
    monkeypatch.setattr(
        "moereg.kernels.gemm.rules.select_config", lambda *_, **__: GemmPair(config, config, sort_routes=False)
    )
    weights, inputs = make_weights(problem), small_inputs(problem, num_tokens, 0)
    experts = TritonPackedExperts(problem, SM90)
    out = run(experts, experts.permute_weights(weights, problem), inputs)
    given = inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
    expected = reference_experts(problem, weights, *given)
    assert relative_error(out, expected) <= tolerance(problem.quant, problem.dtype, out.numel())


@pytest.mark.few
@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16_g128", "int4_w4a16_g32_zp", "int4_w4a16_gall", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16"]
)
def test_routes_of_one_token_are_added_up(scheme: str, pieces: int) -> None:
    """Compares with fp64 sums on restored weights; routes name one expert twice, an unknown one and another rank's."""
    problem = plain_problem(scheme, 3)
    weights = make_weights(problem)
    restored = dequantize_weights(weights, torch.float64)[1]
    expert_map = torch.tensor([2, -1, 0, 1, 0], dtype=torch.int32, device=DEVICE)
    ids = [3, 1, 0, 3, 7, 4, -1][: 8 // pieces]
    local = [None if not 0 <= i < 5 or expert_map[i] < 0 else int(expert_map[i]) for i in ids]
    topk_ids = torch.tensor([ids], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    topk_weights = torch.rand(1, len(ids), generator=generator).to(DEVICE)
    bias = torch.randn(3, 24, generator=generator).to(DEVICE)
    # Rows of routes that add nothing are never written.
    rows = torch.full((len(ids), 256), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for row, expert in zip(rows, local, strict=True):
        if expert is not None:
            row.zero_()[:200] = torch.randn(200, generator=generator).to(row)
    out = torch.empty(1, 24, device=DEVICE)
    w2 = packed_w2(problem, weights)
    routes = DirectRoutes(topk_ids, expert_map, 5, SINGLE.block_m)
    down_single(out, rows, w2, routes, SINGLE, bias=bias, topk_weights=topk_weights)
    expected, bound = (torch.zeros(24, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for row, weight, expert in zip(rows, topk_weights[0].tolist(), local, strict=True):
        if expert is not None:
            terms = restored[expert] * row[:200].double()
            expected += weight * (terms.sum(1) + bias[expert])
            bound += weight * (terms.abs().sum(1) + bias[expert].abs()) * 2**-20
    assert ((out[0].double() - expected).abs() <= bound).all()


def test_more_routes_take_more_slices_and_fewer_stages() -> None:
    config = dataclasses.replace(SINGLE, num_stages=6)
    assert share_slices(config, 2) == (config, 4)
    assert share_slices(config, 6) == (config, 1)
    wide = dataclasses.replace(config, num_warps=16, slices=16, num_stages=3)
    assert share_slices(config, 10) == (wide, 1)


def test_devices_that_need_higher_tiles_get_them() -> None:
    for tokens, rows in ((1, 0.06), (1, 1), (8, 0.5), (64, 4), (math.inf, 2)):
        found = select_config(tokens, rows, 2, None, 4, 16)
        assert isinstance(found, GemmPair)
        assert found.gate_up.block_m >= 16
        assert found.sort_routes == (tokens > 16)


def test_callers_without_a_kernel_for_one_token_get_none() -> None:
    assert isinstance(select_config(1, 1, 2, None, 4), SinglePair)
    assert isinstance(select_config(1, 1, 2, None, 4, single=False), GemmPair)


def test_every_rule_can_be_launched() -> None:
    platform_bytes = 227 * 1024
    for rule in PACKED_RULES:
        assert isinstance(rule.configs, (GemmPair, SinglePair))
        for config in (rule.configs.gate_up, rule.configs.down):
            assert config.block_k % STEP == 0
            assert config.slices in (1, config.num_warps)
        assert rule.configs.gate_up.block_m == rule.configs.down.block_m
        if isinstance(rule.configs, SinglePair):
            assert rule.max_tokens == 1
        else:
            assert rule.configs.sort_routes or rule.max_tokens <= rule.configs.gate_up.block_m
        for bits in (4, 8):
            if bits > rule.max_packed_bits:
                continue
            tokens = min(rule.max_tokens, 4096)
            found = select_config(tokens, min(rule.max_rows_per_expert, 1000), 2, platform_bytes, bits)
            assert dataclasses.replace(found, gate_up=rule.configs.gate_up, down=rule.configs.down) == rule.configs


def test_scales_of_groups_of_zeros_do_not_count() -> None:
    """A group of zeros has scale 1, next to which float16 would lose groups of small numbers."""
    scale = torch.tensor([[127, 100, 99]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes, left = fold_scales(scale, torch.tensor([[False, True, True]]))
    assert codes.tolist() == [[253, 253, 252]]
    assert left.tolist() == [[2.0**-27]]
    codes, left = fold_scales(scale, torch.tensor([[False, False, False]]))
    assert left.isfinite().all()
