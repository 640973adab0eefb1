"""A selection's plan as experts: a call's number of tokens says which of them serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from moereg.experts import Experts
from moereg.layer import backend_calls
from moereg.selection.result import Decision, Selection


@dataclasses.dataclass(frozen=True, eq=False)
class RangeExperts:
    """The experts of one range of a plan.

    Attributes:
        most: Most tokens of a call; None for the open range.
        selection: The layer's selection as if this range's candidate had won for every call; errors name that one.
        experts: The candidate's experts for the layer.
    """

    most: int | None
    selection: Selection
    experts: Experts


def alone(selection: Selection, decision: Decision | None) -> Selection:
    """The selection as if this candidate of its plan had won for every call."""
    if not selection.ranges or decision is None:
        return selection
    others = (one for one in selection.decisions if one is not decision)
    return dataclasses.replace(selection, decisions=(decision, *others), ranges=())


def make_ranges(selection: Selection) -> tuple[RangeExperts, ...]:
    """Makes the experts of a plan, one instance for each candidate, whichever ranges it has.

    Raises:
        BackendError: A class raised.
    """
    made: dict[int, tuple[Selection, Experts]] = {}
    for _, decision in selection.plan:
        if id(decision) not in made:
            own = alone(selection, decision)
            made[id(decision)] = own, backend_calls.make_experts(own, decision)
    return tuple(RangeExperts(most, *made[id(decision)]) for most, decision in selection.plan)


def counts_by_range(ranges: Sequence[int | None], counts: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Splits numbers of tokens by the ranges that serve them.

    Args:
        ranges: Most tokens of each range, ascending, None at the end.
        counts: Numbers of tokens, ascending.

    Yields:
        (place of the range, its numbers), for ranges that have any.
    """
    start = 0
    for place, most in enumerate(ranges):
        inside = tuple(count for count in counts[start:] if most is None or count <= most)
        start += len(inside)
        if inside:
            yield place, inside
