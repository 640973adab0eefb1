"""The main loop of products with packed weights, in Triton.

Products are transposed, weights times activations: dequantized weights then stay in registers, which on Hopper only the
left operand may, and a tile of few tokens is the short side of an instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moereg.kernels.packed.weights import restore_part


@triton.jit
def _load_code_word(words, columns, block, num_columns, GROUP: tl.constexpr):
    """[BLOCK_N] uint32: words of scale or zero-point codes, among them those of the block's groups.

    `words`, the expert's first, and `block` are one for all `columns` [BLOCK_N] or one for each.
    """
    PER_WORD: tl.constexpr = 4 if GROUP <= 32 else (2 if GROUP == 64 else 1)
    # Group 0 is a whole row: all of its blocks read its only word.
    word = block * 64 // (GROUP * PER_WORD) if GROUP > 0 else 0
    return tl.load(words + word * num_columns + columns).to(tl.uint32, bitcast=True)


@triton.jit
def _load_words(words, block, columns, num_blocks, num_columns, WORDS: tl.constexpr, MASK_B: tl.constexpr):
    """[rows, 8] uint32 twice (the same words if a block has only 8), of one block or of one block per row."""
    pointers = (words + (block * num_columns + columns) * WORDS)[:, None] + tl.arange(0, 8)[None, :]
    if MASK_B:
        inside = block + tl.zeros_like(columns) < num_blocks
        low = tl.load(pointers, mask=inside[:, None], other=0).to(tl.uint32, bitcast=True)
    else:
        low = tl.load(pointers).to(tl.uint32, bitcast=True)
    if WORDS == 8:
        return low, low
    elif MASK_B:
        return low, tl.load(pointers + 8, mask=inside[:, None], other=0).to(tl.uint32, bitcast=True)
    else:
        return low, tl.load(pointers + 8).to(tl.uint32, bitcast=True)


@triton.jit
def _load_activations(pointers, row_mask, offs_k, depth_a, TILE: tl.constexpr):
    if TILE.mask_rows and TILE.mask_a:
        return tl.load(pointers, mask=row_mask & (offs_k < depth_a), other=0.0)
    elif TILE.mask_rows:
        return tl.load(pointers, mask=row_mask, other=0.0)
    elif TILE.mask_a:
        return tl.load(pointers, mask=offs_k < depth_a, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def accumulate_packed(
    a_rows,  # [BLOCK_M] first elements of the rows of activations, bf16 or fp16
    words,
    group_scale,
    zero_point,
    columns,  # [BLOCK_N] rows of the weights, all within them
    row_mask,  # [BLOCK_M] valid rows of activations
    depth_a,
    num_blocks,
    num_columns,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 product of rows of activations and rows of packed weights, before the scales of rows.

    A step is BLOCK_K elements of SLICES slices, whose sums are added at the end. Each warp has a slice, or all warps
    share one: with few programs on a multiprocessor, slices leave each warp less work in sequence.

    Arguments as for `accumulate_slices`, of one expert.
    """
    SLICES: tl.constexpr = FORMAT.slices
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    if SLICES == 1:
        own_block = 0
        a_pointers = a_rows[None, :]
        a_mask = row_mask[None, :]
    else:
        # All rows of one slice, then all rows of the next: [ROWS].
        columns = tl.reshape(tl.broadcast_to(columns[None, :], (SLICES, BLOCK_N)), (SLICES * BLOCK_N,))
        own_block = tl.arange(0, SLICES * BLOCK_N) // BLOCK_N * (BLOCK_K // 64)
        a_pointers = a_rows[None, None, :] + tl.arange(0, SLICES)[:, None, None] * BLOCK_K
        a_mask = row_mask[None, None, :]
    # fmt: off
    accumulator = accumulate_slices(a_pointers, words, group_scale, zero_point, columns, own_block, a_mask, depth_a,
                                    num_blocks, num_columns, FORMAT, TILE, SLICES)
    # fmt: on
    if SLICES > 1:
        accumulator = tl.sum(accumulator, 0)
    return tl.trans(accumulator)


