"""The bench of counters: which rows it takes, and how it reads what ncu prints."""

from __future__ import annotations

import csv

import pytest

from benches.h200 import counters

ROW = {
    "layer": "olmoe-1b-7b",
    "scheme": "unquantized",
    "routing": "uniform",
    "tokens": 16,
    "board_us": 90.0,
    "share": 0.7,
}
ASKED = 2 * 16 * 8 * 2048 * 3 * 1024
"""Operations that the layer asks for: 8 experts a token, H 2,048, I 1,024, three matrices."""

FACTS = {"device": "GPU", "versions": {"torch": "2"}, "commit": "0" * 40, "date": "2026-11-28"}

_METRICS = [*counters.MEASURED.values(), "sm__ops_path_tensor_src_bf16_dst_fp32.sum"]
_WAITS = [
    f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for name in ("barrier", "wait", "long_scoreboard")
]


def printed(*kernels: tuple[str, float, int]) -> list[dict[str, str]]:
    """Lines as ncu prints them: the heads, their units, and a line for each kernel of a name, ns and operations."""
    lines = [["ID", "Kernel Name", *_METRICS, *_WAITS], ["", "", *["unit"] * (len(_METRICS) + len(_WAITS))]]
    for number, (name, nanoseconds, operations) in enumerate(kernels):
        values = [nanoseconds, 3e9, 1e9, 81.2, 40.0, 12.0, 1.5e9, operations]
        lines.append([str(number), name, *(f"{value:,}" for value in values), "0.5", "1.25", "7.5"])
    return list(csv.DictReader([",".join(f'"{text}"' for text in line) for line in lines]))


def test_the_kernels_between_two_marks_are_a_row_s() -> None:
    mark = ("void erfinv_kernel", 900.0, 0)
    gate_up, down = ("_gate_up_kernel", 60_000.0, ASKED), ("_down_kernel", 30_000.0, ASKED // 2)
    short = ("_sort_kernel", 1_000.0, 0)
    found = counters.by_row(printed(mark, short, gate_up, down, mark, gate_up), [ROW, ROW])
    assert [[kernel["name"] for kernel in row["kernels"]] for row in found] == [
        ["_sort_kernel", "_gate_up_kernel", "_down_kernel"],
        ["_gate_up_kernel"],
    ]
    assert found[0]["kernels"][1]["stalls"] == {"barrier": 0.5, "wait": 1.25, "long_scoreboard": 7.5}
    first, second, other = counters.counters_table({**FACTS, "rows": found}).splitlines()[2:5]
    line = "gate_up_kernel | 60 | 4.00 | 81 % | 40 % | 12 % | 1500 | 1.50 | long_scoreboard 7.5, wait 1.2 |"
    assert first == f"| olmoe-1b-7b unquantized uniform 16, 70% | {line}"
    assert second.startswith("|  | down_kernel | 30 |")
    assert second.endswith("| 1500 |  | long_scoreboard 7.5, wait 1.2 |")
    assert "| 1.00 |" in other


def test_a_call_that_ncu_did_not_see_is_an_error() -> None:
    with pytest.raises(ValueError, match="ncu saw 1 calls of 2 rows"):
        counters.by_row(printed(("erfinv", 900.0, 0)), [ROW, ROW])
