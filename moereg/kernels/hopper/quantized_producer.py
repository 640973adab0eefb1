"""The producer of an 8-bit Hopper grouped GEMM, in Triton's Gluon, and the ring of shared memory that it fills.

A tile is 128 rows of activations by two halves of 128 rows of a weight: gate and up of the same columns, or 256
adjacent columns. A slot of the ring holds one step along the reduced dimension, with its scales if they change from
step to step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M
from moereg.kernels.hopper.ring import (
    NO_TILE,
    announce_tile,
    load_box,
    load_chunks,
    locate,
    next_slot,
    next_tile,
    reinterpret,
)

# Rows of a tile and of a warpgroup; columns of a half, which is one block of scales and one group of the output.
BLOCK_M = gl.constexpr(QUANTIZED_BLOCK_M)
OWN_ROWS = gl.constexpr(QUANTIZED_BLOCK_M // 2)
COLUMNS = gl.constexpr(128)

# Elements of the reduced dimension per step: 128 bytes, the widest swizzle, and one group of scales.
BLOCK_K = gl.constexpr(128)


class CodeTile(NamedTuple):
    """Compile-time constant: how an 8-bit product is multiplied and stored."""

    stages: int  # slots of the ring
    buffers: int  # staged stores of each warpgroup
    grouped: bool  # whether scales change from step to step
    by_column: bool  # whether each column has a scale; else the columns of a half share one
    rounded: Any  # dtype that numbers are rounded to before they are quantized, or None
    mask_n: bool  # whether the last half reaches past the last column, where zeros are stored
    leads: bool  # as in `HopperQuantizedConfig`
    early: bool  # whether the first tile's first weights are loaded early; see `load_early`


class CodeRing(NamedTuple):
    """The shared memory of a ring with STAGES slots."""

    rows: Any  # [2 * STAGES, OWN_ROWS, BLOCK_K] a slot's activations, by warpgroups
    # [2 * STAGES, 1, COLUMNS, BLOCK_K] a slot's weights, by halves; for consumers [2 * STAGES, COLUMNS, BLOCK_K]
    weights: Any
    # [STAGES, BLOCK_M] fp32 scales of a slot's rows; for consumers [2 * STAGES, OWN_ROWS]. Neither these nor the next
    # are read where scales do not change along a row
    row_scales: Any
    half_scales: Any  # [2 * STAGES, 1] fp32 scales of a slot's weights, one per half
    full: Any  # [STAGES, 1] barriers that complete when the bytes of a slot have arrived
    empty: Any  # [STAGES, 1] barriers that complete when both consumers have multiplied them


@gluon.jit
def operands_of(ring, STAGES: gl.constexpr):
    """Returns a producer's `CodeRing` as its consumers read it: the same memory in other shapes."""
    weights = reinterpret(ring.weights, ring.weights.dtype, [2 * STAGES, COLUMNS, BLOCK_K], ring.rows.layout)
    row_scales = reinterpret(
        ring.row_scales, gl.float32, [2 * ring.row_scales.shape[0], OWN_ROWS], ring.row_scales.layout
    )
    return CodeRing(ring.rows, weights, row_scales, ring.half_scales, ring.full, ring.empty)


@gluon.jit
def first_columns(column_tile, num_columns, GATED: gl.constexpr):
    """First row of an expert's weight, and first column of the product, for each half of a tile."""
    low = column_tile * COLUMNS if GATED else column_tile * 2 * COLUMNS
    high = num_columns // 2 + low if GATED else low + COLUMNS
    return low, high


@gluon.jit
def _copy_scales(ring, slot, row_scale, low_scales, high_scales, tile, k, stride_row_scale):
    """Copies a step's scales, of a tile's rows and of both halves' columns, into the ring, 4 bytes at a time.

    TMA boxes would have to begin at multiples of 16 bytes.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # Rows past the end repeat the last one.
    at = tile.row + gl.minimum(gl.arange(0, BLOCK_M, LINE), tile.num_rows - 1)  # [BLOCK_M]
    load_chunks(ring.row_scales.index(slot), row_scale + k * stride_row_scale + at)
    one = gl.arange(0, 1, LINE)  # [1]
    load_chunks(ring.half_scales.index(2 * slot), low_scales + k + one)
    load_chunks(ring.half_scales.index(2 * slot + 1), high_scales + k + one)
    async_copy.mbarrier_arrive(ring.full.index(slot), increment_count=False)


@gluon.jit
def _guess(num_tiles_n):
    """Expert and column tile of this program's first tile, if each expert has rows for one tile."""
    number = gl.program_id(0)
    return number // num_tiles_n, number % num_tiles_n


@gluon.jit
def load_early(weights, ring_weights, num_tiles_n, early, num_columns, GATED: gl.constexpr, STAGES: gl.constexpr):
    """Loads the weights of the first STAGES steps of the tile that this program probably starts with.

    Weights do not depend on the previous kernel, which may take some time to end.
    """
    expert, column_tile = _guess(num_tiles_n)
    low, high = first_columns(column_tile, num_columns, GATED)
    mbarrier.expect(early.index(0), STAGES * 2 * COLUMNS * BLOCK_K)
    for k in gl.static_range(STAGES):
        load_box(weights, [expert, low, k * BLOCK_K], early.index(0), ring_weights.index(2 * k))
        load_box(weights, [expert, high, k * BLOCK_K], early.index(0), ring_weights.index(2 * k + 1))


