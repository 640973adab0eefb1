"""Adapters of experts: their checks, merging, and training through kernels and layers on a CPU."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

import moereg
from moereg.errors import ArgumentError, GradientError, UnknownNameError
from moereg.routing import RouterSpec
from moereg.spec.problem import GRADIENTS
from moereg.weights.adapters import ADAPTER_TENSORS, adapter_shapes
from tests.training.layers import ADAPTED, Call, drawn_call, drawn_kernel, error, expected, trained_problem
from tests.training.test_gradients import BOUNDS, compare

PROBLEM = trained_problem(**ADAPTED)
CPU = torch.device("cpu")


def routed(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a call passes, without gradients."""
    return call.tensors["hidden_states"].detach(), call.tensors["topk_weights"].detach(), call.topk_ids


def changed(call: Call, **tensors: torch.Tensor | None) -> Call:
    """The call with other leaves; without those that are None."""
    held = {**call.tensors, **tensors}
    return call._replace(tensors={name: tensor for name, tensor in held.items() if tensor is not None})


def adapters_of(call: Call) -> moereg.ExpertAdapters:
    assert call.adapters is not None
    return call.adapters


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"w13_b": None}, "w13_a and w13_b are one adapter, got one of the two; pass both or none"),
        ({"w2_a": None}, "w2_a and w2_b are one adapter"),
        ({"w13_a": 3}, "w13_a must be a Tensor, got 3"),
        ({"w2_scaling": "2"}, "w2_scaling must be a finite number, got '2'"),
        ({"w13_scaling": math.nan}, "w13_scaling must be a finite number, got nan"),
    ],
)
def test_what_are_no_adapters_is_said(changes: dict[str, Any], text: str) -> None:
    held = vars(adapters_of(drawn_call(PROBLEM)))
    with pytest.raises(ArgumentError, match=text):
        moereg.ExpertAdapters(**{**held, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"w13_a": torch.zeros(6, 5, 24), "w13_b": torch.zeros(6, 20, 5)},
            "w13_a has rank 5, and the problem's adapter_rank is 4; make the problem with adapter_rank=5 or more",
        ),
        (
            {"w13_b": torch.zeros(6, 20, 3)},
            r"w13_b must be \[6, 20, 4\], of a float dtype and on cpu, got \[6, 20, 3\]",
        ),
        ({"w2_a": torch.zeros(5, 3, 10)}, r"w2_a must be \[6, 3, 10\]"),
        ({"w2_a": torch.zeros(3, 10)}, r"w2_a must be \[6, 1, 10\]"),
        ({"w2_a": torch.empty(6, 0, 10), "w2_b": torch.empty(6, 24, 0)}, "w2_a must have a rank of 1 or more"),
        ({"w2_b": torch.zeros(6, 24, 3, dtype=torch.int32)}, "of a float dtype and on cpu, got .* torch.int32"),
        ({"w13_a": torch.zeros(6, 4, 24, device="meta")}, "on cpu, got .* on meta"),
    ],
)
def test_adapters_of_another_layer_are_refused(changes: dict[str, torch.Tensor], text: str) -> None:
    call = drawn_call(PROBLEM)
    adapters = adapters_of(call).with_tensors(changes)
    kernel = moereg.make_kernel(PROBLEM, call.weights)
    with pytest.raises(ArgumentError, match=text):
        kernel(*routed(call), adapters=adapters)
    if adapters.w13_a is not None and adapters.w13_a.device == CPU:  # A layer moves them to its device.
        with pytest.raises(ArgumentError, match=text):
            moereg.MoELayer(PROBLEM, call.weights, adapters=adapters)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_replaced_parameter_of_another_shape_is_refused(compiles: bool) -> None:
    call = drawn_call(PROBLEM)
    layer = moereg.MoELayer(PROBLEM, call.weights, adapters=call.adapters)
    layer.register_parameter("w2_b", torch.nn.Parameter(torch.zeros(6, 23, 3)))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"w2_b must be \[6, 24, 3\]"):
        (torch.compile(layer, backend="eager") if compiles else layer)(*routed(call))


