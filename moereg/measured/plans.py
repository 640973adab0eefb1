"""Plans: which cell runs at which numbers of tokens, by the times of one layer. Pure.

LayerTimes       a layer's rows by cell and number of tokens
best_for_all     plan A: one cell for all numbers of tokens
with_ranges      plans B and C: other cells where they win, between measured numbers of tokens
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from moereg.measured.pack import Row
from moereg.measured.significance import ASKED, Ratio, Ratios, beats

Ranges = tuple[tuple[int | None, int], ...]
"""(most tokens, cell) in ascending order; the last one is open."""

_NOT_MEASURED: Ratios = {}


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """A layer's rows for comparing cells.

    Attributes:
        rows: The rows; ratios are to the time of `default`.
        default: The cell that was measured beside each.
    """

    rows: tuple[Row, ...]
    default: int

    @functools.cached_property
    def _routings(self) -> dict[tuple[int, int], set[str]]:
        """The routings that a session measured at a number of tokens, by both."""
        found: dict[tuple[int, int], set[str]] = {}
        for row in self.rows:
            found.setdefault((row.session, row.tokens), set()).add(row.routing)
        return found

    @functools.cached_property
    def tokens(self) -> tuple[int, ...]:
        """Measured numbers of tokens, ascending."""
        return tuple(sorted({row.tokens for row in self.rows}))

    @functools.cached_property
    def _ratios(self) -> dict[tuple[int, int], Ratios]:
        by_cell: dict[tuple[int, int], dict[tuple[int, str], Ratio]] = {}
        for row in self.rows:
            ratios = by_cell.setdefault((row.cell, row.tokens), {})
            ratios[row.session, row.routing] = Ratio(row.log_ratio, row.half_width)
        for (session, tokens), routings in self._routings.items():
            for (_, at), ratios in by_cell.items():
                # A session that was interrupted says nothing of the routings that it lacks.
                if at == tokens and any((session, routing) not in ratios for routing in routings):
                    for routing in routings:
                        ratios.pop((session, routing), None)
        return dict(by_cell)

    def at(self, cell: int, tokens: int) -> Ratios:
        """A cell's ratios at a number of tokens, of sessions that measured it in all of their routings."""
        return self._ratios.get((cell, tokens), _NOT_MEASURED)

    def over_all(self, cell: int, default: int, calls: Mapping[int, float] | None = None) -> Ratios:
        """A cell's ratios over all numbers of tokens, to the time of `default`, weighted by the latter's time.

        Only of sessions that measured both at every number of tokens of the layer.

        Args:
            cell, default: Cells of the layer.
            calls: Calls for each number of tokens; by default every decade of tokens takes `default` equally long.
        """
        found: dict[tuple[int, str], Ratio] = {}
        for session in {session for session, _ in self._routings}:
            routings = {at: self._routings.get((session, at), set()) for at in self.tokens}
            # An interrupted session has few tokens alone, which would say nothing of many.
            if all(
                names and all((session, name) in self.at(each, at) for each in (cell, default) for name in names)
                for at, names in routings.items()
            ):
                for routing in set().union(*routings.values()):
                    tokens = [at for at in self.tokens if routing in routings[at]]
                    shares = self.shares(tokens, default, calls)
                    found[session, routing] = self._cost(cell, default, (session, routing), tokens, shares)
        return found

    def _cost(
        self, cell: int, default: int, key: tuple[int, str], tokens: Sequence[int], shares: Sequence[float]
    ) -> Ratio:
        ratios = [self.at(cell, at)[key] for at in tokens]
        bases = [self.at(default, at)[key] for at in tokens]
        costs = [share * math.exp(own.log - base.log) for share, own, base in zip(shares, ratios, bases, strict=True)]
        cost = math.fsum(costs)
        # The derivative of ln(cost) by each logarithm is that cost's part of the sum.
        widths = (part / cost * own.half_width for part, own in zip(costs, ratios, strict=True))
        return Ratio(math.log(cost), math.hypot(*widths))

    def shares(self, tokens: Sequence[int], default: int, calls: Mapping[int, float] | None = None) -> list[float]:
        """The share of each number of tokens in the time of `default`; they add up to 1."""
        if calls is None:
            weights = _log_widths(tokens)
        else:
            counted = dict.fromkeys(tokens, 0.0)
            for called, times in calls.items():
                # The nearest by ratio, since times grow with tokens.
                counted[min(tokens, key=lambda at: abs(math.log(at / called)))] += times
            weights = [counted[at] * self._median_us(default, at) for at in tokens]
        total = math.fsum(weights)
        return [weight / total for weight in weights] if total > 0 else [1 / len(tokens)] * len(tokens)

    def _median_us(self, cell: int, tokens: int) -> float:
        asked = [row for row in self.rows if (row.cell, row.tokens) == (cell, tokens) and row.routing in ASKED]
        return math.fsum(row.median_us for row in asked) / max(1, len(asked))


def _log_widths(tokens: Sequence[int]) -> list[float]:
    """The part of the logarithmic axis that each number of tokens stands for, from middle to middle."""
    logs = [math.log(at) for at in tokens]
    if len(logs) == 1:
        return [1.0]
    inner = [right - left for left, right in itertools.pairwise(logs)]
    # The first and the last stand for as much beyond them.
    return [(left + right) / 2 for left, right in itertools.pairwise([inner[0], *inner, inner[-1]])]


def best_for_all(times: LayerTimes, order: Sequence[int], calls: Mapping[int, float] | None = None) -> int:
    """Plan A: the cell with the least time over all numbers of tokens.

    Args:
        times: The layer's times.
        order: Cells in the order of static priority; a later one has to beat the best before it.
        calls: As in `LayerTimes.over_all`.
    """
    default = best = order[0]
    costs = {cell: times.over_all(cell, default, calls) for cell in order}
    for cell in order[1:]:
        if beats(costs[cell], costs[best], (costs[default],)):
            best = cell
    return best


def with_ranges(times: LayerTimes, order: Sequence[int], base: int, others: Collection[int]) -> Ranges:
    """Plans B and C: `base` for all, and other cells where they win.

    A cell has the range from the first to the last measured number of tokens of a run that it wins, so nothing is
    assumed of larger, smaller or disputed ones.

    Args:
        times: The layer's times.
        order: Cells in the order of static priority, with `base`.
        base: The cell of plan A.
        others: Cells that may run too: they read the layout of `base`, or have memory for their own.
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
