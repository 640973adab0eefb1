"""The record of a layer's times, which several commands may write at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moereg.bench.points import Point
from moereg.bench.record import LayerRecord
from moereg.bench.session import key_of
from tests.evidence.packs import HERE, PROBLEM, choose, make_cells, row


@pytest.mark.parametrize("ends", [lambda record: record.weigh({}), lambda record: record.drop(1)])
def test_the_end_of_a_run_leaves_the_session_that_another_one_began(
    tmp_path: Path, ends: Callable[[LayerRecord], object]
) -> None:
    decisions = {key_of(each, HERE): each for each in choose(make_cells(("first", "second"))).decisions}
    mine, other = (LayerRecord(tmp_path / "pack.json", HERE, PROBLEM, decisions) for _ in range(2))
    values = msgspec.structs.asdict(row(0, 0, "", 0))
    times = {
        key: {name: values[name] for name in values.keys() - {"session", "cell", "routing", "tokens"}}
        for key in decisions
    }
    mine.add_times(mine.begin(None, {}), Point("uniform", 1), times)
    began = other.begin(None, {})
    ends(mine)
    other.add_times(began, Point("uniform", 1), times)
    assert began == 2
    assert began in other.sessions


def test_a_session_that_is_dropped_leaves_no_name(tmp_path: Path) -> None:
    decisions = {key_of(each, HERE): each for each in choose(make_cells(("first", "second"))).decisions}
    record = LayerRecord(tmp_path / "pack.json", HERE, PROBLEM, decisions)
    record.drop(record.begin(None, {}))
    assert record.pack.sessions == ()