def test_a_layer_without_adapters_takes_none() -> None:
    problem, call = trained_problem(), drawn_call(PROBLEM)
    kernel = moereg.make_kernel(problem, call.weights)
    with pytest.raises(ArgumentError, match="rank 4, and the problem's adapter_rank is 0; make the problem with"):
        kernel(*routed(call), adapters=call.adapters)
    with pytest.raises(ArgumentError, match="rank 4, and the problem's adapter_rank is 0; make the problem with"):
        moereg.MoELayer(problem, call.weights, adapters=call.adapters)
    with pytest.raises(ArgumentError, match=r"adapters must be an ExpertAdapters, got \{\}; make them with"):
        kernel(*routed(call), adapters={})
    with pytest.raises(ArgumentError, match="adapters have the problem's adapter_rank, got none in E6"):
        moereg.ExpertAdapters.initial(problem, 8)


def test_a_backend_without_adapters_has_a_reason() -> None:
    problem = trained_problem(gradients={"adapters"}, adapter_rank=4)
    selection = moereg.explain_backends(problem, platform="cpu")
    reasons = [reason for decision in selection.decisions for reason in decision.reasons if reason.code == "gradients"]
    assert {reason.text for reason in reasons} == {
        "does not compute gradients of (adapters), got gradients of (adapters)"
    }


@pytest.mark.parametrize("dtype", BOUNDS)
def test_merged_weights_compute_what_adapters_compute(dtype: str) -> None:
    problem = trained_problem(dtype=dtype, has_bias=True, **ADAPTED)
    call = drawn_call(problem)
    truth, _ = expected(problem, call)
    with torch.no_grad():
        merged = adapters_of(call).merged(call.weights)
        assert error(moereg.make_kernel(problem, merged)(*routed(call)), truth) < BOUNDS[dtype]
        unmerged = moereg.make_kernel(problem, call.weights)
        assert error(unmerged(*routed(call), adapters=call.adapters), truth) < BOUNDS[dtype]
        assert error(unmerged(*routed(call)), truth) > 0.1
    # One rounding to the weights' dtype.
    exact = call.weights.w2.double() + 1.25 * call.tensors["w2_b"].double() @ call.tensors["w2_a"].double()
    assert torch.allclose(merged.w2.double(), exact, rtol=torch.finfo(problem.torch_dtype).eps, atol=1e-6)
    only_w2 = moereg.ExpertAdapters(w2_a=call.tensors["w2_a"], w2_b=call.tensors["w2_b"]).merged(call.weights)
    assert only_w2.w13 is call.weights.w13


def test_quantized_weights_are_not_merged() -> None:
    call = drawn_call(PROBLEM)
    scheme = "int8_w8a16"
    weights = moereg.quantize.quantize_weights(
        moereg.ExpertWeights(w13=torch.ones(6, 20, 24), w2=torch.ones(6, 24, 10)), scheme
    )
    with pytest.raises(ArgumentError, match="requires weights in 16 or 32 bits, got int8_w8a16; restore them first"):
        adapters_of(call).merged(weights)


@pytest.mark.parametrize(("rank_stabilized", "scaling"), [(False, 2.0), (True, 4.0)])
def test_initial_adapters_change_nothing(rank_stabilized: bool, scaling: float) -> None:
    call = drawn_call(trained_problem(dtype="bfloat16"))
    problem = trained_problem(dtype="bfloat16", **ADAPTED)
    adapters = moereg.ExpertAdapters.initial(problem, 8, rank_stabilized=rank_stabilized)
    assert (adapters.w13_scaling, adapters.w2_scaling) == (scaling, scaling)
    assert {name: tuple(tensor.shape) for name, tensor in adapters.tensors().items()} == adapter_shapes(problem, 4)
    assert {tensor.dtype for tensor in adapters.tensors().values()} == {torch.bfloat16}
    for name, columns in (("w13_a", 24), ("w2_a", 10)):
        drawn = adapters.tensors()[name].float().abs()
        assert 0.9 * columns**-0.5 < drawn.max() <= 1.01 * columns**-0.5
    kernel = moereg.make_kernel(problem, call.weights)
    truth, _ = expected(trained_problem(dtype="bfloat16"), call)
    assert error(kernel(*routed(call), adapters=adapters), truth) < BOUNDS["bfloat16"]
    with pytest.raises(UnknownNameError, match=r"'gate' \(known: w13, w2\)"):
        moereg.ExpertAdapters.initial(problem, 8, targets=("gate",))


