"""The ring of shared memory between the producer and the consumers of a Hopper grouped GEMM, in Triton's Gluon.

A slot holds one step along the reduced dimension: BLOCK_N rows of a weight, MAIN rows of activations and, for a tile
that is a little longer, TAIL more. `full[slot]` completes when its bytes have arrived, `empty[slot]` when both
consumers have multiplied them. All are told which tile comes next, as `gluon_turns` says.
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
    # Without it the accumulators are copied around a loop that may be empty, and ptxas serializes the products.
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
