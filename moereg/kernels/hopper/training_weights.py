"""Gradients of weights on Hopper, products as deep as an expert has routes, in Triton's Gluon.

Sizes as in `kernels/backward/weights.py`. One program per multiprocessor takes tiles [BLOCK_M, BLOCK_N] of experts'
matrices from a counter. Its producer fills a ring with steps of 64 routes: the side whose rows lie in order by boxes
that a tensor map clips at the expert's end, the side of the tokens 16 bytes at a time, with zeros past that end. Two
consumers multiply and store half the rows each. All rows of an expert are added up in order, so equal inputs give equal
bits; an expert without rows takes one step of zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
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

from moereg.kernels.hopper.arguments import clipped_map, tensor_map
from moereg.kernels.hopper.config import GATHERS_LEFT, GATHERS_RIGHT
from moereg.kernels.hopper.consumer import barrier, store_box
from moereg.kernels.hopper.ring import (
    BLOCK_K,
    NO_TILE,
    allocate_barriers,
    allocate_turns,
    announce_tile,
    load_box,
    load_chunks,
    next_slot,
    next_tile,
    previous_slot,
    reinterpret,
    take_tile,
)
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)
_CONSUMER_REGISTERS = gl.constexpr(208)
_PRODUCER_REGISTERS = gl.constexpr(88)

# A staged store: rows and columns of a weight.
_STAGED = gl.constexpr(64)


class GradientTile(NamedTuple):
    """Compile-time constant: the tile of a weight's gradient."""

    block_m: int  # rows; each consumer takes a half
    block_n: int  # columns
    stages: int  # slots of the ring
    top_k: int  # K
    gathers_left: bool  # whether the left side has a row for each token, or else the right one


class _Sides(NamedTuple):
    """The operands of a product."""

    ordered: Any  # map of the sorted rows behind the guard, clipped at an expert's end, boxes [1, BLOCK_K, columns]
    tokens: Any  # pointer to the tokens' rows
    stride_chunks: Any  # chunks of 8 elements from one token to the next
    num_chunks: Any  # chunks of a token
    sorted_routes: Any  # of the plan
    expert_offsets: Any  # of the plan


class _Ring(NamedTuple):
    """The shared memory of the ring."""

    left: Any  # [STAGES, BLOCK_K, BLOCK_M] or boxes of them
    right: Any  # [STAGES, BLOCK_K, BLOCK_N] or boxes of them
    full: Any  # [STAGES, 1] barriers that complete when the bytes of a slot have arrived
    empty: Any  # [STAGES, 1] barriers that complete when both consumers have multiplied them


class _Tiles(NamedTuple):
    """The tiles of all experts' gradients."""

    counter: Any  # pointer to the number of tiles that programs have taken beyond their first ones
    num_experts: Any  # E
    num_m: Any  # tiles along the rows of a weight
    num_n: Any  # tiles along its columns


@gluon.jit
def _locate(tile_number, tiles, expert_offsets):
    """Returns a tile's expert, its numbers along rows and columns, and the expert's first row and end."""
    expert = tile_number // (tiles.num_m * tiles.num_n)
    within = tile_number % (tiles.num_m * tiles.num_n)
    first = gl.load(expert_offsets + expert)
    end = gl.load(expert_offsets + expert + 1)
    return expert, within % tiles.num_m, within // tiles.num_m, first, end


@gluon.jit
def _load_routes(sorted_routes, first, end, LAYOUT: gl.constexpr):
    """Routes of a step's rows, [BLOCK_K]; those past the end repeat another, or are any where there is none."""
    at = first + gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))
    return gl.load(sorted_routes + gl.maximum(gl.minimum(at, end - 1), 0), mask=at < end, other=0)


