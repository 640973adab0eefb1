"""Every token dispatcher that fits a layer, over several ranks: numbers first, then times.

`python -m benches.over_ranks --ranks N --model NAME` starts N processes on this machine, over NCCL with a GPU each, or
over gloo with `--platform cpu`; `torchrun ... -m benches.over_ranks --model NAME` uses those of torchrun. The first
rank prints a table, or with `--json` a line of JSON per row. `--whole` also compares with the whole layer on one rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from benches.markdown import cell, table
from moereg.bench.inputs import ROUTINGS, Call, num_calls, random_call, random_weights
from moereg.bench.timing import (
    HELD_CYCLES,
    ROUNDS,
    SECONDS,
    Run,
    Timing,
    can_be_captured,
    capture,
    is_replay,
    wait_for,
)
from moereg.errors import EmulationWarning, GroupError, MoeregError, described
from moereg.evidence.provenance import provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform, current_platform, probe_cpu
from moereg.prepare_finalize import AllGather, AllToAll, GroupFacts, GroupPrepareFinalize
from moereg.prepare_finalize.eplb import balance_experts, count_routes
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables, token_turns
from moereg.prepare_finalize.wire import PlainWire, Wire
from moereg.selection.dispatcher import explain_dispatchers
from moereg.selection.modules import import_modules
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

_BATCH_SECONDS: Final = 2e-3
_MOST_AT_A_TIME: Final = 8
_LEAVING_SECONDS: Final = 20.0
_LIMIT_SECONDS: Final = 120.0  # Of a collective.


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings of all ranks.

    Attributes:
        tokens: Numbers of tokens of each rank.
        replicas: Experts beyond one for each of the layer, placed by the routing's loads; None for slices.
        whole: Whether rank 0 also runs the whole layer alone.
    """

    problem: MoEProblem
    dispatchers: Sequence[str] = ()
    tokens: Sequence[int] = ()
    routings: Sequence[str] = ("uniform",)
    replicas: int | None = None
    rounds: int = ROUNDS
    seconds: float = SECONDS
    seed: int = 0
    eager: bool = False
    whole: bool = False


