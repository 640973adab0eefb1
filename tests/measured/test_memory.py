"""Plan C: who gets memory for a layout of its own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereg.measured.memory import second_layouts
from moereg.measured.pack import Row
from moereg.measured.plans import LayerTimes, best_for_all
from tests.measured.packs import rows_of
from tests.measured.test_plans import random_rows

FEW = {1: -0.3, 4: -0.3, 16: 0.2, 64: 0.4}
MANY = {1: 0.4, 4: 0.2, 16: 0.2, 64: -0.2}
SIZES = {0: 100, 1: 500, 2: 200, 3: 200}


def sized(rows: list[Row], sizes: dict[int, int]) -> tuple[Row, ...]:
    return tuple(each._replace(permuted_bytes=sizes[each.cell]) for each in rows)


# Cell 1 wins with few tokens and saves the most, but not a byte; 2 and 3 win with many, where 3 is the faster one.
@pytest.mark.parametrize(
    ("layouts", "num_bytes", "granted"),
    [
        ("0123", 199, {}),
        ("0123", 200, {3: 200}),
        ("0123", 500, {3: 200}),
        ("0123", 699, {3: 200}),
        ("0123", 700, {1: 500, 3: 200}),
        ("0023", 700, {3: 200}),
        ("0122", 200, {3: 200}),
        ("0111", 499, {}),
        ("0111", 500, {1: 500, 3: 500}),
        ("0000", 700, {}),
    ],
)
def test_memory_goes_to_what_saves_the_most_time_a_byte(layouts: str, num_bytes: int, granted: dict[int, int]) -> None:
    logs = {1: FEW, 2: MANY, 3: {**MANY, 64: -0.3}}
    times = LayerTimes(sized(rows_of(logs), SIZES), 0)
    assert best_for_all(times, (0, 1, 2, 3)) == 0
    assert second_layouts(times, (0, 1, 2, 3), dict(enumerate(layouts)), num_bytes) == granted


@pytest.mark.parametrize(("calls", "granted"), [((), {2: 200}), (((1, 1), (64, 1)), {2: 200}), (((16, 5),), {})])
def test_calls_say_what_saves_time(calls: tuple[tuple[int, int], ...], granted: dict[int, int]) -> None:
    times = LayerTimes(sized(rows_of({1: FEW, 2: MANY}), SIZES), 0, calls)
    assert second_layouts(times, (0, 1, 2), dict(enumerate("012")), 200) == granted


@given(st.randoms(use_true_random=False), st.integers(0, 900))
def test_no_more_is_granted_than_there_is(draw: random.Random, num_bytes: int) -> None:
    sizes = {cell: draw.randint(0, 400) for cell in range(5)}
    rows = sized(random_rows(draw), sizes)
    order = sorted({each.cell for each in rows})
    layouts = {cell: draw.choice("abc") for cell in order}
    granted = second_layouts(LayerTimes(rows, 0), order, layouts, num_bytes)
    assert sum({layouts[cell]: size for cell, size in granted.items()}.values()) <= num_bytes
    assert layouts[best_for_all(LayerTimes(rows, 0), order)] not in {layouts[cell] for cell in granted}
