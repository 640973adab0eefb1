"""The numbers of tokens and routings at which a layer is measured. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final, NamedTuple

GUARD: Final = "one_set"
"""The routing in which a winner must not be slower. Nobody asks for it, so it decides nothing else."""

NEAR: Final = 1.25
"""Numbers of tokens within this ratio are not told apart further."""


class Point(NamedTuple):
    """One number of tokens in one routing."""

    routing: str
    tokens: int


def token_grid(most: int) -> tuple[int, ...]:
    """Powers of two up to a number of tokens, and that number itself."""
    powers = itertools.takewhile(lambda count: count < most, (1 << place for place in itertools.count()))
    return (*powers, most)


def midpoint(low: int, high: int) -> int | None:
    """The geometric middle of two numbers of tokens, or None if they are near or nothing is between them."""
    middle = round(math.sqrt(low * high))
    return middle if high > NEAR * low and low < middle < high else None


def first_points(counts: Sequence[int], routings: Sequence[str]) -> list[Point]:
    """All points of a grid, and those of the guard."""
    every = dict.fromkeys((*routings, GUARD))
    return [Point(routing, tokens) for tokens in counts for routing in every]


def next_points(
    measured: Sequence[Collection[Point]],
    counts: Sequence[int],
    routings: Sequence[str],
    winner: Callable[[int], Hashable],
) -> list[Point]:
    """The points that the last of some sessions still lacks, in order; bisection may add more after them.

    The first session measures the grid of `counts`, then bisects by its own winners (`winner` by number of tokens).
    Later ones measure the same points.
    """
    first, last = measured[0], measured[-1]
    wanted = first_points(counts, routings)
    # What a session has begun it ends: its own bisection, or the first one's.
    wanted += [Point(routing, tokens) for tokens in sorted({one.tokens for one in first}) for routing in routings]
    if len(measured) == 1 and set(wanted) <= set(first):
        # One bisection between neighbors with different winners, unless they are near.
        pairs = itertools.pairwise(sorted({point.tokens for point in first}))
        middles = (midpoint(*pair) for pair in pairs if midpoint(*pair) and winner(pair[0]) != winner(pair[1]))
        wanted = [Point(routing, middle) for middle in middles if middle is not None for routing in routings]
    return [point for point in dict.fromkeys(wanted) if point not in last]
