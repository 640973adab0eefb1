"""Layouts of weights and scales that FlashInfer's kernels read, made in torch on any device.

FlashInfer puts the up rows first, and Hopper's 4-bit kernels read codes and scales in their instructions' order. Source
of those two orders: the interleaving kernels and the scale folding of FlashInfer 0.7.2. FlashInfer has helpers for some
of the others, but they need a GPU, quantize again, or hold a second copy of all experts; tests compare the two.

Sizes: E experts, N rows, K columns of one expert's matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch.nn.functional import pad

from moereg.spec.activations import Activation
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights

_SCALE_ROWS: Final = 128
"""Rows of a scale block, as the tensor cores of sm100 and sm120 read them."""

_SCALE_COLUMNS: Final = 4
"""Groups of columns of such a block."""

# TensorRT-LLM's kernels compute the transposed product in tiles of 128 rows and read each 32 rows in steps of four.
_SHUFFLED_ROWS: Final = 32
_STEP: Final = 4

# Rows and columns of a tile within which 4-bit codes are permuted.
_TILE_ROWS: Final = 16
_TILE_CODES: Final = 64

# Bit positions of each 4-bit float of a word: sign, upper bits, lowest bit. The kernel extracts pairs into the
# exponents and mantissas of two bfloat16 with one mask each.
_PLACES: Final = (
    ((3, 15), (0, 6), (1, 7), (2, 8)),
    ((7, 31), (4, 22), (5, 23), (6, 24)),
    ((11, 12), (8, 3), (9, 4), (10, 5)),
    ((15, 28), (12, 19), (13, 20), (14, 21)),
    ((19, 9), (16, 0), (17, 1), (18, 2)),
    ((23, 25), (20, 16), (21, 17), (22, 18)),
    ((27, 14), (24, 13), (25, 10), (26, 11)),
    ((31, 30), (28, 29), (29, 26), (30, 27)),
)


def arrange(w: torch.Tensor, rows: int, columns: int, num_halves: int = 1) -> torch.Tensor:
    """Puts the up rows first and zero-pads each half.

    Args:
        w: [E, halves * R, C], gate rows first; weights, codes or scales.
        rows: Padded rows of each half, at least R.
        columns: Padded columns, at least C.
        num_halves: 2 for the first matrix of a gated layer, else 1.

    Returns:
        [E, halves * rows, columns], contiguous and aligned; the given tensor if nothing changes.
    """
    num_experts, all_rows, width = w.shape
    if num_halves == 1 and (all_rows, width) == (rows, columns):
        return aligned(w)
    # 8-bit elements as bytes: torch does not copy every 8-bit float.
    source = (w.view(torch.uint8) if w.element_size() == 1 else w).unflatten(1, (num_halves, -1))
    is_padded = (all_rows // num_halves, width) != (rows, columns)
    moved = (source.new_zeros if is_padded else source.new_empty)(num_experts, num_halves, rows, columns)
    for half in range(num_halves):
        moved[:, num_halves - 1 - half, : all_rows // num_halves, :width] = source[:, half]
    stacked: torch.Tensor = moved.flatten(1, 2)
    return stacked.view(w.dtype)


def interleave_fp4(matrix: torch.Tensor) -> torch.Tensor:
    """A new tensor with one expert's 4-bit floats in the order of Hopper's W4A16 kernels.

    `matrix` is [R, K / 2] uint8, two codes to a byte, low nibble first; R a multiple of 16, K of 64.
    """
    rows, width = matrix.shape
    # Row 16 b + 8 h + r, byte 32 p + 16 m + 8 n + 4 j + l: a word holds both rows h and both bytes j.
    parts = matrix.view(rows // _TILE_ROWS, 2, 8, width * 2 // _TILE_CODES, 2, 2, 2, 4)  # b h r p m n j l
    words = parts.permute(0, 5, 2, 3, 4, 7, 6, 1).reshape(-1, 4)  # b n r p m l, j h
    return _spread_bits(words.view(torch.int32)).view(torch.uint8).view(rows, width)


def _spread_bits(words: torch.Tensor) -> torch.Tensor:
    """Moves each bit of int32 words to its position."""
    spread = torch.zeros_like(words)
    for number in _PLACES:
        for source, target in number:
            bit = (words >> source) & 1  # An arithmetic shift; the mask removes copies of the sign.
            spread |= bit << target
    return spread


def fold_scales(scales: torch.Tensor, group: int) -> torch.Tensor:
    """Reorders group scales for Hopper's 4-bit kernels: blocks of 64 rows and 128 columns.

    `scales` is [E, R, K / group] of 8 or 16 bits; R a multiple of 64, K of 128. Returns
    [E, R / 64, K / 128, F, 16 bytes], each 16 bytes holding the scales of rows F apart.
    """
    num_experts, rows, groups = scales.shape
    per_block = 128 // group
    num_slices = 16 // scales.element_size() // per_block
    folded = 64 // num_slices
    parts = scales.view(num_experts, rows // 64, num_slices, folded, groups // per_block, per_block)
    return (
        parts.permute(0, 1, 4, 3, 2, 5).reshape(num_experts, rows // 64, groups // per_block, folded, -1).contiguous()
    )


def alternated_rows(rows: int) -> torch.Tensor:
    """Source rows [rows] that make up and gate rows alternate, up first, from gate rows followed by up rows."""
    gate, up = torch.arange(rows).view(2, -1)
    return torch.stack((up, gate), dim=1).flatten()


@functools.lru_cache(maxsize=64)
def shuffled_rows(rows: int) -> torch.Tensor:
    """Source rows [rows], a multiple of 32, in steps of four within each 32: 0, 4, 8 ... 28, 1, 5 ... 31."""
    within = torch.arange(_SHUFFLED_ROWS).view(-1, _STEP).T.flatten()
    return (torch.arange(0, rows, _SHUFFLED_ROWS).unsqueeze(1) + within).flatten()


@functools.lru_cache(maxsize=64)
def gemm1_rows(rows: int, halves: int) -> torch.Tensor:
    """Source rows [halves * I] of gate-first w13 for TensorRT-LLM's kernels: alternated if gated, then shuffled."""
    shuffled = shuffled_rows(rows)
    return alternated_rows(rows)[shuffled] if halves == 2 else shuffled


