"""A product of sorted rows with their experts' matrices, by a kernel of QuACK.

Sizes: N rows, E experts, `K` reduced columns, `C` columns of the product, S rows that are gathered from.
"""

from __future__ import annotations

from typing import Final

import torch
from quack.cache import CACHE_ENABLED, get_cache_path
from quack.epilogue import EpiMod
from quack.gemm_config import GemmConfig

from moereg.kernels.quack.epilogues import INTERMEDIATE

__all__ = ["GemmConfig", "cache_folder", "grouped_product", "select_config"]

# Tiles of few rows, and QuACK's own choices where tiles have many. None has been measured here.
_CONFIGS: Final = {
    9: (
        GemmConfig(tile_m=64, tile_n=128, pingpong=True, is_dynamic_persistent=False, cluster_m=1, device_capacity=9),
        GemmConfig(tile_m=128, tile_n=192, pingpong=True, is_dynamic_persistent=False, cluster_m=2, device_capacity=9),
    ),
    10: (
        GemmConfig(tile_m=128, tile_n=128, pingpong=False, is_dynamic_persistent=True, cluster_m=1, device_capacity=10),
        GemmConfig(tile_m=256, tile_n=256, pingpong=False, is_dynamic_persistent=True, cluster_m=2, device_capacity=10),
    ),
}
# Hopper adds sums of codes up in a second set of registers. With two groups of warps on a tile both fit; with a group
# on a tile of its own, as for 16 bits, 900 bytes a thread spill.
_HOPPER_CODES: Final = GemmConfig(
    tile_m=128, tile_n=192, pingpong=False, is_dynamic_persistent=False, cluster_m=2, device_capacity=9
)
_FEW_ROWS: Final = 64
"""Up to this many rows an expert, tiles are short: most of a tall one would be empty."""


def select_config(capability: int, rows_per_expert: float, has_codes: bool) -> GemmConfig:
    """Tiles of a product. The same object for equal tiles, since QuACK tells configurations apart by identity.

    Args:
        capability: Major number of the compute capability: 9 or 10.
        rows_per_expert: N / E, for an even routing.
        has_codes: Whether 8-bit codes are multiplied.
    """
    few, many = _CONFIGS[capability]
    if rows_per_expert <= _FEW_ROWS:
        return few
    return _HOPPER_CODES if has_codes and capability == 9 else many


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
        epilogue: Of `moereg.kernels.quack.epilogues`.
        config: Of `select_config`.
        out: [N, C], or [N, C / 2] where the epilogue is gated; rows contiguous and of a multiple of 16 bytes. Rows that
            belong to no expert are left as they are.
        rows: [N, K], or [S, K] with `source`; 16 bits or float8_e4m3fn, rows contiguous and of a multiple of 16 bytes.
        matrices: [E, C, K], of the dtype of `rows`, contiguous.
        expert_offsets: [E + 1] int32, first row of each expert, then the number of rows in use.
        source: [N] int32, the row of `rows` that each row is gathered from; of rows not in use any that exists.
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
    """Where QuACK keeps compiled kernels for the next process; None where it keeps none."""
    return str(get_cache_path()) if CACHE_ENABLED else None
