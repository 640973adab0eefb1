"""The consumers of the products of a layer that is trained on Hopper, in Triton's Gluon: multiply, finish, store.

The product is transposed, columns x rows, because columns of a weight are wgmma's M side. Both warpgroups multiply,
each as a consumer with half the columns. Or both are one consumer: that takes 4 to 5 % longer for the others, but an
epilogue that is long and runs once a tile waits for its instructions, 70 % of its time through an activation's
derivative. With one copy of them that product took 856 us, not 1,174 (qwen3-30b-a3b, 16,384 tokens, an H200, by hand).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moereg.kernels.backward.activation import slopes, slopes_of_halves
from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.hopper.consumer import add_bias, barrier, load_weights, place_of, stage, store_box
from moereg.kernels.hopper.producer import SAVED_ROWS
from moereg.kernels.hopper.ring import consumer_warps, multiply, next_slot, previous_slot, reinterpret

# Warps of all consumers.
NUM_WARPS = gl.constexpr(8)

# Staged stores of one of two consumers.
STORES = gl.constexpr(3)


@gluon.jit
def _halves_of_rows(x):
    """The first and the last rows of [COLUMNS, ROWS]."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))


@gluon.jit
def _store(y, output, place, PART: gl.constexpr, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """Stores [COLUMNS, ROWS] of `out`, from row FIRST of the tile on; the map drops rows past the expert's end."""
    out = output.out
    buffer = stage(gl.permute(y.to(out.dtype), (1, 0)), output, PART, NUMBER, STORES)
    box = reinterpret(buffer, out.dtype, out.block_shape, out.layout)
    store_box(out, [place.anchor, place.row + FIRST, place.out_column], box)


@gluon.jit
def _store_pre(y, output, place, HALF: gl.constexpr, PART: gl.constexpr, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """Likewise a half of `pre`."""
    pre = output.pre
    buffer = stage(gl.permute(y.to(pre.dtype), (1, 0)), output, PART, NUMBER, STORES)
    box = reinterpret(buffer, pre.dtype, pre.block_shape, pre.layout)
    store_box(pre, [HALF, place.anchor, place.row + FIRST, place.out_column], box)


@gluon.jit
def _finish_rows(x, output, place, PART: gl.constexpr, FIRST: gl.constexpr):
    """Adds the bias, weights and stores [COLUMNS, ROWS] fp32."""
    CHUNK: gl.constexpr = output.staging.shape[1]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS > CHUNK:
        low, high = _halves_of_rows(x)
        _finish_rows(low, output, place, PART, FIRST)
        _finish_rows(high, output, place, PART, FIRST + ROWS // 2)
    else:
        x = add_bias(x, output, place, False)
        if output.row_weights.topk_weights is not None:
            factors = output.factors.index(PART).slice(FIRST, ROWS).load(gl.SliceLayout(0, x.type.layout))
            x *= factors[None, :]
        _store(x, output, place, PART, FIRST, FIRST // CHUNK)


@gluon.jit
def _finish_gate_up(x, output, place, PART: gl.constexpr, FIRST: gl.constexpr, ACTIVATION: gl.constexpr):
    """Adds the bias, stores the pre-activation and the activation of [COLUMNS, ROWS] fp32.

    Where gated, every 16 columns are 8 gates, then their 8 ups, so that one thread holds both of a pair.
    """
    CHUNK: gl.constexpr = output.staging.shape[1]
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS > CHUNK:
        low, high = _halves_of_rows(x)
        _finish_gate_up(low, output, place, PART, FIRST, ACTIVATION)
        _finish_gate_up(high, output, place, PART, FIRST + ROWS // 2, ACTIVATION)
    else:
        STORED: gl.constexpr = (3 if ACTIVATION.gated else 2) if output.pre is not None else 1
        NUMBER: gl.constexpr = STORED * (FIRST // CHUNK)
        x = add_bias(x, output, place, ACTIVATION.gated)
        if ACTIVATION.gated:
            gate, up = gl.split(gl.permute(gl.reshape(x, (COLUMNS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
            y = gl.reshape(activate_halves(gate, up, ACTIVATION), (COLUMNS // 2, ROWS))
            if output.pre is not None:
                gate, up = gl.reshape(gate, (COLUMNS // 2, ROWS)), gl.reshape(up, (COLUMNS // 2, ROWS))
                _store_pre(gate, output, place, 0, PART, FIRST, NUMBER)
                _store_pre(up, output, place, 1, PART, FIRST, NUMBER + 1)
        else:
            y = activate(x, ACTIVATION)
            if output.pre is not None:
                _store_pre(x, output, place, 0, PART, FIRST, NUMBER)
        _store(y, output, place, PART, FIRST, NUMBER + STORED - 1)


@gluon.jit
def _finish_down_input(
    x,
    output,
    place,
    tile,
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
            low, output, place, tile, ring, slot, phase, FIRST, TILE, ACTIVATION)
        # A slot has been filled only where the tile has rows for it.
        if FIRST + ROWS // 2 < tile.num_rows:
            slot, phase = _finish_down_input(
                high, output, place, tile, ring, slot, phase, FIRST + ROWS // 2, TILE, ACTIVATION)
        # fmt: on
        return slot, phase
    else:
        boxes = reinterpret(ring.weights, ring.rows.dtype, [2 * TILE.stages, SAVED_ROWS, COLUMNS], ring.rows.layout)
        gates = boxes.index(2 * slot)  # [SAVED_ROWS, COLUMNS]
        ups = boxes.index(2 * slot + TILE.halves - 1)
        act = output.staging.index(FIRST // SAVED_ROWS % 2)  # [SAVED_ROWS, COLUMNS]
        mbarrier.wait(ring.full.index(slot), phase)
        # By halves of the rows, since all at once would not fit in the registers.
        low, high = _halves_of_rows(x)
        _through_activation(low, output, tile, gates, ups, act, FIRST, 0, ACTIVATION)
        _through_activation(high, output, tile, gates, ups, act, FIRST, SAVED_ROWS // 2, ACTIVATION)
        if FIRST > 0:
            tma.store_wait(0)
        fence_async_shared()
        barrier()
        if FIRST > 0:
            mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
        if output.pre is not None:
            pre = output.pre
            box = reinterpret(gates, pre.dtype, pre.block_shape, pre.layout)
            store_box(pre, [0, place.anchor, place.row + FIRST, place.out_column], box)
            if ACTIVATION.gated:
                box = reinterpret(ups, pre.dtype, pre.block_shape, pre.layout)
                store_box(pre, [1, place.anchor, place.row + FIRST, place.out_column], box)
        if output.out is not None:
            out = output.out
            box = reinterpret(act, out.dtype, out.block_shape, out.layout)
            store_box(out, [place.anchor, place.row + FIRST, place.out_column], box)
        return next_slot(slot, phase, TILE.stages)


@gluon.jit
def _through_activation(
    x,
    output,
    tile,
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
    factors = output.factors.index(0).slice(FIRST + AT, ROWS).load(gl.SliceLayout(0, LAYOUT))  # [ROWS]
    gates, ups, act = gates.slice(AT, ROWS, dim=0), ups.slice(AT, ROWS, dim=0), act.slice(AT, ROWS, dim=0)
    gate = gates.permute((1, 0)).load(LAYOUT).to(gl.float32)  # [COLUMNS, ROWS]
    if ACTIVATION.gated:
        by = slopes_of_halves(gate, ups.permute((1, 0)).load(LAYOUT).to(gl.float32), ACTIVATION, True)
    else:
        by = slopes(gate, ACTIVATION, True)
    if output.partials is not None:
        # By warp, whose columns are 16 of each 128. Columns past the end have weights of zero.
        partial = gl.sum(gl.reshape(x * by.value, (COLUMNS // (16 * NUM_WARPS), NUM_WARPS, 16, ROWS)), 0)
        partial = gl.sum(partial, 1)  # [NUM_WARPS, ROWS]
        OF_PARTS: gl.constexpr = gl.SliceLayout(1, partial.type.layout)
        OF_ROWS: gl.constexpr = gl.SliceLayout(0, partial.type.layout)
        part = NUM_WARPS * tile.column_tile + gl.arange(0, NUM_WARPS, OF_PARTS)
        at = FIRST + AT + gl.arange(0, ROWS, OF_ROWS)
        pointers = output.partials + part.to(gl.int64)[:, None] * output.num_routes + (tile.row + at)[None, :]
        gl.store(pointers, partial, mask=gl.broadcast((at < tile.num_rows)[None, :], pointers)[0])
    if output.out is not None:
        act.store(gl.permute((by.value * factors[None, :]).to(act.dtype), (1, 0)))
    if output.pre is not None:
        x *= factors[None, :]
        gates.store(gl.permute((x * by.gate).to(gates.dtype), (1, 0)))
        if ACTIVATION.gated:
            ups.store(gl.permute((x * by.up).to(ups.dtype), (1, 0)))


@gluon.jit
def consume_trained_tile(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and finishes a tile of up to ROWS rows; returns the next slot of the ring and its phase."""
    if output.row_weights.topk_weights is not None:
        # Before the product, since it takes a load of the route and another. Rows past the last repeat its weight.
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [consumer_warps(TILE.consumers)], [0])
        rows = tile.row + gl.minimum(gl.arange(0, ROWS, LINE), tile.num_rows - 1)
        factors = load_weights(output.row_weights, rows)  # [ROWS]
    product, _, slot, phase = multiply(ring, slot, phase, num_steps, PART, ROWS, 0, TILE)
    if output.row_weights.topk_weights is not None:
        output.factors.index(PART).slice(0, ROWS).store(factors)
        barrier()
    place = place_of(output, tile, PART, TILE)
    if TILE.trained == "gate_up":
        _finish_gate_up(product, output, place, PART, 0, ACTIVATION)
    elif TILE.trained == "down_input":
        # fmt: off
        slot, phase = _finish_down_input(
            product, output, place, tile, ring, slot, phase, 0, TILE, ACTIVATION)
        # fmt: on
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
    else:
        _finish_rows(product, output, place, PART, 0)
    return slot, phase
