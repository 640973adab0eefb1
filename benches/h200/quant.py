"""The `triton` backend in every quantized scheme that it has kernels for, on an H200.

    python -m benches.h200.quant [--schemes S ...] [--models M ...] [--tokens T ...] [--configs] [--budget-s 200]
                                 [--json FILE]

A row is checked first: the first tokens of a call against the reference on them alone, which is the same since scales
here span no tokens. A wrong row gets no number. Then CUDA graphs of one call each are replayed over rotated inputs and
routings; the median is reported. The roofline takes the sustained matmul rate of the elements that the scheme
multiplies (16 bits for weight-only schemes) and the read bandwidth, both measured here.

For weight-only schemes, up to 64 tokens, the unquantized layer of the same sizes runs the same calls in turns. The
share of the byte ratio is how many times faster the scheme is, over how many times fewer bytes it moves.

`--configs` times other launch configurations of 8-bit layers too. Rows that would start after the budget are left out
and listed. Exits with 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from benches.h200.leave_one_out import geomean
from benches.h200.precompile import EmptyLayer, compiling_only
from benches.h200.quant_configs import row_candidates, selecting, time_configs
from benches.h200.table import WINDOW_SECONDS, make_call, make_weights
from moereg.bench import roofline
from moereg.bench.inputs import Call, num_calls
from moereg.bench.timing import Run, time_kernels, time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import probe_platform
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.weights.permuted import ExpertWeights

EIGHT_BIT: Final = ("fp8_block128", "fp8_channel_token", "int8_w8a8")
# Models and numbers of tokens by scheme. Schemes of one model stand together, so that its unquantized layer is made
# once.
ROWS: Final = {
    **dict.fromkeys(EIGHT_BIT, (("qwen3-30b-a3b", "deepseek-v3"), (1, 16, 64, 256, 1024, 4096, 16384))),
    "int4_w4a16_g128": (("mixtral-8x7b", "qwen3-30b-a3b"), (1, 16, 64, 256, 4096)),
    "int8_w8a16": (("qwen3-30b-a3b",), (1, 16, 64, 256, 4096)),
    "mxfp4_w4a16": (("qwen3-30b-a3b", "gpt-oss-120b"), (1, 16, 64, 256, 4096)),
    "nvfp4_w4a16": (("gpt-oss-120b", "qwen3-30b-a3b"), (1, 16, 64, 256, 4096)),
}
# The scheme that others of 8 bits are compared with.
STANDARD: Final = "fp8_block128"
# Up to here weights are all that takes time, and a layer without quantization is timed beside.
MOST_TOKENS_OF_DECODE: Final = 64
BANDS: Final = (("T 1-64", 1, 64), ("T 256-1024", 256, 1024), ("T 4096-16384", 4096, 16384))

# Tokens whose outputs are compared with the reference.
SAMPLE: Final = 128
# Replays of short rows, so that the clock has left its rest.
MAX_ROUNDS: Final = 400

Row = dict[str, Any]


def make_problem(model: str, scheme: str) -> MoEProblem:
    """SwiGLU without bias, like the rows of `benches.h200.table`."""
    keywords = {**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False, "quant": scheme}
    return MoEProblem(**keywords)


def matmul_dtype(scheme: str) -> str:
    """The element type of both operands of a scheme's products."""
    activation = get_scheme(scheme).activation
    return "bfloat16" if activation is None else activation.dtype


def measure_ceilings(dtypes: Sequence[str]) -> dict[str, float]:
    """TFLOP/s of an 8192^3 product of each element type, sustained, and TB/s of torch's sum of 4 GB."""
    device = torch.device("cuda")
    words = torch.randn(1 << 30, device=device)
    read = time_runs({"": [words.sum]}, device, rounds=1000, seconds=WINDOW_SECONDS)[""]
    found = {"read_tbps": words.nbytes / read.median_us / 1e6}
    del words
    size = 8192
    for dtype in dtypes:
        found[f"{dtype}_tflops"] = 2 * size**3 / roofline.settled_us(_product(dtype, size, device), device) / 1e6
    return found


