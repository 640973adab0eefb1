"""The order in which AITER's kernels read weights, and 8-bit floats as gfx942 has them. Torch alone."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["LANE_BYTES", "TILE_COLUMNS", "TILE_ROWS", "as_fnuz", "shuffled"]

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 32
LANE_BYTES: Final = 16
"""Tiles are 16 rows of 32 elements; a lane reads 16 bytes of a row."""

_NEGATIVE_ZERO: Final = -128
_NANS: Final = (127, -1)


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Weights in AITER's order: what its `shuffle_weight` gives for tiles of 16 x 16.

    Tiles of 16 rows x 32 columns stand one after another, those of the same rows together. Within a tile, the first 16
    bytes of every row come first, then the next 16 of every row.

    Args:
        weight: [E,N,K], N a multiple of 16, K of 32, elements of 1 or 2 bytes.

    Returns:
        [E,N,K] of the same dtype, a copy that was made expert by expert.
    """
    rows, columns = weight.shape[1:]
    lane = LANE_BYTES // weight.element_size()
    out = torch.empty_like(weight)
    for source, target in zip(weight, out, strict=True):
        tiles = source.view(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS // lane, lane)
        target.view(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS // lane, TILE_ROWS, lane).copy_(
            tiles.permute(0, 2, 3, 1, 4)
        )
    return out


def as_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in gfx942's 8-bit float, whose exponent is biased by one more and which has no negative zero.

    Args:
        codes: float8_e4m3fn; consumed: its storage is written where a code means something else there.
        scale: fp32, of any shape.

    Returns:
        The storage as float8_e4m3fnuz, and scales of twice the size. Every product of the two is the same number.
    """
    bits = codes.view(torch.int8)
    is_nan = (bits == _NANS[0]) | (bits == _NANS[1])
    # fnuz has its only NaN where others have the negative zero.
    bits.masked_fill_(bits == _NEGATIVE_ZERO, 0).masked_fill_(is_nan, _NEGATIVE_ZERO)
    return codes.view(torch.float8_e4m3fnuz), scale * 2
