"""Dequantizes matrices from canonical storage in one launch, in Triton, bit for bit as `moereg.quantize` does.

A program takes some rows of an expert's matrix and up to a thousand of their columns, in chunks of eight: a thread
reads a chunk's four or eight bytes at once and writes its numbers at once, so both are coalesced and nothing is
exchanged. Scales and zero points are read once for a chunk where its columns have the same.

All arithmetic is in fp32, each operation rounded by itself, so the bits are those of `moereg.weights.formats.restore`,
which is the reference. The operands of products (`kernels/packed/weights.py`) are stored in another order and leave
scales out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.rows_moved import _restored

ELEMENTS: Final = ("uint4", "float4_e2m1fn", "nf4", "int8", "uint8", "float8_e4m3fn")
"""Names of the element types that the kernel decodes."""

SCALES: Final = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), "float"),
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0",
    torch.uint8: "nested",
}
"""Dtypes of the scales that the kernel decodes; uint8: fp32 scales that are quantized too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig:
    """The tile of a program, both sizes powers of two, and its warps."""

    elements: int = 2048
    columns: int = 1024  # at most; fewer, and more rows, where much of a row's last tile would be empty
    num_warps: int = 4

    def tile(self, size: int) -> tuple[int, int]:
        """Rows and columns of a tile where rows have `size` columns."""
        columns = self.columns
        while columns > 64 and -size % columns * 8 > size:
            columns //= 2
        return max(1, self.elements // columns), columns


@triton.jit
def _small_float(code, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Small floats with these codes, int32, in fp32: not every device converts them."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    bits = ((code & (SIGN - 1)) << (23 - MANTISSA_BITS)) | ((code & SIGN) << (32 - BITS))
    # Subnormal numbers are subnormal in fp32 too before this product.
    found = bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    # e2m1 has no NaN.
    return tl.where((code & 127) == 127, float("nan"), found) if BITS == 8 else found


@triton.jit
def _decode(codes, values, ELEMENT: tl.constexpr):
    """Decodes codes, int32, to fp32; those of integers stay as they are."""
    if ELEMENT == "nf4":
        return tl.load(values + codes)
    elif ELEMENT == "float4_e2m1fn":
        return _small_float(codes, 4, 1, 1)
    elif ELEMENT == "float8_e4m3fn":
        return _small_float(codes, 8, 3, 7)
    else:
        return codes


@triton.jit
def _scaled(found, scale, scale_2, values, places, mask, SCALE: tl.constexpr, NESTED_BLOCK: tl.constexpr):
    """Multiplies numbers by an expert's scales at these places."""
    scales = tl.load(scale + places, mask=mask, other=0)
    if SCALE == "e4m3":
        scales = _small_float(scales.to(tl.int32), 8, 3, 7)
    elif SCALE == "nested":
        factor = tl.load(scale_2 + 1 + places // NESTED_BLOCK, mask=mask, other=0.0)
        scales = tl.load(values + 16 + scales.to(tl.int32)) * factor + tl.load(scale_2)
    elif SCALE == "float":
        scales = scales.to(tl.float32)
    return _restored(found, scales)  # It reads powers of two from exponents.


@triton.jit
def _restore_kernel(
    out,
    q,
    scale,
    scale_2,
    zero_point,
    values,
    num_rows,
    size,
    stride_q,
    num_row_groups,
    num_groups,
    part_rows,
    part_groups,
    num_scales_2,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    CHUNK: tl.constexpr = 8
    expert = tl.program_id(1).to(tl.int64)
    num_blocks = tl.cdiv(size, COLUMNS)
    rows = tl.program_id(0) // num_blocks * ROWS + tl.arange(0, ROWS)[:, None, None]  # [M, 1, 1]
    chunks = tl.program_id(0) % num_blocks * (COLUMNS // CHUNK) + tl.arange(0, COLUMNS // CHUNK)[None, :, None]
    columns = chunks * CHUNK + tl.arange(0, CHUNK)[None, None, :]  # [1, N, 8]
    in_rows = rows < num_rows

    BYTES: tl.constexpr = CHUNK * BITS // 8
    places = chunks * BYTES + tl.arange(0, BYTES)[None, None, :]
    mask = in_rows & (places < stride_q)
    codes = tl.load(q + expert * num_rows * stride_q + (rows * stride_q + places), mask=mask, other=0).to(tl.int32)
    if BITS == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, COLUMNS // CHUNK, CHUNK))  # [M, N, 8]
    found = _decode(codes, values, ELEMENT)

    # [1, N, 1] where a chunk has one group, else [1, N, 8].
    firsts = chunks * CHUNK if GROUP % CHUNK == 0 else columns
    groups = firsts // GROUP if GROUP else firsts * 0
    if GROUP_ROWS == 1:
        row_groups = rows
    else:
        row_groups = rows // part_rows * part_groups
        if GROUP_ROWS:
            row_groups += rows % part_rows // GROUP_ROWS
    mask = in_rows & (firsts < size)
    if not found.dtype.is_floating():
        middle = 0 if ELEMENT == "int8" else 1 << (BITS - 1)
        if zero_point is not None:
            stride = tl.cdiv(num_groups * BITS, 8)
            places = expert * num_row_groups * stride + (row_groups * stride + groups * BITS // 8)
            middle = tl.load(zero_point + places, mask=mask, other=0).to(tl.int32)
            if BITS == 4:
                middle = (middle >> (groups % 2 * 4)) & 15
        found = (found - middle).to(tl.float32)
    if scale_2 is not None:
        scale_2 += expert * num_scales_2
    scale += expert * num_row_groups * num_groups
    found = _scaled(found, scale, scale_2, values, row_groups * num_groups + groups, mask, SCALE, NESTED_BLOCK)
    if scale_2 is not None and SCALE != "nested":
        found *= tl.load(scale_2 + rows // (num_rows // num_scales_2), mask=in_rows, other=0.0)
    target = out + expert * num_rows * size + (rows * size + columns)
    tl.store(target, found.to(out.dtype.element_ty), mask=in_rows & (columns < size))


def restore_matrices(
    out: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    *,
    element: str,
    bits: int,
    group: tuple[int, int],
    halves: int = 1,
    scale_2: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    nested_block: int = 0,
    config: RestoreConfig | None = None,
) -> None:
    """Dequantizes one matrix of every expert. All tensors are contiguous.

    Args:
        out: [E, R, K] bf16, fp16 or fp32, fewer than 2**31 elements per expert: overwritten.
        q: [E, R, K] codes, or [E, R, ceil(K / 2)] uint8 with two 4-bit ones per byte, the first in the low half.
        scale: [E, row groups, groups], or [E] or [E, halves] for one per matrix or half; of a dtype of `SCALES`.
        element: one of `ELEMENTS`.
        bits: of a code, 4 or 8.
        group: rows and columns that share a scale; 0: all.
        halves: parts of the rows that no group of several rows spans.
        scale_2: fp32 [E] or [E, halves], multiplies all scales; of quantized scales [E, 1 + blocks], their offset and
            what multiplies the values of `nested_block` of them in order; or None.
        zero_point: uint8 [E, row groups, groups], 4-bit ones packed like codes; or None.
        values: fp32 [16 + 256], the values of nf4 codes and of quantized scales, for either.
        config: None: the usual one.
    """
    num_experts, num_rows, size = out.shape
    assert element in ELEMENTS and scale.dtype in SCALES and q.element_size() == 1 and num_rows * size < 2**31
    assert q.shape == (num_experts, num_rows, triton.cdiv(size * bits, 8))
    tensors = (out, q, scale, scale_2, zero_point, values)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    kind, config = SCALES[scale.dtype], config or RestoreConfig()
    assert (values is not None or not (element == "nf4" or kind == "nested")) and (kind != "nested" or nested_block)
    group_rows, group_columns = group
    num_groups = triton.cdiv(size, group_columns or size)
    num_row_groups = scale[0].numel() // num_groups
    # A part begins with a group of rows.
    part_rows = num_rows // (halves if group_rows else num_row_groups)
    part_groups = triton.cdiv(part_rows, group_rows or part_rows)
    rows, columns = config.tile(size)
    launch(
        _restore_kernel,
        (triton.cdiv(num_rows, rows) * triton.cdiv(size, columns), num_experts),
        *(out, q if element == "int8" else q.view(torch.uint8), scale.view(torch.uint8) if kind[0] == "e" else scale),
        *(scale_2, zero_point, values, num_rows, size, q.shape[2], num_row_groups, num_groups, part_rows, part_groups),
        1 if scale_2 is None else scale_2[0].numel(),
        ELEMENT=element,
        BITS=bits,
        SCALE=kind,
        GROUP_ROWS=group_rows,
        GROUP=group_columns,
        NESTED_BLOCK=nested_block,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=config.num_warps,
        # A product and a sum are two roundings.
        enable_fp_fusion=False,
    )