@gluon.jit
def _produce(sides, ring, turns, tiles, TILE: gl.constexpr):
    """Fills the ring with steps of 64 routes of every tile. Run by four warps."""
    ORDERED: gl.constexpr = TILE.block_n if TILE.gathers_left else TILE.block_m
    GATHERED: gl.constexpr = TILE.block_m if TILE.gathers_left else TILE.block_n
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, GATHERED, gl.SliceLayout(0, LAYOUT))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = tiles.num_experts * tiles.num_m * tiles.num_n
    tile_number = gl.program_id(0)
    while tile_number < num_tiles:
        turn, turn_phase = announce_tile(tile_number, turns, turn, turn_phase, 4)
        following = next_tile(tiles.counter)
        _, tile_m, tile_n, first, end = _locate(tile_number, tiles, sides.expert_offsets)
        at_ordered = (tile_n if TILE.gathers_left else tile_m) * ORDERED
        at_gathered = (tile_m if TILE.gathers_left else tile_n) * GATHERED
        known_columns = at_gathered + columns < sides.num_chunks * 8  # [GATHERED]
        tokens = sides.tokens + at_gathered
        routes = _load_routes(sides.sorted_routes, first, end, LAYOUT)  # [BLOCK_K]
        num_steps = gl.maximum((end - first + BLOCK_K - 1) // BLOCK_K, 1)
        for k in range(num_steps):
            ready = ring.full.index(slot)
            start = first + k * BLOCK_K
            stop = gl.minimum(start + BLOCK_K, end)
            # A stride in chunks of 8 elements tells the compiler that addresses are aligned to 16 bytes.
            offsets = (routes // TILE.top_k)[:, None] * (sides.stride_chunks * 8) + columns[None, :]
            at = start + gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))
            mask = (at < end)[:, None] & known_columns[None, :]  # [BLOCK_K, GATHERED]
            # A step ahead, since a load waits longer than a step of copies.
            routes = _load_routes(sides.sorted_routes, start + BLOCK_K, end, LAYOUT)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(ready, 2 * BLOCK_K * ORDERED)
            place = [stop, _GUARD - (stop - start), at_ordered]
            if TILE.gathers_left:
                load_box(sides.ordered, place, ready, ring.right.index(slot))
                load_chunks(ring.left.index(slot), tokens + offsets, mask=mask)
            else:
                load_box(sides.ordered, place, ready, ring.left.index(slot))
                load_chunks(ring.right.index(slot), tokens + offsets, mask=mask)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            slot, phase = next_slot(slot, phase, TILE.stages)
        tile_number = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 4)


