"""A product of sorted rows with their experts' matrices, by a kernel of QuACK.

Sizes: N rows, E experts, `K` the reduced dimension, `C` columns of the product, S rows that are gathered from.
"""

from __future__ import annotations

from typing import Final

import torch
from quack.cache import CACHE_ENABLED, get_cache_path
from quack.epilogue import EpiMod
from quack.gemm_config import GemmConfig

from moereg.kernels.quack.epilogues import INTERMEDIATE

__all__ = ["GemmConfig", "cache_folder", "grouped_product", "select_config"]


def _hopper(tile_m: int, tile_n: int, *, pingpong: bool, cluster_m: int) -> GemmConfig:
    return GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        is_dynamic_persistent=False,
        cluster_m=cluster_m,
        device_capacity=9,
    )


def _blackwell(tile_m: int, tile_n: int, *, cluster_m: int) -> GemmConfig:
    return GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=False,
        is_dynamic_persistent=True,
        cluster_m=cluster_m,
        device_capacity=10,
    )


_FEW_ROWS: Final = 64
"""Up to this many rows an expert, tiles are short: a tall one would be mostly empty."""

# Tiles for few rows and for many. Hopper: the fastest of a sweep over Qwen3-30B's and Mixtral's products at 1 to 1,024
# rows an expert on an H200. Blackwell: QuACK's own choice for tiles with many rows; none has been measured.
_HOPPER: Final = (
    _hopper(64, 256, pingpong=True, cluster_m=1),
    _hopper(128, 192, pingpong=True, cluster_m=1),
)
# Hopper accumulates 8-bit products in a second set of registers. With two warpgroups per tile both fit; with one per
# tall tile, as for 16 bits, 900 bytes a thread spill.
_HOPPER_CODES: Final = (
    _hopper(64, 192, pingpong=True, cluster_m=1),
    _hopper(128, 192, pingpong=False, cluster_m=1),
)
_BLACKWELL: Final = (
    _blackwell(128, 128, cluster_m=1),
    _blackwell(256, 256, cluster_m=2),
)


def select_config(capability: int, rows_per_expert: float, has_codes: bool) -> GemmConfig:
    """Returns a product's tiles, the same object for equal ones: QuACK tells configurations apart by identity.

    Args:
        capability: Major compute capability: 9 or 10.
        rows_per_expert: N / E, for an even routing.
        has_codes: Whether the operands are 8-bit.
    """
    hopper = _HOPPER_CODES if has_codes else _HOPPER
    few, many = hopper if capability == 9 else _BLACKWELL
    return few if rows_per_expert <= _FEW_ROWS else many


def grouped_product(
    epilogue: EpiMod,
    config: GemmConfig,
    out: torch.Tensor,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    expert_offsets: torch.Tensor,
    source: torch.Tensor | None = None,
    **operands: torch.Tensor,
) -> None:
    """Writes epilogue(rows @ matrices[e].T) for the rows of each expert e. Compiles its kernel at first use.

    Args:
        epilogue: From `moereg.kernels.quack.epilogues`.
        config: From `select_config`.
        out: [N, C], or [N, C / 2] where the epilogue is gated; rows contiguous, their size a multiple of 16 bytes. Rows
            that belong to no expert are left as they are.
        rows: [N, K], or [S, K] with `source`; 16 bits or float8_e4m3fn; rows contiguous, of 16-byte multiples.
        matrices: [E, C, K], of the dtype of `rows`, contiguous.
        expert_offsets: [E + 1] int32, first row of each expert, then the number of rows in use.
        source: [N] int32, the row of `rows` that each row is gathered from; any valid row for those not in use.
        operands: Of the epilogue.
    """
    name = INTERMEDIATE if epilogue.outputs else "D"
    epilogue(
        rows,
        matrices.transpose(1, 2),
        out={name: out},
        store_d=name == "D",
        config=config,
        tuned=False,
        cu_seqlens_m=expert_offsets,
        A_idx=source,
        **operands,
    )


def cache_folder() -> str | None:
    """The folder in which QuACK keeps compiled kernels for the next process; None if it keeps none."""
    return str(get_cache_path()) if CACHE_ENABLED else None
