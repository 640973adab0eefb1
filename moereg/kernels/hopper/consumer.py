"""The consumers of a Hopper grouped GEMM, in Triton's Gluon: multiply a tile, add the bias, activate, store.

The product is transposed, columns x rows, because rows of a weight are wgmma's M side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.hopper.ring import multiply, reinterpret
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)

# Triton 3.8 renamed these two; 3.9 removed the old names.
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Place(NamedTuple):
    """Position of one consumer's part of a tile."""

    expert: Any  # the tile's expert
    column: Any  # the part's first row of the expert's weight and bias
    anchor: Any  # the tile's coordinate on axis 0 of the output's tensor map
    row: Any  # the tile's first row on axis 1
    out_column: Any  # the part's first column on axis 2


class Output(NamedTuple):
    """The memory that consumers store to, and what their epilogue reads."""

    # map of the compact rows behind the guard, clipped at an expert's end, or in the batched format of [E, max_T,
    # columns]; boxes [1, rows, columns] of a staged store
    out: Any
    # [stores * consumers, rows, columns] staged stores; while one is written, a consumer's others may be in flight
    staging: Any
    bias: Any  # pointer to [E, bias_columns], canonical; or None
    bias_columns: Any  # rows of an expert's canonical weight
    row_weights: Any  # `RowWeights` that multiply compact rows after the bias
    row_scale: Any  # pointer to [E, num_columns] fp32, of packed weights, or None
    num_columns: Any  # rows of an expert's weight, padded where it is packed; in training, columns of `out`
    # max_T in the batched format, where rows of a box past an expert's count are written and those past max_T are
    # dropped; None where rows are compact
    max_tokens: Any
    # map of rows of the pre-activation or its gradient, by half, boxes [1, 1, rows, columns]; this and the next three
    # only in training. None: not written
    pre: Any
    partials: Any  # pointer to [NUM_WARPS * tiles along the columns, N] fp32, one for each warp; None: not written
    factors: Any  # [consumers, BLOCK_M] fp32, the routing weights of a tile
    num_routes: Any  # N


class RowWeights(NamedTuple):
    """Pointers to the routing weights of sorted rows; both None where rows are not weighted."""

    sorted_routes: Any  # of a `RoutePlan`
    topk_weights: Any  # fp32, by route


@gluon.jit
def load_weights(row_weights, rows):
    """Routing weights of sorted rows, each of which must belong to a route."""
    return gl.load(row_weights.topk_weights + gl.load(row_weights.sorted_routes + rows))


@gluon.jit
def add_bias(x, output, place, GATED: gl.constexpr):
    """Adds the bias, if there is one, to [COLUMNS, ROWS] fp32."""
    COLUMNS: gl.constexpr = x.shape[0]
    if output.bias is not None:
        at = gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
        if GATED:
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
    return x


@gluon.jit
def _finish(x, output, place, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Applies the epilogue to `x` [COLUMNS, ROWS] fp32; returns [ROWS, OUT_COLUMNS] of the output."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    x = add_bias(x, output, place, ACTIVATION.gated)
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
def stage(y, output, PART: gl.constexpr, NUMBER: gl.constexpr, STORES: gl.constexpr):
    """Writes [ROWS, COLUMNS] to one of a consumer's STORES buffers, for a tile's store number NUMBER; returns it.

    Earlier stores may be in flight; the previous tile may have ended with any buffer.
    """
    ROWS: gl.constexpr = y.shape[0]
    buffer = output.staging.index(STORES * PART + NUMBER % STORES)
    tma.store_wait(0 if NUMBER == 0 else STORES - 1)
    barrier()
    if ROWS == buffer.shape[0]:
        buffer.store(y)
    else:
        buffer.slice(0, ROWS, dim=0).store(y)
    fence_async_shared()
    barrier()
    return buffer


@gluon.jit
def store_tile(x, output, place, PART: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Stores `x` [COLUMNS, ROWS] fp32 of a warpgroup's product, chunk by chunk through its two staging buffers.

    Row i of `x` is row FIRST + i of the tile. The tensor map drops rows past the expert's end.
    """
    out = output.out
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = out.block_shape[1]
    if ROWS > CHUNK:
        low, high = gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))  # [COLUMNS, ROWS // 2]
        store_tile(low, output, place, PART, FIRST, ACTIVATION)
        store_tile(high, output, place, PART, FIRST + ROWS // 2, ACTIVATION)
    else:
        # [ROWS, OUT_COLUMNS]
        buffer = stage(_finish(x, output, place, FIRST, ACTIVATION), output, PART, FIRST // CHUNK, 2)
        box = reinterpret(buffer, out.dtype, out.block_shape, out.layout)  # [1, CHUNK, OUT_COLUMNS]
        store_box(out, [place.anchor, place.row + FIRST, place.out_column], box)


@gluon.jit
def place_of(output, tile, PART: gl.constexpr, TILE: gl.constexpr):
    """Returns the `Place` of a consumer's part of a tile."""
    number = TILE.consumers * tile.column_tile + PART
    column = number * (TILE.block_n // TILE.consumers)
    if output.max_tokens is None:
        anchor = tile.row + tile.num_rows
        row = _GUARD - tile.num_rows
    else:
        anchor = tile.expert
        row = tile.row - tile.expert * output.max_tokens
    out_column = number * output.staging.shape[2]
    return Place(expert=tile.expert, column=column, anchor=anchor, row=row, out_column=out_column)


@gluon.jit
def consume_plain_tile(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and stores a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    # [BLOCK_N // 2, ROWS] and [BLOCK_N // 2, SLACK]
    product, slack_product, slot, phase = multiply(ring, slot, phase, num_steps, PART, ROWS, SLACK, TILE)
    place = place_of(output, tile, PART, TILE)
    store_tile(product, output, place, PART, 0, ACTIVATION)
    if SLACK > 0:
        store_tile(slack_product, output, place, PART, ROWS, ACTIVATION)
    return slot, phase
