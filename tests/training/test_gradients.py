"""Gradients of the torch backend on a CPU against autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moereg
from moereg.backends._torch.training import activation_gradient
from moereg.experts import ExpertInputs, Gradients
from moereg.spec.activations import ACTIVATIONS
from tests.training.layers import ADAPTED, Call, drawn_call, error, expected, trained_problem

# Operands are rounded to the dtype at each product, and rows before the activation too: a few roundings of half a
# unit in the last place, which add up like random errors. fp32 sums add errors of their own.
BOUNDS = {"float32": 5e-6, "float16": 2.0 * 2**-10, "bfloat16": 2.0 * 2**-7}

LAYERS: list[dict[str, Any]] = [
    {"activation": "silu"},
    {"activation": "silu", "has_bias": True},
    {"activation": moereg.Activation("silu", alpha=1.5, beta=0.5, limit=0.7), "has_bias": True},
    {"activation": "swigluoai", "has_bias": True},
    {"activation": moereg.Activation("gelu", limit=0.6)},
    {"activation": "gelu_tanh"},
    {"activation": "situ"},
    {"activation": "situ(beta=0.5, gate_softcap=2.0, up_softcap=3.0)", "has_bias": True},
    {"activation": "situ(up_softcap=None)"},
    {"activation": "relu2", "has_bias": True},
    {"activation": "silu", "num_experts": 40, "num_local_experts": 40},
    {"activation": "silu", "top_k": 1},
    {"activation": "silu", "has_bias": True, **ADAPTED},
    {"activation": moereg.Activation("gelu", limit=0.6), **ADAPTED, "adapter_rank": 40},
    {"activation": "silu", "num_experts": 40, "num_local_experts": 40, **ADAPTED},
]


def named(changes: dict[str, Any]) -> str:
    return ",".join(str(value) for name, value in changes.items() if name != "gradients")  # Sets have no order.


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("changes", LAYERS, ids=named)
def test_gradients_are_those_of_autograd(dtype: str, changes: dict[str, Any]) -> None:
    problem = trained_problem(dtype=dtype, **changes)
    call = drawn_call(problem)
    compare(problem, call, moereg.make_kernel(problem, call.weights))


def compare(
    problem: moereg.MoEProblem, call: Call, kernel: moereg.MoEKernel, expert_map: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    truth, gradients = expected(problem, call, expert_map)
    out, found = call.run(kernel), call.gradients()
    bound = BOUNDS[problem.dtype]
    assert error(out, truth) < bound
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert gradient.dtype == call.tensors[name].dtype, name
        assert error(gradient, gradients[name]) < bound, name
        # A part that autograd leaves at 0 is 0, such as an expert without tokens.
        assert not gradient[gradients[name] == 0].any(), name
    return found


def test_routes_without_an_expert_get_no_gradient() -> None:
    problem = trained_problem(has_bias=True, **ADAPTED)
    call = drawn_call(problem)
    call.topk_ids[0] = torch.tensor([-1, 99])
    call.topk_ids[1, 0] = -(2**31)
    call.topk_ids[call.topk_ids == 3] = 6  # One past the end; expert 3 has no tokens.
    with torch.no_grad():
        call.tensors["topk_weights"][0] = 1e30  # Must reach nothing.
    found = compare(problem, call, moereg.make_kernel(problem, call.weights))
    assert not found["topk_weights"][0].any()
    assert not found["hidden_states"][0].any()
    assert not found["w13"][3].any()
    wide = call._replace(topk_ids=call.topk_ids.long() + 0)
    wide.topk_ids[0, 1] = 2**32  # Wraps to 0 in 32 bits.
    compare(problem, wide, moereg.make_kernel(problem, call.weights))


def test_experts_of_a_map() -> None:
    problem = trained_problem(num_local_experts=3, placement="map", **ADAPTED)
    expert_map = torch.tensor([2, -1, 0, 0, -1, 1], dtype=torch.int32)  # Two share a local expert.
    call = drawn_call(problem)
    compare(problem, call, moereg.make_kernel(problem, call.weights, expert_map=expert_map), expert_map)


def test_one_token_and_many_of_one_expert() -> None:
    problem = trained_problem(top_k=1)
    call = drawn_call(problem, num_tokens=1)
    compare(problem, call, moereg.make_kernel(problem, call.weights))
    call = drawn_call(problem, num_tokens=300)
    call.topk_ids.fill_(4)
    compare(problem, call, moereg.make_kernel(problem, call.weights))


def test_no_tokens_give_zeros() -> None:
    problem = trained_problem(has_bias=True, **ADAPTED)
    call = drawn_call(problem, num_tokens=0)
    out = call.run(moereg.make_kernel(problem, call.weights))
    assert out.shape == (0, problem.hidden_size)
    for name, gradient in call.gradients().items():
        assert torch.equal(gradient, torch.zeros_like(call.tensors[name])), name


@pytest.mark.parametrize("emulated", [False, True])
def test_gradients_where_the_cpu_multiplies_no_16_bits(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.backends._torch.training.dtype_is_emulated", lambda dtype: emulated)
    problem = trained_problem(dtype="bfloat16", has_bias=True, **ADAPTED)
    call = drawn_call(problem)
    compare(problem, call, moereg.make_kernel(problem, call.weights))


def test_weights_gradients_are_added_on_request() -> None:
    problem = trained_problem(has_bias=True, dtype="bfloat16", **ADAPTED)
    call = drawn_call(problem)
    call.topk_ids[call.topk_ids == 3] = -1
    kernel = moereg.make_kernel(problem, call.weights)
    experts, num_tokens = kernel.experts, len(call.topk_ids)
    hidden_states, topk_weights = (call.tensors[name].detach() for name in ("hidden_states", "topk_weights"))
    inputs = ExpertInputs(hidden_states, topk_weights, call.topk_ids, adapters=call.adapters)
    rows = {name: torch.full(shape, float("nan"), dtype=dtype) for name, (shape, dtype) in _saved(kernel, num_tokens)}
    none = torch.empty(0)
    with torch.no_grad():
        experts.apply_saving(
            out=torch.empty_like(inputs.hidden_states), saved=rows, inputs=inputs, weights=kernel.weights,
            workspace13=none, workspace2=none,
        )  # fmt: skip

        def backward(accumulate: bool, start: float) -> Gradients:
            held = {name: torch.full_like(tensor, start) for name, tensor in call.tensors.items()}
            grads = Gradients(**held, accumulate=accumulate)
            experts.apply_backward(
                grads=grads, grad_out=call.grad_out, saved=rows, inputs=inputs, weights=kernel.weights,
                workspace13=none, workspace2=none,
            )  # fmt: skip
            return grads

        written, added = backward(False, float("nan")), backward(True, 2.0)
    for name in call.tensors:
        one, other = getattr(written, name), getattr(added, name)
        wanted = one if name in ("hidden_states", "topk_weights") else one + 2.0
        assert error(other, wanted.double()) < 2.0 * 2**-8, name
    for of_experts in (added.w13, added.w13_a, added.w2_b):
        assert of_experts is not None
        assert torch.equal(of_experts[3], torch.full_like(of_experts[3], 2.0))


def _saved(kernel: moereg.MoEKernel, num_tokens: int) -> Any:
    return kernel.experts.saved_shapes(problem=kernel.problem, num_tokens=num_tokens).items()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_edge_of_a_clamp_passes_its_gradient(name: str) -> None:
    limit = None if name == "relu2" else 1.0
    activation = moereg.Activation.from_name(name, limit=limit)
    pre = torch.tensor([[1.0, 0.5, 2.0, -3.0, 0.25, -0.5, 1.0, -1.0]], requires_grad=True)
    grad = torch.tensor([[1.0, -2.0, 0.5, 1.5]]) if activation.gated else torch.ones(1, 8)
    (truth,) = torch.autograd.grad(activation(pre), pre, grad)
    assert torch.allclose(activation_gradient(activation, pre.detach(), grad), truth, rtol=1e-6, atol=1e-7)
