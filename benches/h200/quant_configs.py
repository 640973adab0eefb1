"""Launch configurations of 8-bit layers beside the shipped ones, for `python -m benches.h200.quant --configs`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch

from benches.h200.candidates import Candidate, grouped, selected, spell, time_candidates
from moereg.backends._triton import quantized
from moereg.bench.inputs import Call
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.launch.device import max_shared_bytes
from moereg.kernels.quantized.config import select_quantized_config
from moereg.layer.factory import MoEKernel
from moereg.spec.problem import MoEProblem

# Inputs over which candidates are rotated beyond a few tokens, whose weights would stay in a cache; seconds of each.
INPUTS: Final = 2
SECONDS: Final = 0.05

# By rows of a tile: candidates of the first product, then of the second.
TILES: Final = {
    16: (
        ("16x32x256 4w3s", "16x32x128 4w5s", "16x32x128 2w5s", "16x64x256 4w3s"),
        ("16x128x256 4w3s", "16x128x128 4w4s", "16x64x256 4w3s", "16x64x128 2w4s"),
    ),
    64: (
        ("64x64x128 4w4s", "64x64x128 4w3s", "64x128x128 8w4s", "64x32x256 4w3s"),
        ("64x128x128 4w4s", "64x128x128 4w3s", "64x64x128 4w4s", "64x128x256 4w2s"),
    ),
    128: (
        ("128x128x128 8w4s", "128x128x128 8w3s", "128x64x128 4w3s", "128x64x128 8w4s"),
        ("128x128x128 8w4s", "128x128x128 8w3s", "128x64x128 4w4s"),
    ),
}


def candidates_of(num_tokens: int, rows_per_expert: float) -> list[GemmPair]:
    """Configurations of a row's class: each of the first product beside one of the second, and the reverse."""

    def gemm(text: str, block_m: int) -> GroupedGemmConfig:
        return grouped(text, mask_rows=block_m < 128)

    if num_tokens <= 16 or rows_per_expert <= 8:
        heights = [16]
    elif rows_per_expert <= 22:
        heights = [16, 64]
    else:
        heights = [64, 128]
    pairs = []
    for height in heights:
        first, second = ([gemm(text, height) for text in texts] for texts in TILES[height])
        pairs += [*itertools.product(first, second[:1]), *itertools.product(first[:1], second[1:])]
    return [GemmPair(gate_up, down, sort_routes=num_tokens > 16) for gate_up, down in pairs]


def describe(configs: GemmPair) -> str:
    """A short name: tiles, warps and stages of the first product, then of the second."""
    return f"{spell(configs.gate_up)} | {spell(configs.down)}"


def selecting(configs: GemmPair) -> AbstractContextManager[None]:
    """Layers inside run with these configurations instead of the rules' choices."""
    return selected(quantized, "select_quantized_config", configs)


def row_candidates(problem: MoEProblem, num_tokens: int) -> list[GemmPair]:
    """The shipped configurations first, then the others of the class."""
    rows = num_tokens * problem.top_k / problem.num_experts
    shared_bytes = max_shared_bytes(torch.device("cuda", torch.cuda.current_device()))
    own = select_quantized_config(num_tokens, rows, problem.activation.num_halves, shared_bytes)
    return list({describe(pair): pair for pair in (own, *candidates_of(num_tokens, rows))}.values())


def time_configs(kernel: MoEKernel, problem: MoEProblem, calls: Sequence[Call]) -> dict[str, float]:
    """Median time of each candidate in us; NaN of one that gives other numbers, absent where it does not fit."""
    num_tokens = len(calls[0].hidden_states)
    candidates = [Candidate(describe(configs), configs) for configs in row_candidates(problem, num_tokens)]
    found = time_candidates(
        kernel,
        calls[:INPUTS] if num_tokens > 4 else calls,
        candidates,
        lambda candidate: selecting(candidate.configs),
        seconds=SECONDS,
    )
    return dict.fromkeys(found.wrong, math.nan) | found.times_us
