"""Plans of random packs: none is slower than priority anywhere by the pack's own numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereg.evidence.pack import Row
from moereg.evidence.plans import LayerTimes, Ranges, best_for_all, with_ranges
from tests.evidence.packs import ROUTINGS, row, rows_of

EFFECTS = (-0.3, -0.12, -0.06, -0.04, -0.02, 0.0, 0.03, 0.2)


def random_rows(draw: random.Random) -> list[Row]:
    """Rows of up to five cells: most agree between sessions, some are missing."""
    grid = sorted(draw.sample([1, 2, 4, 8, 16, 23, 32, 64, 128], draw.randint(1, 7)))
    sessions = range(1, draw.choice([2, 3, 3, 3, 4]))
    routings = draw.choice([ROUTINGS, ROUTINGS, ROUTINGS[:2], ROUTINGS[:1], ROUTINGS[1:]])
    missing = draw.choice([0.0, 0.0, 0.02, 0.2])
    rows = [row(session, 0, routing, at) for session in sessions for routing in routings for at in grid]
    for cell in range(1, draw.randint(2, 5)):
        mood = draw.choice([0.0, -0.05, -0.1])
        one_set = draw.choice([-0.1, 0.0, 0.0, 0.08])
        for at in grid:
            effect = mood + draw.choice(EFFECTS)
            for session, routing in itertools.product(sessions, routings):
                log = effect + (one_set if routing == "one_set" else 0.0) + draw.uniform(-0.01, 0.01)
                if draw.random() >= missing:
                    rows.append(row(session, cell, routing, at, log, draw.choice([0.001, 0.01, 0.05])))
    draw.shuffle(rows)
    return rows


def whole_sessions(rows: list[Row], cell: int, tokens: int) -> set[int]:
    """Sessions that measured a cell in each routing that they measured with that many tokens."""
    here = [each for each in rows if each.tokens == tokens]
    own = {(each.session, each.routing) for each in here if each.cell == cell}
    return {each.session for each in here} - {each.session for each in here if (each.session, each.routing) not in own}


def mean_difference(rows: list[Row], cell: int, other: int, routing: str, tokens: int) -> float | None:
    sessions = whole_sessions(rows, cell, tokens) & whole_sessions(rows, other, tokens)
    log = {
        (each.session, each.cell): each.log_ratio for each in rows if (each.routing, each.tokens) == (routing, tokens)
    }
    found = [log[session, cell] - log[session, other] for session in sessions if (session, cell) in log]
    return sum(found) / len(found) if found else None


def winners(ranges: Ranges, tokens: list[int]) -> Iterator[tuple[int, int]]:
    for at in tokens:
        yield at, next(cell for most, cell in ranges if most is None or at <= most)


@given(draw=st.randoms(use_true_random=False))
def test_a_plan_is_nowhere_slower_by_the_numbers_of_its_pack(draw: random.Random) -> None:
    rows = random_rows(draw)
    cells = sorted({each.cell for each in rows} | {0})
    order = [0, *draw.sample(cells[1:], len(cells) - 1)]
    times = LayerTimes(tuple(rows), 0)
    base = best_for_all(times, order)
    others = {cell for cell in cells if draw.random() < 0.7}
    ranges = with_ranges(times, order, base, others)
    tokens = sorted({each.tokens for each in rows})
    # Ascending, the last open, nothing beyond what was measured.
    limits = [most for most, _ in ranges[:-1] if most is not None]
    assert ranges[-1] == (None, base)
    assert limits == sorted(set(limits))
    assert len(limits) == len(ranges) - 1
    assert not limits or limits[-1] <= tokens[-1]
    assert all(cell != other for (_, cell), (_, other) in itertools.pairwise(ranges))
    starts = [1, *(most + 1 for most in limits)]
    for start, (most, cell) in zip(starts, ranges, strict=True):
        assert cell in others or cell == base
        assert cell == base or (start in tokens and most in tokens)
    for (at, cell), routing in itertools.product(winners(ranges, tokens), ROUTINGS):
        for known in {base, 0}:
            difference = mean_difference(rows, cell, known, routing, at)
            assert cell in (base, known) or difference is None or difference <= 1e-9
    if base != 0:
        check_cost(rows, base)


def check_cost(rows: list[Row], base: int) -> None:
    """Every decade takes the default equally long, so that a number of tokens counts for its part of the axis."""
    for routing in {each.routing for each in rows}:
        costs = []
        for session in {each.session for each in rows}:
            everywhere = sorted({each.tokens for each in rows if each.session == session})
            if all(session in whole_sessions(rows, base, at) for at in everywhere):
                found = {
                    each.tokens: math.exp(each.log_ratio)
                    for each in rows
                    if (each.session, each.cell, each.routing) == (session, base, routing)
                }
                costs.append(math.log(weighted(found)))
        assert len(costs) >= 2
        assert sum(costs) / len(costs) <= 1e-9


def weighted(values: dict[int, float]) -> float:
    tokens = sorted(values)
    if len(tokens) == 1:
        return values[tokens[0]]
    middles = [math.sqrt(one * other) for one, other in itertools.pairwise(tokens)]
    ends = [tokens[0] ** 2 / middles[0], *middles, tokens[-1] ** 2 / middles[-1]]
    parts = [math.log(right / left) for left, right in itertools.pairwise(ends)]
    return sum(part * values[at] for part, at in zip(parts, tokens, strict=True)) / sum(parts)


def test_random_packs_have_plans_of_every_kind() -> None:
    """Otherwise the property above holds of nothing."""
    found = {"default": 0, "other": 0, "ranges": 0}
    for seed in range(200):
        draw = random.Random(seed)
        rows = random_rows(draw)
        cells = sorted({each.cell for each in rows} | {0})
        times = LayerTimes(tuple(rows), 0)
        base = best_for_all(times, cells)
        found["other" if base else "default"] += 1
        found["ranges"] += len(with_ranges(times, cells, base, set(cells))) > 1
    assert min(found.values()) > 10


PLANS: dict[str, tuple[dict[int, dict[int, float]], Ranges]] = {
    "a run of its own": ({1: {1: 0.1, 4: -0.1, 16: -0.1, 64: 0.1}}, ((3, 0), (16, 1), (None, 0))),
    "from the first on": ({1: {1: -0.1, 4: -0.1, 16: 0.1, 64: 0.3}}, ((4, 1), (None, 0))),
    "the largest is no open range": ({1: {1: 0.3, 4: 0.1, 16: -0.1, 64: -0.1}}, ((15, 0), (64, 1), (None, 0))),
    "one number of tokens": ({1: {1: 0.1, 4: -0.1, 16: 0.1, 64: 0.1}}, ((3, 0), (4, 1), (None, 0))),
    "the default between two winners": (
        {1: {1: -0.1, 4: -0.1, 16: 0.3, 64: 0.3}, 2: {1: 0.3, 4: 0.3, 16: -0.1, 64: -0.1}},
        ((4, 1), (15, 0), (64, 2), (None, 0)),
    ),
    "two winners side by side": ({1: {4: -0.1, 5: 0.1}, 2: {4: 0.1, 5: -0.1}}, ((3, 0), (4, 1), (5, 2), (None, 0))),
    "nothing wins": ({1: {1: 0.1, 4: -0.02, 16: -0.02, 64: 0.1}}, ((None, 0),)),
}


@pytest.mark.parametrize("name", PLANS)
def test_ranges(name: str) -> None:
    logs, ranges = PLANS[name]
    grid = sorted(next(iter(logs.values())))
    times = LayerTimes(tuple(rows_of(logs, grid=grid)), 0)
    assert with_ranges(times, sorted({0, *logs}), 0, {0, *logs}) == ranges
    assert with_ranges(times, sorted({0, *logs}), 0, {0}) == ((None, 0),)


def test_one_cell_for_all_weighs_decades_alike() -> None:
    """Twice as fast with few tokens, a third slower with many."""
    logs = {1: {1: -0.7, 10: -0.7, 100: 0.3, 1000: 0.3}}
    times = LayerTimes(tuple(rows_of(logs, grid=(1, 10, 100, 1000))), 0)
    assert best_for_all(times, (0, 1)) == 1
    # More points where two cells cross give that decade no more weight.
    crowded = {1: {1: -0.7, 10: -0.7, **dict.fromkeys((100, 105, 110, 115, 120), 0.3), 1000: 0.3}}
    times = LayerTimes(tuple(rows_of(crowded, grid=sorted(crowded[1]))), 0)
    assert best_for_all(times, (0, 1)) == 1


def test_calls_weigh_by_their_time() -> None:
    """Twice as fast with one token, a third slower with many."""
    rows = tuple(rows_of({1: {1: -0.7, 10: 0.3, 100: 0.3}}, grid=(1, 10, 100)))
    for calls, best in (
        ({}, 0),
        ({1: 9, 100: 1}, 1),
        ({1: 1, 100: 9}, 0),
        ({100: 0, 7: 5}, 0),
        ({2: 5}, 1),
        # By ratio 5 is nearer to 10 than to 1.
        ({5: 5}, 0),
        # What was not measured counts nowhere.
        ({500: 5}, 0),
        ({1: 1, 500: 9}, 1),
    ):
        assert best_for_all(LayerTimes(rows, 0, tuple(calls.items())), (0, 1)) == best, calls
    # A call that takes a hundred times as long counts a hundred times.
    slow = tuple(msgspec.structs.replace(each, median_us=1000.0) if each.tokens == 100 else each for each in rows)
    assert best_for_all(LayerTimes(slow, 0, ((1, 9), (100, 1))), (0, 1)) == 0


def test_a_cell_that_was_not_measured_everywhere_is_not_for_all() -> None:
    times = LayerTimes(tuple(rows_of({1: {1: -0.3, 4: -0.3, 16: -0.3}})), 0)
    assert best_for_all(times, (0, 1)) == 0
    assert with_ranges(times, (0, 1), 0, {1}) == ((16, 1), (None, 0))


def test_a_session_that_was_interrupted_says_nothing_of_all_tokens() -> None:
    rows = rows_of({1: {1: -0.5, 4: -0.5, 16: -0.5, 64: 0.5}})
    assert best_for_all(LayerTimes(tuple(rows), 0), (0, 1)) == 1
    begun = [each for each in rows if each.session == 1 or each.tokens < 64]
    assert best_for_all(LayerTimes(tuple(begun), 0), (0, 1)) == 0


def test_a_session_counts_at_a_number_of_tokens_with_all_of_its_routings() -> None:
    rows = rows_of({1: -0.5})
    assert with_ranges(LayerTimes(tuple(rows), 0), (0, 1), 0, {1}) == ((64, 1), (None, 0))
    begun = [each for each in rows if each.key != (2, 1, "zipf", 64)]
    assert with_ranges(LayerTimes(tuple(begun), 0), (0, 1), 0, {1}) == ((16, 1), (None, 0))


def test_ratios_are_to_the_first_in_order_where_the_default_is_denied() -> None:
    """Both are slower than the default, which does not count."""
    times = LayerTimes(tuple(rows_of({1: 0.5, 2: 0.3})), 0)
    assert best_for_all(times, (1, 2)) == 2
    assert best_for_all(times, (2, 1)) == 2
    assert best_for_all(times, (0, 1, 2)) == 0
    # Shares are of the time of the first too: 22 % more with few tokens and 10 % less with many are no gain.
    times = LayerTimes(tuple(rows_of({1: {1: 0.0, 1000: 2.0}, 2: {1: 0.2, 1000: 1.9}}, grid=(1, 1000))), 0)
    assert best_for_all(times, (1, 2)) == 1
