"""The producers of Hopper's grouped products with 16-bit or packed weights, in Triton's Gluon: fill the ring."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    reinterpret,
)

# Rows of the pre-activation that a step behind the reduction brings.
SAVED_ROWS = gl.constexpr(32)


class Operands(NamedTuple):
    """The memory that a product reads, and the number of its steps."""

    rows: Any  # map of rows in order, boxes [BLOCK_M // 2, BLOCK_K], or pointer to the tokens [T, H] that are gathered
    slack_rows: Any  # map of the same rows, boxes [SLACK, BLOCK_K]; None without slack or where tokens are gathered
    # map of the weights, boxes [BLOCK_N // 16, 2, 8, BLOCK_K] of 8 gates and their 8 ups in turn, [1, BLOCK_N, BLOCK_K]
    # or [1, BLOCK_K, BLOCK_N / consumers]; for packed weights, of their words as lines of 32, one box per consumer
    weights: Any
    scales: Any  # map of the words of a packed weight's scales as lines of 8, one box per consumer; or None
    num_columns: Any  # rows of an expert's packed weight
    scale_words: Any  # words of scales per row
    num_steps: Any  # steps of the reduction
    low_rows: Any  # map of an adapter's low-rank rows, boxes as those of rows in order; None: no adapter
    low_weights: Any  # map of its matrices, boxes as those of weights; None: no adapter
    low_steps: Any  # steps of the reduction over the adapter's rank, behind the others
    # map of the pre-activation by half, rows and columns, boxes [1, SAVED_ROWS, BLOCK_N]; each SAVED_ROWS of a tile are
    # one more step, whose boxes lie where weights would. None: nothing is read
    saved: Any
    hidden_chunks: Any  # chunks of 8 elements, 16 bytes, of a token
    stride_chunks: Any  # chunks from one token to the next


@gluon.constexpr_function
def _words_of_block(box, columns):
    """Words of one block in a row of packed weights; 0 if weights are not packed."""
    return box[0] * 32 // columns if len(box) == 2 else 0


@gluon.constexpr_function
def _weight_bytes(tile, box, has_scales):
    """Bytes of a step's weights and scales."""
    words = _words_of_block(box, tile.block_n // tile.consumers)
    return tile.block_n * 4 * (words + has_scales) if words else tile.block_n * 128


@gluon.jit
def _load_weights(weights, operands, ring, slot, ready, tile, k, TILE: gl.constexpr):
    """Starts the copies of a step's `weights`; for packed ones, a box of words and one of scales per consumer."""
    first = tile.column_tile * TILE.block_n
    PARTS: gl.constexpr = TILE.consumers  # Triton 3.6 counts to a constant, not to the field of one.
    COLUMNS: gl.constexpr = TILE.block_n // PARTS
    if len(weights.block_shape) == 4:
        at = [first // 16, 2 * tile.expert, 0, k * BLOCK_K]
        load_box(weights, at, ready, ring.weights.index(slot))
    elif TILE.by_depth:
        for part in gl.static_range(PARTS):
            at = [tile.expert, k * BLOCK_K, first + part * COLUMNS]
            load_box(weights, at, ready, ring.weights.index(PARTS * slot + part))
    elif len(weights.block_shape) == 3:
        load_box(weights, [tile.expert, first, k * BLOCK_K], ready, ring.weights.index(slot))
    else:
        WORDS: gl.constexpr = _words_of_block(weights.block_shape, COLUMNS)
        row = (tile.expert * operands.num_steps + k) * operands.num_columns + first
        for part in gl.static_range(PARTS):
            place = PARTS * slot + part
            line = row // (32 // WORDS) + part * (COLUMNS * WORDS // 32)
            load_box(weights, [line, 0], ready, ring.weights.index(place))
            if operands.scales is not None:
                scale_row = (tile.expert * operands.scale_words + k // TILE.packed.span) * operands.num_columns + first
                at = [scale_row // 8 + part * (COLUMNS // 8), 0]
                load_box(operands.scales, at, ready, ring.scales.index(place))


@gluon.constexpr_function
def _most_of_halves(block_m: int, slack: int, bodies: int) -> tuple[int, int]:
    """Most rows of a tile that a half or quarter body holds, and that one of these or a half with slack holds."""
    half = block_m // 2 if bodies & 0b10 or not bodies else 0
    return half, block_m // 2 + slack if bodies & 0b100 else half


@gluon.jit
def _place_slack(num_rows, TILE: gl.constexpr):
    """Whether a tile's body reads the slack, and the tile's row at which it begins: after half or all of BLOCK_M."""
    MOST: gl.constexpr = _most_of_halves(TILE.block_m, TILE.slack, TILE.bodies)
    if TILE.bodies == 0:
        return num_rows > TILE.block_m, TILE.block_m
    else:
        has_slack = (num_rows > TILE.block_m) | ((num_rows > MOST[0]) & (num_rows <= MOST[1]))
        return has_slack, gl.where(num_rows > MOST[1], TILE.block_m, TILE.block_m // 2)


@gluon.jit
def _expect(ready, num_rows, WEIGHT_BYTES: gl.constexpr, TILE: gl.constexpr):
    """Sets the bytes that a slot's `full` expects: a step's weights, and the rows that the tile's body reads."""
    HALF: gl.constexpr = TILE.block_m // 2
    MOST: gl.constexpr = _most_of_halves(TILE.block_m, TILE.slack, TILE.bodies)
    ROW_BYTES: gl.constexpr = 2 * BLOCK_K
    if MOST[0] > 0:
        mbarrier.expect(ready, WEIGHT_BYTES + HALF * ROW_BYTES, pred=num_rows <= MOST[0])
    if MOST[1] > MOST[0]:
        low = (num_rows > MOST[0]) & (num_rows <= MOST[1])
        mbarrier.expect(ready, WEIGHT_BYTES + (HALF + TILE.slack) * ROW_BYTES, pred=low)
    high = num_rows > MOST[1]
    if TILE.slack > 0:
        high = high & (num_rows <= TILE.block_m)
    mbarrier.expect(ready, WEIGHT_BYTES + TILE.block_m * ROW_BYTES, pred=high)
    if TILE.slack > 0:
        more = num_rows > TILE.block_m
        mbarrier.expect(ready, WEIGHT_BYTES + (TILE.block_m + TILE.slack) * ROW_BYTES, pred=more)


@gluon.jit
def _load_rows(rows, ring, slot, ready, row, k, has_high, TILE: gl.constexpr):
    """Starts the copies of a step's rows that lie in order, without slack."""
    HALF: gl.constexpr = TILE.block_m // 2
    at = k * BLOCK_K
    load_box(rows, [row, at], ready, ring.rows.index(2 * slot))
    load_box(rows, [row + HALF, at], ready, ring.rows.index(2 * slot + 1), pred=has_high)


@gluon.jit
def produce(operands, ring, turns, order, TILE: gl.constexpr):
    """Fills the ring with boxes of the weights and of rows that lie in order. Run by one warp.

    Reads the weights and rows through tensor maps, `order` and the tile counter, which it increments. Announces each
    tile, then for each step waits until all consumers have emptied a slot, sets the bytes that its `full` expects, and
    starts the copies that the tile's body reads; see `BODIES` of `config.py`. A quarter is loaded as a half.
    """
    MOST: gl.constexpr = _most_of_halves(TILE.block_m, TILE.slack, TILE.bodies)
    WEIGHT_BYTES: gl.constexpr = _weight_bytes(TILE, operands.weights.block_shape, operands.scales is not None)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    tile_number = gl.program_id(0)
    while tile_number < num_tiles:
        turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 1)
        following = next_tile(order.plan.tile_counter)
        tile = locate(tile_number, order, TILE.block_m, TILE.slack)
        row, num_rows = tile.row, tile.num_rows
        if TILE.bodies != 0:
            has_high = num_rows > MOST[1]
            has_slack, slack_at = _place_slack(num_rows, TILE)
        for k in range(operands.num_steps):
            ready = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            _expect(ready, num_rows, WEIGHT_BYTES, TILE)
            if TILE.bodies == 0:
                # The same as before the loop; placed here to keep the instruction order that was measured.
                has_high = num_rows > MOST[1]
                has_slack, slack_at = _place_slack(num_rows, TILE)
            _load_weights(operands.weights, operands, ring, slot, ready, tile, k, TILE)
            _load_rows(operands.rows, ring, slot, ready, row, k, has_high, TILE)
            if TILE.slack > 0:
                at = [row + slack_at, k * BLOCK_K]
                load_box(operands.slack_rows, at, ready, ring.slack_rows.index(slot), pred=has_slack)
            slot, phase = next_slot(slot, phase, TILE.stages)
        tile_number = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)


@gluon.jit
def _load_routes(sorted_routes, tile, first, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Routes of a tile's rows from row `first` on, [ROWS]; rows past the end repeat the last one."""
    at = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))  # [ROWS]
    return gl.load(sorted_routes + tile.row + gl.maximum(gl.minimum(at, tile.num_rows - 1), 0))


@gluon.jit
def _load_parts(sorted_routes, tile, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Routes of a tile's halves and slack: [HALF] twice and [SLACK]; the third is meaningless without slack."""
    HALF: gl.constexpr = TILE.block_m // 2
    low = _load_routes(sorted_routes, tile, 0, HALF, LAYOUT)
    high = _load_routes(sorted_routes, tile, HALF, HALF, LAYOUT)
    if TILE.slack > 0:
        _, first = _place_slack(tile.num_rows, TILE)
        return low, high, _load_routes(sorted_routes, tile, first, TILE.slack, LAYOUT)
    else:
        return low, high, low


@gluon.jit
def _token_offsets(routes, stride_chunks, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets, in elements, of one step of the routes' tokens: [ROWS, BLOCK_K]."""
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    # A stride in chunks of 8 elements tells the compiler that addresses are aligned to 16 bytes.
    return (routes // TOP_K)[:, None] * (stride_chunks * 8) + columns[None, :]  # [ROWS, BLOCK_K]


@gluon.jit
def _copy_tokens(shared, pointers, k, hidden_chunks, MASK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts the copies of step k of tokens to shared memory, zeros beyond the hidden size where MASK_K."""
    if MASK_K:
        # Weights beyond H arrive as zeros, but memory past a token may hold NaN.
        columns = k * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
        mask = gl.expand_dims(columns < hidden_chunks * 8, 0)  # [1, BLOCK_K]
        load_chunks(shared, pointers, mask=gl.broadcast(mask, pointers)[0])
    else:
        load_chunks(shared, pointers)


@gluon.jit
def _load_saved(saved, ring, slot, ready, tile, first, TILE: gl.constexpr):
    """Starts the copies of SAVED_ROWS rows, of gates, then of ups, for one consumer."""
    HALVES: gl.constexpr = TILE.halves
    boxes = reinterpret(ring.weights, saved.dtype, [2 * TILE.stages] + saved.block_shape, saved.layout)
    mbarrier.expect(ready, HALVES * 2 * SAVED_ROWS * TILE.block_n)
    for half in gl.static_range(HALVES):
        at = [half, tile.row + first, tile.column_tile * TILE.block_n]
        load_box(saved, at, ready, boxes.index(2 * slot + half))


@gluon.jit
def produce_ahead(operands, ring, turns, order, TILE: gl.constexpr):
    """As `produce`, but by four warps, which prefetch the next tile; gathers tokens by route, 16 bytes at a time.

    A route's row is its token's row. Where tokens are gathered, a slot's `full` waits for the bytes of the boxes and
    for the copies of each of the 128 threads. Behind the steps of the reduction come those of an adapter and then the
    saved rows, if there are any.
    """
    TOP_K: gl.constexpr = TILE.top_k
    MASK_K: gl.constexpr = TILE.mask_k
    MOST: gl.constexpr = _most_of_halves(TILE.block_m, TILE.slack, TILE.bodies)
    WEIGHT_BYTES: gl.constexpr = _weight_bytes(TILE, operands.weights.block_shape, operands.scales is not None)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sorted_routes = order.plan.sorted_routes
    hidden_chunks, stride_chunks = operands.hidden_chunks, operands.stride_chunks
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    tile_number = gl.program_id(0)
    # A program without a first tile has none to locate.
    if tile_number < num_tiles:
        following = next_tile(order.plan.tile_counter)
        tile = locate(tile_number, order, TILE.block_m, TILE.slack)
        if TOP_K is not None:
            low, high, slack = _load_parts(sorted_routes, tile, TILE, LAYOUT)
        while tile_number < num_tiles:
            turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 4)
            if TOP_K is not None:
                low_offsets = _token_offsets(low, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
                high_offsets = _token_offsets(high, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
                if TILE.slack > 0:
                    slack_offsets = _token_offsets(slack, stride_chunks, TOP_K, LAYOUT)  # [SLACK, BLOCK_K]
            # Prefetch the next tile, its routes and the number of the tile after it.
            tile_number = following
            following = next_tile(order.plan.tile_counter)
            next_one = locate(gl.minimum(tile_number, num_tiles - 1), order, TILE.block_m, TILE.slack)
            has_high = tile.num_rows > MOST[1]
            if TOP_K is not None:
                low, high, slack = _load_parts(sorted_routes, next_one, TILE, LAYOUT)
                if TILE.bodies != 0:
                    has_slack, _ = _place_slack(tile.num_rows, TILE)
                tokens = operands.rows
            for k in range(operands.num_steps):
                ready = ring.full.index(slot)
                mbarrier.wait(ring.empty.index(slot), phase)
                if TOP_K is not None:
                    mbarrier.expect(ready, WEIGHT_BYTES)
                    _load_weights(operands.weights, operands, ring, slot, ready, tile, k, TILE)
                    _copy_tokens(ring.rows.index(2 * slot), tokens + low_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                    if has_high:
                        high_half = ring.rows.index(2 * slot + 1)
                        _copy_tokens(high_half, tokens + high_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                    if TILE.slack > 0:
                        if TILE.bodies == 0:
                            has_slack, _ = _place_slack(tile.num_rows, TILE)
                        if has_slack:
                            slack_rows = ring.slack_rows.index(slot)
                            _copy_tokens(slack_rows, tokens + slack_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                    tokens += BLOCK_K
                else:
                    _expect(ready, tile.num_rows, WEIGHT_BYTES, TILE)
                    _load_weights(operands.weights, operands, ring, slot, ready, tile, k, TILE)
                    _load_rows(operands.rows, ring, slot, ready, tile.row, k, has_high, TILE)
                slot, phase = next_slot(slot, phase, TILE.stages)
            if operands.low_rows is not None:
                for k in range(operands.low_steps):
                    ready = ring.full.index(slot)
                    mbarrier.wait(ring.empty.index(slot), phase)
                    _expect(ready, tile.num_rows, WEIGHT_BYTES, TILE)
                    _load_weights(operands.low_weights, operands, ring, slot, ready, tile, k, TILE)
                    _load_rows(operands.low_rows, ring, slot, ready, tile.row, k, has_high, TILE)
                    if TOP_K is not None:
                        async_copy.mbarrier_arrive(ready, increment_count=False)
                    slot, phase = next_slot(slot, phase, TILE.stages)
            if operands.saved is not None:
                for first in range(0, tile.num_rows, SAVED_ROWS):
                    ready = ring.full.index(slot)
                    mbarrier.wait(ring.empty.index(slot), phase)
                    _load_saved(operands.saved, ring, slot, ready, tile, first, TILE)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                    slot, phase = next_slot(slot, phase, TILE.stages)
            tile = next_one
    announce_tile(NO_TILE, turns, turn, turn_phase, 4)
