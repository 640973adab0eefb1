"""`python -m tests.fuzz`: draws seeded cases for every area, and exits with 1 where one breaks its contract.

A case is stored while it runs, so that one that ends the process can be replayed too.
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.area import CORPUS, Area, draw_case, load_case, run_case, store_case
from tests.fuzz.checkpoints import AREAS


def main() -> int:
    """Runs the cases that the arguments ask for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="no case starts later (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other cases (%(default)s)")
    parser.add_argument("--area", choices=AREAS, action="append", help="only this one; may be repeated")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one stored case")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where failing cases are stored (%(default)s)")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        failure = run_case(AREAS[arguments.replay.resolve().parent.name], load_case(arguments.replay))
        print(failure or "holds")
        return int(failure is not None)
    chosen = {name: area for name, area in AREAS.items() if name in (arguments.area or AREAS)}
    return _run(chosen, arguments.cases, arguments.seconds, arguments.seed, arguments.corpus)


def _run(areas: Mapping[str, Area], num_cases: int, seconds: float, seed: int, corpus: Path) -> int:
    total = math.ceil(num_cases / len(areas))
    deadline = time.monotonic() + seconds
    num_run: collections.Counter[str] = collections.Counter()
    num_failed: collections.Counter[str] = collections.Counter()
    for name, index in ((name, index) for index in range(total) for name in areas):
        if time.monotonic() > deadline:
            break
        case, failure = draw_case(areas[name], seed, index), None
        path = store_case(areas[name], case, "ended the process", corpus)
        try:
            failure = run_case(areas[name], case)
        finally:
            if failure is None:
                path.unlink()
        num_run[name] += 1
        if failure is not None:
            num_failed[name] += 1
            store_case(areas[name], case, failure, corpus)
            print(f"{name}: {failure}\n    python -m tests.fuzz --replay {path}", flush=True)
    width = max(map(len, areas))
    for name in areas:
        cut = "" if num_run[name] == total else f" (of {total}: the time was up)"
        print(f"{name:{width}}  {num_run[name]:6} cases  {num_failed[name]:4} failures{cut}")
    return int(num_failed.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
