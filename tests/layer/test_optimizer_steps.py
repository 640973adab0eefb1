"""No weight that an optimizer of torch trains is read stale, though fused ones raise no version of a tensor."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.backends._torch.plain import CANONICAL, Host
from moereg.errors import OldWeightsWarning
from moereg.integrations.transformers import prepare
from moereg.layer.factory import make_kernel
from moereg.nn.module import MoELayer
from moereg.numerics.reference import reference_experts, relative_error
from moereg.testing.inputs import make_inputs, make_weights
from moereg.weights import versions as tensor_state
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.versions import states_of
from tests.layer.small_layers import CPU, problem_of
from tests.support.live_models import close, eager, logits_of
from tests.support.tiny_models import tiny_model

PROBLEM = problem_of()
Steps = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS = pytest.mark.parametrize(
    "name",
    [pytest.param("AdamW"), *(pytest.param(name, marks=pytest.mark.slow) for name in ("Adam", "SGD", "Adagrad"))],
)


@pytest.fixture(autouse=True)
def permuted_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of torch have copies, as on a CPU where packed weights are faster; no step was made before."""

    def permuted(self: Host, weights: ExpertWeights) -> PermutedWeights:
        return PermutedWeights(CANONICAL, {name: tensor.clone() for name, tensor in weights.tensors().items()})

    monkeypatch.setattr(Host, "permute_weights", permuted)
    for name, value in {"_step": 0, "_asked": {}}.items():
        monkeypatch.setattr(tensor_state, name, value)


def new_layer() -> MoELayer:
    return MoELayer(PROBLEM, make_weights(PROBLEM, CPU), prefer="torch")


def error_of(layer: MoELayer) -> float:
    """Of a call against the reference over the parameters as they are."""
    inputs = make_inputs(PROBLEM, 5, "uniform", CPU)
    with torch.no_grad():
        wanted = reference_experts(PROBLEM, layer.weights, *inputs.call, None)
        return relative_error(layer(*inputs.call), wanted)


def set_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def fused(name: str, parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, fused=True)
    return made


def test_a_step_that_raises_half_way_is_followed() -> None:
    layer = new_layer()
    error_of(layer)
    optimizer = torch.optim.AdamW([{"params": [layer.w13]}, {"params": [layer.w2]}], lr=0.1, fused=True)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer.w2.grad = layer.w2.grad.to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    for parameter in layer.parameters():
        parameter.grad = None
    assert error_of(layer) < 1e-5


@OPTIMIZERS
@pytest.mark.parametrize("trains", [False, True], ids=["gradients set by hand", "requires_grad"])
def test_a_layer_follows_a_fused_optimizer(name: str, trains: bool) -> None:
    layer = new_layer().requires_grad_(trains)
    parameters = list(layer.parameters())
    optimizer = fused(name, [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.2}])
    saved = {name: value.clone() for name, value in layer.state_dict().items()}
    assert error_of(layer) < 1e-5
    for step in range(4):
        versions = [parameter._version for parameter in parameters]
        set_gradients(parameters)
        optimizer.step()
        assert versions == [parameter._version for parameter in parameters]  # Or this test needs another optimizer.
        optimizer.zero_grad()
        assert error_of(layer) < 1e-5
        if step == 1:
            layer.load_state_dict(saved)
            optimizer.load_state_dict(optimizer.state_dict())
            assert error_of(layer) < 1e-5


@OPTIMIZERS
def test_a_model_of_transformers_follows_a_fused_optimizer(name: str) -> None:
    model = tiny_model("mixtral")
    prepare(model, progress=False)
    logits_of(model)
    parameters = list(model.parameters())
    optimizer = fused(name, [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.2}])
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def follows(before: torch.Tensor) -> None:
        assert not close(logits_of(model), before)
        assert close(logits_of(model), eager(model))
        model.set_experts_implementation("moereg")

    for step in range(3):
        before = logits_of(model)
        set_gradients(parameters)
        optimizer.step()
        follows(before)
        if step == 1:
            before = logits_of(model)
            model.load_state_dict(saved)
            follows(before)


