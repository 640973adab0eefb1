"""The board: rows are kept one by one, what fails is in its row, and whoever takes the process down is left out."""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import pytest
import torch

from benches.board import __main__ as command
from benches.board import measure
from benches.board.layers import BoardLayer, Point
from benches.board.measure import Limits, Marker, Wanted, measure_board
from benches.board.store import Board, OtherRunError
from moereg.bench.inputs import random_weights
from moereg.bench.roofline import Ceilings
from moereg.experts import ExpertInputs
from moereg.platforms import probe_cpu
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import PermutedWeights
from tests.support.fakes import FakeExperts, WrongExperts

MEASURED_ON: dict[str, Any] = {
    "device": "a CPU",
    "platform": "cpu",
    "versions": {"torch": "2.13"},
    "commit": "0" * 40,
    "date": "now",
    "compiled_ahead": [],
}
TINY = BoardLayer(
    "tiny",
    "unquantized",
    {"num_experts": 4, "hidden_size": 32, "intermediate_size": 16, "top_k": 2},
    (Point("uniform", 3), Point("one_set", 3)),
)


def test_a_board_is_continued_where_it_was_cut(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "board.json"
    board = Board(path, MEASURED_ON)
    board.add(TINY, TINY.points[0], {"roofline_us": 1.23456789, "share": math.nan, "results": []})
    again = Board(path, {**MEASURED_ON, "date": "later"})
    assert again.missing(TINY) == [TINY.points[1]]
    (row,) = again.document["rows"]
    assert row["roofline_us"] == 1.2346
    assert row["share"] is None
    again.leave_out([TINY], {})
    (left,) = json.loads(path.read_text())["left_out"]
    assert left == {"layer": "tiny", "scheme": "unquantized", "routing": "one_set", "tokens": 3} | {
        "left_out": "no time was left"
    }
    assert [file.name for file in tmp_path.iterdir()] == ["board.json"]


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"versions": {"torch": "2.11"}}, {"commit": "1"}, {"compiled_ahead": ["a"]}]
)
def test_a_board_of_another_run_is_not_continued(tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    path = tmp_path / "board.json"
    Board(path, MEASURED_ON).save()
    with pytest.raises(OtherRunError, match=f"the {next(iter(change))} of .*; name another file"):
        Board(path, {**MEASURED_ON, **change})
    path.write_text("[]")
    with pytest.raises(OtherRunError, match="none; name another file"):
        Board(path, MEASURED_ON)


def test_who_crashed_in_two_layers_is_out_of_all(tmp_path: pathlib.Path) -> None:
    board = Board(tmp_path / "board.json", MEASURED_ON)
    board.put_out("one", "bad", "BadExperts", "SIGSEGV in apply")
    assert board.reason_out("one", "bad", "BadExperts") == "SIGSEGV in apply"
    assert board.reason_out("two", "bad", "BadExperts") is None
    assert board.reason_out("one", "bad", "OtherExperts") is None
    board.put_out("two", "bad", "BadExperts", "SIGSEGV in apply")
    assert board.reason_out("three", "bad", "BadExperts") == "SIGSEGV in apply, in 2 other layers"


class RaisingExperts(FakeExperts):
    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        raise RuntimeError("no kernel image")


def register(name: str, base: type[FakeExperts], opt_in: bool = False) -> None:
    kind = type(name.title(), (base,), {})
    register_moe_backend(name, 1, ("unquantized",), ("*",), opt_in=opt_in)(kind)


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry) -> Any:
    """Measures the tiny layer for good, with three backends beside torch's; gives the board."""
    monkeypatch.setattr(measure, "_ceilings", lambda *_: Ceilings(0.1, 10.0, "nothing"))
    register("fake_right", FakeExperts, opt_in=True)
    register("fake_wrong", WrongExperts)
    register("fake_raising", RaisingExperts)

    def measured(seconds: float = math.inf, **wanted: Any) -> Board:
        board = Board(tmp_path / "board.json", MEASURED_ON)
        marker = Marker(tmp_path / "running")
        measure_board(board, [TINY], probe_cpu(), Wanted(**wanted), marker, Limits(seconds, rounds=1))
        return Board(tmp_path / "board.json", MEASURED_ON)

    return measured


