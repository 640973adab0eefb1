"""Tall tiles: which configurations have them, how many programs they take, and layers in which experts need them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.backends._triton import schedules
from moereg.bench.inputs import random_weights
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.gemm.fit import CallShape, fit_pair
from moereg.kernels.gemm.grouped import num_programs
from moereg.kernels.gemm.rules import CONFIG_RULES, select_config
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.plan import RoutePlan, max_num_blocks
from moereg.numerics.reference import relative_error
from moereg.spec.problem import MoEProblem
from moereg.testing.checks import GuardedLayer
from moereg.testing.inputs import Inputs
from tests.backends.test_triton_layers import case_of
from tests.kernels.references import block_map_reference
from tests.kernels.triton_cases import BF16, DEVICE, FP16, SM90, bound, make_problem, random

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

H200_SHARED_BYTES = 227 * 1024


def fitted(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    depth: int,
    *,
    element_bytes: int = 2,
    packed_bits: int | None = None,
    shared_bytes: int | None = H200_SHARED_BYTES,
) -> GemmPair:
    """The pair that a gated layer takes for that many tokens."""
    rows = num_tokens * top_k / num_experts
    pair = select_config(num_tokens, rows, element_bytes, shared_bytes, packed_bits)
    assert isinstance(pair, GemmPair)
    shape = CallShape(
        most_rows=num_tokens,
        rows_per_expert=rows,
        top_k=top_k,
        gate_up_columns=2 * depth,
        down_columns=hidden_size,
        down_depth=depth,
        element_bytes=element_bytes,
        is_packed=packed_bits is not None,
        shared_bytes=shared_bytes,
    )
    return fit_pair(pair, shape)


def tile(config: GroupedGemmConfig | None) -> str:
    """Rows x columns x depth and stages."""
    return "" if config is None else f"{config.block_m}x{config.block_n}x{config.block_k} {config.num_stages}"


# Tokens, experts, choices, H, I_pad; low and tall tiles of both products. Rows of layers were timed on an H200.
FITTED = {
    "gpt_oss": ((256, 128, 4, 2880, 2880), "16x64x128 5", "64x128x64 4", "16x64x128 4", "64x128x64 3"),
    "gpt_oss_64": ((64, 128, 4, 2880, 2880), "16x64x128 5", "64x128x64 4", "16x64x128 4", "64x64x64 4"),
    "qwen3": ((256, 128, 8, 2048, 768), "32x128x128 3", "64x128x64 4", "32x128x128 3", "64x128x64 4"),
    "qwen3_64": ((64, 128, 8, 2048, 768), "16x64x128 5", "64x64x64 4", "16x64x128 4", "64x64x64 4"),
    # 128 tiles of 64 columns: not one for each multiprocessor. 132 would be.
    "mixtral_64": ((64, 8, 2, 4096, 14336), "32x128x128 3", "64x128x64 4", "32x128x128 3", "64x32x64 8"),
    "mixtral_32": ((32, 8, 2, 4096, 14336), "16x64x128 5", "64x128x64 4", "16x64x128 4", "64x32x64 6"),
    "one_tile_too_many": ((64, 8, 2, 4288, 14336), "32x128x128 3", "64x128x64 4", "32x128x128 3", "64x64x64 4"),
    "one_more_than_direct": ((17, 128, 8, 2048, 768), "16x64x128 5", "64x64x64 4", "16x64x128 4", "64x64x64 4"),
    # 176 tiles of 128 columns, and one row of tiles less.
    "glm_64": ((64, 128, 8, 4096, 1408), "16x64x128 5", "64x128x64 4", "16x64x128 4", "64x64x64 4"),
    "less_than_glm": ((64, 128, 7, 4096, 1408), "16x64x128 5", "64x64x64 4", "16x64x128 4", "64x64x64 4"),
    "direct": ((16, 128, 8, 2048, 768), "16x64x128 5", "", "16x128x128 4", ""),
    "direct_mixtral": ((16, 8, 2, 4096, 14336), "16x64x128 5", "", "16x64x256 3", ""),
    "direct_gpt_oss": ((2, 128, 4, 2880, 2880), "16x64x128 5", "", "16x64x256 3", ""),
    "direct_many_tiles": ((16, 128, 5, 2880, 2880), "16x64x128 5", "", "16x128x128 4", ""),
    "direct_shallow": ((16, 60, 4, 2048, 1408), "16x64x128 5", "", "16x128x128 4", ""),
    "as_tall": ((1024, 128, 4, 2880, 2880), "64x128x64 4", "", "64x128x64 4", ""),
    "all_rows_in_a_tile": ((32, 8, 4, 2048, 768), "32x128x128 3", "", "32x128x128 3", ""),
    "eight_warps": ((1024, 128, 8, 2048, 768), "128x256x64 4", "", "128x256x64 4", ""),
    # A quarter of the intermediate size: steps of 64 in the second product.
    "shard": ((64, 128, 8, 2048, 192), "16x64x128 5", "64x64x64 4", "16x128x64 3", "64x64x64 2"),
    "direct_shard": ((16, 128, 8, 2048, 192), "16x64x128 5", "", "16x128x64 3", ""),
    "least_shard": ((256, 128, 8, 2048, 64), "32x128x128 3", "64x64x64 4", "32x128x64 2", "64x64x64 2"),
    "largest_shard": ((64, 128, 8, 2048, 256), "16x64x128 5", "64x64x64 4", "16x128x64 4", "64x64x64 3"),
    "not_a_shard": ((64, 128, 8, 2048, 320), "16x64x128 5", "64x64x64 4", "16x64x128 4", "64x64x64 4"),
}


@pytest.mark.parametrize("name", FITTED)
def test_fitted_tiles(name: str) -> None:
    sizes, *expected = FITTED[name]
    pair = fitted(*sizes)
    found = [tile(config) for product in (pair.gate_up, pair.down) for config in (product, product.tall)]
    assert found == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "low", "tall"),
    [
        (8, 128, "8x128x256 3", ""),
        (16, 128, "8x128x256 3", ""),
        (17, 128, "8x128x256 3", "32x64x128 3"),
        (64, 128, "8x128x256 3", "32x64x128 3"),
        (256, 128, "16x128x128 4", "32x64x128 3"),
        (512, 128, "32x128x128 3", ""),
        # The average expert has 5 rows, then 10.
        (32, 26, "8x128x256 3", ""),
        (20, 8, "16x128x128 4", ""),
    ],
)
def test_fitted_tiles_of_packed_weights(num_tokens: int, num_experts: int, low: str, tall: str) -> None:
    pair = fitted(num_tokens, num_experts, 4, 2880, 2880, packed_bits=4)
    assert (tile(pair.gate_up), tile(pair.gate_up.tall)) == (low, tall)
    assert tile(pair.down.tall) == tall


def test_products_without_matrix_units_stay() -> None:
    pair = fitted(64, 128, 8, 2048, 192, element_bytes=4)
    assert pair == select_config(64, 4, 4, H200_SHARED_BYTES)
    assert pair.tall == 0


@pytest.mark.parametrize("shared_bytes", [64 * 1024, 99 * 1024, 163 * 1024, H200_SHARED_BYTES, None])
@pytest.mark.parametrize("depth", [64, 128, 192, 256, 768])
@pytest.mark.parametrize("number", range(len(CONFIG_RULES)))
def test_tall_tiles_leave_as_many_programs(number: int, depth: int, shared_bytes: int | None) -> None:
    """And fit the device; only the least, of two stages, may take more than their part."""
    rule = CONFIG_RULES[number]
    if not isinstance(rule.configs, GemmPair):
        return
    tokens, rows = min(rule.max_tokens, 300), min(rule.max_rows_per_expert, 1000)
    for top_k, hidden_size in ((2, 4096), (8, 512)):
        experts = max(1, round(tokens * top_k / rows))
        pair = fitted(
            int(tokens), experts, top_k, hidden_size, depth, element_bytes=rule.element_bytes, shared_bytes=shared_bytes
        )
        for config in (pair.gate_up, pair.down):
            tall = config.tall
            if tall is None:
                continue
            assert (tall.num_warps, tall.slices, tall.block_m) == (config.num_warps, 1, pair.tall)
            own = (config.num_stages - 1) * 2 * config.block_k * (config.block_m + config.block_n)
            needed = tall.num_stages * 2 * tall.block_k * (tall.block_m + tall.block_n)
            shared = H200_SHARED_BYTES if shared_bytes is None else shared_bytes
            assert needed <= shared
            if tall.num_stages > 2:
                assert shared // (needed + 1024) >= shared // (own + 1024)


LOW = GroupedGemmConfig(block_m=16, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=2)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300) | st.sampled_from([0, 16, 17, 64, 65, 128]), min_size=1, max_size=30),
    columns=st.integers(1, 40),
    block_n=st.sampled_from([64, 128]),
    tall=st.sampled_from([32, 64, 128]),
    elsewhere=st.integers(0, 50),
)
def test_there_are_programs_for_any_counts(
    counts: list[int], columns: int, block_n: int, tall: int, elsewhere: int
) -> None:
    config = dataclasses.replace(LOW, tall=dataclasses.replace(LOW, block_m=tall, block_n=block_n))
    num_columns = 32 * columns
    num_routes = sum(counts) + elsewhere
    held, offsets = torch.tensor(counts), torch.tensor([0, *counts]).cumsum(0)
    plan = block_map_reference(held, offsets[:-1], 16, tall=tall)
    num_tall = int(plan.num_tall)
    needed = num_tall * math.ceil(num_columns / block_n)
    needed += (int(plan.num_blocks) - num_tall) * math.ceil(num_columns / 64)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(BlockMap)}
    # A call knows but how many routes and experts there are.
    fields["block_expert"] = torch.empty(max_num_blocks(num_routes, len(counts), 16), dtype=torch.int32)
    routes = torch.empty(num_routes, dtype=torch.int32)
    standard = RoutePlan(
        **fields, route_expert=routes, route_row=routes, sorted_routes=routes, expert_offsets=offsets.int()
    )
    assert needed <= num_programs(standard, config, num_columns) <= 2 * standard.max_blocks * math.ceil(columns / 2)
    fields["block_expert"] = torch.empty(len(counts) * math.ceil(max(counts) / 16), dtype=torch.int32)
    assert needed <= num_programs(BlockMap(**fields), config, num_columns)


def gapped_ids(counts: list[int], top_k: int, num_tokens: int) -> torch.Tensor:
    """[T, K]: routes to experts of these counts, one a token; the others go nowhere."""
    ids = torch.full((top_k, num_tokens), -1)
    flat = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)])
    ids.view(-1)[: flat.numel()] = flat
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))
    return ids.t()[order].int().contiguous().to(DEVICE)


def make_layer(problem: MoEProblem, num_tokens: int, counts: list[int]) -> tuple[GuardedLayer, Inputs]:
    """A layer and a call of it, whose experts have these counts of rows."""
    weights = random_weights(problem, torch.Generator().manual_seed(0), torch.device(DEVICE))
    inputs = Inputs(
        random(num_tokens, problem.hidden_size, dtype=problem.torch_dtype),
        random(num_tokens, problem.top_k, dtype=torch.float32).abs(),
        gapped_ids(counts, problem.top_k, num_tokens),
    )
    bits = None if problem.quant.weight is None else problem.quant.weight.bits
    rows_per_expert = inputs.topk_ids.numel() / problem.num_experts
    schedule = schedules.select(problem, inputs.hidden_states, rows_per_expert, bits)
    assert isinstance(schedule, schedules.Sorted)
    assert schedule.configs.tall
    return GuardedLayer(case_of(problem, SM90), weights, calls=[inputs]), inputs


@pytest.mark.parametrize(
    ("problem", "num_tokens", "counts"),
    [
        (make_problem(12, 2, 72, 40, BF16, activation="swigluoai", has_bias=True), 66, [0, 66, 3, 0, 17, 16]),
        (make_problem(16, 2, 64, 320, FP16, activation="relu2"), 34, [34, 0, 1, 33]),
        (make_problem(24, 2, 64, 40, BF16, quant="mxfp4_w4a16", has_bias=True), 17, [12, 0, 9, 8, 1]),
    ],
    ids=["one_has_most", "not_gated", "packed"],
)
def test_layers_with_tall_and_low_tiles(problem: MoEProblem, num_tokens: int, counts: list[int]) -> None:
    layer, inputs = make_layer(problem, num_tokens, counts)
    assert relative_error(layer(inputs), layer.truths[0]) < bound(problem.torch_dtype, 3)


def test_order_of_tokens_changes_no_bit_of_tall_tiles() -> None:
    """A row's bits do not depend on where it lies among its expert's."""
    layer, inputs = make_layer(make_problem(12, 1, 64, 40, BF16), 35, [18, 0, 17])
    order = torch.randperm(35, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    shuffled = Inputs(*(tensor[order] for tensor in inputs.call))
    assert torch.equal(layer(shuffled), layer(inputs)[order])
