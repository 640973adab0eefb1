"""The cost of choosing: `select_backend` after everything is loaded, over a registry of 40 cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import moereg
from moereg.discovery import load_backends
from moereg.platforms import Platform
from moereg.registry import REGISTRY, register_moe_backend
from tests.support.fakes import FakeExperts

NUM_CELLS = 40
H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"triton": "3.6.0"}, probed=True)
MOST_SECONDS = 1e-3


@pytest.fixture
def forty_cells() -> Iterator[None]:
    """Fakes beside the built-ins until there are 40 cells, each with two rules, a requirement and a probe."""
    before = load_backends().snapshot()
    for number in range(NUM_CELLS - len(before)):
        experts = type(f"Experts{number}", (FakeExperts,), {})
        register_moe_backend(
            f"bench_{number}",
            number,
            quant_schemes=("unquantized", "nvfp4"),
            platforms=("cuda:sm80+", "rocm:gfx942"),
            requires=("triton>=3.6",),
            probes=(_always,),
        )(experts)
    yield
    REGISTRY.restore(before)


def _always(platform: Platform) -> str | None:
    return None


@pytest.mark.usefixtures("forty_cells")
@pytest.mark.parametrize("platform", [H200, "cuda:sm100", "cpu"], ids=str)
def bench_select_backend(benchmark: Any, platform: Platform | str) -> None:
    problem = moereg.MoEProblem(num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8)
    assert len(REGISTRY.cells) == NUM_CELLS
    selection = benchmark(moereg.select_backend, problem, platform=platform)
    assert selection.winner is not None
    if benchmark.stats is not None:  # Absent where timing is off, as in a test run that only executes benches.
        assert benchmark.stats.stats.median < MOST_SECONDS
