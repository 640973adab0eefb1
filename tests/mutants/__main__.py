"""`python -m tests.mutants`: plants the faults of the tables one at a time; exit 1 where the tests do not see one."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutant import Mutant, load_tables
from tests.mutants.run import CAUGHT, ROOT, SURVIVED, copy_tree, judge, run_tests


def main() -> int:
    """Runs the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--area", action="append", help="only this area; may be given again")
    parser.add_argument("--name", action="append", help="only mutants whose name has this text; may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="trees that are worked on at once (default 2)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of one mutant (default 120)")
    parser.add_argument("--gpu", action="store_true", help="those that only a GPU shows, with tests marked gpu")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument(
        "--only-planted", action="store_true", help="do not run the named tests on the tree as it is first"
    )
    arguments = parser.parse_args()
    tables = load_tables(on_gpu=arguments.gpu)
    if unknown := set(arguments.area or ()) - set(tables):
        parser.error(f"no area {', '.join(sorted(unknown))}; there are {', '.join(tables)}")
    chosen = {
        mutant: area
        for area, mutants in tables.items()
        for mutant in mutants
        if (arguments.area is None or area in arguments.area)
        and (arguments.name is None or any(text in mutant.name for text in arguments.name))
    }
    if arguments.list:
        for mutant, area in chosen.items():
            print(f"{area:<14} {mutant.file}: {mutant.name}")
        return 0
    options = ("-m", "gpu") if arguments.gpu else ("-m", "not gpu")
    if not arguments.only_planted and not _pass_unchanged(list(chosen), options):
        return 1
    return _plant(chosen, arguments.jobs, arguments.limit, options)


def _pass_unchanged(mutants: list[Mutant], options: tuple[str, ...]) -> bool:
    """Whether the named tests pass where no fault is planted: a test that always fails catches nothing."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        verdict = run_tests(copy_tree(ROOT, Path(directory) / "tree"), tests, limit_s=3600.0, options=options)
    print(f"{len(tests)} tests without a fault: {verdict.detail} ({verdict.seconds:.0f} s)", flush=True)
    return verdict.outcome == SURVIVED


def _plant(chosen: dict[Mutant, str], jobs: int, limit_s: float, options: tuple[str, ...]) -> int:
    """Prints a line a mutant and the totals of each area; returns the exit code."""
    start = time.perf_counter()
    totals: dict[str, collections.Counter[str]] = {area: collections.Counter() for area in chosen.values()}
    for mutant, verdict in judge(ROOT, chosen, jobs=jobs, limit_s=limit_s, options=options):
        area = chosen[mutant]
        totals[area][verdict.outcome] += 1
        print(f"{verdict.outcome:<8} {verdict.seconds:5.1f} s  {area}: {mutant.name} ({verdict.detail})", flush=True)
    print()
    for area, total in totals.items():
        rest = "".join(f", {number} {outcome}" for outcome, number in total.items() if outcome != CAUGHT)
        print(f"{area:<14} {total[CAUGHT]} of {total.total()} caught{rest}")
    caught = sum(total[CAUGHT] for total in totals.values())
    print(f"{'all':<14} {caught} of {len(chosen)} caught in {time.perf_counter() - start:.0f} s")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
