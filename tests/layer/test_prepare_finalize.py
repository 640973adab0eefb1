"""Token dispatcher, against loops."""

from __future__ import annotations

import pytest
import torch

from moereg.kernels.plain.device import local_expert_ids
from moereg.prepare_finalize import BatchedPrepareFinalize, StandardPrepareFinalize
from moereg.spec.problem import MoEProblem


def problem_of(**changes: object) -> MoEProblem:
    facts = {"num_experts": 4, "hidden_size": 8, "intermediate_size": 8, "top_k": 2, "dtype": "float32"}
    return MoEProblem(**{**facts, **changes})


IDS = torch.tensor([[0, 3], [3, 1], [-1, 2], [2**31 - 1, 4], [1, 0]], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 0.125], [1.0, 1.0], [0.75, 4.0]])


@pytest.mark.parametrize(
    ("num_local_experts", "expert_map", "expected"),
    [
        (4, None, [[0, 3], [3, 1], [-1, 2], [-1, -1], [1, 0]]),
        (2, [-1, -1, 0, 1], [[-1, 1], [1, -1], [-1, 0], [-1, -1], [-1, -1]]),
        # A map that names more experts than there are, and one below -1: neither may be read.
        (2, [7, 1, -5, 0], [[-1, 0], [0, 1], [-1, -1], [-1, -1], [1, -1]]),
    ],
)
def test_local_ids(num_local_experts: int, expert_map: list[int] | None, expected: list[list[int]]) -> None:
    problem = problem_of(num_local_experts=num_local_experts, placement="contiguous" if expert_map is None else "map")
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    assert local_expert_ids(IDS, problem.num_local_experts, mapping).tolist() == expected


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_standard_sums_what_is_routed(weight_on_input: bool) -> None:
    top_k = 1 if weight_on_input else 2
    problem = problem_of(apply_router_weight_on_input=weight_on_input, top_k=top_k)
    ids, weights = IDS[:, -top_k:].contiguous(), WEIGHTS[:, -top_k:].clone()
    rows = torch.randn(5, top_k, 8)
    local = local_expert_ids(ids, problem.num_local_experts, None)
    rows[local < 0] = torch.nan
    weights[local < 0] = torch.nan  # On a GPU nobody checks ids; a route that goes nowhere still adds nothing.
    dispatcher = StandardPrepareFinalize()
    out = torch.full((5, 8), torch.nan)
    dispatcher.finalize(out, rows, dispatcher.prepare(torch.randn(5, 8), weights, ids, problem, None), problem)
    expected = torch.zeros(5, 8)
    for token, slot in torch.nonzero(local >= 0).tolist():
        expected[token] += rows[token, slot] * (1.0 if weight_on_input else weights[token, slot])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("values", "weights", "total"),
    [
        # In bf16, 256 + 1 is 256; 263 rounds to 264.
        ([256.0] + [1.0] * 7, [1.0] * 8, 264.0),
        # In bf16 the first weight is 1, and so is its product.
        ([1.0, -1.0], [1 + 2.0**-10, 1.0], 2.0**-10),
    ],
    ids=["sums", "products with routing weights"],
)
def test_finalize_computes_in_fp32(values: list[float], weights: list[float], total: float) -> None:
    problem = problem_of(dtype="bfloat16", num_experts=8, top_k=len(values))
    rows = torch.tensor(values).bfloat16().view(1, -1, 1).expand(1, -1, 8).contiguous()
    dispatcher = StandardPrepareFinalize()
    ids = torch.arange(len(values), dtype=torch.int32).unsqueeze(0)
    prepared = dispatcher.prepare(rows[:, 0].contiguous(), torch.tensor([weights]), ids, problem, None)
    out = torch.empty(1, 8, dtype=torch.bfloat16)
    dispatcher.finalize(out, rows, prepared, problem)
    assert out.tolist() == [[total] * 8]


def test_batched_scales_inputs() -> None:
    problem = problem_of(activation_format="batched", top_k=1, apply_router_weight_on_input=True)
    x, ids, weights = (
        torch.randn(3, 8),
        torch.tensor([[2], [0], [2]], dtype=torch.int32),
        torch.tensor([[2.0], [3.0], [5.0]]),
    )
    before = x.clone()
    dispatcher = BatchedPrepareFinalize()
    prepared = dispatcher.prepare(x, weights, ids, problem, None)
    torch.testing.assert_close(prepared.inputs.hidden_states[2, :2], x[[0, 2]] * torch.tensor([[2.0], [5.0]]))
    torch.testing.assert_close(prepared.inputs.hidden_states[0, :1], x[[1]] * 3.0)
    assert torch.equal(x, before)
    out = torch.empty(3, 8)
    dispatcher.finalize(out, prepared.inputs.hidden_states, prepared, problem)
    torch.testing.assert_close(out, x * weights)


@pytest.mark.parametrize("expert_map", [None, [-1, 0, -1, 1], [1, 0, 1, -1], [1, 1, 1, 1], [0, 0, -1, 1]], ids=str)
def test_batched_places_every_route(expert_map: list[int] | None) -> None:
    """Routes share a row if a map gives several experts one row of weights, or a token names an expert twice."""
    problem = problem_of(
        activation_format="batched",
        top_k=3,
        num_local_experts=4 if expert_map is None else 2,
        placement="contiguous" if expert_map is None else "map",
    )
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    ids = torch.tensor([[2, 0, 2], [0, 1, 2], [3, 3, 3], [-1, 4, 1], [2, 1, 0]], dtype=torch.int32)
    x, weights = torch.randn(5, 8), torch.rand(5, 3)
    dispatcher = BatchedPrepareFinalize()
    prepared = dispatcher.prepare(x, weights, ids, problem, mapping)
    local = local_expert_ids(ids, problem.num_local_experts, mapping)
    rows, counts = prepared.inputs.hidden_states, prepared.inputs.expert_num_tokens
    assert rows.is_contiguous()
    assert (rows.shape, prepared.num_tokens) == ((problem.num_local_experts, 5, 8), 5)
    assert counts is not None
    assert counts.dtype == torch.int32
    assert counts.tolist() == [int((local == e).any(1).sum()) for e in range(problem.num_local_experts)]
    # Rows without a route are undefined, so they must not come through.
    expert_out = torch.full((problem.num_local_experts, 5, 8), torch.nan)
    for expert, count in enumerate(counts.tolist()):
        tokens = [token for token in range(5) if expert in local[token].tolist()]
        assert torch.equal(rows[expert, :count], x[tokens])
        expert_out[expert, :count] = x[tokens] * (expert + 1)
    out = torch.full((5, 8), torch.nan)
    dispatcher.finalize(out, expert_out, prepared, problem)
    factor = torch.where(local >= 0, (local + 1) * weights, 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * factor)
