"""A selection's plan as experts: a call's number of tokens says which of them serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from moereg.errors import ArgumentError, shown
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


def check_plan(selection: Selection) -> None:
    """Checks that the ranges of a selection with a winner ascend and end with the winner's, and can be run here.

    Raises:
        ArgumentError: They do not or cannot.
    """
    *closed, (last, decision) = selection.plan
    bounds: list[Any] = [most for most, _ in closed]
    known = [bound for bound in bounds if isinstance(bound, int) and bound >= 1]
    if known != bounds or sorted(set(known)) != known or last is not None or decision is not selection.winner:
        found = ", ".join(f"{one.backend} to {shown(most)}" for most, one in selection.plan)
        raise ArgumentError(
            f"the ranges of a selection must ascend, from 1 token up, and end with the winner's, which is open, got "
            f"{found}; select again"
        )
    for _, one in closed:
        if one.cell is None or not one.accepted:
            raise ArgumentError(
                f"each range of a selection must be of a backend that fits and is registered here, got "
                f"{one.backend!r}; select again"
            )


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


def check_shared(ranges: Sequence[RangeExperts], layout: str) -> None:
    """Checks that the experts of all ranges read weights in the layout in which the open range's class permuted them.

    Raises:
        ArgumentError: A class does not declare in `shared_layouts` that other classes read or write this layout.
    """
    last = ranges[-1]
    for each in ranges:
        if each.experts is last.experts:
            continue
        for one in (last, each):
            kind = type(one.experts)
            if layout not in kind.shared_layouts:
                raise ArgumentError(
                    f"the backends of a plan must share one layout of weights, got {layout!r} of "
                    f"{last.selection.backend!r} beside {each.selection.backend!r}, which {kind.__name__} does not "
                    f"declare in shared_layouts ({', '.join(kind.shared_layouts) or 'none'}); select one of them alone"
                )
