"""The ring of a Hopper grouped GEMM of packed weights, in Triton's Gluon."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.turns import TURNS, Turns


class PackedRing(NamedTuple):
    """The shared memory of a ring with STAGES slots and of CONSUMERS warpgroups, each with its own part of a slot.

    Attributes:
        weights: [CONSUMERS * STAGES, lines, 32] int32, the words of a consumer's rows of one block.
        scales: [CONSUMERS * STAGES, lines, 8] int32, a word of each of these rows; None where there are none.
        rows: [2 * STAGES, BLOCK_M // 2, BLOCK_K] a slot's rows of activations, in two halves.
        slack_rows: [STAGES, SLACK, BLOCK_K] the rows behind them; None without slack.
        full: [STAGES, 1] barriers that complete when the bytes of a slot have arrived.
        empty: [STAGES, 1] barriers that complete when all consumers have multiplied them.
    """

    weights: Any
    scales: Any
    rows: Any
    slack_rows: Any
    full: Any
    empty: Any


@gluon.jit
def allocate_counted_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocates a barrier a slot for a producer's arrivals, and one for those of all consumers."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=ARRIVALS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return full, empty


@gluon.jit
def allocate_counted_turns(CONSUMERS: gl.constexpr):
    """Allocates a program's `Turns` for that many consumers."""
    tiles = gl.allocate_shared_memory(gl.int32, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced, taken = allocate_counted_barriers(TURNS, 1, CONSUMERS)
    return Turns(tiles=tiles, announced=announced, taken=taken)
