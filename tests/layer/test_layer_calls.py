"""What a layer asks of its experts, and of the routes, at each call."""

from __future__ import annotations

import pytest
import torch

from moereg.author import ExpertInputs, PermutedWeights
from moereg.discovery import current_platform
from moereg.dispatch import evaluate
from moereg.layer import MoEKernel, make_kernel
from moereg.problem import MoEProblem
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.request import Request
from moereg.selection import Selection
from moereg.tuning.inputs import random_call
from moereg.weights import ExpertWeights
from tests.support.fakes import FakeExperts

PROBLEM = MoEProblem(num_experts=8, hidden_size=16, intermediate_size=12, top_k=2, dtype="float32")


class NotingExperts(FakeExperts):
    """Records the shapes of its arguments."""

    called: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        self.called.append((len(inputs.hidden_states), tuple(workspace13.shape), tuple(workspace2.shape)))
        out.zero_()


@pytest.fixture
def kernel() -> MoEKernel:
    NotingExperts.called = []
    registry = BackendRegistry()
    register_moe_backend("noting", 1, ("unquantized",), ("*",), registry=registry)(NotingExperts)
    platform, request = current_platform(), Request(require=("noting",))
    decision = evaluate(registry.cells[0], PROBLEM, platform, request)
    weights = ExpertWeights(w13=torch.zeros(8, 24, 16), w2=torch.zeros(8, 16, 12))
    return make_kernel(PROBLEM, weights, Selection(PROBLEM, platform, request, (decision,), "required"))


def run(kernel: MoEKernel, num_tokens: int) -> torch.Tensor:
    return kernel(*random_call(PROBLEM, num_tokens, "uniform", torch.Generator().manual_seed(1)))


def test_workspaces_are_of_this_calls_tokens(kernel: MoEKernel) -> None:
    for num_tokens in (2, 7, 1, 7):
        run(kernel, num_tokens)
    assert NotingExperts.called == [(tokens, (tokens, 12), (tokens, 16)) for tokens in (2, 7, 1, 7)]


def test_experts_are_not_called_for_no_tokens(kernel: MoEKernel) -> None:
    assert run(kernel, 0).shape == (0, 16)
    assert NotingExperts.called == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_tokens", [3, 100])  # Few routes are checked in another way than many.
def test_any_weight_that_is_not_finite_is_refused(kernel: MoEKernel, num_tokens: int, value: float) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_states, topk_weights, topk_ids = random_call(PROBLEM, num_tokens, "uniform", generator)
    topk_weights[1, 1] = value
    with pytest.raises(ValueError, match=r"must be finite, got .* at token 1, slot 1"):
        kernel(hidden_states, topk_weights, topk_ids)


@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("expert", range(8))
def test_any_expert_named_twice_is_refused(kernel: MoEKernel, expert: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_states, topk_weights, topk_ids = random_call(PROBLEM, num_tokens, "uniform", generator)
    topk_ids[1] = expert
    with pytest.raises(ValueError, match="distinct"):
        kernel(hidden_states, topk_weights, topk_ids)