class Rank:
    """Values shared by all rows."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device, self.problem = job, device, job.problem
        self.rank, self.size = rank, size = dist.get_rank(), dist.get_world_size()
        self.placement: ExpertPlacement | None = None
        held = ExpertPlacement.contiguous(self.problem.num_experts, size) if job.replicas is None else None
        if held is None:
            held = self.placement = self._balanced(job.replicas or 0)
        self.tables = PlacementTables(held, rank, device)
        experts = held.experts_of_rank[rank]
        self.part = dataclasses.replace(self.problem, num_local_experts=len(experts), placement="map")
        # If an expert has replicas, the reference uses the first one.
        first = [place if held.ranks_of_expert(e)[0] == rank else -1 for e, place in enumerate(held.expert_map(rank))]
        self.first = torch.tensor(first, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(job.seed)
        self.weights = random_weights(self.part, generator, device, experts=experts)

    def _balanced(self, num_replicas: int) -> ExpertPlacement:
        """A placement balanced by the loads of the last routing, such as `zipf` of `uniform,zipf`."""
        calls = calls_of_group(
            self.problem, max(self.job.tokens), self.size, self.job.routings[-1], self.job.seed, self.device
        )
        loads = torch.stack([count_routes(call.topk_ids, self.problem.num_experts) for call in calls]).sum(0).cpu()
        found: list[Any] = [balance_experts(loads, self.size, num_replicas)]
        dist.broadcast_object_list(found, src=0, device=self.device)
        placement: ExpertPlacement = found[0]
        return placement

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields a row per number of tokens, token dispatcher and routing."""
        for num_tokens in self.job.tokens:
            calls = {}
            for routing in self.job.routings:
                whole = calls_of_group(self.problem, num_tokens, self.size, routing, self.job.seed, self.device)
                own = slice(self.rank * num_tokens, (self.rank + 1) * num_tokens)
                calls[routing] = (whole[0], [Call(*(tensor[own].clone() for tensor in call)) for call in whole])
                del whole
            alone_us = {routing: self._one_rank_us(num_tokens, routing) for routing in calls}
            for dispatcher in self.job.dispatchers:
                yield from self._rows_of(dispatcher, num_tokens, calls, alone_us)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _one_rank_us(self, num_tokens: int, routing: str) -> float | None:
        """The time of equally many routes on this rank's experts without a group; None if it has too few experts."""
        share = self.part.num_local_experts
        if share < self.problem.top_k or num_tokens == 0:
            return None
        problem = dataclasses.replace(self.part, num_experts=share, placement="contiguous", max_num_tokens=num_tokens)
        calls = calls_of_group(problem, num_tokens, 1, routing, self.job.seed + 1, self.device)
        kernel = make_kernel(problem, self.weights)
        outs = [torch.empty_like(call.hidden_states) for call in calls]
        runs = self._runs(kernel, calls, outs)
        return time_over_ranks(runs, self.device, self.job.rounds, self.job.seconds).median_us

    def _rows_of(
        self,
        dispatcher: str,
        num_tokens: int,
        calls: dict[str, tuple[Call, list[Call]]],
        alone_us: dict[str, float | None],
    ) -> Iterator[dict[str, Any]]:
        problem = dataclasses.replace(self.problem, max_num_tokens=max(num_tokens, 1))
        empty = {"dispatcher": dispatcher, "tokens": num_tokens, **NO_ROW}
        kernel, failure = None, ""
        try:
            kernel = make_kernel(
                problem,
                self.weights,
                group=dist.group.WORLD,
                prepare_finalize=dispatcher,
                expert_placement=self.placement,
            )
        except GroupError:
            raise
        except MoeregError as error:
            failure = str(error).splitlines()[0]
        for routing, (whole, own) in calls.items():
            row = {**empty, "routing": routing, "one_rank_us": alone_us[routing]}
            if kernel is None:
                yield {**row, "failure": failure, "passed": False}
                continue
            moves = kernel.prepare_finalize
            assert isinstance(moves, GroupPrepareFinalize)
            chosen = moves.wire
            for wire in self._wires(chosen, kernel):
                moves.wire = wire
                yield {**row, **self._measured(kernel, num_tokens, whole, own, alone_us[routing])}
            moves.wire = chosen

    def _wires(self, chosen: Wire, kernel: MoEKernel) -> tuple[Wire, ...]:
        """The chosen wire format, plus 16 bits if token dispatcher and experts also take that."""
        takes_both = isinstance(kernel.prepare_finalize, (AllGather, AllToAll))
        if isinstance(chosen, PlainWire) or not takes_both or self.job.whole:
            return (chosen,)
        return (chosen, PlainWire(self.problem))

    def _runs(self, kernel: MoEKernel, calls: Sequence[Call], outs: Sequence[torch.Tensor]) -> list[Run]:
        """Like `kernel_runs`, but first calls the kernel with each of the calls, whose sizes over ranks differ."""
        runs: list[Run] = [functools.partial(kernel, *call, out=out) for call, out in zip(calls, outs, strict=True)]
        for run in runs:
            run()
        wait_for(self.device)
        if self.job.eager or self.device.type != "cuda" or not can_be_captured(kernel):
            return runs
        # Other threads, as NCCL's watchdog, go on meanwhile.
        return capture(runs, error_mode="thread_local")

    def _measured(
        self, kernel: MoEKernel, num_tokens: int, whole: Call, own: list[Call], one_rank_us: float | None
    ) -> dict[str, Any]:
        moves, winner = kernel.prepare_finalize, kernel.selection.winner
        assert isinstance(moves, GroupPrepareFinalize)
        assert winner is not None
        found: dict[str, Any] = {
            "wire": moves.wire.name,
            "activation_format": kernel.selection.problem.activation_format,
            **{name: getattr(winner, name) for name in ("backend", "experts", "computes", "tier")},
        }
        tolerance = layer_tolerance(self.problem, num_tokens, winner.scheme or winner.computes)
        expected = reference_experts(self.part, self.weights, *whole, expert_map=self.first, computes=winner.scheme)
        dist.all_reduce(expected)
        mine = expected[self.rank * num_tokens : (self.rank + 1) * num_tokens]
        outs = [torch.full_like(call.hidden_states, math.nan) for call in own]
        kernel(*own[0])
        first = kernel(*own[0], out=outs[0]).clone()
        error = error_over_ranks(first, mine)
        repeats = torch.tensor([int(torch.equal(kernel(*own[0]), first))], device=self.device)
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
        found |= {"relative_error": error, "tolerance": tolerance, "passed": error <= tolerance}
        found["repeats"] = bool(repeats.item())
        if self.job.whole:
            found |= self._compared(kernel, first, whole)
        if not found["passed"]:
            return found
        runs = self._runs(kernel, own, outs)
        timing = time_over_ranks(runs, self.device, self.job.rounds, self.job.seconds)
        outs[0].fill_(math.nan)
        runs[0]()
        error = error_over_ranks(outs[0], mine)
        is_captured = is_replay(runs[0])
        del runs
        if not error <= tolerance:  # NaN is wrong too.
            return {**found, "relative_error": error, "passed": False}
        row_bytes = sum(moves.wire.widths) + 8 * self.problem.top_k
        bare, moved = bare_collectives(self.problem, own, self.tables, row_bytes)
        bare_us = time_over_ranks(bare, self.device, self.job.rounds, self.job.seconds).median_us
        return {
            **found,
            "captured": is_captured,
            "time_us": timing.median_us,
            "p10_us": timing.p10_us,
            "p90_us": timing.p90_us,
            "bare_us": bare_us,
            "bytes_out": moved[0],
            "bytes_back": moved[1],
            "over_one_rank": None if one_rank_us is None else timing.median_us / one_rank_us,
        }

    def _compared(self, kernel: MoEKernel, first: torch.Tensor, whole: Call) -> dict[str, Any]:
        """Compares all ranks' outputs with the whole layer on rank 0."""
        parts = [torch.empty_like(first) for _ in range(self.size)]
        dist.all_gather(parts, first)
        found: list[Any] = [None]
        if self.rank == 0:
            generator = torch.Generator().manual_seed(self.job.seed)
            weights: ExpertWeights = random_weights(self.problem, generator, self.device)
            # With the same class if it fits the whole layer, so that bits can be equal.
            one = make_kernel(self.problem, weights)(*whole)
            together = torch.cat(parts)
            error = (together.double() - one.double()).norm() / one.double().norm()
            found = [{"one_rank_error": float(error), "one_rank_equal": torch.equal(together, one)}]
        dist.broadcast_object_list(found, src=0, device=self.device)
        result: dict[str, Any] = found[0]
        return result


