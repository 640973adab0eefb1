"""Plants mutants in a copy of the tree and runs the tests that have to see them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.mutants.mutant import ROOT, Mutant

NOT_COPIED: Final = (".[!cp]*", "__pycache__", "build", "dist")  # Of what begins with a dot, some belongs to the tree.
CAUGHT: Final = "caught"
SURVIVED: Final = "SURVIVED"
TIMEOUT: Final = "TIMEOUT"
BROKEN: Final = "TESTS DID NOT RUN"

_PASSED: Final = 0
"""pytest's exit code when tests ran and none failed."""

# A mutant's tests run in a fork of a process that has imported these: half of the time of a short test. triton is left
# out: it reads the environment when it is imported.
_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["hypothesis", "numpy", "pytest", "torch"])
# Kernels are interpreted by one thread.
os.environ["OMP_NUM_THREADS"] = "1"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a mutant."""

    outcome: str
    seconds: float
    detail: str


def judge(
    root: Path, mutants: Iterable[Mutant], *, jobs: int = 1, limit_s: float = 120.0, options: tuple[str, ...] = ()
) -> Iterator[tuple[Mutant, Verdict]]:
    """Verdicts as they come.

    Args:
        root: The tree. It is copied once a job and not written to.
        jobs: Number of copies at the same time.
        limit_s: Seconds that the tests of one mutant may take.
        options: More arguments for pytest.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copies.put(copy_tree(root, Path(directory) / str(number)))

        def work(mutant: Mutant) -> tuple[Mutant, Verdict]:
            copy = copies.get()
            try:
                return mutant, judge_one(copy, mutant, limit_s=limit_s, options=options)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
            for done in concurrent.futures.as_completed([threads.submit(work, mutant) for mutant in mutants]):
                yield done.result()


def copy_tree(root: Path, target: Path) -> Path:
    """A copy of the tree without built and cached files."""
    shutil.copytree(root, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return target


def judge_one(copy: Path, mutant: Mutant, *, limit_s: float, options: tuple[str, ...] = ()) -> Verdict:
    """Plants the mutant, runs its tests, and puts the text back."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        _write(file, mutant.planted_in(text))
        return run_tests(copy, mutant.tests, limit_s=limit_s, options=options)
    finally:
        _write(file, text)


def run_tests(copy: Path, tests: tuple[str, ...], *, limit_s: float, options: tuple[str, ...] = ()) -> Verdict:
    """The tests' verdict on the unchanged tree; `detail` names the first that failed."""
    start = time.perf_counter()
    log = copy / "pytest.log"
    # The plugin of the moereg that is installed would be imported before the copy's.
    without = ("-p", "no:cacheprovider", "-p", "no:moereg.testing.pytest_plugin")
    arguments = ["-x", "-q", "--tb=no", *without, *options, *tests]
    process = _FORKS.Process(target=_run_pytest, args=(ROOT, copy, arguments, log))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        # With the processes that a test may have started.
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return Verdict(TIMEOUT, limit_s, " ".join(tests))
    seconds = time.perf_counter() - start
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
    # `ERROR ` and a file: it could not be imported, as it could without the fault. `ERROR: ` is pytest's own.
    if process.exitcode not in (None, _PASSED) and failed:
        # An id may hold spaces; the test's message follows it.
        return Verdict(CAUGHT, seconds, failed.partition(" ")[2].partition(" - ")[0])
    # A process that is killed from outside, for want of memory, says nothing about the mutant.
    if process.exitcode is not None and process.exitcode < 0 and process.exitcode != -signal.SIGKILL:
        return Verdict(CAUGHT, seconds, f"the tests' process died of {signal.Signals(-process.exitcode).name}")
    last = next((line for line in reversed(lines) if line), f"exit code {process.exitcode}")
    return Verdict(SURVIVED if process.exitcode == _PASSED and " passed" in last else BROKEN, seconds, last)


def _run_pytest(root: Path, copy: Path, arguments: list[str], log: Path) -> None:
    """Runs pytest in the copy, in a separate process that has imported only this module of the tree."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry).resolve() != root)]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "moereg"):
            del sys.modules[name]
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    # Not `sys.exit`: threads that a test left must not keep the process alive.
    os._exit(int(code))


def _write(file: Path, text: str) -> None:
    """Writes a module, and removes its bytecode: a change within a second that keeps the size would go unnoticed."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
