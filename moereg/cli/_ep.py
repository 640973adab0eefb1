"""`--ep`: runs a layer over several ranks, or compares token dispatchers.

Each rank is a process on this machine (`moereg.bench.over_ranks`) or one started by torchrun.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from moereg.bench.inputs import num_calls
from moereg.bench.timing import SECONDS
from moereg.cli._bench import DEFAULT_TOKENS, check_routing, check_run_fits, platform_at_hand
from moereg.cli._explain import group_facts
from moereg.cli._options import ProblemFlags, UsageError, find_subject
from moereg.cli._output import Result, code_of_verdict, print_aside
from moereg.cli._progress import phase
from moereg.cli._show import bad, format_us, machine, new_table, print_notices, say, versions_of
from moereg.evidence.provenance import clocks, provenance
from moereg.platforms import Platform, torch_device
from moereg.prepare_finalize.eplb import balance_experts
from moereg.runtime.python_process import python_command
from moereg.selection.modules import own_modules
from moereg.selection.movement import explain_movements
from moereg.selection.result import SCHEMA

_GRACE_SECONDS: Final = 30.0
"""Time for the other ranks to report after the first one failed."""


def _passed(rows: Sequence[Mapping[str, Any]], failure: str) -> bool | None:
    """Whether everything that ran is right; None if nothing could run."""
    ran = [row for row in rows if not (row["failure"] or "").startswith("left out")]
    return False if failure else all(row["passed"] for row in ran) if ran else None


def _name(row: dict[str, Any]) -> str:
    return f"{row['way']}, {row['batches']} parts" if row["batches"] > 1 else str(row["way"])


def _cells(row: dict[str, Any]) -> tuple[str | Text, ...]:
    if row["failure"]:
        return (*[""] * 7, bad("failed"))
    error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    if not row["passed"]:
        return (row["wire"], row["backend"], bad("WRONG"), "", "", "", bad(f"{error} > {row['tolerance']:.1e}"), "")
    one, over = row["one_rank_us"], row["over_one_rank"]
    notes = ["captured"] if row["captured"] else []
    notes += [] if row["repeats"] else ["bits differ between calls"]
    return (
        row["wire"],
        row["backend"],
        format_us(row["time_us"]),
        format_us(one) if one is not None else "-",
        f"{over:.2f}" if over is not None else "-",
        format_us(row["bare_us"]),
        error,
        ", ".join(notes),
    )


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
) -> Result | None:
    """Compares token dispatchers on random weights, over ranks here or torchrun's, whose rank 0 has a result.

    If it `compares`, rank 0 also runs the whole layer alone.
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
    subject = find_subject(flags)
    rank = _torchrun_rank(size)
    _check_gpus(size, platform, rank)
    problem = dataclasses.replace(subject.problem, max_num_tokens=max(1, *counts))
    if replicas is None:
        movement = explain_movements(problem, group_facts(size, platform), platform, require=ways)
    else:
        balance_experts([1.0] * problem.num_experts, size, replicas)  # Refuses numbers that do not fit.
        held = (problem.num_experts + replicas) // size
        mapped = dataclasses.replace(problem, num_local_experts=held, placement="map")
        movement = explain_movements(mapped, group_facts(size, platform), platform, require=ways)
    where = provenance(platform, ("torch", "triton"))
    names = tuple(dict.fromkeys(decision.name for decision in movement.accepted))
    rows: list[dict[str, Any]] = []
    failure = ""
    if names:
        # On a CPU all ranks share the memory, and a comparison needs the whole layer on one rank.
        is_shared = platform.device_type == "cpu" or compares
        share = problem.num_experts if is_shared else -(-(problem.num_experts + (replicas or 0)) // size)
        part = dataclasses.replace(problem, num_local_experts=min(share, problem.num_experts))
        check_run_fits(part, max(counts) * size, torch_device(platform), 2, num_calls(max(counts)))
        from moereg.bench.over_ranks import Job

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
            modules=own_modules(),
        )
        with phase(f"running {', '.join(names)} on {size} ranks"):
            rows, failure = _rows_of_ranks(job, rank)
        where = {**where, **clocks(platform)}
    if rank:
        return None
    group = movement.group
    values = {
        "schema": SCHEMA,
        "model": subject.name,
        "problem": subject.problem.to_dict(),
        "platform": str(movement.platform),
        **{name: where[name] for name in ("device", "versions", "commit", "date")},
        "clocks": where.get("clocks", {}),
        "ranks": group.size,
        "transport": group.transport,
        "balanced": replicas is not None,
        "replicas": replicas or 0,
        "rows": list(rows),
        "skipped": [
            {"way": decision.name, "reasons": decision.to_dict()["reasons"]}
            for decision in movement.decisions
            if not decision.accepted
        ],
        "failure": failure or None,
        "notices": list(subject.notices),
    }

    def show() -> None:
        placed = f", balanced with {replicas} replicas" if replicas is not None else ""
        here = f"{machine(movement.platform)}, {versions_of(where)}, {where['date']}"
        say(f"{subject.name or 'random weights'}: {subject.problem}", f"{group}{placed}, {here}")
        if movement.winner is None:
            say(movement.table())
        if rows:
            columns = (">T", "routing", "way", "wire", "backend", ">time", "one rank", "ratio", "bare", ">error", "")
            cells = [(f"{row['tokens']:,}", row["routing"], _name(row), *_cells(row)) for row in rows]
            say(
                new_table(*columns, rows=cells),
                "one rank: a rank's experts with as many routes, without a group; bare: the same tokens, routes and "
                "rows by all_to_all_single alone",
            )
        for row in rows:
            if row["failure"]:
                say(f"{_name(row)} at {row['tokens']:,} tokens, {row['routing']}: {row['failure']}")
            if row["one_rank_error"] is not None:
                same = "equal bits" if row["one_rank_equal"] else f"error {row['one_rank_error']:.1e}"
                say(f"{_name(row)} against the whole layer on one rank: {same}")
        print_notices(subject.notices)
        if failure:
            say(bad(f"FAILED: {failure}"))

    return Result(values, show, code_of_verdict(_passed(rows, failure)))


