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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        configs: of both products; `block_n` of the first counts gate and up once.
        max_tokens: the rule applies up to this number of tokens,
        max_rows_per_expert: and up to this average of rows per expert.
    """

    configs: GemmPair
    max_tokens: float = math.inf
    max_rows_per_expert: float = math.inf


# First match counts.
CONFIG_RULES = (
    QuantizedConfigRule(
        max_tokens=1,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=32, block_k=128, group_m=1, num_warps=2, num_stages=5, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=64, block_k=128, group_m=1, num_warps=2, num_stages=4, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    QuantizedConfigRule(
        max_tokens=16,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=32, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    QuantizedConfigRule(
        max_rows_per_expert=11,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=32, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
        ),
    ),
    # From 64 rows on a tensor core of Hopper takes both operands from shared memory: tiles of 32 rows were slower even
    # where they hold all rows. Two programs a multiprocessor hide each other's scaling of partial products.
    QuantizedConfigRule(
        max_rows_per_expert=100,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=64, block_n=64, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=64, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
        ),
    ),
    QuantizedConfigRule(
        configs=GemmPair(
            gate_up=GroupedGemmConfig(block_m=128, block_n=128, block_k=128, group_m=8, num_warps=8, num_stages=4),
            down=GroupedGemmConfig(block_m=128, block_n=128, block_k=128, group_m=8, num_warps=8, num_stages=4),
        ),
    ),
)

# Sizes a plan's block map before the configuration is known.
MIN_BLOCK_M = min(rule.configs.gate_up.block_m for rule in CONFIG_RULES)


def select_quantized_config(
    num_tokens: float, rows_per_expert: float, num_halves: int, shared_bytes: int | None = None
) -> GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T; infinity for the batched format.
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
