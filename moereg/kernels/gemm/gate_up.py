"""The first grouped matmul of a Mixture-of-Experts layer, the kernel; see `grouped`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate_pairs
from moereg.kernels.gemm.operand import Matrices, product
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.rows.block_map import load_num_tall
from moereg.kernels.rows.tiles import claim_tile


class GateUp(NamedTuple):
    """The kernel's argument: all that every tile of the product reads and writes; see `gate_up_gemm`.

    Attributes:
        out: with the next and the last two pointers.
        hidden_states: rows of activations.
        matrices: `Matrices`.
        bias: or None.
        route_factors: or None.
    """

    out: Any
    hidden_states: Any
    matrices: Matrices
    bias: Any
    route_factors: Any


@triton.jit
def gate_up_tile(
    tile,
    gemm,
    hidden_size,
    depth,
    num_columns,
    strides,
    SORTED: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiplies, activates and stores a `Tile`, of a `GateUp` and its `Strides`."""
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if TILE.mask_n:
        # Columns past the end repeat the last one, which costs no bandwidth and needs no mask.
        columns = tl.minimum(columns, num_columns - 1)
    a_rows = gemm.hidden_states + (tile.routes // TOP_K).to(tl.int64) * strides.rows
    expert = tile.expert.to(tl.int64)
    x = product(
        a_rows,
        gemm.matrices,
        strides.matrices,
        depth,
        num_columns,
        expert,
        columns,
        tile.row_mask,
        hidden_size,
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
        bias = tl.load(gemm.bias + tile.expert.to(tl.int64) * strides.bias + columns)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    y = activate_pairs(x, ACTIVATION)  # [BLOCK_M, BLOCK_N / HALVES]
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    out_columns = tile.column_tile * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (out_columns < num_columns // HALVES)[None, :]
    out_pointers = gemm.out + tile.rows.to(tl.int64)[:, None] * strides.out + out_columns[None, :]
    tl.store(out_pointers, y.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    gemm,  # GateUp
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    hidden_size,
    depth,
    num_columns,
    num_tiles_n,
    strides,  # Strides
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
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if SORTED:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
        used_blocks = tl.load(plan.num_blocks)
    if TALL is not None:
        first_block = load_num_tall(plan.num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            tile = claim_tile(
                direct, num_tokens, plan, first_block, tall_tiles_n, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, TALL, number
            )
            gate_up_tile(
                tile, gemm, hidden_size, depth, num_columns, strides, SORTED, TOP_K, ACTIVATION, FORMAT, TALL, OVERLAP
            )
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if SORTED:
        if number >= used_blocks * num_tiles_n:
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
            return
    gate_up_tile(tile, gemm, hidden_size, depth, num_columns, strides, SORTED, TOP_K, ACTIVATION, FORMAT, TILE, OVERLAP)
