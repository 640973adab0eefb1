"""The `triton` backend with 8-bit weights and activations on an H200, beside the best peers where they were measured.

    python -m benches.h200_fp8 [--models M ...] [--schemes S ...] [--tokens T ...] [--configs] [--budget-s 110]
                               [--json FILE]

A row is checked first: the first tokens of a call against the reference on them alone, which is the same since scales
here span no tokens. It gets no number where it is wrong. Then CUDA graphs of one call each are replayed over rotated
inputs and routings; the median is reported, and the peers' best over it where they ran the scheme (fp8_block128). The
roofline takes the matmul rate of the scheme's element type, measured here like the read bandwidth.

`--configs` times other launch configurations of each row's class too, through the real layer with the selection
replaced, and says which was best. Rows that would start after the budget are left out and listed. Exits with 1 where a
number is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from benches.h200_table import WINDOW_SECONDS, geomean, make_call, make_weights, roofline_us
from benches.precompile import EmptyLayer, compiling_only
from benches.sweep_configs import rotated
from moereg.dispatch import select_backend
from moereg.kernels import triton_quantized_config
from moereg.kernels.triton_gemm_config import GemmPair, GroupedGemmConfig, max_shared_bytes
from moereg.kernels.triton_quantized_config import select_quantized_config
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.problem import MoEProblem
from moereg.reference import reference_experts, relative_error
from moereg.shapes import get_shape
from moereg.testing.provenance import provenance
from moereg.testing.tolerances import tolerance
from moereg.tuning.inputs import Call, num_calls
from moereg.tuning.timing import Run, kernel_runs, time_runs
from moereg.weights import ExpertWeights
from moereg.workspace import WORKSPACES

MODELS: Final = ("qwen3-30b-a3b", "deepseek-v3")
SCHEMES: Final = ("fp8_block128", "fp8_channel_token", "int8_w8a8")
NUM_TOKENS: Final = (1, 16, 64, 256, 1024, 4096, 16384)
PEER_SCHEME: Final = "fp8_block128"
PEERS: Final = pathlib.Path(__file__).parent / "results" / "h200_peers_fp8.json"

# Tokens whose outputs are compared with the reference.
SAMPLE: Final = 128
# Inputs over which candidates of a sweep are rotated, and seconds of each.
SWEEP_INPUTS: Final = 2
SWEEP_SECONDS: Final = 0.05


def make_problem(model: str, scheme: str) -> MoEProblem:
    """SwiGLU without bias, like the peers' table."""
    keywords = {**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False, "quant": scheme}
    return MoEProblem(**keywords)


