"""Loads rows and quantizes them in registers, in Triton, bit for bit as `moereg.quantize` does."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

TRITON_DTYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def load_rows(x, topk_weights, source, in_use, columns, size, stride):
    """Loads columns of the rows `source` of x as fp32, times their weights, with zeros from column `size` on.

    Args:
        source: [M, 1] rows of x; [1] and `columns` [N] also work.
        in_use: [M, 1], rows to read; None: all.
        columns: [1, N].
        size: K.
    """
    mask = columns < size
    if in_use is not None:
        mask = mask & in_use  # [M, N]
        # Rows not in use are not stored, so any weight will do.
        source = tl.where(in_use, source, 0)
    values = tl.load(x + source.to(tl.int64) * stride + columns, mask=mask, other=0.0).to(tl.float32)  # [M, N]
    if topk_weights is not None:
        # The reference rounds the weighted input to the dtype of x.
        values = (values * tl.load(topk_weights + source)).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def amax_bits(x, AXIS: tl.constexpr):
    """Bits of the largest magnitude along an axis. NaN has the largest bits, so it stays; a float maximum loses it."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def scale_of_bits(bits, MAX_CODE: tl.constexpr, E8M0: tl.constexpr):
    """Scales that map the largest magnitudes to the largest code.

    Returns:
        The divisor in fp32 and the value to store: the same, or the exponents as int32; both of the shape of `bits`.
    """
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MAX_CODE, tl.float32))
    if E8M0:
        # Round up to a power of two, at least 2^-127, which is subnormal in fp32.
        scale_bits = scale.to(tl.int32, bitcast=True)
        code = tl.where(scale_bits <= 0x400000, 0, (scale_bits + 0x7FFFFF) >> 23)
        code = tl.where(bits == 0, 127, tl.where(bits >= 0x7F800000, 255, code))
        scale_bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
        return scale_bits.to(tl.float32, bitcast=True), code
    else:
        scale = tl.where(bits == 0, 1.0, tl.maximum(scale, 1.1754943508222875e-38))
        scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
        return scale, scale


@triton.jit
def divide(x, scale):
    """Divides x by scales, which broadcast to its shape: correctly rounded, as long as no quotient overflows.

    One reciprocal per scale, then one Newton step per number: three instructions instead of a division's twenty.
    """
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    quotient = x * reciprocal
    # In this order zeros keep their sign even where -x is 0 - x, as in Triton 3.6: x is the only zero that is negated.
    surplus = tl.fma(quotient, tl.broadcast_to(scale, x.shape), -x)
    return tl.fma(surplus, tl.broadcast_to(-reciprocal, x.shape), quotient)


@triton.jit
def divide_by_given(values, scale):
    """Divides `values` [M, N] by a static scale, a number: exact where codes of up to 8 bits show a difference."""
    # A division of zeros, such as a tile's padding, takes a slow path.
    divisor = scale + tl.zeros([1, 1], tl.float32)  # [1, 1]
    if (scale > 8.673617379884035e-19) & (scale < 1.152921504606847e18):
        quotient = values * tl.div_rn(tl.full([1, 1], 1.0, tl.float32), divisor)  # [M, N]
        # Beyond any code; there the correction of an infinite quotient would be NaN.
        quotient = tl.where(tl.abs(quotient) < 4096.0, divide(values, divisor), quotient)
    else:
        quotient = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    return quotient


@triton.jit
def encode(values, DTYPE: tl.constexpr, MIN_CODE: tl.constexpr, MAX_CODE: tl.constexpr):
    """Rounds numbers that are already divided by their scale to codes: nearest, ties to even, saturated."""
    # Comparisons keep NaN, which a minimum would replace.
    values = tl.where(values > MAX_CODE, MAX_CODE, tl.where(values < MIN_CODE, MIN_CODE, values))
    if DTYPE.is_int():
        # Integers have no NaN. At 1.5 * 2^23 the last place is 1, so adding it rounds.
        values = tl.where(values == values, (values + 12582912.0) - 12582912.0, 0.0)
    return values.to(DTYPE)


