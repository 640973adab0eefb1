"""The consumers of a Hopper grouped GEMM of packed weights, in Triton's Gluon: multiply, scale, activate, store.

Each warpgroup dequantizes its own weight rows into registers, wgmma's left operand, while the tensor cores work on the
previous fragment. Two fragments alternate, and the products of both are issued before the first is awaited.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moereg.kernels.hopper.consumer import Place, store_tile
from moereg.kernels.hopper.packed_restore import restore
from moereg.kernels.hopper.ring import BLOCK_K, next_slot, reinterpret
from moereg.kernels.sizes import GUARD_ROWS


@gluon.jit
def _fragment(
    ring,
    slot,
    half,
    parity,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Dequantizes 64 of a warpgroup's columns from a full slot: [64, BLOCK_K] bfloat16 in registers.

    `half` selects the 64 columns, 0 if there are no more, and `parity` is 1 in odd steps.
    """
    HALVES: gl.constexpr = TILE.block_n // TILE.consumers // 64
    return restore(ring, (TILE.consumers * slot + WARPGROUP) * HALVES + half, parity, ROWS, GATED, FORMAT)


@gluon.jit
def _wait_for_slot(ring, slot, phase, TILE: gl.constexpr):
    mbarrier.wait(ring.full.index(slot), phase)
    if TILE.top_k is not None:
        # wgmma reads through the async proxy, which does not see what cp.async wrote before a fence.
        fence_async_shared()


@gluon.jit
def _start(fragment, ring, slot, product, slack_product, ROWS: gl.constexpr, SLACK: gl.constexpr):
    """Issues a fragment's products with a slot's rows, added to [64, ROWS] and [64, SLACK] fp32."""
    PARTS: gl.constexpr = 2 * ring.rows.shape[1] // ROWS
    STAGES: gl.constexpr = ring.rows.shape[0] // 2
    rows = reinterpret(ring.rows, ring.rows.dtype, [PARTS * STAGES, ROWS, BLOCK_K], ring.rows.layout)
    b = rows.index(PARTS * slot).permute((1, 0))  # [BLOCK_K, ROWS]
    product = warpgroup_mma(fragment, b, product, is_async=True)
    if SLACK > 0:
        slack_b = ring.slack_rows.index(slot).permute((1, 0))  # [BLOCK_K, SLACK]
        slack_product = warpgroup_mma(fragment, slack_b, slack_product, is_async=True)
    return product, slack_product


@gluon.jit
def _wait_one(product, slack_product, FRAGMENTS: gl.constexpr, SLACK: gl.constexpr):
    """Waits until the products of at most FRAGMENTS fragments are in flight."""
    if SLACK > 0:
        return warpgroup_mma_wait(2 * FRAGMENTS, deps=(product, slack_product))
    else:
        return warpgroup_mma_wait(FRAGMENTS, deps=(product,)), slack_product


@gluon.jit
def _wait_two(low, slack_low, high, slack_high, FRAGMENTS: gl.constexpr, SLACK: gl.constexpr):
    """As `_wait_one`, for the accumulators of both halves."""
    if SLACK > 0:
        return warpgroup_mma_wait(2 * FRAGMENTS, deps=(low, slack_low, high, slack_high))
    else:
        low, high = warpgroup_mma_wait(FRAGMENTS, deps=(low, high))
        return low, slack_low, high, slack_high


@gluon.jit
def _zeros(ROWS: gl.constexpr):
    return gl.zeros([64, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))


