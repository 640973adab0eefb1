from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from benches.board import page, rows

HEAD = {
    "schema": 1,
    "device": "a GPU",
    "versions": {"torch": "2.13"},
    "commit": "0123456789abcdef",
    "date": "2026-11-22",
    "seconds": 12.3,
    "ceilings": {"bfloat16": {"matmul_tflops": 678.0, "read_gbps": 4370.0, "read_by": "x"}},
    "layers": {},
    "out": [],
    "left_out": [],
}


def result(backend: str, time_us: float | None, failure: str | None = None, experts: str = "") -> dict[str, Any]:
    identity = {"backend": backend, "experts": experts or f"{backend.title()}Experts", "computes": "unquantized"}
    return {**identity, "time_us": time_us, "share": 0.5, "failure": failure, "first_ms": 12.0, "permute_ms": 3.0}


def row(tokens: int, *results: dict[str, Any], default: str = "own", routing: str = "uniform") -> dict[str, Any]:
    (chosen,) = [one for one in results if one["backend"] == default][:1] or [result(default, None)]
    place = {"layer": "big", "scheme": "unquantized", "routing": routing, "tokens": tokens}
    return {**place, "default": {key: chosen[key] for key in ("backend", "experts", "computes")}, "results": [*results]}


@pytest.fixture
def stored(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    def write(*found: dict[str, Any], name: str = "board_h200.json", **head: Any) -> None:
        document = {**HEAD, **head, "rows": [*found]}
        (tmp_path / name).write_text(json.dumps(document))

    return write


def lines(name: str) -> list[str]:
    return [line for line in page.TABLES[f"h200_{name}"]().splitlines() if line]


def test_losses_come_worst_first_and_a_tie_is_none(stored: Any) -> None:
    stored(
        row(1, result("own", 100.0), result("other", 99.5)),
        row(16, result("own", 100.0), result("other", 80.0), result("third", 90.0)),
        row(64, result("own", 100.0), result("other", 60.0)),
        row(256, result("own", None, "it raised"), result("other", 60.0)),
        row(1024, result("own", 100.0), result("other", 120.0)),
        row(4096, result("own", 100.0)),
    )
    head, _, _, *found = [line for line in lines("losses") if "Missing" not in line and "; failed)" not in line]
    assert head == "6 rows: 1 won, 1 tied, 3 lost; in 1 one backend ran alone."
    assert found == [
        "| big | unquantized | uniform | 256 | own | failed | other | 60.0 (50%) | all of it: the default failed |",
        "| big | unquantized | uniform | 64 | own | 100.0 (50%) | other | 60.0 (50%) | 40.0% |",
        "| big | unquantized | uniform | 16 | own | 100.0 (50%) | other | 80.0 (50%) | 20.0% |",
    ]
    (line,) = lines("summary")[2:]
    # 0.995, 0.8, 0.6 and 1.2; a default that failed has no ratio.
    assert line == "| big | unquantized | uniform | own | 1 won, 1 tied, 3 lost | 0.87 | 0.60 | other, own |"


def test_a_backend_whose_kernels_were_not_built_is_named_with_the_figure(stored: Any) -> None:
    reason = "requires the kernels fp8, got /home/me/cache/kernels.so with bfloat16; run build other"
    skipped = {
        "builder": reason,
        "other_shape": "requires hidden_size % 128 == 0, got 2880; other, which is not installed",
    }
    layer = {"layer": "big", "scheme": "unquantized", "skipped": skipped}
    rows = (
        row(1, result("own", 1.0), result("there", 2.0)),
        row(16, result("own", 1.0), result("there", None, "it raised")),
    )
    stored(*rows, layers={"big:unquantized": layer})
    text = " ".join(lines("losses"))
    assert "`builder` in 2 rows (unquantized; its kernels were not built)" in text
    assert "`there` in 1 row (unquantized; failed)" in text
    assert "other_shape" not in text
    found = "\n".join(lines("failures"))
    assert "| builder | big unquantized | requires the kernels fp8, got kernels.so with bfloat16 |" in found
    assert "other_shape" not in found
    stored(row(16, result("own", 1.0), result("builder", 2.0)), name="board_h200_1.json")
    assert "`builder` in 1 row (unquantized; its kernels were not built)" in " ".join(lines("losses"))
    assert "got kernels.so with bfloat16" not in " ".join(lines("failures"))