def test_steps_inside_compiled_code_are_seen() -> None:
    layer = new_layer()
    parameters = list(layer.parameters())
    optimizer = fused("SGD", parameters)
    error_of(layer)
    step = torch.compile(optimizer.step, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            set_gradients(parameters)
            step()
            assert error_of(layer) < 1e-5
    assert tensor_state._step == 6  # Noted before and after each.


def test_parameters_may_be_views_of_what_is_trained() -> None:
    """As flat buckets are, of which an optimizer holds nothing but the whole."""
    layer = new_layer()
    names = [name for name, _ in layer.named_parameters()]
    values = [layer.get_parameter(name).detach() for name in names]
    flat = torch.nn.Parameter(torch.cat([value.reshape(-1) for value in values]))
    for name, value, piece in zip(names, values, flat.detach().split([value.numel() for value in values]), strict=True):
        setattr(layer, name, torch.nn.Parameter(piece.view_as(value), requires_grad=False))
    assert error_of(layer) < 1e-5
    set_gradients([flat])
    fused("AdamW", [flat]).step()
    assert error_of(layer) < 1e-5


def test_what_requires_a_gradient_is_read_after_the_step_of_any_optimizer() -> None:
    """Optimizers that keep a copy in fp32 write the parameter back in a way of their own."""
    layer = new_layer().requires_grad_()
    error_of(layer)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in layer.parameters()]
    set_gradients(copies)
    fused("AdamW", copies).step()
    for parameter, value in zip(layer.parameters(), copies, strict=True):
        parameter.data.copy_(value.detach())
    assert error_of(layer) < 1e-5


def test_frozen_layers_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, trained = new_layer(), new_layer()
    error_of(frozen)
    parameters = list(trained.parameters())
    set_gradients(parameters)
    fused("AdamW", parameters).step()
    assert frozen._state() == frozen._seen
    # Nor is a tensor that took the place of a trained one.
    known = len(tensor_state._STEPPED)
    del trained, parameters
    gc.collect()
    monkeypatch.setattr(tensor_state, "_most", 0)
    other = new_layer()
    fused("AdamW", [torch.nn.Parameter(torch.ones(1))]).step()
    assert len(tensor_state._STEPPED) < known
    assert {state.step for state in states_of(other.parameters())} == {0}


def stepped(weights: ExpertWeights) -> list[warnings.WarningMessage]:
    """What two steps on these weights warn of."""
    parameters = [torch.nn.Parameter(tensor) for tensor in weights.tensors().values()]
    set_gradients(parameters)
    optimizer = fused("AdamW", parameters)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return said


def test_a_bare_kernel_with_copies_of_what_is_trained_is_one_warning() -> None:
    weights, others = make_weights(PROBLEM, CPU), make_weights(PROBLEM, CPU, 1)
    kernel = make_kernel(PROBLEM, weights)
    assert not stepped(others)
    (warning,) = stepped(weights)
    assert issubclass(warning.category, OldWeightsWarning)
    assert "AdamW trains weights of which MoEKernel(torch, " in str(warning.message)
    assert "call kernel.reload(weights) after each step" in str(warning.message)
    kernel = make_kernel(PROBLEM, weights)
    kernel.reload(others)
    assert not stepped(weights)
    assert len(stepped(others)) == 1
    del kernel


def test_a_kernel_without_an_owner_warns_of_what_it_copied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = new_layer()
    error_of(layer)
    assert not stepped(layer.weights)
    copied, others = copy.deepcopy(layer.prepare()), make_weights(PROBLEM, CPU, 1)
    copied.reload(others, write_shared=True)  # As the copy of a model with freed experts does.
    assert not stepped(others)
    monkeypatch.setattr(
        Host, "permute_weights", lambda self, weights: PermutedWeights(CANONICAL, dict(weights.tensors()))
    )
    weights = make_weights(PROBLEM, CPU)
    kernel = make_kernel(PROBLEM, weights)
    assert not stepped(weights)
    kernel.reload(others, write_shared=True)  # Into `weights`; of the others it has a copy from now on.
    assert not stepped(weights)
    assert len(stepped(others)) == 1
    inputs = make_inputs(PROBLEM, 5, "uniform", CPU)
    assert relative_error(kernel(*inputs.call), reference_experts(PROBLEM, weights, *inputs.call, None)) < 1e-5


@pytest.mark.gpu
def test_a_captured_graph_sees_a_step_after_the_next_call() -> None:
    problem = problem_of(hidden_size=256, intermediate_size=128, dtype="bfloat16")
    device = torch.device("cuda")
    layer = MoELayer(problem, make_weights(problem, device))
    inputs = make_inputs(problem, 5, "uniform", device)
    for _ in range(3):
        layer(*inputs.call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*inputs.call)
    parameters = list(layer.parameters())
    optimizer = fused("AdamW", parameters)
    for _ in range(2):
        set_gradients(parameters)
        optimizer.step()
        ordinary = layer(*inputs.call)
        graph.replay()
        wanted = reference_experts(problem, layer.weights, *inputs.call, None)
        assert relative_error(ordinary, wanted) < 1e-2
        assert torch.equal(out, ordinary)
