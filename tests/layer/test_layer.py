"""MoEKernel and make_kernel: what they check, what they share, and that every output form gives the reference's sum."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg import layer
from moereg.discovery import current_platform
from moereg.dispatch import evaluate, select_backend
from moereg.errors import BackendError, LayoutMismatchError
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import Platform
from moereg.prepare_finalize import BatchedPrepareFinalize, StandardPrepareFinalize
from moereg.problem import MoEProblem
from moereg.reference import reference_experts, relative_error
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.request import Request
from moereg.selection import Selection
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from moereg.testing.tolerances import tolerance
from moereg.weights import ExpertWeights, PermutedWeights
from tests.support.fakes import EVERYTHING, BatchedExperts, FakeExperts, PerRouteExperts, WrongExperts

CPU = torch.device("cpu")
FORMS = {"reduced": FakeExperts, "per_route": PerRouteExperts, "per_expert": BatchedExperts}


def problem_of(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 8, "hidden_size": 16, "intermediate_size": 12, "top_k": 2, "dtype": "float32"}
    return MoEProblem(**{**facts, **changes})


def selection_of(problem: MoEProblem, experts: type[FakeExperts] = FakeExperts) -> Selection:
    """A selection of a class that is registered nowhere else."""
    registry = BackendRegistry()
    register_moe_backend("fake", 1, ("unquantized",), ("*",), registry=registry)(experts)
    request = Request(require=("fake",))
    decision = evaluate(registry.cells[0], problem, current_platform(), request)
    assert decision.accepted, decision.reasons
    return Selection(problem, current_platform(), request, (decision,), "required")


def kernel_of(
    problem: MoEProblem, experts: type[FakeExperts] = FakeExperts, weights: ExpertWeights | None = None, **changes: Any
) -> MoEKernel:
    weights = make_weights(problem, CPU) if weights is None else weights
    return make_kernel(problem, weights, selection=selection_of(problem, experts), **changes)


def call(kernel: MoEKernel, inputs: Inputs, **changes: Any) -> torch.Tensor:
    return kernel(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, **changes)


def expected(problem: MoEProblem, weights: ExpertWeights, inputs: Inputs, expert_map: Any = None) -> torch.Tensor:
    return reference_experts(
        problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, expert_map, torch.float64
    )


# Numbers.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_bias": True, "activation": "swigluoai"},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"top_k": 8, "activation": "relu2"},
    ],
    ids=str,
)
def test_every_output_form(form: str, num_tokens: int, changes: dict[str, Any]) -> None:
    activation_format = "batched" if form == "per_expert" else "standard"
    problem = problem_of(activation_format=activation_format, **changes)
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, FORMS[form], weights)
    for routing in ("uniform", "unmapped"):
        inputs = make_inputs(problem, num_tokens, routing, CPU)
        before = inputs.clone()
        out = call(kernel, inputs)
        assert out.shape == (num_tokens, 16)
        assert out.dtype == torch.float32
        assert relative_error(out, expected(problem, weights, inputs)) < 1e-6
        for field in ("hidden_states", "topk_weights", "topk_ids"):
            assert torch.equal(getattr(inputs, field), getattr(before, field))


def test_a_wrong_kernel_is_told_apart() -> None:
    problem = problem_of()
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, 5, "uniform", CPU)
    out = call(kernel_of(problem, WrongExperts, weights), inputs)
    assert relative_error(out, expected(problem, weights, inputs)) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_out_is_overwritten_and_returned(form: str, num_tokens: int) -> None:
    problem = problem_of(activation_format="batched" if form == "per_expert" else "standard")
    kernel = kernel_of(problem, FORMS[form])
    inputs = make_inputs(problem, num_tokens, "unmapped", CPU)
    out = torch.full((num_tokens, 16), torch.nan)
    assert call(kernel, inputs, out=out) is out
    assert torch.equal(out, call(kernel, inputs))
    assert not out.isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_int64_ids(form: str) -> None:
    problem = problem_of(activation_format="batched" if form == "per_expert" else "standard")
    kernel = kernel_of(problem, FORMS[form])
    inputs = make_inputs(problem, 6, "uniform", CPU)
    out = call(kernel, inputs)
    wide = dataclasses.replace(inputs, topk_ids=inputs.topk_ids.long())
    assert torch.equal(call(kernel, wide), out)
    # In 32 bits these would be experts 3, 0 and 7.
    outside = dataclasses.replace(inputs, topk_ids=inputs.topk_ids.long().clone())
    outside.topk_ids[0, 0], outside.topk_ids[1, 1], outside.topk_ids[2, 0] = 2**32 + 3, -(2**32), 2**40 + 7
    narrow = dataclasses.replace(inputs, topk_ids=inputs.topk_ids.clone())
    narrow.topk_ids[0, 0] = narrow.topk_ids[1, 1] = narrow.topk_ids[2, 0] = -1
    assert torch.equal(call(kernel, outside), call(kernel, narrow))
    assert not torch.equal(call(kernel, outside), out)


@pytest.mark.parametrize("form", FORMS)
def test_contiguous_ranks_sum_to_the_whole(form: str) -> None:
    activation_format = "batched" if form == "per_expert" else "standard"
    whole = problem_of(activation_format=activation_format)
    weights = make_weights(whole, CPU)
    inputs = make_inputs(whole, 9, "unmapped", CPU)
    part = problem_of(activation_format=activation_format, num_local_experts=2)
    parts = []
    for rank in range(4):
        local = ExpertWeights(w13=weights.w13[2 * rank : 2 * rank + 2], w2=weights.w2[2 * rank : 2 * rank + 2])
        parts.append(call(kernel_of(part, FORMS[form], local, ep_rank=rank), inputs))
    assert all(out.any() for out in parts)
    assert relative_error(torch.stack(parts).sum(0), expected(whole, weights, inputs)) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_expert_map_is_updated_in_place(form: str) -> None:
    activation_format = "batched" if form == "per_expert" else "standard"
    problem = problem_of(num_local_experts=3, placement="map", activation_format=activation_format)
    weights = make_weights(problem, CPU)
    expert_map = torch.tensor([2, -1, -1, 0, -1, 1, -1, -1], dtype=torch.int32)
    kernel = kernel_of(problem, FORMS[form], weights, expert_map=expert_map)
    inputs = make_inputs(problem, 12, "uniform", CPU)
    assert kernel.expert_map is expert_map
    first = call(kernel, inputs)
    assert relative_error(first, expected(problem, weights, inputs, expert_map)) < 1e-6
    expert_map.copy_(expert_map.flip(0))
    second = call(kernel, inputs)
    assert relative_error(second, expected(problem, weights, inputs, expert_map)) < 1e-6
    assert not torch.equal(first, second)


# Refusals.


def refuse(kernel: MoEKernel, inputs: Inputs, text: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call(kernel, inputs, **changes)


INPUTS = make_inputs(problem_of(), 4, "uniform", CPU)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_states", torch.zeros(4, 17), "hidden_states must have shape [4, 16], got [4, 17]"),
        ("hidden_states", torch.zeros(4, 1, 16), "hidden_states must have shape [4, 16], got [4, 1, 16]"),
        ("hidden_states", None, "hidden_states must be a torch.Tensor, got NoneType; convert it"),
        ("hidden_states", [[0.0] * 16] * 4, "hidden_states must be a torch.Tensor, got list; convert it"),
        ("topk_weights", None, "topk_weights must be a torch.Tensor, got NoneType; convert it"),
        ("topk_ids", [[0, 1]] * 4, "topk_ids must be a torch.Tensor, got list; convert it"),
        ("hidden_states", torch.zeros(()), "hidden_states must have shape [0, 16], got []"),
        ("hidden_states", torch.zeros(4, 16).half(), "hidden_states must be float32, got float16; convert it"),
        (
            "hidden_states",
            torch.zeros(16, 4).T,
            "hidden_states must be contiguous, got strides [1, 4]; call .contiguous()",
        ),
        (
            "hidden_states",
            torch.zeros(4, 16, device="meta"),
            "hidden_states must be on the weights' device cpu, got meta; move it",
        ),
        ("topk_weights", torch.zeros(4, 3), "topk_weights must have shape [4, 2], got [4, 3]"),
        ("topk_weights", torch.zeros(4, 2).bfloat16(), "topk_weights must be float32, got bfloat16; convert it"),
        (
            "topk_weights",
            torch.zeros(4, 2, device="meta"),
            "topk_weights must be on the weights' device cpu, got meta; move it",
        ),
        ("topk_ids", torch.zeros(3, 2).int(), "topk_ids must have shape [4, 2], got [3, 2]"),
        ("topk_ids", torch.zeros(4, 2).short(), "topk_ids must be int32 or int64, got int16; convert it"),
        (
            "topk_ids",
            torch.zeros(4, 2, dtype=torch.int32, device="meta"),
            "topk_ids must be on the weights' device cpu, got meta; move it",
        ),
        (
            "topk_weights",
            torch.tensor([[1, 1], [1, 1], [1, float("nan")], [1, 1]]),
            "topk_weights must be finite, got nan at token 2, slot 1; look at the router (on a GPU this is checked "
            "with MOEREG_DEBUG=1 only)",
        ),
        (
            "topk_weights",
            torch.tensor([[1, 1], [1, 1], [1, 1], [float("inf"), 1]]),
            "topk_weights must be finite, got inf at token 3, slot 0; look at the router (on a GPU this is checked "
            "with MOEREG_DEBUG=1 only)",
        ),
        (
            "topk_ids",
            torch.tensor([[0, 1], [5, 5], [2, 3], [4, 4]]),
            "topk_ids of one token must be distinct, got [5, 5] at token 1; add the two weights up instead (on a GPU "
            "this is checked with MOEREG_DEBUG=1 only)",
        ),
    ],
)
def test_bad_inputs(field: str, value: Any, text: str) -> None:
    refuse(kernel_of(problem_of()), dataclasses.replace(INPUTS, **{field: value}), text)


def test_unmapped_ids_may_repeat() -> None:
    ids = torch.tensor([[-1, -1], [8, 8], [2**31 - 1, 2**31 - 1], [0, 1]], dtype=torch.int32)
    out = call(kernel_of(problem_of()), dataclasses.replace(INPUTS, topk_ids=ids))
    assert not out[:3].any()
    assert out[3].any()


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (torch.zeros(5, 16), "out must have shape [4, 16], got [5, 16]"),
        (torch.zeros(4, 16).bfloat16(), "out must be float32, got bfloat16; convert it"),
        (torch.zeros(16, 4).T, "out must be contiguous, got strides [1, 4]; call .contiguous()"),
        (torch.zeros(4, 16, device="meta"), "out must be on the weights' device cpu, got meta; move it"),
    ],
)
def test_bad_out(out: torch.Tensor, text: str) -> None:
    refuse(kernel_of(problem_of()), INPUTS, text, out=out)


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


def test_inference_only() -> None:
    kernel = kernel_of(problem_of())
    text = "moereg is for inference: inputs must not require grad; call it under torch.no_grad()"
    for field in ("hidden_states", "topk_weights"):
        inputs = dataclasses.replace(INPUTS, **{field: getattr(INPUTS, field).clone().requires_grad_()})
        refuse(kernel, inputs, text)
        with torch.no_grad():
            assert torch.equal(call(kernel, inputs), call(kernel, INPUTS))
    with torch.inference_mode():
        call(kernel, INPUTS)


def test_weights_may_be_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    plain = make_weights(problem, CPU)
    parameters = ExpertWeights(w13=torch.nn.Parameter(plain.w13), w2=torch.nn.Parameter(plain.w2))
    for form in ("reduced", "per_route"):
        kernel = kernel_of(problem, FORMS[form], parameters)
        out = call(kernel, INPUTS)
        assert not out.requires_grad
        assert torch.equal(out, call(kernel_of(problem, FORMS[form], plain), INPUTS))
        kernel.reload(make_weights(problem, CPU, seed=1))


def test_max_num_tokens_is_kept() -> None:
    kernel = kernel_of(problem_of(max_num_tokens=3))
    refuse(kernel, INPUTS, "the problem says max_num_tokens=3, got 4 tokens")
    call(kernel, make_inputs(kernel.problem, 3, "uniform", CPU))


# Building.


def build_refused(text: str, problem: MoEProblem | None = None, **changes: Any) -> None:
    problem = problem_of() if problem is None else problem
    keywords = {"weights": make_weights(problem, CPU), "selection": selection_of(problem), **changes}
    with pytest.raises(ValueError, match=re.escape(text)):
        make_kernel(problem, **keywords)


def test_selection_has_to_be_this_problems() -> None:
    other = selection_of(problem_of(top_k=3))
    build_refused(
        "the selection was made for E8 H16 I12 k3 float32 unquantized silu, got E8 H16 I12 k2", selection=other
    )


def test_selection_has_to_be_registered_here() -> None:
    selection = selection_of(problem_of())
    values = selection.to_dict()
    build_refused(
        "the selection has no backend that is registered here (it names 'fake'); select again",
        selection=Selection.from_dict(values),
    )
    build_refused("(it names None); select again", selection=dataclasses.replace(selection, decisions=(), source=None))


def test_weights_have_to_be_this_problems() -> None:
    build_refused("w13 must be [8, 24, 16]", weights=make_weights(problem_of(intermediate_size=10), CPU))


def test_weights_have_to_be_where_the_platform_is() -> None:
    weights = make_weights(problem_of(), CPU).to("meta")
    build_refused("needs weights on a cpu or cuda device, got meta; move the weights there", weights=weights)


@pytest.mark.parametrize(
    ("problem", "arguments", "text"),
    [
        ({}, {"ep_rank": 1}, "ep_rank must be 0 where all experts are local, got 1"),
        (
            {"num_local_experts": 2},
            {"ep_rank": 4},
            "ep_rank must be in [0, 4) for 2 of 8 experts a rank, got 4",
        ),
        ({"num_local_experts": 2}, {"ep_rank": -1}, "ep_rank must be in [0, 4) for 2 of 8 experts a rank, got -1"),
        (
            {"num_local_experts": 3},
            {"ep_rank": 2},
            "contiguous placement needs num_experts % num_local_experts == 0, got 8 and 3; give uneven ranks ",
        ),
        (
            {},
            {"expert_map": torch.zeros(8, dtype=torch.int32)},
            "expert_map needs placement='map' in the problem, got placement='contiguous'",
        ),
        (
            {"placement": "map"},
            {},
            "placement 'map' needs expert_map, int32 [num_experts] with the local expert or -1",
        ),
        (
            {"placement": "map"},
            {"expert_map": torch.zeros(7, dtype=torch.int32)},
            "expert_map must have shape [8], got [7]",
        ),
        ({"placement": "map"}, {"expert_map": torch.zeros(8)}, "expert_map must be int32, got float32; convert it"),
        (
            {"placement": "map"},
            {"expert_map": torch.zeros(8, dtype=torch.int32, device="meta")},
            "expert_map must be on the weights' device cpu, got meta; move it",
        ),
        (
            {},
            {"prepare_finalize": BatchedPrepareFinalize()},
            "prepare_finalize 'batched' makes the batched format but the problem says standard; choose it first and "
            "put its format in the problem",
        ),
    ],
)
def test_placement_is_checked(problem: dict[str, Any], arguments: dict[str, Any], text: str) -> None:
    build_refused(text, problem_of(**problem), **arguments)


def test_the_contiguous_map() -> None:
    problem = problem_of(num_local_experts=3, num_experts=9)
    maps = [kernel_of(problem, ep_rank=rank).expert_map for rank in range(3)]
    assert [value.tolist() for value in maps if value is not None] == [
        [0, 1, 2, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, 0, 1, 2, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, 0, 1, 2],
    ]


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
def test_experts_may_share_a_local_one(activation_format: str, dtype: str) -> None:
    """As merged experts do: a token that is routed to two of them gets both routing weights."""
    problem = problem_of(
        num_local_experts=3, placement="map", top_k=4, dtype=dtype, activation_format=activation_format
    )
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, 17, "uniform", CPU)
    expert_map = torch.tensor([0, 0, 1, -1, 0, 2, 1, 0], dtype=torch.int32)
    decisions = [decision for decision in select_backend(problem, "cpu").decisions if decision.accepted]
    assert decisions
    for decision in decisions:
        selection = dataclasses.replace(select_backend(problem, "cpu"), decisions=(decision,))
        kernel = make_kernel(problem, weights, selection, expert_map=expert_map.clone())
        for _ in range(2):
            truth = expected(problem, weights, inputs, kernel.expert_map)
            assert relative_error(call(kernel, inputs), truth) < tolerance("unquantized", dtype)
            assert kernel.expert_map is not None
            kernel.expert_map.copy_(expert_map.flip(0))  # An update in place may do so as well.


def test_prepare_finalize_can_be_given() -> None:
    movement = StandardPrepareFinalize()
    kernel = kernel_of(problem_of(), PerRouteExperts, prepare_finalize=movement)
    assert torch.equal(call(kernel, INPUTS), call(kernel_of(problem_of(), PerRouteExperts), INPUTS))


def test_layouts_have_to_match() -> None:
    class Elsewhere(FakeExperts):
        layouts = ("swizzled", "padded")

    text = (
        "returned an undeclared layout from Elsewhere.permute_weights: 'canonical', and its class declares swizzled, "
    )
    with pytest.raises(BackendError, match=text):
        kernel_of(problem_of(), Elsewhere)
    kernel = kernel_of(problem_of(), FakeExperts)
    experts = Elsewhere(kernel.problem, kernel.selection.platform, kernel.problem.quant)
    text = "Elsewhere reads layouts swizzled, padded, got 'canonical'; permute the weights with the same class"
    with pytest.raises(LayoutMismatchError, match=f"^{re.escape(text)}$"):
        MoEKernel(kernel.problem, kernel.selection, experts, kernel.weights, StandardPrepareFinalize(), None)


def test_selects_where_nothing_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_REQUIRE", "torch")
    problem = problem_of()
    weights = make_weights(problem, CPU)
    kernel = make_kernel(problem, weights)
    assert kernel.selection == select_backend(problem)
    assert kernel.selection.source == "required"
    assert relative_error(call(kernel, INPUTS), expected(problem, weights, INPUTS)) < 1e-5
    assert repr(kernel).startswith("MoEKernel(torch, E8 H16 I12 k2 float32 unquantized silu, ")


# Tensors as callers have them.


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor.roll(1)), dim=-1)[..., 0]


def behind_others(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.cat((tensor.flatten()[:1], tensor.flatten()))
    return flat[1:].view(tensor.shape)


# The same numbers in every way that torch can hold them.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second column": every_second,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "behind others": behind_others,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.dtype.itemsize > 1),
}


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("unquantized", "bfloat16"), ("unquantized", "float32"), ("int8_w8a8", "bfloat16"), ("nvfp4", "bfloat16")],
)
def test_weights_of_any_strides(scheme: str, dtype: str, activation_format: str) -> None:
    problem = problem_of(
        num_experts=3,
        hidden_size=48,
        intermediate_size=40,
        has_bias=True,
        quant=scheme,
        dtype=dtype,
        activation_format=activation_format,
        exact_activations=True,
    )
    weights = make_weights(problem, CPU)
    selection = select_backend(problem, "cpu")
    inputs = make_inputs(problem, 5, "uniform", CPU)
    want = call(make_kernel(problem, weights, selection), inputs)
    for way, strided in STRIDES.items():
        others = dataclasses.replace(weights, **{name: strided(value) for name, value in weights.tensors().items()})
        kernel = make_kernel(problem, others, selection)
        assert torch.equal(call(kernel, inputs), want), way
        kernel.reload(others)
        assert torch.equal(call(kernel, inputs), want), way


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_bias_may_be_one_number_for_all(dtype: str) -> None:
    """Memory behind it was read as the other numbers."""
    problem = problem_of(hidden_size=64, intermediate_size=32, has_bias=True, dtype=dtype)
    weights = make_weights(problem, CPU)
    sizes = {"w13_bias": (8, 64), "w2_bias": (8, 64)}
    for bias_dtype in (problem.torch_dtype, torch.float32):
        one = torch.tensor(0.5, dtype=bias_dtype)
        expanded = dataclasses.replace(weights, **{name: one.expand(size) for name, size in sizes.items()})
        whole = dataclasses.replace(weights, **{name: torch.full(size, 0.5).to(one) for name, size in sizes.items()})
        inputs = make_inputs(problem, 5, "uniform", CPU)
        assert torch.equal(call(make_kernel(problem, expanded), inputs), call(make_kernel(problem, whole), inputs))


def test_reload_reads_views_of_its_own_storage() -> None:
    """A transposed view has the address of what it is a view of."""
    problem = problem_of(hidden_size=16, intermediate_size=8)
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, weights=weights)
    transposed = dataclasses.replace(weights, w13=weights.w13.transpose(1, 2))
    wanted = dataclasses.replace(weights, w13=transposed.w13.clone())
    assert kernel.weights["w13"].data_ptr() == transposed.w13.data_ptr()
    truth = expected(problem, wanted, INPUTS)
    kernel.reload(transposed)
    assert relative_error(call(kernel, INPUTS), truth) < 1e-6


def cloned(weights: ExpertWeights) -> ExpertWeights:
    return dataclasses.replace(weights, **{name: tensor.clone() for name, tensor in weights.tensors().items()})


def test_inference_mode_may_come_and_go() -> None:
    """What is made inside it serves outside, and the other way around."""
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    for form in FORMS:
        changes = {"activation_format": "batched"} if form == "per_expert" else {}
        here = dataclasses.replace(problem, **changes)
        wanted = [call(kernel_of(here, FORMS[form], value), INPUTS) for value in (weights, other)]
        for inside in (True, False):
            with torch.inference_mode(inside):
                kernel = kernel_of(here, FORMS[form], cloned(weights))
                assert torch.equal(call(kernel, INPUTS), wanted[0])
            with torch.inference_mode(not inside):
                kernel.reload(cloned(other))
                assert torch.equal(call(kernel, INPUTS), wanted[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_copy_of_the_default_backend(dtype: str) -> None:
    problem = problem_of(hidden_size=64, intermediate_size=32, dtype=dtype)
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    inputs = make_inputs(problem, 5, "uniform", CPU)
    kernel = make_kernel(problem, weights)
    before = call(kernel, inputs)
    twin = copy.deepcopy(kernel)
    assert torch.equal(call(twin, inputs), before)
    twin.reload(other)
    assert torch.equal(call(kernel, inputs), before)
    after = call(twin, inputs)
    assert relative_error(after, expected(problem, other, inputs)) < 8e-3
    kernel.reload(other)
    twin.reload(weights)
    assert torch.equal(call(kernel, inputs), after)
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(twin)


# Memory.


class CopyingExperts(FakeExperts):
    """Permutes by copying, as a kernel with a layout of its own does."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("canonical", {name: tensor.clone() for name, tensor in weights.tensors().items()})


