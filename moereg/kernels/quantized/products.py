"""Products of rows of codes with the scales of both sides, in Triton: the main loop of `gate_up` and `down`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def codes_in_byte(dtype):
    """How many codes an element holds: two float4_e2m1fn a uint8, else one."""
    return 2 if dtype == tl.uint8 else 1


@triton.constexpr_function
def scaled_by_hardware(scale_dtype):
    """Whether scales are of a type that `tl.dot_scaled` takes: powers of two as uint8, or float8_e4m3fn."""
    return scale_dtype == tl.uint8 or scale_dtype == tl.float8e4nv


@triton.jit
def _add_product(
    total,
    a,
    b_pointers,
    a_scale,
    b_scales,
    start,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    A_FORMAT: tl.constexpr,
    MX: tl.constexpr,
):
    """The total plus the product of one step, [BLOCK_M, BLOCK_N], scaled by what changes from step to step."""
    b = tl.load(b_pointers)  # [BLOCK_K, BLOCK_N] codes
    if MX:
        b_scale = tl.load(b_scales + start // B_GROUP)  # [BLOCK_N, BLOCK_K / B_GROUP]
        B_FORMAT: tl.constexpr = "e2m1" if b.dtype == tl.uint8 else A_FORMAT
        return tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, total)
    elif total.dtype == tl.int32:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        # A sum of its own: a tensor core of Hopper keeps 14 bits or so of a sum of 8-bit products, which is enough for
        # one step but not for thousands of columns.
        if a.dtype.is_int():
            partial = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        else:
            partial = tl.dot(a, b)  # [BLOCK_M, BLOCK_N]
        if A_GROUP and B_GROUP:
            partial *= a_scale[:, None] * tl.load(b_scales + start // B_GROUP)
        elif A_GROUP:
            partial *= a_scale[:, None]
        elif B_GROUP:
            partial *= tl.load(b_scales + start // B_GROUP)
        return total + partial


@triton.jit
def scales_of_columns(
    scale, first, rows, group_rows, stride, MX: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr
):
    """Pointers to the first scales of rows of weights.

    Args:
        scale: of the expert's first row and column.
        first: row that all rows share a scale with, where they do.
        rows: [BLOCK_N].
        group_rows: rows that share a scale.
        stride: between scales of rows.
        MX: whether hardware applies scales.
        CODES: `CodePair`.
        TILE: `CodeTile`.

    Returns:
        One pointer where rows share a scale, else [1, BLOCK_N]; [BLOCK_N, BLOCK_K / B_GROUP] where hardware applies
        them.
    """
    GROUPS: tl.constexpr = TILE.block_k // CODES.b_group if MX else 1
    if MX:
        return scale + (rows // group_rows)[:, None] * stride + tl.arange(0, GROUPS)[None, :]
    elif CODES.uniform:
        return scale + first // group_rows * stride
    else:
        return scale + (rows // group_rows)[None, :] * stride


@triton.jit
def scaled_products(
    a_pointers,
    b_pointers,
    up_pointers,
    a_scales,
    b_scales,
    up_scales,
    row_mask,
    depth,
    HALVES: tl.constexpr,
    CODES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Products of rows of activations and rows of weights, of gate and of up, scaled by what changes along a row.

    Args:
        a_pointers: [BLOCK_M, BLOCK_K] first codes of the activations; [BLOCK_M, BLOCK_K / 2] where a byte holds two.
        b_pointers: [BLOCK_K, BLOCK_N] first codes of the weights; [BLOCK_K / 2, BLOCK_N] where a byte holds two.
        up_pointers: the same of the second half, where there is one.
        a_scales: [BLOCK_M] first scales of the activations' rows; [BLOCK_M, BLOCK_K / A_GROUP] where hardware applies
            them.
        b_scales: first scales of the weights' rows, from `scales_of_columns`.
        up_scales: those of the second half.
        row_mask: [BLOCK_M] rows in use.
        depth: K_pad, codes of a row, a multiple of BLOCK_K * UNROLL.
        HALVES: 2 where there is a second half; else the second result means nothing.
        CODES: `CodePair`.
        TILE: `CodeTile`.

    Returns:
        [BLOCK_M, BLOCK_N] fp32 of gate, or of the only half, and of up.
    """
    # Triton 3.6 passes a field on only if it is bound to a name first.
    A_GROUP: tl.constexpr = CODES.a_group
    B_GROUP: tl.constexpr = CODES.b_group
    DOT_FORMAT: tl.constexpr = CODES.dot_format
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    UNROLL: tl.constexpr = TILE.unroll
    MX: tl.constexpr = scaled_by_hardware(a_scales.dtype.element_ty)
    # Sums of int8 products are exact, as long as nothing has to scale them on the way.
    EXACT: tl.constexpr = a_pointers.dtype.element_ty.is_int() and A_GROUP == 0 and B_GROUP == 0
    TOTAL: tl.constexpr = tl.int32 if EXACT else tl.float32
    SCALE_OF_NONE: tl.constexpr = 0 if a_scales.dtype.element_ty.is_int() else 0.0
    A_STEP: tl.constexpr = BLOCK_K // codes_in_byte(a_pointers.dtype.element_ty)
    B_STEP: tl.constexpr = BLOCK_K // codes_in_byte(b_pointers.dtype.element_ty)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=TOTAL)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], dtype=TOTAL)
    for first in range(0, depth, BLOCK_K * UNROLL):
        for part in tl.static_range(UNROLL):
            start = first + part * BLOCK_K
            a_own = a_pointers + part * A_STEP  # [BLOCK_M, BLOCK_K] codes
            if TILE.mask_rows:
                a = tl.load(a_own, mask=row_mask[:, None], other=0 if a_pointers.dtype.element_ty.is_int() else 0.0)
            else:
                a = tl.load(a_own)
            a_scale = None
            if A_GROUP:
                if MX:
                    # [BLOCK_M, BLOCK_K / A_GROUP]
                    a_scale = tl.load(a_scales + start // A_GROUP, mask=row_mask[:, None], other=SCALE_OF_NONE)
                else:
                    a_scale = tl.load(a_scales + start // A_GROUP, mask=row_mask, other=0.0)  # [BLOCK_M]
            b_own = b_pointers + part * B_STEP
            total = _add_product(total, a, b_own, a_scale, b_scales, start, A_GROUP, B_GROUP, DOT_FORMAT, MX)
            if HALVES == 2:
                up_own = up_pointers + part * B_STEP
                up_total = _add_product(
                    up_total, a, up_own, a_scale, up_scales, start, A_GROUP, B_GROUP, DOT_FORMAT, MX
                )
        a_pointers += A_STEP * UNROLL
        b_pointers += B_STEP * UNROLL
        if HALVES == 2:
            up_pointers += B_STEP * UNROLL
    return total.to(tl.float32), up_total.to(tl.float32)


@triton.jit
def scale_total(total, a_scales, b_scales, row_mask, CODES: tl.constexpr):
    """The product [BLOCK_M, BLOCK_N] times those scales that do not change along a row."""
    if CODES.a_group == 0:
        total *= tl.load(a_scales, mask=row_mask, other=0.0)[:, None]
    if CODES.b_group == 0:
        total *= tl.load(b_scales)
    return total


@triton.jit
def scale_globally(total, row_scale, rows, row_mask, matrix_scale, half):
    """The product [BLOCK_M, BLOCK_N] times the global scales of its rows and of its half of a matrix, if any."""
    if row_scale is not None:
        # One after the other: the product of both scales may be too small for fp32.
        total *= tl.load(matrix_scale + half)
        total *= tl.load(row_scale + rows, mask=row_mask, other=0.0)[:, None]
    return total


@triton.jit
def scales_of_rows(scale, rows, stride, MX: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr):
    """Pointers to the first scales of rows of activations, [BLOCK_M].

    Where hardware applies scales, to those of a whole step: [BLOCK_M, BLOCK_K / A_GROUP].
    """
    GROUPS: tl.constexpr = TILE.block_k // CODES.a_group if MX else 1
    if MX:
        return scale + rows.to(tl.int64)[:, None] * stride + tl.arange(0, GROUPS)[None, :]
    else:
        return scale + rows.to(tl.int64) * stride
