"""The consumers of an 8-bit Hopper grouped GEMM, in Triton's Gluon: multiply a tile, scale, activate, store.

Rows of activations are wgmma's M side, 64 for each of two warpgroups, so that a thread needs the scales of only two
rows, and the columns of a group are in one warp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.hopper.consumer import barrier, load_weights, store_box
from moereg.kernels.hopper.quantized_producer import BLOCK_K, BLOCK_M, COLUMNS, OWN_ROWS, first_columns
from moereg.kernels.hopper.ring import NO_TILE, locate, next_slot, reinterpret, take_tile
from moereg.kernels.sizes import GUARD_ROWS

# Columns of a piece.
_PIECE = gl.constexpr(64)


@gluon.jit
def _load_scalar(shared):
    """Loads the only element of a tensor in shared memory."""
    return gl.sum(shared.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _start(rows, ring, piece, product):
    """Starts one step's product with a piece of the weights, overwriting `product` [OWN_ROWS, _PIECE]."""
    STAGES: gl.constexpr = ring.weights.shape[0] // 2
    pieces = reinterpret(ring.weights, ring.weights.dtype, [4 * STAGES, _PIECE, BLOCK_K], ring.weights.layout)
    return warpgroup_mma(rows, pieces.index(piece).permute((1, 0)), product, use_acc=False, is_async=True)


@gluon.jit
def _join(first, second, LAYOUT: gl.constexpr):
    """Joins two pieces [OWN_ROWS, _PIECE] to a half [OWN_ROWS, COLUMNS]; only renames registers."""
    both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (OWN_ROWS, COLUMNS))
    return gl.convert_layout(both, LAYOUT)


@gluon.jit
def multiply_pieces(
    ring,  # a `CodeRing` as its consumers read it
    slot,  # the first slot
    phase,  # its phase
    num_steps,  # steps along the reduced dimension, at least one
    lead,  # [1, 1] barrier at which the first warpgroup arrives after the first step of each tile; unused unless LEADS
    # [OWN_ROWS] fp32 that multiplies the row scales, or None. Multiplying the results instead would spill 136 bytes a
    # thread
    weight,
    WARPGROUP: gl.constexpr,  # which rows
    STAGES: gl.constexpr,  # slots of the ring
    LEADS: gl.constexpr,  # whether the first warpgroup runs a step ahead
    LAYOUT: gl.constexpr,  # layout of the results
):
    """Multiplies and scales both halves of a warpgroup's rows from the next `num_steps` slots of the ring.

    Waits for each slot to be full and arrives at its `empty` once its products have ended. Tensor cores keep only about
    14 bits of a sum of 8-bit floats, so each step's product is accumulated outside of them while they continue: 64 rows
    by 256 columns are computed in four pieces of 64 columns, two in flight at a time. While one is multiplied, the
    other is scaled and added to the sums. Registers suffice for this, since two pieces are as large as one half. Rows
    are wgmma's register operand, loaded once per step; from shared memory they would be read once per piece.

    Returns:
        [OWN_ROWS, COLUMNS] fp32 of either half; the next slot and its phase.
    """
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PIECE, 32])
    low0 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    low1 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    high0 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    high1 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    first = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    second = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    late_scale = gl.zeros([OWN_ROWS], gl.float32, gl.SliceLayout(1, PART))
    gl.assume(num_steps > 0)
    for k in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        own_rows = ring.rows.index(2 * slot + WARPGROUP)  # [OWN_ROWS, BLOCK_K]
        own_rows = own_rows.load(gl.DotOperandLayout(0, PART, 4))
        row_scale = ring.row_scales.index(2 * slot + WARPGROUP).load(gl.SliceLayout(1, PART))  # [OWN_ROWS]
        if weight is not None:
            row_scale *= gl.convert_layout(weight, gl.SliceLayout(1, PART))
        low_scale = row_scale * _load_scalar(ring.half_scales.index(2 * slot))
        high_scale = row_scale * _load_scalar(ring.half_scales.index(2 * slot + 1))
        first = _start(own_rows, ring, 4 * slot, first)
        # The previous step's last piece. Accumulated at that step's end, it would not fit in registers.
        high1 += second * late_scale[:, None]
        second = _start(own_rows, ring, 4 * slot + 1, second)
        first = warpgroup_mma_wait(1, deps=(first,))
        low0 += first * low_scale[:, None]
        first = _start(own_rows, ring, 4 * slot + 2, first)
        second = warpgroup_mma_wait(1, deps=(second,))
        low1 += second * low_scale[:, None]
        second = _start(own_rows, ring, 4 * slot + 3, second)
        first = warpgroup_mma_wait(1, deps=(first,))
        high0 += first * high_scale[:, None]
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(ring.empty.index(slot))
        if LEADS:
            if WARPGROUP == 0:
                mbarrier.arrive(lead.index(0), pred=k == 0)
        late_scale = high_scale
        slot, phase = next_slot(slot, phase, STAGES)
    high1 += second * late_scale[:, None]
    return _join(low0, low1, LAYOUT), _join(high0, high1, LAYOUT), slot, phase


