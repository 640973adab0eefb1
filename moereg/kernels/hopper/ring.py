"""The ring of shared memory between the producer and the consumers of a Hopper grouped GEMM, in Triton's Gluon.

A slot of the ring holds one step along the reduced dimension: BLOCK_N rows of a weight, BLOCK_M rows of activations
and, for a tile that is a little longer, SLACK more. The producer and all consumers go through the slots in the same
order, and each counts its rounds: a phase is 0 in one round and 1 in the next.

Tiles are scheduled dynamically. If each program had a fixed share, all would wait for the one with the fewest short
tiles: up to 8 % of a GEMM by simulation, at 4,096 tokens of 256 experts; on an H200 more, see benches/notes/kernels.md.
So a program's producer takes the next tile from a counter in memory, one or two ahead, and announces it to the
consumers through a ring of two turns. Which program computes a tile changes from run to run; what it computes does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Ring(NamedTuple):
    """The shared memory of a ring with STAGES slots."""

    # [STAGES, ...box] a slot's rows of a weight, as boxes of its tensor map; [CONSUMERS * STAGES, ...box] where each
    # consumer has its own boxes: the int32 words of packed weights, or rows that are steps
    weights: Any
    scales: Any  # [CONSUMERS * STAGES, lines, 8] int32, a word for each of a consumer's packed rows; None without
    rows: Any  # [2 * STAGES, BLOCK_M // 2, BLOCK_K] a slot's rows of activations, in two halves
    slack_rows: Any  # [STAGES, SLACK, BLOCK_K] the rows behind them; None without slack
    full: Any  # [STAGES, 1] barriers that complete when the bytes of a slot have arrived
    empty: Any  # [STAGES, 1] barriers that complete when all consumers have multiplied them


class ProductTile(NamedTuple):
    """Compile-time constant: the tile of a product."""

    block_m: int  # rows; this and the next two as in the launch configurations
    block_n: int  # columns; each consumer takes a part
    slack: int  # rows by which a tile may be longer
    bodies: int  # as in `HopperGemmConfig`; 0 for packed weights: half a tile, a tile, a tile with slack
    stages: int  # slots of the ring
    top_k: int | None  # routes per token where the producer gathers tokens by route; None: rows lie in order
    mask_k: bool  # whether the last step then reaches past the end of a token
    consumers: int = 2  # warpgroups that multiply, or 1 where both of two are one
    packed: Any = None  # a `PackedFormat`; None: weights are not packed
    odd: bool = False  # whether the number of steps is odd; packed weights only
    # `gate_up`, `down_input` or `rows`: the product of a layer that is trained; None: inference
    trained: str | None = None
    by_depth: bool = False  # whether neighbors in memory are columns of a weight, not steps of the reduction
    halves: int = 1  # 2 where the activation is gated, 1 where not; read where rows of the pre-activation are


class PlanPointers(NamedTuple):
    """A `BlockMap` or `RoutePlan` as a kernel argument."""

    sorted_routes: Any  # None where no route is read
    block_expert: Any  # expert of a row tile; this and the next three as in `BlockMap`
    block_row: Any  # first row of a tile
    block_end: Any  # end of the rows of the tile's expert
    num_blocks: Any  # tiles of rows in use
    tile_counter: Any  # tiles that programs have taken beyond their first ones; incremented


class TileOrder(NamedTuple):
    """The tiles of a product and the order in which programs take them."""

    plan: Any  # `PlanPointers`
    num_blocks: Any  # tiles of rows in use
    num_tiles_n: Any  # tiles along the columns of a weight
    group_m: Any  # row tiles that share a column tile of the weight before the next one is taken, for L2 reuse


class Tile(NamedTuple):
    """One tile of a product."""

    expert: Any  # the expert whose weight it multiplies
    column_tile: Any  # its number along the columns of that weight
    row: Any  # its first row, in sorted order or in the batched format
    num_rows: Any  # at most BLOCK_M + SLACK


@gluon.jit
def allocate_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr, CONSUMERS: gl.constexpr = 2):
    """Allocates two barriers per slot: one for the producer's arrivals, one for those of all consumers."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=ARRIVALS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return full, empty


@gluon.jit
def allocate_barrier():
    """Allocates one barrier that expects one arrival."""
    one = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(one.index(0), count=1)
    return one


