"""Launch configurations of the expert GEMMs with 8-bit weights and activations, and the rule that picks one.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6) on 2026-11-21 over qwen3-30b-a3b and deepseek-v3 in fp8_block128 at
T 1, 16, 64, 256 and 1024, each half of a pair swept over 10 to 20 candidates; fp8_channel_token and int8_w8a8 take at
most 3 % longer with the same configurations. Beyond 100 rows an expert nothing is tuned.
"""

from __future__ import annotations

import dataclasses

from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig, fit_pipeline, read_rules

# The first match counts. `n` of the first product counts gate and up once.
CONFIG_RULES = read_rules(
    """
    bytes tokens rows schedule| m   group mask | n   k   warps stages | n   k   warps stages
    1     1      any  direct | 16  1     yes  | 32  256 4     3      | 64  128 2     4
    1     16     any  direct | 16  1     yes  | 32  256 4     3      | 128 256 4     3
    1     any    11   sorted | 16  1     yes  | 32  256 4     3      | 128 256 4     3
    # From 64 rows on a tensor core of Hopper takes both operands from shared memory: tiles of 32 rows were slower even
    # where they hold all rows. Two programs a multiprocessor hide each other's scaling of partial products.
    1     any    100  sorted | 64  1     yes  | 64  128 4     4      | 128 128 4     4
    1     any    any  sorted | 128 8     no   | 128 128 8     4      | 128 128 8     4
    """
)

# For rows that must have the same bits in any call: from 64 rows on Hopper multiplies 8-bit floats as such, in fewer as
# 16-bit ones, whose sums keep more bits.
INVARIANT_RULES = (
    *read_rules(
        """
        bytes tokens rows schedule| m  group mask | n  k   warps stages | n   k   warps stages
        1     16     any  direct | 64 1     yes  | 64 128 4     4      | 128 128 4     4
        """
    ),
    *(rule for rule in CONFIG_RULES if isinstance(rule.configs, GemmPair) and rule.configs.gate_up.block_m >= 64),
)

# Sizes a plan's block map before the configuration is known.
MIN_BLOCK_M = min(rule.configs.gate_up.block_m for rule in CONFIG_RULES if isinstance(rule.configs, GemmPair))


def select_quantized_config(
    num_tokens: float,
    rows_per_expert: float,
    num_halves: int,
    shared_bytes: int | None = None,
    invariant: bool = False,
) -> GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T; infinity for the batched format.
        rows_per_expert: Average number of rows per expert.
        num_halves: 2 where the first product is of gate and up, else 1.
        shared_bytes: Shared memory that one program may use on the device; shortens pipelines that would not fit.
        invariant: Whether a row must have the same bits in every call.
    """
    configs = next(
        rule.configs
        for rule in (INVARIANT_RULES if invariant else CONFIG_RULES)
        if num_tokens <= rule.max_tokens and rows_per_expert <= rule.max_rows_per_expert
    )
    assert isinstance(configs, GemmPair)
    gate_up = fit_pipeline(configs.gate_up, _stage_bytes(configs.gate_up, num_halves), shared_bytes)
    down = fit_pipeline(configs.down, _stage_bytes(configs.down, 1), shared_bytes)
    return dataclasses.replace(configs, gate_up=gate_up, down=down)


def _stage_bytes(config: GroupedGemmConfig, num_halves: int) -> int:
    return (config.block_m + num_halves * config.block_n) * config.block_k
