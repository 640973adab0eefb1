"""The conformance kit on a backend in many processes on all GPUs at once, since one compiler outlasts every check.

`python -m benches.h200.kit OUT.json SECONDS JOBS BACKEND... [--cells TEXT...]` runs what `moereg verify BACKEND` runs,
and writes the ledger's record of each cell that passed everything to OUT.json once its checks have ended. TEXT is a
part of an experts class's name. Checks that the time did not suffice for are told, and their cells have no record.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from moereg.evidence.ledger import Verification, merge_ledger
from moereg.platforms import current_platform
from moereg.testing.cases import is_imitated, runnable_platform
from moereg.testing.check import NO_TIME, CellName, Check, Outcome, Report, Result
from moereg.testing.suite import checks_of, run_check

AT_ONCE = 8
"""Checks of a cell that a process runs one after the other: they share kernels, which are then compiled once."""


def in_turns(checks: Sequence[Check]) -> Iterator[tuple[Check, ...]]:
    """Groups of checks of a cell, of each cell in turn, those with the most checks first."""
    by_cell: dict[CellName, list[Check]] = {}
    for check in checks:
        by_cell.setdefault(check.cell, []).append(check)
    groups = [
        [tuple(own[start : start + AT_ONCE]) for start in range(0, len(own), AT_ONCE)]
        for own in sorted(by_cell.values(), key=len, reverse=True)
    ]
    for turn in itertools.zip_longest(*groups):
        yield from filter(None, turn)


def runs_here(name: CellName) -> bool:
    """Whether this machine runs the cell itself, which alone is evidence."""
    cell = name.find()
    return runnable_platform(cell) is not None and not is_imitated(cell)


def run_group(checks: tuple[Check, ...], end: float) -> list[Result]:
    """Runs checks one after the other, in a worker process of this process."""
    return [Result(check, run_check(check) if time.time() < end else Outcome("skipped", NO_TIME)) for check in checks]


def take_gpu(gpus: SimpleQueue[int]) -> None:
    """Gives a new process one of the GPUs that this one sees, before torch looks for them."""
    number = gpus.get()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[number] if seen else str(number)


def results_of(group: concurrent.futures.Future[list[Result]], checks: Sequence[Check]) -> list[Result]:
    """Results of a group; if a process was killed, as for lack of memory, all that had not ended has crashed."""
    try:
        return group.result()
    except BrokenProcessPool as error:
        return [Result(check, Outcome("crashed", str(error))) for check in checks]


def report_of(backend: str, results: Sequence[Result], seconds: float) -> Report:
    """The report that `moereg verify` would make."""
    platform = current_platform()
    return Report(backend, str(platform), platform.device_name, {}, 0, tuple(results), {}, seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("jobs", type=int)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--cells", nargs="*", default=[""])
    options = parser.parse_args()
    start = time.time()
    checks = [
        check
        for backend in options.backends
        for check in checks_of(backend)
        if any(text in check.cell.experts for text in options.cells) and runs_here(check.cell)
    ]
    num_cells = len({check.cell for check in checks})
    print(f"{len(checks)} checks of {num_cells} cells, {options.jobs} processes", flush=True)
    spawned = multiprocessing.get_context("spawn")
    results: list[Result] = []
    left = Counter(check.cell for check in checks)
    platform = current_platform()
    gpus = spawned.SimpleQueue()
    for job in range(options.jobs):
        gpus.put(job % max(1, torch.cuda.device_count()))
    with concurrent.futures.ProcessPoolExecutor(options.jobs, spawned, take_gpu, (gpus,)) as pool:
        groups = {pool.submit(run_group, group, start + options.seconds): group for group in in_turns(checks)}
        for group in concurrent.futures.as_completed(groups):
            found = results_of(group, groups[group])
            results += found
            cell = groups[group][0].cell
            left[cell] -= len(found)
            if not left[cell]:
                own = report_of("", [result for result in results if result.check.cell == cell], 0.0)
                records = [Verification.of(name.find(), platform, count) for name, count in own.verified_cells.items()]
                merge_ledger(options.out, records)
            for result in found:
                if result.outcome.is_failure:
                    print(f"{result.outcome.status}: {result.check.id}: {result.outcome.message}", flush=True)
    report = report_of(",".join(options.backends), results, time.time() - start)
    print("| experts | schemes | passed | failed | not run | s |")
    for cell in report.cells:
        outcomes = [result.outcome for result in results if result.check.cell == cell]
        passed = sum(outcome.status == "passed" for outcome in outcomes)
        failed = sum(outcome.is_failure for outcome in outcomes)
        spent = sum(outcome.seconds for outcome in outcomes)
        print(f"| {cell} | {passed} | {failed} | {len(outcomes) - passed - failed} | {spent:.0f} |")
    for message in sorted({result.outcome.message for result in results if result.outcome.status == "skipped"}):
        print("not run:", message)
    total = sum(report.verified_cells.values())
    print(f"{total} of {len(checks)} checks in cells that passed everything, {report.seconds:.0f} s")
    return 0 if report.passed and total == len(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
