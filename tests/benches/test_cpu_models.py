"""The bench of whole models on a CPU, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benches import cpu_models, cpu_page

OLMOE, QWEN3 = "tiny-olmoe-1b-7b", "tiny-qwen3-30b-a3b"


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    # Reading memory takes the library of moereg-cpu, which not every machine has.
    monkeypatch.setattr(cpu_models, "read_rate", lambda threads: 1e9)


def rows_of(path: Path, model: str, *options: str) -> list[dict[str, Any]]:
    common = ["--threads", "1", "--seconds", "0.001", "--prompt", "8", "--json", str(path)]
    assert cpu_models.main(["--model", model, *options, *common]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_models_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "models_cpu_here.json"
    rows_of(path, OLMOE)
    rows = rows_of(path, QWEN3, "--scheme", "int4_w4a16_g32")
    times = {(row["model"], row["phase"], row["batch"], row["implementation"]): row.get("ms") for row in rows}
    for name in cpu_models.NAMES:
        assert times[OLMOE, "decode", 1, name] > 0
        assert (times[OLMOE, "prefill", 1, name] is None) is (name == "batched_mm")
    assert times[QWEN3, "decode", 4, "moereg"] > 0
    # Two layers: 2 of 8 experts of 64 x 64 x 3 in 4 bits and an fp32 scale per 32, attention (4 and 2 heads of 16)
    # with its norms, a router and two norms; the last norm and the output.
    experts = 2 * 2 * 3 * 64 * 64 * (0.5 + 4 / 32)
    rest = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 16 + 8 * 64 + 2 * 64) + 64 + 128 * 64
    assert rows[-3]["read_bytes"] == pytest.approx(experts + 2 * rest)
    monkeypatch.setattr(cpu_page, "RESULTS", tmp_path)
    shown = cpu_page.models_table()
    (line,) = (line for line in shown.splitlines() if line.startswith(f"| {OLMOE} | unquantized | decode 4 x 512 |"))
    best = min(times[OLMOE, "decode", 4, name] for name in cpu_models.NAMES if name != "moereg")
    assert f"| {best / times[OLMOE, 'decode', 4, 'moereg']:.2f} " in line
    assert "llama.cpp not measured" in shown


def test_a_wrong_kernel_and_one_faster_than_memory_get_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(cpu_models, "read_rate", lambda threads: 1e-9)
    arguments = ["--model", QWEN3, "--scheme", "int4_w4a16_g32", "--threads", "1", "--seconds", "0.001"]
    assert cpu_models.main([*arguments, "--prompt", "8", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("outcome") for row in rows] == ["faster than memory", "faster than memory", None]
    monkeypatch.setattr(cpu_models, "reference_experts", lambda *given, **_: torch.ones_like(given[2]))
    assert cpu_models.main([*arguments, "--prompt", "8", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert all(row["outcome"].startswith("wrong: error ") and "ms" not in row for row in rows)