def test_canonical_weights_are_not_kept() -> None:
    weights = make_weights(problem_of(), CPU)
    canonical = weakref.ref(weights.w13)
    kernel = kernel_of(problem_of(), CopyingExperts, weights)
    del weights
    gc.collect()
    assert canonical() is None
    assert call(kernel, INPUTS).any()


def test_permuting_is_pure() -> None:
    weights = make_weights(problem_of(), CPU)
    before = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    kernel_of(problem_of(), CopyingExperts, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors().items())


def test_reload_keeps_storage() -> None:
    problem = problem_of()
    kernel = kernel_of(problem, CopyingExperts)
    pointers = {name: kernel.weights[name].data_ptr() for name in ("w13", "w2")}
    first = call(kernel, INPUTS)
    other = make_weights(problem, CPU, seed=5)
    kernel.reload(other)
    assert {name: kernel.weights[name].data_ptr() for name in pointers} == pointers
    assert relative_error(call(kernel, INPUTS), expected(problem, other, INPUTS)) < 1e-6
    assert not torch.equal(call(kernel, INPUTS), first)
    with pytest.raises(ValueError, match=r"^w13 must be \[8, 24, 16\]"):
        kernel.reload(make_weights(problem_of(intermediate_size=10), CPU))
    assert relative_error(call(kernel, INPUTS), expected(problem, other, INPUTS)) < 1e-6


