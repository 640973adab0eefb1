"""Requests for `deepep`, and layers over ranks whose tokens move by an imitation of DeepEP."""

from __future__ import annotations

from typing import Any

import moereg_deepep.prepare_finalize  # noqa: F401  # registers it where the wheel is not installed
import pytest

import moereg
from moereg.author import GroupFacts, MoEProblem, Platform
from tests.groups.ranks import results_of, value_of

BOUNDS = {"deepep": 6e-3, "deepep_fp8": 6e-3, "deepep_low_latency": 1e-3, "deepep_low_latency_fp8": 1e-3}
"""The mode for many tokens rounds each rank's sum to bfloat16 before it travels home."""


def problem_of(**changes: Any) -> MoEProblem:
    sizes = {"num_experts": 16, "hidden_size": 2048, "intermediate_size": 256, "top_k": 2, "max_num_tokens": 64}
    return MoEProblem(**{**sizes, **changes})


def explained(problem: MoEProblem, size: int = 8, platform: str | Platform = "cuda:sm90", **request: Any) -> Any:
    return moereg.explain_dispatchers(problem, GroupFacts(size), platform, **request)


def reasons(problem: MoEProblem, size: int = 8, **where: Any) -> set[str]:
    decisions = explained(problem, size, require="deepep", **where).decisions
    return {reason.text for each in decisions if each.name == "deepep" for reason in each.reasons}


def test_it_is_there_for_those_who_name_it() -> None:
    assert explained(problem_of()).winner.name != "deepep"
    named = explained(problem_of(), require="deepep")
    assert [(each.name, each.activation_format) for each in named.accepted] == [
        ("deepep", "standard"),
        ("deepep", "batched"),
    ]
    assert named.decisions[0].assumes == ("deep_ep>=1.1",)
    captured = explained(problem_of(graph_capture=True), prefer="deepep")
    assert (captured.winner.name, captured.winner.activation_format) == ("deepep", "batched")


def test_a_machine_without_it_hears_so() -> None:
    machine = Platform("cuda", "sm90", "GPU", 2**37, {}, probed=True)
    assert "requires deep_ep>=1.1, which is not installed" in reasons(problem_of(), platform=machine)


@pytest.mark.parametrize(
    ("change", "size", "reason"),
    [
        ({}, 6, "requires a number of ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160), got 6"),
        ({"num_experts": 32, "top_k": 10}, 8, "requires top_k <= 9, got 10"),
        ({"dtype": "float16"}, 8, "requires dtype in (bfloat16), got float16"),
    ],
)
def test_refused_layers(change: dict[str, Any], size: int, reason: str) -> None:
    problem = problem_of(**{"num_experts": 2 * 6 if size == 6 else 16, **change})
    assert reason in reasons(problem, size)


def test_layers_over_two_ranks_are_those_of_one() -> None:
    for result in results_of(2, *BOUNDS, module="deepep_cases"):
        for name, bound in BOUNDS.items():
            found = value_of(result, name)
            assert found["error"] < bound, found
            assert found["dispatcher"] == "deepep"
            assert found["format"] == ("batched" if "low_latency" in name else "standard")
            assert found["wire"] == ("float8_e4m3fn with float32 scales" if name.endswith("fp8") else "bfloat16")
