"""The `triton` backend on an H200 beyond `benches.h200.table`: other layers, tensor-parallel shards, skewed routing.

    python -m benches.h200.shapes [--only layers | skewed] [--budget-s 120] [--json FILE]

Each row is checked and timed as in `benches.h200.table`, the check on a call that repeats recorded launches. Skewed
rows stand beside uniform ones of the same process; their roofline counts active experts only. Rows that would start
after the budget, or whose layer does not fit in the memory that is free, are left out and listed. Exits with 1 where a
number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any, Final

import torch

from benches.h200.leave_one_out import geomean
from benches.h200.precompile import precompile
from benches.h200.table import (
    check,
    make_call,
    make_weights,
    measure_ceilings,
    num_calls,
    roofline_us,
    time_us,
)
from moereg.bench.inputs import ROUTINGS
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.kernels.sizes import WEIGHT_PAD
from moereg.layer.factory import make_kernel
from moereg.numerics.tolerances import tolerance
from moereg.platforms import probe_platform
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import round_up

NUM_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
SKEWED_TOKENS: Final = (16, 64, 256, 4096)
PEER_MODELS: Final = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-120b", "sonic-120b")


@dataclasses.dataclass(frozen=True)
class ModelLayer:
    """A model's layer, or one tensor-parallel rank's share of it."""

    model: str
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        """As the tables say it."""
        return self.model if self.tensor_parallel == 1 else f"{self.model} TP{self.tensor_parallel}"

    def problem(self) -> MoEProblem:
        """bf16, SwiGLU, no bias, like the rows of `benches.h200.table`."""
        keywords = {**get_shape(self.model).problem_keywords(), "activation": "silu", "has_bias": False}
        keywords["intermediate_size"] //= self.tensor_parallel
        return MoEProblem(**keywords)


LAYERS: Final = (
    ModelLayer("qwen3-next-80b-a3b"),
    ModelLayer("glm-4.5-air"),
    ModelLayer("kimi-k2"),
    ModelLayer("qwen3-30b-a3b", 4),
    ModelLayer("qwen3-30b-a3b", 2),
    ModelLayer("gpt-oss-120b", 8),
)

# The measured cases of a layer: tokens and routing.
Point = tuple[int, str]


def all_rows(only: str | None = None) -> list[tuple[ModelLayer, list[Point]]]:
    """Every row, by layer, in the order of measuring."""
    rows: list[tuple[ModelLayer, list[Point]]] = []
    if only != "skewed":
        rows += [(layer, [(tokens, "uniform") for tokens in NUM_TOKENS]) for layer in LAYERS]
    if only != "layers":
        points = [(tokens, routing) for tokens in SKEWED_TOKENS for routing in ROUTINGS]
        rows += [(ModelLayer(model), points) for model in PEER_MODELS]
    return rows


def needed_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """An upper bound on the GPU memory that measuring a layer takes: weights twice, and what calls of it hold."""
    size = problem.torch_dtype.itemsize
    hidden, inter = problem.hidden_size, round_up(problem.intermediate_size, WEIGHT_PAD)
    weights = problem.num_local_experts * (problem.activation.num_halves + 1) * hidden * inter * size
    # Some hundred guard rows, and the routes' plan, are small beside the rest.
    workspace = (num_tokens * problem.top_k + 1024) * (hidden + inter) * size
    # Workspaces of the graphs and the pool; inputs, outputs and the reference in fp32.
    calls = num_calls(num_tokens)
    return 2 * weights + (calls + 1) * workspace + 16 * num_tokens * hidden * (calls + 4)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The short table: for each layer and routing the geometric mean share by band of tokens."""
    lines = []
    right = [row for row in rows if not row["wrong"]]
    bands = (("T 1-4", 1, 4), ("16-256", 16, 256), ("1024-16384", 1024, 16384))
    for name in dict.fromkeys(row["layer"] for row in right):
        for routing in ROUTINGS:
            own = [row for row in right if (row["layer"], row["routing"]) == (name, routing)]
            shares = {band: [row["share"] for row in own if low <= row["tokens"] <= high] for band, low, high in bands}
            texts = [f"{band} {geomean(found):6.1%}" for band, found in shares.items() if found]
            if texts:
                lines.append(f"{name:20} {routing:8} share of the roofline: {'  '.join(texts)}")
    return lines


def measure(
    layer: ModelLayer, points: list[Point], ceilings: dict[str, float], deadline: float
) -> list[dict[str, Any]]:
    """Rows of one layer; a row that would start after the deadline (of `time.monotonic`) has only `left_out`."""
    problem = layer.problem()
    most = max(num_tokens for num_tokens, _ in points)
    rows: list[dict[str, Any]] = [
        {"layer": layer.name, "tokens": tokens, "routing": routing} for tokens, routing in points
    ]
    free = torch.cuda.mem_get_info()[0]
    if needed_bytes(problem, most) > free:
        reason = f"needs up to {needed_bytes(problem, most) / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        return [row | {"left_out": reason} for row in rows]
    if time.monotonic() > deadline:
        return [row | {"left_out": "out of time"} for row in rows]
    weights = make_weights(problem)
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
    for row in rows:
        num_tokens, routing = row["tokens"], row["routing"]
        if time.monotonic() > deadline:
            row["left_out"] = "out of time"
            continue
        calls = [make_call(problem, num_tokens, routing) for _ in range(num_calls(num_tokens))]
        kernel(*calls[-1])
        error = check(kernel, problem, weights, calls[0])
        row["relative_error"] = error if math.isfinite(error) else None
        row["wrong"] = not error <= tolerance(problem.quant.name, problem.dtype)
        label = f"{layer.name:20} T {num_tokens:5} {routing:8}"
        if row["wrong"]:
            print(f"{label}  WRONG: error {error:.2e}", flush=True)
            continue
        ours, roof = time_us(kernel, calls), roofline_us(problem, calls, ceilings)
        row |= {"ours_us": ours, "roof_us": roof, "share": roof / ours}
        print(f"{label}  ours {ours:8.1f}  roof {roof:8.1f}  share {roof / ours:6.1%}  error {error:.1e}", flush=True)
    return rows


def main() -> int:
    """Measures, writes the file after each layer, and prints a short table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("layers", "skewed"))
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"benches.h200.shapes needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    record: dict[str, Any] = {"schema": 1, **provenance(platform, ("torch", "triton")), "ceilings": measure_ceilings()}
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    layers = all_rows(arguments.only)
    for group in (layers[: len(LAYERS)], layers[len(LAYERS) :]) if arguments.only is None else (layers,):
        precompile(list(dict.fromkeys((layer.problem(), tokens) for layer, points in group for tokens, _ in points)))
        torch.cuda.empty_cache()
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
        for layer, points in group:
            found = measure(layer, points, record["ceilings"], start + arguments.budget_s)
            WORKSPACES.release()
            torch.cuda.empty_cache()
            rows += [row for row in found if "left_out" not in row]
            left_out += [row for row in found if "left_out" in row]
            if arguments.json:
                record |= {**clocks(platform), "seconds": time.monotonic() - start, "left_out": left_out, "rows": rows}
                arguments.json.write_text(json.dumps(record, indent=1))
    print(*summary(rows), sep="\n")
    for row in left_out:
        print(f"left out: {row['layer']} T {row['tokens']} {row['routing']}: {row['left_out']}")
    wrong = sum(row["wrong"] for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong, {len(left_out)} left out, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
