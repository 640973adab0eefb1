"""The kernels of 8-bit weights and activations compile for devices that are not there, with 8-bit matrix instructions.

The registered cells decide which case compiles for which device.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton

from tests.kernels.aot_run import compile_all, register_bound, spill_bound

FAST_CASES = {
    "sm_80": ("int8_prefill",),
    "sm_90": ("block_decode", "block_prefill", "int8_prefill"),
    "sm_100": ("mx4_prefill", "nv4_prefill"),
    "gfx942": ("int8_prefill",),
}
SLOW_CASES = {
    "sm_80": ("int8_decode",),
    "sm_89": ("block_decode", "block_prefill", "channel_prefill", "dynamic_prefill"),
    "sm_90": (
        "channel_prefill",
        "block_batched_decode",
        "block_one_token",
        "block_to_11_rows",
        "block_to_100_rows",
        "block_coded",
        "block_odd",
        "channel_decode",
        "static_prefill",
        "dynamic_prefill",
        "mx_decode",
        "mx_prefill",
        "int8_decode",
        "dynamic_batched_prefill",
    ),
    "sm_100": (
        "block_decode",
        "block_prefill",
        "mx_prefill",
        "block_to_100_rows",
        "channel_prefill",
        "mx_decode",
        "mx4_decode",
        "nv4_decode",
        "nv4_batched_prefill",
        "int8_prefill",
    ),
    "sm_120": ("mx_decode", "mx_prefill"),
    "gfx942": ("int8_decode",),
}

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
    # Block-scaled products need Triton 3.8 there; backends say so.
    for cases_of in (FAST_CASES, SLOW_CASES):
        for target in ("sm_100", "sm_120"):
            names = cases_of.get(target, ())
            cases_of[target] = tuple(name for name in names if not name.startswith(("mx", "nv4")))

# Registers a thread on sm_90 with Triton 3.8.0, so that a change that costs some is noticed; 255 is all there are.
MAX_REGISTERS_SM90 = {
    ("block_one_token", "quantized_gate_up"): 128,
    ("block_one_token", "quantized_down"): 124,
    ("block_decode", "quantized_gate_up"): 86,
    ("block_decode", "quantized_down"): 129,
    ("block_to_11_rows", "quantized_gate_up"): 96,
    ("block_to_11_rows", "quantized_down"): 140,
    ("block_to_100_rows", "quantized_gate_up"): 180,
    ("block_to_100_rows", "quantized_down"): 193,
    ("block_prefill", "quantized_gate_up"): 255,
    ("block_prefill", "quantized_down"): 190,
    ("block_odd", "quantized_gate_up"): 255,
    ("block_odd", "quantized_down"): 255,
    ("block_coded", "quantized_gate_up"): 180,
    ("block_coded", "quantized_down"): 246,
    ("channel_decode", "quantized_gate_up"): 80,
    ("channel_decode", "quantized_down"): 114,
    ("channel_prefill", "quantized_gate_up"): 255,
    ("channel_prefill", "quantized_down"): 182,
    ("static_prefill", "quantized_gate_up"): 254,
    ("static_prefill", "quantized_down"): 180,
    ("dynamic_prefill", "quantized_gate_up"): 255,
    ("dynamic_prefill", "quantized_down"): 180,
    ("mx_decode", "quantized_gate_up"): 143,
    ("mx_decode", "quantized_down"): 179,
    ("mx_prefill", "quantized_gate_up"): 255,
    ("mx_prefill", "quantized_down"): 252,
    ("int8_decode", "quantized_gate_up"): 56,
    ("int8_decode", "quantized_down"): 72,
    ("int8_prefill", "quantized_gate_up"): 121,
    ("int8_prefill", "quantized_down"): 128,
    ("block_batched_decode", "quantized_gate_up"): 96,
    ("block_batched_decode", "quantized_down"): 118,
    ("dynamic_batched_prefill", "quantized_gate_up"): 254,
    ("dynamic_batched_prefill", "quantized_down"): 181,
}
# Quantizing holds a row, or a kilobyte of one; in the batched format also its place in the tiles.
MAX_REGISTERS_OF_ROWS = 96
MAX_REGISTERS_OF_BATCHED_ROWS = 99

# Two accumulators and a partial product of 128 x 128 fill the registers, and gated channel scales come on top. Sizes
# without useful divisors must be right, not fast.
MAX_SPILL_BYTES_SM90 = {
    ("channel_prefill", "quantized_gate_up"): 40,
    ("mx_prefill", "quantized_gate_up"): 48,
    ("block_odd", "quantized_gate_up"): 680,
    ("block_odd", "quantized_down"): 448,
}

# A tile too low for wgmma or tcgen05 takes mma.sync, which Triton gives fp16 on these two: exact, if not as fast.
RESTORES_FP8_IN_LOW_TILES = ("sm_90", "sm_100")


def check(target: str, rows: list[dict[str, Any]], cases: tuple[str, ...]) -> None:
    products = [(row["case"], row["kernel"]) for row in rows if row["kernel"].startswith("quantized_")]
    assert products == [(case, f"quantized_{name}") for case in cases for name in ("gate_up", "down")]
    for row in rows:
        case = row["case"]
        if not row["kernel"].startswith("quantized_"):
            assert not row["matrix"], row
            assert row["spill_bytes"] == 0, row
            limit = MAX_REGISTERS_OF_BATCHED_ROWS if "batched" in row["kernel"] else MAX_REGISTERS_OF_ROWS
            assert row["registers"] <= register_bound(limit), row
            continue
        is_low = case.endswith(("decode", "one_token", "to_11_rows"))
        large = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}.get(target, "mma.sync")
        assert set(row["matrix"]) == {"mma.sync" if is_low and target != "gfx942" else large}, row
        # Instructions of the last two do not name types: one takes them from a descriptor, the other is not PTX.
        if target != "gfx942" and (target != "sm_100" or is_low):
            kind = ".s8" if case.startswith("int8") else ".bf16" if case.startswith(("mx", "nv4")) else "e4m3"
            if kind == "e4m3" and is_low and target in RESTORES_FP8_IN_LOW_TILES:
                kind = ".f16.f16"
            kinds = {"e4m3", ".block_scale"} if case.startswith("mx") and target == "sm_120" else {kind}
            assert {word for word, count in row["products"].items() if count} == kinds, row
        elif case.startswith("mx"):
            assert row["products"][".block_scale"], row
        elif case.startswith("nv4"):
            assert row["products"]["mxf4nvf4"] == row["products"][".block_scale"] == row["matrix"][large], row
        if case.startswith("nv4"):
            assert row["spill_bytes"] == 0, row
        if target == "sm_90":
            key = case, row["kernel"]
            assert row["registers"] <= register_bound(MAX_REGISTERS_SM90[key]), row
            assert row["spill_bytes"] <= spill_bound(MAX_SPILL_BYTES_SM90.get(key, 0)), row


# The GPU whose registers are counted is quick; the slow tests run the others.
@pytest.mark.parametrize(
    "targets", [("sm_90",), pytest.param(("sm_80", "sm_100", "gfx942"), marks=pytest.mark.slow)], ids="-".join
)
def test_kernels_compile(targets: tuple[str, ...]) -> None:
    # Without names the script takes all. Triton before 3.8 has no block-scaled products for sm_100, its only ones here.
    cases = {target: FAST_CASES[target] for target in targets if FAST_CASES[target]}
    for target, rows in compile_all(cases).items():
        check(target, rows, cases[target])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_shapes_compile() -> None:
    cases = {target: names for target, names in SLOW_CASES.items() if names}  # Without names the script takes all.
    for target, rows in compile_all(cases).items():
        check(target, rows, cases[target])


# Layers whose activations are rounded in 16 bits have no instruction of small floats.
ROUNDED_FAST_CASES = {
    "sm_90": ("rounded_nvfp4_static_prefill",),
    "gfx942": ("rounded_nvfp4_decode",),
}
ROUNDED_SLOW_CASES = {
    "sm_80": ("rounded_nvfp4_decode", "rounded_mx_decode", "rounded_nvfp4_batched"),
    "sm_90": (
        "rounded_nvfp4_decode",
        "rounded_nvfp4_odd",
        "rounded_nvfp4_batched",
        "rounded_mx_decode",
        "rounded_mx_prefill",
    ),
    "sm_100": ("rounded_nvfp4_decode", "rounded_nvfp4_static_prefill", "rounded_mx_prefill"),
    "gfx942": ("rounded_mx_decode", "rounded_nvfp4_batched"),
}


def check_rounded(rows: list[dict[str, Any]], cases: tuple[str, ...]) -> None:
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
    "target",
    [target if target == "sm_90" else pytest.param(target, marks=pytest.mark.slow) for target in ROUNDED_FAST_CASES],
)
def test_layers_that_round_compile(target: str) -> None:
    check_rounded(compile_all({target: ROUNDED_FAST_CASES[target]})[target], ROUNDED_FAST_CASES[target])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_layers_that_round_compile() -> None:
    for target, rows in compile_all(ROUNDED_SLOW_CASES).items():
        check_rounded(rows, ROUNDED_SLOW_CASES[target])
