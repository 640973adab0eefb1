"""Plans: which cell runs at which numbers of tokens, by the times of one layer. Pure.

LayerTimes       a layer's rows by cell and number of tokens
best_for_all     one cell for all numbers of tokens
with_ranges      other cells where they win, between measured numbers of tokens
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence

from moereg.evidence.pack import Row
from moereg.evidence.significance import ASKED, Ratio, Ratios, beats

Ranges = tuple[tuple[int | None, int], ...]
"""(most tokens, cell) in ascending order; the last one is open."""


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """A layer's rows for comparing cells; fields as in `TunedLayer`, ratios to the time of `default`."""

    rows: tuple[Row, ...]
    default: int
    calls: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """Measured numbers of tokens, ascending."""
        return tuple(sorted({row.tokens for row in self.rows}))

    @functools.cached_property
    def _ratios(self) -> dict[tuple[int, int], Ratios]:
        routings: dict[tuple[int, int], set[str]] = {}
        found: dict[tuple[int, int], dict[tuple[int, str], Ratio]] = {}
        for row in self.rows:
            routings.setdefault((row.session, row.tokens), set()).add(row.routing)
            found.setdefault((row.cell, row.tokens), {})[row.session, row.routing] = Ratio(
                row.log_ratio, row.half_width
            )
        # A session that was interrupted says nothing of the routings that it lacks.
        return {
            (cell, at): {
                (session, routing): ratio
                for (session, routing), ratio in ratios.items()
                if all((session, other) in ratios for other in routings[session, at])
            }
            for (cell, at), ratios in found.items()
        }

    def at(self, cell: int, tokens: int) -> Ratios:
        """A cell's ratios at a number of tokens, of sessions that measured it in all of their routings."""
        return self._ratios.get((cell, tokens), {})

    def over_all(self, cell: int, default: int) -> Ratios:
        """A cell's ratios to the time of `default` over all numbers of tokens, weighted by `shares`.

        Only of sessions that measured both at every number of tokens: few tokens alone say nothing of many.
        """
        measured = [self.at(each, tokens).keys() for each in (cell, default) for tokens in self.tokens]
        sessions = set.intersection(*({session for session, _ in keys} for keys in measured))
        return {key: self._cost(cell, default, key) for key in set().union(*measured) if key[0] in sessions}

    def _cost(self, cell: int, default: int, key: tuple[int, str]) -> Ratio:
        tokens = [at for at in self.tokens if key in self.at(default, at)]
        ratios, bases = ([self.at(each, at)[key] for at in tokens] for each in (cell, default))
        shares = self.shares(tokens, default)
        costs = [share * math.exp(own.log - base.log) for share, own, base in zip(shares, ratios, bases, strict=True)]
        cost = math.fsum(costs)
        # The derivative of ln(cost) by each logarithm is that cost's part of the sum.
        widths = (part / cost * own.half_width for part, own in zip(costs, ratios, strict=True))
        return Ratio(math.log(cost), math.hypot(*widths))

    def shares(self, tokens: Sequence[int], cell: int) -> list[float]:
        """The share of each number of tokens in a cell's time of the calls; of decades alike if none is among them."""
        counted = dict.fromkeys(tokens, 0)
        for called, number in self.calls:
            if tokens[0] <= called <= tokens[-1]:
                # The nearest by ratio, since times grow with tokens.
                counted[min(tokens, key=lambda at: abs(math.log(at / called)))] += number
        spent = [number * self._median_us(cell, at) for at, number in counted.items()]
        return [time / math.fsum(spent) for time in spent] if any(spent) else _equal_decades(tokens)

    def _median_us(self, cell: int, tokens: int) -> float:
        """A cell's mean median in the asked routings."""
        own = [row for row in self.rows if (row.cell, row.tokens) == (cell, tokens) and row.routing in ASKED]
        return math.fsum(row.median_us for row in own) / max(1, len(own))


def _equal_decades(tokens: Sequence[int]) -> list[float]:
    """The share of each number of tokens if all decades count alike: from middle to middle on the logarithmic axis."""
    logs = [math.log(at) for at in tokens]
    if len(logs) == 1:
        return [1.0]
    inner = [right - left for left, right in itertools.pairwise(logs)]
    # The first and the last stand for as much beyond them.
    widths = [(left + right) / 2 for left, right in itertools.pairwise([inner[0], *inner, inner[-1]])]
    return [width / math.fsum(widths) for width in widths]


def best_for_all(times: LayerTimes, order: Sequence[int]) -> int:
    """Plan A: the cell with the least time over all numbers of tokens.

    `order` has cells in the order of static priority; a later one has to beat the best before it.
    """
    default = best = order[0]
    costs = {cell: times.over_all(cell, default) for cell in order}
    for cell in order[1:]:
        if beats(costs[cell], costs[best], (costs[default],)):
            best = cell
    return best


def with_ranges(times: LayerTimes, order: Sequence[int], base: int, others: Collection[int]) -> Ranges:
    """Plan B: `base` for all, and other cells where they win.

    A cell has the range from the first to the last measured number of tokens of a run that it wins, so nothing is
    assumed of larger, smaller or disputed ones. `others` may run too, since they read the layout of `base`.
    """
    winners = [(at, _winner_at(times, at, order, base, others)) for at in times.tokens]
    ranges: list[tuple[int | None, int]] = []
    for cell, run in itertools.groupby(winners, key=lambda pair: pair[1]):
        if cell == base:
            continue
        won = [at for at, _ in run]
        before = ranges[-1][0] if ranges else 0
        assert before is not None
        if before < won[0] - 1:
            ranges.append((won[0] - 1, base))
        ranges.append((won[-1], cell))
    return (*ranges, (None, base))


def _winner_at(times: LayerTimes, tokens: int, order: Sequence[int], base: int, others: Collection[int]) -> int:
    guards = times.at(base, tokens), times.at(order[0], tokens)
    best = base
    for cell in order:
        if cell != base and cell in others and beats(times.at(cell, tokens), times.at(best, tokens), guards):
            best = cell
    return best
