"""Shipped launch configurations of the expert GEMMs, and the rule that picks one: data only, no device code.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on 2026-11-20 and 21 over mixtral-8x7b, qwen3-30b-a3b,
olmoe-1b-7b, gpt-oss-120b and sonic-120b at T 1, 4, 16, 64 and 256, each half of a pair swept over 10 to 50 candidates.
A row is the candidate with the best geometric mean. `benches/results/h200_sweep.json` has what a shape loses if its row
is chosen from the other shapes: so little that rows look at no size but the rows per expert.
"""

from __future__ import annotations

import dataclasses

from moereg.kernels.gemm.config import GemmPair, GemvPair, GroupedGemmConfig, SinglePair, fit_pipeline, read_rules

# Packed weights of any format. Measured there on 2026-11-21: up to 5 rows per expert or 8 tokens, 10 to 30 candidates
# on int4_w4a16_g128 of qwen3-30b-a3b and mixtral-8x7b, mxfp4_w4a16 and nvfp4_w4a16 of qwen3-30b-a3b and gpt-oss-120b
# and int8_w8a16 of qwen3-30b-a3b; beyond that, 3 to 11 candidates on some of these. Three or more programs of four
# warps per multiprocessor, some dequantizing while others multiply, beat larger tiles, which dequantize less often.
# Tiles of 8 rows, or of 1 for a single token, take up to a quarter less time than tiles of 16, whose invalid rows are
# filled with zeros too. The pairs for up to 22 and 96 rows are those of mixtral-8x7b at T 64 and 256. All routings were
# uniform: an expert with many more rows than the average dequantizes its weights once for every 8 or 16 rows, unless
# `fit` adds tall tiles. The first match counts.
PACKED_RULES = read_rules(
    """
    bytes tokens rows bits schedule| m  group mask | n   k   warps stages slices | n   k   warps stages slices
    2     1      any  8    single | 1  1     yes  | 32  128 4     3      4      | 16  128 8     3      8
    # Two tokens name so few experts that more, narrower tiles pay: 1 to 10 % (mxfp4 and int4). From four on they lose.
    2     2      any  4    direct | 8  1     yes  | 64  256 4     3      1      | 64  128 4     4      1
    2     8      any  8    direct | 8  1     yes  | 128 256 4     3      1      | 128 128 4     4      1
    # Excluded in the batched format, whose tokens are infinitely many: tiles of 8 rows were not timed there.
    2     finite 5    8    sorted | 8  1     yes  | 128 256 4     3      1      | 128 128 4     4      1
    2     16     any  8    direct | 16 1     yes  | 128 128 4     4      1      | 128 128 4     3      1
    2     any    11   8    sorted | 16 1     yes  | 128 128 4     4      1      | 128 128 4     4      1
    2     any    22   8    sorted | 32 1     yes  | 128 128 4     3      1      | 128 256 4     3      1
    2     any    96   8    sorted | 64 1     yes  | 128 128 8     3      1      | 128 128 8     3      1
    2     any    any  8    sorted | 64 8     no   | 128 128 4     3      1      | 128 128 4     3      1
    """
)


def shares_launch(num_tokens: int, rows_per_expert: float, packed_bits: int) -> bool:
    """Whether both products of sorted rows are faster in one launch (`flagged`) on an H200, in bfloat16.

    It saves 5 to 16 % of the layer at 9 and 16 tokens, measured on 2026-11-23 with mxfp4_w4a16 of gpt-oss-120b and
    qwen3-30b-a3b, nvfp4_w4a16 of qwen3-30b-a3b and int4_w4a16_g128 of qwen3-30b-a3b and mixtral-8x7b. More tokens,
    8-bit weights and other devices were not measured.
    """
    return num_tokens <= 16 and rows_per_expert <= 5 and packed_bits <= 4


# The first match counts. Up to 128 rows, a tile holds all rows of nearly every expert (the average plus two to three
# times its square root), so that weights are read once. Lines beyond the last measured point (T 256 of mixtral, 64 rows
# an expert) and for 32-bit weights, whose products run on plain multiply-adds, are not tuned.
CONFIG_RULES = read_rules(
    """
    bytes tokens rows schedule| m   group mask | n   k    warps stages | n   k    warps stages
    2     1      any  gemv   |                | 32  128  2     4      | 8   1024 4     3
    2     16     any  direct | 16  1     yes  | 64  128  4     5      | 128 128  4     4
    2     any    11   sorted | 16  1     yes  | 64  128  4     5      | 64  128  4     4
    2     any    22   sorted | 32  1     yes  | 128 128  4     3      | 128 128  4     3
    2     any    48   sorted | 64  1     yes  | 128 64   4     4      | 128 64   4     4
    2     any    96   sorted | 128 1     yes  | 256 64   8     4      | 256 64   8     4
    2     any    any  sorted | 128 8     no   | 256 64   8     3      | 256 64   8     3
    4     1      any  gemv   |                | 32  64   2     4      | 8   512  4     3
    4     any    32   sorted | 16  4     no   | 32  64   4     2      | 32  64   4     2
    4     any    any  sorted | 64  8     no   | 64  32   8     2      | 64  32   8     2
    """
)

