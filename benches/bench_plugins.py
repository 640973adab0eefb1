"""The cost of the first choice and of a later one beside one wheel and beside fifty, each in fresh interpreters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.many_wheels import costs_beside, install_wheels

MOST_MORE_MS = 300.0
MOST_LATER_MS = 1.0


def bench_first_selection_beside_fifty_wheels(benchmark: Any, tmp_path: Path) -> None:
    one = costs_beside(install_wheels(tmp_path / "one", 1))
    folder = install_wheels(tmp_path / "fifty", 50)
    fifty = benchmark.pedantic(costs_beside, args=(folder,), rounds=1)
    for step in one:
        benchmark.extra_info[step] = f"{one[step]:.2f} ms beside one wheel, {fifty[step]:.2f} beside fifty"
        print(f"\n{step:6} {benchmark.extra_info[step]}", end="")
    assert fifty["first"] - one["first"] < MOST_MORE_MS
    assert fifty["later"] < MOST_LATER_MS
