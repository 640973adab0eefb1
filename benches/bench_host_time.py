"""Host time of an eager call, without a CUDA graph: how long a call occupies its thread.

    python -m benches.bench_host_time [--models M ...] [--tokens T ...] [--backend triton] [--bound-us 60] [--json FILE]

A batch of 20 calls over rotated inputs is timed on the host with `perf_counter_ns`, from the first call to the return
of the last. Before a batch the device is waited for, so it starts with an empty queue, and 20 calls are at most some
140 launches, which a queue of 1,024 takes without blocking; nothing inside waits for the device. The device is waited
for again after the last return, which gives the end-to-end time. Each number is the median over batches, a call:
host_us as called by default, inference_host_us under torch.inference_mode, eager_us end to end as called by default.

The calls allocate their output, as a model's do, and are checked against the fp32 reference first. On a GPU the exit
code is 1 if a number is wrong or a host time exceeds the bound; a CPU runs the layer inside the call, so it has no
bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from moereg.bench.compare import output_error
from moereg.bench.inputs import random_call, random_weights
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform, probe_platform
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

MODELS: Final = ("qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b")
NUM_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
BOUND_US: Final = 60.0
CALLS_PER_BATCH: Final = 20
NUM_INPUTS: Final = 4
# For a first look on a machine without a GPU.
TINY: Final = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)


def make_problem(model: str) -> MoEProblem:
    """bf16, SwiGLU, no bias, like the rows of `benches.h200.table`; `tiny` is a layer for a CPU."""
    if model == "tiny":
        return TINY
    return MoEProblem(**{**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False})


def make_layer(problem: MoEProblem, backend: str, device: str) -> tuple[MoEKernel, ExpertWeights]:
    """A layer of random weights, and its canonical weights."""
    weights = random_weights(problem, torch.Generator().manual_seed(0), torch.device(device))
    return make_kernel(problem, weights, select_backend(problem, require=backend)), weights


def time_batches(
    call: Callable[[int], object],
    synchronize: Callable[[], None],
    *,
    seconds: float,
    calls_per_batch: int,
    min_batches: int = 5,
    max_batches: int = 100,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> tuple[float, float]:
    """Times batches of calls.

    Args:
        call: One call; takes its number.
        synchronize: Waits for the device.
        seconds: No further batch starts after this long, once there are `min_batches`.
        calls_per_batch: Calls between two waits.
        min_batches: Fewest batches.
        max_batches: Most batches.
        clock_ns: Nanoseconds.

    Returns:
        Medians over batches, in us a call: until the last call returns, and until the device has finished.
    """
    host, end_to_end = [], []
    start = clock_ns()
    while len(host) < min_batches or (len(host) < max_batches and clock_ns() - start < seconds * 1e9):
        synchronize()
        before = clock_ns()
        for number in range(calls_per_batch):
            call(number)
        returned = clock_ns()
        synchronize()
        finished = clock_ns()
        host.append((returned - before) / 1e3 / calls_per_batch)
        end_to_end.append((finished - before) / 1e3 / calls_per_batch)
    return statistics.median(host), statistics.median(end_to_end)


def measure(kernel: MoEKernel, weights: ExpertWeights, num_tokens: int, device: str, seconds: float) -> dict[str, Any]:
    """One row; without times if the numbers are wrong."""
    problem = kernel.problem
    generator = torch.Generator(device).manual_seed(num_tokens)
    calls = [random_call(problem, num_tokens, "uniform", generator) for _ in range(NUM_INPUTS)]
    # Twice, because the first call with that many tokens is another path than those that repeat it.
    for call in calls:
        kernel(*call)
    error = output_error(kernel, calls[0], reference_experts(problem, weights, *calls[0]))
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "relative_error": error if math.isfinite(error) else None,
        "wrong": not error <= tolerance(problem.quant.name, problem.dtype, num_tokens * problem.hidden_size),
    }
    if row["wrong"]:
        return row

    def run(number: int) -> None:
        kernel(*calls[number % NUM_INPUTS])

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for mode, names in (
        (contextlib.nullcontext(), ("host_us", "eager_us")),
        (torch.inference_mode(), ("inference_host_us", "inference_eager_us")),
    ):
        with mode:
            time_batches(run, synchronize, seconds=0, calls_per_batch=CALLS_PER_BATCH, min_batches=2)
            times = time_batches(run, synchronize, seconds=seconds, calls_per_batch=CALLS_PER_BATCH)
            row |= zip(names, times, strict=True)
    return row


def worst_us(rows: Sequence[dict[str, Any]]) -> float:
    """The longest host time of all rows that are right, in either mode; NaN of none."""
    times = [row[name] for row in rows if not row["wrong"] for name in ("host_us", "inference_host_us")]
    return max(times, default=math.nan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a line a row and the verdict last."""
    platform: Platform = probe_platform()
    on_gpu = platform.kind in ("cuda", "rocm")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS if on_gpu else ("tiny",))
    parser.add_argument("--tokens", nargs="*", type=int, default=NUM_TOKENS)
    parser.add_argument("--backend", default="triton" if on_gpu else "torch")
    parser.add_argument("--bound-us", type=float, default=BOUND_US if on_gpu else math.inf)
    parser.add_argument("--seconds", type=float, default=0.25, help="of one median")
    parser.add_argument("--budget-s", type=float, default=90.0, help="rows that would start later are left out")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    device = "cuda" if on_gpu else "cpu"
    problems = {model: make_problem(model) for model in options.models}
    if on_gpu and options.backend == "triton":
        from benches.h200.precompile import precompile

        precompile([(problem, tokens) for problem in problems.values() for tokens in options.tokens])
        torch.cuda.empty_cache()
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for model, problem in problems.items():
        layer = None
        for num_tokens in options.tokens:
            if time.monotonic() - start > options.budget_s:
                left_out.append({"model": model, "tokens": num_tokens, "left_out": "out of time"})
                continue
            layer = layer or make_layer(problem, options.backend, device)
            row = {"model": model, **measure(*layer, num_tokens, device, options.seconds)}
            rows.append(row)
            label = f"{model:14} T {num_tokens:5}"
            if row["wrong"]:
                print(f"{label}  WRONG: error {row['relative_error']}", flush=True)
            else:
                print(
                    f"{label}  host {row['host_us']:8.1f} us, inference mode {row['inference_host_us']:8.1f} us, "
                    f"end to end {row['eager_us']:9.1f} us, error {row['relative_error']:.1e}",
                    flush=True,
                )
    worst = worst_us(rows)
    if options.json:
        record = {
            "schema": 1,
            **provenance(platform, ("torch", "triton")),
            **clocks(platform),
            "backend": options.backend,
            "calls_per_batch": CALLS_PER_BATCH,
            "bound_us": options.bound_us if math.isfinite(options.bound_us) else None,
            "worst_us": worst if math.isfinite(worst) else None,
            "left_out": left_out,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1))
    wrong = sum(row["wrong"] for row in rows)
    for row in left_out:
        print(f"left out: {row['model']} T {row['tokens']}: {row['left_out']}")
    print(
        f"{len(rows)} rows, {wrong} wrong, longest host time {worst:.1f} us, bound {options.bound_us:.0f} us, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if wrong or worst > options.bound_us else 0


if __name__ == "__main__":
    sys.exit(main())
