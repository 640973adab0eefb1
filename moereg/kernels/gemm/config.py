"""Launch configurations of the expert matmuls, and what a row of their tables is: data, without device code."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """Launch configuration of one product of a vector.

    Attributes:
        block_n: weight rows per program (gate and up count as two); a power of two.
        block_k: reduced elements per step; a power of two, masked where it does not divide.
        num_warps: warps per program.
        num_stages: steps whose weights are on their way at a time.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two).
        block_k: reduced elements per step; masked where it does not divide the padded dimension.
        group_m: tiles of rows that share the columns of a weight before the next columns are taken, for the L2.
        num_warps: warps per program.
        num_stages: depth of the software pipeline. Two to four programs per multiprocessor beat a deeper pipeline.
        mask_rows: whether rows past the end of a tile are left out instead of repeating the last one: pays where tiles
            are mostly empty.
        slices: `block_k` long pieces of a step, one per warp, or 1: warps share columns. Packed weights only. In the
            second product of a `SinglePair` each belongs to one route.
        tall: of tiles of experts with more than `block_m` rows, in the same launch and with as many warps; the plan's
            `tall` is its `block_m`. None: these experts have several tiles like the others.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    mask_rows: bool = False
    slices: int = 1
    tall: GroupedGemmConfig | None = None


@dataclass(frozen=True, slots=True)
class GemvPair:
    """Configurations of both products where every route is a vector; routes are neither sorted nor stored."""

    gate_up: GemvConfig
    down: GemvConfig


@dataclass(frozen=True, slots=True)
class GemmPair:
    """Configurations of both grouped GEMMs, with equal `block_m`.

    Attributes:
        gate_up: the first GEMM's.
        down: the second's.
        sort_routes: whether rows come from a plan; else from `DirectRoutes`, for at most `block_m` tokens.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig
    sort_routes: bool = True

    @property
    def tall(self) -> int:
        """Rows of a plan's tall tiles; 0: it has none."""
        return 0 if self.gate_up.tall is None else self.gate_up.tall.block_m


@dataclass(frozen=True, slots=True)
class SinglePair:
    """Configurations of both products of one token with packed weights; the second one adds up the routes itself.

    Attributes:
        gate_up: the first product's, on `DirectRoutes`.
        down: the second's, whose slices the routes share.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        element_bytes: bytes of an activation.
        configs: of both products.
        max_tokens: the rule applies up to this number of tokens,
        max_rows_per_expert: and up to this average of rows per expert,
        max_packed_bits: and for packed weights of up to so many bits.
    """

    element_bytes: int
    configs: GemvPair | SinglePair | GemmPair
    max_tokens: float = math.inf
    max_rows_per_expert: float = math.inf
    max_packed_bits: int = 8


_RULE_COLUMNS: Final = {
    "bytes": "element_bytes",
    "tokens": "max_tokens",
    "rows": "max_rows_per_expert",
    "bits": "max_packed_bits",
}
_TILE_COLUMNS: Final = {
    "m": "block_m",
    "n": "block_n",
    "k": "block_k",
    "group": "group_m",
    "warps": "num_warps",
    "stages": "num_stages",
    "mask": "mask_rows",
    "slices": "slices",
}
_WORDS: Final = {"any": math.inf, "finite": 2**31, "yes": True, "no": False}


def read_rules(table: str) -> tuple[ConfigRule, ...]:
    """The rules of a table: a line that names the columns, then a line for each rule; `#` begins a comment.

    The first part of a line says up to where the rule applies and the way (`gemv`, `single`, `direct` for routes as
    they come, or `sorted`), the second what the tiles of both products have in common, the third and fourth the rest of
    either one's. Columns are fields of `ConfigRule` and of `GroupedGemmConfig` or `GemvConfig`, in short.
    """
    lines = [line for line in table.splitlines() if line.strip() and not line.strip().startswith("#")]
    header, *rows = ([[_value(word) for word in part.split()] for part in line.split("|")] for line in lines)
    return tuple(_read_rule(header, row) for row in rows)


def _value(word: str) -> Any:
    return _WORDS.get(word, int(word) if word.isdigit() else word)


def _read_rule(header: list[list[str]], row: list[list[Any]]) -> ConfigRule:
    limits, *tiles = (
        dict(zip(names, values, strict=True)) if values else {} for names, values in zip(header, row, strict=True)
    )
    way = limits.pop("way")
    kind = GemvConfig if way == "gemv" else GroupedGemmConfig
    common, *own = ({_TILE_COLUMNS[name]: value for name, value in tile.items()} for tile in tiles)
    gate_up, down = (kind(**common, **each) for each in own)
    pairs: dict[str, Any] = {"gemv": GemvPair, "single": SinglePair}
    make = pairs.get(way, functools.partial(GemmPair, sort_routes=way == "sorted"))
    return ConfigRule(**{_RULE_COLUMNS[name]: limit for name, limit in limits.items()}, configs=make(gate_up, down))


def fit_pipeline(config: GroupedGemmConfig, stage_bytes: int, shared_bytes: int | None) -> GroupedGemmConfig:
    """The configuration with as many stages as fit.

    Args:
        config: launch configuration.
        stage_bytes: that one stage keeps in shared memory.
        shared_bytes: that a program may use; None: any number.
    """
    if shared_bytes is None:
        return config
    # A kilobyte for the reductions and barriers that Triton adds.
    stages = max(1, min(config.num_stages, (shared_bytes - 1024) // stage_bytes))
    return dataclasses.replace(config, num_stages=stages)
