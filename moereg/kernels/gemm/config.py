"""Launch configurations of the expert matmuls, and the rule that picks one: data, without device code.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on 2026-11-20 and 21 over mixtral-8x7b, qwen3-30b-a3b,
olmoe-1b-7b, gpt-oss-120b and sonic-30b at T 1, 4, 16, 64 and 256, each half of a pair swept over 10 to 50 candidates. A
row is the candidate with the best geometric mean. What a choice from the other shapes costs a shape is in
`benches/results/h200_sweep.json`: so little that the rows look at no size but the rows per expert.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch configuration of one product of a vector.

    Attributes:
        block_n: weight rows per program (gate and up count as two); a power of two.
        block_k: reduced elements per step; a power of two, masked where it does not divide.
        num_warps: warps per program.
        num_stages: steps whose weights are on their way at a time.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two).
        block_k: reduced elements per step; masked where it does not divide the padded dimension.
        group_m: tiles of rows that share the columns of a weight before the next columns are taken, for the L2.
        num_warps: warps per program.
        num_stages: depth of the software pipeline. Two to four programs per multiprocessor beat a deeper pipeline.
        mask_rows: whether rows past the end of a tile are left out instead of repeating the last one: pays where tiles
            are mostly empty.
        slices: `block_k` long pieces of a step, one a warp, or 1: warps share columns. Packed weights only. In the
            second product of a `SinglePair` each belongs to one route.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    mask_rows: bool = False
    slices: int = 1


@dataclass(frozen=True, slots=True)
class GemvPair:
    """Configurations of both products where every route is a vector; routes are neither sorted nor stored."""

    gate_up: GemvConfig
    down: GemvConfig


@dataclass(frozen=True, slots=True)
class GemmPair:
    """Configurations of both grouped GEMMs, with equal `block_m`.

    Attributes:
        gate_up: the first GEMM's.
        down: the second's.
        sort_routes: whether rows come from a plan; else from `DirectRoutes`, for at most `block_m` tokens.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig
    sort_routes: bool = True


@dataclass(frozen=True, slots=True)
class SinglePair:
    """Configurations of both products of one token with packed weights; the second one adds up the routes itself.

    Attributes:
        gate_up: the first product's, on `DirectRoutes`.
        down: the second's, whose slices the routes share.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        element_bytes: bytes of a weight.
        max_tokens: applies up to this number of tokens,
        max_rows_per_expert: and up to this average of rows per expert.
        configs: of both products.
    """

    element_bytes: int
    max_tokens: float
    max_rows_per_expert: float
    configs: GemvPair | SinglePair | GemmPair


