"""`--ep`: runs a layer over several ranks, or compares token dispatchers.

Each rank is a process on this machine (`moereg.tuning.over_ranks`) or one started by torchrun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from moereg.cli._bench import check_routing, check_run_fits, platform_at_hand
from moereg.cli._explain import group_facts
from moereg.cli._options import ProblemFlags, Subject, UsageError, find_subject
from moereg.cli._output import console
from moereg.cli._progress import phase
from moereg.cli._show import format_us, machine, new_table, print_notices, versions_of
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.movement import MovementSelection, explain_movements
from moereg.platforms import Platform, torch_device
from moereg.plugins.modules import own_modules
from moereg.prepare_finalize.eplb import balance_experts
from moereg.runtime.python_process import python_command
from moereg.selection.result import SCHEMA
from moereg.tuning.inputs import num_calls
from moereg.tuning.timing import SECONDS

_GRACE_SECONDS: Final = 30.0
"""Time for the other ranks to report after the first one failed."""


@dataclasses.dataclass(frozen=True)
class EpResult:
    """Results of a bench or run over several ranks.

    Attributes:
        movement: The selection among token dispatchers, for the largest number of tokens.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        replicas: Number of replicas beyond one of each expert; None if experts are placed in slices.
        rows: A row per number of tokens, token dispatcher, number of parts and routing.
        failure: Why rows are missing; empty if none are.
        is_printed: Whether this process prints the result; under torchrun rank 0 does.
    """

    subject: Subject
    movement: MovementSelection
    measured_on: dict[str, Any]
    replicas: int | None
    rows: tuple[dict[str, Any], ...] = ()
    failure: str = ""
    is_printed: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether everything that ran is right; None if nothing could run."""
        if self.failure:
            return False
        if not self.is_printed:
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

    def show(self) -> None:
        """Prints a table of the rows, then the failure."""
        target = console(sys.stdout)
        subject, movement = self.subject, self.movement
        target.print(f"{subject.name or 'random weights'}: {subject.problem}")
        versions = versions_of(self.measured_on)
        placed = f", balanced with {self.replicas} replicas" if self.replicas is not None else ""
        target.print(f"{movement.group}{placed}, {machine(movement.platform)}, {versions}, {self.measured_on['date']}")
        if movement.winner is None:
            target.print(movement.table())
        if self.rows:
            table = new_table(
                "T", "routing", "way", "wire", "backend", "time", "one rank", "ratio", "bare", "error", ""
            )
            for row in self.rows:
                table.add_row(f"{row['tokens']:,}", row["routing"], _name(row), *_cells(row))
            target.print(table)
            target.print(
                "one rank: a rank's experts with as many routes, without a group; bare: the same tokens, routes and "
                "rows by all_to_all_single alone"
            )
        for row in self.rows:
            if row["failure"]:
                target.print(f"{_name(row)} at {row['tokens']:,} tokens, {row['routing']}: {row['failure']}")
            if row["one_rank_error"] is not None:
                same = "equal bits" if row["one_rank_equal"] else f"error {row['one_rank_error']:.1e}"
                target.print(f"{_name(row)} against the whole layer on one rank: {same}")
        print_notices(target, subject.notices)
        if self.failure:
            target.print(Text(f"FAILED: {self.failure}", style="bold red"))


def _name(row: dict[str, Any]) -> str:
    return f"{row['way']}, {row['batches']} parts" if row["batches"] > 1 else str(row["way"])


def _cells(row: dict[str, Any]) -> tuple[str | Text, ...]:
    if row["failure"]:
        return ("", "", "", "", "", "", "", Text("failed", style="bold red"))
    error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    if not row["passed"]:
        shown = Text(f"{error} > {row['tolerance']:.1e}", style="bold red")
        return (row["wire"], row["backend"], Text("WRONG", style="bold red"), "", "", "", shown, "")
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
) -> EpResult:
    """Compares token dispatchers on random weights, over ranks of this machine or torchrun's.

    Takes the options' values by name. If it `compares`, rank 0 also runs the whole layer alone.

    Raises:
        MoeregError: Anything that the user can fix.
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
    result = EpResult(subject, movement, where, replicas, is_printed=not rank)
    names = tuple(dict.fromkeys(decision.name for decision in movement.accepted))
    if not names:
        return result
    # On a CPU all ranks share the memory, and a comparison needs the whole layer on one rank.
    is_shared = platform.device_type == "cpu" or compares
    share = problem.num_experts if is_shared else -(-(problem.num_experts + (replicas or 0)) // size)
    part = dataclasses.replace(problem, num_local_experts=min(share, problem.num_experts))
    check_run_fits(part, max(counts) * size, torch_device(platform), 2, num_calls(max(counts)))
    from moereg.tuning.over_ranks import Job

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
    return dataclasses.replace(result, rows=tuple(rows), failure=failure, measured_on=where)


def run_group(flags: ProblemFlags, size: int, way: str | None, seed: int) -> EpResult:
    """Runs a layer over several ranks once, and compares it with the reference and with one rank.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    num_tokens = 64 if flags.tokens is None else flags.tokens
    platform = platform_at_hand("run --ep", flags.platform)
    subject = find_subject(dataclasses.replace(flags, tokens=num_tokens or None), None, None)
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
    """This process's rank if torchrun started it, else None.

    Raises:
        UsageError: torchrun's number of ranks differs from `--ep`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = int(os.environ["WORLD_SIZE"])
    if found != size:
        raise UsageError(f"--ep must be the number of ranks that torchrun started, {found}, got {size}")
    return int(os.environ["RANK"])


def _rows_of_ranks(job: Any, rank: int | None) -> tuple[list[dict[str, Any]], str]:
    """Runs a `Job` as this torchrun rank, or starts a process per rank if None.

    Returns:
        The rows, including those before a failure, and the failure; under torchrun only rank 0 has rows.
    """
    with tempfile.TemporaryDirectory(prefix="moereg-ep-") as folder:
        out = Path(folder) / "rows"
        job = dataclasses.replace(job, out=str(out), store=None if rank is not None else str(Path(folder) / "store"))
        if rank is not None:
            from moereg.tuning.over_ranks import run_rank

            run_rank(job, rank)
            failure = ""
        else:
            path = Path(folder) / "job"
            path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
            failure = _failure_of(path, job.size)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], failure


def _failure_of(job: Path, size: int) -> str:
    """The message of the first failed rank; empty if none failed."""
    ended: queue.Queue[tuple[int, int, str]] = queue.Queue()
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))} if size > 1 else {}
    with contextlib.ExitStack() as stack:
        for rank in range(size):
            command = python_command("moereg.tuning.over_ranks", str(job), str(rank))
            child = subprocess.Popen(
                command,
                env={**threads, **os.environ, "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.kill)
            threading.Thread(target=_wait, args=(rank, child, ended), daemon=True).start()
        texts: list[str] = []
        for _ in range(size):
            try:
                rank, code, text = ended.get(timeout=_GRACE_SECONDS if texts else None)
            except queue.Empty:
                break
            if code:
                texts.append(text or f"rank {rank} ended with {code}")
    return texts[0] if texts else ""


def _wait(rank: int, child: subprocess.Popen[str], ended: queue.Queue[tuple[int, int, str]]) -> None:
    _, err = child.communicate()
    lines = [line for line in (err or "").splitlines() if line.startswith(f"rank {rank}: ")]
    for line in (err or "").splitlines() if child.returncode and not lines else ():
        print(line, file=sys.stderr)
    ended.put((rank, child.returncode, lines[-1] if lines else ""))
