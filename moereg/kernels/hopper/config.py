"""Launch configurations of the products on Hopper, and the rule that picks one: data, without device code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moereg.kernels.sizes import SPREAD_HEAVY

BODIES: Final = ((1, 0), (2, 0), (2, 1), (4, 0), (4, 1))
"""Heights of a tile's products, from the shortest: quarters of `block_m` rows, and whether `slack` behind them."""

FIVE_BODIES: Final = 0b11111
"""All of `BODIES`: bit i stands for `BODIES[i]`."""

THREE_BODIES: Final = 0b11010
"""A half, all, all and the slack."""

TWO_BODIES: Final = 0b11000
"""All, and all and the slack: for tiles of which a half is too short to be worth a body."""

QUANTIZED_BLOCK_M: Final = 128
"""Rows of a tile of the kernels with 8-bit codes; equal to the plan's, which has no slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile: wgmma's N side; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two); each warpgroup takes one half.
        slack: rows by which a tile may be longer; equal to the plan's.
        bodies: which of `BODIES` a tile is multiplied as, the shortest that holds it: a bit each. The last two are
            always among them, and a quarter only beside a half, which the producer loads for it.
        group_m: tiles of rows that share the columns of an expert's matrix before the next columns are taken; 0: as
            many as `select_group_m` says.
        num_stages: slots of the ring.
        staged_elements: of one staged store, of which each warpgroup has two; 4 KiB each is what four stages leave.
    """

    block_m: int
    block_n: int
    slack: int = 32
    bodies: int = FIVE_BODIES
    group_m: int = 0
    num_stages: int = 4
    staged_elements: int = 2048

    def rows_of_store(self, num_columns: int) -> int:
        """Rows of a staged store of that many columns.

        Fewer rows in front of a slack would fill only a part of it. The rest, garbage, would go to the slack's rows,
        and no order of the two stores is promised.
        """
        rows = self.staged_elements // num_columns
        least = self.block_m // 2 if self.bodies & 0b100 else self.block_m
        assert rows <= least, f"a staged store of {rows} rows may overwrite the slack behind {least} rows: stage fewer"
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperQuantizedConfig:
    """Launch configuration of one grouped GEMM with 8-bit codes.

    Attributes:
        num_stages: slots of the ring, 48 KiB each.
        num_buffers: staged stores of each warpgroup, 8 KiB each.
        leads: whether the first warpgroup is a step ahead of the second in each tile, so that one multiplies while the
            other adds up or stores; only with block scales, and where there are more steps than slots.
        early: whether programs ask for weights before the kernel in front has ended, as if each expert had rows for
            one tile; only with overlap, and where tiles of rows do not share columns.
    """

    num_stages: int = 4
    num_buffers: int = 2
    leads: bool = False
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperQuantizedRule:
    """One row of the table of shipped configurations with 8-bit codes.

    Attributes:
        max_rows_per_expert: applies up to this average of rows per expert,
        grouped: and where this is set with scales of groups and blocks only.
        encodes_early: whether tokens are encoded before the sort has ended; only their stores need it.
        gate_up: configuration of the first GEMM.
        down: configuration of the second.
    """

    max_rows_per_expert: float = math.inf
    grouped: bool = False
    encodes_early: bool = False
    gate_up: HopperQuantizedConfig = HopperQuantizedConfig()
    down: HopperQuantizedConfig = HopperQuantizedConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        max_rows_per_expert: applies up to this average of rows per expert,
        min_columns: from this many rows of an expert's w13 on,
        max_columns: up to this many,
        min_experts: from this many local experts on,
        max_fewest_tiles: and up to this many tiles of 128 x 256 of the second product's output, if each were full: as
            many as there are where all tokens choose the same experts.
        copies_rows: whether the tokens are first copied to the sorted rows of their routes.
        heavy_first: as in `BlockMap`.
        gate_up: configuration of the first GEMM.
        down: configuration of the second, with the same `block_m` and `slack`.
    """

    max_rows_per_expert: float = math.inf
    min_columns: int = 0
    max_columns: float = math.inf
    min_experts: int = 0
    max_fewest_tiles: float = math.inf
    copies_rows: bool = False
    heavy_first: int = False
    gate_up: HopperGemmConfig
    down: HopperGemmConfig


_WIDE: Final = HopperGemmConfig(block_m=128, block_n=256)
_LONG: Final = HopperGemmConfig(block_m=256, block_n=128)

# Half as wide: twice as many tiles, and shared memory for a fifth stage.
_SQUARE: Final = HopperGemmConfig(block_m=128, block_n=128, num_stages=5)

# For few columns: narrow tiles mask none of 384, and larger stores are fewer, which nothing overlaps.
_NARROW: Final = HopperGemmConfig(block_m=64, block_n=128, bodies=THREE_BODIES, num_stages=7)
_LOW: Final = HopperGemmConfig(block_m=64, block_n=256, bodies=THREE_BODIES, staged_elements=4096)

# The first match counts. Measured on an H200 with 32 to 8192 rows an expert, 2026-11-20 to 23.
#
# One set of experts leaves multiprocessors idle where the second product has few tiles: with half the columns the layer
# took 13 % less, 3 % at zipf, 1 % at even loads (mixtral-8x7b, 256 tokens, 64 tiles). 88 is two thirds of 132.
#
# Shards of up to 768 columns take low tiles around 64 rows an expert, where nothing else was measured: 3 and 6 % less
# (qwen3-30b-a3b over two and four ranks, even). By counted tiles they would gain at 32 rows too and lose at 96 rows of
# 768 columns; where all tokens choose one set of experts they lose.
#
# Tiles of 256 x 128 and of 128 x 256 read equally many bytes a product. Where rows come as boxes, 256 x 128 is faster
# by 1 to 12 %. Copying rows token by token, by 16 bytes, costs it 8 to 14 %, and 128 x 256, which copies half as many,
# 3 to 6 %. A last tile of 128 x 256 has less padding: 32, 64 and 96 rows have bodies. With 128 experts of uneven load
# that is 11 % of the layer at 256 rows an expert, and 1 % is lost where loads are even (qwen3-30b-a3b, 4,096 tokens).
# With 8 experts, whose rows are copied, it loses 9 % (mixtral-8x7b, 1,024 tokens). The border between is a guess.
# Shards of fewer than 512 columns keep 256 x 128: two tiles of 256 for 384 columns multiply a quarter for nothing.
#
# Copying the tokens into sorted order first takes time with rows x H and saves time with rows x H x columns: 162 us to
# save 150 at 2,048 columns (olmoe-1b-7b), 145 us to save 460 at 5,760 (gpt-oss-120b).
#
# Heavy experts first, short tiles last: up to 4 % where loads are uneven from 256 rows on, with the bodies; at 128 it
# loses 3 % (gpt-oss-120b, 4,096 tokens, zipf) and at 64 up to 1 % (qwen3-30b-a3b, 1,024 tokens). Heavy tiles spread
# among the light ones: 3 % faster than first (qwen3-30b-a3b, 4,096 tokens, zipf). Where an expert's matrix is large the
# L2 loses it between its tiles (gpt-oss-120b, 5 % slower), so that the rule ends with 1,536 columns.
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
# With few rows an expert most guesses of a program's first tile are right, and the memory has nothing else to do while
# tokens are sorted: 2 % of the layer (qwen3-30b-a3b, 1,024 tokens). Between 64 and 128 rows, where a second tile
# begins, the border is a guess.
QUANTIZED_RULES: Final = (
    HopperQuantizedRule(max_rows_per_expert=110, grouped=True, encodes_early=True, gate_up=_EARLY, down=_EARLY),
    HopperQuantizedRule(grouped=True, gate_up=_LEADING, down=_LEADING),
    HopperQuantizedRule(),
)

# The L2 does not keep an expert's matrix that is larger until the next tile of rows of the same expert.
_L2_SHARE_BYTES: Final = 48 * 2**20

# Tiles of rows that share its columns then. For smaller matrices 1 is as good as any, or better by up to 11 %
# (gpt-oss-120b).
_L2_GROUP_M: Final = 4


def select_config(
    rows_per_expert: float, num_columns: float, num_experts: int, fewest_tiles: float = math.inf
) -> HopperConfigRule:
    """Returns the rule for an average number of rows per expert, the rows of an expert's w13 and the local experts.

    Infinitely many columns give the rule for rows that lie in order already, as in the batched format.

    Args:
        rows_per_expert: the average.
        num_columns: rows of an expert's w13.
        num_experts: local experts.
        fewest_tiles: as `count_fewest_tiles` counts them; infinity gives the rules that do not ask.
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
    """Returns how many tiles of rows share the columns of an expert's matrix before the next columns are taken."""
    return 1 if matrix_bytes <= _L2_SHARE_BYTES else _L2_GROUP_M


def select_quantized_rule(rows_per_expert: float, grouped: bool) -> HopperQuantizedRule:
    """Returns the rule of codes for an average number of rows per expert, with scales of groups and blocks or not."""
    return next(
        rule
        for rule in QUANTIZED_RULES
        if rows_per_expert <= rule.max_rows_per_expert and (grouped or not rule.grouped)
    )
