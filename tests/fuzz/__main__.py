"""`python -m tests.fuzz`: draws seeded cases for every area, and exits with 1 where one breaks its contract."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.fuzz.area import CORPUS, Area, draw_case, find_areas, load_case, run_case, store_case
from tests.fuzz.pool import Worker

_NUM_PROCESSES: Final = 2


def main() -> int:
    """Runs the cases that the arguments ask for; the exit code."""
    areas = find_areas()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="no case starts later (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other cases (%(default)s)")
    parser.add_argument("--area", choices=areas, action="append", help="only this one; may be repeated")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one stored case in this process")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where failing cases are stored (%(default)s)")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        failure = run_case(areas[arguments.replay.resolve().parent.name], load_case(arguments.replay))
        print(failure or "holds")
        return int(failure is not None)
    chosen = {name: area for name, area in areas.items() if name in (arguments.area or areas)}
    return _run(chosen, arguments.cases, arguments.seconds, arguments.seed, arguments.corpus)


def _run(areas: Mapping[str, Area], num_cases: int, seconds: float, seed: int, corpus: Path) -> int:
    total = math.ceil(num_cases / len(areas))
    tasks = ((name, index) for index in range(total) for name in areas)
    lock = threading.Lock()
    deadline = time.monotonic() + seconds
    num_run: collections.Counter[str] = collections.Counter()
    num_failed: collections.Counter[str] = collections.Counter()
    spent_s: collections.Counter[str] = collections.Counter()

    def work() -> None:
        worker = Worker()
        try:
            while time.monotonic() < deadline:
                with lock:
                    name, index = next(tasks, (None, 0))
                if name is None:
                    return
                start = time.monotonic()
                failure = worker.run(areas[name], seed, index)
                with lock:
                    spent_s[name] += time.monotonic() - start
                    num_run[name] += 1
                    if failure is not None:
                        num_failed[name] += 1
                        path = store_case(areas[name], draw_case(areas[name], seed, index), failure, corpus)
                        print(f"{name}: {failure}\n    python -m tests.fuzz --replay {path}", flush=True)
        finally:
            worker.stop()

    with concurrent.futures.ThreadPoolExecutor(_NUM_PROCESSES) as threads:
        for future in [threads.submit(work) for _ in range(_NUM_PROCESSES)]:
            future.result()
    width = max(map(len, areas))
    for name in areas:
        cut = "" if num_run[name] == total else f" (of {total}: the time was up)"
        print(f"{name:{width}}  {num_run[name]:6} cases  {num_failed[name]:4} failures  {spent_s[name]:7.1f} s{cut}")
    return int(num_failed.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
