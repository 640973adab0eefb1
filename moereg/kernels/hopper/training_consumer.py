"""The consumers of the Hopper products of canonical weights, in Triton's Gluon: multiply a tile, finish it, store.

The product is transposed, columns x rows, because columns of a weight are wgmma's M side. Both warpgroups multiply,
each as a consumer with half the columns. Or both are one consumer: that takes 4 to 5 % longer for the others, but an
epilogue that is long and runs once a tile waits for its instructions, 70 % of its time through an activation's
derivative. With one copy of them that product took 856 us, not 1,174 (qwen3-30b-a3b, 16,384 tokens, an H200, by hand).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moereg.kernels.backward.activation import slopes, slopes_of_halves
from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.hopper.consumer import barrier, store_box
from moereg.kernels.hopper.ring import BLOCK_K, NO_TILE, TURNS, locate, next_slot, reinterpret
from moereg.kernels.hopper.training_producer import SAVED_ROWS
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)


# Warps of all consumers.
NUM_WARPS = gl.constexpr(8)


class Results(NamedTuple):
    """The memory that a product writes, and what its epilogue reads.

    Attributes:
        out: map of sorted rows behind the guard, clipped at an expert's end, boxes [1, rows, columns] of a staged
            store; None: not written.
        pre: map of rows of the pre-activation or its gradient, by half, boxes [1, 1, rows, columns]; None: not written.
        partials: pointer to [NUM_WARPS * tiles along the columns, N] fp32, one for each warp; None: not written.
        staging: [stores, rows, columns] of this consumer; while one is written, stores before it are in flight.
        bias: pointer to the canonical [E, columns of the product]; None: no bias.
        sorted_routes: of a `RoutePlan`.
        topk_weights: pointer to fp32 by route; None: rows are not weighted.
        factors: [1, BLOCK_M] fp32, the routing weights of a tile.
        width: columns of `out`.
        num_routes: N.
    """

    out: Any
    pre: Any
    partials: Any
    staging: Any
    bias: Any
    sorted_routes: Any
    topk_weights: Any
    factors: Any
    width: Any
    num_routes: Any


class Place(NamedTuple):
    """Position of a consumer's part of a tile.

    Attributes:
        expert: the tile's expert.
        row: its first row.
        num_rows: its rows.
        column_tile: its number along the columns.
        column: the part's first column of `out`.
    """

    expert: Any
    row: Any
    num_rows: Any
    column_tile: Any
    column: Any


@gluon.jit
def _multiply(ring, slot, phase, num_steps, PART: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr):
    """[BLOCK_N / consumers, ROWS] fp32 from the next `num_steps` slots, at least one; the next slot and its phase."""
    CONSUMERS: gl.constexpr = TILE.consumers
    COLUMNS: gl.constexpr = TILE.block_n // CONSUMERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS // CONSUMERS, 1], [16, ROWS, 16])
    PARTS: gl.constexpr = TILE.block_m // ROWS
    dtype: gl.constexpr = ring.rows.dtype
    operand: gl.constexpr = ring.rows.layout
    rows = reinterpret(ring.rows, dtype, [PARTS * TILE.stages, ROWS, BLOCK_K], operand)
    if TILE.by_depth:
        weights = reinterpret(ring.weights, dtype, [CONSUMERS * TILE.stages, BLOCK_K, COLUMNS], operand)
    else:
        weights = reinterpret(ring.weights, dtype, [CONSUMERS * TILE.stages, COLUMNS, BLOCK_K], operand)
    product = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
    # Without this the accumulators are copied around a loop that may be empty, and ptxas serializes the products.
    gl.assume(num_steps > 0)
    for k in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        if TILE.top_k is not None:
            # wgmma reads through the async proxy, which does not see what cp.async wrote before a fence.
            fence_async_shared()
        a = weights.index(CONSUMERS * slot + PART)  # [COLUMNS, BLOCK_K], or transposed
        if TILE.by_depth:
            a = a.permute((1, 0))
        b = rows.index(PARTS * slot).permute((1, 0))  # [BLOCK_K, ROWS]
        product = warpgroup_mma(a, b, product, is_async=True)
        product = warpgroup_mma_wait(1, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)), pred=k > 0)
        slot, phase = next_slot(slot, phase, TILE.stages)
    product = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
    return product, slot, phase


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    """The slot before this one."""
    # Not a loop variable: Triton 3.6 compiles `last = slot` in the loop as if it never changed.
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def _halves_of_rows(x):
    """The first and the last rows of [COLUMNS, ROWS]."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))