@pytest.mark.parametrize("absent", ["w13", "w2", ""])
@pytest.mark.parametrize("gradients", [GRADIENTS, ("adapters",)], ids=["all", "frozen base"])
def test_gradients_of_adapters_are_those_of_autograd(absent: str, gradients: tuple[str, ...]) -> None:
    problem = trained_problem(gradients=gradients, adapter_rank=4, has_bias=True)
    call = drawn_call(problem)
    if absent:
        call = changed(call, **{f"{absent}_a": None, f"{absent}_b": None})
    for name, tensor in call.tensors.items():
        tensor.requires_grad_(name in ADAPTER_TENSORS or "weights" in gradients)
    if "weights" in gradients:
        compare(problem, call, moereg.make_kernel(problem, call.weights))
        return
    truth, wanted = expected(problem, call)
    assert error(call.run(moereg.make_kernel(problem, call.weights)), truth) < BOUNDS["float32"]
    found = call.gradients()
    assert found.keys() == set(ADAPTER_TENSORS) & call.tensors.keys()
    assert all(error(found[name], wanted[name]) < BOUNDS["float32"] for name in found)


def test_without_adapters_the_base_runs() -> None:
    call = drawn_call(PROBLEM)
    base = changed(call, **dict.fromkeys(ADAPTER_TENSORS))
    kernel = moereg.make_kernel(PROBLEM, call.weights)
    compare(PROBLEM, base, kernel)
    assert all(call.tensors[name].grad is None for name in ADAPTER_TENSORS)
    compare(PROBLEM, call, kernel)


def test_experts_can_share_a_factor() -> None:
    call = drawn_call(PROBLEM)
    shared = call.tensors["w13_a"].detach()[:1].clone().requires_grad_()
    tied = changed(call, w13_a=shared.expand(6, -1, -1))
    _, wanted = expected(PROBLEM, tied)
    out = tied.run(moereg.make_kernel(PROBLEM, call.weights))
    assert out.requires_grad
    assert shared.grad is not None
    assert error(shared.grad, wanted["w13_a"].sum(0, keepdim=True)) < BOUNDS["float32"]


def test_a_layer_takes_no_parameters_that_share_memory() -> None:
    call = drawn_call(PROBLEM)
    tied = changed(call, w13_a=call.tensors["w13_a"].detach()[:1].expand(6, -1, -1))
    with pytest.raises(ArgumentError, match=r"w13_a shares memory between its elements, .*; pass w13_a.contiguous\(\)"):
        moereg.MoELayer(PROBLEM, call.weights, adapters=tied.adapters)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("made", ["kernel", "layer"])
def test_adapters_may_be_wide_and_turned_over_a_narrow_base(made: str, compiles: bool) -> None:
    problem = trained_problem(dtype="bfloat16", gradients=GRADIENTS, adapter_rank=4)
    call = drawn_call(problem)
    turned = {
        name: (call.tensors[name].detach().float() * 1.003)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        .requires_grad_()
        for name in ADAPTER_TENSORS
    }
    call = changed(call, **turned)
    layer: Any
    if made == "kernel":
        kernel = moereg.make_kernel(problem, call.weights)
        layer = lambda *tensors: kernel(*tensors, adapters=call.adapters)  # noqa: E731
    else:
        layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
        call = changed(call, **dict(layer.named_parameters()))
    truth, wanted = expected(problem, call)
    torch._dynamo.reset()
    out = call.run(torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer)
    found = call.gradients()
    assert error(out, truth) < BOUNDS["bfloat16"]
    for name in wanted:
        assert found[name].dtype == call.tensors[name].dtype, name
        assert error(found[name], wanted[name]) < BOUNDS["bfloat16"], name
    with torch.no_grad():
        assert torch.equal(layer(*routed(call)), out)


