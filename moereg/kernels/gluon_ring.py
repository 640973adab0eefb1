"""The ring of shared memory between the producer and the consumers of a Hopper grouped GEMM, in Triton's Gluon.

A slot holds one step along the reduced dimension: BLOCK_N rows of a weight, MAIN rows of activations and, for a tile
that is a little longer, TAIL more. `full[slot]` completes when its bytes have arrived, `empty[slot]` when both
consumers have multiplied them. All walk over the same tiles in the same order, so that no tile need be communicated,
or are told them as `gluon_turns` says.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Elements of the reduced dimension per step: 128 bytes, the widest swizzle.
BLOCK_K = gl.constexpr(64)

# Triton 3.8 renamed the first two and 3.9 the third; 3.9 removed the old names.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
load_chunks = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret


@gluon.jit
def locate(tile, plan, num_tiles_n, group, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Returns expert, tile along the columns, first row and number of rows of a tile."""
    # The blocks of a group share the columns of a weight before the next columns are taken, for the L2.
    block_expert, block_row, block_end, used_blocks = plan
    first = tile // (group * num_tiles_n) * group
    within = tile - first * num_tiles_n
    blocks = gl.minimum(used_blocks - first, group)
    block = first + within % blocks
    row = gl.load(block_row + block)
    rows = gl.load(block_end + block) - row
    rows = gl.where(rows > MAIN + TAIL, MAIN, rows)
    return gl.load(block_expert + block), within // blocks, row, rows


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after this one, and in which round of the ring it is."""
    wrap = slot == STAGES - 1
    return gl.where(wrap, 0, slot + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _previous(slot, STAGES: gl.constexpr):
    # Not kept in a variable of the loop: Triton 3.6 compiles `last = slot` there as if it never changed.
    return gl.where(slot == 0, STAGES - 1, slot - 1)


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
    for tile in range(gl.program_id(0), plan[3] * num_tiles_n, gl.num_programs(0)):
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
    total = plan[3] * num_tiles_n
    if gl.program_id(0) < total:
        expert, tile_n, row, rows = locate(gl.program_id(0), plan, num_tiles_n, group, MAIN, TAIL)
        low = _load_routes(sorted_routes, row, rows, 0, HALF, LAYOUT)
        high = _load_routes(sorted_routes, row, rows, HALF, HALF, LAYOUT)
        tail = _load_routes(sorted_routes, row, rows, MAIN, TAIL, LAYOUT)
        for tile in range(gl.program_id(0), total, gl.num_programs(0)):
            low_offsets = _token_offsets(low, stride_chunks, TOP_K, LAYOUT)
            high_offsets = _token_offsets(high, stride_chunks, TOP_K, LAYOUT)
            tail_offsets = _token_offsets(tail, stride_chunks, TOP_K, LAYOUT)
            # The next tile's routes are on their way during this one.
            next_tile = gl.minimum(tile + gl.num_programs(0), total - 1)
            next_expert, next_n, row, next_rows = locate(next_tile, plan, num_tiles_n, group, MAIN, TAIL)
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


@gluon.jit
def multiply(
    ring,
    slot,
    phase,
    num_k,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FENCE: gl.constexpr,
):
    """Returns one warpgroup's half of a tile: columns x ROWS and columns x TAIL, fp32, and where the ring stands."""
    weights_shared, rows_shared, tail_shared, full, empty = ring
    COLUMNS: gl.constexpr = BLOCK_N // 2
    PARTS: gl.constexpr = 2 * rows_shared.shape[1] // ROWS
    dtype: gl.constexpr = rows_shared.dtype
    operand: gl.constexpr = rows_shared.layout
    columns = reinterpret(weights_shared, dtype, [2 * STAGES, COLUMNS, BLOCK_K], operand)
    rows = reinterpret(rows_shared, dtype, [PARTS * STAGES, ROWS, BLOCK_K], operand)
    main = gl.zeros([COLUMNS, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    if TAIL > 0:
        tail = gl.zeros([COLUMNS, TAIL], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    # Without it the accumulators are copied around a loop that may be empty, and ptxas serialises the products.
    gl.assume(num_k > 0)
    for k in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        if FENCE:
            # What cp.async wrote is read by wgmma through another proxy.
            fence_async_shared()
        a = columns.index(2 * slot + WARPGROUP)
        main = warpgroup_mma(a, rows.index(PARTS * slot).permute((1, 0)), main, is_async=True)
        if TAIL > 0:
            tail = warpgroup_mma(a, tail_shared.index(slot).permute((1, 0)), tail, is_async=True)
            main, tail = warpgroup_mma_wait(2, deps=(main, tail))
        else:
            main = warpgroup_mma_wait(1, deps=(main,))
        mbarrier.arrive(empty.index(_previous(slot, STAGES)), pred=k > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    if TAIL > 0:
        main, tail = warpgroup_mma_wait(0, deps=(main, tail))
        mbarrier.arrive(empty.index(_previous(slot, STAGES)))
        return main, tail, slot, phase
    else:
        main = warpgroup_mma_wait(0, deps=(main,))
        mbarrier.arrive(empty.index(_previous(slot, STAGES)))
        return main, main, slot, phase
