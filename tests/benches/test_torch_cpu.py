"""The CPU bench: rows are chosen, kept from earlier runs with the same facts, and say what the CPU may use."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from benches import bench_torch_cpu as bench
from benches import stored


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with rows that take no time; gives its exit code and the file's rows."""
    monkeypatch.setattr(bench, "measure_ceilings", lambda: bench.Ceilings({"bfloat16": 1.0, "float32": 1.0}, 1.0))

    def measure(shapes: Any, dtypes: Any, tokens: Any, *_: Any) -> Iterator[bench.Row]:
        times, notes = {"moereg": 1.0, "eager": 2.0}, {"batched_mm": "skipped", "grouped_mm": "skipped"}
        for shape, dtype, count in itertools.product(shapes, dtypes, tokens):
            yield bench.Row(shape.name, dtype, count, times, times, notes, 0.5, 0.5)

    monkeypatch.setattr(bench, "measure", measure)
    path = tmp_path / "cpu.json"

    def ran(*arguments: str) -> tuple[int, list[tuple[str, str, int]]]:
        code = bench.main([*arguments, "--json", str(path)])
        return code, [bench._key(row) for row in json.loads(path.read_text())["rows"]]

    return ran


def test_a_file_is_measured_in_parts(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = ("few-256", "bfloat16", 1)
    assert run("--shapes", "few-256", "--dtypes", "bfloat16", "--tokens", "1") == (0, [first])
    code, rows = run("--shapes", "few-256", "--tokens", "1", "16")
    assert code == 0
    assert set(rows) == {("few-256", dtype, count) for dtype in bench.DTYPES for count in (1, 16)}
    assert len(rows) == 4
    assert run("--shapes", "few-256", "--rounds", "3") == (2, rows), "rows of other settings are not mixed"
    assert "--json adds to a file of the same rounds" in capsys.readouterr().err


def test_the_instruction_set_is_what_libraries_may_use(monkeypatch: pytest.MonkeyPatch, cpu_features: Any) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cpu_features(onednn=True, bf16=True, fp16=False, int8=True, amx=False)
    assert stored.instruction_set() == "AVX512 with bf16, int8"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cpu_features(onednn=True, bf16=False, fp16=False, int8=False, amx=False)
    assert stored.instruction_set() == "AVX512, oneDNN limited to AVX2"
