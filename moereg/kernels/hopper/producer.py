"""The producers of a Hopper grouped GEMM with 16-bit weights, in Triton's Gluon: fill the ring of `ring.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.ring import (
    BLOCK_K,
    NO_TILE,
    announce_tile,
    load_box,
    load_chunks,
    locate,
    next_slot,
    next_tile,
)


@gluon.jit
def _load_weights(weights, shared, ready, expert, column_tile, k, num_columns, BLOCK_N: gl.constexpr):
    if len(weights.block_shape) == 4:
        load_box(weights, [(expert * num_columns + column_tile * BLOCK_N) // 16, 0, 0, k * BLOCK_K], ready, shared)
    else:
        load_box(weights, [expert, column_tile * BLOCK_N, k * BLOCK_K], ready, shared)


@gluon.constexpr_function
def _most_of_halves(block_m: int, slack: int, bodies: int) -> tuple[int, int]:
    """The most rows of a tile that is multiplied as a half or a quarter, and as these or a half and the slack."""
    half = block_m // 2 if bodies & 0b10 else 0
    return half, block_m // 2 + slack if bodies & 0b100 else half


@gluon.jit
def _place_slack(num_rows, BLOCK_M: gl.constexpr, SLACK: gl.constexpr, BODIES: gl.constexpr):
    """Whether a tile's body reads the slack, and the row of the tile that it begins with: behind a half or all."""
    MOST: gl.constexpr = _most_of_halves(BLOCK_M, SLACK, BODIES)
    has_slack = (num_rows > BLOCK_M) | ((num_rows > MOST[0]) & (num_rows <= MOST[1]))
    return has_slack, gl.where(num_rows > MOST[1], BLOCK_M, BLOCK_M // 2)


@gluon.jit
def produce(
    weights,
    half_rows,
    slack_rows,
    ring,
    turns,
    tile_counter,
    order,
    num_steps,
    num_columns,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    BODIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the weights and of rows that lie in order. Run by one warp.

    Reads the weights and rows by tensor maps, `order` and the tile counter, which it counts up. Announces each tile,
    then for each step waits until both consumers have emptied a slot, says how many bytes its `full` has to wait for,
    and starts the copies: of what the tile's body reads, see `BODIES` of `config.py`. A quarter comes as a half.

    Args:
        weights: map of a weight, boxes [BLOCK_N // 16, 2, 8, BLOCK_K] where gate and up are interleaved, or
            [1, BLOCK_N, BLOCK_K].
        half_rows: map of the rows, boxes [BLOCK_M // 2, BLOCK_K].
        slack_rows: map of the rows, boxes [SLACK, BLOCK_K].
        ring: a `Ring`.
        turns: `Turns`.
        tile_counter: pointer to the number of tiles that programs have taken beyond their first ones.
        order: a `TileOrder`.
        num_steps: steps along the reduced dimension.
        num_columns: rows of an expert's weight.
        BLOCK_N: columns of a tile.
        BLOCK_M: rows of a tile.
        SLACK: rows by which a tile may be longer.
        BODIES: which bodies tiles have: a bit each.
        STAGES: slots of the ring.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    MOST: gl.constexpr = _most_of_halves(BLOCK_M, SLACK, BODIES)
    ROW_BYTES: gl.constexpr = 2 * BLOCK_K
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    tile_number = gl.program_id(0)
    while tile_number < num_tiles:
        turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 1)
        following = next_tile(tile_counter)
        tile = locate(tile_number, order, BLOCK_M, SLACK)
        row, num_rows = tile.row, tile.num_rows
        has_high = num_rows > MOST[1]
        has_slack, slack_at = _place_slack(num_rows, BLOCK_M, SLACK, BODIES)
        for k in range(num_steps):
            ready = ring.full.index(slot)
            at = k * BLOCK_K
            mbarrier.wait(ring.empty.index(slot), phase)
            if MOST[0] > 0:
                mbarrier.expect(ready, (BLOCK_N + HALF) * ROW_BYTES, pred=num_rows <= MOST[0])
            if MOST[1] > MOST[0]:
                low = (num_rows > MOST[0]) & (num_rows <= MOST[1])
                mbarrier.expect(ready, (BLOCK_N + HALF + SLACK) * ROW_BYTES, pred=low)
            high = (num_rows > MOST[1]) & (num_rows <= BLOCK_M)
            mbarrier.expect(ready, (BLOCK_N + BLOCK_M) * ROW_BYTES, pred=high)
            mbarrier.expect(ready, (BLOCK_N + BLOCK_M + SLACK) * ROW_BYTES, pred=num_rows > BLOCK_M)
            _load_weights(
                weights, ring.weights.index(slot), ready, tile.expert, tile.column_tile, k, num_columns, BLOCK_N
            )
            load_box(half_rows, [row, at], ready, ring.rows.index(2 * slot))
            load_box(half_rows, [row + HALF, at], ready, ring.rows.index(2 * slot + 1), pred=has_high)
            load_box(slack_rows, [row + slack_at, at], ready, ring.slack_rows.index(slot), pred=has_slack)
            slot, phase = next_slot(slot, phase, STAGES)
        tile_number = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)


@gluon.jit
def load_routes(sorted_routes, row, num_rows, first, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Routes of a tile's rows from row `first` on, [ROWS]; rows past the end repeat the last one."""
    at = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))  # [ROWS]
    return gl.load(sorted_routes + row + gl.maximum(gl.minimum(at, num_rows - 1), 0))


@gluon.jit
def _load_slack_routes(
    sorted_routes, tile, BLOCK_M: gl.constexpr, SLACK: gl.constexpr, BODIES: gl.constexpr, LAYOUT: gl.constexpr
):
    _, first = _place_slack(tile.num_rows, BLOCK_M, SLACK, BODIES)
    return load_routes(sorted_routes, tile.row, tile.num_rows, first, SLACK, LAYOUT)


@gluon.jit
def token_offsets(routes, stride_chunks, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of a step of the routes' tokens, in elements: [ROWS, BLOCK_K]."""
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    # A stride in chunks of 8 elements shows the compiler that every 16 bytes are aligned.
    return (routes // TOP_K)[:, None] * (stride_chunks * 8) + columns[None, :]  # [ROWS, BLOCK_K]


@gluon.jit
def copy_tokens(shared, pointers, k, hidden_chunks, MASK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts the copies of step k of tokens to shared memory, zeros beyond the hidden size where MASK_K."""
    if MASK_K:
        # The weights beyond H are zeros, but NaN may lie behind a token.
        columns = k * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
        mask = gl.expand_dims(columns < hidden_chunks * 8, 0)  # [1, BLOCK_K]
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
    tile_counter,
    order,
    num_steps,
    num_columns,
    hidden_chunks,
    stride_chunks,
    TOP_K: gl.constexpr,
    MASK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    BODIES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the weights and, 16 bytes at a time, with the tokens of the routes.

    Run by four warps. Announces and waits as `produce` does, and reads the same but for the rows: a route's row is its
    token's in `hidden_states`. A slot's `full` waits for the bytes of the weights and for the copies of each of the 128
    threads.

    Args:
        weights: as for `produce`, like all that is not listed.
        hidden_states: pointer to the tokens [T, H].
        sorted_routes: pointer to the routes in sorted order.
        hidden_chunks: H / 8: chunks of 16 bytes of a token.
        stride_chunks: chunks from one token to the next.
        TOP_K: routes of a token.
        MASK_K: whether the last step reaches past H.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    MOST: gl.constexpr = _most_of_halves(BLOCK_M, SLACK, BODIES)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    tile_number = gl.program_id(0)
    # A program without a first tile has none to locate.
    if tile_number < num_tiles:
        following = next_tile(tile_counter)
        tile = locate(tile_number, order, BLOCK_M, SLACK)
        low = load_routes(sorted_routes, tile.row, tile.num_rows, 0, HALF, LAYOUT)  # [HALF]
        high = load_routes(sorted_routes, tile.row, tile.num_rows, HALF, HALF, LAYOUT)  # [HALF]
        slack = _load_slack_routes(sorted_routes, tile, BLOCK_M, SLACK, BODIES, LAYOUT)  # [SLACK]
        while tile_number < num_tiles:
            turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 4)
            low_offsets = token_offsets(low, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
            high_offsets = token_offsets(high, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
            slack_offsets = token_offsets(slack, stride_chunks, TOP_K, LAYOUT)  # [SLACK, BLOCK_K]
            # The next tile's routes and the number of the tile after it arrive during this tile.
            tile_number = following
            following = next_tile(tile_counter)
            next_one = locate(gl.minimum(tile_number, num_tiles - 1), order, BLOCK_M, SLACK)
            low = load_routes(sorted_routes, next_one.row, next_one.num_rows, 0, HALF, LAYOUT)
            high = load_routes(sorted_routes, next_one.row, next_one.num_rows, HALF, HALF, LAYOUT)
            slack = _load_slack_routes(sorted_routes, next_one, BLOCK_M, SLACK, BODIES, LAYOUT)
            expert, column_tile, num_rows = tile.expert, tile.column_tile, tile.num_rows
            has_slack, _ = _place_slack(num_rows, BLOCK_M, SLACK, BODIES)
            has_high = num_rows > MOST[1]
            tokens = hidden_states
            for k in range(num_steps):
                ready = ring.full.index(slot)
                mbarrier.wait(ring.empty.index(slot), phase)
                mbarrier.expect(ready, 2 * BLOCK_N * BLOCK_K)
                _load_weights(weights, ring.weights.index(slot), ready, expert, column_tile, k, num_columns, BLOCK_N)
                copy_tokens(ring.rows.index(2 * slot), tokens + low_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                if has_high:
                    high_half = ring.rows.index(2 * slot + 1)
                    copy_tokens(high_half, tokens + high_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                if has_slack:
                    slack_rows = ring.slack_rows.index(slot)
                    copy_tokens(slack_rows, tokens + slack_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                tokens += BLOCK_K
                slot, phase = next_slot(slot, phase, STAGES)
            tile = next_one
    announce_tile(NO_TILE, turns, turn, turn_phase, 4)
