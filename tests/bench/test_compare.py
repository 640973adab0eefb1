"""Comparisons: numbers before time, and one candidate's trouble is its own."""

from __future__ import annotations

import math

import pytest
import torch

from moereg.bench.compare import IN_TURNS, Comparison, Measurement, output_error
from moereg.bench.inputs import random_call, random_calls
from moereg.dispatch import explain_backends
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import register_moe_backend
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.bench.hostile import CEILINGS, CPU, PROBLEM, layer_weights
from tests.support.fakes import BatchedExperts, FakeExperts, PerRouteExperts

pytestmark = pytest.mark.usefixtures("isolated_registry")


def register(name: str, base: type[FakeExperts], priority: int = 1) -> None:
    register_moe_backend(name, priority, ("unquantized",), ("*",))(type(name.title(), (base,), {}))


def compare(num_tokens: int, problem: MoEProblem = PROBLEM) -> tuple[Selection, Comparison]:
    selection = explain_backends(problem)
    inputs = {num_tokens: random_calls(problem, num_tokens, "uniform", 0, CPU)[:3]}
    return selection, Comparison(selection, lambda: layer_weights(problem), inputs)


def by_name(rows: list[Measurement]) -> dict[str, Measurement]:
    return {row.decision.backend: row for row in rows}


def test_every_candidate_is_measured_in_order() -> None:
    register("fake_right", FakeExperts)
    register("fake_routes", PerRouteExperts)
    selection, comparison = compare(5)
    rows = comparison.measure(5, CEILINGS, rounds=2)
    assert [row.decision for row in rows] == [decision for decision in selection.decisions if decision.accepted]
    assert {"torch", "fake_right", "fake_routes"} <= set(by_name(rows))
    for row in rows:
        assert row.passed
        assert row.timing is not None
        assert len(row.timing.samples_us) == 2
        assert row.num_tokens == 5
        assert row.tolerance == layer_tolerance(selection.problem, 5)
        assert row.flops == 2 * 5 * 2 * 3 * 32 * 16
        assert row.tflops == pytest.approx(row.flops / row.timing.median_us / 1e6)
        assert row.gbps == pytest.approx(row.num_bytes / row.timing.median_us / 1e3)
        assert row.share == pytest.approx(row.roofline_us / row.timing.median_us)
        assert row.roofline_us > 0


class UnpermutableExperts(FakeExperts):
    """Cannot read any weights."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        raise RuntimeError("no weights like these")


def test_a_candidate_that_cannot_be_built_is_a_row_too() -> None:
    register("fake_broken", UnpermutableExperts)
    selection, comparison = compare(3)
    rows = by_name(comparison.measure(3, CEILINGS, rounds=1))
    broken = rows["fake_broken"]
    assert not broken.passed
    assert "permute_weights: RuntimeError: no weights like these" in broken.failure
    assert math.isnan(broken.relative_error)
    assert rows["torch"].passed
    with pytest.raises(KeyError):
        comparison.workspace_bytes(broken.decision, 3)
    assert comparison.workspace_bytes(rows["torch"].decision, 3) >= 0
    assert selection.winner is not None


def test_the_batched_format_is_compared() -> None:
    register("fake_batched", BatchedExperts)
    problem = MoEProblem(**{**PROBLEM.to_dict(), "activation_format": "batched"})
    rows = compare(4, problem)[1].measure(4, CEILINGS, rounds=1)
    assert {"fake_batched", "torch"} <= set(by_name(rows))
    assert all(row.passed for row in rows)


def test_what_was_not_written_is_no_number() -> None:
    call = random_call(PROBLEM, 4, "uniform", torch.Generator().manual_seed(0))
    reference = call.hidden_states.float()

    def forgets_one(hidden_states: torch.Tensor, *routes: torch.Tensor, out: torch.Tensor) -> None:
        out[:-1] = hidden_states[:-1]

    def forgets_none(hidden_states: torch.Tensor, *routes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(hidden_states)

    assert math.isnan(output_error(forgets_one, call, reference))  # type: ignore[arg-type]
    assert output_error(forgets_none, call, reference) == 0  # type: ignore[arg-type]


def test_keys_tell_inputs_of_one_size_apart_and_the_running_candidate_is_told() -> None:
    selection = explain_backends(PROBLEM)
    inputs = {(routing, 3): random_calls(PROBLEM, 3, routing, 0, CPU)[:2] for routing in ("uniform", "one_set")}
    told: list[tuple[str, str]] = []
    comparison = Comparison(
        selection,
        lambda: layer_weights(PROBLEM),
        inputs,
        watch=lambda decision, step: told.append((decision.experts, step)),
    )
    permuted = [(decision.experts, "permute_weights") for decision in selection.decisions if decision.accepted]
    assert list(dict.fromkeys(told)) == permuted
    rows = {key: comparison.measure(key, CEILINGS, rounds=1) for key in inputs}
    assert {row.num_tokens for row in rows["one_set", 3]} == {3}
    few, many = (rows[routing, 3][0].num_bytes for routing in ("one_set", "uniform"))
    assert few < many
    assert all(row.passed and row.first_ms > 0 for found in rows.values() for row in found)
    assert {step for _, step in told} == {"permute_weights", "apply", IN_TURNS}
    assert comparison.stopped is None
    # Three samples are taken whatever they cost.
    hurried = comparison.measure(("uniform", 3), CEILINGS, rounds=5, seconds=1e-9)
    assert {len(row.timing.samples_us) for row in hurried if row.timing} == {3}