def test_kernels_share_one_workspace() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(FakeExperts):
        def apply(self, out: Any, inputs: Any, weights: Any, workspace13: Any, workspace2: Any) -> None:
            seen.append((workspace13.data_ptr(), workspace2.data_ptr()))
            assert workspace13.shape == (4, 12)
            assert workspace2.shape == (4, 16)
            workspace13.fill_(torch.nan)
            workspace2.fill_(torch.nan)
            super().apply(out, inputs, weights, workspace13, workspace2)

    one, other = (kernel_of(problem_of(), Watched, make_weights(problem_of(), CPU, seed)) for seed in (1, 2))
    first = call(one, INPUTS)
    call(other, INPUTS)
    assert torch.equal(call(one, INPUTS), first)
    assert len(set(seen)) == 1
    assert seen[0][0] != seen[0][1]


def test_threads_select_and_build_at_once() -> None:
    problem = problem_of()
    weights = make_weights(problem, CPU)
    want = expected(problem, weights, INPUTS)
    errors: list[float] = []

    def build() -> None:
        kernel = make_kernel(problem, weights, selection=select_backend(problem, require="torch"))
        errors.append(relative_error(call(kernel, INPUTS), want))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    assert max(errors) < 1e-5


# Compiling.


def test_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    problem = problem_of()
    kernel = kernel_of(problem)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernel(x * 2, weights, ids) + 1

    for num_tokens in (3, 5, 11, 0):
        inputs = make_inputs(problem, num_tokens, "unmapped", CPU)
        found = model(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
        doubled = dataclasses.replace(inputs, hidden_states=inputs.hidden_states * 2)
        torch.testing.assert_close(found, call(kernel, doubled) + 1)


def test_compiles_with_out_and_int64_ids() -> None:
    torch._dynamo.reset()
    kernel = kernel_of(problem_of())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernel(x, weights, ids, out=out)
        return out + 1

    out = torch.full((4, 16), torch.nan)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids.long(), out)
    assert torch.equal(out, call(kernel, INPUTS))
    assert torch.equal(found, out + 1)


