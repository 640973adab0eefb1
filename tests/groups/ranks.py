"""Runs cases on the ranks of a group: one process imports torch and moereg, and forks a process for each rank.

`python -m tests.groups.ranks BACKEND NUM_RANKS SECONDS MODULE NAME...` runs cases of a module one after another and
prints a line of JSON for each rank: its results by case. A rank that ends early, or stops itself, has no line. With
NCCL rank i has GPU i.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def results_of(
    num_ranks: int, *names: str, seconds: float = 60, module: str = "tests.groups.cases", backend: str = "gloo"
) -> list[dict[str, Any]]:
    """What each rank found, by case; in a process of its own. A rank that ended early found nothing."""
    command = [sys.executable, "-m", "tests.groups.ranks", backend, str(num_ranks), str(seconds), module, *names]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=600)
        except BaseException:
            # The ranks are of its session, and wait for each other.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, stderr[-4000:]
    found: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    for line in stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            found[result.pop("rank")] = result
    return found


def value_of(result: dict[str, Any], name: str) -> Any:
    """What a rank found in a case; fails with its traceback where it raised."""
    value = result[name]
    assert not (isinstance(value, dict) and "traceback" in value), f"{name}: {value['traceback']}"
    return value


def _run_rank(
    rank: int, backend: str, num_ranks: int, seconds: float, module: str, names: list[str], store: str
) -> None:
    import torch

    torch.set_num_threads(1)
    # Memory that nothing wrote reads as NaN, whichever function of torch hands it out.
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
    cases = importlib.import_module(module)
    results: dict[str, Any] = {"rank": rank}
    for place, name in enumerate(names):
        # Each case has a group of its own, so that one that fails leaves the next alone.
        torch.distributed.init_process_group(
            backend,
            init_method=f"file://{store}.{place}",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=seconds),
        )
        try:
            results[name] = getattr(cases, name)(rank, num_ranks)
        except BaseException:
            results[name] = {"traceback": traceback.format_exc()}
        torch.distributed.destroy_process_group()
    os.write(1, (json.dumps(results) + "\n").encode())


def main() -> None:
    backend, num_ranks, seconds, module, *names = sys.argv[1:]
    importlib.import_module(module)
    from moereg.selection.loader import load_backends

    load_backends()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(int(num_ranks)):
            child = os.fork()
            if child == 0:
                try:
                    store = str(Path(folder) / "store")
                    _run_rank(rank, backend, int(num_ranks), float(seconds), module, names, store)
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        stopped = []
        for child in children:
            _, status = os.waitpid(child, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                stopped.append(child)
        # Ranks that stall for the test's sake, once the others have ended.
        for child in stopped:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
