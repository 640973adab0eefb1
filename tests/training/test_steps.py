"""Training: optimizers write parameters that are read in place, and losses fall as with plain autograd."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

import moereg
from moereg.errors import GradientError
from moereg.routing import RouterSpec
from tests.training.layers import ADAPTED, ALL, drawn_call, error, expected, trained_problem

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
ROUTER = RouterSpec(kind="softmax_topk", num_experts=6, top_k=2, renormalize=True)


def drawn_layer(problem: moereg.MoEProblem, **keywords: Any) -> moereg.MoELayer:
    call = drawn_call(problem)
    layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters, **keywords)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("router"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("made", ["kernel", "layer"])
def test_a_step_is_seen_by_the_next_call(made: str, kind: str) -> None:
    problem = trained_problem(has_bias=True, **ADAPTED)
    call = drawn_call(problem)
    assert call.adapters is not None
    layer: Any
    if made == "kernel":
        kernel = moereg.make_kernel(problem, call.weights)
        layer = functools.partial(kernel, adapters=call.adapters)
    else:
        layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
        call = call._replace(tensors=call.tensors | dict(layer.named_parameters()))
    held = [tensor for name, tensor in call.tensors.items() if name.startswith("w")]
    assert len(held) == 8
    optimizer = torch.optim.AdamW(held, lr=0.1, **OPTIMIZERS[kind])
    for _ in range(3):
        truth, gradients = expected(problem, call)
        before = [tensor.detach().clone() for tensor in held]
        assert error(call.run(layer), truth) < 5e-6
        for name, tensor in call.tensors.items():
            assert tensor.grad is not None
            assert error(tensor.grad, gradients[name]) < 5e-6, name
        optimizer.step()
        assert not any(torch.equal(one, other) for one, other in zip(before, held, strict=True))
        call.gradients()
        with torch.no_grad():
            inferred = layer(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
        assert error(inferred, expected(problem, call)[0]) < 5e-6


def test_parameters_require_what_the_problem_names() -> None:
    for gradients in (frozenset(), {"weights"}, {"topk_weights"}, ALL, {"adapters"}):
        rank = 4 if "adapters" in gradients else 0
        layer = drawn_layer(trained_problem(gradients=gradients, adapter_rank=rank, has_bias=True), router=ROUTER)
        wanted = {"router_weight"} if "topk_weights" in gradients else set()
        wanted |= {"w13", "w2", "w13_bias", "w2_bias"} if "weights" in gradients else set()
        wanted |= {"w13_a", "w13_b", "w2_a", "w2_b"} if "adapters" in gradients else set()
        for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert {name for name, value in each.named_parameters() if value.requires_grad} == wanted


def test_a_router_that_the_problem_does_not_name_is_refused_in_the_backward_pass() -> None:
    layer = drawn_layer(trained_problem(gradients={"weights", "hidden_states"}), router=ROUTER)
    layer(torch.randn(3, 24)).sum().backward()
    # The gradient of hidden states has a part that comes through the router.
    with pytest.raises(GradientError, match="for another tensor"):
        layer(torch.randn(3, 24, requires_grad=True)).sum().backward()
    layer.get_parameter("router_weight").requires_grad_()
    with pytest.raises(GradientError, match="for another tensor"):
        layer(torch.randn(3, 24)).sum().backward()


@pytest.mark.parametrize("changes", [{}, ADAPTED], ids=["weights", "adapters"])
def test_a_layer_follows_its_parameters_to_another_dtype_and_place(changes: dict[str, Any]) -> None:
    layer = drawn_layer(trained_problem(**changes))
    call = drawn_call(layer.problem)
    tensors = {name: call.tensors[name] for name in ("hidden_states", "topk_weights")}

    def check(bound: float) -> None:
        each = call._replace(tensors=tensors | dict(layer.named_parameters()))
        if tensors["hidden_states"].dtype != layer.problem.torch_dtype:
            tensors["hidden_states"] = tensors["hidden_states"].detach().to(layer.problem.torch_dtype).requires_grad_()
            each = each._replace(tensors=each.tensors | tensors, grad_out=call.grad_out.to(layer.problem.torch_dtype))
        truth, gradients = expected(layer.problem, each)
        assert error(each.run(layer), truth) < bound
        with torch.no_grad():
            assert (
                error(layer(each.tensors["hidden_states"], each.tensors["topk_weights"], each.topk_ids), truth) < bound
            )
        found = each.gradients()
        assert found.keys() == gradients.keys()
        assert all(error(found[name], gradients[name]) < bound for name in found)

    check(5e-6)
    other, names = drawn_layer(trained_problem(**changes)), ("w13", "w2_a") if changes else ("w13",)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).mul_(0.5)
    layer.load_state_dict(other.state_dict())
    check(5e-6)
    with torch.no_grad():
        replaced = {name: torch.nn.Parameter(value * 0.25) for name, value in other.state_dict().items()}
    layer.load_state_dict(replaced, assign=True)
    check(5e-6)
    layer.register_parameter("w13", torch.nn.Parameter(layer.get_parameter("w13").detach()))  # In the same memory.
    check(5e-6)
    layer.register_parameter("w2", torch.nn.Parameter(layer.get_parameter("w2").detach() * 0.5))
    check(5e-6)
    layer.get_parameter("w2").data.mul_(3.0)  # torch does not count this, and the layer reads it in place.
    check(5e-6)
    if changes:
        layer.register_parameter("w2_b", torch.nn.Parameter(layer.get_parameter("w2_b").detach() * 0.5))
        check(5e-6)
    gradients = layer.problem.gradients
    layer.to(torch.bfloat16)
    assert layer.problem.gradients == gradients
    check(2.0 * 2**-7)
