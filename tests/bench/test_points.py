"""Where a layer is measured: a grid, the guard, and bisection where the winner changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereg.bench.points import GUARD, NEAR, Point, midpoint, next_points, token_grid

ROUTINGS = ("uniform", "zipf")


@pytest.mark.parametrize(
    ("low", "high", "middle"),
    [(16, 64, 32), (16, 32, 23), (16, 20, None), (16, 21, 18), (1, 2, None), (2, 4, 3), (4, 5, None)],
)
def test_the_middle_is_geometric_and_ends_where_neighbors_are_near(low: int, high: int, middle: int | None) -> None:
    assert midpoint(low, high) == middle


def measure_all(counts: tuple[int, ...], winner: Callable[[int], int]) -> list[set[Point]]:
    """Both sessions, point by point."""
    sessions: list[set[Point]] = [set(), set()]
    for place in range(2):
        while found := next_points(sessions[: place + 1], counts, ROUTINGS, winner):
            assert found[0] not in sessions[place]
            sessions[place].add(found[0])
    return sessions


@given(crossing=st.integers(1, 3000), most=st.sampled_from([1, 7, 64, 1024, 2048]))
def test_a_crossing_is_found_to_within_the_ratio(crossing: int, most: int) -> None:
    first, second = measure_all(token_grid(most), lambda tokens: int(tokens >= crossing))
    counts = sorted({point.tokens for point in first})
    for low, high in itertools.pairwise(counts):
        if low < crossing <= high:
            assert high <= NEAR * low or high - low == 1 or midpoint(low, high) is None
    assert second == first
    assert {point for point in first if point.routing == GUARD} == {Point(GUARD, at) for at in token_grid(most)}
    assert all(Point(routing, at) in first for at in counts for routing in ROUTINGS)


def test_without_a_crossing_only_the_grid_is_measured() -> None:
    first, _ = measure_all(token_grid(64), lambda tokens: -1)
    assert {point.tokens for point in first} == set(token_grid(64))


@given(taken=st.integers(0, 200), crossing=st.integers(1, 600))
def test_a_session_that_was_cut_short_goes_on_to_the_same_points(taken: int, crossing: int) -> None:
    def winner(tokens: int) -> int:
        return int(tokens >= crossing)

    whole, _ = measure_all(token_grid(512), winner)
    cut: set[Point] = set()
    for _ in range(taken):
        found = next_points([cut], token_grid(512), ROUTINGS, winner)
        cut |= set(found[:1])
    while found := next_points([cut], token_grid(512), ROUTINGS, winner):
        cut.add(found[0])
    assert cut == whole


def test_a_winner_is_asked_for_only_where_all_asked_routings_are_measured() -> None:
    cut = {Point(routing, tokens) for tokens in (1, 2, 4, 8) for routing in (*ROUTINGS, GUARD)} | {Point("zipf", 3)}

    def winner(tokens: int) -> int:
        assert tokens != 3
        return int(tokens > 2)

    assert next_points([cut], (1, 2, 4, 8), ROUTINGS, winner) == [Point("uniform", 3)]
