"""The kernels that only move or add up rows, which layers use where the products are Gluon's: interpreted here."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.gemm.grouped import gate_up_gemm
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.rows.reduce import copy_rows, reduce_routes, reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from tests.kernels.references import copy_rows_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def random(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


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
    copy_rows(rows, tokens, route_row, columns=64)
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
    rows = random(num_tokens * top_k, hidden_size)
    rows[num_valid:] = math.nan
    weights = random(num_tokens, top_k) if weighted else None
    if weights is not None:
        # Of routes that add nothing.
        weights[(route_row < 0).view_as(weights)] = math.nan
    out = torch.full((num_tokens, hidden_size), math.nan, device=DEVICE)
    reduce_sorted_rows(out, rows, route_row, weights, early=early, columns=64)
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
    """Addresses alone: of the 8 GiB only the pages of three rows are ever there."""
    stride, numel = 2**30, 2**32 + 64
    # MAP_NORESERVE, which Python names from 3.13 on, so that a machine with less memory gives the addresses too.
    pages = mmap.mmap(-1, 2 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    buffer = torch.frombuffer(pages, dtype=BF16)
    # In the middle: an offset that wrapped around would be 2^32 elements less, and still in the buffer.
    out = buffer[2**31 :].as_strided((3, 64), (stride, 1))
    config = GroupedGemmConfig(block_m=16, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=2)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    workspace = torch.empty(route_workspace_numel(3, 1, 1, 16), dtype=torch.int32)
    plan = sort_routes(ids, None, 1, 1, 16, workspace)
    hidden_states, w13 = random(3, 64, dtype=BF16), random(1, 64, 64, dtype=BF16)
    expected = torch.full((3, 64), math.nan, dtype=BF16)
    for each in (expected, out):
        gate_up_gemm(each, hidden_states, w13, plan, config, GateUpEpilogue(ActivationConstant("relu2")), top_k=1)
    assert torch.equal(out[2], expected[2])
    assert torch.equal(out, expected)
    del out, buffer
