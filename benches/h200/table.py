"""Our kernels in bf16 on an H200, row by row, beside their rooflines; others' are rows of `benches.board`.

    python -m benches.h200.table --json FILE [--models M ...] [--tokens T ...] [--backend triton]

A row is checked against the fp32 reference first and gets no number where it is wrong. Then CUDA graphs of one call
each are replayed over rotated inputs and routings; the median is reported. The roofline is the larger of (bytes of the
experts that were active + activations) / read bandwidth and flops / matmul rate, with both ceilings measured in this
process. Exits with 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benches.h200.leave_one_out import geomean
from moereg.bench import roofline
from moereg.bench.compare import output_error
from moereg.bench.inputs import ROUTINGS, Call, num_calls, random_call, random_weights
from moereg.bench.timing import time_kernels, time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts
from moereg.numerics.tolerances import tolerance
from moereg.platforms import probe_platform
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

# Seconds of replays for each row. Under full load the clock falls after about 0.1 s, and further by the second, each
# GPU by its own measure: 8192^3 went from 798 TFLOP/s to 687 to 636 in two seconds.
WINDOW_SECONDS = 0.15

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-120b", "sonic-120b")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def measure_ceilings() -> dict[str, float]:
    """The ceilings that shares are of, and two that they are not.

    Returns:
        `matmul_tflops` of a bf16 product of 8192^3, sustained; `matmul_cold_tflops`, of the same over the first
        `WINDOW_SECONDS`; `read_tbps` of torch's sum of 4 GB in fp32; `read_stream_tbps` of the fastest known reader.
    """
    device = torch.device("cuda")
    x, weight = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    words = torch.randn(1 << 30, device=device)
    runs = {"matmul": [functools.partial(F.linear, x, weight)], "read": [words.sum]}
    cold_us, read_us = (
        time_runs({name: run}, device, rounds=1000, seconds=WINDOW_SECONDS)[name].median_us
        for name, run in runs.items()
    )
    found = roofline.measure_ceilings(torch.bfloat16, device)
    return {
        "matmul_tflops": found.matmul_tflops,
        "matmul_cold_tflops": 2 * 8192**3 / cold_us / 1e6,
        "read_tbps": words.nbytes / read_us / 1e6,
        "read_stream_tbps": found.read_gbps / 1e3,
    }


def make_weights(problem: MoEProblem) -> ExpertWeights:
    """Random weights made expert by expert on the GPU; outputs of order one."""
    return random_weights(problem, torch.Generator().manual_seed(0), torch.device("cuda"))


@functools.cache
def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def make_call(problem: MoEProblem, num_tokens: int, routing: str = "uniform") -> Call:
    """Random tokens, weights and routes: `uniform`, `zipf` (popularity 1 / rank) or `one_set` (all to one set)."""
    return random_call(problem, num_tokens, routing, _generator())


def roofline_us(problem: MoEProblem, calls: Sequence[Call], ceilings: dict[str, float]) -> float:
    """Mean over the calls of the larger of the time to move the bytes and the time to multiply."""
    known = roofline.Ceilings(ceilings["matmul_tflops"], ceilings["read_tbps"] * 1e3, read_by="")
    return roofline.roofline_us([roofline.work_of(problem, Call(*call)) for call in calls], known)


def time_us(kernel: MoEKernel, calls: Sequence[Call]) -> float:
    """Median over replays of one graph for each call, rotated."""
    return time_kernels({"": kernel}, [Call(*call) for call in calls], seconds=WINDOW_SECONDS)[""].median_us


def check(kernel: MoEKernel, problem: MoEProblem, weights: ExpertWeights, call: Call) -> float:
    """Relative error of a poisoned output against fp32."""
    return output_error(kernel, Call(*call), reference_experts(problem, weights, *call))


def main() -> int:
    """Measures the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"benches.h200.table needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    ceilings = measure_ceilings()
    print(
        f"{platform.device_name}: matmul {ceilings['matmul_tflops']:.0f} TFLOP/s ({ceilings['matmul_cold_tflops']:.0f} "
        f"cold), read {ceilings['read_tbps']:.2f} TB/s (fastest reader {ceilings['read_stream_tbps']:.2f})"
    )
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        problem = MoEProblem(**{**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False})
        weights = make_weights(problem)
        kernel = make_kernel(problem, weights, select_backend(problem, require=arguments.backend))
        for num_tokens in arguments.tokens:
            calls = [make_call(problem, num_tokens, arguments.routing) for _ in range(num_calls(num_tokens))]
            error = check(kernel, problem, weights, calls[0])
            wrong = not error <= tolerance(problem.quant, problem.dtype)
            row = {"model": model, "tokens": num_tokens, "relative_error": error, "wrong": wrong}
            if not wrong:
                ours, roof = time_us(kernel, calls), roofline_us(problem, calls, ceilings)
                row |= {"ours_us": ours, "roof_us": roof, "share": roof / ours}
                print(
                    f"{model:14} T {num_tokens:5}  ours {ours:8.1f}  roof {roof:8.1f}  share {roof / ours:5.1%}  "
                    f"error {error:.1e}",
                    flush=True,
                )
            else:
                print(f"{model:14} T {num_tokens:5}  WRONG: error {error:.2e}", flush=True)
            rows.append(row)
        del weights, kernel
        torch.cuda.empty_cache()
    right = [row for row in rows if not row["wrong"]]
    summary: dict[str, float] = {}
    for name, low, high in (("1-4", 1, 4), ("16-256", 16, 256), ("1024", 1024, 1024), ("4096-16384", 4096, 16384)):
        summary[f"share T {name}"] = geomean([row["share"] for row in right if low <= row["tokens"] <= high])
    print("  ".join(f"{name} {value:.3f}" for name, value in summary.items()))
    if arguments.json:
        record = {
            "schema": 1,
            **provenance(platform, ("torch", "triton")),
            **clocks(platform),
            "routing": arguments.routing,
            "ceilings": ceilings,
            "summary": summary,
            "rows": rows,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(record, indent=1))
    return 1 if len(right) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
