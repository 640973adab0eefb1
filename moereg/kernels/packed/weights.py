"""Packed integer and 4-bit float weights as exact 16-bit operands of products, in Triton.

A block is 64 elements of a row along the reduced dimension, in 32-bit words. Element 16 p + 2 j + h is nibble p + 4 h
of word j for 4-bit integers and byte p % 2 + 2 h of word 8 (p // 2) + j for 8-bit ones. For 4-bit floats it is in half
h of word j: bit 15 - 3 p is the sign and bits 8 - 3 p to 6 - 3 p are the rest, which for p = 0 is where bfloat16 has
the sign, the lowest bits of its exponent and the highest of its mantissa; for p = 3, bits 14, 13, 11 and 10 are left.
So a few shifts and masks give a pair of neighbors in the halves of a register, as matrix instructions need them. All
rows of a block are contiguous.

A weight takes 1.1 lane instructions if it is an integer and 1.9 if it is a 4-bit float, without its group's scale;
an H200 has 3.2 for each 4-bit weight that its memory delivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.sizes import WEIGHT_PAD

# Rows of the intermediate are padded to whole blocks.
BLOCK: Final = WEIGHT_PAD

# Steps of the main loop, or of each slice of one, are a multiple of this many elements.
STEP: Final = 128


class WeightFormat(NamedTuple):
    """Compile-time constant: how weights are stored and read."""

    # this and the next two as in `PackedMatrix`; None: weights have the dtype of the activations
    element: str | None = None
    group: int = 0  # elements that share a scale or zero point
    scale_dtype: str | None = None  # None with `element`
    slices: int = 1  # pieces of a step of the main loop, one per warp, or 1
    stages: int | None = None  # depth of the main loop's pipeline; None: Triton's own choice for the kernel
    chained: bool = False  # as in `GroupedGemmConfig`


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix of every expert, packed; R rows of K_pad elements in K_pad / 64 blocks."""

    words: torch.Tensor  # [E, K_pad / 64, R, words] int32, contiguous; 8 words for 4 bits, 16 for 8
    element: str  # `uint4`, `int8` (stored with 128 added) or `float4_e2m1fn`
    group: int  # elements that share a scale or zero point, a power of two from 16 on; 0: a row
    # dtype of the canonical group scales if they are folded into the operand, `float8_e8m0fnu` or `float8_e4m3fn`; else
    # `float32`
    scale_dtype: str
    # `float32`: [E, groups, R] fp32, multiplies partial products. Folded: [E, ceil(groups / n), R] int32, n codes per
    # word as for zero points; see `_folded_scales`. None: none, or one per row
    group_scale: torch.Tensor | None
    # [E, ceil(groups / n), R] int32, n 8-bit codes per word, the lowest first: as many as 128 elements have, from 1 to
    # 4. None: the middle of the range
    zero_point: torch.Tensor | None
    row_scale: torch.Tensor | None  # [E, R] fp32, multiplies the product; None: 1

    @property
    def num_experts(self) -> int:
        """E."""
        return self.words.shape[0]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.words.shape[2]

    @property
    def depth(self) -> int:
        """K_pad."""
        return self.words.shape[1] * BLOCK


@triton.constexpr_function
def _is_cuda():
    return not triton.knobs.runtime.interpret and triton.language.target_info.is_cuda()


