"""The cost of permuting weights, once for each registered backend that runs here.

    python -m pytest benches/bench_permute.py --benchmark-only

Small layers: permuting grows with the bytes of the weights, which are beside each time.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from moereg.bench.timing import wait_for
from moereg.platforms import current_platform
from moereg.selection.loader import load_backends
from moereg.testing.cases import Case, claimed_problems, default_device, runnable_platform
from moereg.testing.inputs import make_weights

SIZES = {"num_experts": 32, "hidden_size": 512, "intermediate_size": 256, "top_k": 4}
DEVICE = default_device()


def _cases() -> list[Case]:
    """One problem for each cell that runs natively here, in its preferred 16-bit dtype."""
    here = current_platform()
    found = []
    for cell in load_backends().cells:
        if runnable_platform(cell) != here:
            continue
        claimed = next(iter(claimed_problems(cell)))
        problem = type(claimed)(**{**claimed.to_dict(), **SIZES, "num_local_experts": None})
        found.append(Case(cell, here, problem))
    return found


@pytest.mark.parametrize("case", _cases(), ids=lambda case: f"{case.cell.name}-{case.cell.class_name}")
def bench_permute_weights(benchmark: BenchmarkFixture, case: Case) -> None:
    weights = make_weights(case.problem, DEVICE)
    experts = case.cell.experts(case.problem, case.platform, case.computes)
    benchmark.group = f"permute {case.problem}"
    benchmark.extra_info["weight_bytes"] = experts.permute_weights(weights, case.problem).num_bytes

    def permute() -> None:
        experts.permute_weights(weights, case.problem)
        wait_for(DEVICE)

    benchmark(permute)
