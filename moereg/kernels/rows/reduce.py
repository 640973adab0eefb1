"""Copies tokens to the sorted rows of their routes, and sums the rows of a token's routes, in Triton.

Sizes: T tokens, K choices per token, H hidden.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.direct import load_local_expert

# Columns of a row that a program copies or sums.
_COLUMNS: Final = 1024


@triton.jit
def copy_rows_kernel(
    out,
    hidden_states,
    route_row,
    topk_weights,
    hidden_size,
    stride_out,
    stride_hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copies tokens, times their weights if there are any, to the rows at `route_row`; see `copy_rows`.

    Rows of `out` are contiguous where `stride_out` is None.
    """
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    # A program copies a token, not a row, so that each token is read once.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < hidden_size
    x = tl.load(hidden_states + token * stride_hidden + columns, mask=mask)
    row_stride = hidden_size if stride_out is None else stride_out
    for k in tl.static_range(TOP_K):
        row = tl.load(route_row + token * TOP_K + k).to(tl.int64)
        scaled = x
        if topk_weights is not None:
            scaled = (x.to(tl.float32) * tl.load(topk_weights + token * TOP_K + k)).to(x.dtype)
        tl.store(out + row * row_stride + columns, scaled, mask=mask & (row >= 0))


def copy_rows(
    out: torch.Tensor, hidden_states: torch.Tensor, route_row: torch.Tensor, *, overlap: bool = False
) -> None:
    """Writes each token, [T, H], to the sorted rows of its routes.

    Args:
        out: [T * K, H], dtype of the tokens, rows contiguous as theirs: overwritten up to the last valid row.
        route_row: [T * K] int32, each route's row, negative if it adds nothing.
        overlap: whether to start while the kernel that writes `route_row` still runs, and to let the next start early.
    """
    num_tokens, hidden_size = hidden_states.shape
    assert out.shape == (route_row.numel(), hidden_size) and route_row.numel() % num_tokens == 0
    assert out.stride(1) == hidden_states.stride(1) == 1
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch(
        copy_rows_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(out, hidden_states, route_row, None),
        *(hidden_size, out.stride(0), hidden_states.stride(0)),
        TOP_K=route_row.numel() // num_tokens,
        BLOCK=block,
        **overlapping(overlap),
    )


