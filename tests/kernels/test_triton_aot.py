"""The Triton kernels compile without the devices, with matrix instructions and without spilling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.aot_run import compile_all, register_bound, spill_bound

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FAST_CASES = ("routing", "short_routing", "read", "one_token", "decode", "prefill", "fp32_decode", "batched_decode")
SLOW_CASES = dict.fromkeys(TARGETS, ("gpt_oss_prefill", "small", "tall", "odd", "not_gated", "fp32_prefill"))
# Registers are counted there. Elsewhere other cases have all that these do: tiles, an epilogue, the batched plan.
SLOW_CASES["sm_90"] += ("middle", "batched_prefill")
# Of tiles too low for the largest instructions, and tall ones in the same launch.
TALL_CASES = ("small", "tall", "batched_decode")
# Packed weights: one case of each way to restore them, and slices with either kind of scales.
PACKED_CASES = (
    "int4_one_token",
    "mxfp4_one_token",
    "int4_g32_zp_decode",
    "nvfp4_decode",
    "int8_weights_decode",
    "mxfp4_tall",
    "mxfp4_prefill",
)

# Most registers a thread on sm_90 with Triton 3.6.0 and 3.8.0, so that a change that costs some is noticed. 255 is all
# there are.
MAX_REGISTERS_SM90 = {
    ("routing", "sort_routes"): 157,
    ("routing", "count_chunks"): 40,
    ("routing", "scan_chunks"): 72,
    ("routing", "place_routes"): 56,
    ("routing", "reduce_routes"): 32,
    ("routing", "reduce_sorted_rows"): 39,
    ("routing", "copy_rows"): 20,
    ("routing", "plan_batches"): 96,
    ("routing", "place_tokens"): 64,
    ("routing", "spread_tokens"): 20,
    ("routing", "sum_batches"): 39,
    ("short_routing", "count_chunks"): 31,
    ("short_routing", "place_routes"): 128,
    ("short_routing", "reduce_sorted_rows"): 48,
    ("read", "xor_words"): 64,
    ("one_token", "gemv_gate_up"): 128,
    ("one_token", "gemv_down"): 118,
    ("decode", "gate_up"): 64,
    ("decode", "down"): 96,
    ("prefill", "gate_up"): 248,
    ("prefill", "down"): 214,
    ("gpt_oss_prefill", "gate_up"): 224,
    ("gpt_oss_prefill", "down"): 255,
    ("middle", "gate_up"): 248,
    ("middle", "down"): 212,
    ("small", "gate_up"): 128,
    ("small", "down"): 130,
    ("tall", "gate_up"): 120,
    ("tall", "down"): 128,
    ("not_gated", "gate_up"): 182,
    ("not_gated", "down"): 214,
    ("odd", "gate_up"): 255,
    ("odd", "down"): 255,
    ("fp32_decode", "gate_up"): 80,
    ("fp32_decode", "down"): 72,
    ("fp32_prefill", "gate_up"): 100,
    ("fp32_prefill", "down"): 94,
    ("batched_decode", "gate_up"): 72,
    ("batched_decode", "down"): 72,
    ("batched_prefill", "gate_up"): 224,
    ("batched_prefill", "down"): 206,
}

# Rows of 511 elements are not aligned, which costs an address a row and element. Such sizes must be right, not fast. In
# the other, ptxas stops at 80 registers and parks one 8-byte value.
MAX_SPILL_BYTES_SM90 = {("odd", "down"): 1224, ("fp32_prefill", "down"): 8}


def check(target: str, rows: list[dict[str, Any]], num_expected: int) -> None:
    assert len(rows) == num_expected
    for row in rows:
        key = row["case"], row["kernel"]
        matrix = set(row["matrix"])
        # A tile of one row uses plain multiply-adds.
        if row["case"] in ("routing", "short_routing", "read", "one_token"):
            assert not matrix, row
        elif row["case"].startswith("fp32") and target != "gfx942":
            # IEEE products of 32 bits have no matrix instruction on NVIDIA; one here would be TF32.
            assert not matrix, row
        else:
            largest = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
            expected = {largest[target]}
            if target != "gfx942" and row["case"] in ("decode", "fp32_decode", "fp32_prefill"):
                expected = {"mma.sync"}
            elif target != "gfx942" and row["case"] in TALL_CASES:
                expected.add("mma.sync")
            assert matrix == expected, row
        if target == "sm_90":
            assert row["registers"] <= register_bound(MAX_REGISTERS_SM90[key]), row
            assert row["spill_bytes"] <= spill_bound(MAX_SPILL_BYTES_SM90.get(key, 0)), row


# The GPU whose registers are counted is quick; the slow tests run the others.
@pytest.mark.parametrize(
    "targets", [("sm_90",), pytest.param(("sm_80", "sm_100", "gfx942"), marks=pytest.mark.slow)], ids="-".join
)
def test_kernels_compile(targets: tuple[str, ...]) -> None:
    for target, rows in compile_all(dict.fromkeys(targets, FAST_CASES)).items():
        # Eleven and three kernels plan, copy and reduce, eight read; every other case is two GEMMs.
        check(target, rows, 11 + 3 + 8 + 2 * (len(FAST_CASES) - 3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_shapes_compile() -> None:
    for target, rows in compile_all(SLOW_CASES).items():
        check(target, rows, 2 * len(SLOW_CASES[target]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packed_weights_compile() -> None:
    for target, rows in compile_all(dict.fromkeys(TARGETS, PACKED_CASES)).items():
        shares = {row["case"] for row in rows if row["kernel"] == "both"}
        assert shares == ({"int4_g32_zp_decode", "nvfp4_decode"} if target == "sm_90" else set())
        assert len([row for row in rows if row["kernel"] != "both"]) == 2 * (len(PACKED_CASES) - len(shares))
        for row in rows:
            # Slices are products of three dimensions, which Triton gives to the instructions of a warp.
            sliced = row["case"].endswith("one_token")
            expected = {
                "sm_80": "mma.sync",
                "sm_90": "mma.sync" if sliced else "wgmma.mma_async",
                "sm_100": "mma.sync" if sliced else "tcgen05.mma",
                "gfx942": "v_mfma",
            }[target]
            assert set(row["matrix"]) == {expected}, row
            # A word or two of the largest tiles on others than sm_90, which all rules were measured on.
            assert row["spill_bytes"] <= (0 if target == "sm_90" else 8), row


@pytest.mark.slow
def test_what_moves_tokens_between_ranks_compiles() -> None:
    both = ("moving", "exchange")
    for target, rows in compile_all({"sm_80": both, "sm_90": both, "sm_100": ("moving",)}).items():
        # The most with Triton 3.8.0: whole rows that are quantized.
        most = {"moving": 64 if target == "sm_80" else 63, "exchange": 192}
        for case, num_kernels in (("moving", 9), ("exchange", 4 if target != "sm_100" else 0)):
            assert len({row["kernel"] for row in rows if row["case"] == case}) == num_kernels
        for row in rows:
            assert row["registers"] <= register_bound(most[row["case"]]), row
            assert row["spill_bytes"] == 0, row
