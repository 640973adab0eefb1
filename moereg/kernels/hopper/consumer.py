"""The consumers of a Hopper grouped GEMM, in Triton's Gluon: multiply a tile, add the bias, activate, store.

The product is transposed, columns x rows, because rows of a weight are wgmma's M side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from moereg.kernels.hopper.config import BODIES
from moereg.kernels.hopper.ring import NO_TILE, locate, multiply, reinterpret, take_tile
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)
_BODIES = gl.constexpr(BODIES)
_LONGEST = gl.constexpr(len(BODIES) - 1)


@gluon.constexpr_function
def _next_shorter(body: int, bodies: int) -> int:
    """The longest body below number `body` that `bodies` has, or -1."""
    return max((shorter for shorter in range(body) if bodies >> shorter & 1), default=-1)


# Triton 3.8 renamed these two; 3.9 removed the old names.
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr):
    """The activation of gates in fp32; as `activate` of `kernels/gemm/activation.py`."""
    if ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        return x / (1.0 + gl.exp(-ALPHA * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        gl.static_assert(ACTIVATION == "relu2")
        # Written so that NaN stays NaN.
        x = gl.where(x < 0.0, 0.0, x)
        return x * x


@gluon.jit
def activate_halves(gate, up, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr):
    """Activates gates and ups in fp32, as a `GateUpEpilogue` says."""
    if LIMIT is not None:
        # Comparisons keep NaN, which a minimum would replace by the limit.
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return activate(gate, ACTIVATION, ALPHA) * (up + BETA)


class Place(NamedTuple):
    """Position of one warpgroup's half of a tile.

    Attributes:
        expert: the tile's.
        column: its first row of the expert's weight, and so of the bias.
        anchor: where the tensor map of `out` has the tile along its first axis,
        row: the tile's first row along its second,
        out_column: and the half's first column along its third.
        row_weights: `RowWeights`; none in the batched format.
    """

    expert: Any
    column: Any
    anchor: Any
    row: Any
    out_column: Any
    row_weights: Any


class RowWeights(NamedTuple):
    """Pointers to the weights of sorted rows, each that of its route; both None where rows are not weighted.

    Attributes:
        sorted_routes: of a `RoutePlan`.
        topk_weights: fp32, by route.
    """

    sorted_routes: Any
    topk_weights: Any


@gluon.jit
def load_weights(row_weights, rows):
    """Weights of sorted rows, all of them rows of routes."""
    return gl.load(row_weights.topk_weights + gl.load(row_weights.sorted_routes + rows))


@gluon.jit
def _finish(
    x,
    bias,
    place,
    num_columns,
    FIRST: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Returns [ROWS, OUT_COLUMNS] of the output for `x` [COLUMNS, ROWS] fp32 of the product."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if bias is not None:
        at = gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
        if GATED:
            at = at // 16 * 16 + at % 8 * 2 + at // 8 % 2
        at += place.column
        # [COLUMNS]
        value = gl.load(bias + place.expert.to(gl.int64) * num_columns + at, mask=at < num_columns, other=0.0)
        x += value.to(gl.float32)[:, None]
    if place.row_weights.topk_weights is not None:
        # Rows past the tile's last repeat its weight; they are dropped when stored.
        behind = place.row - _GUARD + FIRST + gl.arange(0, ROWS, gl.SliceLayout(0, x.type.layout))  # [ROWS]
        x *= load_weights(place.row_weights, place.anchor + gl.minimum(behind, -1))[None, :]
    if GATED:
        # A box brought 8 gates, then their 8 ups: rows that one thread holds both of.
        gate, up = gl.split(gl.permute(gl.reshape(x, (COLUMNS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
        y = activate_halves(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)  # [COLUMNS // 16, 8, ROWS]
        y = gl.reshape(y, (COLUMNS // 2, ROWS))
    elif ACTIVATION is not None:
        y = activate(x, ACTIVATION, ALPHA)
    else:
        y = x
    return gl.permute(y.to(DTYPE), (1, 0))


@gluon.jit
def store_tile(
    x,
    out,
    staging,
    bias,
    place,
    num_columns,
    WARPGROUP: gl.constexpr,
    FIRST: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Stores `x` [COLUMNS, ROWS] fp32 of a warpgroup's product, chunk by chunk through its two buffers of `staging`.

    Row i of it is row FIRST + i of the tile. The tensor map `out` drops rows past the expert's end.
    """
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = out.block_shape[1]
    if ROWS > CHUNK:
        low, high = gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))  # [COLUMNS, ROWS // 2]
        # fmt: off
        store_tile(low, out, staging, bias, place, num_columns, WARPGROUP, FIRST, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        store_tile(high, out, staging, bias, place, num_columns, WARPGROUP, FIRST + ROWS // 2, ACTIVATION, GATED, ALPHA,
               BETA, LIMIT)
        # fmt: on
    else:
        # fmt: off
        y = _finish(x, bias, place, num_columns, FIRST, ACTIVATION, GATED, ALPHA, BETA, LIMIT,
                    out.dtype)  # [ROWS, OUT_COLUMNS]
        # fmt: on
        buffer = staging.index(2 * WARPGROUP + FIRST // CHUNK % 2)  # [CHUNK, OUT_COLUMNS]
        # The other buffer may still be read, and a tile may have ended with either.
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
    out,
    bias,
    row_weights,
    ring,
    staging,
    slot,
    phase,
    num_steps,
    num_columns,
    tile,
    max_tokens,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FENCE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiplies and stores a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    # [BLOCK_N // 2, ROWS] and [BLOCK_N // 2, SLACK]
    product, slack_product, slot, phase = multiply(
        ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, BLOCK_N, STAGES, FENCE
    )
    column = tile.column_tile * BLOCK_N + WARPGROUP * (BLOCK_N // 2)
    out_column = (2 * tile.column_tile + WARPGROUP) * out.block_shape[2]
    if max_tokens is None:
        anchor = tile.row + tile.num_rows
        row = _GUARD - tile.num_rows
    else:
        anchor = tile.expert
        row = tile.row - tile.expert * max_tokens
    place = Place(
        expert=tile.expert, column=column, anchor=anchor, row=row, out_column=out_column, row_weights=row_weights
    )
    # fmt: off
    store_tile(product, out, staging, bias, place, num_columns, WARPGROUP, 0, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    if SLACK > 0:
        store_tile(slack_product, out, staging, bias, place, num_columns, WARPGROUP, ROWS, ACTIVATION, GATED, ALPHA,
               BETA, LIMIT)
    # fmt: on
    return slot, phase


@gluon.jit
def _consume_shortest(
    out,
    bias,
    row_weights,
    ring,
    staging,
    slot,
    phase,
    num_steps,
    num_columns,
    tile,
    max_tokens,
    WARPGROUP: gl.constexpr,
    BODY: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    BODIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FENCE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """`_consume_tile` as the shortest of BODIES that holds the tile, which number BODY does."""
    ROWS: gl.constexpr = _BODIES[BODY][0] * BLOCK_M // 4
    MORE: gl.constexpr = _BODIES[BODY][1] * SLACK
    SHORTER: gl.constexpr = _next_shorter(BODY, BODIES)
    # fmt: off
    if SHORTER < 0:
        slot, phase = _consume_tile(
            out, bias, row_weights, ring, staging, slot, phase, num_steps, num_columns, tile, max_tokens,
            WARPGROUP, ROWS, MORE, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    elif tile.num_rows > _BODIES[SHORTER][0] * BLOCK_M // 4 + _BODIES[SHORTER][1] * SLACK:
        slot, phase = _consume_tile(
            out, bias, row_weights, ring, staging, slot, phase, num_steps, num_columns, tile, max_tokens,
            WARPGROUP, ROWS, MORE, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    else:
        slot, phase = _consume_shortest(
            out, bias, row_weights, ring, staging, slot, phase, num_steps, num_columns, tile, max_tokens,
            WARPGROUP, SHORTER, BLOCK_M, SLACK, BODIES, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    # fmt: on
    return slot, phase


@gluon.jit
def consume(
    out,
    bias,
    row_weights,
    ring,
    turns,
    staging,
    order,
    num_steps,
    num_columns,
    max_tokens,
    WARPGROUP: gl.constexpr,
    FENCE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    BODIES: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiplies and stores one warpgroup's half of every tile of the program. Run by four warps.

    Waits for a tile to be announced and for each slot of the ring to be full; reads the ring, `order` and the bias;
    writes `staging` and, through it, `out`.

    Args:
        out: map of the compact rows behind the guard, clipped at an expert's end, or in the batched format of
            [E, max_T, columns]; boxes [1, rows, columns] of a staged store.
        bias: pointer to [E, num_columns], or None.
        row_weights: `RowWeights` that multiply compact rows after the bias.
        ring: a `Ring`.
        turns: `Turns`.
        staging: [4, rows, columns] staged stores, two of each warpgroup.
        order: a `TileOrder`.
        num_steps: steps along the reduced dimension.
        num_columns: rows of an expert's weight.
        max_tokens: max_T in the batched format, where rows of a box behind an expert's count are written and those
            behind max_T are dropped; None where rows are compact.
        WARPGROUP: 0 or 1: which half of the columns.
        FENCE: as for `multiply`.
        BLOCK_N: columns of a tile.
        BLOCK_M: rows of a tile.
        SLACK: rows by which a tile may be longer.
        BODIES: which bodies tiles have: a bit each.
        STAGES: slots of the ring.
        ACTIVATION: of a `GateUpEpilogue`, like the next four; None in the second product.
        GATED: likewise; False there.
        ALPHA: likewise.
        BETA: likewise.
        LIMIT: likewise.
    """
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, BLOCK_M, SLACK)
        # fmt: off
        slot, phase = _consume_shortest(
            out, bias, row_weights, ring, staging, slot, phase, num_steps, num_columns, tile, max_tokens,
            WARPGROUP, _LONGEST, BLOCK_M, SLACK, BODIES, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        # fmt: on
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)
