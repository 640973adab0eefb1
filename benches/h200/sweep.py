"""Is a shape that was never tuned as fast as it could be? Leave-one-out over six shapes of the `triton` backend.

    python -m benches.h200.sweep [--models M ...] [--tokens T ...] [--budget-s 240] [--json FILE]

Each shape is timed with each number of tokens under every candidate of its class, through the real layer with the
selection of the configuration replaced; a class is a range of tokens or of rows per expert. Candidates are those of the
shipped rules and their neighbors, of both GEMMs at once. Then, in each class, the candidate with the best geometric
mean over the other shapes is looked up on the shape that was left out. Its time over that shape's own best must stay
within 1.15; otherwise, or if a candidate gives wrong numbers, the exit code is 1. The shipped rules' time over the best
is reported beside it.

Times are medians of CUDA-graph replays, candidates in turn and inputs rotated, so that heat and caches favor none.
Candidates that need more shared memory than there is are skipped and counted. Rows that would start after the budget
are left out and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from benches.h200 import leave_one_out
from benches.h200.candidates import (
    Candidate,
    Configs,
    gemv,
    grouped,
    selected,
    spell,
    time_candidates,
)
from benches.h200.precompile import EmptyLayer, compiling_only
from benches.h200.table import make_call, make_weights
from moereg.backends._triton import schedules
from moereg.backends._triton.schedules import MIN_HOPPER_ROWS
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.kernels.gemm import rules as gemm_rules
from moereg.kernels.gemm.config import GemmPair, GemvPair
from moereg.kernels.hopper import config as hopper_config
from moereg.kernels.hopper.config import HopperConfigRule
from moereg.kernels.launch.device import max_shared_bytes
from moereg.kernels.sizes import SPREAD_HEAVY, WEIGHT_PAD
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import round_up

MODELS: Final = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-120b", "sonic-120b", "glm-4.5-air")
NUM_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
BOUND: Final = 1.15
NUM_INPUTS: Final = 4
ROUNDS: Final = 24
SECONDS: Final = 0.1

# The most rows per expert of each class but the last.
CLASS_ROWS: Final = (11, MIN_HOPPER_ROWS, 80, 176)


def class_of(num_tokens: int, rows_per_expert: float) -> str:
    """The class of a row: by tokens up to 16, then by the average number of rows per expert."""
    if num_tokens == 1:
        return "1 token"
    if num_tokens <= 16:
        return "2-16 tokens"
    for bound in CLASS_ROWS:
        if rows_per_expert <= bound:
            return f"to {bound} rows"
    return f"over {CLASS_ROWS[-1]} rows"


def uses_hopper(num_tokens: int, rows_per_expert: float) -> bool:
    """Whether the class of a row runs on Hopper's kernels."""
    return num_tokens > 16 and rows_per_expert > MIN_HOPPER_ROWS


def describe(configs: Configs) -> str:
    """A short name: tiles and stages of the first product, then of the second."""
    if isinstance(configs, HopperConfigRule):
        parts = [f"{c.block_m}x{c.block_n}+{c.slack} {c.num_stages}s" for c in (configs.gate_up, configs.down)]
        if configs.copies_rows:
            parts[0] += " copied"
        if configs.heavy_first:
            parts[0] += " heavy spread" if configs.heavy_first == SPREAD_HEAVY else " heavy first"
    elif isinstance(configs, GemmPair):
        parts = [f"{spell(c)}{'' if c.mask_rows else ' all rows'}" for c in (configs.gate_up, configs.down)]
    else:
        parts = [spell(c) for c in (configs.gate_up, configs.down)]
    return " | ".join(parts)


def _gemv_pairs() -> Iterator[GemvPair]:
    first = ("32x128 2w4s", "16x256 2w4s", "64x128 4w3s")
    second = ("8x1024 4w3s", "16x512 4w3s", "8x512 4w4s")
    for gate_up, down in itertools.product(first, second):
        yield GemvPair(gemv(gate_up), gemv(down))