def run_group(flags: ProblemFlags, size: int, way: str | None, seed: int) -> Result | None:
    """Runs a layer over several ranks once, and compares it with the reference and with one rank."""
    num_tokens = DEFAULT_TOKENS if flags.tokens is None else flags.tokens
    platform = platform_at_hand("run --ep", flags.platform)
    subject = find_subject(dataclasses.replace(flags, tokens=num_tokens or None))
    if way is None:
        movement = explain_movements(subject.problem, group_facts(size, platform), platform)
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


def _torchrun_rank(size: int) -> int | None:
    """This process's rank if torchrun started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = int(os.environ["WORLD_SIZE"])
    if found != size:
        raise UsageError(f"--ep must be the number of ranks that torchrun started, {found}, got {size}")
    return int(os.environ["RANK"])


def _rows_of_ranks(job: Any, rank: int | None) -> tuple[list[dict[str, Any]], str]:
    """The rows of a `Job`, run as this torchrun rank or by a process per rank, and how one of these failed, if so."""
    with tempfile.TemporaryDirectory(prefix="moereg-ep-") as folder:
        out = Path(folder) / "rows"
        job = dataclasses.replace(job, out=str(out), store=None if rank is not None else str(Path(folder) / "store"))
        if rank is not None:
            from moereg.bench.over_ranks import run_rank

            run_rank(job, rank)
            failure = ""
        else:
            path = Path(folder) / "job"
            path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
            failure = _failure_of(path, job.size)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], failure


def _failure_of(job: Path, size: int) -> str:
    """Runs a process per rank; returns the message of the first one that failed, empty if none did."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))} if size > 1 else {}
    children: list[subprocess.Popen[str]] = []
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        try:
            for rank in range(size):
                command = python_command("moereg.bench.over_ranks", str(job), str(rank))
                environment = {**threads, **os.environ, "LOCAL_RANK": str(rank)}
                null = subprocess.DEVNULL
                children.append(
                    subprocess.Popen(
                        command, env=environment, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True
                    )
                )
            ends = [pool.submit(_message_of, rank, child) for rank, child in enumerate(children)]
            first = next(filter(None, (end.result() for end in concurrent.futures.as_completed(ends))), "")
            concurrent.futures.wait(ends, timeout=_GRACE_SECONDS)
        finally:
            for child in children:
                child.kill()
    return first


def _message_of(rank: int, child: subprocess.Popen[str]) -> str:
    """Waits for a rank's process; returns why it failed, empty if it did not."""
    lines = child.communicate()[1].splitlines()
    own = [line for line in lines if line.startswith(f"rank {rank}: ")]
    if not child.returncode:
        return ""
    for line in lines if not own else ():
        print_aside(line)
    return own[-1] if own else f"rank {rank} ended with {child.returncode}"