@triton.jit
def _split_pair(v, DTYPE: tl.constexpr):
    """Splits 32-bit words into halves, as 16-bit floats of the same bits."""
    low = (v & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return low, (v >> 16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.constexpr_function
def _code_number(offset, group):
    """Position of an element's code in its word.

    Args:
        offset: the element, counted from a multiple of `STEP`, so that the position is a constant: a shift by a
            run-time value would keep Triton from dequantizing weights where products need them.
        group: elements of a group.
    """
    return 0 if group == 0 or group >= 128 else offset // group % (4 if group <= 32 else 2)


@triton.jit
def _swap_bytes(x):
    """Swaps the bytes in each half of 32-bit words."""
    if _is_cuda():
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x2301;", "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return ((x & 0x00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF)


@triton.jit
def _folded_scales(word, number: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """Scales of 4-bit floats that are read as the lowest bits of a 16-bit float: the true ones times a power of two.

    Power-of-two codes are relative to the row's largest, 253, so that they fit either 16-bit type: they are bfloat16's
    exponent field. float16 holds the upper 23 and loses bits below, in groups whose scale is less than 2^-23 of the
    row's largest. Codes of float8_e4m3fn have 5 bits of exponent, the largest 30, so that none is subnormal.

    Codes 0 and 2 of a word lie in its halves as bfloat16 needs them; codes 1 and 3 do after a byte swap.

    Returns:
        uint32 like `word`: the 16-bit factors of codes 0 and 2, or of 1 and 3, in the halves.
    """
    x = _swap_bytes(word) if number % 2 else word
    if SCALE == "float8_e8m0fnu":
        bits = x & 0x7F807F80
        if tl.float16 == DTYPE:
            low = tl.maximum((bits & 0xFFFF).to(tl.int32) - (224 << 7), 0)
            high = tl.maximum((bits >> 16).to(tl.int32) - (224 << 7), 0)
            bits = (low | high << 16).to(tl.uint32) << 3
        return bits
    else:
        tl.static_assert(SCALE == "float8_e4m3fn")
        return (x & 0x0FF00FF0) | 0x70007000 if tl.bfloat16 == DTYPE else (x & 0x0FF00FF0) << 3


@triton.jit
def _multiply_add(x, y, z, DTYPE: tl.constexpr):
    """Returns x * y + z for both 16-bit floats in the halves of 32-bit words."""
    if _is_cuda():
        # One instruction on both halves: LLVM would split and rejoin them for each operation.
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
        return tl.inline_asm_elementwise(
            "fma.rn." + NAME + " $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        x_low, x_high = _split_pair(x, DTYPE)
        y_low, y_high = _split_pair(y, DTYPE)
        z_low, z_high = _split_pair(z, DTYPE)
        low = tl.fma(x_low, y_low, z_low).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (tl.fma(x_high, y_high, z_high).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _multiply_by_half(x, y, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Multiplies the 16-bit floats in both halves of x by the one in a half of y."""
    if _is_cuda():
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
        HALF: tl.constexpr = "{h, h}" if HIGH else "{l, l}"
        # A zero of either sign plus minus zero keeps its sign.
        CODE: tl.constexpr = (
            "{ .reg .b16 l, h; .reg .b32 y, z; mov.b32 {l, h}, $2; mov.b32 y, "
            + HALF
            + "; mov.b32 z, 0x80008000; fma.rn."
            + NAME
            + " $0, $1, y, z; }"
        )
        return tl.inline_asm_elementwise(CODE, "=r,r,r", [x, y], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        half = y >> 16 if HIGH else y & 0xFFFF
        return _multiply_add(x, half * 0x10001, tl.full([1, 1], 0x80008000, tl.uint32), DTYPE)


@triton.jit
def _pair(words, factors, HIGH: tl.constexpr, addend, p: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Elements 16 p + 2 j and 16 p + 2 j + 1 of a block, each [BLOCK_N, 8], exact in 16 bits.

    Args:
        words: [BLOCK_N, 8] uint32 that hold them.
        factors: [BLOCK_N, 1] from `_folded_scales`, for 4-bit floats; HIGH selects the half. For integers rounded
            scales in the low half, or None.
        addend: minus the zero point in units of a dequantized integer, in both halves, for integers.
    """
    if ELEMENT == "float4_e2m1fn":
        MASK: tl.constexpr = 0x81C081C0
        if p == 0:
            bits = words & MASK
        elif p == 1:
            bits = (words << 3) & MASK
        elif p == 2:
            bits = (words << 6) & MASK
        else:
            bits = ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)
        if tl.float16 == DTYPE:
            bits = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
        pair = _multiply_by_half(bits, factors, HIGH, DTYPE)
    else:
        # The lowest 8 bits of a 16-bit float count multiples of its smallest number, even where they reach into the
        # exponent, so codes need no conversion: one multiply-add rescales them and subtracts the zero point.
        BITS: tl.constexpr = 8 if ELEMENT == "int8" else 4
        PLACE: tl.constexpr = BITS * p % 8
        bits = (words >> (BITS * p // 8 * 8 % 16)) & (((1 << BITS) - 1) * 0x10001 << PLACE)
        # 2**127 and 2**15, less the place.
        UNIT: tl.constexpr = 0x7F00 - PLACE * 0x80 if tl.bfloat16 == DTYPE else 0x7800 - PLACE * 0x400
        pair = _multiply_add(bits, tl.full([1, 1], UNIT * 0x10001, tl.uint32), addend, DTYPE)
        if factors is not None:
            pair = _multiply_by_half(pair, factors, False, DTYPE)
    return _split_pair(pair, DTYPE)


@triton.jit
def restore_part(
    low_words,
    high_words,
    scale_word,
    zero_word,
    offset: tl.constexpr,
    first_pair: tl.constexpr,
    PAIRS: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_N, 16 PAIRS] operand: the elements of a block from 16 `first_pair` on."""
    p: tl.constexpr = first_pair
    a0, b0 = _restore(low_words, high_words, scale_word, zero_word, offset, p, ELEMENT, GROUP, SCALE, DTYPE)
    if PAIRS == 1:
        return tl.reshape(tl.join(a0, b0), (BLOCK_N, 16))
    elif PAIRS == 2:
        a1, b1 = _restore(low_words, high_words, scale_word, zero_word, offset, p + 1, ELEMENT, GROUP, SCALE, DTYPE)
        joined = tl.join(tl.join(a0, b0), tl.join(a1, b1))
        return tl.reshape(tl.permute(joined, (0, 3, 1, 2)), (BLOCK_N, 32))
    else:
        a1, b1 = _restore(low_words, high_words, scale_word, zero_word, offset, p + 1, ELEMENT, GROUP, SCALE, DTYPE)
        a2, b2 = _restore(low_words, high_words, scale_word, zero_word, offset, p + 2, ELEMENT, GROUP, SCALE, DTYPE)
        a3, b3 = _restore(low_words, high_words, scale_word, zero_word, offset, p + 3, ELEMENT, GROUP, SCALE, DTYPE)
        joined = tl.join(tl.join(tl.join(a0, b0), tl.join(a1, b1)), tl.join(tl.join(a2, b2), tl.join(a3, b3)))
        return tl.reshape(tl.permute(joined, (0, 4, 3, 1, 2)), (BLOCK_N, 64))


@triton.jit
def _restore(
    low_words,
    high_words,
    scale_word,
    zero_word,
    offset: tl.constexpr,
    p: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`_pair` with its group's scale or zero point."""
    words = high_words if ELEMENT == "int8" and p >= 2 else low_words
    NUMBER: tl.constexpr = _code_number(offset + 16 * p, GROUP)
    if SCALE != "float32":
        factors = _folded_scales(scale_word[:, None], NUMBER, SCALE, DTYPE)
        return _pair(words, factors, NUMBER >= 2, None, p, ELEMENT, DTYPE)
    elif zero_word is not None:
        # Minus the zero point, dequantized like a weight.
        code = ((zero_word >> (8 * NUMBER)) & 0xFF)[:, None] * 0x10001
        unit = tl.full([1, 1], 0xFF00FF00 if tl.bfloat16 == DTYPE else 0xF800F800, tl.uint32)
        addend = _multiply_add(code, unit, tl.full([1, 1], 0, tl.uint32), DTYPE)
        return _pair(words, None, False, addend, p, ELEMENT, DTYPE)
    else:
        # The middle of the range, 128 or 8, in the units of `_pair`: 2**-6 and 2**-9.
        EXPONENT: tl.constexpr = 7 if ELEMENT == "int8" else 3
        MIDDLE: tl.constexpr = 0x8000 + ((121 + EXPONENT) << 7 if tl.bfloat16 == DTYPE else (6 + EXPONENT) << 10)
        factors = None if scale_word is None else scale_word[:, None]
        return _pair(words, factors, False, tl.full([1, 1], MIDDLE * 0x10001, tl.uint32), p, ELEMENT, DTYPE)
