"""Packs that are written from stored boards: each is a session, and what lacks the numbers is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches.board import __main__ as command
from benches.board import measure
from benches.board.layers import BoardLayer, Point
from benches.board.measure import Limits, Marker, Wanted, measure_board
from benches.board.store import Board
from benches.stored import RESULTS
from moereg.bench.roofline import Ceilings
from moereg.bench.session import timed_cell
from moereg.dispatch import select_backend
from moereg.evidence import measured
from moereg.evidence.on_machine import machine_of
from moereg.evidence.pack import read_pack
from moereg.evidence.provenance import provenance
from moereg.platforms import probe_cpu
from moereg.registry import register_moe_backend
from moereg.selection.result import Decision
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts

PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, max_num_tokens=16)
NAMES = ("fake_first", "fake_second", "fake_wrong")
Documents = list[dict[str, Any]]


@pytest.fixture
def decisions(isolated_registry: object) -> list[Decision]:
    for place, name in enumerate(NAMES):
        register_moe_backend(name, 500 - place, ("unquantized",), ("cpu",))(type(name.title(), (FakeExperts,), {}))
    found = select_backend(PROBLEM, "cpu").decisions
    return [next(one for one in found if one.backend == name) for name in NAMES]


def result(decision: Decision, cell: int, log_ratio: float | None) -> dict[str, Any]:
    fields = ("backend", "experts", "computes", "origin")
    identity = {field: getattr(decision, field) for field in fields}
    times = {"time_us": 10.0, "p10_us": 9.0, "p90_us": 12.0, "relative_error": 0.01, "tolerance": 0.1}
    numbers = {"log_ratio": log_ratio, "half_width": 0.001 * cell, "rounds": 48, "graph": False}
    failure = "wrong numbers: error 1" if log_ratio is None else None
    return {**identity, **times, **numbers, "cell": cell, "is_wrong": log_ratio is None, "failure": failure}


@pytest.fixture
def boards(decisions: list[Decision], tmp_path: Path) -> Documents:
    """Two sessions: the second backend takes 0.8 of the first one's time, and the third is wrong."""
    platform = probe_cpu()
    cells = [dataclasses.asdict(timed_cell(one, platform)) for one in decisions]
    rows = [
        {
            "layer": "tiny", "scheme": "unquantized", "routing": routing, "tokens": tokens,
            "default": {key: getattr(decisions[0], key) for key in ("backend", "experts", "computes")},
            "results": [
                result(decisions[0], 0, 0.0), result(decisions[1], 1, math.log(0.8)), result(decisions[2], 2, None),
                {"backend": "large", "failure": "left out: no room"},
                {**result(decisions[1], 1, math.log(0.1)), "origin": "benches.board.libraries"},
            ],
        }
        for routing in ("uniform", "zipf") for tokens in (1, 16)
    ]  # fmt: skip
    layers = {"tiny:unquantized": {"layer": "tiny", "scheme": "unquantized", "problem": PROBLEM.to_dict()}}
    head = {"machine": dataclasses.asdict(machine_of(platform)), "date": "2026-11-28"}
    own = ({"process": f"p{number}", "commit": f"{number}" * 40} for number in range(2))
    return [{**head, **one, "cells": cells, "layers": layers, "rows": rows} for one in own]


def packed(boards: Documents, folder: Path) -> int:
    paths = [folder / f"board_{place}.json" for place in range(len(boards))]
    for path, board in zip(paths, boards, strict=True):
        path.write_text(json.dumps(board))
    return command.main(["--pack", str(folder / "pack.json"), *map(str, paths)])


def test_measured_boards_are_sessions(
    decisions: list[Decision], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_ceilings", lambda *_: Ceilings(0.1, 10.0, "nothing"))
    keywords = {name: getattr(PROBLEM, name) for name in ("num_experts", "hidden_size", "intermediate_size", "top_k")}
    layer = BoardLayer("tiny", "unquantized", keywords, (Point("uniform", 3), Point("zipf", 3)))
    paths = [tmp_path / f"{name}.json" for name in ("one", "two")]
    platform = probe_cpu()
    where = {
        **provenance(platform, ["torch"]),
        "machine": dataclasses.asdict(machine_of(platform)),
        "compiled_ahead": [],
    }
    for path in paths:
        board = Board(path, where)
        wanted = Wanted(only=NAMES)
        measure_board(board, [layer], platform, wanted, Marker(tmp_path / "running"), Limits(rounds=4))
        board.save()
    assert command.main(["--pack", str(tmp_path / "pack.json"), *map(str, paths)]) == 0
    assert "12 rows of 1 layers in 2 sessions" in capsys.readouterr().out
    (tuned,) = read_pack(tmp_path / "pack.json", is_own=True).layers
    default = [row for row in tuned.rows if row.cell == tuned.default]
    assert all(row.log_ratio == row.half_width == 0 for row in default)
    others = [row for row in tuned.rows if row.cell != tuned.default]
    assert all(row.log_ratio and row.half_width and row.rounds == 4 for row in others)


def _without(*keys: str) -> Callable[[Documents], None]:
    def change(boards: Documents) -> None:
        for key in keys:
            del boards[1][key]

    return change


def _set(key: str, value: Any) -> Callable[[Documents], None]:
    return lambda boards: boards[1].__setitem__(key, value)


REFUSED: list[tuple[Callable[[Documents], Any], str]] = [
    (_without("machine", "process", "cells"), "board_1.json lacks machine, process, cells; measure it again"),
    (_set("machine", {}), "takes boards of one machine, and that of .*board_1.json is {}, of .*board_0.json"),
    (_set("process", "p0"), "got one process twice"),
    (lambda boards: boards.pop(), "--pack takes at least 2 boards"),
    (_set("cells", [{}]), "board_1.json: "),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_boards_that_are_no_sessions_of_one_machine_are_refused(
    boards: Documents,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Documents], Any],
    message: str,
) -> None:
    change(boards)
    assert packed(boards, tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("benches.board: ")
    assert re.search(message, error), error
    assert not (tmp_path / "pack.json").exists()


def test_a_session_whose_clock_moved_is_refused(
    boards: Documents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**row, "clocks": [{"sm_mhz": 300}, {"sm_mhz": 1980 - 100 * at}]} for at, row in enumerate(boards[1]["rows"])
    ]
    boards[1]["rows"] = rows
    assert packed(boards, tmp_path) == 2
    assert "the clock of the device went from 1980 to 1680 MHz" in capsys.readouterr().err


def test_the_shipped_pack_is_that_of_the_stored_boards(tmp_path: Path) -> None:
    stored = [str(RESULTS / f"{name}.json") for name in ("board_h200", "session_h200", "board_h200_3")]
    assert command.main(["--pack", str(tmp_path / "pack.json"), *stored]) == 0
    assert (tmp_path / "pack.json").read_text() == measured._SHIPPED.read_text()
