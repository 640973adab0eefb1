"""Backends that write to tensors of others, and a comparison in which one of them takes part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from moereg.author import ExpertInputs, ExpertWeights, PermutedWeights
from moereg.bench.compare import Comparison, Measurement
from moereg.bench.inputs import random_calls, random_weights
from moereg.bench.roofline import Ceilings
from moereg.dispatch import explain_backends
from moereg.registry import register_moe_backend
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts

CPU = torch.device("cpu")
CEILINGS = Ceilings(matmul_tflops=0.1, read_gbps=10.0, read_by="nothing")
HOSTILE = __name__  # The origin of the classes that are made here.
PROBLEM = MoEProblem(num_experts=4, hidden_size=32, intermediate_size=16, top_k=2)
Deed = Callable[[torch.Tensor, ExpertInputs, PermutedWeights], object]


class SharingExperts(FakeExperts):
    """Right, and runs on the canonical weights that all share."""


class PermutingExperts(FakeExperts):
    """Does something to the canonical weights while it permutes."""

    deed: Callable[[ExpertWeights], object]

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        type(self).deed(weights)
        return super().permute_weights(weights, problem)


class DoingExperts(FakeExperts):
    """Right, but does something else as well from one call to another."""

    deed: Deed
    calls = (1, math.inf)
    instead = False

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        self.count = getattr(self, "count", 0) + 1
        is_due = self.calls[0] <= self.count <= self.calls[1]
        if not (is_due and self.instead):
            super().compute(out, inputs, weights)
        if is_due:
            type(self).deed(out, inputs, weights)


def permuting(deed: Callable[[ExpertWeights], object]) -> type[FakeExperts]:
    return type("Permuting", (PermutingExperts,), {"deed": staticmethod(deed), "__module__": __name__})


def doing(deed: Deed, first: float = 1, last: float = math.inf, instead: bool = False) -> type[FakeExperts]:
    members = {"deed": staticmethod(deed), "calls": (first, last), "instead": instead, "__module__": __name__}
    return type("Doing", (DoingExperts,), members)


def zero(name: str, through_data: bool = False) -> Deed:
    def deed(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        (weights[name].data if through_data else weights[name]).zero_()

    return deed


def raises(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
    raise RuntimeError("tired")


def measure(
    hostile: type[FakeExperts],
    num_tokens: int = 5,
    rounds: int = 3,
    make_weights: Callable[[], ExpertWeights] | None = None,
) -> dict[str, Measurement]:
    """The comparison's verdict on the hostile backend, which comes first, and on an honest one on either side."""
    for name, priority, experts in (
        ("fake_before", 100_001, type("Before", (SharingExperts,), {})),
        ("fake_hostile", 100_000, hostile),
        ("fake_after", 99_999, type("After", (SharingExperts,), {})),
    ):
        register_moe_backend(name, priority, ("unquantized",), ("*",))(experts)
    selection = explain_backends(PROBLEM, require=["fake_before", "fake_hostile", "fake_after", "torch"])
    is_given = make_weights is not None
    make_weights = make_weights or functools.partial(layer_weights, PROBLEM)
    inputs = {num_tokens: random_calls(PROBLEM, num_tokens, "uniform", 0, CPU)[:3]}
    comparison = Comparison(selection, make_weights, inputs)
    found = {row.decision.experts: row for row in comparison.measure(num_tokens, CEILINGS, rounds)}
    pristine = {} if is_given else make_weights().tensors()
    assert is_given or all(torch.equal(tensor, pristine[name]) for name, tensor in comparison.weights.tensors().items())
    return found


def layer_weights(problem: MoEProblem) -> ExpertWeights:
    return random_weights(problem, torch.Generator().manual_seed(0), CPU)


def check_others(found: dict[str, Measurement], hostile: str) -> Measurement:
    """The row of the hostile one; all others have to be right and timed."""
    row = found.pop(hostile)
    assert {"Before", "After"} < set(found)
    for other in found.values():
        assert other.passed, other
        assert other.timing is not None
        assert other.relative_error < 5e-3
    assert not row.passed
    assert row.timing is None
    return row
