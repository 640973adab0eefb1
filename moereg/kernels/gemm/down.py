"""The second grouped matmul of a Mixture-of-Experts layer, the kernel; see `grouped`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.operand import Matrices, product
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.rows.block_map import load_num_tall
from moereg.kernels.rows.tiles import RowArguments, claim_tile_of


class Down(NamedTuple):
    """What every tile of the product reads and writes; see `down_gemm`.

    Attributes:
        out: with the next four pointers.
        intermediate: rows of activations.
        bias: or None.
        topk_weights: or None.
        row_factors: or None.
        matrices: `Matrices`.
        stride_intermediate: with the next two from one row to the next, of `bias` from one expert to the next.
    """

    out: tl.tensor
    intermediate: tl.tensor
    bias: tl.tensor
    topk_weights: tl.tensor
    row_factors: tl.tensor
    matrices: Matrices
    stride_intermediate: tl.tensor
    stride_bias: tl.tensor
    stride_out: tl.tensor


@triton.jit
def down_tile(tile, gemm, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Multiplies and stores a `Tile`, of a `Down`."""
    BLOCK_N: tl.constexpr = TILE.block_n
    matrices = gemm.matrices
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, matrices.num_columns - 1)
    x = product(
        gemm.intermediate + tile.valid_rows.to(tl.int64) * gemm.stride_intermediate,
        matrices,
        tile.expert.to(tl.int64),
        loaded_columns,
        tile.row_mask,
        matrices.depth,
        FORMAT,
        TILE,
    )  # [BLOCK_M, BLOCK_N] fp32

    if gemm.row_factors is not None:
        x *= tl.load(gemm.row_factors + tile.valid_rows)[:, None]
    if gemm.bias is not None:
        bias = tl.load(gemm.bias + tile.expert.to(tl.int64) * gemm.stride_bias + loaded_columns)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    if gemm.topk_weights is not None:
        x *= tl.load(gemm.topk_weights + tile.routes)[:, None]
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (columns < matrices.num_columns)[None, :]
    out_pointers = gemm.out + tile.routes.to(tl.int64)[:, None] * gemm.stride_out + columns[None, :]
    tl.store(out_pointers, x.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    out,
    intermediate,
    w2,
    group_scale,
    zero_point,
    row_scale,
    bias,
    topk_weights,
    row_factors,
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    depth,
    num_columns,
    num_tiles_n,
    stride_intermediate,
    stride_expert,
    stride_column,
    stride_scale,
    stride_zero_point,
    stride_bias,
    stride_out,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    TALL: tl.constexpr,  # TileShape of tall tiles, or None
    OVERLAP: tl.constexpr,
):
    rows = RowArguments(
        topk_ids,
        expert_map,
        num_tokens,
        num_experts,
        num_local_experts,
        sorted_routes,
        block_expert,
        block_row,
        block_end,
        num_blocks,
    )
    gemm = Down(
        out,
        intermediate,
        bias,
        topk_weights,
        row_factors,
        Matrices(
            w2,
            group_scale,
            zero_point,
            row_scale,
            depth,
            num_columns,
            stride_expert,
            stride_column,
            stride_scale,
            stride_zero_point,
        ),
        stride_intermediate,
        stride_bias,
        stride_out,
    )
    # The tile map was complete before the previous kernel began, so read it before waiting.
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if SORTED:
        used_blocks = tl.load(num_blocks)
    if TALL is not None:
        first_block = load_num_tall(num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            wait_for_previous(OVERLAP)
            release_next(OVERLAP)
            tile = claim_tile_of(rows, number, 0, first_block, tall_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TALL)
            down_tile(tile, gemm, FORMAT, TALL)
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if SORTED:
        if number >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile_of(rows, number, first_block, used_blocks, num_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TILE)
    if not SORTED:
        if tile.expert < 0:
            wait_for_previous(OVERLAP)
            return
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    down_tile(tile, gemm, FORMAT, TILE)