@triton.jit
def quantize_tile(
    x, DTYPE: tl.constexpr, GROUP: tl.constexpr, MIN_CODE: tl.constexpr, MAX_CODE: tl.constexpr, E8M0: tl.constexpr
):
    """Quantizes x [M, N] fp32 in groups of GROUP columns; returns codes [M, N] and scales to store [M, N / GROUP]."""
    grouped = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))  # [M, N / GROUP, GROUP]
    scale, stored = scale_of_bits(amax_bits(grouped, 2), MAX_CODE, E8M0)  # [M, N / GROUP] each
    codes = encode(divide(grouped, tl.expand_dims(scale, 2)), DTYPE, MIN_CODE, MAX_CODE)  # [M, N / GROUP, GROUP]
    return tl.reshape(codes, (x.shape[0], x.shape[1])), stored


# Small floats under two scales. All arithmetic is in fp32, but for the last conversion of a scale: not every device
# converts to small floats.


@triton.jit
def round_to_small_float(x, MANTISSA_BITS: tl.constexpr, SMALLEST_NORMAL: tl.constexpr, MAX_VALUE: tl.constexpr):
    """Rounds fp32 to a small float type: nearest, ties to even, saturated; keeps NaN and the sign of 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # Comparisons keep NaN, which a minimum would replace.
    magnitude = tl.where(magnitude > MAX_VALUE, MAX_VALUE, magnitude)
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    code = magnitude.to(tl.int32, bitcast=True)
    normal = (code + ((1 << (DROPPED - 1)) - 1) + ((code >> DROPPED) & 1)) >> DROPPED << DROPPED
    # Subnormal numbers are evenly spaced, by the last place of BASE, so adding it rounds.
    BASE: tl.constexpr = 1.5 * 8388608.0 * SMALLEST_NORMAL / (1 << MANTISSA_BITS)
    subnormal = ((magnitude + BASE) - BASE).to(tl.int32, bitcast=True)
    rounded = tl.where(magnitude >= SMALLEST_NORMAL, normal, subnormal)
    return tl.where(magnitude == magnitude, rounded | (bits & -2147483648), 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_group(bits, global_scale, MAX_CODE: tl.constexpr):
    """float8_e4m3fn scales, in fp32, of groups whose largest magnitudes have these bits; same shape as `bits`."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MAX_CODE, tl.float32))
    scale = tl.div_rn(scale, tl.broadcast_to(global_scale, bits.shape))
    # 2^-9, the smallest float8_e4m3fn, is subnormal there.
    scale = tl.where(scale < 0.001953125, 0.001953125, scale)
    scale = round_to_small_float(scale, 3, 0.015625, 448.0)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def round_groups(
    groups, total_scale, MANTISSA_BITS: tl.constexpr, SMALLEST_NORMAL: tl.constexpr, MAX_CODE: tl.constexpr
):
    """Divides numbers [M, G, N] by their groups' scales [M, G] and rounds them to a small float type, [M, G, N]."""
    codes = tl.div_rn(groups, tl.broadcast_to(tl.expand_dims(total_scale, 2), groups.shape))  # [M, G, N]
    # Where the product of scales is 0, 0 / 0 is NaN and means 0. A NaN in a group is not lost: its scale is NaN too.
    return round_to_small_float(tl.where(codes == codes, codes, 0.0), MANTISSA_BITS, SMALLEST_NORMAL, MAX_CODE)


@triton.jit
def pack_e2m1(x):
    """Packs fp32 numbers [M, N] that float4_e2m1fn can represent: [M, N / 2] uint8, the first in the low half."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Exponent and mantissa of 1 are code 2, and those of 0.5, the one subnormal number, would be 0.
    codes = tl.where(magnitude == 0, 0, tl.maximum((magnitude >> 22) - 252, 1)) | ((bits >> 28) & 8)  # [M, N]
    low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))  # [M, N / 2] each
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def quantize_e2m1(x, global_scale, GROUP: tl.constexpr):
    """Quantizes [M, N] fp32 to float4_e2m1fn in groups of GROUP columns.

    Returns:
        Codes [M, N / 2] as `pack_e2m1` has them, and float8_e4m3fn scales [M, N / GROUP] on top of the global ones
        [M, 1].
    """
    groups = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))  # [M, N / GROUP, GROUP]
    scale = scale_of_group(amax_bits(groups, 2), global_scale, 6.0)  # [M, N / GROUP]
    codes = pack_e2m1(tl.reshape(round_groups(groups, scale * global_scale, 1, 1.0, 6.0), (x.shape[0], x.shape[1])))
    return codes, scale.to(tl.float8e4nv)
