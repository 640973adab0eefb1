"""GPU counters, kernel by kernel, of the board's rows that are lost or far from their ceilings.

    python -m benches.h200.counters [--below 0.8] [--json FILE]

Takes the stored board's rows of 16 tokens and more in which the default backend lost or reaches less than that share of
its roofline, calls each layer once under NVIDIA's `ncu`, and prints a line for each kernel. ncu runs a kernel several
times, empties the caches before each, and does not lock the clock here. `work` is products that the tensor cores
computed over those that the layer asks for: rows that only fill tiles make the difference.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from benches.board.layers import GPU_LAYERS, BoardLayer
from benches.board.rows import RESULTS, rows_of
from benches.markdown import table, wrapped
from benches.stored import load
from moereg.bench.inputs import random_call, random_weights
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import make_kernel
from moereg.platforms import probe_platform

STORED: Final = "counters_h200.json"
LOST: Final = "counters_lost_h200.json"
"""Counters of the lost rows alone, which `--below 0` takes."""

LEAST_TOKENS: Final = 16
WARM_CALLS: Final = 3
"""Calls before the one that is counted: they compile, and record what is launched."""

MEASURED: Final[Mapping[str, str]] = {
    "ns": "gpu__time_duration.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "hertz": "smsp__cycles_elapsed.avg.per_second",
}
"""Metrics of ncu by name in the results; shares in percent."""

_OPERATIONS: Final = "sm__ops_path_tensor_src_"
_STALLS: Final = "smsp__average_warps_issue_stalled_"
_MARK: Final = "erfinv"
"""A kernel between two rows, which no layer launches."""

Row = dict[str, Any]


def far_rows(below: float) -> list[Row]:
    """Rows of the board whose default is `triton` and lost, or reaches less than a share of its roofline."""
    found = []
    for one in rows_of("h200"):
        own = one.entries.get(one.default)
        if own is None or own.time_us is None or own.backend != "triton" or one.tokens < LEAST_TOKENS:
            continue
        if one.outcome == "lost" or (own.share is not None and own.share < below):
            where = {"layer": one.layer, "scheme": one.scheme, "routing": one.routing, "tokens": one.tokens}
            found.append({**where, "board_us": own.time_us, "share": own.share})
    return found


def _layer_of(row: Row) -> BoardLayer:
    return next(each for each in GPU_LAYERS if (each.layer, each.scheme) == (row["layer"], row["scheme"]))


def run_rows(rows: Sequence[Row]) -> None:
    """Calls each row's layer once while ncu counts, a mark in front of each."""
    device = torch.device("cuda")
    mark = torch.zeros(1, device=device)
    made, kernel = None, None
    for row in rows:
        layer = _layer_of(row)
        problem = layer.problem()
        if layer is not made:
            kernel = None
            torch.cuda.empty_cache()
            weights = random_weights(problem, torch.Generator().manual_seed(0), device)
            made, kernel = layer, make_kernel(problem, weights)
            del weights
        assert kernel is not None
        call = random_call(problem, row["tokens"], row["routing"], torch.Generator(device).manual_seed(0))
        for _ in range(WARM_CALLS):
            kernel(*call)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        torch.erfinv(mark)
        kernel(*call)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def metrics_there(chip: str) -> list[str]:
    """The metrics to ask for that ncu knows of a chip."""
    command = ["ncu", "--query-metrics", "--chip", chip]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {line.split()[0] for line in said.splitlines() if line.strip()}
    bases = {name.partition(".")[0] for name in names}
    asked = [metric for metric in MEASURED.values() if metric.partition(".")[0] in bases]
    asked += sorted(f"{base}.sum" for base in bases if base.startswith(_OPERATIONS) and "sparsity" not in base)
    return asked + sorted(f"{base}.ratio" for base in bases if base.startswith(_STALLS) and "selected_" not in base)


