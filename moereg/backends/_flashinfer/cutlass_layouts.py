"""Weight layouts of FlashInfer's CUTLASS kernels, in plain torch, so that any device can make and test them.

FlashInfer puts the up rows first, and Hopper's 4-bit kernels read codes and scales in their instructions' order. Source
of those two orders: the interleaving kernels and the scale folding of FlashInfer 0.7.2.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from moereg.weights.layouts import aligned, round_up

__all__ = ["arrange", "fold_scales", "interleave_fp4", "swizzle_scales"]

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
    """Reorders one expert's 4-bit floats for Hopper's W4A16 kernels.

    Args:
        matrix: [R, K / 2] uint8, two codes to a byte, low nibble first; R a multiple of 16, K of 64.

    Returns:
        A new tensor of the same shape.
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

    Args:
        scales: [E, R, K / group] of 8 or 16 bits; R a multiple of 64, K of 128.
        group: Columns that share a scale.

    Returns:
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


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Reorders block scales for Blackwell's scaled MMA: tiles of 128 rows and 4 groups.

    Args:
        scales: [E, R, G] of 8 bits.

    Returns:
        [E, R padded to 128, G padded to 4], new groups zero.
    """
    num_experts, rows, groups = scales.shape
    all_rows, all_groups = round_up(rows, 128), round_up(groups, 4)
    padded = pad(scales.view(torch.uint8), (0, all_groups - groups, 0, all_rows - rows))
    tiles = padded.view(num_experts, all_rows // 128, 4, 32, all_groups // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(num_experts, all_rows, all_groups).contiguous()
