"""Configurations and values that the host hands to kernels are data: importing them needs no triton."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from moereg.kernels.backward import config as backward
from moereg.kernels.gemm import rules
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.gemm.fit import CallShape, fit_pair
from moereg.kernels.gemm.rules import CONFIG_RULES, PACKED_RULES
from moereg.kernels.hopper import config as hopper
from moereg.kernels.quantized import config as quantized
from moereg.kernels.sizes import CODE_PAD, GUARD_ROWS, SPREAD_HEAVY
from tests.cli.command import printed

PLAIN_MODULES = (
    "moereg.kernels.sizes",
    "moereg.kernels.gemm.config",
    "moereg.kernels.gemm.epilogue",
    "moereg.kernels.gemm.rules",
    "moereg.kernels.quantized.config",
    "moereg.kernels.hopper.config",
    "moereg.kernels.hopper.packed_config",
)


def test_importing_needs_no_triton() -> None:
    printed("-c", f"import sys; sys.modules['triton'] = None; import {', '.join(PLAIN_MODULES)}")


def test_both_products_of_a_rule_take_tiles_of_as_many_rows() -> None:
    """They share a plan."""
    for rule in (*CONFIG_RULES, *PACKED_RULES):
        if isinstance(rule.configs, GemmPair):
            assert rule.configs.gate_up.block_m == rule.configs.down.block_m


# (most rows an expert, tiles, whether tokens are copied, how heavy experts come), up to any number of rows.
LOW = [(48, "128x256", False, False), (72, "64x128 64x256", False, False)]
FEW_ROWS = (176, "128x256", False, False)
BY_TOKEN_FEW = [FEW_ROWS, (400, "256x128", False, True), (math.inf, "128x256", False, True)]
BY_TOKEN_MANY = [FEW_ROWS, (math.inf, "128x256", False, SPREAD_HEAVY)]
COPIED = [FEW_ROWS, (math.inf, "256x128", True, True)]


@pytest.mark.parametrize(
    ("num_columns", "num_experts", "expected"),
    [
        (1536, 8, BY_TOKEN_FEW),
        (4032, 63, BY_TOKEN_FEW),
        (384, 128, LOW + BY_TOKEN_FEW),
        (512, 64, LOW + BY_TOKEN_MANY),
        (768, 63, LOW + BY_TOKEN_FEW),
        (769, 64, BY_TOKEN_MANY),
        (1536, 128, BY_TOKEN_MANY),
        (1537, 128, [FEW_ROWS, (math.inf, "128x256", False, True)]),
        (4096, 8, COPIED),
        (5760, 128, COPIED),
        # The batched format.
        (math.inf, 8, COPIED),
        (math.inf, 64, COPIED),
    ],
)
def test_hopper_rules(num_columns: float, num_experts: int, expected: list[tuple[float, str, bool, int]]) -> None:
    least = 1.0
    for most, tiles, copies, heavy_first in expected:
        for rows in (least, sorted((least, 64.0, most))[1], min(most, 1e6)):
            rule = hopper.select_config(rows, num_columns, num_experts)
            assert (rule.copies_rows, rule.heavy_first) == (copies, heavy_first), rows
            assert {*tiles.split()} == {f"{one.block_m}x{one.block_n}" for one in (rule.gate_up, rule.down)}, rows
            assert rule.gate_up.block_n <= rule.down.block_n
        least = math.nextafter(most, math.inf)


@pytest.mark.parametrize(
    ("num_routes", "hidden_size", "fewest"), [(512, 4096, 64), (513, 4096, 80), (1408, 2048, 88), (1, 1, 1)]
)
def test_the_fewest_tiles_of_any_loads(num_routes: int, hidden_size: int, fewest: int) -> None:
    assert hopper.count_fewest_tiles(num_routes, hidden_size) == fewest


@pytest.mark.parametrize(
    ("rows", "num_columns", "fewest", "columns_of_down"),
    [(64, 28672, 64, 128), (24, 384, 88, 128), (96, 28672, 88, 128), (64, 28672, 89, 256), (97, 28672, 64, 256)],
)
def test_few_tiles_have_half_the_columns(rows: float, num_columns: int, fewest: int, columns_of_down: int) -> None:
    rule = hopper.select_config(rows, num_columns, 8, fewest)
    assert rule.down.block_n == columns_of_down
    assert rule.gate_up.block_n == 256


def test_no_store_of_a_body_reaches_into_its_slack() -> None:
    for rule in hopper.CONFIG_RULES:
        # Gated, not gated.
        for share in (4, 2):
            rule.gate_up.rows_of_store(rule.gate_up.block_n // share)
        assert rule.down.rows_of_store(rule.down.block_n // 2) * rule.down.block_n // 2 == rule.down.staged_elements
    # Half a tile of 64 rows has a slack behind it, or only the whole one.
    three = hopper.HopperGemmConfig(block_m=64, block_n=128, bodies=hopper.THREE_BODIES)
    assert three.rows_of_store(32) == 64
    five = dataclasses.replace(three, bodies=hopper.FIVE_BODIES)
    assert five.rows_of_store(64) == 32
    with pytest.raises(AssertionError, match="a staged store of 64 rows may overwrite the slack behind 32 rows"):
        five.rows_of_store(32)


@pytest.mark.parametrize(
    ("rows", "grouped", "early", "leads"),
    [
        (30.5, True, True, False),
        (110, True, True, False),
        (math.nextafter(110, 111), True, False, True),
        (1e6, True, False, True),
        # Scales of whole rows: neither was measured there.
        (30.5, False, False, False),
        (1e6, False, False, False),
    ],
)
def test_hopper_rules_of_codes(rows: float, grouped: bool, early: bool, leads: bool) -> None:
    rule = hopper.select_quantized_rule(rows, grouped)
    assert rule.encodes_early == early
    for config in (rule.gate_up, rule.down):
        assert (config.early, config.leads) == (early, leads)
        # `load_early` fills all slots, once.
        assert config.num_stages == 4


def test_every_number_of_rows_has_the_shortest_body_that_holds_it() -> None:
    for config in {config for rule in hopper.CONFIG_RULES for config in (rule.gate_up, rule.down)}:
        assert config.block_m % 4 == 0
        # The last two, and no quarter without a half.
        assert config.bodies >> 3 == 0b11
        assert config.bodies & 0b11 != 0b01
        assert config.block_m + config.slack <= GUARD_ROWS
        most = [quarters * config.block_m // 4 + more * config.slack for quarters, more in hopper.BODIES]
        own = [rows for body, rows in enumerate(most) if config.bodies >> body & 1]
        assert all(low < high for low, high in itertools.pairwise(own))
        # The producer loads halves, and a longest tile is the plan's.
        assert most[1:] == [
            config.block_m // 2,
            config.block_m // 2 + config.slack,
            config.block_m,
            config.block_m + config.slack,
        ]


@pytest.mark.parametrize("shared_bytes", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
def test_pipelines_fit_shared_memory(shared_bytes: int) -> None:
    """Of every rule of the portable kernels, whose stages hold rows of both operands."""
    fitted: list[tuple[GroupedGemmConfig, int, int]] = []
    for rule in CONFIG_RULES:
        given = int(min(rule.max_tokens, 10**6)), rule.max_rows_per_expert, rule.element_bytes, shared_bytes
        pair = rules.select_config(*given)
        if isinstance(pair, GemmPair):
            fitted += [(config, 1, rule.element_bytes) for config in (pair.gate_up, pair.down)]
    for coded, num_halves in itertools.product(quantized.CONFIG_RULES, (1, 2)):
        given = int(min(coded.max_tokens, 10**6)), coded.max_rows_per_expert, num_halves, shared_bytes
        pair = quantized.select_quantized_config(*given)
        fitted += [(pair.gate_up, num_halves, 1), (pair.down, 1, 1)]
    for rows, element_bytes in itertools.product((0.01, 96, 97, 1e9), (2, 4)):
        configs = backward.select_training_configs(rows, element_bytes, shared_bytes)
        assert configs.rows.block_m == configs.down_input.block_m
        assert configs.block_m >= backward.MIN_TRAINING_BLOCK_M
        thin = configs.low_rank_products(64), configs.a_gradients(64), configs.b_gradients(64)
        fitted += [(one, 1, element_bytes) for one in (configs.rows, configs.down_input, configs.weights, *thin)]
    for config, halves, element_bytes in fitted:
        stage = (config.block_m + halves * config.block_n) * config.block_k * element_bytes
        assert config.num_stages == 1 or config.num_stages * stage <= shared_bytes


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 0.01), (1, 2.0), (2, 0.01), (16, 16), (17, 17), (100, 64), (10**6, 1e9)]
)
def test_rules_cover_every_number_of_rows(tokens: int, rows: float) -> None:
    coded = quantized.select_quantized_config(tokens, rows, 2)
    for configs in (coded, *(rules.select_config(tokens, rows, element_bytes) for element_bytes in (2, 4))):
        if isinstance(configs, GemmPair):
            assert configs.gate_up.block_m == configs.down.block_m
            assert configs.sort_routes or tokens <= configs.gate_up.block_m
        else:
            assert tokens == 1
    assert CODE_PAD % coded.gate_up.block_n == 0
    # A step is one group of 1 x 128.
    assert coded.gate_up.block_k % CODE_PAD == coded.down.block_k % CODE_PAD == 0


@pytest.mark.parametrize("packed_bits", [None, 4, 8])
def test_rows_that_keep_their_bits_are_summed_in_one_order(packed_bits: int | None) -> None:
    """No GEMV, no slices of the depth, and of packed and 8-bit weights no tile that wgmma does not multiply."""
    counts = (1, 2, 8, 9, 16, 17, 10**6), (0.01, 5, 11, 12, 22, 23, 96, 97, 1e9)
    for tokens, rows in itertools.product(*counts):
        pair = rules.select_config(tokens, rows, 2, packed_bits=packed_bits, invariant=True)
        assert isinstance(pair, GemmPair)
        assert pair.sort_routes or tokens <= pair.gate_up.block_m
        sizes = {"top_k": 8, "gate_up_columns": 1536, "down_columns": 2048, "down_depth": 768, "element_bytes": 2}
        shape = CallShape(
            most_rows=tokens, rows_per_expert=rows, **sizes, is_packed=packed_bits is not None, shared_bytes=None
        )
        pair = fit_pair(pair, shape)
        for config in filter(None, (pair.gate_up, pair.down, pair.gate_up.tall, pair.down.tall)):
            assert config.slices == 1
            if packed_bits is not None:
                assert config.chained
                assert config.block_m >= 16
                assert config.block_k % 128 == 0
        coded = quantized.select_quantized_config(tokens, rows, 2, invariant=True)
        assert coded.gate_up.block_m == coded.down.block_m >= 64
        assert min(coded.gate_up.num_warps, coded.down.num_warps) >= 4
        assert coded.sort_routes or tokens <= coded.gate_up.block_m
