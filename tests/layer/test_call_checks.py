"""What a layer refuses at each call, and asks of its experts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from moereg.bench.inputs import random_call
from moereg.errors import ArgumentError, GradientError
from moereg.layer.factory import MoEKernel
from moereg.nn.module import MoELayer
from moereg.spec.problem import GRADIENTS
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from tests.layer.small_layers import CPU, INPUTS, build_refused, call, kernel_of, problem_of
from tests.support.fakes import FakeExperts
from tests.support.no_backward import refuses_backward


def refuse(kernel: MoEKernel, inputs: Inputs, text: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call(kernel, inputs, **changes)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_states", torch.zeros(4, 17), "hidden_states must have shape [4, 16], got [4, 17]"),
        ("hidden_states", torch.zeros(4, 1, 16), "hidden_states must be [T,H], got [4, 1, 16]; flatten batch and sequ"),
        ("hidden_states", None, "hidden_states must be a torch.Tensor, got NoneType; convert it"),
        ("hidden_states", [[0.0] * 16] * 4, "hidden_states must be a torch.Tensor, got list; convert it"),
        ("topk_weights", None, "topk_weights must be a torch.Tensor, got NoneType; convert it"),
        ("topk_ids", [[0, 1]] * 4, "topk_ids must be a torch.Tensor, got list; convert it"),
        ("hidden_states", torch.zeros(()), "hidden_states must have shape [0, 16], got []"),
        ("hidden_states", torch.zeros(4, 16).half(), "hidden_states must be float32, got float16; convert it"),
        ("hidden_states", torch.zeros(16, 4).T, "hidden_states must be contiguous, got strides [1, 4]; call .contiguo"),
        ("hidden_states", torch.zeros(4, 16, device="meta"),
            "hidden_states must be on the weights' device cpu, got meta; move it"),
        ("topk_weights", torch.zeros(4, 3), "topk_weights must have shape [4, 2], got [4, 3]"),
        ("topk_weights", torch.zeros(4, 2).bfloat16(), "topk_weights must be float32, got bfloat16; convert it"),
        ("topk_weights", torch.zeros(4, 2, device="meta"),
            "topk_weights must be on the weights' device cpu, got meta; move it"),
        ("topk_ids", torch.zeros(3, 2).int(), "topk_ids must have shape [4, 2], got [3, 2]"),
        ("topk_ids", torch.zeros(4, 2).short(), "topk_ids must be int32 or int64, got int16; convert it"),
        ("topk_ids", torch.zeros(4, 2, dtype=torch.int32, device="meta"),
            "topk_ids must be on the weights' device cpu, got meta; move it"),
        ("topk_weights", torch.tensor([[1, 1], [1, 1], [1, float("nan")], [1, 1]]),
            "topk_weights must be finite, got nan at token 2, slot 1; look at the router (on a GPU this is checked wi"),
        ("topk_ids", torch.tensor([[0, 1], [5, 5], [2, 3], [4, 4]]),
            "topk_ids of one token must be distinct, got [5, 5] at token 1; add the two weights up instead (on a GPU"),
        ("out", torch.zeros(5, 16), "out must have shape [4, 16], got [5, 16]"),
        ("out", torch.zeros(4, 16).bfloat16(), "out must be float32, got bfloat16; convert it"),
        ("out", torch.zeros(16, 4).T, "out must be contiguous, got strides [1, 4]; call .contiguous()"),
        ("out", torch.zeros(4, 16, device="meta"), "out must be on the weights' device cpu, got meta; move it"),
    ],
)  # fmt: skip
def test_bad_inputs(field: str, value: Any, text: str) -> None:
    if field == "out":
        refuse(kernel_of(problem_of()), INPUTS, text, out=value)
    else:
        refuse(kernel_of(problem_of()), dataclasses.replace(INPUTS, **{field: value}), text)


def test_unmapped_ids_may_repeat() -> None:
    ids = torch.tensor([[-1, -1], [8, 8], [2**31 - 1, 2**31 - 1], [0, 1]], dtype=torch.int32)
    out = call(kernel_of(problem_of()), dataclasses.replace(INPUTS, topk_ids=ids))
    assert not out[:3].any()
    assert out[3].any()


def test_out_aliases_no_input() -> None:
    kernel = kernel_of(problem_of())
    text = "out must not alias an input: it is overwritten while inputs are read; pass another tensor"
    refuse(kernel, INPUTS, text, out=INPUTS.hidden_states)
    buffer = torch.zeros(7, 16)
    buffer[:4] = INPUTS.hidden_states
    shifted = dataclasses.replace(INPUTS, hidden_states=buffer[:4])
    refuse(kernel, shifted, text, out=buffer[3:])
    scratch = torch.zeros(4, 16)
    weights = scratch.flatten()[-8:].view(4, 2)
    refuse(kernel, dataclasses.replace(INPUTS, topk_weights=weights), text, out=scratch)
    # Neighbors in one buffer do not overlap.
    wide = torch.zeros(8, 16)
    wide[:4] = INPUTS.hidden_states
    call(kernel, dataclasses.replace(INPUTS, hidden_states=wide[:4]), out=wide[4:])
    assert torch.equal(wide[:4], INPUTS.hidden_states)
    assert wide[4:].any()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("field", ["hidden_states", "topk_weights"])
def test_inputs_that_require_gradients(field: str, compiles: bool) -> None:
    kernel = kernel_of(problem_of())
    torch._dynamo.reset()
    called = torch.compile(kernel, backend="aot_eager", fullgraph=True) if compiles else kernel
    inputs = dataclasses.replace(INPUTS, **{field: getattr(INPUTS, field).clone().requires_grad_()})
    wanted = call(kernel, INPUTS)
    assert not wanted.requires_grad
    found = call(called, inputs)
    assert torch.equal(found.detach(), wanted)
    found += wanted  # As a layer does that adds its shared experts.
    refuses_backward(found)
    # What is passed stays outside of the graph, and whoever reads it would miss a gradient.
    out = torch.empty(4, 16)
    with pytest.raises(GradientError, match=r"^out must be None where an input requires a gradient, "):
        call(kernel, inputs, out=out)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = call(called, inputs, out=out)
            assert compiles or found is out
            assert not found.requires_grad


def test_max_num_tokens_is_kept() -> None:
    kernel = kernel_of(problem_of(max_num_tokens=3))
    refuse(kernel, INPUTS, "the problem says max_num_tokens=3, got 4 tokens")
    call(kernel, make_inputs(kernel.problem, 3, "uniform", CPU))


@pytest.mark.parametrize("value", [4, 7, -2, -(2**31)])
def test_expert_map_values_out_of_range_are_refused(value: int) -> None:
    problem = problem_of(num_local_experts=4, placement="map")
    text = (
        f"expert_map must hold local experts in [0, 4) or -1, got {value} for expert 5; give experts of other ranks -1"
    )
    expert_map = torch.tensor([0, 1, 2, 3, -1, value, -1, -1], dtype=torch.int32)
    build_refused(text, problem, expert_map=expert_map)
    kernel = kernel_of(problem, expert_map=expert_map.clamp(-1, 3))
    assert kernel.expert_map is not None
    kernel.expert_map[5] = value
    refuse(kernel, INPUTS, text)


def forward_mode(function: Any, tensor: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(tensor, torch.ones_like(tensor)))).tangent


TRANSFORMS: dict[str, tuple[Any, type[Exception], str]] = {
    "vmap": (lambda function, each: torch.vmap(function)(torch.stack([each, each])), ArgumentError, "inside of vmap"),
    "grad": (lambda function, each: torch.func.grad(lambda x: function(x).sum())(each), GradientError, "inside of gra"),
    "jvp": (lambda function, each: torch.func.jvp(function, (each,), (each,))[1], GradientError, "inside of jvp; call"),
    "forward": (forward_mode, GradientError, r"got a dual tensor \[\d+, .*\] of forward-mode AD; call torch.autograd"),
}


@pytest.mark.parametrize("gradients", [(), GRADIENTS], ids=["infers", "trains"])
@pytest.mark.parametrize(
    ("name", "field"),
    [("vmap", "topk_ids"), *itertools.product(TRANSFORMS, ("hidden_states", "topk_weights", "w13", "w2_b"))],
)
def test_a_transform_is_one_error_that_says_what_to_do(name: str, field: str, gradients: tuple[str, ...]) -> None:
    transform, kind, text = TRANSFORMS[name]
    problem = problem_of(gradients=gradients, adapter_rank=2 if gradients else 0)
    layer = MoELayer(problem, make_weights(problem, CPU))
    tensors = {**vars(INPUTS), **dict(layer.named_parameters())}
    field = field if field in tensors else "w2"

    def of_layer(tensor: torch.Tensor) -> Any:
        given = {**tensors, field: tensor}
        call = tuple(given.pop(each) for each in ("hidden_states", "topk_weights", "topk_ids"))
        return torch.func.functional_call(layer, given, call)

    def of_kernel(tensor: torch.Tensor) -> Any:
        given = dataclasses.replace(INPUTS, **{field: tensor} if field in vars(INPUTS) else {})
        adapters = layer.adapters
        if field == "w2_b" and adapters is not None:
            adapters = dataclasses.replace(adapters, w2_b=tensor)
        return kernel(given.hidden_states, given.topk_weights, given.topk_ids, adapters=adapters)

    kernel = layer.prepare()
    for function in (of_layer, of_kernel):
        if function is of_layer or field not in ("w13", "w2"):
            with pytest.raises(kind, match=text):
                transform(function, tensors[field].detach())
    found = torch.vmap(lambda _: of_layer(tensors[field]))(torch.zeros(2))  # None of a call's tensors are its own.
    assert torch.equal(found[1], of_layer(tensors[field]))


@pytest.mark.parametrize("name", ["jvp", "forward"])
def test_compiled_code_loses_no_tangent_either(name: str) -> None:
    problem = problem_of()
    layer = MoELayer(problem, make_weights(problem, CPU))
    torch._dynamo.reset()
    call = INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids
    compiled = torch.compile(lambda w13: torch.func.functional_call(layer, {"w13": w13}, call), backend="eager")
    transform, kind, text = TRANSFORMS[name]
    with pytest.raises(kind, match=text):
        transform(compiled, layer.w13.detach())


class NotingExperts(FakeExperts):
    """Records the shapes of its arguments."""

    called: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    def apply(self, out, inputs, weights, workspace13, workspace2):  # type: ignore[no-untyped-def]
        self.called.append((len(inputs.hidden_states), tuple(workspace13.shape), tuple(workspace2.shape)))
        out.zero_()


@pytest.fixture
def kernel() -> MoEKernel:
    NotingExperts.called = []
    return kernel_of(problem_of(), NotingExperts)


def run(kernel: MoEKernel, num_tokens: int) -> torch.Tensor:
    return kernel(*random_call(problem_of(), num_tokens, "uniform", torch.Generator().manual_seed(1)))


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
    hidden_states, topk_weights, topk_ids = random_call(problem_of(), num_tokens, "uniform", generator)
    topk_weights[1, 1] = value
    with pytest.raises(ValueError, match=r"must be finite, got .* at token 1, slot 1"):
        kernel(hidden_states, topk_weights, topk_ids)
    kernel.checks_values = False
    kernel(hidden_states, topk_weights, topk_ids)


def test_an_engine_s_call_on_memory_that_nothing_wrote_may_train() -> None:
    layer = MoELayer(problem_of(gradients=GRADIENTS[:1]), make_weights(problem_of(), CPU))
    kernel = layer.training_kernel()
    x, weights, ids = INPUTS.hidden_states.clone().requires_grad_(), INPUTS.topk_weights.clone(), INPUTS.topk_ids
    weights[0, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        kernel(x, weights, ids)
    kernel.checks_values = False
    assert kernel(x, weights, ids).grad_fn is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"gradients": GRADIENTS[:3]}], ids=str)
def test_weights_of_padding_may_be_anything(num_tokens: int, value: float, changes: dict[str, Any]) -> None:
    problem = problem_of(**changes)
    layer = MoELayer(problem, make_weights(problem, CPU))
    hidden_states, topk_weights, topk_ids = random_call(
        problem, num_tokens, "uniform", torch.Generator().manual_seed(1)
    )
    topk_ids[1], topk_ids[2, 0] = -1, problem.num_experts
    padded = topk_weights.clone()
    padded[1], padded[2, 0] = value, value
    found = []
    for weights in (topk_weights, padded):
        leaves = [each.clone().requires_grad_(bool(changes.get("gradients"))) for each in (hidden_states, weights)]
        out = layer(*leaves, topk_ids)
        if out.requires_grad:
            out.sum().backward()
        found.append([out, *(each.grad for each in (*leaves, *layer.parameters()) if each.grad is not None)])
        layer.zero_grad()
    assert not found[1][0][1].any()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("expert", range(8))
def test_any_expert_named_twice_is_refused(kernel: MoEKernel, expert: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_states, topk_weights, topk_ids = random_call(problem_of(), num_tokens, "uniform", generator)
    topk_ids[1] = expert
    with pytest.raises(ValueError, match="distinct"):
        kernel(hidden_states, topk_weights, topk_ids)
