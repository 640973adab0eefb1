"""Launch configurations of the products of a layer that is trained: data only, no device code.

Of those for Hopper none of fifteen others was faster on an H200, in Qwen3-30B's layer with 256 and 1,024 rows an
expert (timed by hand). The rest is not measured: registers, shared memory and spills are those of compiled kernels, and
the shapes of tiles those that were fastest in inference.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from moereg.kernels.gemm.config import GroupedGemmConfig, fit_pipeline


class ProductTile(NamedTuple):
    """Compile-time constant: a product's tile and which of its loads need a mask."""

    block_m: int  # rows; this and the next three as in `GroupedGemmConfig`
    block_n: int  # columns
    block_k: int  # elements of the reduction per step
    group_m: int  # row tiles that share a column tile
    mask_m: bool  # whether tiles reach past the last row; read where the result is a weight's gradient
    mask_n: bool  # whether tiles reach past the last column
    mask_k: bool  # whether steps reach past the end of the reduction


def product_tile(config: GroupedGemmConfig, num_columns: int, *, depth: int = 0, num_rows: int = 0) -> ProductTile:
    """Returns the constant of a launch; a depth or number of rows that only the device knows is left out."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    masks = {"mask_m": num_rows % block_m != 0, "mask_n": num_columns % block_n != 0, "mask_k": depth % block_k != 0}
    return ProductTile(block_m, block_n, block_k, config.group_m, **masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfigs:
    """Configurations of a call's products, and the limits within which they apply; the first two share a plan."""

    # products of sorted rows and weights: both of the forward pass, and routes' gradients of their tokens
    rows: GroupedGemmConfig
    down_input: GroupedGemmConfig  # gradient of the pre-activation, whose epilogue holds more
    # gradients of w13 and w2; rows and columns are the weight's, and a step takes `block_k` routes
    weights: GroupedGemmConfig
    low_rank: GroupedGemmConfig  # products of sorted rows and an adapter's matrix; as wide as for the highest ranks
    low_rank_weights: GroupedGemmConfig  # gradients of adapters, likewise with as many rows
    element_bytes: int  # bytes of an activation
    max_rows_per_expert: float = math.inf  # largest average number of rows per expert
    min_shared_bytes: int = 0  # least shared memory that a program may use on the device

    @property
    def block_m(self) -> int:
        """Rows of a tile of the plan."""
        return self.rows.block_m

    def low_rank_products(self, rank: int) -> GroupedGemmConfig:
        """The configuration of products with as many columns as an adapter's rank."""
        return dataclasses.replace(self.low_rank, block_n=low_rank_block(rank))

    def a_gradients(self, rank: int) -> GroupedGemmConfig:
        """That of gradients with as many rows as an adapter's rank."""
        return dataclasses.replace(self.low_rank_weights, block_m=low_rank_block(rank))

    def b_gradients(self, rank: int) -> GroupedGemmConfig:
        """That of gradients with as many columns as an adapter's rank."""
        one = self.low_rank_weights
        return dataclasses.replace(one, block_m=one.block_n, block_n=low_rank_block(rank))


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> GroupedGemmConfig:
    return GroupedGemmConfig(block_m=m, block_n=n, block_k=k, group_m=group, num_warps=warps, num_stages=stages)


def low_rank_block(rank: int) -> int:
    """Elements of a tile, or of a step, along an adapter's rank: a power of two that a matrix unit can take."""
    return min(max(16, 1 << (rank - 1).bit_length()), 64)


_LOW_RANK_WEIGHTS: Final = _tile(m=64, n=128, k=64, group=4, warps=4, stages=4)

# The first whose limits hold.
TRAINING_CONFIGS: Final = (
    TrainingConfigs(
        element_bytes=2,
        max_rows_per_expert=96,
        rows=_tile(m=64, n=128, k=64, group=1, warps=4, stages=4),
        down_input=_tile(m=64, n=64, k=64, group=1, warps=4, stages=4),
        weights=_tile(m=128, n=128, k=64, group=4, warps=8, stages=4),
        low_rank=_tile(m=64, n=64, k=64, group=1, warps=4, stages=4),
        low_rank_weights=_LOW_RANK_WEIGHTS,
    ),
    TrainingConfigs(
        element_bytes=2,
        min_shared_bytes=200 * 1024,
        rows=_tile(m=128, n=256, k=64, group=8, warps=8, stages=3),
        down_input=_tile(m=128, n=128, k=64, group=8, warps=8, stages=4),
        weights=_tile(m=128, n=256, k=64, group=4, warps=8, stages=3),
        low_rank=_tile(m=128, n=64, k=64, group=1, warps=4, stages=4),
        # Few tiles of an expert with many rows: half as many steps save 25 % of those at zipf, and lose nothing.
        low_rank_weights=_tile(m=64, n=128, k=128, group=4, warps=8, stages=3),
    ),
    # Before Hopper, whose matrix units read operands from shared memory, these and the product share the registers.
    TrainingConfigs(
        element_bytes=2,
        rows=_tile(m=128, n=128, k=64, group=8, warps=8, stages=3),
        down_input=_tile(m=128, n=64, k=64, group=8, warps=8, stages=3),
        weights=_tile(m=128, n=128, k=64, group=4, warps=8, stages=3),
        low_rank=_tile(m=128, n=64, k=64, group=1, warps=4, stages=3),
        low_rank_weights=_LOW_RANK_WEIGHTS,
    ),
    TrainingConfigs(
        element_bytes=4,
        rows=_tile(m=64, n=64, k=32, group=8, warps=8, stages=2),
        down_input=_tile(m=64, n=64, k=32, group=8, warps=8, stages=2),
        weights=_tile(m=64, n=64, k=32, group=4, warps=8, stages=2),
        low_rank=_tile(m=64, n=64, k=32, group=1, warps=4, stages=2),
        low_rank_weights=_tile(m=64, n=64, k=32, group=4, warps=4, stages=2),
    ),
)

MIN_TRAINING_BLOCK_M: Final = min(configs.block_m for configs in TRAINING_CONFIGS)
"""Sizes a plan before the configuration is known."""

MIN_DOWN_INPUT_BLOCK_N: Final = min(configs.down_input.block_n for configs in TRAINING_CONFIGS)
"""Sizes the sums over the columns of tiles before the configuration is known."""


def select_training_configs(
    rows_per_expert: float, element_bytes: int, shared_bytes: int | None = None
) -> TrainingConfigs:
    """Returns the configurations of a call.

    Args:
        rows_per_expert: average number of rows per expert.
        element_bytes: 2 or 4, of an activation.
        shared_bytes: shared memory that one program may use on the device, None for no limit; shortens pipelines that
            would not fit.
    """
    room = math.inf if shared_bytes is None else shared_bytes
    for configs in TRAINING_CONFIGS:
        is_within = rows_per_expert <= configs.max_rows_per_expert and configs.min_shared_bytes <= room
        if element_bytes == configs.element_bytes and is_within:
            products = "rows", "down_input", "weights", "low_rank", "low_rank_weights"
            fitted: dict[str, Any] = {}
            for name in products:
                tile = getattr(configs, name)
                step = tile.block_k * (tile.block_m + tile.block_n) * element_bytes
                fitted[name] = fit_pipeline(tile, step, shared_bytes)
            return dataclasses.replace(configs, **fitted)
    raise AssertionError(f"no launch configuration for {element_bytes}-byte elements")
