"""Launch configurations of the expert matmuls with 8-bit weights and activations, and the rule that picks one.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6) on 2026-11-21 over qwen3-30b-a3b and deepseek-v3 in fp8_block128 at
T 1, 16, 64, 256 and 1024, the halves of a pair one after the other over 10 to 20 candidates each; fp8_channel_token and
int8_w8a8 take at most 3 % longer with the same. Rows beyond 100 an expert are not tuned.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig, fit_pipeline


@dataclass(frozen=True, slots=True)
class QuantizedConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        max_tokens: Applies up to this number of tokens,
        max_rows_per_expert: and up to this average of rows per expert.
        configs: Of both products; `block_n` of the first is that of gate, and of up once more.
    """

    max_tokens: float
    max_rows_per_expert: float
    configs: GemmPair


def _pair(gate_up: GroupedGemmConfig, down: GroupedGemmConfig, sort_routes: bool = True) -> GemmPair:
    return GemmPair(gate_up, down, sort_routes)


# First match counts.
CONFIG_RULES = (
    QuantizedConfigRule(
        1,
        math.inf,
        _pair(
            GroupedGemmConfig(16, 32, 128, 1, 2, 5, True),
            GroupedGemmConfig(16, 64, 128, 1, 2, 4, True),
            sort_routes=False,
        ),
    ),
    QuantizedConfigRule(
        16,
        math.inf,
        _pair(
            GroupedGemmConfig(16, 32, 256, 1, 4, 3, True),
            GroupedGemmConfig(16, 128, 256, 1, 4, 3, True),
            sort_routes=False,
        ),
    ),
    QuantizedConfigRule(
        math.inf,
        11,
        _pair(GroupedGemmConfig(16, 32, 256, 1, 4, 3, True), GroupedGemmConfig(16, 128, 256, 1, 4, 3, True)),
    ),
    # From 64 rows on a tensor core of Hopper takes both operands from shared memory: tiles of 32 rows were slower even
    # where they hold all rows. Two programs a multiprocessor hide each other's scaling of partial products.
    QuantizedConfigRule(
        math.inf,
        100,
        _pair(GroupedGemmConfig(64, 64, 128, 1, 4, 4, True), GroupedGemmConfig(64, 128, 128, 1, 4, 4, True)),
    ),
    QuantizedConfigRule(
        math.inf,
        math.inf,
        _pair(GroupedGemmConfig(128, 128, 128, 8, 8, 4), GroupedGemmConfig(128, 128, 128, 8, 8, 4)),
    ),
)

# What a plan's block map is sized for when the configuration is not known yet.
MIN_BLOCK_M = min(rule.configs.gate_up.block_m for rule in CONFIG_RULES)


def select_quantized_config(
    num_tokens: float, rows_per_expert: float, num_halves: int, shared_bytes: int | None = None
) -> GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T.
        rows_per_expert: Average number of rows per expert.
        num_halves: 2 where the first product is of gate and up, else 1.
        shared_bytes: Shared memory that one program may use on the device; shortens pipelines that would not fit.
    """
    for rule in CONFIG_RULES:
        if num_tokens <= rule.max_tokens and rows_per_expert <= rule.max_rows_per_expert:
            gate_up = fit_pipeline(rule.configs.gate_up, _stage_bytes(rule.configs.gate_up, num_halves), shared_bytes)
            down = fit_pipeline(rule.configs.down, _stage_bytes(rule.configs.down, 1), shared_bytes)
            return dataclasses.replace(rule.configs, gate_up=gate_up, down=down)
    raise AssertionError("the last rule has no bounds")


def _stage_bytes(config: GroupedGemmConfig, num_halves: int) -> int:
    return (config.block_m + num_halves * config.block_n) * config.block_k
