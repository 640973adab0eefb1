"""Hands the tiles of a Hopper grouped GEMM to whichever program is free, in Triton's Gluon.

With a fixed share of tiles for each program all wait for the one that got the fewest short tiles: up to 8 % of a GEMM
by simulation, at 4,096 tokens of 256 experts; on an H200 it costs more, see docs/kernels.md. The producer of a program
takes the next tile from a counter in memory, one or two ahead, and announces it to the consumers through a ring of two
turns. Which program computes a tile changes from run to run; what it computes does not.

`turns` are three pieces of shared memory with TURNS slots: the numbers of tiles, int32 [1]; barriers on which the
producer arrives when a number is there, count 1; and barriers on which both consumers arrive when they have read it,
count 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.ring import next_slot

# Turns announced before consumers have to take the first.
TURNS = gl.constexpr(2)

# In place of a tile, when all were taken.
NO_TILE = gl.constexpr(-1)


@gluon.jit
def next_tile(counter):
    """The first tile that nobody has taken; programs start with the tile of their own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def announce_tile(tile, turns, slot, phase, WARPS: gl.constexpr):
    """Tells the consumers which tile comes next, or that none does, by the warps of the producer.

    Returns:
        Where the ring stands.
    """
    tiles, full, empty = turns
    mbarrier.wait(empty.index(slot), phase)
    tiles.index(slot).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + tile)
    mbarrier.arrive(full.index(slot))
    return next_slot(slot, phase, TURNS)


@gluon.jit
def take_tile(turns, slot, phase):
    """The next tile, by the four warps of a consumer, and where the ring stands."""
    tiles, full, empty = turns
    mbarrier.wait(full.index(slot), phase)
    tile = gl.sum(tiles.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(empty.index(slot))
    slot, phase = next_slot(slot, phase, TURNS)
    return tile, slot, phase
