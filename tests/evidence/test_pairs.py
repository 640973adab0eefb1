"""Ratios of paired samples and their intervals."""

from __future__ import annotations

import math
import random

import pytest

from moereg.evidence.significance import paired, student_t


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (5, 2.5706), (9, 2.2622), (23, 2.0687), (47, 2.0117), (1000, 1.9623)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=5e-4)


def test_what_slows_both_in_a_round_changes_no_ratio() -> None:
    rounds = [random.Random(0).uniform(1, 100) for _ in range(20)]
    ratio, width = paired(rounds, [0.9 * each for each in rounds])
    assert ratio == pytest.approx(math.log(0.9))
    assert width == pytest.approx(0, abs=1e-12)


def test_pairs_end_with_the_shorter_one_and_are_taken_in_order() -> None:
    assert paired([1.0, 2.0, 3.0, 9.0], [2.0, 4.0, 6.0])[0] == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="at least two pairs are needed, got 1"):
        paired([1.0], [2.0])


def test_the_interval_has_the_true_ratio_as_often_as_it_says() -> None:
    draw = random.Random(1)
    inside = 0
    for _ in range(2000):
        other = [math.exp(draw.gauss(0.05, 0.1)) for _ in range(8)]
        mean, width = paired([1.0] * 8, other)
        inside += abs(mean - 0.05) <= width
    assert 0.93 < inside / 2000 < 0.97
