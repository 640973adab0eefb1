"""Plans of fake experts, for tests of plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from moereg.dispatch import evaluate
from moereg.experts import ExpertInputs
from moereg.platforms import Platform, current_platform
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.support.fakes import FakeExperts, cell_of

Ranges = Iterable[tuple[int | None, type[FakeExperts]]]


def experts_of(factor: float = 1.0, base: type[FakeExperts] = FakeExperts, **members: Any) -> Any:
    """A class that shares its layout, multiplies its output by a factor, and notes calls, permuting and addresses."""

    class Shared(base):  # type: ignore[valid-type, misc]
        shared_layouts = ("canonical",)
        calls: ClassVar[list[int]] = []
        permuted: ClassVar[list[int]] = []

        def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
            self.permuted.append(weights.num_experts)
            permuted: PermutedWeights = super().permute_weights(weights, problem)
            return permuted

        def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
            assert all(tensor.data_ptr() % 16 == 0 for tensor in weights.flat())
            self.calls.append(len(inputs.topk_ids))
            super().compute(out, inputs, weights)
            out.mul_(factor)

    Shared.calls, Shared.permuted = [], []
    for name, member in members.items():
        setattr(Shared, name, member)
    return Shared


def plan_of(problem: MoEProblem, ranges: Ranges, platform: Platform | None = None) -> Selection:
    """A selection of these ranges; the classes' backends are `a`, `b` and so on, in order."""
    platform, ranges = platform or current_platform(), tuple(ranges)
    decisions = {}
    for number, kind in enumerate(dict.fromkeys(kind for _, kind in ranges)):
        cell = cell_of(kind, "unquantized", "fp8_block128", rules=("*",), name="abcdefgh"[number])
        decisions[kind] = evaluate(cell, problem, platform, Request())
        assert decisions[kind].accepted, decisions[kind].reasons
    plan = tuple((most, decisions[kind]) for most, kind in ranges)
    winner = plan[-1][1]
    others = (one for one in decisions.values() if one is not winner)
    return Selection(problem, platform, Request(), (winner, *others), "measured", ranges=plan)


def turning(factor: float, **members: Any) -> Any:
    """A class that multiplies its output by a factor and has columns in the opposite order, in memory of its own."""

    def permute_weights(self: Any, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("turned", {name: tensor.flip(-1) for name, tensor in weights.tensors().items()})

    def compute(self: Any, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        tensors = {name: weights[name].flip(-1) for name in weights.per_expert}
        FakeExperts.compute(self, out, inputs, PermutedWeights("canonical", tensors))
        out.mul_(factor)

    own = {"layouts": ("turned",), "permute_weights": permute_weights, "compute": compute}
    return type("Turning", (FakeExperts,), {**own, **members})