_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def activate_fast(gate, up, ACTIVATION: gl.constexpr):
    """As `activate_halves`, to within a few ulp of fp32; zero where a sigmoid is below 2**-126.

    64 numbers a thread are activated, rounded and quantized while no product runs. Divisions and exponentials that
    handle subnormal numbers take 17 instructions a number instead of 6.

    Infinite and NaN gates give what `activate_halves` gives; minus infinity gives NaN.
    """
    NAME: gl.constexpr = ACTIVATION.name
    ALPHA: gl.constexpr = ACTIVATION.alpha
    BETA: gl.constexpr = ACTIVATION.beta
    LIMIT: gl.constexpr = ACTIVATION.limit
    if NAME == "silu" or NAME == "swigluoai":
        if LIMIT is not None:
            # gl.where keeps NaN; a minimum would replace it by the limit.
            gate = gl.where(gate > LIMIT, LIMIT, gate)
            up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
        power = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * (-ALPHA * _LOG2_E)], dtype=gl.float32, is_pure=True, pack=1
        )
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
        )
        return gate * inverse * (up + BETA)
    else:
        return activate_halves(gate, up, ACTIVATION)


@gluon.jit
def round_pairs(x, DTYPE: gl.constexpr):
    """Rounds fp32 `x` to a 16-bit DTYPE and back to fp32: the same bits as two conversions.

    Conversions of single numbers to 16 bits run at the rate of exponentials.
    """
    if DTYPE == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,f,f",
            [x],
            dtype=gl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(gl.float32)


_GUARD = gl.constexpr(GUARD_ROWS)


