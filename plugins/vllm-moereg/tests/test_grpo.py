"""Reinforcement learning: TRL's `GRPOTrainer` changes the weights of the engine that it generates with at each step."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_engine import ENVIRONMENT

from tests.plugins.installing import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="requires vllm, which is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="requires trl, which is not installed"),
]


def lines_of(folder: Path, *options: str) -> list[str]:
    """Runs the program, which must find nothing wrong; its lines about tokens that are equal."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache"), "XDG_DATA_HOME": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(Path(__file__).parent / "grpo.py"), str(folder), *options]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=800, check=False, cwd=folder
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
    return [line for line in process.stdout.splitlines() if "a new engine's tokens: yes" in line]


def test_each_update_of_the_weights_gives_what_a_new_engine_gives(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    assert [line.partition(":")[0] for line in lines] == [*(f"after {n} updates" for n in range(4)), "reload_weights"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_weights_change_while_the_engine_sleeps(level: int, tmp_path: Path) -> None:
    assert len(lines_of(tmp_path, "--cuda", f"--sleep={level}")) == 7


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs: TRL sends weights to its server by NCCL")
def test_weights_of_a_server_change(tmp_path: Path) -> None:
    assert len(lines_of(tmp_path, "--cuda", "--server")) == 4
