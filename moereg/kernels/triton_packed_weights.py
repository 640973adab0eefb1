"""Tiles of packed integer and 4-bit float weights as exact 16-bit operands, and the main loop over them, in Triton.

A block is 64 elements of a row along the reduced dimension, in 32-bit words: element 16 p + 2 j + h of 4 bits is
nibble p + 4 h of word j, of 8 bits byte p % 2 + 2 h of word 8 (p // 2) + j. So one shift and one mask give a pair of
neighbours in the halves of a register, which is how matrix instructions want them. All rows of a block lie together.

Products are taken the other way round, weights times activations: restored weights then stay in registers, which on
Hopper only the left operand may, and a tile of few tokens is the short side of an instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 64

# Reduced elements in a step of the main loop.
STEP: Final = 128


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix of every expert, packed; R rows, K_pad reduced elements in K_pad / 64 blocks.

    Attributes:
        words: [E, K_pad / 64, R, words] int32, contiguous; 8 words for 4 bits, 16 for 8.
        element: `uint4`, `int8` (stored with 128 added) or `float4_e2m1fn`.
        group: elements that share a scale or zero point, a power of two from 16 on; 0: a row.
        scale_dtype: of the canonical group scales, where they are folded into the operand: `float8_e8m0fnu` or
            `float8_e4m3fn`; else `float32`.
        group_scale: `float32`: [E, groups, R] fp32, multiplies partial products. Folded: [E, ceil(groups / n), R]
            int32, packed like zero points; see `_folded_scale`. None: none, or one a row.
        zero_point: [E, ceil(groups / n), R] int32, n codes of 8 bits a word, the lowest first: as many as 128 elements
            have, from 1 to 4. None: the middle of the range.
        row_scale: [E, R] fp32, multiplies the product; None: 1.
    """

    words: torch.Tensor
    element: str
    group: int
    scale_dtype: str
    group_scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    row_scale: torch.Tensor | None

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


