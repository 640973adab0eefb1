"""Configurations and values that the host hands to kernels are data: importing them needs no triton."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moereg
from moereg.kernels.gemm.config import CONFIG_RULES, PACKED_RULES, GemmPair
from moereg.kernels.hopper import config as hopper
from moereg.kernels.sizes import GUARD_ROWS

PLAIN_MODULES = (
    "moereg.kernels.sizes",
    "moereg.kernels.gemm.config",
    "moereg.kernels.gemm.epilogue",
    "moereg.kernels.quantized.config",
    "moereg.kernels.hopper.config",
    "moereg.kernels.hopper.packed_config",
)


@pytest.mark.parametrize("module", PLAIN_MODULES)
def test_importing_needs_no_triton(module: str) -> None:
    code = f"import sys; sys.modules['triton'] = None; import {module}"
    environment = {**os.environ, "PYTHONPATH": str(Path(moereg.__file__).parent.parent)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert importlib.import_module(module).__doc__


def test_both_products_of_a_rule_take_tiles_of_as_many_rows() -> None:
    """They share a plan."""
    for rule in (*CONFIG_RULES, *PACKED_RULES):
        if isinstance(rule.configs, GemmPair):
            assert rule.configs.gate_up.block_m == rule.configs.down.block_m


# (most rows an expert, tile, whether tokens are copied, whether heavy experts come first), up to any number of rows.
BY_TOKEN_FEW = [(176, "128x256", False, False), (400, "256x128", False, True), (math.inf, "128x256", False, True)]
BY_TOKEN_MANY = [(176, "128x256", False, False), (math.inf, "128x256", False, True)]
COPIED = [(176, "128x256", False, False), (math.inf, "256x128", True, True)]


@pytest.mark.parametrize(
    ("num_columns", "num_experts", "expected"),
    [
        (1536, 8, BY_TOKEN_FEW),
        (4032, 63, BY_TOKEN_FEW),
        (384, 128, BY_TOKEN_FEW),
        (512, 64, BY_TOKEN_MANY),
        (1536, 128, BY_TOKEN_MANY),
        (4096, 8, COPIED),
        (5760, 128, COPIED),
        # The batched format.
        (math.inf, 8, COPIED),
        (math.inf, 64, COPIED),
    ],
)
def test_hopper_rules(num_columns: float, num_experts: int, expected: list[tuple[float, str, bool, bool]]) -> None:
    least = 1.0
    for most, tile, copies, heavy_first in expected:
        for rows in (least, min(most, 1e6)):
            rule = hopper.select_config(rows, num_columns, num_experts)
            assert (rule.copies_rows, rule.heavy_first) == (copies, heavy_first), rows
            for config in (rule.gate_up, rule.down):
                assert f"{config.block_m}x{config.block_n}" == tile, rows
        least = math.nextafter(most, math.inf)


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
        assert all(low < high for low, high in itertools.pairwise(most))
        # The producer loads halves, and a longest tile is the plan's.
        assert most[1:] == [
            config.block_m // 2,
            config.block_m // 2 + config.slack,
            config.block_m,
            config.block_m + config.slack,
        ]