# For rows that must have the same bits in any call: no GEMVs and no slices of the depth, whose sums have another order.
# On an H200 products of 16-bit numbers have the same bits in tiles of any size, by mma.sync and by wgmma, with either
# side on the left, if one sum runs over the depth; so have those of 32 bits, added in order. Packed weights need wgmma,
# from 16 rows on: with 8, about half of int4's rows and 3 % of mxfp4's had other bits.
INVARIANT_RULES = (
    *read_rules(
        """
        bytes tokens rows schedule| m group mask | n  k  warps stages | n  k  warps stages
        4     1      any  direct | 1 1     yes  | 64 64 2     4      | 64 64 2     4
        """
    ),
    *(rule for rule in CONFIG_RULES if not isinstance(rule.configs, GemvPair)),
)
PACKED_INVARIANT_RULES = read_rules(
    """
    bytes tokens rows schedule| m  group mask | n   k   warps stages | n   k   warps stages
    2     2      any  direct | 16 1     yes  | 64  256 4     3      | 64  256 4     3
    2     8      0.9  direct | 16 1     yes  | 128 128 4     4      | 128 128 4     4
    2     8      any  direct | 16 1     yes  | 64  256 4     3      | 64  256 4     3
    2     16     1    sorted | 16 1     yes  | 128 128 4     4      | 128 128 4     4
    2     16     any  direct | 16 1     yes  | 64  256 4     3      | 64  256 4     3
    2     any    11   sorted | 16 1     yes  | 128 128 4     4      | 128 128 4     4
    2     any    22   sorted | 32 1     yes  | 128 128 4     3      | 128 128 4     3
    2     any    any  sorted | 64 8     no   | 128 128 4     3      | 128 128 4     3
    """
)

# Sizes a plan's block map before the configuration is known.
MIN_BLOCK_M = min(
    rule.configs.gate_up.block_m for rule in (*CONFIG_RULES, *PACKED_RULES) if isinstance(rule.configs, GemmPair)
)


def select_config(
    num_tokens: float,
    rows_per_expert: float,
    element_bytes: int,
    shared_bytes: int | None = None,
    packed_bits: int | None = None,
    least_block_m: int = 1,
    single: bool = True,
    invariant: bool = False,
) -> GemvPair | SinglePair | GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T; infinity for the batched format, which has a plan however few its rows.
        rows_per_expert: average number of rows per expert.
        element_bytes: 2 or 4, of an activation.
        shared_bytes: shared memory that one program may use on the device; shortens pipelines that would not fit.
        packed_bits: bits of a packed weight; None: weights have the dtype of the activations.
        least_block_m: fewest rows that the device's matrix units take.
        single: whether the caller has kernels that sum over one token's routes.
        invariant: whether a row must have the same bits in every call.
    """
    # Scales add at most 1.25 bits a weight, here rounded up.
    weight_bits = 8 * element_bytes if packed_bits is None else packed_bits + 2
    plain, packed = (INVARIANT_RULES, PACKED_INVARIANT_RULES) if invariant else (CONFIG_RULES, PACKED_RULES)
    for rule in plain if packed_bits is None else packed:
        if (
            element_bytes == rule.element_bytes
            and num_tokens <= rule.max_tokens
            and rows_per_expert <= rule.max_rows_per_expert
            and (packed_bits or 0) <= rule.max_packed_bits
        ):
            configs = rule.configs
            if isinstance(configs, GemvPair):
                return configs
            if configs.gate_up.block_m < least_block_m or (isinstance(configs, SinglePair) and not single):
                continue
            gate_up = fit_pipeline(
                configs.gate_up, _stage_bytes(configs.gate_up, element_bytes, weight_bits), shared_bytes
            )
            down = fit_pipeline(configs.down, _stage_bytes(configs.down, element_bytes, weight_bits), shared_bytes)
            if invariant and packed_bits is not None:
                gate_up, down = (dataclasses.replace(config, chained=True) for config in (gate_up, down))
            return dataclasses.replace(configs, gate_up=gate_up, down=down)
    raise AssertionError(f"no launch configuration for {element_bytes}-byte elements")


def _stage_bytes(config: GroupedGemmConfig, element_bytes: int, weight_bits: int) -> int:
    return config.slices * config.block_k * (config.block_m * element_bytes + config.block_n * weight_bits // 8)
