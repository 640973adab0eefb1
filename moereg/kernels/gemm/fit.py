"""Fits a pair of configurations to the layer and the call: tall tiles, and the tile of a shallow second product.

The tables of `rules` use the average number of rows per expert, since only the device knows the counts. The rules here
cover what the average hides. They were measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on 2026-11-23 with
uniform and Zipf routings and with all tokens on one set of experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig, fit_pipeline

# Each row tile reads its expert's weights from the L2 again: 16 times for 256 rows in tiles of 16. Tiles of 64 rows use
# wgmma, whose time is hidden even where an expert has few rows; 128 rows were slower at up to 256 tokens.
_TALL_ROWS: Final = 64
_TALL_DEPTH: Final = 64

# Dequantizing takes registers: with 64 columns, 32 rows are what 5 programs per multiprocessor leave room for, and 64
# rows take so many that uniform routings lose 5 %. Where the average expert fills more than half of a low tile, most
# experts exceed a tile by a few rows or not at all, and tall tiles cost 10 % of the layer (int4, mixtral-8x7b, 64
# tokens). Up to 16 tokens they cost 1 to 11 %; all tokens on one set of experts make only two low tiles each there.
_PACKED_TALL: Final = GroupedGemmConfig(
    block_m=32, block_n=64, block_k=128, group_m=4, num_warps=4, num_stages=3, mask_rows=True
)

_PACKED_TALL_MIN_TOKENS: Final = 17

# Up to this depth, steps of 128 are few, or masked (192 is one and a half). With steps of 64 all loads of a program are
# issued at once, and more programs fit on a multiprocessor. At 384 it gains nothing.
_SHORT_DEPTH: Final = 256

# Two programs per multiprocessor of an H200, four thirds, and one. Tiles have 128 columns where one set of experts has
# 264 of them in the second product, 176 in the first; else 64. A second product with at most 132 tiles takes 32 columns
# and twice the stages: more bytes in flight (Mixtral-8x7B, 64 tokens: one set of experts 214 to 194 us, uniform same).
_FULL_PROGRAMS: Final = 264
_WIDE_PROGRAMS: Final = 176
_ONE_EACH: Final = 132
_MOST_STAGES: Final = 4
_MOST_STAGES_OF_FEW: Final = 8

# Deep second products of few tiles of 128 columns, unsorted: half as many columns and twice the depth of a step take 5
# to 10 % off one set of experts; shallower ones lose 2 %, and ones of 128 tiles 11 to 15 %.
_FEW_TILES: Final = 99
_DEEP: Final = 2048
_H200_SHARED_BYTES: Final = 227 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """Sizes that the rules look at."""

    most_rows: int  # most rows that an expert can have: T, or max_T in the batched format
    rows_per_expert: float  # average number of rows per expert
    top_k: int  # K
    gate_up_columns: int  # columns of the first product: rows of an expert's w13
    down_columns: int  # columns of the second product: rows of an expert's w2
    down_depth: int  # I, rounded up to `WEIGHT_PAD`
    element_bytes: int  # bytes of an activation
    is_packed: bool  # whether weights are packed
    shared_bytes: int | None  # shared memory that a program may use, nearly all of a multiprocessor's; None: no limit


def fit_pair(configs: GemmPair, shape: CallShape) -> GemmPair:
    """Applies the rules to a pair.

    Pairs of 8 warps already have tiles as tall, and 32-bit weights do not use matrix units: both stay unchanged.

    Args:
        configs: from the table.
        shape: of the call.
    """
    if shape.element_bytes != 2 or configs.gate_up.num_warps != 4 or configs.down.num_warps != 4:
        return configs
    gate_up, down = configs.gate_up, configs.down
    is_short = not shape.is_packed and shape.down_depth <= _SHORT_DEPTH
    is_deep = shape.down_depth >= _DEEP and shape.top_k * -(-shape.down_columns // 128) <= _FEW_TILES
    if is_short:
        stages = min(4, max(2, shape.down_depth // 64))
        down = _fitting(dataclasses.replace(down, block_n=128, block_k=64, num_stages=stages), shape)
    elif is_deep and not (configs.sort_routes or shape.is_packed):
        down = _fitting(dataclasses.replace(down, block_n=64, block_k=256, num_stages=3), shape)
    if configs.sort_routes and shape.most_rows > gate_up.block_m:
        down_columns = _tall_columns(shape, shape.down_columns, _FULL_PROGRAMS)
        if is_short:
            down_columns = 64
        elif _row_tiles(shape) * -(-shape.down_columns // down_columns) <= _ONE_EACH:
            down_columns = 32
        columns = _tall_columns(shape, shape.gate_up_columns, _WIDE_PROGRAMS)
        tall_gate_up = _tall(gate_up, columns, shape)
        tall_down = _tall(down, down_columns, shape)
        gate_up = dataclasses.replace(gate_up, tall=tall_gate_up)
        down = dataclasses.replace(down, tall=tall_down)
    return dataclasses.replace(configs, gate_up=gate_up, down=down)


def _row_tiles(shape: CallShape) -> int:
    """Number of tall row tiles if all tokens choose one set of experts."""
    return shape.top_k * -(-shape.most_rows // _TALL_ROWS)


def _tall_columns(shape: CallShape, num_columns: int, enough: int) -> int:
    # The tiles of one set of experts must fill the GPU.
    return 128 if _row_tiles(shape) * -(-num_columns // 128) >= enough else 64


def _tall(low: GroupedGemmConfig, block_n: int, shape: CallShape) -> GroupedGemmConfig | None:
    """The tall tile beside a low one; None where the low one is as tall, or where it would not pay."""
    if shape.is_packed:
        is_rare = shape.most_rows >= _PACKED_TALL_MIN_TOKENS and 2 * shape.rows_per_expert <= low.block_m
        tall = dataclasses.replace(_PACKED_TALL, chained=low.chained)
        return tall if is_rare and low.block_m < tall.block_m else None
    if low.block_m >= _TALL_ROWS:
        return None
    # As many programs per multiprocessor as with low tiles alone. Triton allocates all requested stages for wgmma, and
    # one fewer for the products of lower tiles.
    shared_bytes = _H200_SHARED_BYTES if shape.shared_bytes is None else shape.shared_bytes
    low_bytes = (low.num_stages - 1) * (low.block_m + low.block_n) * 2 * low.block_k
    programs = shared_bytes // (low_bytes + 1024)
    stages = (shared_bytes // programs - 1024) // (2 * _TALL_DEPTH * (_TALL_ROWS + block_n))
    tall = GroupedGemmConfig(
        block_m=_TALL_ROWS,
        block_n=block_n,
        block_k=_TALL_DEPTH,
        group_m=4,
        num_warps=4,
        num_stages=max(2, min(_MOST_STAGES_OF_FEW if block_n < 64 else _MOST_STAGES, stages)),
        mask_rows=True,
    )
    return _fitting(tall, shape)


def _fitting(config: GroupedGemmConfig, shape: CallShape) -> GroupedGemmConfig:
    """Limits the stages of a configuration with 16-bit weights to those that fit."""
    return fit_pipeline(config, 2 * config.block_k * (config.block_m + config.block_n), shape.shared_bytes)