def measure_ceilings() -> dict[str, float]:
    """TFLOP/s of an 8192^3 product by element type over `WINDOW_SECONDS`, and TB/s of torch's sum of 4 GB."""
    device, size = torch.device("cuda"), 8192
    one = torch.ones((), device=device)
    x8, w8 = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    xi, wi = (torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
    fp8 = functools.partial(torch._scaled_mm, x8, w8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    int8 = functools.partial(torch._int_mm, xi, wi.T)
    words = torch.randn(1 << 30, device=device)

    def median_us(run: Run) -> float:
        return time_runs({"": [run]}, device, rounds=1000, seconds=WINDOW_SECONDS)[""].median_us

    return {
        "float8_e4m3fn_tflops": 2 * size**3 / median_us(fp8) / 1e6,
        "int8_tflops": 2 * size**3 / median_us(int8) / 1e6,
        "read_tbps": words.nbytes / median_us(words.sum) / 1e6,
    }


def ceilings_of(problem: MoEProblem, found: dict[str, float]) -> dict[str, float]:
    """The ceilings that a problem's scheme is judged by."""
    assert problem.quant.activation is not None
    return {"matmul_tflops": found[f"{problem.quant.activation.dtype}_tflops"], "read_tbps": found["read_tbps"]}


def peers_us(model: str, scheme: str, num_tokens: int) -> dict[str, float]:
    """Times of the peers, empty where they did not run the scheme."""
    if scheme != PEER_SCHEME:
        return {}
    rows = json.loads(PEERS.read_text())["rows"]
    return next((row["peers_us"] for row in rows if (row["model"], row["tokens"]) == (model, num_tokens)), {})


def sample_error(kernel: MoEKernel, problem: MoEProblem, weights: ExpertWeights, call: Call) -> float:
    """Relative error of the first tokens of a poisoned output."""
    out = torch.full_like(call.hidden_states, math.nan)
    kernel(*call, out=out)
    sample = Call(*(tensor[:SAMPLE] for tensor in call))
    return relative_error(out[:SAMPLE], reference_experts(problem, weights, *sample))


def candidates_of(num_tokens: int, rows_per_expert: float) -> list[GemmPair]:
    """A handful of configurations of a row's class."""

    def gemm(block_m: int, block_n: int, num_warps: int, num_stages: int, group_m: int = 1) -> GroupedGemmConfig:
        return GroupedGemmConfig(block_m, block_n, 128, group_m, num_warps, num_stages, mask_rows=block_m < 128)

    of_16 = (
        (gemm(16, 32, 4, 5), gemm(16, 64, 4, 4), gemm(16, 128, 4, 3)),
        (gemm(16, 32, 4, 5), gemm(16, 64, 4, 4), gemm(16, 128, 4, 4)),
    )
    of_32 = ((gemm(32, 64, 4, 4), gemm(32, 128, 8, 3)), (gemm(32, 64, 4, 4), gemm(32, 128, 4, 4)))
    of_64 = (
        (gemm(64, 64, 4, 4), gemm(64, 128, 4, 3), gemm(64, 128, 8, 3)),
        (gemm(64, 128, 4, 4), gemm(64, 128, 8, 4)),
    )
    of_128 = (
        (gemm(128, 64, 8, 4), gemm(128, 128, 8, 4), gemm(128, 128, 8, 3, 8), gemm(128, 128, 8, 4, 8)),
        (gemm(128, 128, 8, 4), gemm(128, 128, 8, 3, 8), gemm(128, 128, 8, 4, 8)),
    )
    if num_tokens <= 16 or rows_per_expert <= 4:
        groups: list[tuple[tuple[GroupedGemmConfig, ...], tuple[GroupedGemmConfig, ...]]] = [of_16]
    elif rows_per_expert <= 11:
        groups = [of_16, of_32]
    elif rows_per_expert <= 22:
        groups = [of_32, of_64]
    elif rows_per_expert <= 48:
        groups = [of_32, of_64, of_128]
    else:
        groups = [of_64, of_128]
    return [GemmPair(*pair, num_tokens > 16) for first, second in groups for pair in itertools.product(first, second)]


def describe(configs: GemmPair) -> str:
    """A short name: tiles, warps and stages of the first product, then of the second."""
    return " | ".join(
        f"{c.block_m}x{c.block_n}x{c.block_k} {c.num_warps}w{c.num_stages}s{f' group {c.group_m}' * (c.group_m > 1)}"
        for c in (configs.gate_up, configs.down)
    )


@contextlib.contextmanager
def selecting(configs: GemmPair) -> Iterator[None]:
    """Layers inside run with these, whatever the rules say."""
    real = triton_quantized_config.select_quantized_config
    triton_quantized_config.select_quantized_config = lambda *arguments: configs
    try:
        yield
    finally:
        triton_quantized_config.select_quantized_config = real


def row_candidates(problem: MoEProblem, num_tokens: int) -> list[GemmPair]:
    """The shipped configurations first, then the others of the class."""
    rows = num_tokens * problem.top_k / problem.num_experts
    shared_bytes = max_shared_bytes(torch.device("cuda", torch.cuda.current_device()))
    own = select_quantized_config(num_tokens, rows, problem.activation.num_halves, shared_bytes)
    return list({describe(pair): pair for pair in (own, *candidates_of(num_tokens, rows))}.values())


def time_candidates(kernel: MoEKernel, problem: MoEProblem, calls: Sequence[Call]) -> dict[str, float]:
    """Median time of each candidate in us; NaN of one that gives other numbers, absent where it does not fit."""
    from triton.runtime.errors import OutOfResources

    calls = calls[:SWEEP_INPUTS]
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    bound = tolerance(problem.quant, problem.dtype)
    first: torch.Tensor | None = None
    runs: dict[str, list[Run]] = {}
    found: dict[str, float] = {}
    for number, configs in enumerate(row_candidates(problem, len(calls[0].hidden_states))):
        # What was recorded belongs to the candidate before.
        kernel.experts._recordings.clear()  # type: ignore[attr-defined]
        outs[0].fill_(math.nan)
        with selecting(configs):
            try:
                kernel(*calls[0], out=outs[0])
            except OutOfResources:
                continue
            first = outs[0].clone() if first is None else first
            if not relative_error(outs[0], first) <= 2 * bound:
                found[describe(configs)] = math.nan
                continue
            runs[describe(configs)] = rotated(kernel_runs(kernel, calls, outs), number)
    kernel.experts._recordings.clear()  # type: ignore[attr-defined]
    timings = time_runs(runs, outs[0].device, seconds=SWEEP_SECONDS)
    return found | {name: timing.median_us for name, timing in timings.items()}


def precompile(problem: MoEProblem, tokens: Sequence[int], with_configs: bool) -> None:
    """Compiles everything that the rows of a layer launch, on all cores."""
    with compiling_only():
        layer = EmptyLayer(problem)
        for num_tokens in tokens:
            layer.launch(num_tokens)
            for configs in row_candidates(problem, num_tokens) if with_configs else ():
                with selecting(configs):
                    layer.launch(num_tokens)


def measure(
    model: str, scheme: str, arguments: argparse.Namespace, ceilings: dict[str, float], deadline: float
) -> Iterator[dict[str, Any]]:
    """Rows of one layer; one that would start after the deadline (of `time.monotonic`) has only `left_out`."""
    problem = make_problem(model, scheme)
    kernel: MoEKernel | None = None
    for num_tokens in arguments.tokens:
        row: dict[str, Any] = {"model": model, "scheme": scheme, "tokens": num_tokens}
        if time.monotonic() > deadline:
            yield row | {"left_out": "out of time"}
            continue
        if kernel is None:
            precompile(problem, arguments.tokens, arguments.configs)
            torch.cuda.empty_cache()
            weights = make_weights(problem)
            kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
        calls = [make_call(problem, num_tokens) for _ in range(num_calls(num_tokens))]
        error = sample_error(kernel, problem, weights, calls[0])
        elements = min(num_tokens, SAMPLE) * problem.hidden_size
        row |= {"relative_error": error if math.isfinite(error) else None}
        row["wrong"] = not error <= tolerance(problem.quant, problem.dtype, elements)
        if not row["wrong"]:
            outs = [torch.empty_like(call.hidden_states) for call in calls]
            runs = {"": kernel_runs(kernel, calls, outs)}
            ours = time_runs(runs, outs[0].device, seconds=WINDOW_SECONDS)[""].median_us
            del runs
            roof = roofline_us(problem, calls, ceilings_of(problem, ceilings))
            row |= {"ours_us": ours, "roof_us": roof, "share": roof / ours}
            peers = peers_us(model, scheme, num_tokens)
            if peers:
                best = min(peers, key=peers.__getitem__)
                row |= {"best_peer": best, "best_peer_us": peers[best], "best_peer_over_ours": peers[best] / ours}
            if arguments.configs:
                row["configs_us"] = time_candidates(kernel, problem, calls)
        yield row


def show(row: dict[str, Any]) -> str:
    """One line, and one more for each of the best configurations."""
    label = f"{row['model']:14} {row['scheme']:17} T {row['tokens']:5}"
    if "left_out" in row:
        return f"{label}  left out: {row['left_out']}"
    if row["wrong"]:
        return f"{label}  WRONG: error {row['relative_error']}"
    text = f"{label}  ours {row['ours_us']:8.1f}  roof {row['roof_us']:8.1f}  share {row['share']:6.1%}"
    if "best_peer_us" in row:
        text += f"  {row['best_peer']} {row['best_peer_us']:8.1f}  ratio {row['best_peer_over_ours']:5.3f}"
    lines = [f"{text}  error {row['relative_error']:.1e}"]
    times = row.get("configs_us", {})
    for name in sorted(times, key=lambda name: (math.isnan(times[name]), times[name]))[:4]:
        lines.append(f"{'':20} {times[name]:8.1f}  {name}")
    lines += [f"{'':20}    WRONG  {name}" for name, value in times.items() if math.isnan(value)]
    return "\n".join(lines)


def main() -> int:
    """Measures, and writes the file after each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--tokens", nargs="*", type=int, default=NUM_TOKENS)
    parser.add_argument("--configs", action="store_true", help="also time other launch configurations")
    parser.add_argument("--budget-s", type=float, default=110.0)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"h200_fp8 needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    ceilings = measure_ceilings()
    print("  ".join(f"{name} {value:.2f}" for name, value in ceilings.items()), flush=True)
    record: dict[str, Any] = {"schema": 1, **provenance(platform, ("torch", "triton")), "ceilings": ceilings}
    rows: list[dict[str, Any]] = []
    for scheme, model in itertools.product(arguments.schemes, arguments.models):
        for row in measure(model, scheme, arguments, ceilings, start + arguments.budget_s):
            rows.append(row)
            print(show(row), flush=True)
        WORKSPACES.release()
        torch.cuda.empty_cache()
        if arguments.json:
            record |= {"seconds": time.monotonic() - start, "rows": rows}
            arguments.json.write_text(json.dumps(record, indent=1))
    found = [row["best_peer_over_ours"] for row in rows if "best_peer_over_ours" in row]
    wrong = sum(row.get("wrong", False) for row in rows)
    left_out = sum("left_out" in row for row in rows)
    print(
        f"{len(rows)} rows, {wrong} wrong, {left_out} left out, best peer over ours {geomean(found):.3f} in the mean, "
        f"{min(found, default=math.nan):.3f} at worst, {time.monotonic() - start:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
