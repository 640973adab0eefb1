"""The reference itself, against sums written as loops over single numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moereg.problem import MoEProblem
from moereg.reference import reference_experts, relative_error
from moereg.weights import ExpertWeights
from tests.conformance import make_weights

CPU = torch.device("cpu")


def brute_force(
    problem: MoEProblem, weights: ExpertWeights, x: torch.Tensor, topk_weights: torch.Tensor, local: list[list[int]]
) -> torch.Tensor:
    """silu and relu2 only, one multiplication at a time."""
    w13, w2 = weights.w13.double().tolist(), weights.w2.double().tolist()
    b13 = weights.w13_bias.double().tolist() if weights.w13_bias is not None else None
    b2 = weights.w2_bias.double().tolist() if weights.w2_bias is not None else None
    inter, hidden = problem.intermediate_size, problem.hidden_size
    out = torch.zeros(len(x), hidden, dtype=torch.float64)
    for token, experts in enumerate(local):
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            weight = float(topk_weights[token, slot])
            row = x[token].double().tolist()
            if problem.apply_router_weight_on_input:
                row = [value * weight for value in row]
            gemm1 = [math.fsum(a * b for a, b in zip(row, line, strict=True)) for line in w13[expert]]
            if b13:
                gemm1 = [value + bias for value, bias in zip(gemm1, b13[expert], strict=True)]
            if problem.activation.gated:
                gate, up = gemm1[:inter], gemm1[inter:]
                middle = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            else:
                middle = [max(value, 0.0) ** 2 for value in gemm1]
            for row_index, line in enumerate(w2[expert]):
                value = math.fsum(a * b for a, b in zip(middle, line, strict=True))
                if b2:
                    value += b2[expert][row_index]
                out[token, row_index] += value if problem.apply_router_weight_on_input else weight * value
    return out


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"has_bias": True},
    "not gated": {"activation": "relu2", "has_bias": True},
    "weight on input": {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": True},
}


@pytest.mark.parametrize("name", CASES)
def test_matches_brute_force(name: str) -> None:
    facts = {"num_experts": 4, "hidden_size": 6, "intermediate_size": 5, "top_k": 2, "dtype": "float32"}
    problem = MoEProblem(**{**facts, **CASES[name]})
    weights = make_weights(problem, CPU)
    x = torch.randn(5, 6)
    topk_weights = torch.rand(5, problem.top_k) + 0.1
    ids = [[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]]
    ids = [row[: problem.top_k] for row in ids]
    expected = brute_force(problem, weights, x, topk_weights, ids)
    found = reference_experts(problem, weights, x, topk_weights, torch.tensor(ids), dtype=torch.float64)
    assert found.dtype == torch.float64
    assert relative_error(found, expected) < 1e-13
    single = reference_experts(problem, weights, x, topk_weights, torch.tensor(ids))
    assert single.dtype == torch.float32
    assert 0 < relative_error(single, expected) < 1e-6


@pytest.mark.parametrize("bad", [-1, -(2**31), 4, 2**31 - 1, 2**40])
def test_ids_out_of_range_add_nothing(bad: int) -> None:
    problem = MoEProblem(num_experts=4, hidden_size=6, intermediate_size=5, top_k=2, dtype="float32")
    weights = make_weights(problem, CPU)
    x, topk_weights = torch.randn(2, 6), torch.rand(2, 2)
    found = reference_experts(problem, weights, x, topk_weights, torch.tensor([[bad, 2], [bad, bad]]))
    one = MoEProblem(**{**problem.to_dict(), "top_k": 1})
    expected = reference_experts(one, weights, x[:1], topk_weights[:1, 1:], torch.tensor([[2]]))
    torch.testing.assert_close(found[:1], expected)
    assert not found[1].any()


def test_expert_map_renames_experts() -> None:
    problem = MoEProblem(
        num_experts=4,
        num_local_experts=2,
        hidden_size=6,
        intermediate_size=5,
        top_k=2,
        dtype="float32",
        placement="map",
    )
    weights = make_weights(problem, CPU)
    x, topk_weights = torch.randn(3, 6), torch.rand(3, 2)
    expert_map = torch.tensor([1, -1, -1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [1, 2], [3, 9]])
    found = reference_experts(problem, weights, x, topk_weights, ids, expert_map, torch.float64)
    expected = brute_force(problem, weights, x, topk_weights, [[1, 0], [-1, -1], [0, -1]])
    assert relative_error(found, expected) < 1e-13
    assert not found[1].any()


def test_no_tokens() -> None:
    problem = MoEProblem(num_experts=4, hidden_size=6, intermediate_size=5, top_k=2, dtype="float32")
    empty = torch.zeros(0, 2)
    out = reference_experts(problem, make_weights(problem, CPU), torch.zeros(0, 6), empty, empty.int())
    assert out.shape == (0, 6)


def test_quantised_schemes_say_that_they_have_none() -> None:
    scale = torch.ones(1, 4, 1)
    weights = ExpertWeights(
        w13=torch.zeros(1, 4, 2, dtype=torch.int8),
        w2=torch.zeros(1, 2, 2, dtype=torch.int8),
        w13_scale=scale,
        w2_scale=scale[:, :2],
        quant="int8_w8a16",
    )
    problem = MoEProblem(num_experts=1, hidden_size=2, intermediate_size=2, top_k=1, quant="int8_w8a16")
    with pytest.raises(NotImplementedError, match="no reference for scheme int8_w8a16"):
        reference_experts(problem, weights, torch.zeros(1, 2), torch.ones(1, 1), torch.zeros(1, 1))


def test_relative_error() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0
    assert relative_error(one * 1.25, one) == pytest.approx(0.25)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), one))
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(one, torch.zeros(2)) == 5.0
    assert relative_error(torch.zeros(2), one) == 1.0
