"""Launch configurations of the packed-weight GEMMs on Hopper, and the rule that picks one: data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

MIN_PACKED_HOPPER_ROWS: Final = 24
"""Up to this many rows an expert, Triton's tiles are faster.

On an H200 these kernels take 1.03 to 1.41x as long at 2 to 16 rows and 0.75x at 32 (gpt-oss-120b, 1,024 tokens).
"""

STAGED_ELEMENTS: Final = 2048
"""Elements of one staged store; each consumer has two."""

# Shared memory of an sm90 multiprocessor, and what the system reserves per program.
_SHARED_BYTES: Final = 228 * 1024
_SYSTEM_BYTES: Final = 1024

_REGISTERS: Final = 64 * 1024

# A generous bound for a program's barriers.
_BARRIER_BYTES: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperPackedConfig:
    """Launch configuration of one grouped GEMM of packed weights."""

    block_m: int  # rows of a tile: wgmma's N side; equal to the plan's
    block_n: int  # columns of the weight product per tile (gate and up count as two), 64 or 128 for each consumer
    slack: int = 32  # rows by which a tile may be longer, or 0; equal to the plan's
    most_stages: int  # slots of the ring, if that many fit
    num_consumers: int = 2  # warpgroups that multiply, 2 or 3
    consumer_registers: int  # per thread
    producer_registers: int  # per thread
    programs: int = 1  # per multiprocessor

    @property
    def columns(self) -> int:
        """Columns per consumer."""
        return self.block_n // self.num_consumers

    @property
    def max_registers(self) -> int | None:
        """Registers per thread at launch, where several programs share a multiprocessor; reassigned by warp role."""
        if self.programs == 1:
            return None
        num_threads = self.programs * 128 * (self.num_consumers + 1)
        return _REGISTERS // num_threads // 8 * 8

    def num_stages(self, word_bytes: int) -> int:
        """Slots of the ring: `most_stages`, or as many as fit.

        Args:
            word_bytes: bytes of 64 weights of a row: 32 for 4 bits, 64 for 8.
        """
        # Per slot: a column's words and one word of its scales, and 64 elements of each row.
        slot = self.block_n * (word_bytes + 4) + 128 * (self.block_m + self.slack)
        staged = self.num_consumers * 2 * 2 * STAGED_ELEMENTS
        available = _SHARED_BYTES // self.programs - _SYSTEM_BYTES - staged - _BARRIER_BYTES
        return min(self.most_stages, available // slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperPackedRule:
    """One row of the table of configurations."""

    max_rows_per_expert: float = math.inf  # largest average number of rows per expert
    copies_rows: bool = False  # whether the tokens are first copied to the sorted rows of their routes
    heavy_first: ClassVar[int] = False  # as in `BlockMap`; off in every rule
    gate_up: HopperPackedConfig  # configuration of the first GEMM
    down: HopperPackedConfig  # configuration of the second, with the same `block_m` and `slack`


# One program of two consumers. Four warps that gather tokens need registers for addresses; TMA needs one with few.
_BY_TOKEN: Final = {"consumer_registers": 208, "producer_registers": 88}
_BY_BOX: Final = {"consumer_registers": 232, "producer_registers": 40}

_TALL: Final = HopperPackedConfig(block_m=256, block_n=128, most_stages=5, **_BY_BOX)
# On gpt-oss-120b at 4,096 tokens, 128 x 256 takes 5 to 7 % longer and 256 x 128 26 to 28 % longer.
_WIDE: Final = HopperPackedConfig(
    block_m=128, block_n=192, most_stages=6, num_consumers=3, consumer_registers=144, producer_registers=64
)
_SMALL: Final = HopperPackedConfig(
    block_m=64, block_n=128, slack=0, most_stages=4, programs=2, consumer_registers=104, producer_registers=32
)

# The first match counts. Measured on an H200 with 2 to 1024 rows an expert, 2026-11-23; see benches/notes/kernels.md.
PACKED_RULES: Final = (
    HopperPackedRule(max_rows_per_expert=40, gate_up=_SMALL, down=_SMALL),
    HopperPackedRule(
        max_rows_per_expert=96,
        gate_up=HopperPackedConfig(block_m=64, block_n=256, slack=16, most_stages=8, **_BY_TOKEN),
        down=HopperPackedConfig(block_m=64, block_n=256, slack=16, most_stages=8, **_BY_BOX),
    ),
    HopperPackedRule(max_rows_per_expert=176, copies_rows=True, gate_up=_WIDE, down=_WIDE),
    HopperPackedRule(copies_rows=True, gate_up=_TALL, down=_TALL),
)


def select_packed_config(rows_per_expert: float) -> HopperPackedRule:
    """Returns the rule for an average number of rows per expert."""
    return next(rule for rule in PACKED_RULES if rows_per_expert <= rule.max_rows_per_expert)