def test_a_call_may_write_into_an_output() -> None:
    _, call, kernel = drawn_kernel(gradients={"adapters"}, adapter_rank=4)
    out = torch.full_like(call.grad_out, torch.nan)
    with torch.no_grad():
        assert kernel(*routed(call), out=out, adapters=call.adapters) is out
    assert error(out, expected(PROBLEM, call)[0]) < BOUNDS["float32"]
    with pytest.raises(GradientError, match="out must be None"):
        kernel(*routed(call), out=out, adapters=call.adapters)


def test_what_is_not_named_raises_beside_adapters() -> None:
    problem, call, kernel = drawn_kernel(gradients={"adapters"}, adapter_rank=4)
    with pytest.raises(GradientError, match="for another tensor"):
        call.run(kernel)
    layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
    layer(*routed(call)).sum().backward()
    layer.requires_grad_(True)
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        with pytest.raises(GradientError):
            run(*routed(call)).sum().backward()


def test_a_layer_makes_adapters_that_change_nothing() -> None:
    problem = trained_problem(gradients={"adapters"}, adapter_rank=4)
    call = drawn_call(problem)
    layer = moereg.MoELayer(problem, call.weights)
    assert layer.adapters is not None
    assert layer.adapters.w13_scaling == 1.0
    truth, _ = expected(problem, changed(call, **dict.fromkeys(ADAPTER_TENSORS)))
    assert error(layer(*routed(call)), truth) < BOUNDS["float32"]
    assert sorted(layer.state_dict()) == ["w13", "w13_a", "w13_b", "w2", "w2_a", "w2_b"]
    assert moereg.MoELayer(trained_problem()).adapters is None


def test_copies_of_a_layer_keep_adapters_and_scaling() -> None:
    call = drawn_call(PROBLEM)
    only_w13 = {"w2_a": None, "w2_b": None}
    layer = moereg.MoELayer(PROBLEM, call.weights, adapters=adapters_of(call).with_tensors(only_w13))
    truth, _ = expected(PROBLEM, changed(call, **only_w13))
    meta = moereg.MoELayer(PROBLEM, device="meta", adapters=adapters_of(call).with_tensors(only_w13))
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    meta.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assigned = moereg.MoELayer(PROBLEM, device="meta", adapters=adapters_of(call).with_tensors(only_w13))
    assigned.load_state_dict(layer.state_dict(), assign=True)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), meta, assigned):
        assert sorted(each.state_dict()) == ["w13", "w13_a", "w13_b", "w2"]
        with torch.no_grad():
            assert error(each(*routed(call)), truth) < BOUNDS["float32"]
    with torch.no_grad():
        copied = copy.deepcopy(layer)
        copied.get_parameter("w13_b").zero_()
        assert error(copied(*routed(call)), truth) > 0.1
        assert error(layer(*routed(call)), truth) < BOUNDS["float32"]


def test_a_layer_made_in_inference_mode_trains_its_adapters() -> None:
    call = drawn_call(PROBLEM)
    with torch.inference_mode():
        layer = moereg.MoELayer(PROBLEM, call.weights, adapters=call.adapters).to(torch.float16).to(torch.float32)
    layer(*routed(call)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_an_exported_layer_has_merged_weights() -> None:
    router = RouterSpec(kind="softmax_topk", num_experts=6, top_k=2)
    call = drawn_call(PROBLEM)
    layer = moereg.MoELayer(PROBLEM, call.weights, adapters=call.adapters, router=router)
    x = torch.randn(5, 24)
    with torch.no_grad(), pytest.raises(Exception, match="an exported program has no adapters; export a layer of"):
        torch.export.export(layer, (x,))
    assert layer.adapters is not None
    merged = moereg.MoELayer(trained_problem(gradients=()), layer.adapters.merged(layer.weights), router=router)
    with torch.no_grad():
        assert error(torch.export.export(merged, (x,)).module()(x), layer(x).double()) < BOUNDS["float32"]
