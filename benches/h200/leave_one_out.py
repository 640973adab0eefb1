"""How far an untuned shape is from its own tuned result, out of times of candidate configurations; pure functions.

A row is one shape with one number of tokens: `model`, `tokens`, `class` (which candidates it was timed with),
`times_us` by candidate, and `shipped`, the candidate that the shipped rules take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(statistics.mean(map(math.log, values))) if values else math.nan


def over_best(row: Row, candidate: str) -> float:
    """The time of a candidate over the row's own best."""
    best = min(row["times_us"].values())
    return float(row["times_us"][candidate] / best)


def choose(row: Row, rows: Sequence[Row]) -> str | None:
    """The candidate that a rule derived without the row's shape would give it.

    The candidate with the best geometric mean of time over best, on all rows of its class of other models; only
    candidates that ran on the row and on all of those count. Equals are ordered by name. A model counts once, with any
    number of rows.

    Returns:
        Its name, or None if no other model has rows of the class.
    """
    others = [other for other in rows if other["class"] == row["class"] and other["model"] != row["model"]]
    if not others:
        return None
    common = set(row["times_us"]).intersection(*(other["times_us"] for other in others))
    if not common:
        return None

    def score(candidate: str) -> float:
        by_model: dict[str, list[float]] = {}
        for other in others:
            by_model.setdefault(other["model"], []).append(over_best(other, candidate))
        return geomean([geomean(ratios) for ratios in by_model.values()])

    return min(sorted(common), key=score)


def leave_one_out(rows: Sequence[Row]) -> list[Row]:
    """For each row, the times of a rule from the other shapes and of the shipped rule, over the row's own best.

    Returns:
        Rows of `model`, `tokens`, `class`, `best` and `chosen` (candidates), `ratio` and `shipped_ratio`; `chosen` and
        `ratio` are None if no other shape has the class.
    """
    found = []
    for row in rows:
        chosen = choose(row, rows)
        found.append(
            {
                "model": row["model"],
                "tokens": row["tokens"],
                "class": row["class"],
                "best": min(row["times_us"], key=row["times_us"].__getitem__),
                "chosen": chosen,
                "ratio": None if chosen is None else over_best(row, chosen),
                "shipped_ratio": over_best(row, row["shipped"]) if row["shipped"] in row["times_us"] else None,
            }
        )
    return found


def by_tokens(found: Sequence[Row]) -> list[Row]:
    """Worst and geometric mean of both ratios over the shapes, for each number of tokens; `shapes` counts them.

    Args:
        found: From `leave_one_out`.
    """
    table = []
    for tokens in sorted({row["tokens"] for row in found}):
        own = [row for row in found if row["tokens"] == tokens]
        line: Row = {"tokens": tokens, "shapes": len(own)}
        for name in ("ratio", "shipped_ratio"):
            ratios = [row[name] for row in own if row[name] is not None]
            line[f"{name}_worst"] = max(ratios, default=None)
            line[f"{name}_mean"] = geomean(ratios) if ratios else None
        table.append(line)
    return table


def worst(found: Sequence[Row]) -> float:
    """The largest `ratio`; NaN of none."""
    return max((row["ratio"] for row in found if row["ratio"] is not None), default=math.nan)
