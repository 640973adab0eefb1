"""Layers with activations rounded in 16 bits compile without the devices, and without a small float."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.registers import register_bound

SCRIPT = Path(__file__).parent / "aot_emulated.py"
FAST_CASES = {
    "sm_90": ("nvfp4_static_prefill",),
    "gfx942": ("nvfp4_decode",),
}
SLOW_CASES = {
    "sm_80": ("nvfp4_decode", "mx_decode", "nvfp4_batched"),
    "sm_90": ("nvfp4_decode", "nvfp4_odd", "nvfp4_batched", "mx_decode", "mx_prefill"),
    "sm_100": ("nvfp4_decode", "nvfp4_static_prefill", "mx_prefill"),
    "gfx942": ("mx_decode", "nvfp4_batched"),
}
# Rounding holds a row, or a kilobyte of one.
MAX_REGISTERS_OF_ROWS = 96


def compile_all(cases: dict[str, tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    """The script's results by target."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    rows = {}
    for target, names in cases.items():
        done = subprocess.run(
            [sys.executable, str(SCRIPT), target, *names], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{target}:\n{done.stderr}"
        rows[target] = json.loads(done.stdout)
    return rows


@pytest.fixture(scope="module")
def slow() -> dict[str, list[dict[str, Any]]]:
    return compile_all(SLOW_CASES)


def check(rows: list[dict[str, Any]], cases: tuple[str, ...]) -> None:
    order = ("requantize_rows", "gate_up", "requantize_rows", "down")
    assert [(row["case"], row["kernel"]) for row in rows] == [(case, name) for case in cases for name in order]
    for row in rows:
        if row["kernel"] == "requantize_rows":
            assert not row["matrix"], row
            assert row["spill_bytes"] == 0, row
            assert row["registers"] <= register_bound(MAX_REGISTERS_OF_ROWS), row
        else:
            assert row["matrix"], row


# Each takes 10 s, and one is quick.
@pytest.mark.parametrize(
    "target", [target if target == "sm_90" else pytest.param(target, marks=pytest.mark.slow) for target in FAST_CASES]
)
def test_kernels_compile(target: str) -> None:
    check(compile_all({target: FAST_CASES[target]})[target], FAST_CASES[target])


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW_CASES)
def test_more_shapes_compile(slow: dict[str, list[dict[str, Any]]], target: str) -> None:
    check(slow[target], SLOW_CASES[target])
