"""The main loop of a product of 16- or 32-bit rows and weights, in Triton, and what a tile of it covers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig


class TileShape(NamedTuple):
    """The kernels' constant for what a tile of a product covers and which of its loads need a mask.

    Attributes:
        block_m: of `GroupedGemmConfig`, as the next three.
        block_n: columns.
        block_k: reduced elements per step.
        group_m: tiles of rows that share columns.
        mask_rows: whether rows that do not count are left out.
        mask_a: whether steps over the weights' reduced dimension reach past a row of activations; see `reaches_past`.
        mask_b: whether they reach past a row of weights.
        mask_n: whether tiles reach past the last column.
        stages: depth of the loop's pipeline; None: the kernel's.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    mask_rows: bool
    mask_a: bool
    mask_b: bool
    mask_n: bool
    stages: int | None = None


@triton.jit
def accumulate(a_pointers, b_pointers, row_mask, depth_a, depth, TILE: tl.constexpr):
    """[BLOCK_M, BLOCK_N] fp32 product of rows of activations and rows of weights.

    Args:
        a_pointers: [BLOCK_M, BLOCK_K] first elements of the activations.
        b_pointers: [BLOCK_K, BLOCK_N] first elements of the weights.
        row_mask: [BLOCK_M] rows that count.
        depth_a: elements of a row of activations; what lies behind them may be NaN.
        depth: K_pad, elements of a row of weights, no fewer; behind them lies the next row, or nothing.
        TILE: `TileShape`.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=TILE.stages):
        if TILE.mask_rows and TILE.mask_a:
            a = tl.load(a_pointers, mask=row_mask[:, None] & (start + offs_k < depth_a)[None, :], other=0.0)
        elif TILE.mask_rows:
            a = tl.load(a_pointers, mask=row_mask[:, None], other=0.0)
        elif TILE.mask_a:
            a = tl.load(a_pointers, mask=(start + offs_k < depth_a)[None, :], other=0.0)
        else:
            a = tl.load(a_pointers)
        if TILE.mask_b:
            b = tl.load(b_pointers, mask=(start + offs_k < depth)[:, None], other=0.0)
        else:
            b = tl.load(b_pointers)
        # a [BLOCK_M, BLOCK_K], b [BLOCK_K, BLOCK_N]. TF32 would keep 10 bits of a 32-bit operand's mantissa.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K
    return accumulator


def reaches_past(size: int, depth: int, step: int) -> bool:
    """Whether a loop over `depth` elements by `step` reads past the first `size` elements of a row.

    Rows of activations end where the layer's size ends, while the loop goes on to the padded size of the weights, by
    whole steps. Zeros of the weights do not help there: memory behind a row may hold NaN.
    """
    return -(-depth // step) * step > size


def tile_shape(
    config: GroupedGemmConfig, num_columns: int, depth_a: int, depth: int, step: int, mask_rows: bool
) -> TileShape:
    """The constant of a launch.

    Args:
        config: launch configuration.
        num_columns: rows of an expert's weights.
        depth_a: elements of a row of activations.
        depth: K_pad, elements of a row of weights.
        step: elements that a turn of the loop takes of a row.
        mask_rows: whether rows that do not count are left out.
    """
    return TileShape(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        group_m=config.group_m,
        mask_rows=mask_rows,
        mask_a=reaches_past(depth_a, depth, step),
        mask_b=reaches_past(depth, depth, step),
        mask_n=num_columns % config.block_n != 0,
    )
