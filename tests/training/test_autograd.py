"""Kernels and layers inside of autograd: compiled, checkpointed, frozen, under autocast, refused."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moereg
from moereg.backends.torch_moe import TorchTrainingExperts
from moereg.errors import ArgumentError, BackendError, GradientError
from moereg.layer.train_op import cut_saved
from moereg.prepare_finalize import GroupFacts
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.selection.dispatcher import explain_dispatchers
from moereg.weights.permuted import PermutedWeights
from tests.training.layers import (
    ADAPTED,
    ALL,
    Call,
    drawn_call,
    drawn_kernel,
    drawn_module,
    error,
    expected,
    trained_problem,
)


@pytest.fixture
def compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.few
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["kernel", "layer", "kernel with adapters", "layer with adapters"])
def test_compiled_code_gives_the_same_bits(kind: str, dynamic: bool | None) -> None:
    problem = trained_problem(dtype="bfloat16", has_bias=True, **(ADAPTED if "adapters" in kind else {}))
    call = drawn_call(problem)
    layer: Any
    if kind.startswith("kernel"):
        layer = moereg.make_kernel(problem, call.weights)
        run = lambda *tensors: layer(*tensors, adapters=call.adapters) * 1.0  # noqa: E731
    else:
        layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
        call = call._replace(tensors=call.tensors | dict(layer.named_parameters()))
        run = lambda *tensors: layer(*tensors) * 1.0  # noqa: E731
    fast = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for num_tokens in (13, 7, 30):
        other = drawn_call(problem, num_tokens, seed=num_tokens)
        tensors = call.tensors | {name: other.tensors[name] for name in ("hidden_states", "topk_weights")}
        each = Call(tensors, other.topk_ids, other.grad_out)
        # The layer was never called: compiled code makes its kernel.
        found, gradients = each.run(fast), each.gradients()
        truth, wanted = each.run(layer), each.gradients()
        assert torch.equal(found, truth)
        assert gradients.keys() == wanted.keys() == call.tensors.keys()
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
        with torch.no_grad():
            tensors_of_call = tensors["hidden_states"], tensors["topk_weights"], each.topk_ids
            assert torch.equal(fast(*tensors_of_call), run(*tensors_of_call))


def _saves_experts(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_ours = op is torch.ops.moereg.moe_train.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "runs"), [(False, 2), (True, 1)], ids=["whole", "selective"])
def test_checkpointing(selective: bool, runs: int) -> None:
    _, call, layer = drawn_module(**ADAPTED)
    truth, wanted = call.run(layer), call.gradients()
    kernel = layer.prepare()
    before = sum(kernel.token_histogram().values())

    def checkpointed(*tensors: torch.Tensor) -> torch.Tensor:
        if not selective:
            return checkpoint(layer, *tensors, use_reentrant=False)  # type: ignore[no-any-return]
        contexts = lambda: create_selective_checkpoint_contexts(_saves_experts)  # noqa: E731
        return checkpoint(layer, *tensors, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    found = call.run(checkpointed)
    assert torch.equal(found, truth)
    assert all(torch.equal(wanted[name], gradient) for name, gradient in call.gradients().items())
    assert sum(kernel.token_histogram().values()) - before == runs


class RecordingExperts(TorchTrainingExperts):
    """Keeps the names of the gradients that were asked for, with their addresses."""

    asked: list[dict[str, int]]

    @functools.wraps(TorchTrainingExperts.apply_backward)
    def apply_backward(self, *_: Any, **given: Any) -> None:
        held = {name: value for name, value in vars(given["grads"]).items() if isinstance(value, torch.Tensor)}
        type(self).asked.append({name: value.data_ptr() for name, value in held.items()})
        assert not given["grads"].accumulate
        super().apply_backward(**given)


def register(experts: type[TorchTrainingExperts], registry: BackendRegistry) -> None:
    register_moe_backend("stub", 1000, ("unquantized",), ("cpu",), registry=registry)(experts)


@pytest.mark.parametrize(
    "followed",
    [
        {"hidden_states"},
        {"topk_weights"},
        {"w13"},
        {"w2", "w13_bias"},
        {"hidden_states", "w2_bias"},
        {"w13_a"},
        {"w13_b"},
        {"w2_a"},
        {"w2_b", "w13"},
        {"hidden_states", "topk_weights", "w13", "w2", "w13_bias", "w2_bias", "w13_a", "w13_b", "w2_a", "w2_b"},
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_only_what_requires_a_gradient_is_computed(followed: set[str], isolated_registry: BackendRegistry) -> None:
    asked: list[dict[str, int]] = []
    register(type("Recording", (RecordingExperts,), {"asked": asked}), isolated_registry)
    problem = trained_problem(has_bias=True, **ADAPTED)
    call = drawn_call(problem)
    _, truth = expected(problem, call)
    for name, tensor in call.tensors.items():
        tensor.requires_grad_(name in followed)
    selection = moereg.select_backend(problem, platform="cpu", require="stub")
    call.run(moereg.make_kernel(problem, call.weights, selection))
    found = call.gradients()
    # Each tensor becomes its leaf's gradient without a copy.
    assert asked == [{name: gradient.data_ptr() for name, gradient in found.items()}]
    assert found.keys() == followed
    assert all(error(gradient, truth[name]) < 5e-6 for name, gradient in found.items())


@pytest.mark.parametrize("kind", ["kernel", "layer", "layer with a map"])
def test_what_was_first_called_in_inference_mode_trains(kind: str) -> None:
    problem = trained_problem(**({"num_local_experts": 3} if "map" in kind else {}))
    call = drawn_call(problem)
    with torch.inference_mode():
        layer: Any = (moereg.make_kernel if kind == "kernel" else moereg.MoELayer)(problem, call.weights)
        layer(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
    _, truth = expected(problem, call)
    if kind != "kernel":
        call = call._replace(tensors=call.tensors | dict(layer.named_parameters()))
    call.run(layer)
    assert all(error(gradient, truth[name]) < 5e-6 for name, gradient in call.gradients().items())
    if "map" in kind:
        layer.prepare().expert_map.fill_(-1)
        assert not layer(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids).any()


def test_nothing_is_saved_without_gradients(isolated_registry: BackendRegistry) -> None:
    @functools.wraps(TorchTrainingExperts.apply_saving)
    def apply_saving(self: Any, *_: Any, **given: Any) -> None:
        raise AssertionError("a call without gradients needs nothing saved")

    register(type("Inferring", (TorchTrainingExperts,), {"apply_saving": apply_saving}), isolated_registry)
    problem = trained_problem()
    call = drawn_call(problem)
    kernel = moereg.make_kernel(problem, call.weights, moereg.select_backend(problem, platform="cpu", require="stub"))
    routes = call.tensors["topk_weights"], call.topk_ids
    with torch.no_grad():
        assert not kernel(call.tensors["hidden_states"], *routes).requires_grad
    for tensor in call.tensors.values():
        tensor.requires_grad_(False)
    out = torch.empty_like(call.tensors["hidden_states"])
    assert kernel(call.tensors["hidden_states"], *routes, out=out) is out


def test_what_the_problem_does_not_name_is_refused_in_the_backward_pass() -> None:
    problem, call, kernel = drawn_kernel(gradients={"weights"})
    with pytest.raises(
        GradientError, match=r"MoEProblem\(gradients=\.\.\.\) names, got a backward pass .* name it there"
    ):
        call.run(kernel)
    for name in ("hidden_states", "topk_weights"):
        call.tensors[name].requires_grad_(False)
    _, truth = expected(problem, call)
    call.run(kernel)
    assert all(error(gradient, truth[name]) < 5e-6 for name, gradient in call.gradients().items())


def test_a_given_output_stays_outside_of_the_graph() -> None:
    _, call, kernel = drawn_kernel(gradients={"weights"})
    routes = call.tensors["topk_weights"].detach(), call.topk_ids
    with pytest.raises(GradientError, match="out must be None"):
        kernel(call.tensors["hidden_states"].detach(), *routes, out=torch.empty_like(call.grad_out))


def test_a_second_derivative_is_refused() -> None:
    _, call, kernel = drawn_kernel()
    x = call.tensors["hidden_states"]
    out = kernel(x, call.tensors["topk_weights"], call.topk_ids)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="first gradients only, got a backward pass through a backward pass; call"):
        first.sum().backward()


def test_batched_gradients_are_those_of_each() -> None:
    _, call, kernel = drawn_kernel()
    x = call.tensors["hidden_states"]
    out = kernel(x, call.tensors["topk_weights"], call.topk_ids)
    batch = torch.randn(2, *out.shape)
    (found,) = torch.autograd.grad(out, x, batch, retain_graph=True, is_grads_batched=True)
    for gradient, grad_out in zip(found, batch, strict=True):
        assert torch.equal(gradient, torch.autograd.grad(out, x, grad_out, retain_graph=True)[0])


class _Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(function)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_op() -> None:
    _, call, kernel = drawn_kernel()
    with _Noting() as mode:
        kernel(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
    assert torch.ops.moereg.moe_train in mode.called


class _Zeros(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.num_bytes += out.nbytes if function.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.full) else 0
        return out


def test_a_backward_pass_makes_no_zeros() -> None:
    """What a forward pass keeps is an output of the op too, and its gradient would be as large."""
    problem = trained_problem()
    call = drawn_call(problem)
    out = moereg.make_kernel(problem, call.weights)(
        call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids
    )
    with _Zeros() as mode:
        out.backward(call.grad_out)
        assert mode.num_bytes == 0
        torch.zeros(3)
    assert mode.num_bytes == 12


class _Wrapping(torch.Tensor):
    """Has no memory of its own, as kernels need it: operators get the tensor that it wraps."""

    called: ClassVar[list[Any]] = []
    inner: torch.Tensor

    @staticmethod
    def of(inner: torch.Tensor) -> _Wrapping:
        found: _Wrapping = torch.Tensor._make_wrapper_subclass(_Wrapping, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(function)
        return function(*tree_map_only(cls, lambda each: each.inner, args), **(kwargs or {}))


def test_what_hooks_make_of_saved_tensors_reaches_the_op() -> None:
    _, call, kernel = drawn_kernel()
    call.run(kernel)
    truth = call.gradients()
    _Wrapping.called.clear()
    with saved_tensors_hooks(lambda saved: saved, _Wrapping.of):
        call.run(kernel)
    assert {each for each in _Wrapping.called if each.namespace == "moereg"} == {
        torch.ops.moereg.moe_train_backward.default
    }
    found = call.gradients()
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_weights_written_between_the_passes_are_an_error() -> None:
    _, call, kernel = drawn_kernel()
    out = kernel(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
    with torch.no_grad():
        call.tensors["w2"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("adapters", [{}, ADAPTED, {**ADAPTED, "gradients": {"adapters"}}], ids=["", "both", "frozen"])
def test_a_layer_that_is_converted_between_the_passes_is_an_error(adapters: dict[str, Any]) -> None:
    problem = trained_problem(**adapters)
    call = drawn_call(problem)
    layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
    out = layer(call.tensors["hidden_states"].detach(), call.tensors["topk_weights"].detach(), call.topk_ids)
    layer.bfloat16()
    text = "which ran in float32 on cpu, got parameters that were converted since to bfloat16 on cpu; convert a layer"
    with pytest.raises(GradientError, match=text):
        out.sum().backward()


def test_a_graph_keeps_its_kernel() -> None:
    problem, call, kernel = drawn_kernel()
    out = kernel(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
    # Eager code does without torch's dispatcher.
    assert type(out.grad_fn).__name__ == "_TrainBackward"
    del kernel
    gc.collect()
    _, truth = expected(problem, call)
    out.backward(call.grad_out)
    assert all(error(gradient, truth[name]) < 5e-6 for name, gradient in call.gradients().items())


def test_a_deep_copy_trains_its_own_weights() -> None:
    _, call, kernel = drawn_kernel()
    copied = copy.deepcopy(kernel)
    call.run(copied)
    assert call.gradients().keys() == {"hidden_states", "topk_weights"}
    assert copied.held.trained["w13"].grad is not None
    with torch.no_grad():
        copied.held.trained["w2"].zero_()
        out = copied(call.tensors["hidden_states"], call.tensors["topk_weights"], call.topk_ids)
    assert not out.any()
    assert call.tensors["w2"].any()


def test_inference_does_not_take_the_class_that_trains() -> None:
    for gradients in (frozenset(), ALL):
        selection = moereg.select_backend(trained_problem(gradients=gradients), platform="cpu")
        assert (selection.decisions[0].experts == "TorchTrainingExperts") == bool(gradients)


def test_scaled_inputs_and_groups_have_a_reason() -> None:
    problem = trained_problem(top_k=1, apply_router_weight_on_input=True)
    reasons = [reason for one in moereg.explain_backends(problem, platform="cpu").decisions for reason in one.reasons]
    text = "requires apply_router_weight_on_input=False where gradients are asked, got True"
    assert text in {reason.text for reason in reasons}
    inferring = trained_problem(top_k=1, apply_router_weight_on_input=True, gradients=frozenset())
    selection = moereg.explain_backends(inferring, platform="cpu")
    assert "TorchTrainingExperts" in {one.experts for one in selection.decisions if one.accepted}
    assert moereg.explain_backends(problem, platform="cpu").winner is None
    dispatcher = explain_dispatchers(trained_problem(), GroupFacts(2, "gloo", "cpu"), moereg.Platform("cpu", ""))
    assert dispatcher.winner is None
    assert all("gradients" in {reason.code for reason in one.reasons} for one in dispatcher.decisions)


def test_weights_that_cannot_be_read_in_place_are_refused() -> None:
    problem = trained_problem()
    call = drawn_call(problem)
    turned = call.tensors["w2"].detach().transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ArgumentError, match=r"must be contiguous, got w2 with strides \[240, 1, 24\]; pass w2"):
        moereg.make_kernel(problem, moereg.ExpertWeights(w13=call.tensors["w13"], w2=turned))
    with pytest.raises(ArgumentError, match="own_weights copies weights, and gradients of weights train them in place"):
        moereg.make_kernel(problem, call.weights, own_weights=True)
    other = drawn_call(problem, seed=1)
    with pytest.raises(
        ArgumentError, match="this kernel reads w13, w2 where its owner keeps them, got other numbers; write"
    ):
        moereg.make_kernel(problem, call.weights).reload(other.weights)
    with pytest.raises(ArgumentError, match="keep_canonical=False frees the parameters, and gradients of weights"):
        moereg.MoELayer(problem, keep_canonical=False)


def test_a_sharded_parameter_is_refused() -> None:
    problem = trained_problem()
    call = drawn_call(problem)
    sharded: torch.Tensor = call.tensors["w2"].detach().as_subclass(type("DTensor", (torch.Tensor,), {}))
    with pytest.raises(ArgumentError, match="must be plain tensors, got a DTensor as w2; leave the layer's parameters"):
        moereg.make_kernel(problem, moereg.ExpertWeights(w13=call.tensors["w13"], w2=sharded))


@pytest.mark.parametrize(
    ("method", "value", "text"),
    [
        ("saved_shapes", {"pre": ((10**9,), torch.float32)}, "wants to keep more than the rows before the activation"),
        ("saved_shapes", [1], "raised in Stub.saved_shapes"),
        ("backward_workspace_shapes", (3,), "returned no two shapes from Stub.backward_workspace_shapes"),
        ("apply_backward", None, "raised in Stub.apply_backward: ZeroDivisionError"),
    ],
)
def test_a_backend_with_a_fault_is_named(
    method: str, value: Any, text: str, isolated_registry: BackendRegistry
) -> None:
    def shapes(self: Any, problem: Any, num_tokens: int) -> Any:
        return value

    @functools.wraps(TorchTrainingExperts.apply_backward)
    def apply_backward(self: Any, *_: Any, **given: Any) -> None:
        raise ZeroDivisionError

    members = {method: apply_backward if method == "apply_backward" else shapes}
    register(type("Stub", (TorchTrainingExperts,), members), isolated_registry)
    problem = trained_problem()
    call = drawn_call(problem)
    kernel = moereg.make_kernel(problem, call.weights, moereg.select_backend(problem, platform="cpu", require="stub"))
    with pytest.raises(BackendError, match=f"backend 'stub' .*{text}"):
        call.run(kernel)


def test_a_class_that_copies_trained_weights_is_named(isolated_registry: BackendRegistry) -> None:
    def permute_weights(self: Any, weights: moereg.ExpertWeights, problem: Any) -> PermutedWeights:
        return PermutedWeights("canonical", {name: value.clone() for name, value in weights.tensors().items()})

    register(type("Copying", (TorchTrainingExperts,), {"permute_weights": permute_weights}), isolated_registry)
    problem = trained_problem()
    selection = moereg.select_backend(problem, platform="cpu", require="stub")
    with pytest.raises(BackendError, match="copied weights that are read in place"):
        moereg.make_kernel(problem, drawn_call(problem).weights, selection)


def test_saved_tensors_do_not_overlap() -> None:
    saved = torch.zeros(1024, dtype=torch.uint8)
    shapes = {"pre": ((3, 5), torch.float32), "order": ((7,), torch.int32)}
    parts = cut_saved(saved, shapes)
    parts["pre"].fill_(1.0)
    assert not parts["order"].any()
    assert {name: (part.shape, part.dtype) for name, part in parts.items()} == shapes
    assert {(part.data_ptr() - saved.data_ptr()) % 256 for part in parts.values()} == {0}
    assert cut_saved(saved[:283], shapes) == {}  # One byte short.


def test_autocast_changes_no_number() -> None:
    _, call, layer = drawn_module(dtype="bfloat16", **ADAPTED)
    truth, wanted = call.run(layer), call.gradients()
    wide = call.tensors["hidden_states"].detach().float().requires_grad_()
    widened = call._replace(tensors=call.tensors | {"hidden_states": wide})
    with torch.autocast("cpu", dtype=torch.float16):
        found = widened.run(layer)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, truth)
    gradients = widened.gradients()
    assert gradients["hidden_states"].dtype == torch.float32
    assert all(torch.equal(gradient.to(wanted[name].dtype), wanted[name]) for name, gradient in gradients.items())
    with pytest.raises(ValueError, match="hidden_states must be bfloat16, got float32"):
        widened.run(layer)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    _, call, layer = drawn_module(**ADAPTED)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        call.run(torch.nn.parallel.DistributedDataParallel(layer))
    finally:
        torch.distributed.destroy_process_group()
    found = call.gradients()
    call.run(layer)
    assert all(torch.equal(found[name], gradient) for name, gradient in call.gradients().items())
    assert found.keys() == call.tensors.keys()


def test_a_result_is_no_view() -> None:
    """FSDP2 warns of a module that returns one."""
    _, call, layer = drawn_module()
    rows = call.tensors["hidden_states"].detach().requires_grad_()
    routes = call.tensors["topk_weights"].detach(), call.topk_ids
    out = layer(rows.unsqueeze(0), *routes)
    assert out._base is None
    out.mul_(2.0)  # As models add shared experts.
    truth = torch.autograd.grad(2.0 * layer(rows, *routes).sum(), rows)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), rows)[0], truth)


def test_a_backward_pass_by_the_input_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two tensors of a step lie in one place: launches are recorded by address."""
    problem, call, kernel = drawn_kernel()
    given: list[list[int]] = []
    right = moereg.MoEKernel.run_backward

    def run_backward(self: Any, gradients: Any, *others: Any) -> None:
        grad_out, saved, tokens, parameters = others
        tensors = grad_out, saved, *tokens, *parameters.weights.values()
        given.append([tensor.data_ptr() for tensor in tensors])
        right(self, gradients, *others)

    monkeypatch.setattr(moereg.MoEKernel, "run_backward", run_backward)
    x = call.tensors["hidden_states"]
    truth, gradients = expected(problem, call._replace(grad_out=x.detach()))
    out = kernel(x, call.tensors["topk_weights"], call.topk_ids)
    out.backward(x.detach())
    assert error(out, truth) < 5e-6
    (addresses,) = given
    assert len(set(addresses)) == len(addresses)
    found = call.gradients()
    assert all(error(found[name], gradients[name]) < 5e-6 for name in gradients)
