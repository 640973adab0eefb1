"""Our kernels beside the best peers on an H200, row by row, measured the way the peers were.

    python -m benches.h200_table --json FILE [--models M ...] [--tokens T ...] [--backend triton]

A row is checked against the fp32 reference first and gets no number where it is wrong. Then CUDA graphs of one call
each are replayed over rotated inputs and routings; the median is reported. The roofline is the larger of (bytes of the
experts that were active + activations) / read bandwidth and flops / matmul rate, with both ceilings measured in this
process. Exits with 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import torch

from moereg.dispatch import select_backend
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.problem import MoEProblem
from moereg.reference import reference_experts, relative_error
from moereg.shapes import get_shape
from moereg.testing.provenance import provenance
from moereg.testing.tolerances import tolerance
from moereg.weights import ExpertWeights

PEERS = pathlib.Path(__file__).parent / "results" / "h200_peers_bf16.json"
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def measure_ceilings() -> dict[str, float]:
    """bf16 matmul rate [TFLOP/s] and read bandwidth [TB/s] of this GPU."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = _median_us(lambda: torch.mm(a, b), 20) * 1e-6
    big = torch.randn(2**31 // 4, device="cuda")
    read = _median_us(lambda: big.sum(), 20) * 1e-6
    return {"matmul_tflops": 2 * size**3 / seconds / 1e12, "read_tbps": big.numel() * 4 / read / 1e12}


def _median_us(run: Any, repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def make_weights(problem: MoEProblem) -> ExpertWeights:
    """Random weights made expert by expert on the GPU; outputs of order one."""
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size

    def random(*shape: int, std: float) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=problem.torch_dtype, device="cuda")
        for expert in tensor:
            expert.normal_(std=std)
        return tensor

    w13 = random(experts, problem.activation.num_halves * inter, hidden, std=2 * hidden**-0.5)
    return ExpertWeights(w13=w13, w2=random(experts, hidden, inter, std=inter**-0.5))


def make_call(problem: MoEProblem, num_tokens: int, routing: str = "uniform") -> Call:
    """Random tokens, weights and routes: `uniform`, `zipf` (popularity 1 / rank) or `one_set` (all to one set)."""
    noise = -torch.log(-torch.log(torch.rand(num_tokens, problem.num_experts, device="cuda")))
    if routing == "zipf":
        rank = torch.randperm(problem.num_experts, device="cuda") + 1
        noise = noise - torch.log(rank.float())
    elif routing == "one_set":
        noise = torch.rand(1, problem.num_experts, device="cuda").expand_as(noise)
    ids = noise.topk(problem.top_k, dim=1).indices.int()
    weights = torch.rand(num_tokens, problem.top_k, device="cuda")
    tokens = torch.randn(num_tokens, problem.hidden_size, device="cuda").to(problem.torch_dtype)
    return tokens, weights / weights.sum(1, keepdim=True), ids


def roofline_us(problem: MoEProblem, calls: list[Call], ceilings: dict[str, float]) -> float:
    """Mean over the calls of the larger of the time to move the bytes and the time to multiply."""
    size = problem.torch_dtype.itemsize
    per_expert = (problem.activation.num_halves + 1) * problem.hidden_size * problem.intermediate_size
    times = []
    for tokens, _, ids in calls:
        active = ids.unique().numel()
        moved = (active * per_expert + 2 * tokens.numel()) * size
        flops = 2 * ids.numel() * per_expert
        times.append(max(moved / ceilings["read_tbps"], flops / ceilings["matmul_tflops"]) / 1e6)
    return statistics.mean(times)


def time_us(kernel: MoEKernel, calls: list[Call]) -> float:
    """Median over replays of one graph for each call, rotated."""
    graphs = []
    outs = [torch.empty_like(tokens) for tokens, _, _ in calls]
    for call, out in zip(calls, outs, strict=True):
        kernel(*call, out=out)
    torch.cuda.synchronize()
    for call, out in zip(calls, outs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(*call, out=out)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    times = []
    rounds = max(4, 48 // len(graphs))
    for _ in range(rounds):
        for graph in graphs:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in times)


def num_calls(num_tokens: int) -> int:
    """Inputs to rotate over: more where calls are short."""
    return 16 if num_tokens <= 64 else 8 if num_tokens <= 1024 else 2


def check(kernel: MoEKernel, problem: MoEProblem, weights: ExpertWeights, call: Call) -> float:
    """Relative error of a poisoned output against fp32."""
    out = torch.full_like(call[0], float("nan"))
    kernel(*call, out=out)
    return relative_error(out, reference_experts(problem, weights, *call))


def geomean(values: list[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(statistics.mean(map(math.log, values))) if values else math.nan


def main() -> int:
    """Measures the rows of the peers' table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf", "one_set"))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"h200_table needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    torch.manual_seed(0)
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