def _product(dtype: str, size: int, device: torch.device) -> Run:
    if dtype == "int8":
        x, w = (torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        return functools.partial(torch._int_mm, x, w.T)
    x, w = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    if dtype == "bfloat16":
        return functools.partial(F.linear, x, w)
    one = torch.ones((), device=device)
    return functools.partial(torch._scaled_mm, x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def ceilings_of(scheme: str, found: dict[str, float]) -> roofline.Ceilings:
    """The ceilings that a scheme is judged by."""
    return roofline.Ceilings(found[f"{matmul_dtype(scheme)}_tflops"], found["read_tbps"] * 1e3, read_by="torch")


def byte_ratio(model: str, scheme: str, calls: Sequence[Call]) -> float:
    """Bytes that calls of the unquantized layer have to move over those of the scheme's."""
    moved = [
        statistics.mean(roofline.work_of(make_problem(model, name), call).num_bytes for call in calls)
        for name in ("unquantized", scheme)
    ]
    return moved[0] / moved[1]


def sample_error(kernel: MoEKernel, problem: MoEProblem, weights: ExpertWeights, call: Call) -> float:
    """Relative error of the first tokens of a poisoned output."""
    out = torch.full_like(call.hidden_states, math.nan)
    kernel(*call, out=out)
    sample = Call(*(tensor[:SAMPLE] for tensor in call))
    return relative_error(out[:SAMPLE], reference_experts(problem, weights, *sample))


def precompile(problem: MoEProblem, tokens: Sequence[int], with_configs: bool) -> None:
    """Compiles everything that the rows of a layer launch, on all cores."""
    with compiling_only():
        layer = EmptyLayer(problem)
        for num_tokens in tokens:
            layer.launch(num_tokens)
            for configs in row_candidates(problem, num_tokens) if with_configs else ():
                with selecting(configs):
                    layer.launch(num_tokens)


class Layers:
    """Makes layers, and keeps the last unquantized one."""

    def __init__(self) -> None:
        self._plain: tuple[str, MoEKernel] | None = None

    def quantized(self, problem: MoEProblem) -> tuple[MoEKernel, ExpertWeights]:
        """A layer and its canonical weights."""
        weights = make_weights(problem)
        return make_kernel(problem, weights, select_backend(problem, require="triton")), weights

    def unquantized(self, model: str) -> MoEKernel:
        """The layer of a model in bf16."""
        if self._plain is None or self._plain[0] != model:
            self._plain = None  # The old weights go first.
            problem = make_problem(model, "unquantized")
            precompile(problem, [count for count in (1, 16, 64) if count <= MOST_TOKENS_OF_DECODE], False)
            release()
            self._plain = (model, self.quantized(problem)[0])
        return self._plain[1]


def release() -> None:
    """Frees the memory of the last layer."""
    WORKSPACES.release()
    gc.collect()
    torch.cuda.empty_cache()


def measure(
    model: str,
    scheme: str,
    tokens: Sequence[int],
    layers: Layers,
    ceilings: dict[str, float],
    deadline: float,
    with_configs: bool = False,
) -> Iterator[Row]:
    """Rows of one layer; one that would start after the deadline (of `time.monotonic`) has only `left_out`."""
    problem = make_problem(model, scheme)
    kernel: MoEKernel | None = None
    for num_tokens in tokens:
        row: Row = {"model": model, "scheme": scheme, "tokens": num_tokens}
        if time.monotonic() > deadline:
            yield row | {"left_out": "out of time"}
            continue
        if kernel is None:
            precompile(problem, tokens, with_configs)
            release()
            kernel, weights = layers.quantized(problem)
        calls = [make_call(problem, num_tokens) for _ in range(num_calls(num_tokens))]
        error = sample_error(kernel, problem, weights, calls[0])
        elements = min(num_tokens, SAMPLE) * problem.hidden_size
        row |= {"relative_error": error if math.isfinite(error) else None}
        row["wrong"] = not error <= tolerance(problem.quant, problem.dtype, elements)
        if not row["wrong"]:
            kernels = {"ours_us": kernel}
            if problem.quant.activation is None and num_tokens <= MOST_TOKENS_OF_DECODE:
                kernels["bf16_us"] = layers.unquantized(model)
            timings = time_kernels(kernels, calls, MAX_ROUNDS, WINDOW_SECONDS)
            row |= {name: timing.median_us for name, timing in timings.items()}
            works = [roofline.work_of(problem, call) for call in calls]
            row["roof_us"] = roofline.roofline_us(works, ceilings_of(scheme, ceilings))
            row["share"] = row["roof_us"] / row["ours_us"]
            if "bf16_us" in row:
                row["byte_ratio"] = byte_ratio(model, scheme, calls)
                row["share_of_byte_ratio"] = row["bf16_us"] / row["ours_us"] / row["byte_ratio"]
            if with_configs and scheme in EIGHT_BIT:
                row["configs_us"] = time_configs(kernel, problem, calls)
        yield row


def summarize(rows: Sequence[Row]) -> dict[str, Row]:
    """Summary of each scheme's rows: means are geometric, the worst rows are named."""
    right = [row for row in rows if not row.get("wrong") and "left_out" not in row]
    times = {(row["scheme"], row["model"], row["tokens"]): row["ours_us"] for row in right}
    found: dict[str, Row] = {}
    for scheme in dict.fromkeys(row["scheme"] for row in right):
        own = [row for row in right if row["scheme"] == scheme]
        line = found[scheme] = {}
        with_field = [row for row in own if "share_of_byte_ratio" in row]
        if with_field:
            worst = min(with_field, key=lambda row: float(row["share_of_byte_ratio"]))
            line["share_of_byte_ratio mean"] = geomean([row["share_of_byte_ratio"] for row in with_field])
            line["share_of_byte_ratio worst"] = _named(worst, worst["share_of_byte_ratio"])
        for band, low, high in BANDS:
            shares = [row["share"] for row in own if low <= row["tokens"] <= high]
            if shares:
                line[f"share {band}"] = geomean(shares)
        if scheme in EIGHT_BIT and scheme != STANDARD:
            ratios = [
                _named(row, row["ours_us"] / times[STANDARD, row["model"], row["tokens"]])
                for row in own
                if (STANDARD, row["model"], row["tokens"]) in times
            ]
            if ratios:
                line[f"time over {STANDARD} worst"] = max(ratios, key=lambda named: named["value"])
    return found


def _named(row: Row, value: float) -> Row:
    return {"value": value, "model": row["model"], "tokens": row["tokens"]}


def show_summary(line: Row) -> str:
    """A scheme's summary on one line."""
    return ", ".join(
        f"{name} {value['value']:.3f} ({value['model']} T {value['tokens']})"
        if isinstance(value, dict)
        else f"{name} {value:.3f}"
        for name, value in line.items()
    )


def show(row: Row) -> str:
    """One line, and one more for each of the best configurations."""
    label = f"{row['model']:14} {row['scheme']:17} T {row['tokens']:5}"
    if "left_out" in row:
        return f"{label}  left out: {row['left_out']}"
    if row["wrong"]:
        return f"{label}  WRONG: error {row['relative_error']}"
    text = f"{label}  ours {row['ours_us']:8.1f}  roof {row['roof_us']:8.1f}  share {row['share']:6.1%}"
    if "bf16_us" in row:
        text += f"  bf16 {row['bf16_us']:7.1f}  of byte ratio {row['share_of_byte_ratio']:6.1%}"
    lines = [f"{text}  error {row['relative_error']:.1e}"]
    times = row.get("configs_us", {})
    for name in sorted(times, key=lambda name: (math.isnan(times[name]), times[name]))[:4]:
        lines.append(f"{'':20} {times[name]:8.1f}  {name}")
    lines += [f"{'':20}    WRONG  {name}" for name, value in times.items() if math.isnan(value)]
    return "\n".join(lines)


def main() -> int:
    """Measures, and writes the file after each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="*", default=tuple(ROWS), choices=tuple(ROWS))
    parser.add_argument("--models", nargs="*", help="of every scheme; its own where not given")
    parser.add_argument("--tokens", nargs="*", type=int, help="of every scheme; its own where not given")
    parser.add_argument("--configs", action="store_true", help="also time other launch configurations of 8-bit layers")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"benches.h200.quant needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    ceilings = measure_ceilings(sorted({matmul_dtype(scheme) for scheme in arguments.schemes}))
    print("  ".join(f"{name} {value:.2f}" for name, value in ceilings.items()), flush=True)
    record: Row = {"schema": 1, **provenance(platform, ("torch", "triton")), "ceilings": ceilings}
    rows: list[Row] = []
    layers = Layers()
    for scheme in arguments.schemes:
        for model in arguments.models or ROWS[scheme][0]:
            tokens = arguments.tokens or ROWS[scheme][1]
            deadline = start + arguments.budget_s
            for row in measure(model, scheme, tokens, layers, ceilings, deadline, arguments.configs):
                rows.append(row)
                print(show(row), flush=True)
            release()
            if arguments.json:
                record |= {**clocks(platform), "seconds": time.monotonic() - start, "summary": summarize(rows)}
                record |= {
                    "left_out": [row for row in rows if "left_out" in row],
                    "rows": [row for row in rows if "left_out" not in row],
                }
                arguments.json.write_text(json.dumps(record, indent=1))
    for scheme, line in summarize(rows).items():
        print(f"{scheme:17} {show_summary(line)}")
    wrong = sum(row.get("wrong", False) for row in rows)
    left_out = sum("left_out" in row for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong, {left_out} left out, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
