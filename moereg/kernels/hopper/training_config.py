"""Launch configurations of the Hopper products of a layer that is trained: data only, no device code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moereg.kernels.hopper.config import HopperGemmConfig

TRAINED: Final = HopperGemmConfig(block_m=128, block_n=256, slack=0, bodies=0b1011)
"""Products of sorted rows and canonical weights: a quarter of a tile, a half, a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradientConfig:
    """Launch configuration of a weight's gradient.

    Attributes:
        block_m: rows of the weight per tile.
        block_n: columns.
        num_stages: slots of the ring, each of 64 routes.
    """

    block_m: int
    block_n: int
    num_stages: int = 4


# The side that gathers tokens, 16 bytes at a time, has the shorter half of the tile.
GATHERS_LEFT: Final = WeightGradientConfig(block_m=128, block_n=256)
GATHERS_RIGHT: Final = WeightGradientConfig(block_m=256, block_n=128)

MIN_ROWS_PER_EXPERT: Final = 96
"""Up to this many rows per expert the portable kernels take tiles of 64 rows; not measured."""