@triton.jit
def _split_pair(v, DTYPE: tl.constexpr):
    """The halves of 32-bit words as 16-bit floats of the same bits."""
    low = (v & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return low, (v >> 16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _load_codes(words, columns, first, num_columns, offset: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N, 1] uint32: the code of a group out of words of 1 to 4.

    Args:
        words: the expert's first word.
        columns: [BLOCK_N].
        first: the step's first element, a multiple of `STEP`, so that which byte it is does not depend on the step: a
            shift by what only the device knows would keep Triton from restoring weights where products need them.
        num_columns: words of a group.
        offset: an element of the group, counted from there.
    """
    PER_WORD: tl.constexpr = 4 if GROUP <= 32 else (2 if GROUP == 64 else 1)
    # A group of 0 is a row, all of whose steps read its only word.
    SHIFT: tl.constexpr = 8 * (offset // GROUP % PER_WORD) if GROUP > 0 else 0
    word = (first + offset) // (GROUP * PER_WORD) if GROUP > 0 else 0
    codes = tl.load(words + word * num_columns + columns).to(tl.uint32, bitcast=True)
    return ((codes >> SHIFT) & 0xFF)[:, None]


@triton.jit
def _folded_scale(codes, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """What 4-bit floats, read as the lowest bits of a 16-bit one, are multiplied by; a power of two of the true scale.

    Codes of powers of two are relative to the row's largest, 253, so that they fit either 16-bit type: bfloat16's
    exponent field, of which float16 keeps the upper 29. Codes of float8_e4m3fn have 5 bits of exponent, the largest 30,
    so that none is subnormal.
    """
    if SCALE == "float8_e8m0fnu":
        bits = codes << 7 if DTYPE == tl.bfloat16 else tl.maximum(codes.to(tl.int32) - 224, 0).to(tl.uint32) << 10
    else:
        tl.static_assert(SCALE == "float8_e4m3fn")
        bits = (codes << 4) | 0x7000 if DTYPE == tl.bfloat16 else codes << 7
    return bits.to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _load_words(pointers, block_mask, index: tl.constexpr, MASK_B: tl.constexpr):
    if MASK_B:
        words = tl.load(pointers + index * 8, mask=block_mask, other=0)
    else:
        words = tl.load(pointers + index * 8)
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def _pair(words, factor, zero_point, p: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Elements 16 p + 2 j and 16 p + 2 j + 1 of a block, each [BLOCK_N, 8], exact in 16 bits.

    Args:
        words: [BLOCK_N, 8] uint32 that hold them.
        factor: [BLOCK_N, 1] from `_folded_scale`, for 4-bit floats.
        zero_point: [BLOCK_N, 1] uint32, or None.
    """
    if ELEMENT == "float4_e2m1fn":
        # Exponent and mantissa to where the lowest bits of the wider type's are, the sign to its own.
        PLACE: tl.constexpr = 6 if DTYPE == tl.bfloat16 else 9
        MAGNITUDE: tl.constexpr = 0x01C001C0 if DTYPE == tl.bfloat16 else 0x0E000E00
        magnitude = words << (PLACE - 4 * p) if PLACE > 4 * p else words >> (4 * p - PLACE)
        low, high = _split_pair((magnitude & MAGNITUDE) | ((words << (12 - 4 * p)) & 0x80008000), DTYPE)
        return low * factor, high * factor
    elif ELEMENT == "uint4":
        # A number whose unit is the lowest bit of its mantissa, so that the code stands in it as it is.
        BASE: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
        low, high = _split_pair(((words >> (4 * p)) & 0x000F000F) | (BASE * 0x10001), DTYPE)
        if zero_point is None:
            middle = tl.full([], 136.0 if DTYPE == tl.bfloat16 else 1032.0, tl.float32).to(DTYPE)
        else:
            middle = (zero_point | BASE).to(tl.uint16).to(DTYPE, bitcast=True)
        return low - middle, high - middle
    else:
        tl.static_assert(ELEMENT == "int8")
        # As above, in float32, because bfloat16's mantissa is too short.
        codes = (words >> (8 * (p % 2))) & 0x00FF00FF
        low = ((codes & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        high = ((codes >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _load_activations(pointers, row_mask, offs_k, size_a, MASK_ROWS: tl.constexpr, MASK_A: tl.constexpr):
    if MASK_ROWS and MASK_A:
        return tl.load(pointers, mask=row_mask[None, :] & (offs_k < size_a)[:, None], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=row_mask[None, :], other=0.0)
    elif MASK_A:
        return tl.load(pointers, mask=(offs_k < size_a)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def accumulate_packed(
    a_rows,
    words,
    group_scale,
    zero_point,
    columns,
    row_mask,
    size_a,
    num_blocks,
    num_columns,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_A: tl.constexpr,
    MASK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 product of rows of activations and rows of packed weights, before the scales of rows.

    Args:
        a_rows: [BLOCK_M] first elements of the rows of activations, bf16 or fp16.
        words: the expert's first word.
        group_scale: its first group scale, or None.
        zero_point: its first word of zero points, or None.
        columns: [BLOCK_N] rows of the weights, all within them.
        row_mask: [BLOCK_M] rows of activations that count.
        size_a: elements of a row of activations; what lies behind them may be NaN.
        num_blocks: blocks of a row of weights.
        num_columns: rows of the weights.
        ELEMENT, GROUP, SCALE: of `PackedMatrix`.
        MASK_ROWS: whether to leave out the rows that do not count.
        MASK_A: whether BLOCK_K does not divide `size_a`.
        MASK_B: whether it does not divide the weights' reduced dimension.
    """
    DTYPE: tl.constexpr = a_rows.dtype.element_ty
    BLOCKS: tl.constexpr = BLOCK_K // 64
    WORDS: tl.constexpr = 16 if ELEMENT == "int8" else 8
    FOLDED: tl.constexpr = SCALE != "float32"
    # Where scales multiply partial products, products end with a group.
    PARTIAL: tl.constexpr = group_scale is not None and not FOLDED
    PARTS: tl.constexpr = 64 // GROUP if PARTIAL and GROUP < 64 else 1
    PAIRS: tl.constexpr = 4 // PARTS
    PART: tl.constexpr = 64 // PARTS
    GROUP_BLOCKS: tl.constexpr = GROUP // 64 if PARTIAL and GROUP > 64 else 1
    word_pointers = words + columns[:, None] * WORDS + tl.arange(0, 8)[None, :]
    offs_part = tl.arange(0, PART)
    a_pointers = a_rows[None, :] + offs_part[:, None]
    accumulator = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        partial = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for within in tl.static_range(BLOCKS):
            block = first + within
            block_pointers = word_pointers + block * num_columns * WORDS
            low_words = _load_words(block_pointers, block < num_blocks, 0, MASK_B)
            high_words = low_words
            if WORDS == 16:
                high_words = _load_words(block_pointers, block < num_blocks, 1, MASK_B)
            for part in tl.static_range(PARTS):
                operand = _restore_part(
                    low_words,
                    high_words,
                    group_scale,
                    zero_point,
                    columns,
                    first * 64,
                    num_columns,
                    within * 64,
                    part * PAIRS,
                    PAIRS,
                    ELEMENT,
                    GROUP,
                    SCALE,
                    DTYPE,
                    BLOCK_N,
                )
                start = block * 64 + part * PART
                a = _load_activations(a_pointers + start, row_mask, start + offs_part, size_a, MASK_ROWS, MASK_A)
                if PARTIAL:
                    partial = tl.dot(operand, a, partial)
                    if PARTS > 1 or (within + 1) % GROUP_BLOCKS == 0 or within + 1 == BLOCKS:
                        group = (block * 64 + part * PART) // GROUP
                        scale = tl.load(group_scale + group * num_columns + columns)
                        accumulator += partial * scale[:, None]
                        partial = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                else:
                    accumulator = tl.dot(operand, a, accumulator)
    return tl.trans(accumulator)


@triton.jit
def _restore_part(
    low_words,
    high_words,
    group_scale,
    zero_point,
    columns,
    first,
    num_columns,
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
    a0, b0 = _restore_pair(
        low_words,
        high_words,
        group_scale,
        zero_point,
        columns,
        first,
        num_columns,
        offset,
        p,
        ELEMENT,
        GROUP,
        SCALE,
        DTYPE,
    )
    if PAIRS == 1:
        return tl.reshape(tl.join(a0, b0), (BLOCK_N, 16))
    elif PAIRS == 2:
        a1, b1 = _restore_pair(
            low_words,
            high_words,
            group_scale,
            zero_point,
            columns,
            first,
            num_columns,
            offset,
            p + 1,
            ELEMENT,
            GROUP,
            SCALE,
            DTYPE,
        )
        joined = tl.join(tl.join(a0, b0), tl.join(a1, b1))
        return tl.reshape(tl.permute(joined, (0, 3, 1, 2)), (BLOCK_N, 32))
    else:
        a1, b1 = _restore_pair(
            low_words,
            high_words,
            group_scale,
            zero_point,
            columns,
            first,
            num_columns,
            offset,
            p + 1,
            ELEMENT,
            GROUP,
            SCALE,
            DTYPE,
        )
        a2, b2 = _restore_pair(
            low_words,
            high_words,
            group_scale,
            zero_point,
            columns,
            first,
            num_columns,
            offset,
            p + 2,
            ELEMENT,
            GROUP,
            SCALE,
            DTYPE,
        )
        a3, b3 = _restore_pair(
            low_words,
            high_words,
            group_scale,
            zero_point,
            columns,
            first,
            num_columns,
            offset,
            p + 3,
            ELEMENT,
            GROUP,
            SCALE,
            DTYPE,
        )
        joined = tl.join(tl.join(tl.join(a0, b0), tl.join(a1, b1)), tl.join(tl.join(a2, b2), tl.join(a3, b3)))
        return tl.reshape(tl.permute(joined, (0, 4, 3, 1, 2)), (BLOCK_N, 64))


@triton.jit
def _restore_pair(
    low_words,
    high_words,
    group_scale,
    zero_point,
    columns,
    first,
    num_columns,
    offset: tl.constexpr,
    p: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`_pair` with its group's scale or zero point."""
    words = high_words if ELEMENT == "int8" and p >= 2 else low_words
    factor = None
    if SCALE != "float32":
        factor = _folded_scale(
            _load_codes(group_scale, columns, first, num_columns, offset + 16 * p, GROUP), SCALE, DTYPE
        )
    middle = None
    if zero_point is not None:
        middle = _load_codes(zero_point, columns, first, num_columns, offset + 16 * p, GROUP)
    return _pair(words, factor, middle, p, ELEMENT, DTYPE)