@gluon.jit
def _half_product(own_rows, weights, product):
    """Overwrites `product` [OWN_ROWS, COLUMNS] with the product of one step and half, and waits for it.

    The caller passes `product` in because registers have room for only one besides the sums.
    """
    product = warpgroup_mma(own_rows, weights.permute((1, 0)), product, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _multiply_plain(ring, slot, phase, num_steps, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """As `multiply_pieces`, without scaling and one half at a time; int8 sums are exact."""
    EXACT: gl.constexpr = ring.rows.dtype == gl.int8
    TOTAL: gl.constexpr = gl.int32 if EXACT else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    high = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    if not EXACT:
        product = gl.zeros([OWN_ROWS, COLUMNS], TOTAL, LAYOUT)
    gl.assume(num_steps > 0)
    for _ in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        own_rows = ring.rows.index(2 * slot + WARPGROUP)  # [OWN_ROWS, BLOCK_K]
        low_weights = ring.weights.index(2 * slot)  # [COLUMNS, BLOCK_K]
        high_weights = ring.weights.index(2 * slot + 1)  # [COLUMNS, BLOCK_K]
        if EXACT:
            low = warpgroup_mma(own_rows, low_weights.permute((1, 0)), low, is_async=True)
            high = warpgroup_mma(own_rows, high_weights.permute((1, 0)), high, is_async=True)
            low, high = warpgroup_mma_wait(0, deps=(low, high))
            mbarrier.arrive(ring.empty.index(slot))
        else:
            product = _half_product(own_rows, low_weights, product)
            low += product
            product = _half_product(own_rows, high_weights, product)
            mbarrier.arrive(ring.empty.index(slot))
            high += product
        slot, phase = next_slot(slot, phase, STAGES)
    return low.to(gl.float32), high.to(gl.float32), slot, phase


@gluon.jit
def _skip(ring, slot, phase, num_steps, STAGES: gl.constexpr):
    """Waits for and releases the slots of a tile in which a warpgroup has no rows."""
    for _ in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.arrive(ring.empty.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


class CodeOutput(NamedTuple):
    """The memory that 8-bit consumers store to, and what their epilogue reads."""

    out: Any  # map of the compact rows behind the guard, clipped at an expert's end, boxes [1, OWN_ROWS, columns]
    out_scale: Any  # pointer to the scales of `out`, or None where it is not quantized
    static_scale: Any  # pointer to static scales of `out`, per expert or one for all; None where they are dynamic
    staging: Any  # [2 * buffers, OWN_ROWS, columns] staged stores
    stride_scale: Any  # from one group's scales of `out` to the next group's
    stride_static: Any  # from one expert's static scale to the next one's: 1, or 0 where all share one
    bias: Any  # pointer to [E, num_columns], or None
    row_weights: Any  # `RowWeights`
    num_columns: Any  # rows of an expert's weight


class CodeScales(NamedTuple):
    """A product's scales. Consumers read them, or, where they change from step to step, the producer does."""

    row: Any  # pointer to one scale per row, of the first step where grouped
    column: Any  # pointer to one scale per column, or per `group_rows` of them
    group_rows: Any  # rows of a weight that share a scale
    stride_expert: Any  # from one expert's column scales to the next one's


@gluon.jit
def _scale_and_bias(
    x,  # [OWN_ROWS, COLUMNS] fp32
    row_scale,  # [OWN_ROWS] where not grouped; already times the routing weights, if any
    column_scales,  # pointer to the expert's first scale, one per column or one for a half
    bias,  # pointer to the expert's first element, or None
    weight,  # [OWN_ROWS] routing weights, which multiply the bias, or None
    first,  # first row of the half in the expert's weight
    num_columns,  # rows of the expert's weight
    group_rows,  # rows of it that share a scale
    TILE: gl.constexpr,  # a `CodeTile`
    LAYOUT: gl.constexpr,
):
    """Multiplies a half's product by the scales that do not change along a row, and adds the bias."""
    columns = gl.minimum(first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), num_columns - 1)
    if not TILE.grouped:
        if TILE.by_column:
            x = x * row_scale[:, None] * gl.load(column_scales + columns)[None, :]
        else:
            # Gate's rows, and up's, have one scale each.
            x = x * (row_scale * gl.load(column_scales + gl.minimum(first, num_columns - 1) // group_rows))[:, None]
    if bias is not None:
        value = gl.load(bias + columns).to(gl.float32)[None, :]
        x += value if weight is None else value * weight[:, None]
    return x


@gluon.jit
def _encode(x, MAX_CODE: gl.constexpr, DTYPE: gl.constexpr):
    """Quantizes `x` [OWN_ROWS, COLUMNS] fp32, one group per row; returns the values and their scales [OWN_ROWS].

    The same bits as `quantize_tile` of `kernels/quantized/codes.py`: numbers that rounding lifts above MAX_CODE are
    left to the conversion, which saturates (`cvt.rn.satfinite`) and keeps NaN.
    """
    bits = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # [OWN_ROWS]
    scale = gl.div_rn(bits.to(gl.float32, bitcast=True), gl.full_like(bits, MAX_CODE, dtype=gl.float32))
    scale = gl.where(bits == 0, 1.0, gl.maximum(scale, 1.1754943508222875e-38))
    scale = gl.where(bits >= 0x7F800000, float("nan"), scale)
    # As `divide` of `kernels/quantized/codes.py`.
    reciprocal = gl.broadcast(gl.expand_dims(gl.div_rn(gl.full_like(scale, 1.0), scale), 1), x)[0]
    values = x * reciprocal
    surplus = gl.fma(values, gl.broadcast(gl.expand_dims(scale, 1), x)[0], -x)
    values = gl.fma(surplus, -reciprocal, values)
    return values.to(DTYPE), scale


@gluon.jit
def _divide_by_given(y, given, scale):
    """Divides `y` [OWN_ROWS, COLUMNS] by a static scale, which `scale` [OWN_ROWS] repeats.

    The same bits as the function of this name in `kernels/quantized/rows_sorted.py`.
    """
    divisor = gl.broadcast(gl.expand_dims(scale, 1), y)[0]
    if (given > 8.673617379884035e-19) & (given < 1.152921504606847e18):
        reciprocal = gl.broadcast(gl.expand_dims(gl.div_rn(gl.full_like(scale, 1.0), scale), 1), y)[0]
        values = y * reciprocal
        surplus = gl.fma(values, divisor, -y)
        quotient = gl.where(gl.abs(values) < 4096.0, gl.fma(surplus, -reciprocal, values), values)
    else:
        quotient = gl.div_rn(y, divisor)
    return quotient


@gluon.jit
def _store_codes(y, output, tile, group, WARPGROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Quantizes `y` [OWN_ROWS, COLUMNS], one group per row, and stores it through a warpgroup's staging, with scales.

    The tensor map drops rows past the expert's end; a mask drops their scales.
    """
    out = output.out
    if output.static_scale is None:
        codes, scale = _encode(y, 448.0, out.dtype)  # [OWN_ROWS, COLUMNS], [OWN_ROWS]
    else:
        given = gl.load(output.static_scale + tile.expert * output.stride_static)
        scale = gl.zeros([OWN_ROWS], gl.float32, gl.SliceLayout(1, LAYOUT)) + given  # [OWN_ROWS]
        # The conversion saturates, and keeps NaN.
        codes = _divide_by_given(y, given, scale).to(out.dtype)  # [OWN_ROWS, COLUMNS]
    buffer = output.staging.index(WARPGROUP)
    tma.store_wait(0)
    barrier()
    buffer.store(codes)
    fence_async_shared()
    barrier()
    at = [tile.row + tile.num_rows, _GUARD - tile.num_rows + WARPGROUP * OWN_ROWS, group * COLUMNS]
    store_box(out, at, _box_of(buffer, out))
    own = WARPGROUP * OWN_ROWS + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, LAYOUT))  # [OWN_ROWS]
    # A group's scales lie together, as the next product reads them.
    gl.store(
        output.out_scale + group.to(gl.int64) * output.stride_scale + tile.row + own, scale, mask=own < tile.num_rows
    )


@gluon.jit
def _box_of(buffer, out):
    """Views a buffer of `staging` as a box of a tensor map."""
    return reinterpret(buffer, out.dtype, out.block_shape, out.layout)


@gluon.jit
def _store_half(y, output, tile, column, WARPGROUP: gl.constexpr, FIRST: gl.constexpr, BUFFERS: gl.constexpr):
    """Stores `y` [OWN_ROWS, up to COLUMNS] from `column` on, chunk by chunk through a warpgroup's buffers.

    FIRST is the column of the tile that `y` begins with. The tensor map drops rows past the expert's end.
    """
    out = output.out
    LENGTH: gl.constexpr = y.shape[1]
    CHUNK: gl.constexpr = out.block_shape[2]
    if LENGTH > CHUNK:
        # [OWN_ROWS, LENGTH // 2]
        low, high = gl.split(gl.permute(gl.reshape(y, (OWN_ROWS, 2, LENGTH // 2)), (0, 2, 1)))
        _store_half(low, output, tile, column, WARPGROUP, FIRST, BUFFERS)
        _store_half(high, output, tile, column + LENGTH // 2, WARPGROUP, FIRST + LENGTH // 2, BUFFERS)
    else:
        buffer = output.staging.index(BUFFERS * WARPGROUP + FIRST // CHUNK % BUFFERS)  # [OWN_ROWS, CHUNK]
        # The stores from the other buffers may be in flight.
        tma.store_wait(BUFFERS - 1)
        barrier()
        buffer.store(y.to(out.dtype))
        fence_async_shared()
        barrier()
        at = [tile.row + tile.num_rows, _GUARD - tile.num_rows + WARPGROUP * OWN_ROWS, column]
        store_box(out, at, _box_of(buffer, out))


@gluon.jit
def consume_codes(
    output,  # a `CodeOutput`
    scales,  # `CodeScales`
    ring,  # a `CodeRing` as `operands_of` returns it
    turns,  # `Turns`
    lead,  # [1, 1] barrier at which the first warpgroup arrives once per tile, after its first step
    order,  # a `TileOrder`
    num_steps,  # steps along the reduced dimension
    WARPGROUP: gl.constexpr,  # 0 or 1: which half of the rows
    TILE: gl.constexpr,  # a `CodeTile`
    ACTIVATION: gl.constexpr,  # `ActivationConstant`
):
    """Multiplies and stores one warpgroup's rows of every tile of the program. Run by four warps.

    Waits for a tile to be announced and for each slot of the ring to be full; reads the ring, `order`, the bias and
    the scales that do not change along a row; writes the staged stores and, through these, the output and its scales.
    """
    GATED: gl.constexpr = ACTIVATION.gated
    STAGES: gl.constexpr = TILE.stages
    LEADS: gl.constexpr = TILE.leads
    ROUNDED: gl.constexpr = TILE.rounded
    num_columns = output.num_columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    own = WARPGROUP * OWN_ROWS + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, LAYOUT))  # [OWN_ROWS]
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    if LEADS:
        lead_phase = gl.to_tensor(0)
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, BLOCK_M, 0)
        column_tile = tile.column_tile
        if tile.num_rows > WARPGROUP * OWN_ROWS:
            half_columns = num_columns // 2 if GATED else num_columns
            low_column, high_column = first_columns(column_tile, num_columns, GATED)
            own_expert = tile.expert.to(gl.int64)
            own_column_scale = scales.column + own_expert * scales.stride_expert
            if LEADS:
                if WARPGROUP == 1:
                    mbarrier.wait(lead.index(0), lead_phase)
            weight = None
            if output.row_weights.topk_weights is not None:
                weight = load_weights(output.row_weights, tile.row + gl.minimum(own, tile.num_rows - 1))  # [OWN_ROWS]
            if TILE.grouped:
                low, high, slot, phase = multiply_pieces(
                    ring, slot, phase, num_steps, lead, weight, WARPGROUP, STAGES, LEADS, LAYOUT
                )
                own_row_scale = None
            else:
                low, high, slot, phase = _multiply_plain(ring, slot, phase, num_steps, WARPGROUP, STAGES)
                own_row_scale = gl.load(scales.row + (tile.row + gl.minimum(own, tile.num_rows - 1)))  # [OWN_ROWS]
                if weight is not None:
                    own_row_scale *= weight
            own_bias = None
            if output.bias is not None:
                own_bias = output.bias + own_expert * num_columns
            # [OWN_ROWS, COLUMNS] each
            # fmt: off
            low = _scale_and_bias(low, own_row_scale, own_column_scale, own_bias, weight, low_column, num_columns,
                                  scales.group_rows, TILE, LAYOUT)
            high = _scale_and_bias(high, own_row_scale, own_column_scale, own_bias, weight, high_column, num_columns,
                                   scales.group_rows, TILE, LAYOUT)
            # fmt: on
            if GATED:
                if output.out_scale is not None:
                    y = activate_fast(low, high, ACTIVATION)  # [OWN_ROWS, COLUMNS]
                else:
                    y = activate_halves(low, high, ACTIVATION)  # [OWN_ROWS, COLUMNS]
                if TILE.mask_n:
                    at = low_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
                    y = gl.where((at < half_columns)[None, :], y, 0.0)
                if output.out_scale is not None:
                    y = round_pairs(y, ROUNDED)
                    _store_codes(y, output, tile, column_tile, WARPGROUP, LAYOUT)
                else:
                    _store_half(y, output, tile, low_column, WARPGROUP, 0, TILE.buffers)
            else:
                if ACTIVATION.name is not None:
                    low = activate(low, ACTIVATION)
                    high = activate(high, ACTIVATION)
                    if TILE.mask_n:
                        at = low_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
                        low = gl.where((at < half_columns)[None, :], low, 0.0)
                        high = gl.where((at + COLUMNS < half_columns)[None, :], high, 0.0)
                if output.out_scale is not None:
                    low = low.to(ROUNDED).to(gl.float32)
                    high = high.to(ROUNDED).to(gl.float32)
                    _store_codes(low, output, tile, 2 * column_tile, WARPGROUP, LAYOUT)
                    if high_column < half_columns:
                        _store_codes(high, output, tile, 2 * column_tile + 1, WARPGROUP, LAYOUT)
                else:
                    _store_half(low, output, tile, low_column, WARPGROUP, 0, TILE.buffers)
                    _store_half(high, output, tile, high_column, WARPGROUP, COLUMNS, TILE.buffers)
        else:
            slot, phase = _skip(ring, slot, phase, num_steps, STAGES)
        if LEADS:
            lead_phase = lead_phase ^ 1
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)
