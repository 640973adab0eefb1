"""Fixtures that call the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moereg import cli
from moereg.bench.roofline import Ceilings
from tests.cli.command import Call, strict_json
from tests.support.snippets import write_layers


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def call_json(call: Call) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """As `call` with `--json`; standard output must be one object and nothing else."""

    def run(line: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = call(f"{line} --json")
        return code, strict_json(out)

    return run


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """Fixed ceilings, without measuring."""
    known = Ceilings(matmul_tflops=0.1, read_gbps=20.0, read_by="nothing")
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: known)
    return known


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE in bfloat16 with one dense layer and two of experts; tests only read it."""
    path = tmp_path_factory.mktemp("checkpoint") / "written"
    write_layers(path, first=1, end=3, num_experts=4, hidden_size=64, intermediate_size=32)
    return path
