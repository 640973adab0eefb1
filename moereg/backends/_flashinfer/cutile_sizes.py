"""Tiles of cuTile kernels, and the call sizes that they are specialized for."""

from __future__ import annotations

from typing import Final, NamedTuple

from moereg.spec.problem import MoEProblem

__all__ = ["SORTED_ROUTES", "Tile", "Tiles", "compiled_for"]

SORTED_ROUTES: Final = 32768
"""From this many routes on FlashInfer keeps rows sorted by expert between the GEMMs."""

_SMALL_ROUTES: Final = 24
"""Up to this many routes are sorted by one program."""


class Tile(NamedTuple):
    """Tile columns, K step and occupancy of a grouped GEMM, as in FlashInfer's GemmConfig."""

    tile_n: int
    tile_k: int
    occupancy: int


class Tiles(NamedTuple):
    """Tile height, and the tiles of both GEMMs."""

    rows: int
    gemm1: Tile
    gemm2: Tile


def compiled_for(problem: MoEProblem, num_tokens: int, tiles: Tiles) -> tuple[int | bool | Tiles, ...]:
    """The specialization key of a call's size: calls with equal keys compile nothing new.

    It has powers of two, divisibility by 16, and the thresholds at which FlashInfer changes kernels or steps. With
    fewer than nine experts two small sort kernels may still differ between calls with equal keys.

    Args:
        problem: The layer.
        num_tokens: T.
        tiles: The call's tiles.
    """
    num_routes = num_tokens * problem.top_k
    rows = num_routes + min(num_routes, problem.num_local_experts) * (tiles.rows - 1)
    blocks = -(-rows // tiles.rows)
    powers = (num_routes.bit_length(), (num_routes - 1).bit_length(), (blocks - 1).bit_length())
    divided = (length % 16 == 0 for length in (num_tokens, num_routes, rows, blocks))
    # Column step of the sum, and whether activation or quantization are fused into another kernel.
    steps = (num_tokens <= 2, num_tokens <= 64, num_tokens <= 256)
    return (tiles, *powers, *divided, *steps, num_routes <= _SMALL_ROUTES, num_routes >= SORTED_ROUTES)