@triton.jit
def _reduce_routes_kernel(
    out,
    route_rows,
    route_expert,
    expert_map,
    topk_weights,
    num_experts,
    num_local_experts,
    hidden_size,
    stride_rows,
    stride_out,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        route = token * TOP_K + k
        # Rows of routes that add nothing are never written and may hold NaN.
        if num_experts is None:
            expert = tl.load(route_expert + route)
        else:
            expert = load_local_expert(route_expert, expert_map, route, route + 1, num_experts, num_local_experts)
        mask = (columns < hidden_size) & (expert >= 0)
        value = tl.load(route_rows + route * stride_rows + columns, mask=mask, other=0.0).to(tl.float32)
        if topk_weights is not None:
            value *= tl.load(topk_weights + route, mask=expert >= 0, other=0.0)
        total += value
    tl.store(out + token * stride_out + columns, total.to(out.dtype.element_ty), mask=columns < hidden_size)


def reduce_routes(
    out: torch.Tensor,
    route_rows: torch.Tensor,
    route_expert: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    num_experts: int | None = None,
    num_local_experts: int | None = None,
    overlap: bool = False,
) -> None:
    """Writes the sum of each token's valid routes, added in fp32 from choice 0 to K - 1.

    Args:
        out: [T, H] bf16, fp16 or fp32, rows contiguous, T >= 1: overwritten; zeros where no route is valid.
        route_rows: [T * K, H], any float dtype, rows contiguous; only those of valid routes are read.
        route_expert: [T * K] or [T, K] int32, negative where a route adds nothing; with `num_experts` the
            router's ids, `topk_ids`.
        expert_map: [num_experts] int32, local expert or -1; None: identity.
        topk_weights: [T, K] fp32 contiguous, or None where rows are weighted already.
        num_experts: ids at or above it add nothing; None: `route_expert` has local experts.
        num_local_experts: mapped experts at or above it add nothing; given with `num_experts`.
        overlap: whether to start while the kernel that writes `route_rows` still runs.
    """
    num_tokens, hidden_size = out.shape
    assert route_rows.shape[0] == route_expert.numel() and route_expert.numel() % num_tokens == 0
    assert out.stride(1) == route_rows.stride(1) == 1 and route_rows.shape[1] == hidden_size
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch(
        _reduce_routes_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(out, route_rows, route_expert, expert_map, topk_weights),
        *(num_experts, num_local_experts, hidden_size, route_rows.stride(0), out.stride(0)),
        TOP_K=route_expert.numel() // num_tokens,
        BLOCK=block,
        **overlapping(overlap),
    )


@triton.jit
def reduce_sorted_rows_kernel(
    out,
    sorted_rows,
    route_row,
    topk_weights,
    hidden_size,
    stride_rows,
    stride_out,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums the rows at `route_row`, see `reduce_sorted_rows`; EARLY: a power of two, at least TOP_K, or 0."""
    token = tl.program_id(0).to(tl.int64)
    if EARLY > 0:
        choices = tl.arange(0, EARLY)  # [EARLY]
        known = choices < TOP_K
        rows = tl.load(route_row + token * TOP_K + choices, mask=known, other=-1)
        if topk_weights is not None:
            weights = tl.load(topk_weights + token * TOP_K + choices, mask=known & (rows >= 0), other=0.0)
    wait_for_previous(OVERLAP)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        route = token * TOP_K + k
        if EARLY > 0:
            row = tl.sum(tl.where(choices == k, rows, 0), 0).to(tl.int64)
        else:
            row = tl.load(route_row + route).to(tl.int64)
        # Routes that add nothing have no rows.
        mask = (columns < hidden_size) & (row >= 0)
        value = tl.load(sorted_rows + row * stride_rows + columns, mask=mask, other=0.0).to(tl.float32)
        if topk_weights is not None:
            # Their weights may be NaN too.
            if EARLY > 0:
                value *= tl.sum(tl.where(choices == k, weights, 0.0), 0)
            else:
                value *= tl.load(topk_weights + route, mask=row >= 0, other=0.0)
        total += value
    tl.store(out + token * stride_out + columns, total.to(out.dtype.element_ty), mask=columns < hidden_size)


def reduce_sorted_rows(
    out: torch.Tensor,
    sorted_rows: torch.Tensor,
    route_row: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    early: bool = False,
    overlap: bool = False,
) -> None:
    """Writes the weighted sum of each token's valid routes, added in fp32 from choice 0 to K - 1.

    Args:
        out: [T, H] bf16, fp16 or fp32, rows contiguous, T >= 1: overwritten; zeros where no route is valid.
        sorted_rows: [T * K, H], any float dtype, rows contiguous, in the order of the plan; only those of
            valid routes are read.
        route_row: [T * K] int32, each route's row, negative if it adds nothing.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
        early: whether the rows' places and weights are read before the previous kernel has ended. That kernel must then
            have waited itself before it released this one, since older kernels wrote the places.
        overlap: whether to start while the kernel that writes `sorted_rows` still runs.
    """
    num_tokens, hidden_size = out.shape
    assert sorted_rows.shape[0] == route_row.numel() and route_row.numel() % num_tokens == 0
    top_k = route_row.numel() // num_tokens
    assert out.stride(1) == sorted_rows.stride(1) == 1 and sorted_rows.shape[1] == hidden_size
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch(
        reduce_sorted_rows_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(out, sorted_rows, route_row, topk_weights),
        *(hidden_size, sorted_rows.stride(0), out.stride(0)),
        TOP_K=top_k,
        BLOCK=block,
        EARLY=triton.next_power_of_2(top_k) if early else 0,
        **overlapping(overlap),
    )
