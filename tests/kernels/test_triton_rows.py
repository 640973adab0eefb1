"""The kernels that move or add up rows or mark routes, for products of Gluon and of libraries: interpreted here."""

from __future__ import annotations

import math

import pytest
import torch

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.gemm.grouped import gate_up_gemm
from moereg.kernels.plain.device import local_expert_ids
from moereg.kernels.rows import reduce
from moereg.kernels.rows.direct import local_routes
from moereg.kernels.rows.reduce import copy_rows, reduce_routes, reduce_sorted_rows
from tests.kernels.references import copy_rows_reference
from tests.kernels.triton_cases import BF16, DEVICE, FP16, FP32, far_apart, make_plan, random


@pytest.fixture(autouse=True)
def _programs_of_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "_COLUMNS", 64)


def rows_of_routes(num_tokens: int, top_k: int, num_valid: int) -> torch.Tensor:
    """[T * K] int32: the rows of some routes, in no order, and -1 for the others."""
    rows = torch.full((num_tokens * top_k,), -1)
    generator = torch.Generator().manual_seed(num_tokens)
    rows[torch.randperm(num_tokens * top_k, generator=generator)[:num_valid]] = torch.arange(num_valid)
    return rows.int().to(DEVICE)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "num_valid", "dtype"),
    [(1, 1, 64, 1, BF16), (5, 3, 130, 11, FP16), (7, 2, 72, 0, FP32), (3, 4, 255, 12, BF16)],
)
def test_tokens_are_copied_to_the_rows_of_all_their_routes(
    num_tokens: int, top_k: int, hidden_size: int, num_valid: int, dtype: torch.dtype
) -> None:
    tokens = random(num_tokens, hidden_size, dtype=dtype)
    route_row = rows_of_routes(num_tokens, top_k, num_valid)
    rows = torch.full((num_tokens * top_k, hidden_size), math.nan, dtype=dtype, device=DEVICE)
    copy_rows(rows, tokens, route_row)
    assert torch.equal(rows[:num_valid], copy_rows_reference(tokens, route_row))
    assert rows[num_valid:].isnan().all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "num_valid"),
    [(1, 1, 64, 1), (5, 3, 130, 11), (7, 2, 72, 0), (3, 4, 255, 12)],
)
def test_sorted_rows_are_added_with_the_weights_of_their_routes(
    num_tokens: int, top_k: int, hidden_size: int, num_valid: int, early: bool, weighted: bool
) -> None:
    route_row = rows_of_routes(num_tokens, top_k, num_valid)
    rows = random(num_tokens * top_k, hidden_size, dtype=FP32)
    rows[num_valid:] = math.nan
    weights = random(num_tokens, top_k, dtype=FP32) if weighted else None
    if weights is not None:
        # Of routes that add nothing.
        weights[(route_row < 0).view_as(weights)] = math.nan
    out = torch.full((num_tokens, hidden_size), math.nan, device=DEVICE)
    reduce_sorted_rows(out, rows, route_row, weights, early=early)
    expected = torch.zeros_like(out)
    for route, row in enumerate(route_row.tolist()):
        if row >= 0:
            token, choice = divmod(route, top_k)
            expected[token] += rows[row] * (1.0 if weights is None else weights[token, choice])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sorted_rows", [True, False])
def test_routes_are_added_from_the_first_choice_to_the_last(sorted_rows: bool) -> None:
    """The order is promised: equal inputs give equal bits whatever the plan."""
    # In fp32 2^24 + 1 is 2^24, so the sum is 0 in this order and 2 in the other.
    rows = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)], device=DEVICE).unsqueeze(1).expand(4, 64).contiguous()
    out = torch.full((1, 64), math.nan, device=DEVICE)
    routes = torch.arange(4, dtype=torch.int32, device=DEVICE)
    if sorted_rows:
        reduce_sorted_rows(out, rows, routes, None)
    else:
        reduce_routes(out, rows, routes)
    assert (out == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU memory is there when it is allocated: this would take 8 GiB")
def test_rows_may_lie_2_to_the_31_elements_apart() -> None:
    out = far_apart(3, 64)
    config = GroupedGemmConfig(block_m=16, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=2)
    plan = make_plan(torch.zeros(3, 1, dtype=torch.int32), None, 1, 1, 16)
    hidden_states, w13 = random(3, 64, dtype=BF16), random(1, 64, 64, dtype=BF16)
    expected = torch.full((3, 64), math.nan, dtype=BF16)
    for each in (expected, out):
        gate_up_gemm(each, hidden_states, w13, plan, config, GateUpEpilogue(ActivationConstant("relu2")), top_k=1)
    assert torch.equal(out[2], expected[2])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("expert_map", [None, [-1, 2, -1, 0, 1, -1]], ids=["all", "map"])
def test_routes_become_local(expert_map: list[int] | None) -> None:
    # Token 1 has no local expert, token 2 one that is no id and one of another rank, token 3 the smallest id beyond.
    ids = torch.tensor([[1, 3, 4], [0, 2, 5], [-1, 4, 0], [6, 3, -7]], dtype=torch.int32, device=DEVICE)
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32, device=DEVICE)
    weights = random(4, 3, dtype=FP32)
    # The weight of a route without expert may be anything.
    weights[3, 0] = math.nan
    found, scaled = torch.empty_like(ids), torch.empty_like(weights)
    local_routes(found, scaled, ids, weights, mapping, 3 if expert_map is None else 6, 3)
    expected = local_expert_ids(ids, 3, mapping)
    assert torch.equal(found.long(), expected)
    assert torch.equal(scaled, torch.where(expected < 0, 0.0, weights))
