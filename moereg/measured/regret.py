"""Regret: how much slower a choice is than the fastest measured cell, by the times of one layer. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from moereg.measured.plans import LayerTimes, equal_decades
from moereg.measured.significance import ASKED, Ratios


@dataclasses.dataclass(frozen=True)
class RegretAt:
    """The regret of a choice at one measured number of tokens, in the asked routings.

    Attributes:
        tokens: T.
        share: Its part of the time of the pack's default over all measured numbers of tokens.
        cell: The chosen cell; None if it is none of those that were measured.
        fastest: The fastest cell where the chosen one was measured, which it may be; None if that was not.
        loss, default_loss: Time of the chosen cell, and of the one by priority, over the fastest's, less 1; or None.
        best: The fastest's time, in units of `share`.
    """

    tokens: int
    share: float
    cell: int | None
    fastest: int | None = None
    loss: float | None = None
    default_loss: float | None = None
    best: float = 0.0


@dataclasses.dataclass(frozen=True)
class Regret:
    """The regret on one layer: at `points`, and the number of calls with fewer or more tokens than all of them."""

    points: tuple[RegretAt, ...]
    calls_outside: float = 0.0

    @property
    def loss(self) -> float | None:
        """Time of the choice over that of the fastest at each number of tokens, less 1; None if nothing is measured."""
        return self._mean([(point.best, point.loss) for point in self.points if point.loss is not None])

    @property
    def default_loss(self) -> float | None:
        """The same of the cell by priority; None unless it was measured wherever the choice was."""
        return self._mean([(point.best, point.default_loss) for point in self.points if point.loss is not None])

    @staticmethod
    def _mean(losses: list[tuple[float, float | None]]) -> float | None:
        weighted = [(best, loss) for best, loss in losses if best]
        known = [best * loss for best, loss in weighted if loss is not None]
        return math.fsum(known) / math.fsum(best for best, _ in weighted) if len(known) == len(weighted) > 0 else None


def regret_of(
    times: LayerTimes,
    chosen: Mapping[int, int | None],
    default: int,
    cells: Collection[int],
    calls: Mapping[int, float] | None = None,
) -> Regret:
    """Compares a choice with the fastest cell at each number of tokens.

    Args:
        times: The layer's times.
        chosen: The chosen cell at each measured number of tokens; None if it has no times.
        default: The cell that priority alone chooses.
        cells: All that could be chosen, these too.
        calls: Calls for each number of tokens, which count at the nearest measured one; without, decades are alike.
    """
    tokens = times.tokens
    shares = equal_decades(tokens) if calls is None else times.shares_of(calls, tokens, times.default)
    points = []
    for at, share in zip(tokens, shares, strict=True):
        cell = chosen[at]
        own = {} if cell is None else {key: one for key, one in times.at(cell, at).items() if key[1] in ASKED}
        gaps = {other: gap for other in cells if (gap := _gap(own, times.at(other, at))) is not None}
        if not own:
            points.append(RegretAt(at, share, cell))
            continue
        fastest = max(gaps, key=lambda other: (gaps[other], other == cell))
        most, cost = gaps[fastest], share * math.exp(math.fsum(one.log for one in own.values()) / len(own))
        default_loss = math.expm1(most - gaps[default]) if default in gaps else None
        points.append(RegretAt(at, share, cell, fastest, math.expm1(most), default_loss, cost * math.exp(-most)))
    outside = (number for at, number in (calls or {}).items() if not tokens[0] <= at <= tokens[-1])
    return Regret(tuple(points), math.fsum(outside))


def _gap(own: Ratios, other: Ratios) -> float | None:
    """Mean logarithm of a cell's time over another's, where both were measured."""
    keys = own.keys() & other.keys()
    return math.fsum(own[key].log - other[key].log for key in keys) / len(keys) if keys else None
