"""Launch configurations of the Hopper GEMMs, and the rule that picks one: data only, no device code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moereg.kernels.sizes import SPREAD_HEAVY

BODIES: Final = ((1, 0), (2, 0), (2, 1), (4, 0), (4, 1))
"""Heights that a tile can be multiplied at, shortest first: quarters of `block_m` rows, and whether `slack` follows."""

FIVE_BODIES: Final = 0b11111
"""All of `BODIES`: bit i stands for `BODIES[i]`."""

THREE_BODIES: Final = 0b11010
"""Half a tile, a tile, a tile with slack."""

TWO_BODIES: Final = 0b11000
"""A tile, a tile with slack: where half a tile is too short to be worth a body."""

QUANTIZED_BLOCK_M: Final = 128
"""Rows of a tile of the 8-bit kernels; equal to the plan's, which has no slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperGemmConfig:
    """Launch configuration of one grouped GEMM."""

    block_m: int  # rows of a tile: wgmma's N side; equal to the plan's
    block_n: int  # columns of the weight product per tile (gate and up count as two); each warpgroup takes one half
    slack: int = 32  # rows by which a tile may be longer; equal to the plan's
    # bit mask of `BODIES`; a tile uses the shortest one that holds it. The last two are always set, and a quarter only
    # together with the half, which the producer loads for it; without slack the last is not set
    bodies: int = FIVE_BODIES
    # row tiles that share a column tile of an expert's matrix before the next one is taken; 0: as many as
    # `select_group_m` says
    group_m: int = 0
    num_stages: int = 4  # slots of the ring
    # elements of a staged store. Each warpgroup has two; four stages leave 4 KiB for each. In training it has three
    staged_elements: int = 2048

    def rows_of_store(self, num_columns: int) -> int:
        """Rows of a staged store of `num_columns` columns.

        A shorter body in front of a slack would fill only part of the store. The rest, garbage, would go to the slack's
        rows, and the order of the two stores is not guaranteed.
        """
        rows = self.staged_elements // num_columns
        least = self.block_m // 2 if self.bodies & 0b100 else self.block_m
        assert rows <= least, f"a staged store of {rows} rows may overwrite the slack behind {least} rows: stage fewer"
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperQuantizedConfig:
    """Launch configuration of one 8-bit grouped GEMM."""

    num_stages: int = 4  # slots of the ring, 48 KiB each
    num_buffers: int = 2  # staged stores of each warpgroup, 8 KiB each
    # whether the first warpgroup runs a step ahead of the second in each tile, so that one multiplies while the other
    # accumulates or stores; only with block scales, and with more steps than slots
    leads: bool = False
    # whether programs load weights before the previous kernel has ended, guessing that each expert has rows for one
    # tile; only with overlap, and where row tiles do not share columns
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperQuantizedRule:
    """One row of the table of shipped 8-bit configurations."""

    max_rows_per_expert: float = math.inf  # largest average number of rows per expert
    grouped: bool = False  # whether the row is for group and block scales only
    encodes_early: bool = False  # whether tokens are quantized before the sort has ended; only their stores wait for it
    gate_up: HopperQuantizedConfig = HopperQuantizedConfig()  # configuration of the first GEMM
    down: HopperQuantizedConfig = HopperQuantizedConfig()  # configuration of the second


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfigRule:
    """One row of the table of shipped configurations."""

    max_rows_per_expert: float = math.inf  # largest average number of rows per expert
    min_columns: int = 0  # fewest rows of an expert's w13
    max_columns: float = math.inf  # most rows of an expert's w13
    min_experts: int = 0  # fewest local experts
    # most tiles of 128 x 256 of the second product's output if each were full: as many as there are where all tokens
    # choose the same experts
    max_fewest_tiles: float = math.inf
    copies_rows: bool = False  # whether the tokens are first copied to the sorted rows of their routes
    heavy_first: int = False  # as in `BlockMap`
    gate_up: HopperGemmConfig  # configuration of the first GEMM
    down: HopperGemmConfig  # configuration of the second, with the same `block_m` and `slack`


