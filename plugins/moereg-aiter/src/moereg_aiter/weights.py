"""The order in which AITER's kernels read weights, and 8-bit floats as gfx942 has them. Torch alone."""

from __future__ import annotations

from typing import Final

import torch

from moereg.author import ExpertWeights

__all__ = ["as_fnuz", "permuted_fp8", "shuffled"]

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


def permuted_fp8(weights: ExpertWeights, is_fnuz: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Codes of e4m3 in AITER's order, with scales for a matrix, a row or a block of 128 x 128.

    Args:
        weights: Canonical.
        is_fnuz: Whether the GPU reads gfx942's 8-bit float.

    Returns:
        Tensors of each expert, and those of all together.

    Raises:
        ValueError: A matrix needs two scales, or experts have different scales of activations.
    """
    per_expert: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    given = weights.tensors()
    for matrix in ("w13", "w2"):
        codes, scale = shuffled(given[matrix]), _one_scale(matrix, given[f"{matrix}_scale"])
        if is_fnuz:
            codes, scale = as_fnuz(codes, scale)
        per_expert |= {matrix: codes, f"{matrix}_scale": scale}
        name = f"a{matrix.removeprefix('w')}_scale"
        if name in given:
            shared[name] = _one_activation_scale(name, given[name]) * (2 if is_fnuz else 1)
    return per_expert, shared


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


def _one_scale(matrix: str, scale: torch.Tensor) -> torch.Tensor:
    """Scales as AITER reads them: [E], [E,N,1] or [E,N/128,K/128]."""
    if scale.dim() != 2:
        return scale
    if not torch.equal(scale[:, 0], scale[:, 1]):
        raise ValueError(
            f"aiter requires one scale for gate and up of an expert, got {matrix}_scale [E,2] where they differ; deny "
            "it for this layer"
        )
    return scale[:, 0].contiguous()


def _one_activation_scale(name: str, scale: torch.Tensor) -> torch.Tensor:
    """[1]: AITER quantizes a token once for all of its experts."""
    flat = scale.reshape(-1)
    if not bool((flat == flat[0]).all()):
        raise ValueError(
            f"aiter requires one scale of activations for all experts, got {name} [E] where they differ; deny it for "
            "this layer"
        )
    return flat[:1].clone()
