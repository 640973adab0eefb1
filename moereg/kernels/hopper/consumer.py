"""The consumers of a Hopper grouped GEMM, in Triton's Gluon: multiply a tile, add the bias, activate, store.

The product is transposed, columns x rows, because rows of a weight are wgmma's M side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.hopper.config import BODIES
from moereg.kernels.hopper.ring import NO_TILE, locate, multiply, reinterpret, take_tile
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)
_BODIES = gl.constexpr(BODIES)
_LONGEST = gl.constexpr(len(BODIES) - 1)


@gluon.constexpr_function
def _next_shorter(body: int, bodies: int) -> int:
    """Number of the longest body in `bodies` that is shorter than number `body`, or -1."""
    return max((shorter for shorter in range(body) if bodies >> shorter & 1), default=-1)


# Triton 3.8 renamed these two; 3.9 removed the old names.
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Place(NamedTuple):
    """Position of one warpgroup's half of a tile.

    Attributes:
        expert: the tile's expert.
        column: the half's first row of the expert's weight and bias.
        anchor: the tile's coordinate on axis 0 of the output's tensor map.
        row: the tile's first row on axis 1.
        out_column: the half's first column on axis 2.
    """

    expert: Any
    column: Any
    anchor: Any
    row: Any
    out_column: Any


class Output(NamedTuple):
    """The memory that consumers store to, and what their epilogue reads.

    Attributes:
        out: map of the compact rows behind the guard, clipped at an expert's end, or in the batched format of
            [E, max_T, columns]; boxes [1, rows, columns] of a staged store.
        staging: [2 * consumers, rows, columns] staged stores, two of each warpgroup.
        bias: pointer to [E, bias_columns], canonical; or None.
        bias_columns: rows of an expert's canonical weight.
        row_weights: `RowWeights` that multiply compact rows after the bias.
        row_scale: pointer to [E, num_columns] fp32, of packed weights, or None.
        num_columns: rows of an expert's weight, padded where it is packed.
        max_tokens: max_T in the batched format, where rows of a box past an expert's count are written and those
            past max_T are dropped; None where rows are compact.
    """

    out: Any
    staging: Any
    bias: Any
    bias_columns: Any
    row_weights: Any
    row_scale: Any
    num_columns: Any
    max_tokens: Any


class RowWeights(NamedTuple):
    """Pointers to the routing weights of sorted rows; both None where rows are not weighted.

    Attributes:
        sorted_routes: of a `RoutePlan`.
        topk_weights: fp32, by route.
    """

    sorted_routes: Any
    topk_weights: Any


@gluon.jit
def load_weights(row_weights, rows):
    """Routing weights of sorted rows, each of which must belong to a route."""
    return gl.load(row_weights.topk_weights + gl.load(row_weights.sorted_routes + rows))


@gluon.jit
def _finish(x, output, place, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Applies the epilogue to `x` [COLUMNS, ROWS] fp32; returns [ROWS, OUT_COLUMNS] of the output."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if output.bias is not None:
        at = gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
        if ACTIVATION.gated:
            # 8 gates, then their 8 ups; the mask is of the gate.
            width = output.bias_columns // 2
            up = at // 8 % 2
            at = place.column // 2 + at // 16 * 8 + at % 8
            mask = at < width
            at += up * width
        else:
            at += place.column
            mask = at < output.bias_columns
        bias = output.bias + place.expert.to(gl.int64) * output.bias_columns
        value = gl.load(bias + at, mask=mask, other=0.0)  # [COLUMNS]
        x += value.to(gl.float32)[:, None]
    if output.row_weights.topk_weights is not None:
        # Rows past the tile's last repeat its weight; they are dropped when stored.
        behind = place.row - _GUARD + FIRST + gl.arange(0, ROWS, gl.SliceLayout(0, x.type.layout))  # [ROWS]
        x *= load_weights(output.row_weights, place.anchor + gl.minimum(behind, -1))[None, :]
    if ACTIVATION.gated:
        # A box brings 8 gates, then their 8 ups, so that one thread holds both of a pair.
        gate, up = gl.split(gl.permute(gl.reshape(x, (COLUMNS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
        y = activate_halves(gate, up, ACTIVATION)  # [COLUMNS // 16, 8, ROWS]
        y = gl.reshape(y, (COLUMNS // 2, ROWS))
    elif ACTIVATION.name is not None:
        y = activate(x, ACTIVATION)
    else:
        y = x
    return gl.permute(y.to(output.out.dtype), (1, 0))


@gluon.jit
def store_tile(x, output, place, WARPGROUP: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Stores `x` [COLUMNS, ROWS] fp32 of a warpgroup's product, chunk by chunk through its two staging buffers.

    Row i of `x` is row FIRST + i of the tile. The tensor map drops rows past the expert's end.
    """
    out = output.out
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = out.block_shape[1]
    if ROWS > CHUNK:
        low, high = gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))  # [COLUMNS, ROWS // 2]
        store_tile(low, output, place, WARPGROUP, FIRST, ACTIVATION)
        store_tile(high, output, place, WARPGROUP, FIRST + ROWS // 2, ACTIVATION)
    else:
        y = _finish(x, output, place, FIRST, ACTIVATION)  # [ROWS, OUT_COLUMNS]
        buffer = output.staging.index(2 * WARPGROUP + FIRST // CHUNK % 2)  # [CHUNK, OUT_COLUMNS]
        # The store from the other buffer may be in flight; the previous tile may have ended with either.
        tma.store_wait(0 if FIRST == 0 else 1)
        barrier()
        if ROWS == CHUNK:
            buffer.store(y)
        else:
            buffer.slice(0, ROWS, dim=0).store(y)
        fence_async_shared()
        barrier()
        box = reinterpret(buffer, out.dtype, out.block_shape, out.layout)  # [1, CHUNK, OUT_COLUMNS]
        store_box(out, [place.anchor, place.row + FIRST, place.out_column], box)


@gluon.jit
def _consume_tile(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and stores a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    # [BLOCK_N // 2, ROWS] and [BLOCK_N // 2, SLACK]
    product, slack_product, slot, phase = multiply(ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, TILE)
    column = tile.column_tile * TILE.block_n + WARPGROUP * (TILE.block_n // 2)
    out_column = (2 * tile.column_tile + WARPGROUP) * output.out.block_shape[2]
    if output.max_tokens is None:
        anchor = tile.row + tile.num_rows
        row = _GUARD - tile.num_rows
    else:
        anchor = tile.expert
        row = tile.row - tile.expert * output.max_tokens
    place = Place(expert=tile.expert, column=column, anchor=anchor, row=row, out_column=out_column)
    store_tile(product, output, place, WARPGROUP, 0, ACTIVATION)
    if SLACK > 0:
        store_tile(slack_product, output, place, WARPGROUP, ROWS, ACTIVATION)
    return slot, phase


@gluon.jit
def _consume_shortest(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    WARPGROUP: gl.constexpr,
    BODY: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Runs `_consume_tile` with the shortest body that holds the tile; body number BODY does."""
    ROWS: gl.constexpr = _BODIES[BODY][0] * TILE.block_m // 4
    MORE: gl.constexpr = _BODIES[BODY][1] * TILE.slack
    SHORTER: gl.constexpr = _next_shorter(BODY, TILE.bodies)
    # fmt: off
    if SHORTER < 0:
        return _consume_tile(output, ring, slot, phase, num_steps, tile, WARPGROUP, ROWS, MORE, TILE, ACTIVATION)
    else:
        if tile.num_rows > _BODIES[SHORTER][0] * TILE.block_m // 4 + _BODIES[SHORTER][1] * TILE.slack:
            slot, phase = _consume_tile(
                output, ring, slot, phase, num_steps, tile, WARPGROUP, ROWS, MORE, TILE, ACTIVATION)
        else:
            slot, phase = _consume_shortest(
                output, ring, slot, phase, num_steps, tile, WARPGROUP, SHORTER, TILE, ACTIVATION)
        return slot, phase
    # fmt: on


@gluon.jit
def consume(
    output, ring, turns, order, num_steps, WARPGROUP: gl.constexpr, TILE: gl.constexpr, ACTIVATION: gl.constexpr
):
    """Multiplies and stores one warpgroup's half of every tile of the program. Run by four warps.

    Waits for a tile to be announced and for each slot of the ring to be full; reads the ring, `order` and the bias;
    writes the staged stores and, through these, the output.

    Args:
        output: an `Output`.
        ring: a `Ring`.
        turns: `Turns`.
        order: a `TileOrder`.
        num_steps: steps along the reduced dimension.
        WARPGROUP: 0 or 1: which half of the columns.
        TILE: a `ProductTile`.
        ACTIVATION: `ActivationConstant`.
    """
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, TILE.block_m, TILE.slack)
        slot, phase = _consume_shortest(
            output, ring, slot, phase, num_steps, tile, WARPGROUP, _LONGEST, TILE, ACTIVATION
        )
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)
