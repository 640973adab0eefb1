"""Ranks agree on a layer before they exchange a token: a difference is one error on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from moereg.errors import RanksDifferError, described
from moereg.prepare_finalize import Group
from moereg.prepare_finalize.group import by_rank

_NO_LAYER: Final = 0
"""Sent instead of a layer's number when a rank makes a kernel or moves experts. Layers count from 1."""


class Together(NamedTuple):
    """A step that ranks take together, in an error's words: what all must do, and what must be equal."""

    act: str
    alike: str


MAKING: Final = Together("make the kernel", "run the same layer")
MOVING: Final = Together("move the experts", "be given the same move of experts")


def agree(
    group: Group,
    doing: str,
    said: Mapping[str, Any],
    error: Exception | None,
    shared: Any = None,
    together: Together = MAKING,
) -> list[Any]:
    """Compares what ranks say; every rank must call it, even one that has failed.

    Args:
        group: The ranks.
        doing: The step, as an error names it.
        said: Values that must be equal everywhere, by name: strings and numbers.
        error: Why this rank cannot go on, if it cannot.
        shared: What the other ranks need to know of this one; may differ.
        together: What the ranks are doing, for the error.

    Returns:
        `shared` of all ranks.

    Raises:
        RanksDifferError: Ranks differ, or another one has failed; it says which ranks, and how.
        Exception: `error`, where there is one.
        GroupError: A rank has ended, or did not come within the group's time limit; or another one calls a layer, and
            all ranks raise.
    """
    failure = None if error is None else described(error)
    found: list[tuple[dict[str, Any], str | None, Any]]
    with group.exclusive(together.act):
        group.call_together(_NO_LAYER)
        found = group.gather_objects((dict(said), failure, shared), doing)
    if error is not None:
        raise error
    failed = [f"rank {rank} ({text})" for rank, (_, text, _) in enumerate(found) if text is not None]
    if failed:
        raise RanksDifferError(
            f"all ranks must {together.act}, and rank {group.rank} could; {', '.join(failed)} could not: cure that one"
        )
    differing = differences([fields for fields, _, _ in found])
    if differing:
        # Only the first: the others may follow from it.
        raise RanksDifferError(f"all ranks must {together.alike}, got {differing[0]}; make that equal")
    return [shared for _, _, shared in found]


def differences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields that differ between ranks: `backend triton on ranks 0-2, torch on rank 3`."""
    texts = []
    for name in dict.fromkeys(name for fields in found for name in fields):
        values = [str(fields.get(name, "nothing")) for fields in found]
        if len(set(values)) > 1:
            texts.append(f"{name} {by_rank(values)}")
    return texts
