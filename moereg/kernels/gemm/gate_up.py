"""The first grouped matmul of a Mixture-of-Experts layer, the kernel; see `grouped`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate_pairs
from moereg.kernels.gemm.operand import Matrices, product
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.rows.block_map import load_num_tall
from moereg.kernels.rows.tiles import RowArguments, claim_tile_of


class GateUp(NamedTuple):
    """What every tile of the product reads and writes; see `gate_up_gemm`.

    Attributes:
        out: with the next three pointers.
        hidden_states: rows of activations.
        bias: or None.
        route_factors: or None.
        matrices: `Matrices`.
        hidden_size: H.
        stride_hidden: with the next two from one row to the next, of `bias` from one expert to the next.
    """

    out: tl.tensor
    hidden_states: tl.tensor
    bias: tl.tensor
    route_factors: tl.tensor
    matrices: Matrices
    hidden_size: tl.tensor
    stride_hidden: tl.tensor
    stride_bias: tl.tensor
    stride_out: tl.tensor


@triton.jit
def gate_up_tile(
    tile,
    gemm,
    SORTED: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiplies, activates and stores a `Tile`, of a `GateUp`."""
    BLOCK_N: tl.constexpr = TILE.block_n
    num_columns = gemm.matrices.num_columns
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if TILE.mask_n:
        # Columns past the end repeat the last one, which costs no bandwidth and needs no mask.
        columns = tl.minimum(columns, num_columns - 1)
    x = product(
        gemm.hidden_states + (tile.routes // TOP_K).to(tl.int64) * gemm.stride_hidden,
        gemm.matrices,
        tile.expert.to(tl.int64),
        columns,
        tile.row_mask,
        gemm.hidden_size,
        FORMAT,
        TILE,
    )  # [BLOCK_M, BLOCK_N] fp32
    if not SORTED:
        # Not released earlier: the few programs of the second GEMM would crowd onto the multiprocessors that are free
        # first.
        release_next(OVERLAP)

    if gemm.route_factors is not None:
        x *= tl.load(gemm.route_factors + tile.routes)[:, None]
    if gemm.bias is not None:
        bias = tl.load(gemm.bias + tile.expert.to(tl.int64) * gemm.stride_bias + columns)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    y = activate_pairs(x, ACTIVATION)  # [BLOCK_M, BLOCK_N / HALVES]
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    out_columns = tile.column_tile * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (out_columns < num_columns // HALVES)[None, :]
    out_pointers = gemm.out + tile.rows.to(tl.int64)[:, None] * gemm.stride_out + out_columns[None, :]
    tl.store(out_pointers, y.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    out,
    hidden_states,
    w13,
    group_scale,
    zero_point,
    row_scale,
    bias,
    route_factors,
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
    hidden_size,
    depth,
    num_columns,
    num_tiles_n,
    stride_hidden,
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
    ACTIVATION: tl.constexpr,  # ActivationConstant
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
    gemm = GateUp(
        out,
        hidden_states,
        bias,
        route_factors,
        Matrices(
            w13,
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
        hidden_size,
        stride_hidden,
        stride_bias,
        stride_out,
    )
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if SORTED:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
        used_blocks = tl.load(num_blocks)
    if TALL is not None:
        first_block = load_num_tall(num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            tile = claim_tile_of(rows, number, 0, first_block, tall_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TALL)
            gate_up_tile(tile, gemm, SORTED, TOP_K, ACTIVATION, FORMAT, TALL, OVERLAP)
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if SORTED:
        if number >= used_blocks * num_tiles_n:
            return
    tile = claim_tile_of(rows, number, first_block, used_blocks, num_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TILE)
    if not SORTED:
        if tile.expert < 0:
            return
    gate_up_tile(tile, gemm, SORTED, TOP_K, ACTIVATION, FORMAT, TILE, OVERLAP)
