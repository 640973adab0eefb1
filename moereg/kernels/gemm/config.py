"""Launch configurations of the expert GEMMs, and the rows of their tables: data only, no device code."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """Launch configuration of one GEMV."""

    block_n: int  # weight rows per program (gate and up count as two); a power of two
    block_k: int  # elements of the reduction per step; a power of two, masked where it does not divide
    num_warps: int  # warps per program
    num_stages: int  # steps whose weights are in flight at once


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmConfig:
    """Launch configuration of one grouped GEMM."""

    block_m: int  # rows of a tile; equal to the plan's
    block_n: int  # columns of the weight product per tile (gate and up count as two)
    block_k: int  # elements of the reduction per step; masked where it does not divide the dimension
    group_m: int  # row tiles that share a column tile of the weight before the next one is taken, for L2 reuse
    num_warps: int  # warps per program
    num_stages: int  # depth of the software pipeline. Two to four programs per multiprocessor beat a deeper pipeline
    # whether loads of rows past the end of a tile are masked instead of repeating the last row: pays off where tiles
    # are mostly empty
    mask_rows: bool = False
    # pieces of a step, `block_k` elements each, one per warp; 1: the warps split the columns instead. Packed weights
    # only. In the second product of a `SinglePair` each slice belongs to one route
    slices: int = 1
    # whether one sum runs over the whole depth, from the first product to the last, as in Hopper's kernels; scales of
    # groups are rounded to the activations' dtype and multiply the weights. Packed weights only
    chained: bool = False
    # configuration of tall tiles, for experts with more than `block_m` rows: same launch, same number of warps; its
    # `block_m` is the plan's `tall`. None: such experts get several tiles of `block_m` rows
    tall: GroupedGemmConfig | None = None


@dataclass(frozen=True, slots=True)
class GemvPair:
    """Configurations of both products as GEMVs; routes are not sorted, and their outputs are not stored."""

    gate_up: GemvConfig
    down: GemvConfig


@dataclass(frozen=True, slots=True)
class GemmPair:
    """Configurations of both grouped GEMMs, with equal `block_m`."""

    gate_up: GroupedGemmConfig  # of the first GEMM
    down: GroupedGemmConfig  # of the second
    sort_routes: bool = True  # whether rows come from a plan; else from `DirectRoutes`, for at most `block_m` tokens

    @property
    def tall(self) -> int:
        """Rows of the plan's tall tiles; 0 if there are none."""
        return 0 if self.gate_up.tall is None else self.gate_up.tall.block_m


@dataclass(frozen=True, slots=True)
class SinglePair:
    """Configurations of both products of one token with packed weights; the second also sums over the routes."""

    gate_up: GroupedGemmConfig  # of the first product, on `DirectRoutes`
    down: GroupedGemmConfig  # of the second, whose slices are divided among the routes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One row of a table of shipped configurations; it applies within all of its limits."""

    element_bytes: int  # bytes of an activation
    configs: GemvPair | SinglePair | GemmPair  # of both products
    max_tokens: float = math.inf  # largest number of tokens
    max_rows_per_expert: float = math.inf  # largest average number of rows per expert
    max_packed_bits: int = 8  # largest width of packed weights


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
    """Parses a table of rules: a header that names the columns, then one line per rule; `#` begins a comment.

    The first part of a line has the rule's limits and its schedule (`gemv`, `single`, `direct` for unsorted routes, or
    `sorted`), the second the fields that both products' tiles share, the third and fourth those of each product.
    Column names abbreviate fields of `ConfigRule` and of `GroupedGemmConfig` or `GemvConfig`.
    """
    lines = [line for line in table.splitlines() if line.strip() and not line.strip().startswith("#")]
    header, *rows = ([[_value(word) for word in part.split()] for part in line.split("|")] for line in lines)
    return tuple(_read_rule(header, row) for row in rows)


def _value(word: str) -> Any:
    if word[0].isdigit():
        return float(word) if "." in word else int(word)
    return _WORDS.get(word, word)


def _read_rule(header: list[list[str]], row: list[list[Any]]) -> ConfigRule:
    limits, *tiles = (
        dict(zip(names, values, strict=True)) if values else {} for names, values in zip(header, row, strict=True)
    )
    schedule = limits.pop("schedule")
    kind = GemvConfig if schedule == "gemv" else GroupedGemmConfig
    common, *own = ({_TILE_COLUMNS[name]: value for name, value in tile.items()} for tile in tiles)
    gate_up, down = (kind(**common, **each) for each in own)
    pairs: dict[str, Any] = {"gemv": GemvPair, "single": SinglePair}
    make = pairs.get(schedule, functools.partial(GemmPair, sort_routes=schedule == "sorted"))
    return ConfigRule(**{_RULE_COLUMNS[name]: limit for name, limit in limits.items()}, configs=make(gate_up, down))


def fit_pipeline(config: GroupedGemmConfig, stage_bytes: int, shared_bytes: int | None) -> GroupedGemmConfig:
    """Returns the configuration with as many of its stages as fit in shared memory.

    Args:
        config: launch configuration.
        stage_bytes: shared memory of one stage.
        shared_bytes: shared memory that a program may use; None: no limit.
    """
    if shared_bytes is None:
        return config
    # A kilobyte for the reductions and barriers that Triton adds.
    stages = max(1, min(config.num_stages, (shared_bytes - 1024) // stage_bytes))
    return dataclasses.replace(config, num_stages=stages)