def test_compiled_layers_of_one_model_stay_apart() -> None:
    torch._dynamo.reset()
    problem = problem_of()
    kernels = [kernel_of(problem, weights=make_weights(problem, CPU, seed)) for seed in range(3)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for kernel in kernels:
            x = x + kernel(x, weights, ids)
        return x

    x = INPUTS.hidden_states
    for kernel in kernels:
        x = x + kernel(x, INPUTS.topk_weights, INPUTS.topk_ids)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids)
    torch.testing.assert_close(found, x)


def test_compiled_code_outlives_no_kernel() -> None:
    handle = kernel_of(problem_of())._handle
    gc.collect()
    with pytest.raises(
        RuntimeError, match=rf"the MoEKernel of compiled code \(handle {handle}\) is gone; keep a reference"
    ):
        layer._moe_layer(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids, torch.empty(4, 16), handle)


@pytest.mark.slow
def test_compiled_code_refuses_what_plain_code_does() -> None:
    """Compiled code used to hand NaN, and an expert named twice, on to the kernel."""
    kernel = kernel_of(problem_of())
    compiled = torch.compile(lambda *arguments: kernel(*arguments), fullgraph=True, backend="eager")
    weights, ids = INPUTS.topk_weights.clone(), INPUTS.topk_ids.clone()
    weights[2, 1] = torch.nan
    ids[3, 1] = ids[3, 0]
    for arguments, text in (
        ((INPUTS.hidden_states, weights, INPUTS.topk_ids), "topk_weights must be finite, got nan at token 2, slot 1"),
        ((INPUTS.hidden_states, INPUTS.topk_weights, ids), "topk_ids of one token must be distinct"),
        ((INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids, INPUTS.hidden_states), "out must not alias"),
    ):
        for run in (kernel, compiled):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                run(*arguments)


