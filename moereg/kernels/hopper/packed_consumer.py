"""The consumers of a Hopper grouped GEMM of packed weights, in Triton's Gluon: multiply, scale, activate, store."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moereg.kernels.hopper.consumer import Place, RowWeights, store_tile
from moereg.kernels.hopper.packed_multiply import multiply_one, multiply_two
from moereg.kernels.hopper.ring import locate
from moereg.kernels.hopper.turns import NO_TILE, take_tile
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)


@gluon.jit
def _scaled(x, row_scale, expert, column, num_columns, UNIT: gl.constexpr, GATED: gl.constexpr):
    """[COLUMNS, ROWS] times the scales of the weight's rows and the unit of restored numbers."""
    if row_scale is not None:
        at = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        if GATED:
            at = at // 16 * 16 + at % 8 * 2 + at // 8 % 2
        at += column
        # Columns past the last are dropped when stored.
        value = gl.load(row_scale + expert.to(gl.int64) * num_columns + at, mask=at < num_columns, other=0.0)
        return x * (value * UNIT)[:, None]
    elif UNIT != 1.0:
        return x * UNIT
    else:
        return x


@gluon.jit
def _store_half(
    product,
    slack_product,
    out,
    staging,
    bias,
    row_scale,
    tile,
    half,
    num_columns,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Scales and stores the products of 64 columns, number `half` of all."""
    place = Place(
        expert=tile.expert,
        column=half * 64,
        anchor=tile.row + tile.num_rows,
        row=_GUARD - tile.num_rows,
        out_column=half * out.block_shape[2],
        row_weights=RowWeights(None, None),
    )
    UNIT: gl.constexpr = 1.0 if FORMAT.element == "float4_e2m1fn" else 64.0
    # fmt: off
    product = _scaled(product, row_scale, tile.expert, half * 64, num_columns, UNIT, GATED)
    store_tile(product, out, staging, bias, place, num_columns, WARPGROUP, 0, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    if SLACK > 0:
        slack_product = _scaled(slack_product, row_scale, tile.expert, half * 64, num_columns, UNIT, GATED)
        store_tile(slack_product, out, staging, bias, place, num_columns, WARPGROUP, ROWS, ACTIVATION, GATED, ALPHA,
               BETA, LIMIT)
    # fmt: on


@gluon.jit
def _consume_tile(
    out,
    bias,
    row_scale,
    ring,
    staging,
    slot,
    phase,
    num_steps,
    num_columns,
    tile,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiplies and stores a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    half = (TILE.consumers * tile.column_tile + WARPGROUP) * TILE.halves
    # fmt: off
    if TILE.halves == 1:
        product, slack_product, slot, phase = multiply_one(
            ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, TILE, GATED, FORMAT)
        _store_half(product, slack_product, out, staging, bias, row_scale, tile, half, num_columns,
                    WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    else:
        low, slack_low, high, slack_high, slot, phase = multiply_two(
            ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, TILE, GATED, FORMAT)
        _store_half(low, slack_low, out, staging, bias, row_scale, tile, half, num_columns,
                    WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        _store_half(high, slack_high, out, staging, bias, row_scale, tile, half + 1, num_columns,
                    WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    # fmt: on
    return slot, phase


@gluon.jit
def consume_packed(
    out,
    bias,
    row_scale,
    ring,
    turns,
    staging,
    order,
    num_steps,
    num_columns,
    WARPGROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiplies and stores one warpgroup's part of every tile of the program. Run by four warps.

    Args:
        out: map of the compact rows behind the guard, clipped at an expert's end; boxes of a staged store.
        bias: pointer to [E, num_columns], or None.
        row_scale: pointer to [E, num_columns] fp32, or None.
        ring: a `PackedRing`.
        turns: `Turns`.
        staging: [2 * consumers, rows, columns] staged stores, two of each warpgroup.
        order: a `TileOrder`.
        num_steps: steps along the reduced dimension, at least three.
        num_columns: rows of an expert's weight.
        WARPGROUP: which part of the columns.
        TILE: a `PackedTile`.
        FORMAT: a `PackedFormat`.

    The others are those of `consume` in `consumer.py`.
    """
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, BLOCK_M, SLACK)
        # fmt: off
        if tile.num_rows > BLOCK_M:
            slot, phase = _consume_tile(
                out, bias, row_scale, ring, staging, slot, phase, num_steps, num_columns, tile,
                WARPGROUP, BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        elif tile.num_rows > BLOCK_M // 2:
            slot, phase = _consume_tile(
                out, bias, row_scale, ring, staging, slot, phase, num_steps, num_columns, tile,
                WARPGROUP, BLOCK_M, 0, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        else:
            slot, phase = _consume_tile(
                out, bias, row_scale, ring, staging, slot, phase, num_steps, num_columns, tile,
                WARPGROUP, BLOCK_M // 2, 0, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        # fmt: on
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)