def _gemm_pairs(name: str) -> Iterator[GemmPair]:
    def square(*tiles: str) -> list[tuple[str, str]]:
        return list(itertools.product(tiles, tiles))

    of_16 = ("16x64x128 4w5s", "16x128x128 4w4s")
    of_32 = ("32x64x128 4w4s", "32x128x128 4w3s")
    of_64 = ("64x128x64 4w4s", "64x64x128 4w3s")
    if name == "2-16 tokens":
        pairs = [*itertools.product((*of_16, "16x64x64 4w6s"), (*of_16, "16x64x128 4w4s"))]
    elif name == "to 11 rows":
        pairs = [*itertools.product(of_16, ("16x64x128 4w4s", of_16[1])), *square(*of_32)]
    else:
        pairs = [*square(of_16[1]), *square(*of_32), *square(*of_64)]
    for gate_up, down in pairs:
        yield GemmPair(grouped(gate_up), grouped(down), sort_routes=name != "2-16 tokens")


def _hopper_rules() -> Iterator[Configs]:
    """The shipped rules' pairs of tiles.

    Those that both products have also with a shorter ring, with heavy experts first or spread, and with rows copied.
    """
    for gate_up, down in dict.fromkeys((rule.gate_up, rule.down) for rule in hopper_config.CONFIG_RULES):
        pair = HopperConfigRule(gate_up=gate_up, down=down)
        yield pair
        if gate_up == down:
            shorter = dataclasses.replace(gate_up, num_stages=gate_up.num_stages - 1)
            yield HopperConfigRule(gate_up=shorter, down=shorter)
            yield dataclasses.replace(pair, heavy_first=SPREAD_HEAVY)
            for copies in (False, True):
                yield dataclasses.replace(pair, copies_rows=copies, heavy_first=True)
            yield dataclasses.replace(pair, copies_rows=True)


def candidates_of(num_tokens: int, rows_per_expert: float) -> list[Candidate]:
    """The candidates of a row's class."""
    name = class_of(num_tokens, rows_per_expert)
    pairs: Iterator[Configs]
    if name == "1 token":
        pairs = _gemv_pairs()
    elif uses_hopper(num_tokens, rows_per_expert):
        pairs = _hopper_rules()
    else:
        pairs = _gemm_pairs(name)
    found = [Candidate(describe(configs), configs) for configs in pairs]
    assert len({candidate.name for candidate in found}) == len(found), "two candidates have the same name"
    return found


def shipped(problem: MoEProblem, num_tokens: int, shared_bytes: int | None) -> Candidate:
    """The configuration that the shipped rules choose for a row."""
    rows = num_tokens * problem.top_k / problem.num_experts
    configs: Configs
    if uses_hopper(num_tokens, rows):
        columns = problem.activation.num_halves * round_up(problem.intermediate_size, WEIGHT_PAD)
        fewest = hopper_config.count_fewest_tiles(num_tokens * problem.top_k, problem.hidden_size)
        configs = dataclasses.replace(
            hopper_config.select_config(rows, columns, problem.num_experts, fewest),
            max_rows_per_expert=math.inf,
            min_columns=0,
            max_columns=math.inf,
            min_experts=0,
            max_fewest_tiles=math.inf,
        )
    else:
        configs = gemm_rules.select_config(num_tokens, rows, problem.torch_dtype.itemsize, shared_bytes)
    return Candidate(describe(configs), configs)


def row_candidates(problem: MoEProblem, num_tokens: int, shared_bytes: int | None) -> list[Candidate]:
    """The shipped candidate first, then the others of the class."""
    own = shipped(problem, num_tokens, shared_bytes)
    others = candidates_of(num_tokens, num_tokens * problem.top_k / problem.num_experts)
    return [own, *(candidate for candidate in others if candidate != own)]


def selecting(candidate: Candidate) -> AbstractContextManager[None]:
    """Layers inside run with the candidate instead of the rules' choice."""
    if isinstance(candidate.configs, HopperConfigRule):
        return selected(hopper_config, "select_config", candidate.configs)
    stack = contextlib.ExitStack()
    # As it is: without tall tiles, and with its own tile of a short second product.
    for module, function in ((gemm_rules, "select_config"), (schedules, "fit_pair")):
        stack.enter_context(selected(module, function, candidate.configs))
    return stack


def make_problem(model: str) -> MoEProblem:
    """bf16, SwiGLU, no bias, like the rows of `benches.h200.table`."""
    return MoEProblem(**{**get_shape(model).problem_keywords(), "activation": "silu", "has_bias": False})


