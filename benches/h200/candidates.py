"""Candidates of a launch configuration: spelled as text, and timed beside each other through a real layer.

A tile is spelled `16x64x128 4w5s`: rows, columns and reduced elements, warps, stages of the pipeline. One token has no
rows: `32x128 2w4s`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from moereg.bench.inputs import Call
from moereg.bench.timing import ROUNDS, Run, kernel_runs, time_runs
from moereg.kernels.gemm.config import GemmPair, GemvConfig, GemvPair, GroupedGemmConfig
from moereg.kernels.hopper.config import HopperConfigRule
from moereg.kernels.launch.remembered import forget_recordings
from moereg.layer.factory import MoEKernel
from moereg.numerics.reference import relative_error
from moereg.numerics.tolerances import tolerance

Configs: TypeAlias = GemvPair | GemmPair | HopperConfigRule


@dataclass(frozen=True)
class Candidate:
    """One configuration of both products.

    Attributes:
        name: Unique within a class.
        configs: What the rules are to select.
    """

    name: str
    configs: Configs


class Timed(NamedTuple):
    """The outcome of some candidates.

    Attributes:
        times_us: Median time by name.
        skipped: Names of those that need more shared memory than there is.
        wrong: Names of those that gave wrong numbers.
    """

    times_us: dict[str, float]
    skipped: list[str]
    wrong: list[str]


def grouped(text: str, *, mask_rows: bool = True) -> GroupedGemmConfig:
    """The configuration of a grouped GEMM that a text spells."""
    block_m, block_n, block_k, num_warps, num_stages = _numbers(r"(\d+)x(\d+)x(\d+) (\d+)w(\d+)s", text)
    return GroupedGemmConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        group_m=1,
        num_warps=num_warps,
        num_stages=num_stages,
        mask_rows=mask_rows,
    )


def gemv(text: str) -> GemvConfig:
    """The configuration of a product of a vector that a text spells."""
    block_n, block_k, num_warps, num_stages = _numbers(r"(\d+)x(\d+) (\d+)w(\d+)s", text)
    return GemvConfig(block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def _numbers(pattern: str, text: str) -> Iterator[int]:
    match = re.fullmatch(pattern, text)
    assert match is not None, text
    return map(int, match.groups())


def spell(config: GroupedGemmConfig | GemvConfig) -> str:
    """Inverse of `grouped` and `gemv`; says what else a configuration has."""
    if isinstance(config, GemvConfig):
        return f"{config.block_n}x{config.block_k} {config.num_warps}w{config.num_stages}s"
    tile = f"{config.block_m}x{config.block_n}x{config.block_k} {config.num_warps}w{config.num_stages}s"
    return f"{tile} group {config.group_m}" if config.group_m > 1 else tile


@contextlib.contextmanager
def selected(module: Any, function: str, configs: Configs) -> Iterator[None]:
    """A function of a module selects these configurations, whatever its arguments."""
    real = getattr(module, function)
    setattr(module, function, lambda *arguments, **keywords: configs)
    try:
        yield
    finally:
        setattr(module, function, real)


def time_candidates(
    kernel: MoEKernel,
    calls: Sequence[Call],
    candidates: Sequence[Candidate],
    selecting: Callable[[Candidate], AbstractContextManager[None]],
    rounds: int = ROUNDS,
    seconds: float = 0.1,
) -> Timed:
    """Times candidates in turns; the first one's numbers are what the others are compared with.

    Args:
        kernel: A layer of the `triton` backend.
        calls: Inputs that runs are rotated over.
        candidates: The candidates, of which the first is known to be right.
        selecting: Makes layers that run inside it use a candidate.
        rounds: As in `time_runs`.
        seconds: As in `time_runs`.
    """
    from triton.runtime.errors import OutOfResources

    bound = tolerance(kernel.problem.quant, kernel.problem.dtype)
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    first: torch.Tensor | None = None
    runs: dict[str, list[Run]] = {}
    found = Timed({}, [], [])
    for number, candidate in enumerate(candidates):
        # What was recorded belongs to the candidate before.
        forget_recordings()
        outs[0].fill_(math.nan)
        with selecting(candidate):
            try:
                kernel(*calls[0], out=outs[0])
            except OutOfResources:
                found.skipped.append(candidate.name)
                continue
            first = outs[0].clone() if first is None else first
            # Both round as a layer may, so they differ by at most twice its bound.
            if not relative_error(outs[0], first) <= 2 * bound:
                found.wrong.append(candidate.name)
                continue
            own = kernel_runs(kernel, calls, outs)
        # Each candidate starts one input behind the one before, whose weights in the L2 would be a gift to it.
        runs[candidate.name] = rotated(own, number)
    forget_recordings()
    timings = time_runs(runs, outs[0].device, rounds, seconds)
    found.times_us.update({name: timing.median_us for name, timing in timings.items()})
    return found


def rotated(runs: Sequence[Run], by: int) -> list[Run]:
    """The runs in order, beginning elsewhere."""
    return [runs[(place + by) % len(runs)] for place in range(len(runs))]
