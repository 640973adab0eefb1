"""Runs cases on the ranks of a gloo group: one process imports torch and moereg, and forks a process for each rank.

`python -m tests.groups.ranks NUM_RANKS SECONDS NAME...` runs cases of `tests/groups/cases.py` one after another and
prints a line of JSON for each rank: its results by case. A rank that ends early has no line.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def results_of(
    num_ranks: int, *names: str, seconds: float = 60, module: str = "tests.groups.cases"
) -> list[dict[str, Any]]:
    """What each rank found, by case; in a process of its own. A rank that ended early found nothing."""
    command = [sys.executable, "-m", "tests.groups.ranks", str(num_ranks), str(seconds), module, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            found[result.pop("rank")] = result
    for result in found:
        for name, value in result.items():
            assert not (isinstance(value, dict) and "traceback" in value), f"{name}: {value['traceback']}"
    return found


def _run_rank(rank: int, num_ranks: int, seconds: float, module: str, names: list[str], store: str) -> None:
    import torch

    torch.set_num_threads(1)
    # Memory that nothing wrote reads as NaN, whichever function of torch hands it out.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = importlib.import_module(module)
    results: dict[str, Any] = {"rank": rank}
    for place, name in enumerate(names):
        # Each case has a group of its own, so that one that fails leaves the next alone.
        torch.distributed.init_process_group(
            "gloo",
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
    num_ranks, seconds, module, names = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]
    importlib.import_module(module)
    from moereg.discovery import load_backends

    load_backends()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                try:
                    _run_rank(rank, num_ranks, seconds, module, names, str(Path(folder) / "store"))
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