def grouped_halves(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """A new tensor [E, 2 * I, ...] of alternating groups of up and gate, from gate-first rows, for CuTe DSL."""
    source = _bytes(tensor).unflatten(1, (2, -1, group)).flip(1)  # [E, 2, I / group, group, ...], up first
    grouped: torch.Tensor = source.transpose(1, 2).contiguous()
    return grouped.view(tensor.shape).view(tensor.dtype)


def blocks_of_columns(matrix: torch.Tensor, block_bytes: int = 128) -> torch.Tensor:
    """A view of contiguous [N, K] as column blocks [blocks, N, columns] of `block_bytes` bytes per row."""
    parts: torch.Tensor = matrix.unflatten(-1, (-1, block_bytes // matrix.element_size()))  # [N, blocks, columns]
    return parts.movedim(-2, -3)


def swizzled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Group scales [..., N, G] in the order that tensor cores read: blocks of 128 rows by 4 column groups.

    Within a block, the 4 groups of row `r` are next to those of rows `r + 32`, `r + 64` and `r + 96`. Returns
    [..., N / 128, G / 4, 32, 4, 4], contiguous; missing rows and groups are zero bytes.
    """
    rows, groups = scales.shape[-2:]
    data = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    missing = (-groups % _SCALE_COLUMNS, -rows % _SCALE_ROWS)
    if any(missing):
        data = pad(data, (0, missing[0], 0, missing[1]))
    # [..., N / 128, 4, 32, G / 4, 4]
    blocks: torch.Tensor = data.unflatten(-1, (-1, _SCALE_COLUMNS)).unflatten(-3, (-1, 4, 32))
    return blocks.movedim(-2, -4).transpose(-2, -3).contiguous().view(scales.dtype)


def swizzled_rows(scales: torch.Tensor) -> torch.Tensor:
    """`swizzled_scales` of [E, N, G] as rows: [E, N padded to 128, G padded to 4]."""
    blocks = swizzled_scales(scales)
    return blocks.view(len(blocks), blocks.shape[1] * _SCALE_ROWS, blocks.shape[2] * _SCALE_COLUMNS)


def mma_scales(swizzled: torch.Tensor) -> torch.Tensor:
    """[E, N / 128, G / 4, 32, 4, 4] as CuTe DSL's kernels index it: [32, 4, N / 128, 4, G / 4, E], a view."""
    return swizzled.permute(3, 4, 1, 5, 2, 0)


def each_expert(
    tensor: torch.Tensor, permute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Permutes the experts of [E, ...] one at a time, so that only one is held twice; a new contiguous tensor.

    `permute` maps one expert to a tensor of any strides, the same shape for all; `dtype` None keeps its dtype.
    """
    first = permute(tensor[0])
    result = torch.empty((len(tensor), *first.shape), dtype=dtype or first.dtype, device=tensor.device)
    for expert in range(len(tensor)):
        _bytes(result[expert]).copy_(_bytes(permute(tensor[expert]) if expert else first))
    return result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, viewed as bytes if its elements have one byte."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def one_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Reduces fp32 [E], or [E, 2] with equal gate and up scales, to [E]; a ValueError if these differ."""
    if scale.dim() == 1:
        return scale
    if not torch.equal(scale[:, 0], scale[:, -1]):
        raise ValueError(
            f"these kernels require one scale for gate and up of an expert, got {name} {list(scale.shape)} where they "
            "differ; deny this backend for the layer"
        )
    return scale[:, 0].contiguous()


def one_for_all(weights: ExpertWeights, name: str, largest: bool = True) -> torch.Tensor:
    """The largest of the experts' static scales `name`, [1] fp32; if not `largest` the scales themselves, [1] or [E].

    Tokens are quantized before their experts are known. Floats keep their relative precision under a larger scale than
    necessary. A ValueError if the checkpoint has no such scale.
    """
    scale = weights.tensors().get(name)
    if scale is None:
        raise ValueError(
            f"these kernels require static scales of activations, got weights without {name}; deny this backend for "
            "the layer"
        )
    return scale.max().reshape(1) if largest else scale.reshape(-1)


def activation_scalars(weights: ExpertWeights, activation: Activation, *names: str) -> dict[str, torch.Tensor]:
    """Alpha, beta and clamp as [E] fp32 under these names, where they differ from plain SwiGLU's."""
    given = zip(names, (activation.alpha, activation.beta, activation.limit), (1.0, 0.0, None), strict=True)
    return {
        name: torch.full((weights.num_experts,), value, dtype=torch.float32, device=weights.w13.device)
        for name, value, standard in given
        if value is not None and value != standard
    }
