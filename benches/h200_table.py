"""Our kernels beside the best peers on an H200, row by row, measured the way the peers were.

    python -m benches.h200_table --json FILE [--models M ...] [--tokens T ...] [--backend triton]

A row is checked against the fp32 reference first and gets no number where it is wrong. Then CUDA graphs of one call
each are replayed over rotated inputs and routings; the median is reported. The roofline is the larger of (bytes of the
experts that were active + activations) / read bandwidth and flops / matmul rate, with both ceilings measured in this
process. Exits with 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from moereg.dispatch import select_backend
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.problem import MoEProblem
from moereg.reference import reference_experts
from moereg.shapes import get_shape
from moereg.testing.provenance import provenance
from moereg.testing.tolerances import tolerance
from moereg.tuning import roofline
from moereg.tuning.compare import output_error
from moereg.tuning.inputs import ROUTINGS, Call, num_calls, random_call, random_weights
from moereg.tuning.timing import time_kernels
from moereg.weights import ExpertWeights

PEERS = pathlib.Path(__file__).parent / "results" / "h200_peers_bf16.json"


def measure_ceilings() -> dict[str, float]:
    """bf16 matmul rate [TFLOP/s] and read bandwidth [TB/s] of this GPU."""
    found = roofline.measure_ceilings(torch.bfloat16, torch.device("cuda"))
    return {"matmul_tflops": found.matmul_tflops, "read_tbps": found.read_gbps / 1e3}


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
    return time_kernels({"": kernel}, [Call(*call) for call in calls])[""].median_us


def check(kernel: MoEKernel, problem: MoEProblem, weights: ExpertWeights, call: Call) -> float:
    """Relative error of a poisoned output against fp32."""
    return output_error(kernel, Call(*call), reference_experts(problem, weights, *call))


def geomean(values: list[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(statistics.mean(map(math.log, values))) if values else math.nan


def main() -> int:
    """Measures the rows of the peers' table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"h200_table needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    ceilings = measure_ceilings()
    print(
        f"{platform.device_name}: matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, read {ceilings['read_tbps']:.2f} TB/s"
    )
    peers = json.loads(PEERS.read_text())["rows"]
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in peers):
        if arguments.models and model not in arguments.models:
            continue
        problem = MoEProblem(**{**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False})
        weights = make_weights(problem)
        kernel = make_kernel(problem, weights, select_backend(problem, require=arguments.backend))
        for peer in peers:
            num_tokens = peer["tokens"]
            if peer["model"] != model or (arguments.tokens and num_tokens not in arguments.tokens):
                continue
            calls = [make_call(problem, num_tokens, arguments.routing) for _ in range(num_calls(num_tokens))]
            error = check(kernel, problem, weights, calls[0])
            wrong = not error <= tolerance(problem.quant.name, problem.dtype)
            best = min(peer["peers_us"].values())
            row = {"model": model, "tokens": num_tokens, "relative_error": error, "best_peer_us": best, "wrong": wrong}
            if not wrong:
                ours, roof = time_us(kernel, calls), roofline_us(problem, calls, ceilings)
                row |= {"ours_us": ours, "roof_us": roof, "best_peer_over_ours": best / ours, "share": roof / ours}
                print(
                    f"{model:14} T {num_tokens:5}  ours {ours:8.1f}  peer {best:8.1f}  ratio {best / ours:5.3f}  "
                    f"roof {roof:8.1f}  share {roof / ours:5.1%}  error {error:.1e}",
                    flush=True,
                )
            else:
                print(f"{model:14} T {num_tokens:5}  WRONG: error {error:.2e}", flush=True)
            rows.append(row)
        del weights, kernel
        torch.cuda.empty_cache()
    right = [row for row in rows if not row["wrong"]]
    summary = {"geomean_best_peer_over_ours": geomean([row["best_peer_over_ours"] for row in right])}
    for name, low, high in (("1-4", 1, 4), ("16-256", 16, 256), ("1024", 1024, 1024), ("4096-16384", 4096, 16384)):
        summary[f"share T {name}"] = geomean([row["share"] for row in right if low <= row["tokens"] <= high])
    print("  ".join(f"{name} {value:.3f}" for name, value in summary.items()))
    if arguments.json:
        record = {
            "schema": 1,
            **provenance(platform, ("torch", "triton")),
            "routing": arguments.routing,
            "ceilings": ceilings,
            "summary": summary,
            "rows": rows,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(record, indent=1))
    return 1 if len(right) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