_WIDE: Final = HopperGemmConfig(block_m=128, block_n=256)
_LONG: Final = HopperGemmConfig(block_m=256, block_n=128)

# Half as wide: twice as many tiles, and shared memory for a fifth stage.
_SQUARE: Final = HopperGemmConfig(block_m=128, block_n=128, num_stages=5)

# For few columns: narrow tiles divide 384, and larger staged stores are fewer, since nothing overlaps a store.
_NARROW: Final = HopperGemmConfig(block_m=64, block_n=128, bodies=THREE_BODIES, num_stages=7)
_LOW: Final = HopperGemmConfig(block_m=64, block_n=256, bodies=THREE_BODIES, staged_elements=4096)

# The first match counts. Measured on an H200 with 32 to 8192 rows an expert, 2026-11-20 to 23.
#
# If all tokens choose one set of experts and the second product has few tiles, multiprocessors idle: half the columns
# saved 13 % of the layer, 3 % at zipf, 1 % at even loads (mixtral-8x7b, 256 tokens, 64 tiles). 88 is two thirds of 132.
#
# Shards of up to 768 columns take low tiles around 64 rows an expert, the only point measured: 3 and 6 % faster
# (qwen3-30b-a3b over two and four ranks, even loads). Counting tiles, they would gain at 32 rows too and lose at 96
# rows of 768 columns. They lose where all tokens choose one set of experts.
#
# Tiles of 256 x 128 and of 128 x 256 read the same bytes per product. Where TMA loads the rows, 256 x 128 is 1 to 12 %
# faster. Gathering rows token by token, 16 bytes at a time, costs it 8 to 14 %, and 128 x 256, with half as many rows,
# 3 to 6 %. The last tile of 128 x 256 has less padding, with bodies for 32, 64 and 96 rows: with 128 experts, 256 rows
# each, it saves 11 % of the layer at uneven loads and loses 1 % at even ones (qwen3-30b-a3b, 4,096 tokens). With 8
# experts, whose rows are copied first, it loses 9 % (mixtral-8x7b, 1,024 tokens). The threshold between is a guess.
# Shards of fewer than 512 columns keep 256 x 128: two tiles of 256 for 384 columns waste a quarter of the work.
#
# Copying the tokens into sorted order first costs time in proportion to rows x H and saves time in proportion to
# rows x H x columns: 162 us to save 150 at 2,048 columns (olmoe-1b-7b), 145 us to save 460 at 5,760 (gpt-oss-120b).
#
# Heavy experts first, short tiles last: up to 4 % faster at uneven loads from 256 rows on, with the bodies; 3 % slower
# at 128 rows (gpt-oss-120b, 4,096 tokens, zipf), up to 1 % at 64 (qwen3-30b-a3b, 1,024 tokens). Spreading heavy tiles
# among light ones is 3 % faster than heavy first (qwen3-30b-a3b, 4,096 tokens, zipf). The L2 evicts a large expert
# matrix between its tiles (gpt-oss-120b, 5 % slower), so that rule ends at 1,536 columns.
CONFIG_RULES: Final = (
    HopperConfigRule(max_rows_per_expert=96, max_fewest_tiles=88, gate_up=_WIDE, down=_SQUARE),
    HopperConfigRule(max_rows_per_expert=48, gate_up=_WIDE, down=_WIDE),
    HopperConfigRule(max_rows_per_expert=72, max_columns=768, gate_up=_NARROW, down=_LOW),
    HopperConfigRule(max_rows_per_expert=176, gate_up=_WIDE, down=_WIDE),
    HopperConfigRule(min_columns=4096, copies_rows=True, heavy_first=True, gate_up=_LONG, down=_LONG),
    HopperConfigRule(
        min_columns=512, max_columns=1536, min_experts=64, heavy_first=SPREAD_HEAVY, gate_up=_WIDE, down=_WIDE
    ),
    HopperConfigRule(min_columns=512, min_experts=64, heavy_first=True, gate_up=_WIDE, down=_WIDE),
    HopperConfigRule(max_rows_per_expert=400, heavy_first=True, gate_up=_LONG, down=_LONG),
    HopperConfigRule(heavy_first=True, gate_up=_WIDE, down=_WIDE),
)