@gluon.jit
def locate(tile_number, order, BLOCK_M: gl.constexpr, SLACK: gl.constexpr):
    """Returns the `Tile` of a tile number."""
    first = tile_number // (order.group_m * order.num_tiles_n) * order.group_m
    within = tile_number - first * order.num_tiles_n
    # The last group may be smaller.
    blocks = gl.minimum(order.num_blocks - first, order.group_m)
    block = first + within % blocks
    row = gl.load(order.plan.block_row + block)
    num_rows = gl.load(order.plan.block_end + block) - row
    num_rows = gl.where(num_rows > BLOCK_M + SLACK, BLOCK_M, num_rows)
    expert = gl.load(order.plan.block_expert + block)
    return Tile(expert=expert, column_tile=within // blocks, row=row, num_rows=num_rows)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot after this one and its phase."""
    wrap = slot == SLOTS - 1
    return gl.where(wrap, 0, slot + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    """The slot before this one."""
    # Not a loop variable: Triton 3.6 compiles `last = slot` in the loop as if it never changed.
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.constexpr_function
def consumer_warps(consumers: int) -> int:
    """Warps of a consumer: a warpgroup, or both where two are one."""
    return 8 if consumers == 1 else 4


@gluon.jit
def multiply(
    ring, slot, phase, num_steps, PART: gl.constexpr, ROWS: gl.constexpr, SLACK: gl.constexpr, TILE: gl.constexpr
):
    """Multiplies one consumer's part of a tile from the next `num_steps` slots of the ring.

    Waits for each slot to be full and arrives at its `empty` once its product has ended.

    `num_steps` is at least one. PART is the consumer's number and that of its columns; ROWS is BLOCK_M, or half or a
    quarter of it for a tile with fewer rows; SLACK more may lie behind them.

    Returns:
        [BLOCK_N // consumers, ROWS] fp32; the same of SLACK rows, or the first again without slack; the next slot and
        its phase.
    """
    CONSUMERS: gl.constexpr = TILE.consumers
    COLUMNS: gl.constexpr = TILE.block_n // CONSUMERS
    WARPS: gl.constexpr = consumer_warps(CONSUMERS)
    STAGES: gl.constexpr = TILE.stages
    PARTS: gl.constexpr = 2 * ring.rows.shape[1] // ROWS
    dtype: gl.constexpr = ring.rows.dtype
    operand: gl.constexpr = ring.rows.layout
    BOX: gl.constexpr = [BLOCK_K, COLUMNS] if TILE.by_depth else [COLUMNS, BLOCK_K]
    columns = reinterpret(ring.weights, dtype, [CONSUMERS * STAGES] + BOX, operand)
    rows = reinterpret(ring.rows, dtype, [PARTS * STAGES, ROWS, BLOCK_K], operand)
    product = gl.zeros([COLUMNS, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16]))
    if SLACK > 0:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLACK, 16])
        slack_product = gl.zeros([COLUMNS, SLACK], gl.float32, LAYOUT)
    # Without this the accumulators are copied around a loop that may be empty, and ptxas serializes the products.
    gl.assume(num_steps > 0)
    for k in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        if TILE.top_k is not None:
            # wgmma reads through the async proxy, which does not see what cp.async wrote before a fence.
            fence_async_shared()
        a = columns.index(CONSUMERS * slot + PART)  # [COLUMNS, BLOCK_K], or transposed
        if TILE.by_depth:
            a = a.permute((1, 0))
        b = rows.index(PARTS * slot).permute((1, 0))  # [BLOCK_K, ROWS]
        product = warpgroup_mma(a, b, product, is_async=True)
        if SLACK > 0:
            slack_b = ring.slack_rows.index(slot).permute((1, 0))  # [BLOCK_K, SLACK]
            slack_product = warpgroup_mma(a, slack_b, slack_product, is_async=True)
            product, slack_product = warpgroup_mma_wait(2, deps=(product, slack_product))
        else:
            product = warpgroup_mma_wait(1, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous_slot(slot, STAGES)), pred=k > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    if SLACK > 0:
        product, slack_product = warpgroup_mma_wait(0, deps=(product, slack_product))
        mbarrier.arrive(ring.empty.index(previous_slot(slot, STAGES)))
        return product, slack_product, slot, phase
    else:
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous_slot(slot, STAGES)))
        return product, product, slot, phase


# Tiles that the producer may announce before consumers take the first.
TURNS = gl.constexpr(2)

# Announced in place of a tile when all are taken.
NO_TILE = gl.constexpr(-1)


class Turns(NamedTuple):
    """The shared memory through which a producer announces tiles to its consumers."""

    tiles: Any  # [TURNS, 1] int32, numbers of tiles
    announced: Any  # [TURNS, 1] barriers that complete when the producer has written a number
    taken: Any  # [TURNS, 1] barriers that complete when all consumers have read it


@gluon.jit
def allocate_turns(CONSUMERS: gl.constexpr = 2):
    """Allocates a program's `Turns` for that many consumers."""
    tiles = gl.allocate_shared_memory(gl.int32, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced, taken = allocate_barriers(TURNS, 1, CONSUMERS)
    return Turns(tiles=tiles, announced=announced, taken=taken)


@gluon.jit
def next_tile(tile_counter):
    """Takes the first free tile; each program starts with the tile of its own id."""
    return gl.num_programs(0) + gl.atomic_add(tile_counter, 1, sem="relaxed")


@gluon.jit
def announce_tile(tile_number, turns, turn, phase, WARPS: gl.constexpr):
    """Tells the consumers which tile comes next, or that none does.

    Run by all WARPS warps of a producer. Waits until all consumers have read what this turn announced before.

    Returns:
        The next turn and its phase.
    """
    mbarrier.wait(turns.taken.index(turn), phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    turns.tiles.index(turn).store(gl.zeros([1], gl.int32, LAYOUT) + tile_number)  # [1]
    mbarrier.arrive(turns.announced.index(turn))
    return next_slot(turn, phase, TURNS)


@gluon.jit
def take_tile(turns, turn, phase, WARPS: gl.constexpr = 4):
    """Takes the next tile. Run by all WARPS warps of a consumer; waits until it is announced.

    Returns:
        The tile's number or NO_TILE, the next turn and its phase.
    """
    mbarrier.wait(turns.announced.index(turn), phase)
    tile_number = gl.sum(turns.tiles.index(turn).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(turns.taken.index(turn))
    turn, phase = next_slot(turn, phase, TURNS)
    return tile_number, turn, phase
