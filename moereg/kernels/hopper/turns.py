"""Hands the tiles of a Hopper grouped GEMM to whichever program is free, in Triton's Gluon.

If each program had a fixed share of the tiles, all would wait for the one with the fewest short tiles: up to 8 % of a
GEMM by simulation, at 4,096 tokens of 256 experts; on an H200 more, see benches/notes/kernels.md. So the producer of a
program takes the next tile from a counter in memory, one or two ahead, and announces it to the consumers through a ring
of two turns. Which program computes a tile changes from run to run; what it computes does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moereg.kernels.hopper.ring import allocate_barriers, next_slot

# Turns announced before consumers have to take the first.
TURNS = gl.constexpr(2)

# Announced in place of a tile when all are taken.
NO_TILE = gl.constexpr(-1)


class Turns(NamedTuple):
    """The shared memory through which a producer announces tiles to two consumers.

    Attributes:
        tiles: [TURNS, 1] int32, numbers of tiles.
        announced: [TURNS, 1] barriers that complete when the producer has written a number.
        taken: [TURNS, 1] barriers that complete when both consumers have read it.
    """

    tiles: Any
    announced: Any
    taken: Any


@gluon.jit
def allocate_turns():
    """Allocates a program's `Turns`."""
    tiles = gl.allocate_shared_memory(gl.int32, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced, taken = allocate_barriers(TURNS, 1)
    return Turns(tiles=tiles, announced=announced, taken=taken)


@gluon.jit
def next_tile(tile_counter):
    """The first tile that no program has taken; programs start with the tile of their own number."""
    return gl.num_programs(0) + gl.atomic_add(tile_counter, 1, sem="relaxed")


@gluon.jit
def announce_tile(tile_number, turns, turn, phase, WARPS: gl.constexpr):
    """Tells the consumers which tile comes next, or that none does.

    Run by all WARPS warps of a producer. Waits until both consumers have read what this turn announced before.

    Returns:
        The next turn and its phase.
    """
    mbarrier.wait(turns.taken.index(turn), phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    turns.tiles.index(turn).store(gl.zeros([1], gl.int32, LAYOUT) + tile_number)  # [1]
    mbarrier.arrive(turns.announced.index(turn))
    return next_slot(turn, phase, TURNS)


@gluon.jit
def take_tile(turns, turn, phase):
    """Takes the next tile. Run by the four warps of a consumer; waits until it is announced.

    Returns:
        The tile's number or NO_TILE, the next turn and its phase.
    """
    mbarrier.wait(turns.announced.index(turn), phase)
    tile_number = gl.sum(turns.tiles.index(turn).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(turns.taken.index(turn))
    turn, phase = next_slot(turn, phase, TURNS)
    return tile_number, turn, phase
