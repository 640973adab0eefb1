"""The cost of choosing: `select_backend` after everything is loaded, over a registry of 40 cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import moereg
from moereg.platforms import Platform
from moereg.registry import REGISTRY, register_moe_backend, registering_origin
from moereg.selection.loader import load_backends
from tests.support.fakes import FakeExperts

NUM_CELLS = 40
NUM_WHEELS = 5
H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"triton": "3.6.0"}, probed=True)
MOST_SECONDS = 1e-3


@pytest.fixture
def forty_cells() -> Iterator[None]:
    """Fakes beside the built-ins until there are 40 cells, each with two rules, a requirement and a probe."""
    before = load_backends().cells
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


@pytest.fixture
def wheels(forty_cells: None) -> None:
    """Five wheels more, each with a predicate of its own."""
    for number in range(NUM_WHEELS):
        experts = type(f"Wheel{number}", (FakeExperts,), {"unsupported_reasons": classmethod(_no_reasons)})
        with registering_origin(f"wheel-{number}", "1.0"):
            register_moe_backend(f"wheel_{number}", number, ("unquantized",), ("cuda:sm80+", "cpu"))(experts)


def _no_reasons(cls: type, problem: moereg.MoEProblem, platform: Platform) -> list[str]:
    return []


def _always(platform: Platform) -> str | None:
    return None


@pytest.mark.usefixtures("forty_cells")
@pytest.mark.parametrize("platform", [H200, "cuda:sm100", "cpu"], ids=str)
def bench_select_backend(benchmark: Any, platform: Platform | str) -> None:
    assert len(REGISTRY.cells) == NUM_CELLS
    _time_selecting(benchmark, platform)


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("platform", [H200, "cpu"], ids=str)
def bench_select_backend_with_wheels(benchmark: Any, platform: Platform | str) -> None:
    """Their predicates are asked in a thread, which costs about 0.05 ms a selection, and more on a busy machine."""
    assert len(REGISTRY.cells) == NUM_CELLS + NUM_WHEELS
    _time_selecting(benchmark, platform, "min")


def _time_selecting(benchmark: Any, platform: Platform | str, statistic: str = "median") -> None:
    problem = moereg.MoEProblem(num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8)
    selection = benchmark(moereg.select_backend, problem, platform=platform)
    assert selection.winner is not None
    if benchmark.stats is not None:  # Absent where timing is off, as in a test run that only executes benches.
        assert getattr(benchmark.stats.stats, statistic) < MOST_SECONDS
