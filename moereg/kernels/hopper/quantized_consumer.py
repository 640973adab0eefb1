"""The consumers of a Hopper grouped GEMM of 8-bit codes, in Triton's Gluon: multiply a tile, scale, activate, store.

A tile is 128 rows of activations by two halves of 128 rows of a weight: gate and up of the same columns, or 256 columns
in a row. Rows of activations are wgmma's M side, 64 for each of two warpgroups, so that a thread needs the scales of
two of them only, and the columns of a group are in one warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M
from moereg.kernels.hopper.consumer import activate, barrier, store_box
from moereg.kernels.hopper.ring import locate, next_slot, reinterpret
from moereg.kernels.hopper.turns import NO_TILE, take_tile
from moereg.kernels.sizes import GUARD_ROWS

# Rows of a tile, and of a warpgroup; columns of a half, which is a block of scales and a group of codes.
ROWS = gl.constexpr(QUANTIZED_BLOCK_M)
OWN_ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)

# Codes of the reduced dimension per step: 128 bytes, the widest swizzle, and one group of scales.
STEP = gl.constexpr(128)

_GUARD = gl.constexpr(GUARD_ROWS)


@gluon.jit
def _half_product(own_rows, weights, product):
    """Codes times codes of one step, [OWN_ROWS, COLUMNS]; waits for it.

    `product` is overwritten: what a product is kept in is named, since it has room for only one besides the sums.
    """
    product = warpgroup_mma(own_rows, weights.permute((1, 0)), product, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _load_scalar(shared):
    return gl.sum(shared.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _multiply_grouped(ring, slot, phase, num_k, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """Both halves of a warpgroup's tile, fp32, scaled by what changes from step to step, and where the ring stands.

    Tensor cores keep 14 bits or so of a sum of 8-bit floats, so each step's product is added up outside of them.
    """
    rows, weights, row_scales, half_scales, full, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([OWN_ROWS, COLUMNS], gl.float32, LAYOUT)
    high = gl.zeros([OWN_ROWS, COLUMNS], gl.float32, LAYOUT)
    product = gl.zeros([OWN_ROWS, COLUMNS], gl.float32, LAYOUT)
    gl.assume(num_k > 0)
    for _ in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        own_rows = rows.index(2 * slot + WARPGROUP)
        row_scale = row_scales.index(2 * slot + WARPGROUP).load(gl.SliceLayout(1, LAYOUT))
        low_scale, high_scale = _load_scalar(half_scales.index(2 * slot)), _load_scalar(half_scales.index(2 * slot + 1))
        product = _half_product(own_rows, weights.index(2 * slot), product)
        low += product * (row_scale * low_scale)[:, None]
        product = _half_product(own_rows, weights.index(2 * slot + 1), product)
        mbarrier.arrive(empty.index(slot))
        high += product * (row_scale * high_scale)[:, None]
        slot, phase = next_slot(slot, phase, STAGES)
    return low, high, slot, phase


@gluon.jit
def _multiply_plain(ring, slot, phase, num_k, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """Both halves of a warpgroup's tile, fp32, not scaled; sums of int8 are exact, those of floats as above."""
    rows, weights, _, _, full, empty = ring
    EXACT: gl.constexpr = rows.dtype == gl.int8
    TOTAL: gl.constexpr = gl.int32 if EXACT else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    high = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    if not EXACT:
        product = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    gl.assume(num_k > 0)
    for _ in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        own_rows = rows.index(2 * slot + WARPGROUP)
        low_weights, high_weights = weights.index(2 * slot), weights.index(2 * slot + 1)
        if EXACT:
            low = warpgroup_mma(own_rows, low_weights.permute((1, 0)), low, is_async=True)
            high = warpgroup_mma(own_rows, high_weights.permute((1, 0)), high, is_async=True)
            low, high = warpgroup_mma_wait(0, deps=(low, high))
            mbarrier.arrive(empty.index(slot))
        else:
            product = _half_product(own_rows, low_weights, product)
            low += product
            product = _half_product(own_rows, high_weights, product)
            mbarrier.arrive(empty.index(slot))
            high += product
        slot, phase = next_slot(slot, phase, STAGES)
    return low.to(gl.float32), high.to(gl.float32), slot, phase