def precompile(problem: MoEProblem, tokens: Sequence[int], shared_bytes: int | None) -> None:
    """Compiles every candidate of every row of a shape on all cores."""
    with compiling_only():
        layer = EmptyLayer(problem)
        for num_tokens in tokens:
            for candidate in row_candidates(problem, num_tokens, shared_bytes):
                with selecting(candidate):
                    layer.launch(num_tokens)


def main() -> int:
    """Measures, writes the file after each shape, and prints the table by tokens last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--tokens", nargs="*", type=int, default=NUM_TOKENS)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    platform = probe_platform()
    if str(platform) != "cuda:sm90":
        print(f"benches.h200.sweep needs a Hopper GPU, got {platform}", file=sys.stderr)
        return 3
    record: dict[str, Any] = {"schema": 1, **provenance(platform, ("torch", "triton")), "bound": BOUND}
    shared_bytes = max_shared_bytes(torch.device("cuda", torch.cuda.current_device()))
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for model in arguments.models:
        problem = make_problem(model)
        kernel: MoEKernel | None = None
        for num_tokens in arguments.tokens:
            if time.monotonic() - start > arguments.budget_s:
                left_out.append({"model": model, "tokens": num_tokens, "left_out": "out of time"})
                continue
            if kernel is None:
                precompile(problem, arguments.tokens, shared_bytes)
                torch.cuda.empty_cache()
                print(f"{model}: compiled after {time.monotonic() - start:.0f} s", flush=True)
                kernel = make_kernel(problem, make_weights(problem), select_backend(problem, require="triton"))
            calls = [make_call(problem, num_tokens) for _ in range(NUM_INPUTS)]
            candidates = row_candidates(problem, num_tokens, shared_bytes)
            times, skipped, wrong = time_candidates(kernel, calls, candidates, selecting, ROUNDS, SECONDS)
            row = {
                "model": model,
                "tokens": num_tokens,
                "class": class_of(num_tokens, num_tokens * problem.top_k / problem.num_experts),
                "shipped": candidates[0].name,
                "times_us": times,
                "skipped": skipped,
                "wrong": wrong,
            }
            rows.append(row)
            best = min(times, key=times.__getitem__)
            ratio = times[candidates[0].name] / times[best] if candidates[0].name in times else math.nan
            print(
                f"{model:14} T {num_tokens:5} {row['class']:14} best {times[best]:8.1f} us ({best})  "
                f"shipped over best {ratio:.3f}  {len(times)} timed, {len(skipped)} skipped, {len(wrong)} wrong",
                flush=True,
            )
        del kernel
        WORKSPACES.release()
        torch.cuda.empty_cache()
        if arguments.json:
            record |= {**clocks(platform), "seconds": time.monotonic() - start, "left_out": left_out, "rows": rows}
            arguments.json.write_text(json.dumps(record, indent=1))
    return report(rows, left_out, time.monotonic() - start)


def report(rows: list[dict[str, Any]], left_out: list[dict[str, Any]], seconds: float) -> int:
    """Prints the table and the verdict; returns the exit code."""
    found = leave_one_out.leave_one_out(rows)
    for line in found:
        if line["ratio"] is None or line["ratio"] > BOUND:
            verdict = "has no other shape in its class" if line["ratio"] is None else f"ratio {line['ratio']:.3f}"
            print(f"{line['model']} T {line['tokens']}: {verdict} (best {line['best']}, chosen {line['chosen']})")
    print("T      shapes  left out: worst    mean  shipped: worst    mean")
    for line in leave_one_out.by_tokens(found):
        names = ("ratio_worst", "ratio_mean", "shipped_ratio_worst", "shipped_ratio_mean")
        values = [math.nan if line[name] is None else line[name] for name in names]
        texts = [f"{value:6.3f}" for value in values]
        print(
            f"{line['tokens']:<6} {line['shapes']:6}           {'  '.join(texts[:2])}           {'  '.join(texts[2:])}"
        )
    for row in left_out:
        print(f"left out: {row['model']} T {row['tokens']}: {row['left_out']}")
    wrong = sum(len(row["wrong"]) for row in rows)
    skipped = sum(len(row["skipped"]) for row in rows)
    worst = leave_one_out.worst(found)
    print(
        f"{len(rows)} rows, {len(left_out)} left out, {skipped} candidates skipped, {wrong} wrong, "
        f"worst ratio {worst:.3f} (bound {BOUND}), {seconds:.0f} s"
    )
    return 1 if wrong or worst > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