@gluon.jit
def multiply_one(
    ring,
    slot,
    phase,
    num_steps,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Multiplies a warpgroup's 64 columns of a tile from the next `num_steps` slots of the ring.

    Waits for each slot to be full and arrives at its `empty` once its product has ended. Fragments of even and odd
    steps alternate, and one iteration handles both, so that none is copied while a product reads it. No product is in
    flight when an iteration ends: ptxas would keep all fragments' registers live to the end and serialize products.

    Arguments as for `multiply` of `ring.py`, with at least three steps, whether the columns are gates and ups,
    and a `PackedFormat`.

    Returns:
        [64, ROWS] fp32; [64, SLACK] fp32, or the first again without slack; the next slot and its phase.
    """
    product = _zeros(ROWS)
    slack_product = product
    if SLACK > 0:
        slack_product = _zeros(SLACK)
    zero = gl.to_tensor(0)
    one = gl.to_tensor(1)
    pairs = (num_steps - 1) // 2
    # Without this the accumulators are copied around a loop that may be empty.
    gl.assume(pairs > 0)
    _wait_for_slot(ring, slot, phase, TILE)
    even = _fragment(ring, slot, 0, zero, WARPGROUP, ROWS, TILE, GATED, FORMAT)
    for _ in range(pairs):
        second, second_phase = next_slot(slot, phase, TILE.stages)
        product, slack_product = _start(even, ring, slot, product, slack_product, ROWS, SLACK)
        _wait_for_slot(ring, second, second_phase, TILE)
        odd = _fragment(ring, second, 0, one, WARPGROUP, ROWS, TILE, GATED, FORMAT)
        product, slack_product = _start(odd, ring, second, product, slack_product, ROWS, SLACK)
        product, slack_product = _wait_one(product, slack_product, 1, SLACK)
        mbarrier.arrive(ring.empty.index(slot))
        slot, phase = next_slot(second, second_phase, TILE.stages)
        _wait_for_slot(ring, slot, phase, TILE)
        even = _fragment(ring, slot, 0, zero, WARPGROUP, ROWS, TILE, GATED, FORMAT)
        product, slack_product = _wait_one(product, slack_product, 0, SLACK)
        mbarrier.arrive(ring.empty.index(second))
    product, slack_product = _start(even, ring, slot, product, slack_product, ROWS, SLACK)
    if not TILE.odd:
        second, second_phase = next_slot(slot, phase, TILE.stages)
        _wait_for_slot(ring, second, second_phase, TILE)
        odd = _fragment(ring, second, 0, one, WARPGROUP, ROWS, TILE, GATED, FORMAT)
        product, slack_product = _wait_one(product, slack_product, 0, SLACK)
        mbarrier.arrive(ring.empty.index(slot))
        product, slack_product = _start(odd, ring, second, product, slack_product, ROWS, SLACK)
        slot = second
        phase = second_phase
    product, slack_product = _wait_one(product, slack_product, 0, SLACK)
    mbarrier.arrive(ring.empty.index(slot))
    slot, phase = next_slot(slot, phase, TILE.stages)
    return product, slack_product, slot, phase


@gluon.jit
def multiply_two(
    ring,
    slot,
    phase,
    num_steps,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    GATED: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Multiplies a warpgroup's 128 columns of a tile as two halves, whose fragments alternate.

    Arguments as for `multiply_one`.

    Returns:
        As `multiply_one`, with the products of both halves in place of one.
    """
    low = _zeros(ROWS)
    high = _zeros(ROWS)
    slack_low = low
    slack_high = high
    if SLACK > 0:
        slack_low = _zeros(SLACK)
        slack_high = _zeros(SLACK)
    _wait_for_slot(ring, slot, phase, TILE)
    first = _fragment(ring, slot, 0, gl.to_tensor(0), WARPGROUP, ROWS, TILE, GATED, FORMAT)
    gl.assume(num_steps > 1)
    for k in range(num_steps - 1):
        low, slack_low = _start(first, ring, slot, low, slack_low, ROWS, SLACK)
        second = _fragment(ring, slot, 1, k & 1, WARPGROUP, ROWS, TILE, GATED, FORMAT)
        high, slack_high = _start(second, ring, slot, high, slack_high, ROWS, SLACK)
        low, slack_low, high, slack_high = _wait_two(low, slack_low, high, slack_high, 1, SLACK)
        following, phase = next_slot(slot, phase, TILE.stages)
        _wait_for_slot(ring, following, phase, TILE)
        first = _fragment(ring, following, 0, (k + 1) & 1, WARPGROUP, ROWS, TILE, GATED, FORMAT)
        low, slack_low, high, slack_high = _wait_two(low, slack_low, high, slack_high, 0, SLACK)
        mbarrier.arrive(ring.empty.index(slot))
        slot = following
    low, slack_low = _start(first, ring, slot, low, slack_low, ROWS, SLACK)
    second = _fragment(ring, slot, 1, (num_steps - 1) & 1, WARPGROUP, ROWS, TILE, GATED, FORMAT)
    high, slack_high = _start(second, ring, slot, high, slack_high, ROWS, SLACK)
    low, slack_low, high, slack_high = _wait_two(low, slack_low, high, slack_high, 0, SLACK)
    mbarrier.arrive(ring.empty.index(slot))
    slot, phase = next_slot(slot, phase, TILE.stages)
    return low, slack_low, high, slack_high, slot, phase


_GUARD = gl.constexpr(GUARD_ROWS)


@gluon.jit
def _scaled(x, output, expert, column, UNIT: gl.constexpr, GATED: gl.constexpr):
    """Multiplies [COLUMNS, ROWS] by the scales of the weight's rows and UNIT, the unit of dequantized weights."""
    if output.row_scale is not None:
        at = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        if GATED:
            at = at // 16 * 16 + at % 8 * 2 + at // 8 % 2
        at += column
        # Columns past the last are dropped when stored.
        value = gl.load(
            output.row_scale + expert.to(gl.int64) * output.num_columns + at, mask=at < output.num_columns, other=0.0
        )
        return x * (value * UNIT)[:, None]
    elif UNIT != 1.0:
        return x * UNIT
    else:
        return x


@gluon.jit
def _store_half(
    product,
    slack_product,
    output,
    tile,
    half,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Scales and stores the products of 64 columns, block number `half` of the matrix."""
    place = Place(
        expert=tile.expert,
        column=half * 64,
        anchor=tile.row + tile.num_rows,
        row=_GUARD - tile.num_rows,
        out_column=half * output.out.block_shape[2],
    )
    UNIT: gl.constexpr = 1.0 if FORMAT.element == "float4_e2m1fn" else 64.0
    product = _scaled(product, output, tile.expert, half * 64, UNIT, ACTIVATION.gated)
    store_tile(product, output, place, WARPGROUP, 0, ACTIVATION)
    if SLACK > 0:
        slack_product = _scaled(slack_product, output, tile.expert, half * 64, UNIT, ACTIVATION.gated)
        store_tile(slack_product, output, place, WARPGROUP, ROWS, ACTIVATION)


@gluon.jit
def consume_packed_tile(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and stores a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    GATED: gl.constexpr = ACTIVATION.gated
    FORMAT: gl.constexpr = TILE.packed
    HALVES: gl.constexpr = TILE.block_n // TILE.consumers // 64
    half = (TILE.consumers * tile.column_tile + WARPGROUP) * HALVES
    # fmt: off
    if HALVES == 1:
        product, slack_product, slot, phase = multiply_one(
            ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, TILE, GATED, FORMAT)
        _store_half(product, slack_product, output, tile, half, WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION)
    else:
        low, slack_low, high, slack_high, slot, phase = multiply_two(
            ring, slot, phase, num_steps, WARPGROUP, ROWS, SLACK, TILE, GATED, FORMAT)
        _store_half(low, slack_low, output, tile, half, WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION)
        _store_half(high, slack_high, output, tile, half + 1, WARPGROUP, ROWS, SLACK, FORMAT, ACTIVATION)
    # fmt: on
    return slot, phase