@gluon.jit
def _skip(ring, slot, phase, num_k, STAGES: gl.constexpr):
    """Releases what a warpgroup without rows does not multiply."""
    _, _, _, _, full, empty = ring
    for _ in range(num_k):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _scale_and_bias(x, row_scale, column_scales, bias, first, num_columns, GROUPED: gl.constexpr, LAYOUT: gl.constexpr):
    """A half's product with the scales that do not change along a row, and the bias.

    Args:
        x: [OWN_ROWS, COLUMNS] fp32.
        row_scale: [OWN_ROWS], where not grouped.
        column_scales: pointer to the expert's first, one a column.
        bias: pointer to the expert's first, or None.
        first: row of the expert's weight that the half begins with.
        num_columns: rows of the expert's weight.
    """
    columns = gl.minimum(first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), num_columns - 1)
    if not GROUPED:
        x = x * row_scale[:, None] * gl.load(column_scales + columns)[None, :]
    if bias is not None:
        x += gl.load(bias + columns).to(gl.float32)[None, :]
    return x


@gluon.jit
def _activate_halves(gate, up, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr):
    if LIMIT is not None:
        # Comparisons keep NaN, which a minimum would replace by the limit.
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return activate(gate, ACTIVATION, ALPHA) * (up + BETA)


@gluon.jit
def _encode(x, MAX_CODE: gl.constexpr, DTYPE: gl.constexpr):
    """Codes of [OWN_ROWS, COLUMNS] fp32, one group a row, and their scales; as `triton_quantize.quantize_tile`."""
    bits = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = gl.div_rn(bits.to(gl.float32, bitcast=True), gl.full_like(bits, MAX_CODE, dtype=gl.float32))
    scale = gl.where(bits == 0, 1.0, gl.maximum(scale, 1.1754943508222875e-38))
    scale = gl.where(bits >= 0x7F800000, float("nan"), scale)
    # As `triton_quantize.divide`.
    reciprocal = gl.broadcast(gl.expand_dims(gl.div_rn(gl.full_like(scale, 1.0), scale), 1), x)[0]
    values = x * reciprocal
    surplus = gl.fma(values, gl.broadcast(gl.expand_dims(scale, 1), x)[0], -x)
    values = gl.fma(surplus, -reciprocal, values)
    values = gl.where(values > MAX_CODE, MAX_CODE, gl.where(values < -MAX_CODE, -MAX_CODE, values))
    return values.to(DTYPE), scale


@gluon.jit
def _store_codes(y, out, out_scale, staging, row, rows, group, stride, WARPGROUP, LAYOUT: gl.constexpr):
    """Stores a half as codes through a warpgroup's whole part of `staging`, and the scales of its rows."""
    codes, scale = _encode(y, 448.0, out.dtype)
    buffer = staging.index(WARPGROUP)
    tma.store_wait(0)
    barrier()
    buffer.store(codes)
    fence_async_shared()
    barrier()
    store_box(out, [row + rows, _GUARD - rows + WARPGROUP * OWN_ROWS, group * COLUMNS], box_of(buffer, out))
    own = WARPGROUP * OWN_ROWS + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, LAYOUT))
    # Scales of a group lie together, as they are read.
    gl.store(out_scale + group.to(gl.int64) * stride + row + own, scale, mask=own < rows)


@gluon.jit
def box_of(buffer, out):
    """A buffer of `staging` as the tensor map's boxes are."""
    return reinterpret(buffer, out.dtype, out.block_shape, out.layout)


