"""When a measured cell takes another's place, by ratios of paired samples and their intervals."""

from __future__ import annotations

import math
import random

import pytest

from moereg.evidence.plans import LayerTimes, best_for_all
from moereg.evidence.significance import Ratio, Ratios, beats, paired, student_t
from tests.evidence.packs import ROUTINGS, rows_of

SURE = 0.001


def ratios(
    uniform: float, zipf: float, one_set: float, *, sessions: tuple[int, ...] = (1, 2), width: float = SURE
) -> Ratios:
    values = dict(zip(ROUTINGS, (uniform, zipf, one_set), strict=True))
    return {(session, name): Ratio(log, width) for session in sessions for name, log in values.items()}


DEFAULT = ratios(0.0, 0.0, 0.0, width=0.0)
FIVE, TWO = math.log(0.95), math.log(0.98)

CASES: dict[str, tuple[bool, Ratios]] = {
    "5 % less everywhere": (True, ratios(FIVE, FIVE, FIVE)),
    "2 % less everywhere": (False, ratios(TWO, TWO, TWO)),
    "3 % less in the mean of both asked routings": (True, ratios(math.log(0.94), 0.0, 0.0)),
    "less in one_set alone": (False, ratios(0.0, 0.0, math.log(0.5))),
    "slower in one_set": (False, ratios(FIVE, FIVE, 0.01)),
    "slower in one asked routing": (False, ratios(2 * FIVE, 0.01, 0.0)),
    "as fast in one_set": (True, ratios(FIVE, FIVE, 0.0)),
    # Two intervals of 7 % give sqrt(2) * 7 / 2 = 4.95 % for the mean: up to -0.18 %.
    "an interval up to less than 1 %": (False, ratios(FIVE, FIVE, FIVE, width=0.07)),
    # And two of 5 % give 3.5 %: up to -1.6 %.
    "an interval up to more than 1 %": (True, ratios(FIVE, FIVE, FIVE, width=0.05)),
    "one session": (False, ratios(FIVE, FIVE, FIVE, sessions=(1,))),
    "a third session that says otherwise": (
        False,
        {**ratios(FIVE, FIVE, FIVE), **ratios(TWO, TWO, TWO, sessions=(3,))},
    ),
    "a session that gains all": (
        False,
        {**ratios(3 * FIVE, 3 * FIVE, FIVE, sessions=(1,)), **ratios(0.0, 0.0, 0.0, sessions=(2,))},
    ),
    "slower in one_set in one session, not in the mean": (
        True,
        {**ratios(FIVE, FIVE, 0.01, sessions=(1,)), **ratios(FIVE, FIVE, -0.02, sessions=(2,))},
    ),
    "nothing measured": (False, {}),
    "one_set was not measured": (
        True,
        {key: ratio for key, ratio in ratios(FIVE, FIVE, FIVE).items() if key[1] != "one_set"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_challenger_of_the_default(case: str) -> None:
    wins, challenger = CASES[case]
    default = {(session, name): Ratio(0.0, 0.0) for session in (1, 2, 3) for name in ROUTINGS}
    assert beats(challenger, default, [default]) is wins


def test_an_incumbent_has_the_same_protection_and_its_own_interval_counts() -> None:
    incumbent = ratios(FIVE, FIVE, FIVE)
    near_tie = ratios(FIVE + TWO, FIVE + TWO, FIVE + TWO)
    better = ratios(2 * FIVE, 2 * FIVE, 2 * FIVE)
    assert beats(near_tie, DEFAULT, [DEFAULT])
    assert not beats(near_tie, incumbent, [DEFAULT])
    assert beats(better, incumbent, [DEFAULT])
    assert not beats(better, ratios(FIVE, FIVE, FIVE, width=0.07), [DEFAULT])


SLOW_IN_ONE_SET = ratios(0.0, 0.0, 0.1)
# One that is faster in `one_set`, and one that was not measured in the same sessions, so that nobody knows.
GUARDS = {"faster": DEFAULT, "elsewhere": ratios(0.0, 0.0, 0.1, sessions=(3, 4))}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_is_not_made_slower_by_what_beats_the_incumbent(guard: str) -> None:
    challenger = ratios(FIVE, FIVE, 0.05)
    for num_others in range(3):
        others = [SLOW_IN_ONE_SET] * num_others
        assert beats(challenger, SLOW_IN_ONE_SET, others)
        for place in range(num_others + 1):
            assert not beats(challenger, SLOW_IN_ONE_SET, [*others[:place], GUARDS[guard], *others[place:]])


def fraction_changed(truth: float, spread: float) -> float:
    """How often two pairs of sessions choose differently, where every cell's time is off by a factor of its own."""
    draw = random.Random(33)

    def choose() -> int:
        rows = []
        for session in (1, 2):
            off = draw.gauss(0.0, spread) - draw.gauss(0.0, spread)
            rows += rows_of({1: truth + off}, sessions=(session,), routings=ROUTINGS[:1], grid=(1,))
        return best_for_all(LayerTimes(tuple(rows), 0), (0, 1))

    return sum(choose() != choose() for _ in range(1500)) / 1500


# A session is off by s = sqrt(2) * spread, for both cells. A challenger whose true logarithm is m below ln 0.97 gains
# enough in both sessions with probability p = Phi(m / s)**2, and two pairs of sessions differ with 2 p (1 - p). That is
# below 1 % from p = 0.995 on: m = 2.81 s. One that is m above wins with p = Phi(-m / s)**2: below 0.005 from 1.47 s on.
ROOT = math.sqrt(2.0)


@pytest.mark.parametrize("spread", [0.01, 0.03])
@pytest.mark.parametrize("margin", [-6.0 * ROOT, -3.0 * ROOT, 1.6 * ROOT, 6.0 * ROOT])
def test_two_pairs_of_sessions_choose_alike_away_from_the_threshold(spread: float, margin: float) -> None:
    assert fraction_changed(math.log(0.97) + margin * spread, spread) < 0.01


def test_equal_peers_stay_in_the_order_of_priority() -> None:
    """9 of 10 pairs of processes of one code differ by at most 2.7 %, and so sqrt(2) s is 1.64 % in the mean."""
    assert fraction_changed(0.0, 0.0164 / 2) < 0.002


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
