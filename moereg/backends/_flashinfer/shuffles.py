"""Permutes weights and scales into the orders that FlashInfer's kernels read, in torch on any device.

FlashInfer has helpers for some of them, but they need a GPU, quantize again, or hold a second copy of all experts.
These follow the documented orders, and tests compare the two.

Sizes: N rows, K columns of one expert's matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch

__all__ = [
    "SCALE_COLUMNS",
    "SCALE_ROWS",
    "alternated_rows",
    "blocks_of_columns",
    "each_expert",
    "gemm1_rows",
    "gemm2_rows",
    "grouped_halves",
    "mma_scales",
    "swapped_halves",
    "swizzled_scales",
]

SCALE_ROWS: Final = 128
"""Rows of a scale block, as the tensor cores of sm100 and sm120 read them."""

SCALE_COLUMNS: Final = 4
"""Groups of columns of such a block."""

# TensorRT-LLM's kernels compute the transposed product in tiles of 128 rows and read each 32 rows in steps of four.
_SHUFFLED_ROWS: Final = 32
_STEP: Final = 4


def swapped_halves(tensor: torch.Tensor, halves: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Swaps gate and up halves; a single half stays as it is.

    Args:
        tensor: [E, halves * I, ...] or [E, halves].
        halves: 2 if gated, else 1.
        out: Output of the same shape; None allocates one.

    Returns:
        `out`; `tensor` itself if there is one half and no `out`.
    """
    if out is None:
        if halves == 1:
            return tensor
        out = torch.empty_like(tensor)
    # As bytes, since not every device copies 8-bit floats.
    source, target = _bytes(tensor), _bytes(out)
    target.unflatten(1, (halves, -1)).copy_(source.unflatten(1, (halves, -1)).flip(1))
    return out


def alternated_rows(rows: int) -> torch.Tensor:
    """Source rows [rows] that make up and gate rows alternate, up first, from gate rows followed by up rows."""
    gate, up = torch.arange(rows).view(2, -1)
    return torch.stack((up, gate), dim=1).flatten()


def shuffled_rows(rows: int) -> torch.Tensor:
    """Source rows [rows] in steps of four within each 32: 0, 4, 8 ... 28, 1, 5 ... 31."""
    within = torch.arange(_SHUFFLED_ROWS).view(-1, _STEP).T.flatten()
    return (torch.arange(0, rows, _SHUFFLED_ROWS).unsqueeze(1) + within).flatten()


@functools.lru_cache(maxsize=64)
def gemm1_rows(rows: int, halves: int) -> torch.Tensor:
    """Source rows [rows] of gate-first w13 for TensorRT-LLM's kernels: alternated if gated, then shuffled.

    Args:
        rows: `halves * I`, a multiple of 32.
        halves: 2 if gated, else 1.
    """
    shuffled = shuffled_rows(rows)
    return alternated_rows(rows)[shuffled] if halves == 2 else shuffled


@functools.lru_cache(maxsize=64)
def gemm2_rows(rows: int) -> torch.Tensor:
    """Source rows [rows] of w2 for TensorRT-LLM's kernels; a multiple of 32."""
    return shuffled_rows(rows)


def grouped_halves(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Rearranges gate-first rows into alternating groups of up and gate rows, up first, for CuTe DSL's kernels.

    Args:
        tensor: [E, 2 * I, ...], I a multiple of `group`.
        group: Rows per group.

    Returns:
        A new contiguous tensor of the same shape.
    """
    source = _bytes(tensor).unflatten(1, (2, -1, group)).flip(1)  # [E, 2, I / group, group, ...], up first
    grouped: torch.Tensor = source.transpose(1, 2).contiguous()
    return grouped.view(tensor.shape).view(tensor.dtype)


def blocks_of_columns(matrix: torch.Tensor, block_bytes: int = 128) -> torch.Tensor:
    """Splits [N, K] into column blocks [blocks, N, columns] of `block_bytes` bytes per row.

    Args:
        matrix: Contiguous; a row's bytes are a multiple of `block_bytes`.
        block_bytes: Bytes of a row per block.

    Returns:
        A view.
    """
    parts: torch.Tensor = matrix.unflatten(-1, (-1, block_bytes // matrix.element_size()))  # [N, blocks, columns]
    return parts.movedim(-2, -3)


def swizzled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Group scales in the order that tensor cores read: blocks of 128 rows by 4 column groups.

    Within a block, the 4 groups of row `r` are next to those of rows `r + 32`, `r + 64` and `r + 96`.

    Args:
        scales: [..., N, G] of any dtype.

    Returns:
        [..., N / 128, G / 4, 32, 4, 4], contiguous; missing rows and groups are zero bytes.
    """
    rows, groups = scales.shape[-2:]
    data = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    missing = (-groups % SCALE_COLUMNS, -rows % SCALE_ROWS)
    if any(missing):
        data = torch.nn.functional.pad(data, (0, missing[0], 0, missing[1]))
    # [..., N / 128, 4, 32, G / 4, 4]
    blocks: torch.Tensor = data.unflatten(-1, (-1, SCALE_COLUMNS)).unflatten(-3, (-1, 4, 32))
    return blocks.movedim(-2, -4).transpose(-2, -3).contiguous().view(scales.dtype)


def mma_scales(swizzled: torch.Tensor) -> torch.Tensor:
    """[E, N / 128, G / 4, 32, 4, 4] as CuTe DSL's kernels index it: [32, 4, N / 128, 4, G / 4, E], a view."""
    return swizzled.permute(3, 4, 1, 5, 2, 0)


def each_expert(
    tensor: torch.Tensor, permute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Permutes experts one at a time, so that only one is held twice.

    Args:
        tensor: [E, ...].
        permute: Maps one expert to a tensor of any strides, the same shape for all.
        dtype: The result's dtype; None keeps that of `permute`.

    Returns:
        [E, ...], a new contiguous tensor.
    """
    first = permute(tensor[0])
    result = torch.empty((len(tensor), *first.shape), dtype=dtype or first.dtype, device=tensor.device)
    for expert in range(len(tensor)):
        _bytes(result[expert]).copy_(_bytes(permute(tensor[expert]) if expert else first))
    return result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, viewed as bytes if its elements have one byte."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
