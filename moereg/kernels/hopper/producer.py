"""The producers of a Hopper grouped GEMM with 16-bit weights, in Triton's Gluon: fill the ring of `gluon_ring`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.ring import BLOCK_K, load_box, load_chunks, locate, next_slot
from moereg.kernels.hopper.turns import NO_TILE, announce_tile, next_tile


@gluon.jit
def _load_weights(weights, shared, ready, expert, tile_n, k, num_columns, BLOCK_N: gl.constexpr):
    if len(weights.block_shape) == 4:
        load_box(weights, [(expert * num_columns + tile_n * BLOCK_N) // 16, 0, 0, k * BLOCK_K], ready, shared)
    else:
        load_box(weights, [expert, tile_n * BLOCK_N, k * BLOCK_K], ready, shared)


@gluon.jit
def produce(
    weights,
    half_rows,
    tail_rows,
    ring,
    turns,
    counter,
    plan,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    BLOCK_N: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the weights and of rows in sorted order; one warp."""
    weights_shared, rows_shared, tail_shared, full, empty = ring
    HALF: gl.constexpr = MAIN // 2
    ROW_BYTES: gl.constexpr = 2 * BLOCK_K
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = plan[3] * num_tiles_n
    tile = gl.program_id(0)
    while tile < num_tiles:
        turn, turn_phase = announce_tile(tile, turns, turn, turn_phase, 1)
        following = next_tile(counter)
        expert, tile_n, row, rows = locate(tile, plan, num_tiles_n, group, MAIN, TAIL)
        for k in range(num_k):
            ready = full.index(slot)
            at = k * BLOCK_K
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (BLOCK_N + HALF) * ROW_BYTES, pred=rows <= HALF)
            mbarrier.expect(ready, (BLOCK_N + MAIN) * ROW_BYTES, pred=(rows > HALF) & (rows <= MAIN))
            mbarrier.expect(ready, (BLOCK_N + MAIN + TAIL) * ROW_BYTES, pred=rows > MAIN)
            _load_weights(weights, weights_shared.index(slot), ready, expert, tile_n, k, num_columns, BLOCK_N)
            load_box(half_rows, [row, at], ready, rows_shared.index(2 * slot))
            load_box(half_rows, [row + HALF, at], ready, rows_shared.index(2 * slot + 1), pred=rows > HALF)
            load_box(tail_rows, [row + MAIN, at], ready, tail_shared.index(slot), pred=rows > MAIN)
            slot, phase = next_slot(slot, phase, STAGES)
        tile = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)


@gluon.jit
def _load_routes(sorted_routes, row, rows, FIRST: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    # Rows past the end repeat the last one.
    at = FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(sorted_routes + row + gl.maximum(gl.minimum(at, rows - 1), 0))


@gluon.jit
def _token_offsets(routes, stride_chunks, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    # A stride in chunks of 8 elements shows the compiler that every 16 bytes are aligned.
    return (routes // TOP_K)[:, None] * (stride_chunks * 8) + columns[None, :]


@gluon.jit
def _copy_tokens(shared, pointers, k, hidden_chunks, MASK_K: gl.constexpr, LAYOUT: gl.constexpr):
    if MASK_K:
        # The weights beyond are zeros, but what lies behind a row of the activations may be NaN.
        columns = k * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
        mask = gl.expand_dims(columns < hidden_chunks * 8, 0)
        load_chunks(shared, pointers, mask=gl.broadcast(mask, pointers)[0])
    else:
        load_chunks(shared, pointers)


@gluon.jit
def produce_by_token(
    weights,
    hidden_states,
    sorted_routes,
    ring,
    turns,
    counter,
    plan,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    hidden_chunks,
    stride_chunks,
    TOP_K: gl.constexpr,
    MASK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the weights and, 16 bytes at a time, with the tokens of the routes; four warps."""
    weights_shared, rows_shared, tail_shared, full, empty = ring
    HALF: gl.constexpr = MAIN // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = plan[3] * num_tiles_n
    tile = gl.program_id(0)
    # Who has no first tile has none to locate.
    if tile < num_tiles:
        following = next_tile(counter)
        expert, tile_n, row, rows = locate(tile, plan, num_tiles_n, group, MAIN, TAIL)
        low = _load_routes(sorted_routes, row, rows, 0, HALF, LAYOUT)
        high = _load_routes(sorted_routes, row, rows, HALF, HALF, LAYOUT)
        tail = _load_routes(sorted_routes, row, rows, MAIN, TAIL, LAYOUT)
        while tile < num_tiles:
            turn, turn_phase = announce_tile(tile, turns, turn, turn_phase, 4)
            low_offsets = _token_offsets(low, stride_chunks, TOP_K, LAYOUT)
            high_offsets = _token_offsets(high, stride_chunks, TOP_K, LAYOUT)
            tail_offsets = _token_offsets(tail, stride_chunks, TOP_K, LAYOUT)
            # The next tile's routes are on their way during this one, and the number of the one after.
            tile = following
            following = next_tile(counter)
            # fmt: off
            next_expert, next_n, row, next_rows = locate(
                gl.minimum(tile, num_tiles - 1), plan, num_tiles_n, group, MAIN, TAIL)
            # fmt: on
            low = _load_routes(sorted_routes, row, next_rows, 0, HALF, LAYOUT)
            high = _load_routes(sorted_routes, row, next_rows, HALF, HALF, LAYOUT)
            tail = _load_routes(sorted_routes, row, next_rows, MAIN, TAIL, LAYOUT)
            tokens = hidden_states
            for k in range(num_k):
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(ready, 2 * BLOCK_N * BLOCK_K)
                _load_weights(weights, weights_shared.index(slot), ready, expert, tile_n, k, num_columns, BLOCK_N)
                _copy_tokens(rows_shared.index(2 * slot), tokens + low_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                if rows > HALF:
                    _copy_tokens(
                        rows_shared.index(2 * slot + 1), tokens + high_offsets, k, hidden_chunks, MASK_K, LAYOUT
                    )
                if rows > MAIN:
                    _copy_tokens(tail_shared.index(slot), tokens + tail_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                tokens += BLOCK_K
                slot, phase = next_slot(slot, phase, STAGES)
            expert, tile_n, rows = next_expert, next_n, next_rows
    announce_tile(NO_TILE, turns, turn, turn_phase, 4)
