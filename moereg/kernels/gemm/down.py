"""The second grouped matmul of a Mixture-of-Experts layer, the kernel; see `grouped`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.operand import Matrices, product
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.rows.block_map import load_num_tall
from moereg.kernels.rows.tiles import claim_tile


class Down(NamedTuple):
    """The kernel's argument: all that every tile of the product reads and writes; see `down_gemm`.

    Attributes:
        out: with the next and the last three pointers.
        intermediate: rows of activations.
        matrices: `Matrices`.
        bias: or None.
        topk_weights: or None.
        row_factors: or None.
    """

    out: Any
    intermediate: Any
    matrices: Matrices
    bias: Any
    topk_weights: Any
    row_factors: Any


@triton.jit
def down_tile(tile, gemm, depth, num_columns, strides, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Multiplies and stores a `Tile`, of a `Down` and its `Strides`."""
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    a_rows = gemm.intermediate + tile.valid_rows.to(tl.int64) * strides.rows
    expert = tile.expert.to(tl.int64)
    x = product(
        a_rows,
        gemm.matrices,
        strides.matrices,
        depth,
        num_columns,
        expert,
        loaded_columns,
        tile.row_mask,
        depth,
        FORMAT,
        TILE,
    )  # [BLOCK_M, BLOCK_N] fp32

    if gemm.row_factors is not None:
        x *= tl.load(gemm.row_factors + tile.valid_rows)[:, None]
    if gemm.bias is not None:
        bias = tl.load(gemm.bias + tile.expert.to(tl.int64) * strides.bias + loaded_columns)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    if gemm.topk_weights is not None:
        x *= tl.load(gemm.topk_weights + tile.routes)[:, None]
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (columns < num_columns)[None, :]
    out_pointers = gemm.out + tile.routes.to(tl.int64)[:, None] * strides.out + columns[None, :]
    tl.store(out_pointers, x.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    gemm,  # Down
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    depth,
    num_columns,
    num_tiles_n,
    strides,  # Strides
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    TALL: tl.constexpr,  # TileShape of tall tiles, or None
    OVERLAP: tl.constexpr,
):
    # The tile map was complete before the previous kernel began, so read it before waiting.
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if SORTED:
        used_blocks = tl.load(plan.num_blocks)
    if TALL is not None:
        first_block = load_num_tall(plan.num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            wait_for_previous(OVERLAP)
            release_next(OVERLAP)
            tile = claim_tile(
                direct, num_tokens, plan, first_block, tall_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TALL, number
            )
            down_tile(tile, gemm, depth, num_columns, strides, FORMAT, TALL)
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if SORTED:
        if number >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile(
        direct,
        num_tokens,
        plan,
        used_blocks,
        num_tiles_n,
        SORTED,
        SINGLE,
        TOP_K,
        BLOCK_TOP_K,
        TILE,
        number,
        first_block,
    )
    if not SORTED:
        if tile.expert < 0:
            wait_for_previous(OVERLAP)
            return
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    down_tile(tile, gemm, depth, num_columns, strides, FORMAT, TILE)