# First match counts. A tile holds all rows of nearly every expert up to 128 rows (the average and two to three times
# its root), so that weights are read once. Rows beyond the last measured ones (T 256 of mixtral, 64 rows an expert) and
# of 32-bit weights, whose products run on plain multiply-adds, are not tuned.
CONFIG_RULES = (
    ConfigRule(2, 1, math.inf, GemvPair(GemvConfig(32, 128, 2, 4), GemvConfig(8, 1024, 4, 3))),
    ConfigRule(
        2,
        16,
        math.inf,
        GemmPair(GroupedGemmConfig(16, 64, 128, 1, 4, 5, True), GroupedGemmConfig(16, 128, 128, 1, 4, 4, True), False),
    ),
    ConfigRule(
        2,
        math.inf,
        11,
        GemmPair(GroupedGemmConfig(16, 64, 128, 1, 4, 5, True), GroupedGemmConfig(16, 64, 128, 1, 4, 4, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        22,
        GemmPair(GroupedGemmConfig(32, 128, 128, 1, 4, 3, True), GroupedGemmConfig(32, 128, 128, 1, 4, 3, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        48,
        GemmPair(GroupedGemmConfig(64, 128, 64, 1, 4, 4, True), GroupedGemmConfig(64, 128, 64, 1, 4, 4, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        96,
        GemmPair(GroupedGemmConfig(128, 256, 64, 1, 8, 4, True), GroupedGemmConfig(128, 256, 64, 1, 8, 4, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        math.inf,
        GemmPair(GroupedGemmConfig(128, 256, 64, 8, 8, 3), GroupedGemmConfig(128, 256, 64, 8, 8, 3)),
    ),
    ConfigRule(4, 1, math.inf, GemvPair(GemvConfig(32, 64, 2, 4), GemvConfig(8, 512, 4, 3))),
    ConfigRule(
        4, math.inf, 32, GemmPair(GroupedGemmConfig(16, 32, 64, 4, 4, 2), GroupedGemmConfig(16, 32, 64, 4, 4, 2))
    ),
    ConfigRule(
        4, math.inf, math.inf, GemmPair(GroupedGemmConfig(64, 64, 32, 8, 8, 2), GroupedGemmConfig(64, 64, 32, 8, 8, 2))
    ),
)

# Packed weights, any format, by the activations' 2 bytes. Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on
# 2026-11-21: up to 5 rows an expert or 8 tokens 10 to 30 candidates on int4_w4a16_g128 of qwen3-30b-a3b and
# mixtral-8x7b, mxfp4_w4a16 and nvfp4_w4a16 of qwen3-30b-a3b and gpt-oss-120b and int8_w8a16 of qwen3-30b-a3b; beyond 3
# to 11 candidates on some of these. Three or more programs of four warps on a multiprocessor, some of which restore
# weights while others multiply, beat larger tiles, which restore less often. Tiles of 8 rows, or of 1 where there is
# one token, take up to a quarter less time than tiles of 16, whose rows that do not count are filled with zeros too.
# The pairs for up to 22 and 96 rows are those of mixtral-8x7b at T 64 and 256. All with uniform routings: an expert
# that gets many more rows than the average has its weights restored once for every 8 or 16 of them.
PACKED_RULES = (
    ConfigRule(
        2,
        1,
        math.inf,
        SinglePair(GroupedGemmConfig(1, 32, 128, 1, 4, 3, True, 4), GroupedGemmConfig(1, 16, 128, 1, 8, 3, True, 8)),
    ),
    ConfigRule(
        2,
        8,
        math.inf,
        GemmPair(GroupedGemmConfig(8, 128, 256, 1, 4, 3, True), GroupedGemmConfig(8, 128, 128, 1, 4, 4, True), False),
    ),
    # Not of the batched format, where tiles of 8 rows were not timed.
    ConfigRule(
        2,
        2**31,
        5,
        GemmPair(GroupedGemmConfig(8, 128, 256, 1, 4, 3, True), GroupedGemmConfig(8, 128, 128, 1, 4, 4, True)),
    ),
    ConfigRule(
        2,
        16,
        math.inf,
        GemmPair(GroupedGemmConfig(16, 128, 128, 1, 4, 4, True), GroupedGemmConfig(16, 128, 128, 1, 4, 3, True), False),
    ),
    ConfigRule(
        2,
        math.inf,
        11,
        GemmPair(GroupedGemmConfig(16, 128, 128, 1, 4, 4, True), GroupedGemmConfig(16, 128, 128, 1, 4, 4, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        22,
        GemmPair(GroupedGemmConfig(32, 128, 128, 1, 4, 3, True), GroupedGemmConfig(32, 128, 256, 1, 4, 3, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        96,
        GemmPair(GroupedGemmConfig(64, 128, 128, 1, 8, 3, True), GroupedGemmConfig(64, 128, 128, 1, 8, 3, True)),
    ),
    ConfigRule(
        2,
        math.inf,
        math.inf,
        GemmPair(GroupedGemmConfig(64, 128, 128, 8, 4, 3), GroupedGemmConfig(64, 128, 128, 8, 4, 3)),
    ),
)

# What a plan's block map is sized for when the configuration is not known yet.
MIN_BLOCK_M = min(
    rule.configs.gate_up.block_m for rule in (*CONFIG_RULES, *PACKED_RULES) if isinstance(rule.configs, GemmPair)
)


def select_config(
    num_tokens: float,
    rows_per_expert: float,
    element_bytes: int,
    shared_bytes: int | None = None,
    packed_bits: int | None = None,
    min_block_m: int = 1,
    single: bool = True,
) -> GemvPair | SinglePair | GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T; infinity for the batched format, whose rows come with a plan however few they are.
        rows_per_expert: average number of rows per expert.
        element_bytes: 2 or 4, of an activation.
        shared_bytes: shared memory that one program may use on the device; shortens pipelines that would not fit.
        packed_bits: of a weight, where it is packed; else weights have the dtype of the activations.
        min_block_m: rows that the device's matrix units take at least.
        single: whether the caller has kernels that add up the routes of one token.
    """
    # With scales, at most 1.25 bits a weight.
    weight_bits = 8 * element_bytes if packed_bits is None else packed_bits + 2
    for rule in CONFIG_RULES if packed_bits is None else PACKED_RULES:
        if (
            element_bytes == rule.element_bytes
            and num_tokens <= rule.max_tokens
            and rows_per_expert <= rule.max_rows_per_expert
        ):
            configs = rule.configs
            if isinstance(configs, GemvPair):
                return configs
            if configs.gate_up.block_m < min_block_m or (isinstance(configs, SinglePair) and not single):
                continue
            gate_up = _fit_pipeline(configs.gate_up, element_bytes, weight_bits, shared_bytes)
            down = _fit_pipeline(configs.down, element_bytes, weight_bits, shared_bytes)
            return dataclasses.replace(configs, gate_up=gate_up, down=down)
    raise AssertionError(f"no launch configuration for {element_bytes}-byte elements")


def least_block_m(device: torch.device) -> int:
    """Rows that the matrix units of a device take at least; with fewer Triton turns to plain multiply-adds on AMD's."""
    return 16 if device.type == "cuda" and torch.version.hip is not None else 1


@functools.cache
def max_shared_bytes(device: torch.device) -> int | None:
    """Shared memory that one program may use on a device; None for the interpreter, which has no limit."""
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _fit_pipeline(
    config: GroupedGemmConfig, element_bytes: int, weight_bits: int, shared_bytes: int | None
) -> GroupedGemmConfig:
    if shared_bytes is None:
        return config
    stage_bytes = config.slices * config.block_k * (config.block_m * element_bytes + config.block_n * weight_bits // 8)
    # A kilobyte for the reductions and barriers that Triton adds.
    stages = max(1, min(config.num_stages, (shared_bytes - 1024) // stage_bytes))
    return dataclasses.replace(config, num_stages=stages)