@gluon.jit
def _stage(y, results, NUMBER: gl.constexpr):
    """Writes [COLUMNS, ROWS] to the staging buffer of a tile's store number NUMBER; returns it, [ROWS, COLUMNS].

    Earlier stores may be in flight; the previous tile may have ended with any buffer.
    """
    STORES: gl.constexpr = results.staging.shape[0]
    buffer = results.staging.index(NUMBER % STORES)
    tma.store_wait(0 if NUMBER == 0 else STORES - 1)
    barrier()
    buffer.store(gl.permute(y.to(buffer.dtype), (1, 0)))
    fence_async_shared()
    barrier()
    return buffer


@gluon.jit
def _store(y, results, place, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """Stores [COLUMNS, ROWS] of `out`, from row FIRST of the tile on; the map drops rows past the expert's end."""
    out = results.out
    buffer = reinterpret(_stage(y, results, NUMBER), out.dtype, out.block_shape, out.layout)
    store_box(out, [place.row + place.num_rows, _GUARD - place.num_rows + FIRST, place.column], buffer)


@gluon.jit
def _store_pre(y, results, place, HALF: gl.constexpr, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """Likewise a half of `pre`."""
    pre = results.pre
    buffer = reinterpret(_stage(y, results, NUMBER), pre.dtype, pre.block_shape, pre.layout)
    store_box(pre, [HALF, place.row + place.num_rows, _GUARD - place.num_rows + FIRST, place.column], buffer)


@gluon.jit
def _load_factors(results, place, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Routing weights of a tile's rows, [ROWS]; rows past the last repeat its weight."""
    at = gl.minimum(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [WARPS], [0])), place.num_rows - 1)
    return gl.load(results.topk_weights + gl.load(results.sorted_routes + place.row + at))


@gluon.jit
def _finish_rows(x, results, place, FIRST: gl.constexpr):
    """Adds the bias, weights and stores [COLUMNS, ROWS] fp32."""
    CHUNK: gl.constexpr = results.staging.shape[1]
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS > CHUNK:
        low, high = _halves_of_rows(x)
        _finish_rows(low, results, place, FIRST)
        _finish_rows(high, results, place, FIRST + ROWS // 2)
    else:
        if results.bias is not None:
            at = place.column + gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
            bias = results.bias + place.expert.to(gl.int64) * results.width
            x += gl.load(bias + at, mask=at < results.width, other=0.0).to(gl.float32)[:, None]
        if results.topk_weights is not None:
            factors = results.factors.index(0).slice(FIRST, ROWS).load(gl.SliceLayout(0, x.type.layout))
            x *= factors[None, :]
        _store(x, results, place, FIRST, FIRST // CHUNK)


@gluon.jit
def _finish_gate_up(x, results, place, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Adds the bias, stores the pre-activation and the activation of [COLUMNS, ROWS] fp32.

    Where gated, every 16 columns are 8 gates, then their 8 ups, so that one thread holds both of a pair.
    """
    CHUNK: gl.constexpr = results.staging.shape[1]
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS > CHUNK:
        low, high = _halves_of_rows(x)
        _finish_gate_up(low, results, place, FIRST, ACTIVATION)
        _finish_gate_up(high, results, place, FIRST + ROWS // 2, ACTIVATION)
    else:
        STORED: gl.constexpr = (3 if ACTIVATION.gated else 2) if results.pre is not None else 1
        NUMBER: gl.constexpr = STORED * (FIRST // CHUNK)
        if results.bias is not None:
            at = gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
            bias = results.bias
            if ACTIVATION.gated:
                bias += place.expert.to(gl.int64) * 2 * results.width + at // 8 % 2 * results.width
                at = at // 16 * 8 + at % 8
            else:
                bias += place.expert.to(gl.int64) * results.width
            at += place.column
            x += gl.load(bias + at, mask=at < results.width, other=0.0).to(gl.float32)[:, None]
        if ACTIVATION.gated:
            gate, up = gl.split(gl.permute(gl.reshape(x, (COLUMNS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
            y = gl.reshape(activate_halves(gate, up, ACTIVATION), (COLUMNS // 2, ROWS))
            if results.pre is not None:
                gate, up = gl.reshape(gate, (COLUMNS // 2, ROWS)), gl.reshape(up, (COLUMNS // 2, ROWS))
                _store_pre(gate, results, place, 0, FIRST, NUMBER)
                _store_pre(up, results, place, 1, FIRST, NUMBER + 1)
        else:
            y = activate(x, ACTIVATION)
            if results.pre is not None:
                _store_pre(x, results, place, 0, FIRST, NUMBER)
        _store(y, results, place, FIRST, NUMBER + STORED - 1)


@gluon.jit
def _finish_down_input(
    x,
    results,
    place,
    ring,
    slot,
    phase,
    FIRST: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Takes [COLUMNS, ROWS] fp32, the gradient of the activation, through the activation; see `down_input_gradients`.

    Reads the pre-activation of each SAVED_ROWS rows from the next slot, writes its gradient there, and stores from
    there. A slot is released behind the stores of the one after it.

    Returns:
        The next slot of the ring and its phase.
    """
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS > SAVED_ROWS:
        low, high = _halves_of_rows(x)
        # fmt: off
        slot, phase = _finish_down_input(
            low, results, place, ring, slot, phase, FIRST, TILE, ACTIVATION)
        # A slot has been filled only where the tile has rows for it.
        if FIRST + ROWS // 2 < place.num_rows:
            slot, phase = _finish_down_input(
                high, results, place, ring, slot, phase, FIRST + ROWS // 2, TILE, ACTIVATION)
        # fmt: on
        return slot, phase
    else:
        boxes = reinterpret(ring.weights, ring.rows.dtype, [2 * TILE.stages, SAVED_ROWS, COLUMNS], ring.rows.layout)
        gates = boxes.index(2 * slot)  # [SAVED_ROWS, COLUMNS]
        ups = boxes.index(2 * slot + TILE.halves - 1)
        act = results.staging.index(FIRST // SAVED_ROWS % 2)  # [SAVED_ROWS, COLUMNS]
        mbarrier.wait(ring.full.index(slot), phase)
        # By halves of the rows, since all at once would not fit in the registers.
        low, high = _halves_of_rows(x)
        _through_activation(low, results, place, gates, ups, act, FIRST, 0, ACTIVATION)
        _through_activation(high, results, place, gates, ups, act, FIRST, SAVED_ROWS // 2, ACTIVATION)
        if FIRST > 0:
            tma.store_wait(0)
        fence_async_shared()
        barrier()
        if FIRST > 0:
            mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
        anchor, row = place.row + place.num_rows, _GUARD - place.num_rows + FIRST
        if results.pre is not None:
            pre = results.pre
            box = reinterpret(gates, pre.dtype, pre.block_shape, pre.layout)
            store_box(pre, [0, anchor, row, place.column], box)
            if ACTIVATION.gated:
                box = reinterpret(ups, pre.dtype, pre.block_shape, pre.layout)
                store_box(pre, [1, anchor, row, place.column], box)
        if results.out is not None:
            out = results.out
            box = reinterpret(act, out.dtype, out.block_shape, out.layout)
            store_box(out, [anchor, row, place.column], box)
        return next_slot(slot, phase, TILE.stages)


@gluon.jit
def _through_activation(
    x,
    results,
    place,
    gates,
    ups,
    act,
    FIRST: gl.constexpr,
    AT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """`_finish_down_input` of [COLUMNS, ROWS], rows of a slot from its row AT on."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    factors = results.factors.index(0).slice(FIRST + AT, ROWS).load(gl.SliceLayout(0, LAYOUT))  # [ROWS]
    gates, ups, act = gates.slice(AT, ROWS, dim=0), ups.slice(AT, ROWS, dim=0), act.slice(AT, ROWS, dim=0)
    gate = gates.permute((1, 0)).load(LAYOUT).to(gl.float32)  # [COLUMNS, ROWS]
    if ACTIVATION.gated:
        by = slopes_of_halves(gate, ups.permute((1, 0)).load(LAYOUT).to(gl.float32), ACTIVATION, True)
    else:
        by = slopes(gate, ACTIVATION, True)
    if results.partials is not None:
        # By warp, whose columns are 16 of each 128. Columns past the end have weights of zero.
        partial = gl.sum(gl.reshape(x * by.value, (COLUMNS // (16 * NUM_WARPS), NUM_WARPS, 16, ROWS)), 0)
        partial = gl.sum(partial, 1)  # [NUM_WARPS, ROWS]
        OF_PARTS: gl.constexpr = gl.SliceLayout(1, partial.type.layout)
        OF_ROWS: gl.constexpr = gl.SliceLayout(0, partial.type.layout)
        part = NUM_WARPS * place.column_tile + gl.arange(0, NUM_WARPS, OF_PARTS)
        at = FIRST + AT + gl.arange(0, ROWS, OF_ROWS)
        pointers = results.partials + part.to(gl.int64)[:, None] * results.num_routes + (place.row + at)[None, :]
        gl.store(pointers, partial, mask=gl.broadcast((at < place.num_rows)[None, :], pointers)[0])
    if results.out is not None:
        act.store(gl.permute((by.value * factors[None, :]).to(act.dtype), (1, 0)))
    if results.pre is not None:
        x *= factors[None, :]
        gates.store(gl.permute((x * by.gate).to(gates.dtype), (1, 0)))
        if ACTIVATION.gated:
            ups.store(gl.permute((x * by.up).to(ups.dtype), (1, 0)))


@gluon.jit
def _consume_tile(
    results,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    PRODUCT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and finishes a tile of up to ROWS rows; returns the next slot of the ring and its phase."""
    column = (TILE.consumers * tile.column_tile + PART) * results.staging.shape[2]
    place = Place(tile.expert, tile.row, tile.num_rows, tile.column_tile, column)
    if results.topk_weights is not None:
        # Before the product, since it takes a load of the route and another.
        factors = _load_factors(results, place, ROWS, NUM_WARPS // TILE.consumers)
    product, slot, phase = _multiply(ring, slot, phase, num_steps, PART, ROWS, TILE)
    if results.topk_weights is not None:
        results.factors.index(0).slice(0, ROWS).store(factors)
        barrier()
    if PRODUCT == "gate_up":
        _finish_gate_up(product, results, place, 0, ACTIVATION)
    elif PRODUCT == "down_input":
        # fmt: off
        slot, phase = _finish_down_input(
            product, results, place, ring, slot, phase, 0, TILE, ACTIVATION)
        # fmt: on
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
    else:
        _finish_rows(product, results, place, 0)
    return slot, phase


@gluon.jit
def _take_tile(turns, turn, phase, WARPS: gl.constexpr):
    """As `take_tile` of `ring.py`, by that many warps."""
    mbarrier.wait(turns.announced.index(turn), phase)
    tile_number = gl.sum(turns.tiles.index(turn).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(turns.taken.index(turn))
    turn, phase = next_slot(turn, phase, TURNS)
    return tile_number, turn, phase


@gluon.jit
def consume(
    results,
    ring,
    turns,
    order,
    num_steps,
    PART: gl.constexpr,
    TILE: gl.constexpr,
    PRODUCT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and finishes a part of every tile of the program, with the shortest body that holds it.

    Args:
        results: `Results`.
        ring: a `Ring`.
        turns: `Turns`.
        order: a `TileOrder`.
        num_steps: steps of the reduction, an adapter's included.
        PART: the consumer's number, and that of its columns.
        TILE: `TrainingTile`.
        PRODUCT: `gate_up`, `down_input` or `rows`: the epilogue.
        ACTIVATION: `ActivationConstant`.
    """
    BLOCK_M: gl.constexpr = TILE.block_m
    WARPS: gl.constexpr = NUM_WARPS // TILE.consumers
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = _take_tile(turns, gl.to_tensor(0), gl.to_tensor(0), WARPS)
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, BLOCK_M, 0)
        # fmt: off
        if tile.num_rows > BLOCK_M // 2:
            slot, phase = _consume_tile(
                results, ring, slot, phase, num_steps, tile, PART, BLOCK_M, TILE, PRODUCT, ACTIVATION)
        elif tile.num_rows > BLOCK_M // 4:
            slot, phase = _consume_tile(
                results, ring, slot, phase, num_steps, tile, PART, BLOCK_M // 2, TILE, PRODUCT, ACTIVATION)
        else:
            slot, phase = _consume_tile(
                results, ring, slot, phase, num_steps, tile, PART, BLOCK_M // 4, TILE, PRODUCT, ACTIVATION)
        # fmt: on
        tile_number, turn, turn_phase = _take_tile(turns, turn, turn_phase, WARPS)
    tma.store_wait(0)
