"""What choices lose by the times of one layer: numbers that were computed by hand, and what holds for all packs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereg.measured.plans import LayerTimes
from moereg.measured.regret import Regret, regret_of
from tests.measured.packs import row
from tests.measured.test_plans import random_rows

MEDIANS = {1: 10.0, 10: 20.0, 100: 40.0}
RATIOS = {1: 0.5, 10: 2.0, 100: 0.8}
"""Times of the second cell over those of the first."""
TIMES = LayerTimes(
    tuple(
        row(session, cell, routing, tokens, cell * math.log(ratio), median_us=MEDIANS[tokens])
        for session in (1, 2)
        for cell in (0, 1)
        for tokens in RATIOS
        # Nobody asks for one_set.
        for routing, ratio in {"uniform": RATIOS[tokens], "zipf": RATIOS[tokens], "one_set": 9.0}.items()
    ),
    0,
)


def losses(regret: Regret) -> list[float | None]:
    return [point.loss if point.loss is None else round(point.loss, 9) for point in regret.points]


CHOICES: list[tuple[Mapping[int, int | None], list[float | None], float, float]] = [
    ({1: 0, 10: 0, 100: 0}, [1.0, 0.0, 0.25], 3 / 2.3, 3 / 2.3),
    ({1: 1, 10: 1, 100: 1}, [0.0, 1.0, 0.0], 3.3 / 2.3, 3 / 2.3),
    ({1: 1, 10: 0, 100: 0}, [0.0, 0.0, 0.25], 2.5 / 2.3, 3 / 2.3),
    ({1: 1, 10: 0, 100: 1}, [0.0, 0.0, 0.0], 1.0, 3 / 2.3),
    # What has no times counts nowhere.
    ({1: 0, 10: None, 100: 0}, [1.0, None, 0.25], 2 / 1.3, 2 / 1.3),
]


@pytest.mark.parametrize(("chosen", "at", "ratio", "default"), CHOICES)
def test_a_choice_loses_by_equal_decades(
    chosen: Mapping[int, int | None], at: list[float | None], ratio: float, default: float
) -> None:
    found = regret_of(TIMES, chosen, 0, (0, 1))
    assert losses(found) == at
    assert found.loss == pytest.approx(ratio - 1)
    assert found.default_loss == pytest.approx(default - 1)
    fastest = [1, 0, 1]
    assert [point.fastest for point in found.points] == [
        None if loss is None else cell for loss, cell in zip(at, fastest, strict=True)
    ]


def test_a_histogram_weighs_by_the_time_of_its_calls() -> None:
    # 90 calls of 10 us, of which half could be saved; 10 of 40 us, of which a fifth; 7 beyond what was measured.
    found = regret_of(TIMES, {1: 0, 10: 0, 100: 0}, 0, (0, 1), {1: 90, 64: 10, 500: 7, 10: 0})
    assert found.loss == pytest.approx((900 + 400) / (450 + 320) - 1)
    assert [point.share for point in found.points] == pytest.approx([900 / 1300, 0.0, 400 / 1300])
    assert found.calls_outside == 7
    # By ratio 35 is nearer to 100 than to 10.
    assert regret_of(TIMES, {1: 0, 10: 0, 100: 0}, 0, (0, 1), {3: 9, 35: 1}).points[2].share == 40 / (90 + 40)


def test_what_no_call_reaches_may_lack_times() -> None:
    assert regret_of(TIMES, {1: 0, 10: None, 100: None}, 0, (0, 1), {1: 5}).loss == pytest.approx(1.0)


@pytest.mark.parametrize("calls", [{500: 7}, {500: 7, 1: 0}])
def test_calls_outside_of_all_that_was_measured_lose_nothing_known(calls: dict[int, int]) -> None:
    found = regret_of(TIMES, {1: 0, 10: 0, 100: 0}, 0, (0, 1), calls)
    assert (found.loss, found.default_loss, found.calls_outside) == (None, None, 7)


def test_a_default_without_times_where_the_choice_has_some_loses_nothing_known() -> None:
    rows = tuple(each for each in TIMES.rows if (each.cell, each.tokens) != (0, 10))
    found = regret_of(LayerTimes(rows, 0), {1: 1, 10: 1, 100: 1}, 0, (0, 1))
    assert (found.loss, found.default_loss) == (0.0, None)


def test_sessions_are_averaged_and_compared_where_both_cells_were_measured() -> None:
    rows = [row(1, 0, "uniform", 1), row(2, 0, "uniform", 1)]
    rows += [row(1, 1, "uniform", 1, math.log(0.5)), row(2, 1, "uniform", 1, math.log(0.8))]
    rows += [row(2, 2, "uniform", 1, math.log(0.75))]
    found = regret_of(LayerTimes(tuple(rows), 0), {1: 1}, 0, (0, 1, 2))
    # In the second session the third cell was faster than the second: 0.75 against 0.8.
    assert found.points[0].fastest == 2
    assert found.loss == pytest.approx(0.8 / 0.75 - 1)


def test_nothing_is_measured_in_routings_that_nobody_asks_for() -> None:
    rows = tuple(each for each in TIMES.rows if each.routing == "one_set")
    found = regret_of(LayerTimes(rows, 0), {1: 0, 10: 0, 100: 0}, 0, (0, 1))
    assert (losses(found), found.loss) == ([None] * 3, None)


@given(draw=st.randoms(use_true_random=False))
def test_nobody_loses_less_than_the_fastest(draw: random.Random) -> None:
    times = LayerTimes(tuple(random_rows(draw)), 0)
    cells = sorted({each.cell for each in times.rows} | {0})
    chosen = {at: draw.choice(cells) for at in times.tokens}
    found = regret_of(times, chosen, 0, cells)
    known = [point for point in found.points if point.loss is not None]
    assert all(point.loss is not None and point.loss >= 0 for point in known)
    assert all(point.loss == 0 for point in known if point.fastest == point.cell)
    assert (found.loss is None) == (not known)
    assert found.loss is None or found.loss <= max(point.loss or 0.0 for point in known) + 1e-9
