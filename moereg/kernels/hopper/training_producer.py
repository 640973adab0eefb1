"""The producer of the Hopper products of canonical weights, in Triton's Gluon: fills the ring."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.producer import copy_tokens, load_routes, token_offsets
from moereg.kernels.hopper.ring import (
    BLOCK_K,
    NO_TILE,
    announce_tile,
    load_box,
    locate,
    next_slot,
    next_tile,
    reinterpret,
)

# Rows of the pre-activation that a step behind the reduction brings.
SAVED_ROWS = gl.constexpr(32)


class TrainingTile(NamedTuple):
    """Compile-time constant: the tile of a product.

    Attributes:
        block_m: rows, equal to the plan's.
        block_n: columns; each consumer takes a part.
        stages: slots of the ring.
        top_k: routes per token where the producer gathers tokens by route; None: rows lie in order.
        mask_k: whether the last step then reaches past the end of a token.
        by_depth: whether neighbors in memory are columns of a weight, not steps of the reduction.
        halves: 2 where the activation is gated, 1 where not; read where rows are saved.
        stored_rows: rows of a staged store.
        stored_columns: its columns.
        stores: staged stores of a consumer.
        consumers: 2, or 1 where both warpgroups are one.
    """

    block_m: int
    block_n: int
    stages: int
    top_k: int | None
    mask_k: bool
    by_depth: bool
    halves: int
    stored_rows: int
    stored_columns: int
    stores: int
    consumers: int


class Operands(NamedTuple):
    """Tensor maps of what a product multiplies, and the number of its steps.

    Attributes:
        rows: map of rows in order, boxes [BLOCK_M // 2, BLOCK_K], or pointer to the tokens that are gathered.
        weights: map of canonical weights: boxes [BLOCK_N // 16, 2, 8, BLOCK_K] of gates and ups, whose halves are its
            second axis; [1, BLOCK_N, BLOCK_K]; or [1, BLOCK_K, BLOCK_N / consumers].
        num_steps: steps of the reduction.
        low_rows: map of an adapter's low-rank rows, boxes as those of rows in order; None: no adapter.
        low_weights: map of its matrices, boxes as those of weights; None: no adapter.
        low_steps: steps of the reduction over the adapter's rank, behind the others.
        saved: map of the pre-activation by half, rows and columns, boxes [1, SAVED_ROWS, BLOCK_N]; each SAVED_ROWS of a
            tile are one more step, whose boxes lie where weights would. None: nothing is read.
        hidden_chunks: chunks of 8 elements of a token.
        stride_chunks: chunks from one token to the next.
    """

    rows: Any
    weights: Any
    num_steps: Any
    low_rows: Any
    low_weights: Any
    low_steps: Any
    saved: Any
    hidden_chunks: Any
    stride_chunks: Any


@gluon.jit
def _load_weights(weights, ring, slot, ready, tile, k, TILE: gl.constexpr):
    first = tile.column_tile * TILE.block_n
    at = k * BLOCK_K
    if len(weights.block_shape) == 4:
        load_box(weights, [first // 16, 2 * tile.expert, 0, at], ready, ring.weights.index(slot))
    elif TILE.by_depth:
        CONSUMERS: gl.constexpr = TILE.consumers  # Triton 3.6 counts to a constant, not to the field of one.
        for part in gl.static_range(CONSUMERS):
            column = first + part * (TILE.block_n // CONSUMERS)
            load_box(weights, [tile.expert, at, column], ready, ring.weights.index(CONSUMERS * slot + part))
    else:
        load_box(weights, [tile.expert, first, at], ready, ring.weights.index(slot))


@gluon.jit
def _load_rows(rows, ring, slot, ready, tile, k, TILE: gl.constexpr):
    HALF: gl.constexpr = TILE.block_m // 2
    at = k * BLOCK_K
    load_box(rows, [tile.row, at], ready, ring.rows.index(2 * slot))
    load_box(rows, [tile.row + HALF, at], ready, ring.rows.index(2 * slot + 1), pred=tile.num_rows > HALF)


@gluon.jit
def _expect(ready, tile, WEIGHT_BYTES: gl.constexpr, TILE: gl.constexpr):
    """Announces a step's weights and its rows: half a tile where that holds them."""
    HALF: gl.constexpr = TILE.block_m // 2
    BYTES: gl.constexpr = 2 * BLOCK_K * HALF
    mbarrier.expect(ready, WEIGHT_BYTES + BYTES, pred=tile.num_rows <= HALF)
    mbarrier.expect(ready, WEIGHT_BYTES + 2 * BYTES, pred=tile.num_rows > HALF)


@gluon.jit
def produce(operands, ring, turns, order, TILE: gl.constexpr):
    """Fills the ring: steps of the reduction, those of an adapter, then the saved rows. Run by four warps.

    Announces each tile, then for each step waits until the consumers have emptied a slot. A slot's `full` waits for
    the bytes of the boxes and, where tokens are gathered, for the copies of each of the 128 threads.

    Args:
        operands: `Operands`.
        ring: a `Ring`.
        turns: `Turns`.
        order: a `TileOrder`; its tile counter is incremented.
        TILE: `TrainingTile`.
    """
    HALF: gl.constexpr = TILE.block_m // 2
    WEIGHT_BYTES: gl.constexpr = 2 * BLOCK_K * TILE.block_n
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    tile_number = gl.program_id(0)
    # A program without a first tile has none to locate.
    if tile_number < num_tiles:
        following = next_tile(order.plan.tile_counter)
        tile = locate(tile_number, order, TILE.block_m, 0)
        if TILE.top_k is not None:
            low = load_routes(order.plan.sorted_routes, tile, 0, HALF, LAYOUT)
            high = load_routes(order.plan.sorted_routes, tile, HALF, HALF, LAYOUT)
        while tile_number < num_tiles:
            turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 4)
            # Prefetch the next tile, its routes and the number of the tile after it.
            tile_number = following
            following = next_tile(order.plan.tile_counter)
            next_one = locate(gl.minimum(tile_number, num_tiles - 1), order, TILE.block_m, 0)
            if TILE.top_k is not None:
                low_offsets = token_offsets(low, operands.stride_chunks, TILE.top_k, LAYOUT)  # [HALF, BLOCK_K]
                high_offsets = token_offsets(high, operands.stride_chunks, TILE.top_k, LAYOUT)  # [HALF, BLOCK_K]
                low = load_routes(order.plan.sorted_routes, next_one, 0, HALF, LAYOUT)
                high = load_routes(order.plan.sorted_routes, next_one, HALF, HALF, LAYOUT)
                tokens = operands.rows
            for k in range(operands.num_steps):
                ready = ring.full.index(slot)
                mbarrier.wait(ring.empty.index(slot), phase)
                if TILE.top_k is not None:
                    mbarrier.expect(ready, WEIGHT_BYTES)
                    _load_weights(operands.weights, ring, slot, ready, tile, k, TILE)
                    low_half = ring.rows.index(2 * slot)
                    copy_tokens(low_half, tokens + low_offsets, k, operands.hidden_chunks, TILE.mask_k, LAYOUT)
                    if tile.num_rows > HALF:
                        high_half = ring.rows.index(2 * slot + 1)
                        copy_tokens(high_half, tokens + high_offsets, k, operands.hidden_chunks, TILE.mask_k, LAYOUT)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                    tokens += BLOCK_K
                else:
                    _expect(ready, tile, WEIGHT_BYTES, TILE)
                    _load_weights(operands.weights, ring, slot, ready, tile, k, TILE)
                    _load_rows(operands.rows, ring, slot, ready, tile, k, TILE)
                slot, phase = next_slot(slot, phase, TILE.stages)
            if operands.low_rows is not None:
                for k in range(operands.low_steps):
                    ready = ring.full.index(slot)
                    mbarrier.wait(ring.empty.index(slot), phase)
                    _expect(ready, tile, WEIGHT_BYTES, TILE)
                    _load_weights(operands.low_weights, ring, slot, ready, tile, k, TILE)
                    _load_rows(operands.low_rows, ring, slot, ready, tile, k, TILE)
                    if TILE.top_k is not None:
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


@gluon.jit
def _load_saved(saved, ring, slot, ready, tile, first, TILE: gl.constexpr):
    """Starts the copies of SAVED_ROWS rows, of gates, then of ups, for one consumer."""
    HALVES: gl.constexpr = TILE.halves
    boxes = reinterpret(ring.weights, saved.dtype, [2 * TILE.stages] + saved.block_shape, saved.layout)
    mbarrier.expect(ready, HALVES * 2 * SAVED_ROWS * TILE.block_n)
    for half in gl.static_range(HALVES):
        at = [half, tile.row + first, tile.column_tile * TILE.block_n]
        load_box(saved, at, ready, boxes.index(2 * slot + half))
