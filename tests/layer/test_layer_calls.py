"""What a layer asks of its experts, and of the routes, at each call."""

from __future__ import annotations

import pytest
import torch

from moereg.layer.factory import MoEKernel
from moereg.tuning.inputs import random_call
from tests.layer.small_layers import kernel_of, problem_of
from tests.support.fakes import FakeExperts

PROBLEM = problem_of()


class NotingExperts(FakeExperts):
    """Records the shapes of its arguments."""

    called: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    def apply(self, out, inputs, weights, workspace13, workspace2):  # type: ignore[no-untyped-def]
        self.called.append((len(inputs.hidden_states), tuple(workspace13.shape), tuple(workspace2.shape)))
        out.zero_()


@pytest.fixture
def kernel() -> MoEKernel:
    NotingExperts.called = []
    return kernel_of(PROBLEM, NotingExperts)


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
