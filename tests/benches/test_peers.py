"""Own kernels beside other people's: which ratios there are, how rows are judged, and what is missing."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from benches import pictures, report
from benches.board import peers, rows
from benches.board.compare import Comparison, Place, Timed

HEAD = {"schema": 1, "device": "a GPU", "date": "2026-11-23", "layers": {}, "left_out": []}
UNIFORM = Place("big", "bfloat16", "uniform", 64)


def result(backend: str, time_us: float | None, experts: str = "") -> dict[str, Any]:
    failure = "it raised" if time_us is None else None
    return {"backend": backend, "experts": experts, "computes": "x", "time_us": time_us, "failure": failure}


def row(*results: dict[str, Any], layer: str = "big", roofline_us: float = 50.0, **fields: Any) -> dict[str, Any]:
    chosen = {"backend": "triton", "experts": "", "computes": "x"}
    place = {"layer": layer, "scheme": "unquantized", "routing": "uniform", "tokens": 64, **fields}
    return {**place, "roofline_us": roofline_us, "default": chosen, "results": [*results]}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return tmp_path


def store(folder: pathlib.Path, *found: dict[str, Any], name: str = "board_h200.json", **head: object) -> pathlib.Path:
    path = folder / name
    path.write_text(json.dumps({**HEAD, **head, "rows": [*found]}))
    return path


def lines(name: str) -> list[str]:
    return [line for line in peers.TABLES[name]().splitlines() if line]


def test_a_ratio_of_two_processes_is_refused() -> None:
    own, peer = Timed("triton", 100.0, "here"), Timed("sonic", 50.0, "there")
    with pytest.raises(ValueError, match="big bfloat16 uniform T 64 triton was timed in here, sonic in there; measure"):
        Comparison(UNIFORM, own, (peer,), None)
    assert Comparison(UNIFORM, own, (peer._replace(process="here"),), None).ratio == 0.5


def test_a_row_of_two_processes_is_judged_by_the_worse_one(folder: pathlib.Path) -> None:
    store(folder, row(result("triton", 100.0), result("other", 120.0)), row(result("triton", 10.0), tokens=1))
    apart = row(result("triton", 50.0), result("sonic", 55.0))
    store(folder, apart, row(result("sonic", 1.0), tokens=1), name="board_h200_sonic.json")
    one, alone = sorted(peers.board_comparisons(), key=lambda found: -found.place.tokens)
    # Not 55 / 100, and not the better 1.2; where ours did not run there is no ratio to it.
    assert (one.ratio, one.best and one.best.name) == (1.1, "sonic")
    assert (alone.ratio, alone.best) == (None, None)


@pytest.mark.parametrize(
    ("own", "peer", "outcome"),
    [
        (100.0, 103.1, "won"),
        (100.0, 102.9, "tied"),
        (100.0, 97.2, "tied"),
        (100.0, 97.0, "lost"),
        (None, 98.0, "lost"),
        (100.0, None, ""),
    ],
)
def test_rows_are_won_tied_or_lost(own: float | None, peer: float | None, outcome: str) -> None:
    found = () if peer is None else (Timed("other", peer, "p"),)
    assert Comparison(UNIFORM, Timed("triton", own, "p"), found, None).outcome == outcome


def test_a_process_whose_ceilings_a_row_beats_has_no_shares_on_any_page(folder: pathlib.Path) -> None:
    beyond = {**result("other", 40.0), "share": 1.2}
    store(folder, row({**result("triton", 100.0), "share": 0.5}, beyond))
    (one,) = peers.board_comparisons()
    assert (one.roofline_us, one.share) == (None, None)
    assert "1 rows have no share" in " ".join(lines("peers_groups"))
    assert "| - | - |" in lines("peers_rows")[3]
    store(folder, row({**result("triton", 100.0), "share": 0.5}, {**beyond, "share": 1.02}))
    assert peers.board_comparisons()[0].share == 0.5


def test_the_picture_is_the_one_of_the_stored_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / report.PICTURE.name
    pictures.draw_peers(path, peers.groups_of(peers.board_comparisons()))
    texts = [re.findall(r"<!-- (.*?) -->", one.read_text()) for one in (path, report.PICTURE)]
    assert texts[0] == texts[1], "run python -m benches.report"
