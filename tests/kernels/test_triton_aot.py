"""The Triton kernels compile without the devices, with the right matrix instructions and without spilling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import triton

from tests.cli.command import printed

# The version of Triton that bounds were recorded with.
IS_SAME: Final = triton.__version__.startswith("3.8.")
HAS_BLOCK_SCALED: Final = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FAST_CASES = (
    *("routing", "short_routing", "read", "one_token", "decode", "prefill", "fp32_decode", "batched_decode"),
    "shard_decode",
)
SLOW_CASES = dict.fromkeys(
    TARGETS,
    (
        *("gpt_oss_prefill", "small", "tall", "odd", "not_gated", "fp32_prefill"),
        *("shard_one_token", "shard_tall", "shard_prefill"),
    ),
)
# Registers are counted there. Elsewhere other cases have all that these do: tiles, an epilogue, the batched plan.
SLOW_CASES["sm_90"] += ("middle", "batched_prefill", "situ_prefill")
# Of tiles too low for the largest instructions, and tall ones in the same launch.
TALL_CASES = ("small", "tall", "batched_decode", "shard_tall")
# Packed weights: one case of each way to restore them, and slices with either kind of scales.
PACKED_CASES = (
    *("int4_one_token", "mxfp4_one_token", "int4_g32_zp_decode", "nvfp4_decode", "int8_weights_decode"),
    *("mxfp4_tall", "mxfp4_prefill"),
)
# Of what moves tokens between ranks.
MOVING_CASES = {"sm_80": ("moving", "exchange"), "sm_90": ("moving", "exchange"), "sm_100": ("moving",)}
# Codes: the registered cells decide which case compiles for which device.
CODED_CASES = {"sm_80": ("int8_prefill",), "sm_100": ("mx4_prefill", "nv4_prefill"), "gfx942": ("int8_prefill",)}
SLOW_CODED_CASES = {
    "sm_80": ("int8_decode",),
    "sm_89": ("block_decode", "block_prefill", "channel_prefill", "dynamic_prefill"),
    "sm_90": (
        *("channel_prefill", "block_batched_decode", "block_one_token", "block_to_11_rows", "block_to_100_rows"),
        *("block_coded", "block_odd", "channel_decode", "static_prefill", "dynamic_prefill", "mx_decode", "mx_prefill"),
        *("int8_decode", "dynamic_batched_prefill"),
    ),
    "sm_100": (
        *("block_decode", "block_prefill", "mx_prefill", "block_to_100_rows", "channel_prefill", "mx_decode"),
        *("mx4_decode", "nv4_decode", "nv4_batched_prefill", "int8_prefill"),
    ),
    "sm_120": ("mx_decode", "mx_prefill"),
    "gfx942": ("int8_decode",),
}
# Layers whose activations are rounded in 16 bits have no instruction of small floats.
SLOW_ROUNDED_CASES = {
    "sm_80": ("rounded_nvfp4_decode", "rounded_mx_decode", "rounded_nvfp4_batched"),
    "sm_90": (
        *("rounded_nvfp4_decode", "rounded_nvfp4_odd", "rounded_nvfp4_batched", "rounded_mx_decode"),
        "rounded_mx_prefill",
    ),
    "sm_100": ("rounded_nvfp4_decode", "rounded_nvfp4_static_prefill", "rounded_mx_prefill"),
    "gfx942": ("rounded_nvfp4_decode", "rounded_mx_decode", "rounded_nvfp4_batched"),
}

# Most registers a thread on sm_90 with Triton 3.6.0 and 3.8.0, so that a change that costs some is noticed; 255 is all.
# Of a layer's cases: those of the first product and of the second.
MAX_REGISTERS_SM90: Final[dict[str, dict[str, int] | tuple[int, int]]] = {
    "routing": {
        **{"sort_routes": 157, "count_chunks": 40, "scan_chunks": 72, "place_routes": 56, "reduce_routes": 32},
        **{"reduce_sorted_rows": 39, "copy_rows": 20, "plan_batches": 96, "place_tokens": 64},
    },
    "short_routing": {"count_chunks": 31, "place_routes": 128, "reduce_sorted_rows": 48},
    "read": {"xor_words": 64},
    "one_token": (128, 118),
    "situ_prefill": (255, 214),
    "decode": (64, 96),
    "prefill": (248, 214),
    "gpt_oss_prefill": (224, 255),
    "middle": (248, 212),
    "small": (128, 130),
    "tall": (120, 128),
    "not_gated": (182, 214),
    "odd": (255, 255),
    "fp32_decode": (80, 72),
    "fp32_prefill": (100, 94),
    "batched_decode": (72, 72),
    "batched_prefill": (224, 206),
    "shard_one_token": (128, 94),
    "shard_decode": (64, 96),
    "shard_tall": (72, 66),
    "shard_prefill": (248, 216),
    "block_one_token": (128, 124),
    "block_decode": (86, 129),
    "block_to_11_rows": (96, 140),
    "block_to_100_rows": (180, 193),
    "block_prefill": (255, 190),
    "block_odd": (255, 255),
    "block_coded": (180, 246),
    "channel_decode": (80, 114),
    "channel_prefill": (255, 182),
    "static_prefill": (254, 180),
    "dynamic_prefill": (255, 180),
    "mx_decode": (143, 179),
    "mx_prefill": (255, 252),
    "int8_decode": (56, 72),
    "int8_prefill": (121, 128),
    "block_batched_decode": (96, 118),
    "dynamic_batched_prefill": (254, 181),
}
# Rows of 511 or 129 elements are not aligned, which costs an address per element: such sizes are right, not fast. In
# fp32, ptxas stops at 80 registers and parks one 8-byte value. Two accumulators and a partial product of 128 x 128 fill
# the registers, and gated channel scales come on top.
MAX_SPILL_BYTES_SM90 = {
    "odd": (472, 1224),
    "fp32_prefill": (0, 8),
    "channel_prefill": (40, 0),
    "mx_prefill": (48, 0),
    "block_odd": (680, 448),
}
# Of trained layers, whose kernels have the names: saving forward, then both products of rows, gradients by kind.
MAX_REGISTERS_OF_TRAINED_SM90 = {"trained": 253, "trained_few_rows": 124, "trained_not_gated": 240}
# 8 bytes that ptxas parks at 80 registers, as in inference; and what two soft caps and their slopes hold at once.
MAX_SPILL_BYTES_OF_TRAINED = {"trained_fp32": 8, "trained_situ": 144}
# Where the product has its sum in the registers: of a gradient of 64 by 128 elements, which 4 warps add to.
MAX_SPILL_BYTES_OF_TRAINED_SM80 = {**MAX_SPILL_BYTES_OF_TRAINED, "trained_situ": 0, "trained_wide_adapters": 8}
ADAPTED_CASES = ("trained_adapters", "trained_wide_adapters")
TRAINED_CASES = ("trained_few_rows", "trained_gpt_oss", "trained_not_gated", "trained_situ", "trained_fp32")
SLOW_TRAINED_CASES = {
    "sm_90": (*TRAINED_CASES, *ADAPTED_CASES),
    "sm_80": ("trained", *TRAINED_CASES, "trained_wide_adapters"),
    "gfx942": ("trained", *TRAINED_CASES, "trained_adapters"),
}

# Quantizing holds a row, or a kilobyte of one; in the batched format also its place in the tiles.
MAX_REGISTERS_OF_ROWS, MAX_REGISTERS_OF_BATCHED_ROWS = 96, 99

# A tile too low for wgmma or tcgen05 takes mma.sync, which Triton gives fp16 on these two: exact, if not as fast.
RESTORES_FP8_IN_LOW_TILES = ("sm_90", "sm_100")

# Products that the layers of `gluon_aot` launch: fewer would be a rule that none of them takes.
NUM_GLUON_KERNELS = 58

LARGE = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}

Cases = dict[str, tuple[str, ...]]
Rows = list[dict[str, Any]]


def run_script(name: str, *arguments: str) -> str:
    """What a script of this folder prints, in a process that does not interpret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return printed(str(Path(__file__).with_name(name)), *arguments, timeout=3600)