def test_every_backend_is_in_its_row(run: Any, tmp_path: pathlib.Path) -> None:
    board = run()
    rows = board.document["rows"]
    assert [(row["routing"], row["tokens"]) for row in rows] == [("uniform", 3), ("one_set", 3)]
    for row in rows:
        found = {one["backend"]: one for one in row["results"]}
        assert {"torch", "fake_right", "fake_wrong", "fake_raising"} <= set(found)
        assert row["default"]["backend"] == "torch"
        assert found["fake_right"]["failure"] is None
        assert found["fake_right"]["time_us"] > 0
        assert found["fake_right"]["first_ms"] > 0
        assert found["fake_wrong"]["failure"].startswith("wrong numbers: error")
        assert found["fake_wrong"]["time_us"] is None
        assert "no kernel image" in found["fake_raising"]["failure"]
    assert board.document["left_out"] == []
    assert board.document["layers"]["tiny:unquantized"]["default"] == "torch"
    assert "triton" in board.document["layers"]["tiny:unquantized"]["skipped"]
    assert json.loads((tmp_path / "running").read_text())["layer"] == "tiny:unquantized"
    before = board.document["rows"]
    assert run().document["rows"] == before, "nothing was missing, so nothing was measured again"


def test_experts_share_a_static_scale_of_the_intermediate() -> None:
    """Some kernels take no other, and with one for each expert their errors would not be theirs."""
    problem = MoEProblem(**TINY.keywords, quant="fp8_tensor_static", max_num_tokens=1)
    drawn = random_weights(problem, torch.Generator().manual_seed(0), torch.device("cpu"))
    found = measure.layer_weights(problem, torch.device("cpu"))
    assert len(drawn.a2_scale.unique()) == 4
    assert torch.equal(found.a2_scale, drawn.a2_scale.max().expand(4))
    assert torch.equal(found.w2.view(torch.uint8), drawn.w2.view(torch.uint8))


def test_who_is_out_is_in_the_row_with_the_reason(run: Any, tmp_path: pathlib.Path) -> None:
    board = Board(tmp_path / "board.json", MEASURED_ON)
    board.put_out("tiny:unquantized", "fake_right", "Fake_Right", "SIGSEGV in apply")
    found = run(deny=("fake_wrong", "fake_raising", "torch"), seconds=1e9).document
    assert found["left_out"] == [
        {"layer": "tiny", "scheme": "unquantized", "routing": routing, "tokens": 3, "left_out": "nothing fits"}
        for routing in ("uniform", "one_set")
    ]
    (first, _) = run(only=("fake_right", "torch")).document["rows"]
    (out,) = (one for one in first["results"] if one["backend"] == "fake_right")
    assert out["failure"] == "SIGSEGV in apply"
    assert out["time_us"] is None


def test_what_does_not_fit_beside_the_others_is_left_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 3 * 4 * 32 * 16 * 2
    monkeypatch.setattr(measure, "free_memory_bytes", lambda device: 4 * weights)
    (first, _) = run().document["rows"]
    reasons = [one["failure"] for one in first["results"] if one["failure"] and "left out" in one["failure"]]
    assert len(first["results"]) - len(reasons) == 2
    assert reasons[0].startswith("left out: 2 copies of 12")


def test_what_ended_a_process_is_left_out_of_the_next(tmp_path: pathlib.Path) -> None:
    running, board = tmp_path / "running", Board(tmp_path / "board.json", MEASURED_ON)
    codes = [128 + 11, 128 + 9, 75, 0]

    def measuring() -> int:
        mark = {"layer": "tiny:unquantized", "backend": f"bad_{len(codes)}", "experts": "Bad", "step": "apply"}
        running.write_text(json.dumps(mark))
        return codes.pop(0)

    command.supervise(measuring, lambda: board, running)
    assert not codes
    assert [(out["backend"], out["reason"]) for out in board.document["out"]] == [
        ("bad_4", "it ended the process with SIGSEGV in apply"),
        ("bad_3", "it ended the process with SIGKILL (stuck, or out of memory) in apply"),
    ]


def test_a_stuck_process_is_killed(tmp_path: pathlib.Path) -> None:
    # -S -E: nothing but Python itself is loaded.
    sleeping = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"]
    assert command.run_child(sleeping, tmp_path / "running", patience=0.2) == 128 + 9
    leaving = [sys.executable, "-S", "-E", "-c", "raise SystemExit(75)"]
    assert command.run_child(leaving, tmp_path / "running", patience=600) == 75
