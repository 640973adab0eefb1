"""Numbers at full size on a GPU: every registered backend against the reference, eager against graph replay.

    python -m benches.h200.full_size --models mixtral-8x7b qwen3-30b-a3b gpt-oss-120b --tokens 1 64 4096 --json FILE

Exits with 1 where a number is wrong. Times are CUDA-graph replays over one input: a first impression, not a comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from moereg.bench.inputs import Call, random_call, random_weights
from moereg.bench.timing import time_runs
from moereg.dispatch import explain_backends, select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import probe_platform
from moereg.runtime.gc_pause import collecting_later
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

REPLAYS = 20
ODD_SIZES = ((2880, 704), (2048, 1408), (2688, 1856), (511, 511))


def _weights(problem: MoEProblem) -> ExpertWeights:
    return random_weights(problem, torch.Generator().manual_seed(1), torch.device("cuda"))


def _inputs(problem: MoEProblem, num_tokens: int, seed: int) -> Call:
    return random_call(problem, num_tokens, "uniform", torch.Generator("cuda").manual_seed(seed))


def check(name: str, problem: MoEProblem, weights: ExpertWeights, tokens: list[int]) -> list[dict[str, Any]]:
    """Runs every backend that fits; one row a backend and number of tokens."""
    rows = []
    bound = tolerance(problem.quant, problem.dtype)
    names = [decision.backend for decision in explain_backends(problem).decisions if decision.accepted]
    for backend in dict.fromkeys(names):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernel = make_kernel(problem, weights, select_backend(problem, require=backend))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        for num_tokens in tokens:
            arguments = _inputs(problem, num_tokens, seed=num_tokens)
            truth = reference_experts(problem, weights, *arguments)
            out = torch.full_like(arguments[0], float("nan"))
            eager = kernel(*arguments, out=out).clone()
            row: dict[str, Any] = {
                "model": name,
                "backend": backend,
                "dtype": problem.dtype,
                "tokens": num_tokens,
                "relative_error": relative_error(eager, truth),
                "bound": bound,
                "permute_peak_over_weights": peak / max(kernel.weights.num_bytes, 1),
            }
            graph = torch.cuda.CUDAGraph()
            with collecting_later(), torch.cuda.graph(graph):
                kernel(*arguments, out=out)
            fresh = _inputs(problem, num_tokens, seed=num_tokens + 1)
            for static, new in zip(arguments, fresh, strict=True):
                static.copy_(new)
            out.fill_(float("nan"))
            graph.replay()
            row["replay_equals_eager"] = torch.equal(out, kernel(*fresh))
            row["replay_us"] = time_runs({"": [graph.replay]}, out.device, REPLAYS)[""].median_us
            row["passed"] = row["relative_error"] <= bound and row["replay_equals_eager"]
            rows.append(row)
            print(
                f"{name:16} {backend:8} {problem.dtype:9} T {num_tokens:5}  error {row['relative_error']:.2e} "
                f"(bound {bound:.0e})  replay {'equal' if row['replay_equals_eager'] else 'DIFFERS'}  "
                f"{row['replay_us']:9.1f} us  permute peak {row['permute_peak_over_weights']:.2f}x",
                flush=True,
            )
        del kernel
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    """Checks the models and odd sizes named on the command line; writes the rows with where they were measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 64, 4096])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    platform = probe_platform()
    if platform.kind not in ("cuda", "rocm"):
        print(f"benches.h200.full_size needs a GPU, got {platform}", file=sys.stderr)
        return 3
    problems = [(name, MoEProblem(**get_shape(name).problem_keywords())) for name in arguments.models]
    for hidden, inter in ODD_SIZES:
        problems.append(
            (f"odd-{hidden}x{inter}", MoEProblem(num_experts=64, hidden_size=hidden, intermediate_size=inter, top_k=6))
        )
    problems.append(("e512", MoEProblem(num_experts=512, hidden_size=2048, intermediate_size=512, top_k=10)))
    for dtype in ("float16", "float32"):
        problems.append((f"olmoe-{dtype}", MoEProblem(**get_shape("olmoe-1b-7b").problem_keywords(), dtype=dtype)))
    rows = []
    for name, problem in problems:
        rows += check(name, problem, _weights(problem), arguments.tokens)
        torch.cuda.empty_cache()
    if arguments.json:
        record = {
            "schema": 1,
            **provenance(platform, ("torch", "triton")),
            **clocks(platform),
            "rows": rows,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    failed = [row for row in rows if not row["passed"]]
    print(f"{len(rows)} rows, {len(failed)} wrong, worst error {max(row['relative_error'] for row in rows):.2e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