def check_resources(row: dict[str, Any], registers: int, spill_bytes: int = 0) -> None:
    """With another Triton than the recorded one up to a sixth more registers and four words more."""
    assert row["registers"] <= (registers if IS_SAME else min(registers + registers // 6, 255)), row
    assert row["spill_bytes"] <= (spill_bytes if IS_SAME else spill_bytes + 16), row


def check_on_sm90(row: dict[str, Any]) -> None:
    most, which = MAX_REGISTERS_SM90[row["case"]], row["kernel"].endswith("down")
    spill_bytes = MAX_SPILL_BYTES_SM90.get(row["case"], (0, 0))[which]
    check_resources(row, most[row["kernel"]] if isinstance(most, dict) else most[which], spill_bytes)


def check_16_bits(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    # Eleven and three kernels plan, copy and reduce, eight read; every other case is two GEMMs.
    assert len(rows) == sum({"routing": 11, "short_routing": 3, "read": 8}.get(case, 2) for case in cases)
    for row in rows:
        case, expected = row["case"], {LARGE.get(target, "mma.sync")}
        # A tile of one row uses plain multiply-adds. IEEE products of 32 bits have no matrix instruction on NVIDIA; one
        # there would be TF32.
        is_product = case not in ("routing", "short_routing", "read")
        is_vector = "gemv" in row["kernel"]
        if not is_product or is_vector or (case[:4] == "fp32" and target != "gfx942"):
            expected = set()
        elif target != "gfx942" and case in ("decode", "shard_decode"):
            expected = {"mma.sync"}
        elif target != "gfx942" and case in TALL_CASES:
            expected.add("mma.sync")
        assert set(row["matrix"]) == expected, row
        if is_product and case != "odd":
            assert row["wide_loads"] > 4, row
        if case.startswith("shard"):
            # On gfx942 a vector's token comes by elements, for any size.
            assert row["narrow_loads"] <= 4 * is_vector, row
        if target == "sm_90":
            check_on_sm90(row)


def check_packed(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    shares = {row["case"] for row in rows if row["kernel"] == "both"}
    assert shares == ({"int4_g32_zp_decode", "nvfp4_decode"} if target == "sm_90" else set())
    assert len([row for row in rows if row["kernel"] != "both"]) == 2 * (len(cases) - len(shares))
    for row in rows:
        # Slices are products of three dimensions, which Triton gives to the instructions of a warp.
        is_sliced = row["case"].endswith("one_token") and target != "gfx942"
        assert set(row["matrix"]) == {"mma.sync" if is_sliced else LARGE.get(target, "mma.sync")}, row
        # A word or two of the largest tiles on others than sm_90, which all rules were measured on.
        assert row["spill_bytes"] <= (0 if target == "sm_90" else 8), row


def check_moving(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    for case in cases:
        kernels = {row["kernel"] for row in rows if row["case"] == case}
        assert len(kernels) == {"moving": 5, "exchange": 4}[case]
    for row in rows:
        # The most with Triton 3.8.0: whole rows that are quantized.
        check_resources(row, 192 if row["case"] == "exchange" else 64 if target == "sm_80" else 63)


def check_restoring(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    assert [row["kernel"] for row in rows] == ["restore"] * 8
    for row in rows:
        check_resources(row, 64)
        assert row["narrow_loads"] == 0, row


def check_coded(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    products = [(row["case"], row["kernel"]) for row in rows if row["kernel"].startswith("quantized_")]
    assert products == [(case, f"quantized_{name}") for case in cases for name in ("gate_up", "down")]
    for row in rows:
        case = row["case"]
        if not row["kernel"].startswith("quantized_"):
            assert not row["matrix"], row
            is_batched = "batched" in row["kernel"]
            check_resources(row, MAX_REGISTERS_OF_BATCHED_ROWS if is_batched else MAX_REGISTERS_OF_ROWS)
            continue
        is_low = case.endswith(("decode", "one_token", "to_11_rows"))
        large = LARGE.get(target, "mma.sync")
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
            check_on_sm90(row)


def check_rounded(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    order = ("requantize_rows", "gate_up", "requantize_rows", "down")
    assert [(row["case"], row["kernel"]) for row in rows] == [(case, name) for case in cases for name in order]
    for row in rows:
        assert bool(row["matrix"]) == (row["kernel"] != "requantize_rows"), row
        if row["kernel"] == "requantize_rows":
            check_resources(row, MAX_REGISTERS_OF_ROWS)


def check_trained(target: str, rows: Rows, cases: tuple[str, ...]) -> None:
    products = {"saving_gate_up", "rows", "down_input", "weight_gradients"}
    for case in cases:
        assert {row["kernel"] for row in rows if row["case"] == case} > {*products, "routing_gradients"}
    for row in rows:
        case = row["case"]
        is_product = row["kernel"] in products and ("fp32" not in case or target == "gfx942")
        expected = {LARGE.get(target, "mma.sync")} if is_product else set()
        # Sixteen rows of a rank are too few for Hopper's large products.
        is_thin = case in ADAPTED_CASES and set(row["matrix"]) == {"mma.sync"} and row["kernel"] == "weight_gradients"
        assert set(row["matrix"]) == expected or (is_product and is_thin), row
        if target == "sm_90" and row["kernel"] in products:
            check_resources(row, MAX_REGISTERS_OF_TRAINED_SM90.get(case, 255), MAX_SPILL_BYTES_OF_TRAINED.get(case, 0))
        elif target != "gfx942":
            # There scalar registers are parked in those of vectors, which costs little.
            assert row["spill_bytes"] <= MAX_SPILL_BYTES_OF_TRAINED_SM80.get(case, 0), row


# The GPU whose registers are counted is quick; the slow tests run the others.
RUNS: dict[str, tuple[Callable[[str, Rows, tuple[str, ...]], None], Cases]] = {
    "16 bits": (check_16_bits, {"sm_90": FAST_CASES}),
    "codes": (check_coded, {"sm_90": ("block_decode", "block_prefill", "int8_prefill")}),
    "rounded": (check_rounded, {"sm_90": ("rounded_nvfp4_static_prefill",)}),
    "trained": (check_trained, {"sm_90": ("trained",)}),
    "slow trained": (check_trained, SLOW_TRAINED_CASES),
    "slow 16 bits elsewhere": (check_16_bits, dict.fromkeys(("sm_80", "sm_100", "gfx942"), FAST_CASES)),
    "slow 16 bits": (check_16_bits, SLOW_CASES),
    "slow packed weights": (check_packed, dict.fromkeys(TARGETS, PACKED_CASES)),
    "slow moving": (check_moving, MOVING_CASES),
    "slow restoring": (check_restoring, dict.fromkeys(("sm_80", "sm_90", "gfx942"), ("restoring",))),
    "slow codes elsewhere": (check_coded, CODED_CASES),
    "slow codes": (check_coded, SLOW_CODED_CASES),
    "slow rounded": (check_rounded, SLOW_ROUNDED_CASES),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.aot] if name[:4] == "slow" else []) for name in RUNS]
)
def test_kernels_compile(name: str) -> None:
    check, cases = RUNS[name]
    if not HAS_BLOCK_SCALED and check is check_coded:
        # Block-scaled products need Triton 3.8 on these two; backends say so. Without names the script takes all.
        for target in {"sm_100", "sm_120"} & {*cases}:
            cases = {**cases, target: tuple(case for case in cases[target] if not case.startswith(("mx", "nv4")))}
        cases = {target: names for target, names in cases.items() if names}
    found = json.loads(
        run_script("aot_compile.py", *(f"{target}={','.join(names)}" for target, names in cases.items()))
    )
    assert found.keys() == cases.keys()
    for target, rows in found.items():
        check(target, rows, cases[target])


@pytest.mark.aot
@pytest.mark.timeout(1260)
def test_every_shipped_rule_for_hopper_compiles() -> None:
    """With wgmma and tensor copies, without spilling."""
    rows = [json.loads(line) for line in run_script("gluon_aot.py").splitlines()]
    assert len(rows) == NUM_GLUON_KERNELS
    for row in rows:
        assert row["wgmma"], row
        assert row["bulk_tensor"], row
        assert row["stack_bytes"] == 0, row
        # 256 KiB of registers for a program's 384 threads, 168 each before they are shared out anew by role.
        assert row["registers"] <= 168, row
        # Numbers that are encoded are not clamped before their conversion.
        stores_codes = row["name"].startswith(("gate_up fp8_block128", "gate_up fp8_tensor_static"))
        assert (row["saturating"] > 0) == stores_codes, row
        assert row["shared_bytes"] <= 227 * 1024, row