def test_compiles_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Inductor traces the poisoned torch.empty and cannot lower it.
    torch._dynamo.reset()
    kernel = kernel_of(problem_of())
    model = torch.compile(lambda x, weights, ids: kernel(x, weights, ids).relu(), fullgraph=True)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids)
    torch.testing.assert_close(found, call(kernel, INPUTS).relu())


# Ranks.

RANKS = """
import sys
import torch
import torch.distributed as dist
import moereg
from moereg.testing.inputs import make_weights

rank, store, require = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")[int(sys.argv[1])]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
problem = moereg.MoEProblem(num_experts=8, hidden_size=16, intermediate_size=12, top_k=2, num_local_experts=4)
weights = make_weights(problem, torch.device("cpu"))
# Two classes of one backend are two kernels as well.
selection = moereg.select_backend(problem, require="torch")
if require == "other":
    import dataclasses
    accepted = tuple(decision for decision in selection.decisions if decision.accepted)
    selection = dataclasses.replace(selection, decisions=accepted[::-1])
try:
    moereg.make_kernel(problem, weights, selection=selection, ep_rank=rank, group=dist.group.WORLD)
    print("built")
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("choices", ["first,first", "first,other"])
def test_ranks_compare_fingerprints(tmp_path: Path, choices: str) -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "store"), choices],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [stdout.strip().splitlines()[-1] for stdout, _ in outputs]
    if choices == "first,first":
        assert lines == ["built", "built"]
    else:
        for line in lines:
            assert re.fullmatch(
                r"all ranks must choose the same kernel, got \['[0-9a-f]{16} \(torch\)', '[0-9a-f]{16} \(torch\)'\]; "
                r"require one backend on all of them",
                line,
            ), line


def test_fakes_declare_what_they_run() -> None:
    # The tests above stand on these facts.
    assert EVERYTHING.placements == {"contiguous", "map"}
    assert BatchedExperts.facts.activation_formats == {"batched"}
    assert Platform.from_name("cpu").device_type == "cpu"


def test_many_layers_compile_once() -> None:
    problem = problem_of()
    kernels = [make_kernel(problem, make_weights(problem, CPU, seed), selection_of(problem)) for seed in range(12)]
    inputs = make_inputs(problem, 5, "uniform", CPU)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self, kernel: MoEKernel) -> None:
            super().__init__()
            self.kernel = kernel

        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            return self.kernel(*arguments) + 1

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(kernel: MoEKernel, *arguments: torch.Tensor) -> torch.Tensor:
        return kernel(*arguments) + 1

    for kernel in kernels:
        layer = torch.compile(Layer(kernel), fullgraph=True, backend="eager")
        for call in (layer(*arguments), compiled(kernel, *arguments)):
            assert torch.equal(call, kernel(*arguments) + 1)


def test_a_deep_copy_is_a_kernel_of_its_own() -> None:
    problem = problem_of()
    kernel = make_kernel(problem, make_weights(problem, CPU), selection_of(problem))
    inputs = make_inputs(problem, 5, "uniform", CPU)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    before = kernel(*arguments)
    twin = copy.deepcopy(kernel)
    twin.reload(make_weights(problem, CPU, seed=3))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: twin(*arguments), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), twin(*arguments))
    assert not torch.equal(twin(*arguments), before)
    assert torch.equal(kernel(*arguments), before)


def test_kernels_are_not_pickled() -> None:
    problem = problem_of()
    with pytest.raises(TypeError, match=r"send the problem and Selection\.to_dict"):
        pickle.dumps(make_kernel(problem, make_weights(problem, CPU), selection_of(problem)))


def test_a_default_device_changes_nothing() -> None:
    """Engines build models under another default device; what a kernel keeps for itself must not follow it."""
    problem = problem_of(num_local_experts=4)
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, 5, "uniform", CPU)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    selection = selection_of(problem)
    with torch.device("meta"):
        kernel = make_kernel(problem, weights, selection, ep_rank=1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: kernel(*arguments), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), kernel(*arguments))
    assert torch.equal(kernel(*arguments), make_kernel(problem, weights, selection, ep_rank=1)(*arguments))
