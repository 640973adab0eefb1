"""`python -m tests.mutants`: plants drawn faults one at a time and runs the tests that reach each.

It prints what survives: a test to write, unless the fault changes nothing that anybody could see. `--gpu` plants the
faults of `gpu.txt` instead, each with the tests that it names.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
import time
from pathlib import Path

from tests.mutants.generate import faults_in
from tests.mutants.mutant import ROOT, Mutant, read_table
from tests.mutants.reach import Reach, modules
from tests.mutants.run import CAUGHT, TIMEOUT, judge

_HOPPER = "moereg/kernels/hopper/"
"""Gluon has no interpreter: faults there are for `--gpu`."""


def main() -> int:
    """Runs the mutants that the command line asks for; 0 where at least three of four were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--number", type=int, default=60, help="faults that are drawn (default 60)")
    parser.add_argument("--only", default="", help="only in modules whose path begins so, e.g. moereg/layer/")
    parser.add_argument("--jobs", type=int, default=2, help="trees that are worked on at once (default 2)")
    parser.add_argument("--seconds", type=float, default=45.0, help="that the tests of a fault take (default 45)")
    parser.add_argument("--gpu", action="store_true", help="the faults that only a GPU shows")
    arguments = parser.parse_args()
    if arguments.gpu:
        chosen = list(read_table(Path(__file__).parent / "gpu.txt"))
        return _plant(chosen, 1, 600.0, ("-m", "gpu"), least=1.0)
    try:
        reach = Reach()
    except FileNotFoundError:
        parser.error("which tests reach which lines is not known; make reach")
    chosen = _draw(reach, arguments.only, arguments.number, arguments.seed, arguments.seconds)
    return _plant(chosen, arguments.jobs, 4 * arguments.seconds + 60, ("-m", "not gpu"), least=0.75)


def _draw(reach: Reach, prefix: str, number: int, seed: int, seconds: float) -> list[Mutant]:
    """Draws a module, and then one of its faults that a test reaches."""
    faults: dict[str, list[Mutant]] = {}
    num_unreached = 0
    for path in modules():
        if path.startswith(prefix) and not path.startswith(_HOPPER) and path not in reach.changed:
            found = list(faults_in(path, (ROOT / path).read_text(encoding="utf-8")))
            reached = [fault for fault in found if reach.is_reached(fault)]
            num_unreached += len(found) - len(reached)
            if reached:
                faults[path] = reached
    total = sum(len(found) for found in faults.values())
    print(f"{total} faults in {len(faults)} modules; {num_unreached} more on lines that no test here reaches")
    if reach.changed:
        print(f"{len(reach.changed)} modules have changed since `make reach` and are left out")
    rng = random.Random(seed)
    drawn: list[Mutant] = []
    while len(drawn) < min(number, total):
        fault = rng.choice(faults[rng.choice(list(faults))])
        if fault not in drawn:
            drawn.append(fault)
    drawn = [dataclasses.replace(fault, tests=reach.tests_of(fault, seconds)) for fault in drawn]
    if slow := [fault for fault in drawn if not fault.tests]:
        print(f"{len(slow)} of them left out: no test of at most {seconds:g} s reaches them")
    return [fault for fault in drawn if fault.tests]


def _plant(chosen: list[Mutant], jobs: int, limit_s: float, options: tuple[str, ...], least: float) -> int:
    """Prints a line per mutant and the totals of each room; returns the exit code."""
    start = time.perf_counter()
    totals: dict[str, collections.Counter[bool]] = collections.defaultdict(collections.Counter)
    survivors = []
    for number, (mutant, verdict) in enumerate(judge(ROOT, chosen, jobs=jobs, limit_s=limit_s, options=options), 1):
        is_caught = verdict.outcome in (CAUGHT, TIMEOUT)
        totals["/".join(mutant.file.split("/")[:2])][is_caught] += 1
        print(f"{number:3} {verdict.outcome:<8} {verdict.seconds:5.1f} s  {mutant} ({verdict.detail})", flush=True)
        if not is_caught:
            survivors.append(mutant)
    print()
    for room, total in sorted(totals.items()):
        print(f"{room:<24} {total[True]} of {total.total()} caught")
    caught = len(chosen) - len(survivors)
    print(f"{'all':<24} {caught} of {len(chosen)} caught in {time.perf_counter() - start:.0f} s")
    for mutant in survivors:
        print(f"not caught: {mutant}")
    return 0 if caught >= least * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
