"""A layer's numbers: every output form gives the reference's sum."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moereg.numerics.reference import reference_experts, relative_error
from moereg.testing.inputs import make_inputs, make_weights
from tests.layer.small_layers import CPU, FORMS, call, expected, kernel_of, problem_for


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
    problem = problem_for(form, **changes)
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


@pytest.mark.parametrize("form", ["per_route", "per_expert"])
def test_wide_output_holds_what_float16_does_not(form: str) -> None:
    problem = problem_for(form, dtype="float16")
    plain = make_weights(problem, CPU)
    weights = dataclasses.replace(plain, w2=(plain.w2.float() * 1e5).clamp(-6e4, 6e4).half())
    inputs = make_inputs(problem, 5, "uniform", CPU)
    tokens = 10 * inputs.hidden_states, inputs.topk_weights * 1e-4, inputs.topk_ids
    truth = reference_experts(problem, weights, *tokens)
    for is_wide in (False, True):
        wide = type(FORMS[form].__name__, (FORMS[form],), {"wide_output": is_wide})
        out = kernel_of(problem, wide, weights)(*tokens)
        assert out.isfinite().all() == is_wide
    assert relative_error(out, truth) < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_out_is_overwritten_and_returned(form: str, num_tokens: int) -> None:
    problem = problem_for(form)
    kernel = kernel_of(problem, FORMS[form])
    inputs = make_inputs(problem, num_tokens, "unmapped", CPU)
    out = torch.full((num_tokens, 16), torch.nan)
    assert call(kernel, inputs, out=out) is out
    assert torch.equal(out, call(kernel, inputs))
    assert not out.isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_int64_ids(form: str) -> None:
    problem = problem_for(form)
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
