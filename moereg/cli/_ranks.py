"""Ranks of a group for a command: a process each on this machine, or those that torchrun has started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from moereg.cli._options import UsageError
from moereg.python_process import python_command

__all__ = ["find_torchrun_rank", "rows_of_ranks"]

_GRACE_SECONDS: Final = 30.0
"""After the first rank has failed, the others have so long to say what they saw."""


def find_torchrun_rank(size: int) -> int | None:
    """This process's rank where torchrun started it; None where nobody did.

    Raises:
        UsageError: There are other ranks than `--ep` says.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = int(os.environ["WORLD_SIZE"])
    if found != size:
        raise UsageError(f"--ep must be the number of ranks that torchrun started, {found}, got {size}")
    return int(os.environ["RANK"])


def rows_of_ranks(job: Any, rank: int | None) -> tuple[list[dict[str, Any]], str]:
    """Runs a job on all of its ranks.

    Args:
        job: A `Job` of `moereg.cli._rank`; where it writes and ranks meet is filled in here.
        rank: This process's, among those of torchrun; None to start a process for each rank.

    Returns:
        The rows, those before a failure included, and what failed; under torchrun only rank 0 has rows.
    """
    with tempfile.TemporaryDirectory(prefix="moereg-ep-") as folder:
        out = Path(folder) / "rows"
        job = dataclasses.replace(job, out=str(out), store=None if rank is not None else str(Path(folder) / "store"))
        if rank is not None:
            from moereg.cli._rank import run_rank

            run_rank(job, rank)
            failure = ""
        else:
            path = Path(folder) / "job"
            path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
            failure = _failure_of(path, job.size)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], failure


def _failure_of(job: Path, size: int) -> str:
    """The message of the first rank that failed; empty if none did."""
    ended: queue.Queue[tuple[int, int, str]] = queue.Queue()
    with _children(job, size) as children:
        for rank, child in enumerate(children):
            threading.Thread(target=_wait, args=(rank, child, ended), daemon=True).start()
        texts: list[str] = []
        for _ in children:
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


@contextlib.contextmanager
def _children(job: Path, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank, ended with the block."""
    children: list[subprocess.Popen[str]] = []
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))} if size > 1 else {}
    try:
        for rank in range(size):
            command = python_command("moereg.cli._rank", str(job), str(rank))
            children.append(
                subprocess.Popen(
                    command,
                    env={**threads, **os.environ, "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
