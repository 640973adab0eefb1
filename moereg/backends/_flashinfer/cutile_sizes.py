"""Tiles of cuTile kernels, and what a kernel is compiled for of a call's size."""

from __future__ import annotations

from typing import Final, NamedTuple

from moereg.spec.problem import MoEProblem

__all__ = ["SORTED_ROUTES", "Tile", "Tiles", "compiled_for"]

SORTED_ROUTES: Final = 32768
"""Routes from which on FlashInfer keeps rows in the order of experts between both products."""

_SMALL_ROUTES: Final = 24
"""Routes that one program sorts."""


class Tile(NamedTuple):
    """Columns, reduced columns and programs at a time of a grouped product, as FlashInfer's GemmConfig has them."""

    tile_n: int
    tile_k: int
    occupancy: int


class Tiles(NamedTuple):
    """Rows of a tile, and the tiles of both products."""

    rows: int
    gemm1: Tile
    gemm2: Tile


def compiled_for(problem: MoEProblem, num_tokens: int, tiles: Tiles) -> tuple[int | bool | Tiles, ...]:
    """The sizes of a call that kernels are specialized by: calls with equal ones compile nothing new.

    Those are powers of two, lengths that 16 divides, and the places where FlashInfer takes other kernels or steps. With
    fewer than nine experts two small kernels of the sort differ also between calls that agree.

    Args:
        problem: The layer.
        num_tokens: T.
        tiles: Of such a call.
    """
    num_routes = num_tokens * problem.top_k
    rows = num_routes + min(num_routes, problem.num_local_experts) * (tiles.rows - 1)
    blocks = -(-rows // tiles.rows)
    powers = (num_routes.bit_length(), (num_routes - 1).bit_length(), (blocks - 1).bit_length())
    divided = (length % 16 == 0 for length in (num_tokens, num_routes, rows, blocks))
    # Columns at a time of the sum, and whether activation or quantization are part of another kernel.
    steps = (num_tokens <= 2, num_tokens <= 64, num_tokens <= 256)
    return (tiles, *powers, *divided, *steps, num_routes <= _SMALL_ROUTES, num_routes >= SORTED_ROUTES)
