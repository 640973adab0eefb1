"""Small floats under two scales, in Triton: rounding to them, scales of groups, and packed codes.

All arithmetic is in fp32, but for the last conversion of a scale: not every device converts to small floats.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def amax_bits(x, AXIS: tl.constexpr):
    """Bits of the largest magnitude along an axis. NaN has the largest bits, so it stays; a float maximum loses it."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


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
