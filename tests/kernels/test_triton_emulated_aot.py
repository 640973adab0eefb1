"""Layers with activations rounded in 16 bits compile without the devices, and without a small float."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.aot_run import compile_all
from tests.kernels.registers import register_bound

SCRIPT = "aot_emulated.py"
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
    check(compile_all(SCRIPT, {target: FAST_CASES[target]})[target], FAST_CASES[target])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_shapes_compile() -> None:
    for target, rows in compile_all(SCRIPT, SLOW_CASES).items():
        check(rows, SLOW_CASES[target])