def by_row(lines: Iterable[Mapping[str, str]], rows: Sequence[Row]) -> list[Row]:
    """Rows with the kernels between their marks.

    Args:
        lines: What ncu printed as CSV, a kernel each.
        rows: In the order in which they ran.

    Raises:
        ValueError: There are fewer or more marks than rows.
    """
    found: list[list[Row]] = []
    for line in lines:
        if _MARK in line["Kernel Name"]:
            found.append([])
        elif line["Kernel Name"]:  # The first line has the units.
            found[-1].append(_kernel(line))
    if len(found) != len(rows):
        raise ValueError(f"ncu saw {len(found)} calls of {len(rows)} rows")
    return [{**row, "kernels": kernels} for row, kernels in zip(rows, found, strict=True)]


def _kernel(line: Mapping[str, str]) -> Row:
    values: dict[str, float] = {}
    for name, text in line.items():
        try:
            values[name] = float(text.replace(",", ""))
        except (AttributeError, ValueError):
            continue
    stalls = {name[len(_STALLS) :].partition("_per_")[0]: values[name] for name in values if name.startswith(_STALLS)}
    operations = sum(value for name, value in values.items() if name.startswith(_OPERATIONS))
    found = {name: values[metric] for name, metric in MEASURED.items() if metric in values}
    return {"name": line["Kernel Name"], "operations": operations, "stalls": stalls, **found}


def counters_table(record: Mapping[str, Any]) -> str:
    """A line for each kernel that takes a twentieth of its row's time."""
    lines = []
    for row in record["rows"]:
        problem, total = _layer_of(row).problem(), sum(kernel["ns"] for kernel in row["kernels"])
        asked = 2 * row["tokens"] * problem.top_k * problem.hidden_size * problem.intermediate_size
        asked *= problem.activation.num_halves + 1
        done = sum(kernel["operations"] for kernel in row["kernels"])
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        place = f"{row['layer']} {row['scheme']} {row['routing']} {row['tokens']:,}, {share}"
        work = f"{done / asked:.2f}"
        for kernel in sorted(row["kernels"], key=lambda kernel: -float(kernel["ns"])):
            if kernel["ns"] < total / 20:
                continue
            worst = sorted(kernel["stalls"].items(), key=lambda each: -each[1])[:2]
            amounts = [f"{kernel['ns'] / 1e3:,.0f}", f"{(kernel['read_bytes'] + kernel['written_bytes']) / 1e9:.2f}"]
            shares = [f"{kernel[name]:.0f} %" if name in kernel else "-" for name in ("dram", "l2", "tensor")]
            waits = ", ".join(f"{name} {value:.1f}" for name, value in worst)
            speed = f"{kernel['hertz'] / 1e6:.0f}" if "hertz" in kernel else "-"
            lines.append([place, kernel["name"].strip("_")[:32], *amounts, *shares, speed, work, waits])
            place = work = ""
    heads = ["row, share", "kernel", "us", "GB", "DRAM", "L2", "tensor pipes", "MHz", "work", "most stalls, warps"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    where = f"{record['device']}, {versions}, commit {record['commit'][:7]}, {record['date']}."
    return f"{table(heads, lines)}\n\n{wrapped(where)}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "counters": lambda: counters_table(load(STORED, RESULTS)),
    "counters_lost": lambda: counters_table(load(LOST, RESULTS)),
}


def main() -> int:
    """Counts, writes the file, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--below", type=float, default=0.8, help="share of the roofline")
    parser.add_argument("--chip", default="gh100")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / STORED)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = far_rows(options.below)
    if options.child:
        run_rows(rows)
        return 0
    platform = probe_platform()
    command = ["ncu", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--clock-control", "none", "--metrics", ",".join(metrics_there(options.chip))]
    command += [sys.executable, "-m", "benches.h200.counters", "--child", "--below", str(options.below)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    lines = [line for line in ran.stdout.splitlines() if line.startswith('"')]
    if ran.returncode or not lines:
        print(f"ncu ended with {ran.returncode}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}", file=sys.stderr)
        return 1
    found = by_row(csv.DictReader(lines), rows)
    facts = {**provenance(platform, ("moereg", "torch", "triton")), **clocks(platform)}
    record = {"schema": 1, **facts, "below": options.below, "rows": found}
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(counters_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