_EARLY: Final = HopperQuantizedConfig(early=True)
_LEADING: Final = HopperQuantizedConfig(leads=True)

# The first match counts. Measured on an H200 with 32 to 1,024 rows an expert, 2026-11-23, block scales only.
#
# With few rows an expert most guesses of a program's first tile are right, and memory is idle while tokens are sorted:
# 2 % of the layer (qwen3-30b-a3b, 1,024 tokens). The threshold, between 64 and 128 rows (a second tile), is a guess.
QUANTIZED_RULES: Final = (
    HopperQuantizedRule(max_rows_per_expert=110, grouped=True, encodes_early=True, gate_up=_EARLY, down=_EARLY),
    HopperQuantizedRule(grouped=True, gate_up=_LEADING, down=_LEADING),
    HopperQuantizedRule(),
)

TRAINED: Final = HopperGemmConfig(block_m=128, block_n=256, slack=0, bodies=0b1011)
"""Products of sorted rows and canonical weights in training: a quarter of a tile, a half, a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradientConfig:
    """Launch configuration of a weight's gradient."""

    block_m: int  # rows of the weight per tile
    block_n: int  # columns
    num_stages: int = 4  # slots of the ring, each of 64 routes


# The side that gathers tokens, 16 bytes at a time, has the shorter half of the tile.
GATHERS_LEFT: Final = WeightGradientConfig(block_m=128, block_n=256)
GATHERS_RIGHT: Final = WeightGradientConfig(block_m=256, block_n=128)

MIN_TRAINED_ROWS: Final = 96
"""Up to this many rows per expert the portable kernels of training take tiles of 64 rows; not measured."""

# The L2 does not keep a larger expert matrix until the expert's next row tile.
_L2_SHARE_BYTES: Final = 48 * 2**20

# Row tiles that then share its columns. For smaller matrices 1 is as good, or up to 11 % better (gpt-oss-120b).
_L2_GROUP_M: Final = 4


def select_config(
    rows_per_expert: float, num_columns: float, num_experts: int, fewest_tiles: float = math.inf
) -> HopperConfigRule:
    """Returns the rule for a layer and an average number of rows per expert.

    Infinitely many columns give the rule for rows that are already in order, as in the batched format.

    Args:
        rows_per_expert: the average.
        num_columns: rows of an expert's w13.
        num_experts: local experts.
        fewest_tiles: as `count_fewest_tiles` counts them; infinity skips rules that limit it.
    """
    return next(
        rule
        for rule in CONFIG_RULES
        if rows_per_expert <= rule.max_rows_per_expert
        and rule.min_columns <= num_columns <= rule.max_columns
        and num_experts >= rule.min_experts
        and fewest_tiles <= rule.max_fewest_tiles
    )


def count_fewest_tiles(num_routes: int, hidden_size: int) -> int:
    """Returns how many tiles of 128 x 256 the second product has where each tile is full."""
    return -(-num_routes // 128) * -(-hidden_size // 256)


def select_group_m(matrix_bytes: int) -> int:
    """Returns how many row tiles share a column tile of an expert's matrix before the next one is taken."""
    return 1 if matrix_bytes <= _L2_SHARE_BYTES else _L2_GROUP_M


def select_quantized_rule(rows_per_expert: float, grouped: bool) -> HopperQuantizedRule:
    """Returns the 8-bit rule for an average number of rows per expert; `grouped`: with group and block scales."""
    return next(
        rule
        for rule in QUANTIZED_RULES
        if rows_per_expert <= rule.max_rows_per_expert and (grouped or not rule.grouped)
    )
