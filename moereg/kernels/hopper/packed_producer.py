"""The producers of a Hopper grouped GEMM with packed weights, in Triton's Gluon: fill a `PackedRing`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.producer import copy_tokens, load_routes, token_offsets
from moereg.kernels.hopper.ring import BLOCK_K, NO_TILE, announce_tile, load_box, locate, next_slot, next_tile


@gluon.jit
def _load_packed(
    weights,
    scales,
    ring,
    slot,
    ready,
    tile,
    k,
    num_steps,
    num_columns,
    scale_words,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    WORDS: gl.constexpr,
    SPAN: gl.constexpr,
):
    """Starts the copies of a step's words and scales, a box of each for every consumer."""
    first = tile.column_tile * (COLUMNS * CONSUMERS)
    row = (tile.expert * num_steps + k) * num_columns + first
    for part in gl.static_range(CONSUMERS):
        place = CONSUMERS * slot + part
        line = row // (32 // WORDS) + part * (COLUMNS * WORDS // 32)
        load_box(weights, [line, 0], ready, ring.weights.index(place))
        if scales is not None:
            scale_row = (tile.expert * scale_words + k // SPAN) * num_columns + first
            load_box(scales, [scale_row // 8 + part * (COLUMNS // 8), 0], ready, ring.scales.index(place))


@gluon.jit
def produce_packed(
    weights,
    scales,
    half_rows,
    slack_rows,
    ring,
    turns,
    tile_counter,
    order,
    num_steps,
    num_columns,
    scale_words,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    WORDS: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the words, the scales and rows that lie in order. Run by one warp.

    Args:
        weights: map of the words as lines of 32, boxes [COLUMNS * WORDS // 32, 32].
        scales: map of the words of scales as lines of 8, boxes [COLUMNS // 8, 8]; or None.
        half_rows: as for `produce` in `producer.py`, like all that is not listed.
        slack_rows: likewise; None without slack.
        ring: a `PackedRing`.
        scale_words: words of scales of a row.
        COLUMNS: of a consumer.
        CONSUMERS: warpgroups that multiply.
        WORDS: of a block of a row.
        SPAN: steps that a word of scales serves.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    ROW_BYTES: gl.constexpr = 2 * BLOCK_K
    WEIGHT_BYTES: gl.constexpr = COLUMNS * CONSUMERS * 4 * (WORDS if scales is None else WORDS + 1)
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
        for k in range(num_steps):
            ready = ring.full.index(slot)
            at = k * BLOCK_K
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(ready, WEIGHT_BYTES + HALF * ROW_BYTES, pred=num_rows <= HALF)
            mbarrier.expect(ready, WEIGHT_BYTES + BLOCK_M * ROW_BYTES, pred=(num_rows > HALF) & (num_rows <= BLOCK_M))
            if SLACK > 0:
                mbarrier.expect(ready, WEIGHT_BYTES + (BLOCK_M + SLACK) * ROW_BYTES, pred=num_rows > BLOCK_M)
            # fmt: off
            _load_packed(weights, scales, ring, slot, ready, tile, k, num_steps, num_columns, scale_words,
                         COLUMNS, CONSUMERS, WORDS, SPAN)
            # fmt: on
            load_box(half_rows, [row, at], ready, ring.rows.index(2 * slot))
            load_box(half_rows, [row + HALF, at], ready, ring.rows.index(2 * slot + 1), pred=num_rows > HALF)
            if SLACK > 0:
                load_box(slack_rows, [row + BLOCK_M, at], ready, ring.slack_rows.index(slot), pred=num_rows > BLOCK_M)
            slot, phase = next_slot(slot, phase, STAGES)
        tile_number = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)


@gluon.jit
def produce_packed_by_token(
    weights,
    scales,
    hidden_states,
    sorted_routes,
    ring,
    turns,
    tile_counter,
    order,
    num_steps,
    num_columns,
    scale_words,
    hidden_chunks,
    stride_chunks,
    TOP_K: gl.constexpr,
    MASK_K: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    WORDS: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of the words and scales and, 16 bytes at a time, with the tokens of the routes.

    Run by four warps. Arguments as for `produce_packed` and `produce_by_token` of `producer.py`.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    WEIGHT_BYTES: gl.constexpr = COLUMNS * CONSUMERS * 4 * (WORDS if scales is None else WORDS + 1)
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
        if SLACK > 0:
            slack = load_routes(sorted_routes, tile.row, tile.num_rows, BLOCK_M, SLACK, LAYOUT)  # [SLACK]
        while tile_number < num_tiles:
            turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 4)
            low_offsets = token_offsets(low, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
            high_offsets = token_offsets(high, stride_chunks, TOP_K, LAYOUT)  # [HALF, BLOCK_K]
            if SLACK > 0:
                slack_offsets = token_offsets(slack, stride_chunks, TOP_K, LAYOUT)  # [SLACK, BLOCK_K]
            # The next tile's routes and the number of the tile after it arrive during this tile.
            tile_number = following
            following = next_tile(tile_counter)
            next_one = locate(gl.minimum(tile_number, num_tiles - 1), order, BLOCK_M, SLACK)
            low = load_routes(sorted_routes, next_one.row, next_one.num_rows, 0, HALF, LAYOUT)
            high = load_routes(sorted_routes, next_one.row, next_one.num_rows, HALF, HALF, LAYOUT)
            if SLACK > 0:
                slack = load_routes(sorted_routes, next_one.row, next_one.num_rows, BLOCK_M, SLACK, LAYOUT)
            num_rows = tile.num_rows
            tokens = hidden_states
            for k in range(num_steps):
                ready = ring.full.index(slot)
                mbarrier.wait(ring.empty.index(slot), phase)
                mbarrier.expect(ready, WEIGHT_BYTES)
                # fmt: off
                _load_packed(weights, scales, ring, slot, ready, tile, k, num_steps, num_columns, scale_words,
                             COLUMNS, CONSUMERS, WORDS, SPAN)
                # fmt: on
                copy_tokens(ring.rows.index(2 * slot), tokens + low_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                if num_rows > HALF:
                    high_half = ring.rows.index(2 * slot + 1)
                    copy_tokens(high_half, tokens + high_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                if SLACK > 0:
                    if num_rows > BLOCK_M:
                        slack_rows = ring.slack_rows.index(slot)
                        copy_tokens(slack_rows, tokens + slack_offsets, k, hidden_chunks, MASK_K, LAYOUT)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                tokens += BLOCK_K
                slot, phase = next_slot(slot, phase, STAGES)
            tile = next_one
    announce_tile(NO_TILE, turns, turn, turn_phase, 4)
