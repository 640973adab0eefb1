"""What make_kernel refuses and fills in, and which experts a rank holds."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.errors import LayoutMismatchError
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.ranges import RangeExperts
from moereg.numerics.reference import relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform, current_platform
from moereg.prepare_finalize import BatchedPrepareFinalize, StandardPrepareFinalize
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from tests.layer.small_layers import (
    CPU,
    FORMS,
    INPUTS,
    build_refused,
    call,
    expected,
    kernel_of,
    problem_for,
    problem_of,
    selection_of,
)
from tests.support.fakes import FakeExperts


def test_what_belongs_to_something_else_is_refused() -> None:
    selection = selection_of(problem_of())
    absent, none = Selection.from_dict(selection.to_dict()), dataclasses.replace(selection, decisions=(), source=None)
    for arguments, text in (
        (
            {"selection": selection_of(problem_of(top_k=3))},
            "the selection was made for E8 H16 I12 k3 float32 unquantize",
        ),
        ({"selection": absent}, "the selection has no backend that is registered here (it names 'fake'); select again"),
        ({"selection": none}, "(it names None); select again"),
        (
            {"weights": make_weights(problem_of(), CPU).to("meta")},
            "needs weights on a cpu or cuda device, got meta; move",
        ),
    ):
        build_refused(text, **arguments)


class FarExperts(FakeExperts):
    """Runs on another machine, and needs a library of it."""

    def __init__(self, problem: MoEProblem, platform: Platform) -> None:
        raise ModuleNotFoundError("No module named 'far'")

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        return ("meta",)


def test_a_selection_for_another_machine_says_so() -> None:
    selection = dataclasses.replace(selection_of(problem_of(), FarExperts), platform=Platform.from_name("tpu:v5e"))
    text = f"this selection is for tpu:v5e, and this machine is {current_platform()}; select again here"
    build_refused(text, selection=selection)


def test_layouts_have_to_match() -> None:
    class Elsewhere(FakeExperts):
        layouts = ("swizzled", "padded")

    kernel = kernel_of(problem_of(), FakeExperts)
    experts = Elsewhere(kernel.problem, kernel.selection.platform, kernel.problem.quant)
    text = "Elsewhere reads layouts swizzled, padded, got 'canonical' of Elsewhere; permute the weights with the same "
    ranges = (RangeExperts(None, kernel.selection, experts),)
    with pytest.raises(LayoutMismatchError, match=f"^{re.escape(text)}class$"):
        MoEKernel(kernel.problem, kernel.selection, ranges, kernel.weights, StandardPrepareFinalize(), None)


def test_selects_where_nothing_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_REQUIRE", "torch")
    problem = problem_of()
    weights = make_weights(problem, CPU)
    kernel = make_kernel(problem, weights)
    assert kernel.selection == select_backend(problem)
    assert kernel.selection.source == "required"
    assert relative_error(call(kernel, INPUTS), expected(problem, weights, INPUTS)) < 1e-5
    assert repr(kernel).startswith("MoEKernel(torch, E8 H16 I12 k2 float32 unquantized silu, ")
    for_users = (
        "checks_values expert_map expert_placement experts move_experts prepare_finalize problem reload selection "
    )
    assert dir(kernel) == [*for_users.split(), "token_histogram", "update_expert", "warm_up", "weights"]
    assert all(hasattr(kernel, name) for name in dir(kernel))


@pytest.mark.parametrize("form", FORMS)
def test_expert_map_is_updated_in_place(form: str) -> None:
    problem = problem_for(form, num_local_experts=3, placement="map")
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


@pytest.mark.parametrize(
    ("problem", "arguments", "text"),
    [
        ({}, {"ep_rank": 1}, "ep_rank must be 0 where all experts are local, got 1"),
        ({"num_local_experts": 2}, {"ep_rank": 4}, "ep_rank must be in [0, 4) for 2 of 8 experts a rank, got 4"),
        ({"num_local_experts": 2}, {"ep_rank": -1}, "ep_rank must be in [0, 4) for 2 of 8 experts a rank, got -1"),
        *(({"num_local_experts": 3}, {"ep_rank": rank},
            "contiguous placement needs num_experts % num_local_experts == 0, got 8 and 3; give uneven ranks ")
          for rank in (1, 2, 3)),
        ({}, {"expert_map": torch.zeros(8, dtype=torch.int32)},
            "expert_map needs placement='map' in the problem, got placement='contiguous'"),
        ({"placement": "map"}, {}, "placement 'map' needs expert_map, int32 [num_experts] with the local expert or -1"),
        ({"placement": "map"}, {"expert_map": torch.zeros(7, dtype=torch.int32)},
            "expert_map must have shape [8], got [7]"),
        ({"placement": "map"}, {"expert_map": torch.zeros(8)}, "expert_map must be int32, got float32; convert it"),
        ({"placement": "map"}, {"expert_map": torch.zeros(8, dtype=torch.int32, device="meta")},
            "expert_map must be on the weights' device cpu, got meta; move it"),
        ({}, {"prepare_finalize": BatchedPrepareFinalize()}, "prepare_finalize 'batched' makes the batched format but"),
    ],
)  # fmt: skip
def test_placement_is_checked(problem: dict[str, Any], arguments: dict[str, Any], text: str) -> None:
    build_refused(text, problem_of(**problem), **arguments)


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
