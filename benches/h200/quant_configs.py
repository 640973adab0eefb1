"""Other launch configurations of 8-bit layers than the shipped rules', timed side by side: `h200_quant --configs`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from benches.h200.sweep import rotated
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.launch.device import max_shared_bytes
from moereg.kernels.quantized import config as triton_quantized_config
from moereg.kernels.quantized.config import select_quantized_config
from moereg.layer import MoEKernel
from moereg.problem import MoEProblem
from moereg.reference import relative_error
from moereg.testing.tolerances import tolerance
from moereg.tuning.inputs import Call
from moereg.tuning.timing import Run, kernel_runs, time_runs

# Inputs over which candidates are rotated beyond a few tokens, whose weights would stay in a cache; seconds of each.
INPUTS: Final = 2
SECONDS: Final = 0.05


def candidates_of(num_tokens: int, rows_per_expert: float) -> list[GemmPair]:
    """A handful of configurations of a row's class: of the first product beside one of the second, and the reverse."""

    def gemm(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> GroupedGemmConfig:
        return GroupedGemmConfig(block_m, block_n, block_k, 1, num_warps, num_stages, mask_rows=block_m < 128)

    of_16 = (
        (gemm(16, 32, 256, 4, 3), gemm(16, 32, 128, 4, 5), gemm(16, 32, 128, 2, 5), gemm(16, 64, 256, 4, 3)),
        (gemm(16, 128, 256, 4, 3), gemm(16, 128, 128, 4, 4), gemm(16, 64, 256, 4, 3), gemm(16, 64, 128, 2, 4)),
    )
    of_64 = (
        (gemm(64, 64, 128, 4, 4), gemm(64, 64, 128, 4, 3), gemm(64, 128, 128, 8, 4), gemm(64, 32, 256, 4, 3)),
        (gemm(64, 128, 128, 4, 4), gemm(64, 128, 128, 4, 3), gemm(64, 64, 128, 4, 4), gemm(64, 128, 256, 4, 2)),
    )
    of_128 = (
        (gemm(128, 128, 128, 8, 4), gemm(128, 128, 128, 8, 3), gemm(128, 64, 128, 4, 3), gemm(128, 64, 128, 8, 4)),
        (gemm(128, 128, 128, 8, 4), gemm(128, 128, 128, 8, 3), gemm(128, 64, 128, 4, 4)),
    )
    classes: list[tuple[tuple[GroupedGemmConfig, ...], tuple[GroupedGemmConfig, ...]]]
    if num_tokens <= 16 or rows_per_expert <= 8:
        classes = [of_16]
    elif rows_per_expert <= 22:
        classes = [of_16, of_64]
    else:
        classes = [of_64, of_128]
    return [
        GemmPair(*pair, num_tokens > 16)
        for first, second in classes
        for pair in (*itertools.product(first, second[:1]), *itertools.product(first[:1], second[1:]))
    ]


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

    if len(calls[0].hidden_states) > 4:
        calls = calls[:INPUTS]
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    bound = tolerance(problem.quant, problem.dtype)
    first: torch.Tensor | None = None
    runs: dict[str, list[Run]] = {}
    found: dict[str, float] = {}
    for number, configs in enumerate(row_candidates(problem, len(calls[0].hidden_states))):
        # What was recorded belongs to the candidate before.
        kernel.experts.implementation.recordings.clear()  # type: ignore[attr-defined]
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
    kernel.experts.implementation.recordings.clear()  # type: ignore[attr-defined]
    timings = time_runs(runs, outs[0].device, seconds=SECONDS)
    return found | {name: timing.median_us for name, timing in timings.items()}
