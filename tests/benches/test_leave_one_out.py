from __future__ import annotations

import math
from typing import Any

import pytest

from benches.h200.leave_one_out import by_tokens, choose, leave_one_out, over_best, worst


def row(model: str, tokens: int, shipped: str = "a", group: str = "few", **times_us: float) -> dict[str, Any]:
    return {"model": model, "tokens": tokens, "class": group, "shipped": shipped, "times_us": times_us}


# Alone, x is best with a, y and z with b; c is never best but never bad.
ROWS = [
    row("x", 4, a=10.0, b=20.0, c=11.0),
    row("y", 4, a=40.0, b=10.0, c=11.0),
    row("z", 4, a=11.0, b=10.0, c=12.0),
]


def test_the_choice_does_not_look_at_the_row_it_is_for() -> None:
    # For x: a (4 * 1.1) ** 0.5 = 2.10, b 1, c (1.1 * 1.2) ** 0.5 = 1.15.
    assert choose(ROWS[0], ROWS) == "b"
    # For y: a (1 * 1.1) ** 0.5 = 1.05, b 2 ** 0.5, c (1.1 * 1.2) ** 0.5.
    assert choose(ROWS[1], ROWS) == "a"
    # For z: a 2, b 2 ** 0.5, c 1.1.
    assert choose(ROWS[2], ROWS) == "c"
    changed = [row("x", 4, a=10.0, b=1.0, c=999.0), *ROWS[1:]]
    assert choose(changed[0], changed) == "b"


def test_ratios_are_of_the_rows_own_best() -> None:
    found = leave_one_out(ROWS)
    assert [line["chosen"] for line in found] == ["b", "a", "c"]
    assert [line["best"] for line in found] == ["a", "b", "b"]
    assert [line["ratio"] for line in found] == [2.0, 4.0, 1.2]
    assert [line["shipped_ratio"] for line in found] == [1.0, 4.0, 1.1]
    assert worst(found) == 4.0


def test_other_rows_of_the_same_model_and_of_other_classes_do_not_count() -> None:
    rows = [*ROWS, row("x", 16, a=1.0, b=100.0, c=100.0), row("w", 64, group="many", a=1.0, b=100.0, c=100.0)]
    assert choose(rows[0], rows) == "b"


def test_a_model_counts_once_however_many_rows_it_has() -> None:
    # One row of y favors b, three of z favor it by a little: by rows b would win, by models it loses.
    rows = [row("x", 4, a=1.0, b=1.0), row("y", 4, a=1.0, b=1.2), *(row("z", n, a=1.1, b=1.0) for n in (4, 8, 16))]
    assert choose(rows[0], rows) == "a"


def test_only_what_ran_everywhere_is_chosen() -> None:
    rows = [row("x", 4, a=10.0, c=11.0), *ROWS[1:]]
    assert choose(rows[0], rows) == "c"
    assert choose(rows[1], [row("x", 4, d=1.0), rows[1]]) is None


def test_a_shape_alone_in_its_class_has_no_ratio() -> None:
    (line,) = leave_one_out(ROWS[:1])
    assert line["chosen"] is None
    assert line["ratio"] is None
    assert line["shipped_ratio"] == 1.0
    assert math.isnan(worst([line]))
    assert by_tokens([line]) == [
        {
            "tokens": 4,
            "shapes": 1,
            "ratio_worst": None,
            "ratio_mean": None,
            "shipped_ratio_worst": 1.0,
            "shipped_ratio_mean": 1.0,
        }
    ]


def test_a_shipped_candidate_that_did_not_run_has_no_ratio() -> None:
    assert leave_one_out([row("x", 4, shipped="gone", a=1.0)])[0]["shipped_ratio"] is None


def test_the_table_is_by_tokens() -> None:
    found = leave_one_out([*ROWS, *(row(model, 1, group="one", a=2.0, b=3.0) for model in "xy")])
    first, second = by_tokens(found)
    assert (first["tokens"], first["shapes"], first["ratio_worst"], first["ratio_mean"]) == (1, 2, 1.0, 1.0)
    assert (second["tokens"], second["shapes"], second["ratio_worst"]) == (4, 3, 4.0)
    assert second["ratio_mean"] == pytest.approx((2.0 * 4.0 * 1.2) ** (1 / 3))
    assert second["shipped_ratio_mean"] == pytest.approx((4.0 * 1.1) ** (1 / 3))
    assert over_best(ROWS[0], "b") == 2.0