NO_ROW: Final[dict[str, Any]] = {
    **dict.fromkeys(("routing", "wire", "activation_format"), ""),
    **dict.fromkeys(("backend", "experts", "computes", "tier", "relative_error", "tolerance", "passed", "failure")),
    **dict.fromkeys(("repeats", "one_rank_error", "one_rank_equal", "captured", "time_us", "p10_us", "p90_us")),
    **dict.fromkeys(("one_rank_us", "over_one_rank", "bare_us", "bytes_out", "bytes_back")),
}
"""An empty row, except for its token dispatcher and number of tokens."""


def calls_of_group(
    problem: MoEProblem, num_tokens: int, size: int, routing: str, seed: int, device: torch.device
) -> list[Call]:
    """Calls with all ranks' tokens, `num_tokens` per rank, in rank order; equal on every rank.

    Popular experts stay popular.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rank = torch.randperm(problem.num_experts, generator=generator, device=device) + 1
    return [random_call(problem, num_tokens * size, routing, generator, rank) for _ in range(num_calls(num_tokens))]


def time_over_ranks(runs: Sequence[Run], device: torch.device, rounds: int, seconds: float) -> Timing:
    """Times runs on all ranks at once, in turns; every rank has to call it.

    A sample is the slowest rank's mean over a batch. Takes `rounds` samples, or as many as fit in `seconds` but at
    least three.
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
    """Seconds of some runs on this rank, started by all ranks at once."""
    together = torch.zeros(1, device=device)
    if device.type != "cuda":
        dist.all_reduce(together)
        start = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait_for(device)
    torch.cuda._sleep(HELD_CYCLES)
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
    """Bare collectives: tokens of `row_bytes` sent once to each rank that needs them, and a row back, unpadded.

    Returns:
        A run per call of this rank, and the bytes that it sends and gets back in the first one.
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


def error_over_ranks(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of all ranks' rows together; NaN if any row has a NaN."""
    sums = torch.stack([(found.double() - expected.double()).square().sum(), expected.double().square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


HEAD: Final = (
    *("T", "routing", "dispatcher", "wire", "backend", "us", "alone us", "x", "bare us", "x(alone+bare)"),
    *("how", "bits", "error", "whole"),
)
"""Columns of `cells`: `alone` is a rank's experts with as many routes without a group, `bare` the collectives alone."""


def cells(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    found = [f"{row['tokens']:,}", row["routing"], row["dispatcher"], row["wire"], row["backend"] or ""]
    if row["failure"] or not row["passed"]:
        wrong = row["failure"] or f"WRONG {row['relative_error']} > {row['tolerance']}"
        return [*found, cell(wrong), *[""] * (len(HEAD) - len(found) - 1)]
    alone, bare, time_us, whole = (row[name] for name in ("one_rank_us", "bare_us", "time_us", "one_rank_error"))
    return [
        *found,
        f"{time_us:.1f}",
        f"{alone:.1f}" if alone else "-",
        f"{time_us / alone:.2f}" if alone else "-",
        f"{bare:.1f}",
        f"{time_us / ((alone or 0) + bare):.2f}",
        "graph" if row["captured"] else "eager",
        "same" if row["repeats"] else "DIFFER",
        f"{row['relative_error']:.1e}",
        "" if whole is None else "equal" if row["one_rank_equal"] else f"{whole:.1e}",
    ]


def run_rank(options: argparse.Namespace, platform: Platform) -> int:
    """One rank's work, in a process that torchrun started; returns the exit code."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_gpu = platform.device_type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    group = GroupFacts(size, "nccl" if is_gpu else "gloo", platform.device_type)
    problem, counts = problem_of(options), options.tokens or ((1, 64, 1024, 8192) if is_gpu else (1, 16))
    asked = dataclasses.replace(problem, max_num_tokens=max(counts))
    if options.replicas is not None:
        held = (problem.num_experts + options.replicas) // size
        asked = dataclasses.replace(asked, num_local_experts=held, placement="map")
    dispatcher = explain_dispatchers(asked, group, platform, require=options.dispatchers)
    if dispatcher.winner is None:
        raise MoeregError(f"no token dispatcher fits:\n{dispatcher.table()}")
    job = Job(
        problem,
        tuple(dict.fromkeys(decision.name for decision in dispatcher.accepted)),
        counts,
        options.routing,
        options.replicas,
        options.rounds,
        seed=options.seed,
        eager=options.eager,
        whole=options.whole,
    )
    if rank == 0:
        where = provenance(platform, ("torch", "triton"))
        print(f"{problem}, {group}, {where['device']}, {where['versions']}, {where['date']}", file=sys.stderr)
    limit = datetime.timedelta(seconds=_LIMIT_SECONDS)
    dist.init_process_group(group.backend, timeout=limit, device_id=device if is_gpu else None)
    rows = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)  # Rows name the tier.
        for row in Rank(job, device).rows():
            rows.append(row)
            if rank == 0 and options.json:
                lost = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
                print(json.dumps({**row, **dict.fromkeys(lost)}), flush=True)
    if rank == 0 and not options.json:
        print(table(HEAD, map(cells, rows)), flush=True)
    if is_gpu:
        # All rows are written, and NCCL may hang on a graph of its own at shutdown.
        last = threading.Timer(_LEAVING_SECONDS, os._exit, (0,))
        last.daemon = True
        last.start()
    dist.destroy_process_group()
    ran = [row for row in rows if not (row["failure"] or "").startswith("left out")]
    return 0 if all(row["passed"] for row in ran) else 1


def problem_of(options: argparse.Namespace) -> MoEProblem:
    if options.sizes:
        names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
        keywords: dict[str, Any] = dict(zip(names, options.sizes, strict=True))
    else:
        keywords = get_shape(options.model).problem_keywords()
    return MoEProblem(**keywords, quant=options.quant, dtype=options.dtype)


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 1:
        raise ValueError
    return found


def _routings(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(found).difference(ROUTINGS):
        raise argparse.ArgumentTypeError(f"takes {', '.join(ROUTINGS)}, got {', '.join(sorted(unknown))}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layer = parser.add_mutually_exclusive_group(required=True)
    layer.add_argument("--model", help="a known model's layer")
    layer.add_argument("--sizes", type=_counts, help="experts,top_k,hidden,intermediate")
    parser.add_argument("--ranks", type=int, help="processes to start here; none under torchrun")
    parser.add_argument("--quant", default="unquantized")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--platform", choices=("cpu",), help="cpu, on a machine that has GPUs")
    parser.add_argument("--module", action="append", default=[], help="a module or file that registers backends")
    parser.add_argument("--dispatchers", help="token dispatchers, as a,b; all that fit if left out")
    parser.add_argument("--tokens", type=_counts, help="of each rank, as 1,64")
    parser.add_argument("--routing", type=_routings, default=("uniform",), help="as uniform,zipf")
    parser.add_argument("--replicas", type=int, help="so many experts twice, placed by the last routing's loads")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="capture nothing in CUDA graphs")
    parser.add_argument("--whole", action="store_true", help="compare with the whole layer on one rank")
    parser.add_argument("--json", action="store_true", help="one line of JSON per row")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        if options.ranks is None:
            parser.error("say with --ranks how many processes to start, or start them with torchrun")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.ranks), "-m", "benches.over_ranks", *sys.argv[1:]]
        threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
        return subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ})
    code = 1
    try:
        import_modules(options.module)
        code = run_rank(options, probe_cpu() if options.platform else current_platform())
    except Exception as error:
        print(f"rank {os.environ['RANK']}: {described(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # At shutdown torch.distributed may wait for ranks that are gone.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