@gluon.jit
def _expect(ready, num_rows):
    """Sets the bytes that a slot's `full` barrier expects."""
    mbarrier.expect(ready, (OWN_ROWS + 2 * COLUMNS) * BLOCK_K, pred=num_rows <= OWN_ROWS)
    mbarrier.expect(ready, (BLOCK_M + 2 * COLUMNS) * BLOCK_K, pred=num_rows > OWN_ROWS)


@gluon.jit
def _load_rows(rows, row, num_rows, at, ring, slot):
    """Starts the copies of a step's rows."""
    ready = ring.full.index(slot)
    load_box(rows, [row, at], ready, ring.rows.index(2 * slot))
    load_box(rows, [row + OWN_ROWS, at], ready, ring.rows.index(2 * slot + 1), pred=num_rows > OWN_ROWS)


@gluon.jit
def produce_codes(
    rows,  # map of the rows, boxes [OWN_ROWS, BLOCK_K]
    weights,  # map of the weights, boxes [1, COLUMNS, BLOCK_K]
    scales,  # `CodeScales`
    ring,  # a `CodeRing`
    turns,  # `Turns`
    early,  # [1, 1] barrier of the weights that `load_early` loads; unused unless TILE.early
    order,  # a `TileOrder`
    num_steps,  # steps along the reduced dimension
    num_columns,  # rows of an expert's weight
    stride_row_scale,  # from a row's scale of one step to that of the next
    stride_column_scale,  # from the scales of one group of weight rows to those of the next
    GATED: gl.constexpr,  # whether the weight holds gates
    TILE: gl.constexpr,  # a `CodeTile`
):
    """Fills the ring with boxes of sorted rows and of both halves' weights, and with their scales. Run by one warp.

    Reads rows and weights through tensor maps, the scales, `order` and the tile counter, which it increments. Announces
    each tile, then for each step waits until both consumers have emptied a slot, sets the bytes that its `full` barrier
    expects, and starts the copies. Where scales are grouped, `full` also waits for those of each thread.
    """
    STAGES: gl.constexpr = TILE.stages
    EARLY: gl.constexpr = TILE.early
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = order.num_blocks * order.num_tiles_n
    if EARLY:
        # Even without a tile: a program must not end before its copies.
        mbarrier.wait(early.index(0), 0)
    tile_number = gl.program_id(0)
    while tile_number < num_tiles:
        turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 1)
        following = next_tile(order.plan.tile_counter)
        tile = locate(tile_number, order, BLOCK_M, 0)
        expert, row, num_rows = tile.expert, tile.row, tile.num_rows
        low, high = first_columns(tile.column_tile, num_columns, GATED)
        if TILE.grouped:
            own_scales = scales.column + expert.to(gl.int64) * scales.stride_expert
            low_scales = own_scales + gl.minimum(low, num_columns - 1) // scales.group_rows * stride_column_scale
            high_scales = own_scales + gl.minimum(high, num_columns - 1) // scales.group_rows * stride_column_scale
        if EARLY:
            guess_expert, guess_tile = _guess(order.num_tiles_n)
            # Whether this is the first tile and the guess was right: its first steps' weights are then loaded.
            hit = (tile_number == gl.program_id(0)) & (expert == guess_expert)
            hit = hit & (tile.column_tile == guess_tile)
        for k in range(num_steps):
            ready = ring.full.index(slot)
            at = k * BLOCK_K
            mbarrier.wait(ring.empty.index(slot), phase)
            if EARLY:
                wanted = (k >= STAGES) | (hit == 0)
                several = num_rows > OWN_ROWS
                mbarrier.expect(ready, OWN_ROWS * BLOCK_K, pred=(wanted == 0) & (several == 0))
                mbarrier.expect(ready, BLOCK_M * BLOCK_K, pred=(wanted == 0) & several)
                mbarrier.expect(ready, (OWN_ROWS + 2 * COLUMNS) * BLOCK_K, pred=wanted & (several == 0))
                mbarrier.expect(ready, (BLOCK_M + 2 * COLUMNS) * BLOCK_K, pred=wanted & several)
                _load_rows(rows, row, num_rows, at, ring, slot)
                load_box(weights, [expert, low, at], ready, ring.weights.index(2 * slot), pred=wanted)
                load_box(weights, [expert, high, at], ready, ring.weights.index(2 * slot + 1), pred=wanted)
            else:
                _expect(ready, num_rows)
                _load_rows(rows, row, num_rows, at, ring, slot)
                load_box(weights, [expert, low, at], ready, ring.weights.index(2 * slot))
                load_box(weights, [expert, high, at], ready, ring.weights.index(2 * slot + 1))
            if TILE.grouped:
                _copy_scales(ring, slot, scales.row, low_scales, high_scales, tile, k, stride_row_scale)
            slot, phase = next_slot(slot, phase, STAGES)
        tile_number = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)
