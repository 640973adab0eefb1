"""Times calls of all ranks of a group together, and draws the calls of a group from one seed."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from moereg.layer.factory import MoEKernel
from moereg.prepare_finalize.expert_placement import PlacementTables, token_turns
from moereg.spec.problem import MoEProblem
from moereg.tuning.inputs import Call, num_calls, random_call
from moereg.tuning.timing import Run, Timing, can_be_captured, capture, wait_for

__all__ = [
    "all_agree",
    "bare_collectives",
    "calls_of_group",
    "error_over_ranks",
    "kernel_runs_over_ranks",
    "of_rank",
    "time_over_ranks",
]

_BATCH_SECONDS: Final = 2e-3
_MOST_AT_A_TIME: Final = 8
# The host asks for a batch while the GPU is held; 1.5 ms or more at up to 2 GHz.
_HELD_CYCLES: Final = 3_000_000


def calls_of_group(
    problem: MoEProblem, num_tokens: int, size: int, routing: str, seed: int, device: torch.device
) -> list[Call]:
    """Calls of all ranks' tokens, rank after rank; the same on every rank. Popular experts stay popular.

    Args:
        problem: The layer.
        num_tokens: T of each rank.
        size: Ranks.
        routing: One of `ROUTINGS`.
        seed: Of everything.
        device: Where to make them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    popularity = torch.randperm(problem.num_experts, generator=generator, device=device) + 1
    calls = []
    for _ in range(num_calls(num_tokens)):
        call = random_call(problem, num_tokens * size, "uniform" if routing == "zipf" else routing, generator)
        if routing == "zipf":
            noise = torch.rand((num_tokens * size, problem.num_experts), generator=generator, device=device)
            keys = -torch.log(-torch.log(noise)) - torch.log(popularity.float())
            call = call._replace(topk_ids=keys.topk(problem.top_k, dim=1).indices.int().contiguous())
        calls.append(call)
    return calls


def of_rank(call: Call, rank: int, size: int) -> Call:
    """One rank's tokens of a call of all ranks."""
    num_tokens = len(call.hidden_states) // size
    rows = slice(rank * num_tokens, (rank + 1) * num_tokens)
    return Call(*(tensor[rows].clone() for tensor in call))


def time_over_ranks(runs: Sequence[Run], device: torch.device, rounds: int, seconds: float) -> Timing:
    """Times runs on all ranks at once; every rank has to call it. A sample is the slowest rank's mean over a batch.

    Args:
        runs: One for each set of inputs, called in turns.
        device: This rank's.
        rounds: Samples, at most.
        seconds: After which no further sample is taken, once there are three.
    """
    for run in runs[:2]:
        run()
    wait_for(device)
    first = _max_over_ranks([_timed(runs[:1], device)], device)[0]
    batch = max(1, min(_MOST_AT_A_TIME, int(_BATCH_SECONDS / first)))
    count = max(3, min(rounds, int(seconds / (first * batch))))
    samples = []
    for place in range(count):
        turn = [runs[(place * batch + step) % len(runs)] for step in range(batch)]
        samples.append(_timed(turn, device) / batch * 1e6)
    return Timing(tuple(_max_over_ranks(samples, device)))


def _timed(runs: Sequence[Run], device: torch.device) -> float:
    """Seconds of some runs on this rank, begun by all ranks at once."""
    together = torch.zeros(1, device=device)
    if device.type != "cuda":
        dist.all_reduce(together)
        start = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait_for(device)
    torch.cuda._sleep(_HELD_CYCLES)
    dist.all_reduce(together)
    begin.record()
    for run in runs:
        run()
    end.record()
    wait_for(device)
    return float(begin.elapsed_time(end)) / 1e3


def _max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def bare_collectives(
    problem: MoEProblem, calls: Sequence[Call], tables: PlacementTables, row_bytes: int
) -> tuple[list[Run], tuple[int, int]]:
    """Tokens with their routes out, once to each rank that needs them, and a row back from each, without padding.

    Args:
        problem: The layer.
        calls: This rank's.
        tables: Which rank holds which expert.
        row_bytes: Of a token on its way out.

    Returns:
        A run a call, and the bytes that this rank sends out and gets back in the first one.
    """
    runs: list[Run] = []
    moved = (0, 0)
    back = problem.hidden_size * problem.torch_dtype.itemsize
    size = tables.placement.num_ranks
    for call in calls:
        device = call.topk_ids.device
        ranks = tables.ranks_of(call.topk_ids, token_turns(len(call.topk_ids), tables.rank, device)).long()
        reached = torch.zeros((len(ranks), size + 1), dtype=torch.bool, device=device)
        reached.scatter_(1, torch.where(ranks < 0, size, ranks), True)
        sent = reached[:, :size].sum(0)
        sent[tables.rank] = 0
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent)
        out_rows, in_rows = sent.tolist(), arriving.tolist()
        if not runs:
            moved = (sum(out_rows) * row_bytes, sum(out_rows) * back)
        there = [torch.empty((sum(rows), row_bytes), dtype=torch.uint8, device=device) for rows in (in_rows, out_rows)]
        home = [torch.empty((sum(rows), back), dtype=torch.uint8, device=device) for rows in (out_rows, in_rows)]
        runs.append(functools.partial(_there_and_home, there, home, in_rows, out_rows))
    return runs, moved


def _there_and_home(
    there: Sequence[torch.Tensor], home: Sequence[torch.Tensor], in_rows: list[int], out_rows: list[int]
) -> None:
    dist.all_to_all_single(there[0], there[1], in_rows, out_rows)
    dist.all_to_all_single(home[0], home[1], out_rows, in_rows)


def kernel_runs_over_ranks(
    kernel: MoEKernel, calls: Sequence[Call], outs: Sequence[torch.Tensor], eager: bool
) -> tuple[list[Run], bool]:
    """One run a call, and whether they are replays of graphs.

    Args:
        kernel: Of all ranks, or of this rank alone.
        calls: This rank's.
        outs: [T,H], one a call, overwritten.
        eager: Whether nothing is captured.
    """
    runs: list[Run] = [functools.partial(kernel, *call, out=out) for call, out in zip(calls, outs, strict=True)]
    for run in runs:  # Each may have sizes of its own, whose kernels are compiled here.
        run()
    wait_for(outs[0].device)
    if eager or outs[0].device.type != "cuda" or not can_be_captured(kernel):
        return runs, False
    # Other threads, as NCCL's watchdog, go on meanwhile.
    return capture(runs, error_mode="thread_local"), True


def all_agree(is_so: bool, device: torch.device) -> bool:
    """Whether something is so on every rank."""
    found = torch.tensor([int(is_so)], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found.item())


def error_over_ranks(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of all ranks' rows together; NaN if one holds a NaN."""
    sums = torch.stack([(found.double() - expected.double()).square().sum(), expected.double().square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())