@gluon.jit
def _store_tile(
    x,
    grad,
    staging,
    expert,
    row,
    column,
    WARPGROUP: gl.constexpr,
    SQUARES_M: gl.constexpr,
    FIRST_M: gl.constexpr,
    FIRST_N: gl.constexpr,
):
    """Stores [ROWS, COLUMNS] fp32, by squares through a consumer's two staging buffers; the map drops what is past."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS > _STAGED:
        left, right = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _store_tile(left, grad, staging, expert, row, column, WARPGROUP, SQUARES_M, FIRST_M, FIRST_N)
        _store_tile(right, grad, staging, expert, row, column, WARPGROUP, SQUARES_M, FIRST_M, FIRST_N + COLUMNS // 2)
    elif ROWS > _STAGED:
        high, low = gl.split(gl.permute(gl.reshape(x, (2, ROWS // 2, COLUMNS)), (1, 2, 0)))
        _store_tile(high, grad, staging, expert, row, column, WARPGROUP, SQUARES_M, FIRST_M, FIRST_N)
        _store_tile(low, grad, staging, expert, row, column, WARPGROUP, SQUARES_M, FIRST_M + ROWS // 2, FIRST_N)
    else:
        NUMBER: gl.constexpr = FIRST_M // _STAGED + FIRST_N // _STAGED * SQUARES_M
        buffer = staging.index(2 * WARPGROUP + NUMBER % 2)  # [_STAGED, _STAGED]
        tma.store_wait(0 if FIRST_M + FIRST_N == 0 else 1)
        barrier()
        buffer.store(x.to(grad.dtype))
        fence_async_shared()
        barrier()
        box = reinterpret(buffer, grad.dtype, grad.block_shape, grad.layout)  # [1, _STAGED, _STAGED]
        store_box(grad, [expert, row + FIRST_M, column + FIRST_N], box)


@gluon.jit
def _consume(grad, staging, ring, turns, tiles, expert_offsets, WARPGROUP: gl.constexpr, TILE: gl.constexpr):
    """Multiplies and stores half the rows of every tile of the program. Run by four warps."""
    ROWS: gl.constexpr = TILE.block_m // 2
    COLUMNS: gl.constexpr = TILE.block_n
    dtype: gl.constexpr = grad.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    lefts = reinterpret(ring.left, dtype, [2 * TILE.stages, BLOCK_K, ROWS], operand)
    rights = reinterpret(ring.right, dtype, [TILE.stages, BLOCK_K, COLUMNS], operand)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile_number != NO_TILE:
        expert, tile_m, tile_n, first, end = _locate(tile_number, tiles, expert_offsets)
        num_steps = gl.maximum((end - first + BLOCK_K - 1) // BLOCK_K, 1)
        product = gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
        # Without this the accumulators are copied around a loop that may be empty, and ptxas serializes the products.
        gl.assume(num_steps > 0)
        for k in range(num_steps):
            mbarrier.wait(ring.full.index(slot), phase)
            # wgmma reads through the async proxy, which does not see what cp.async wrote before a fence.
            fence_async_shared()
            a = lefts.index(2 * slot + WARPGROUP).permute((1, 0))  # [ROWS, BLOCK_K]
            b = rights.index(slot)  # [BLOCK_K, COLUMNS]
            product = warpgroup_mma(a, b, product, is_async=True)
            product = warpgroup_mma_wait(1, deps=(product,))
            mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)), pred=k > 0)
            slot, phase = next_slot(slot, phase, TILE.stages)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous_slot(slot, TILE.stages)))
        row = tile_m * TILE.block_m + WARPGROUP * ROWS
        _store_tile(product, grad, staging, expert, row, tile_n * COLUMNS, WARPGROUP, ROWS // _STAGED, 0, 0)
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "num_m", "num_n"])
def _weight_gradients_kernel(
    grad,
    ordered,
    tokens,
    sorted_routes,
    expert_offsets,
    counter,
    num_experts,
    num_m,
    num_n,
    stride_chunks,
    num_chunks,
    TILE: gl.constexpr,  # GradientTile
):
    dtype: gl.constexpr = grad.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LEFT: gl.constexpr = [BLOCK_K, TILE.block_m] if TILE.gathers_left else ordered.block_shape
    RIGHT: gl.constexpr = ordered.block_shape if TILE.gathers_left else [BLOCK_K, TILE.block_n]
    LEFT_LAYOUT: gl.constexpr = operand if TILE.gathers_left else ordered.layout
    RIGHT_LAYOUT: gl.constexpr = ordered.layout if TILE.gathers_left else operand
    left = gl.allocate_shared_memory(dtype, [TILE.stages] + LEFT, LEFT_LAYOUT)
    right = gl.allocate_shared_memory(dtype, [TILE.stages] + RIGHT, RIGHT_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [4, _STAGED, _STAGED], operand)
    # One arrival announces the box's bytes, the others are those of the producer's threads.
    full, empty = allocate_barriers(TILE.stages, 129)
    turns = allocate_turns()
    fence_async_shared()
    ring = _Ring(left, right, full, empty)
    sides = _Sides(ordered, tokens, stride_chunks, num_chunks, sorted_routes, expert_offsets)
    tiles = _Tiles(counter, num_experts, num_m, num_n)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    gl.warp_specialize(
        [
            (_consume, (grad, staging, ring, turns, tiles, expert_offsets, 0, TILE)),
            (_consume, (grad, staging, ring, turns, tiles, expert_offsets, 1, TILE)),
            (_produce, (sides, ring, turns, tiles, TILE)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


def weight_gradients(
    grad: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    plan: RoutePlan,
    counter: torch.Tensor,
    *,
    top_k: int,
    gathers: str,
) -> None:
    """Writes `left[rows].T @ right[rows]` over each expert's rows, summed in fp32 in the order of the plan.

    Args:
        grad: [E, R, C] bf16 or fp16, contiguous, R and C multiples of 8: overwritten, zeros for an expert without rows.
        left: [GUARD_ROWS + N, R], same dtype, contiguous, or [T, R] if it `gathers`, fewer than 2**31 elements and
            strides a multiple of 8.
        right: [GUARD_ROWS + N, C], likewise, or [T, C] if it `gathers`.
        plan: from `sort_routes`; tiles are not read.
        counter: [1] int32, zero; used up.
        gathers: the side, `left` or `right`, that has a row for each token.
    """
    num_experts, num_rows, num_columns = grad.shape
    gathers_left = gathers == "left"
    config = GATHERS_LEFT if gathers_left else GATHERS_RIGHT
    tokens, ordered = (left, right) if gathers_left else (right, left)
    assert (left.shape[1], right.shape[1]) == (num_rows, num_columns) and grad.is_contiguous()
    assert num_rows % 8 == num_columns % 8 == tokens.stride(0) % 8 == 0 and tokens.stride(1) == 1
    box = (1, BLOCK_K.value, config.block_n if gathers_left else config.block_m)
    launch(
        _weight_gradients_kernel,
        (num_multiprocessors(grad.device),),
        grad=tensor_map(grad, tuple(grad.shape), grad.stride(), (1, _STAGED.value, _STAGED.value)),
        ordered=clipped_map(ordered, box),
        tokens=tokens,
        sorted_routes=plan.sorted_routes,
        expert_offsets=plan.expert_offsets,
        counter=counter,
        num_experts=num_experts,
        num_m=triton.cdiv(num_rows, config.block_m),
        num_n=triton.cdiv(num_columns, config.block_n),
        stride_chunks=tokens.stride(0) // 8,
        num_chunks=tokens.shape[1] // 8,
        TILE=GradientTile(config.block_m, config.block_n, config.num_stages, top_k, gathers_left),
        num_warps=4,
    )
