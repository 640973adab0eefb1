"""The work of `--ep`: a layer over several ranks, explained, run or compared way by way."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

from moereg.balancing import balance_experts
from moereg.cli._bench import check_routing
from moereg.cli._machine import platform_at_hand
from moereg.cli._memory import check_run_fits
from moereg.cli._options import ProblemFlags, UsageError
from moereg.cli._progress import phase
from moereg.cli._ranks import find_torchrun_rank, rows_of_ranks
from moereg.cli._subject import Subject, find_subject
from moereg.dispatch import explain_backends
from moereg.movement import MovementSelection, explain_movements
from moereg.platforms import Platform, torch_device
from moereg.prepare_finalize import GroupFacts
from moereg.selection import SCHEMA, Selection
from moereg.testing.provenance import clocks, provenance
from moereg.tuning.inputs import num_calls
from moereg.tuning.timing import SECONDS

__all__ = ["EpExplanation", "EpResult", "bench_group", "explain_group", "run_group"]


@dataclasses.dataclass(frozen=True)
class EpExplanation:
    """How a layer would run over several ranks.

    Attributes:
        subject: The layer.
        movement: Every way of moving tokens.
        selection: Every backend, for the problem that the experts of a rank see; of a rank's share if no way fits.
    """

    subject: Subject
    movement: MovementSelection
    selection: Selection

    @property
    def fits(self) -> bool:
        """Whether a way and a backend fit."""
        return self.movement.winner is not None and self.selection.winner is not None


@dataclasses.dataclass(frozen=True)
class EpResult:
    """Results of a bench or run over several ranks.

    Attributes:
        subject: The layer.
        movement: Every way, at the largest number of tokens.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        replicas: Experts beyond one for each of the layer; None where experts are in slices.
        rows: A row for each number of tokens, way, number of parts and routing.
        failure: Why rows are missing; empty if none are.
        is_told: Whether this process tells the result: under torchrun rank 0 does.
    """

    subject: Subject
    movement: MovementSelection
    measured_on: dict[str, Any]
    replicas: int | None
    rows: tuple[dict[str, Any], ...] = ()
    failure: str = ""
    is_told: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether everything that ran is right; None if nothing could run."""
        if self.failure:
            return False
        if not self.is_told:
            return True
        ran = [row for row in self.rows if not (row["failure"] or "").startswith("left out")]
        return all(row["passed"] for row in ran) if ran else None

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg bench --ep --json` prints."""
        group = self.movement.group
        return {
            "schema": SCHEMA,
            "model": self.subject.name,
            "problem": self.subject.problem.to_dict(),
            "platform": str(self.movement.platform),
            **{name: self.measured_on[name] for name in ("device", "versions", "commit", "date")},
            "clocks": self.measured_on.get("clocks", {}),
            "ranks": group.size,
            "transport": group.transport,
            "balanced": self.replicas is not None,
            "replicas": self.replicas or 0,
            "rows": list(self.rows),
            "skipped": [
                {"way": decision.name, "reasons": decision.to_dict()["reasons"]}
                for decision in self.movement.decisions
                if not decision.accepted
            ],
            "failure": self.failure or None,
            "notices": list(self.subject.notices),
        }


def _group_facts(size: int, platform: Platform) -> GroupFacts:
    if platform.device_type == "cpu":
        return GroupFacts(size, "gloo", "cpu")
    return GroupFacts(size, "nccl", platform.device_type)


def explain_group(flags: ProblemFlags, subject: Subject, size: int, way: str | None) -> EpExplanation:
    """How a layer would run over so many ranks, here or on a named platform. Starts no process.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    platform = explain_backends(subject.problem, flags.platform).platform
    movement = explain_movements(subject.problem, _group_facts(size, platform), platform, require=way)
    winner = movement.winner
    problem = movement.problem if winner is None else movement.experts_problem(winner)
    return EpExplanation(subject, movement, subject.noted(explain_backends(problem, platform, **flags.request())))


def bench_group(
    flags: ProblemFlags,
    size: int,
    ways: str | None,
    token_counts: Sequence[int] | None,
    routing: str,
    rounds: int,
    seed: int,
    replicas: int | None,
    eager: bool,
    batches: Sequence[int] = (1,),
    compares: bool = False,
) -> EpResult:
    """Compares ways of moving tokens on random weights, over ranks of this machine or torchrun's.

    Args:
        flags: The layer.
        size: Ranks.
        ways: Names, `a,b`; all that fit where None.
        token_counts: Tokens of each rank.
        routing: Names of routings, `a,b`.
        rounds: Samples of each row, at most.
        seed: Of everything random.
        replicas: Experts beyond one for each of the layer, balanced by the loads; slices where None.
        eager: Whether nothing is captured.
        batches: Parts into which calls are cut, each in turn.
        compares: Whether rank 0 also runs the whole layer alone.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    if flags.require or flags.prefer or flags.deny:
        raise UsageError("--ep takes no --require, --prefer or --deny; set MOEREG_REQUIRE, which every rank reads")
    if importlib.util.find_spec("torch.distributed") is None:
        raise UsageError("--ep needs a torch with torch.distributed; install another build")
    routings = tuple(dict.fromkeys(word.strip() for word in routing.split(",")))
    for name in routings:
        check_routing(name)
    platform = platform_at_hand("bench --ep", flags.platform)
    counts = tuple(token_counts or ((1, 16) if platform.device_type == "cpu" else (1, 64, 1024, 8192)))
    subject = find_subject(flags, None, None)
    rank = find_torchrun_rank(size)
    _check_gpus(size, platform, rank)
    problem = dataclasses.replace(subject.problem, max_num_tokens=max(1, *counts))
    if replicas is None:
        movement = explain_movements(problem, _group_facts(size, platform), platform, require=ways)
    else:
        balance_experts([1.0] * problem.num_experts, size, replicas)  # Refuses numbers that do not fit.
        held = (problem.num_experts + replicas) // size
        mapped = dataclasses.replace(problem, num_local_experts=held, placement="map")
        movement = explain_movements(mapped, _group_facts(size, platform), platform, require=ways)
    where = provenance(platform, ("torch", "triton"))
    result = EpResult(subject, movement, where, replicas, is_told=not rank)
    names = tuple(dict.fromkeys(decision.name for decision in movement.accepted))
    if not names:
        return result
    # On a CPU all ranks share the memory, and a comparison needs the whole layer on one.
    is_shared = platform.device_type == "cpu" or compares
    share = problem.num_experts if is_shared else -(-(problem.num_experts + (replicas or 0)) // size)
    part = dataclasses.replace(problem, num_local_experts=min(share, problem.num_experts))
    check_run_fits(part, max(counts) * size, torch_device(platform), 2, num_calls(max(counts)))
    from moereg.cli._rank import Job

    job = Job(
        problem=subject.problem.to_dict(),
        size=size,
        device_type=platform.device_type,
        ways=names,
        batches=tuple(dict.fromkeys(batches)),
        tokens=counts,
        routings=routings,
        replicas=replicas,
        rounds=rounds,
        seconds=SECONDS,
        seed=seed,
        eager=eager,
        compares=compares,
        out="",
        store=None,
    )
    with phase(f"running {', '.join(names)} on {size} ranks"):
        rows, failure = rows_of_ranks(job, rank)
    where = {**where, **clocks(platform)}
    return dataclasses.replace(result, rows=tuple(rows), failure=failure, measured_on=where)


def run_group(flags: ProblemFlags, size: int, way: str | None, seed: int) -> EpResult:
    """Runs a layer over several ranks once, and compares it with the reference and with the layer on one rank.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    num_tokens = 64 if flags.tokens is None else flags.tokens
    platform = platform_at_hand("run --ep", flags.platform)
    subject = find_subject(dataclasses.replace(flags, tokens=num_tokens or None), None, None)
    if way is None:
        movement = explain_movements(subject.problem, _group_facts(size, platform), platform)
        way = movement.winner.name if movement.winner is not None else None
    flags = dataclasses.replace(flags, tokens=None)
    return bench_group(flags, size, way, (num_tokens,), "uniform", 12, seed, None, False, compares=True)


def _check_gpus(size: int, platform: Platform, rank: int | None) -> None:
    if platform.device_type != "cuda" or rank is not None:
        return
    import torch

    found = torch.cuda.device_count()
    if size > found:
        raise UsageError(
            f"--ep must be at most the GPUs of this machine, {found}, got {size}; --platform cpu runs over gloo, and "
            "torchrun over several machines"
        )