@gluon.jit
def _store_half(
    y, out, staging, row, rows, column, WARPGROUP: gl.constexpr, FIRST: gl.constexpr, BUFFERS: gl.constexpr
):
    """Stores columns of a tile, the first of which is its column FIRST, chunk by chunk through a warpgroup's buffers.

    Rows past the end are dropped.
    """
    LENGTH: gl.constexpr = y.shape[1]
    CHUNK: gl.constexpr = out.block_shape[2]
    if LENGTH > CHUNK:
        low, high = gl.split(gl.permute(gl.reshape(y, (OWN_ROWS, 2, LENGTH // 2)), (0, 2, 1)))
        _store_half(low, out, staging, row, rows, column, WARPGROUP, FIRST, BUFFERS)
        _store_half(high, out, staging, row, rows, column + LENGTH // 2, WARPGROUP, FIRST + LENGTH // 2, BUFFERS)
    else:
        buffer = staging.index(BUFFERS * WARPGROUP + FIRST // CHUNK % BUFFERS)
        # The others may still be read.
        tma.store_wait(BUFFERS - 1)
        barrier()
        buffer.store(y.to(out.dtype))
        fence_async_shared()
        barrier()
        at = [row + rows, _GUARD - rows + WARPGROUP * OWN_ROWS, column]
        store_box(out, at, box_of(buffer, out))


@gluon.jit
def consume_codes(
    out,
    out_scale,
    row_scale,
    column_scale,
    bias,
    ring,
    turns,
    staging,
    plan,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    stride_expert_scale,
    stride_out_scale,
    WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUPED: gl.constexpr,
    ROUNDED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    MASK_N: gl.constexpr,
):
    """Multiplies and stores one warpgroup's rows of every tile of the program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    own = WARPGROUP * OWN_ROWS + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, LAYOUT))
    tile, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile != NO_TILE:
        expert, tile_n, row, rows = locate(tile, plan, num_tiles_n, group, ROWS, 0)
        if rows > WARPGROUP * OWN_ROWS:
            half_columns = num_columns // 2 if GATED else num_columns
            low_row = tile_n * COLUMNS if GATED else tile_n * 2 * COLUMNS
            high_row = half_columns + low_row if GATED else low_row + COLUMNS
            own_expert = expert.to(gl.int64)
            own_column_scale = column_scale + own_expert * stride_expert_scale
            if GROUPED:
                low, high, slot, phase = _multiply_grouped(ring, slot, phase, num_k, WARPGROUP, STAGES)
                own_row_scale = None
            else:
                low, high, slot, phase = _multiply_plain(ring, slot, phase, num_k, WARPGROUP, STAGES)
                own_row_scale = gl.load(row_scale + (row + gl.minimum(own, rows - 1)))
            own_bias = None
            if bias is not None:
                own_bias = bias + own_expert * num_columns
            # fmt: off
            low = _scale_and_bias(low, own_row_scale, own_column_scale, own_bias, low_row, num_columns,
                                  GROUPED, LAYOUT)
            high = _scale_and_bias(high, own_row_scale, own_column_scale, own_bias, high_row, num_columns,
                                   GROUPED, LAYOUT)
            # fmt: on
            if GATED:
                y = _activate_halves(low, high, ACTIVATION, ALPHA, BETA, LIMIT)
                if MASK_N:
                    at = low_row + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
                    y = gl.where((at < half_columns)[None, :], y, 0.0)
                if out_scale is not None:
                    y = y.to(ROUNDED).to(gl.float32)
                    _store_codes(y, out, out_scale, staging, row, rows, tile_n, stride_out_scale, WARPGROUP, LAYOUT)
                else:
                    _store_half(y, out, staging, row, rows, low_row, WARPGROUP, 0, BUFFERS)
            else:
                if ACTIVATION is not None:
                    low = activate(low, ACTIVATION, ALPHA)
                    high = activate(high, ACTIVATION, ALPHA)
                    if MASK_N:
                        at = low_row + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
                        low = gl.where((at < half_columns)[None, :], low, 0.0)
                        high = gl.where((at + COLUMNS < half_columns)[None, :], high, 0.0)
                if out_scale is not None:
                    low = low.to(ROUNDED).to(gl.float32)
                    high = high.to(ROUNDED).to(gl.float32)
                    # fmt: off
                    _store_codes(low, out, out_scale, staging, row, rows, 2 * tile_n, stride_out_scale, WARPGROUP,
                                 LAYOUT)
                    if high_row < half_columns:
                        _store_codes(high, out, out_scale, staging, row, rows, 2 * tile_n + 1, stride_out_scale,
                                     WARPGROUP, LAYOUT)
                    # fmt: on
                else:
                    _store_half(low, out, staging, row, rows, low_row, WARPGROUP, 0, BUFFERS)
                    _store_half(high, out, staging, row, rows, high_row, WARPGROUP, COLUMNS, BUFFERS)
        else:
            slot, phase = _skip(ring, slot, phase, num_k, STAGES)
        tile, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)