@triton.jit
def accumulate_slices(
    # [SLICES, 1, BLOCK_M] first elements of the slices' activations, bf16 or fp16; [1, BLOCK_M] where there is one
    # slice
    a_pointers,
    words,  # first word of the expert, or [ROWS] of the experts
    group_scale,  # likewise, or None
    zero_point,  # likewise, or None
    columns,  # [ROWS] rows of the weights, all within them
    own_block,  # [ROWS] the slice's first block; 0 where there is one slice
    a_mask,  # shape of `a_pointers`: valid activations
    depth_a,  # elements of a row of activations; memory past them may hold NaN
    num_blocks,  # blocks of a row of weights
    num_columns,  # rows of an expert's weights
    FORMAT: tl.constexpr,  # `WeightFormat` of packed weights
    TILE: tl.constexpr,  # `TileShape`; with `mask_rows`, loads of activations are masked by `a_mask`
    PIECES: tl.constexpr,
):
    """[SLICES, BLOCK_N, BLOCK_M] fp32 products, or [BLOCK_N, BLOCK_M] where there is one slice, before row scales.

    A step is BLOCK_K elements of every slice. PIECES slices share a row of weights, each taking every PIECES-th piece
    of BLOCK_K; slices of different rows run side by side. ROWS is SLICES * BLOCK_N.
    """
    ELEMENT: tl.constexpr = FORMAT.element
    GROUP: tl.constexpr = FORMAT.group
    SCALE: tl.constexpr = FORMAT.scale_dtype
    SLICES: tl.constexpr = FORMAT.slices
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    MASK_B: tl.constexpr = TILE.mask_b
    DTYPE: tl.constexpr = a_pointers.dtype.element_ty
    BLOCKS: tl.constexpr = BLOCK_K // 64
    WORDS: tl.constexpr = 16 if ELEMENT == "int8" else 8
    FOLDED: tl.constexpr = SCALE != "float32"
    # Where Hopper's kernels serve the format too, its groups' scales are rounded as there.
    ROUNDED: tl.constexpr = (
        FORMAT.chained and group_scale is not None and not FOLDED and zero_point is None and GROUP % 64 == 0
    ) and tl.bfloat16 == DTYPE
    # Where scales multiply partial products, a product ends with its group.
    PARTIAL: tl.constexpr = group_scale is not None and not FOLDED and not ROUNDED
    PARTS: tl.constexpr = 64 // GROUP if PARTIAL and GROUP < 64 else 1
    PAIRS: tl.constexpr = 4 // PARTS
    PART: tl.constexpr = 64 // PARTS
    GROUP_BLOCKS: tl.constexpr = GROUP // 64 if PARTIAL and GROUP > 64 else 1
    # Then one accumulator suffices. Triton 3.6 uses mma.sync for tiles this low; with 3.8's wgmma the waits remain.
    CHAINED: tl.constexpr = not PARTIAL and (BLOCK_M < 16 or FORMAT.chained)
    ROWS: tl.constexpr = SLICES * BLOCK_N
    PRODUCT: tl.constexpr = [BLOCK_N, BLOCK_M] if SLICES == 1 else [SLICES, BLOCK_N, BLOCK_M]
    if SLICES == 1:
        offs_k = tl.arange(0, PART)[:, None]
        slice_k = offs_k
    else:
        offs_k = tl.arange(0, PART)[None, :, None]
        slice_k = tl.arange(0, SLICES)[:, None, None] % PIECES * BLOCK_K + offs_k
    a_pointers += offs_k  # [PART, BLOCK_M], or [SLICES, PART, BLOCK_M]
    accumulator = tl.zeros(PRODUCT, dtype=tl.float32)
    # Without `num_stages` here Triton keeps loads that no product reads, such as those of scales, out of the pipeline.
    STAGES: tl.constexpr = FORMAT.stages if TILE.stages is None else TILE.stages
    for first in tl.range(0, num_blocks, PIECES * BLOCKS, num_stages=STAGES):
        partial = tl.zeros(PRODUCT, dtype=tl.float32)
        scale_word = None
        zero_word = None
        for within in tl.static_range(BLOCKS):
            block = first + within + own_block
            low_words, high_words = _load_words(words, block, columns, num_blocks, num_columns, WORDS, MASK_B)
            # Blocks past the last have no scales; any will do.
            scaled_block = tl.minimum(block, num_blocks - 1) if MASK_B else block
            if ROUNDED and (GROUP == 64 or within % 2 == 0):
                factor = tl.load(group_scale + scaled_block * 64 // GROUP * num_columns + columns)
                scale_word = factor.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            elif GROUP == 16 or within % 2 == 0:
                if FOLDED:
                    scale_word = _load_code_word(group_scale, columns, scaled_block, num_columns, GROUP)
                if zero_point is not None:
                    zero_word = _load_code_word(zero_point, columns, scaled_block, num_columns, GROUP)
            for part in tl.static_range(PARTS):
                operand = restore_part(
                    low_words,
                    high_words,
                    scale_word,
                    zero_word,
                    within * 64,
                    part * PAIRS,
                    PAIRS,
                    ELEMENT,
                    GROUP,
                    SCALE,
                    DTYPE,
                    ROWS,
                )
                if SLICES > 1:
                    operand = tl.reshape(operand, (SLICES, BLOCK_N, PART))  # Otherwise [BLOCK_N, PART].
                start = (first + within) * 64 + part * PART
                a = _load_activations(a_pointers + start, a_mask, start + slice_k, depth_a, TILE)
                if CHAINED:
                    accumulator = tl.dot(operand, a, accumulator)
                else:
                    # Start from zeros: Triton waits for every wgmma that adds to a loop-carried accumulator.
                    partial = tl.dot(operand, a, partial)
                    if not PARTIAL and within + 1 == BLOCKS:
                        accumulator += partial
                if PARTIAL and (PARTS > 1 or (within + 1) % GROUP_BLOCKS == 0 or within + 1 == BLOCKS):
                    group = (scaled_block * 64 + part * PART) // GROUP
                    scale = tl.load(group_scale + group * num_columns + columns)[:, None]
                    if SLICES > 1:
                        scale = tl.reshape(scale, (SLICES, BLOCK_N, 1))
                    accumulator += partial * scale
                    partial = tl.zeros(PRODUCT, dtype=tl.float32)
    if not FOLDED:
        accumulator *= 2.0**6 if tl.bfloat16 == DTYPE else 2.0**9
    return accumulator
