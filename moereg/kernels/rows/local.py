"""Routes for kernels that know only local experts, in Triton: other routes are marked, or made harmless.

Sizes: T tokens, K choices per token, N = T * K routes, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.direct import load_local_expert

_ROUTES = 1024
_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_routes"])
def _local_routes_kernel(
    out_ids,
    out_weights,
    topk_ids,
    topk_weights,
    expert_map,
    num_routes,
    num_experts,
    num_local_experts,
    BLOCK: tl.constexpr,
):
    routes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = routes < num_routes
    expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    weight = tl.load(topk_weights + routes, mask=inside & (expert >= 0), other=0.0)
    tl.store(out_ids + routes, expert, mask=inside)
    tl.store(out_weights + routes, weight, mask=inside)


@triton.jit(do_not_specialize=["num_routes"])
def _own_routes_kernel(
    out_ids,
    out_weights,
    is_live,
    topk_ids,
    topk_weights,
    expert_map,
    num_routes,
    num_experts,
    num_local_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    choices = tl.arange(0, BLOCK)  # [BLOCK]
    inside = choices < TOP_K
    routes = tl.where(inside, token * TOP_K + choices, num_routes)
    expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    weight = tl.load(topk_weights + routes, mask=inside & (expert >= 0), other=0.0)
    largest = tl.max(expert, 0)
    tl.store(out_ids + routes, tl.where(expert >= 0, expert, tl.maximum(largest, 0)), mask=inside)
    tl.store(out_weights + routes, weight, mask=inside)
    tl.store(is_live + token, (largest >= 0).to(tl.int32))


@triton.jit
def _keep_live_rows_kernel(out, rows, is_live, size, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < size
    live = tl.load(is_live + token) > 0
    if COPIES:
        values = tl.load(rows + token * size + columns, mask=inside & live, other=0.0)
        tl.store(out + token * size + columns, values, mask=inside)
    else:
        zeros = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
        tl.store(out + token * size + columns, zeros, mask=inside & (live == 0))


def local_routes(
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
) -> None:
    """Writes the local expert of every route, or -1 with weight 0 if it has none.

    Args:
        out_ids: [T, K] int32, contiguous; overwritten.
        out_weights: [T, K] fp32, contiguous; overwritten.
        topk_ids: [T, K] int32, contiguous: ids outside [0, num_experts) belong to no expert.
        topk_weights: [T, K] fp32, contiguous.
        expert_map: [num_experts] int32, local expert or -1; None: identity.
        num_experts: number of ids.
        num_local_experts: E.
    """
    num_routes = topk_ids.numel()
    launch(
        _local_routes_kernel,
        (triton.cdiv(num_routes, _ROUTES),),
        out_ids,
        out_weights,
        topk_ids,
        topk_weights,
        expert_map,
        num_routes,
        num_experts,
        num_local_experts,
        BLOCK=_ROUTES,
    )


def own_routes(
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    is_live: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
) -> None:
    """Sends a route without a local expert to another of its token's, with weight 0, for kernels that trust every id.

    Its row is then that of the other route, so it spreads no NaN that the token would not have, and widens no range of
    magnitudes. All routes of a token without any local expert go to expert 0.

    Args:
        is_live: [T] int32; overwritten with whether a token has a local expert.
        out_ids, out_weights, topk_ids, topk_weights, expert_map, num_experts, num_local_experts: As in `local_routes`.
    """
    num_tokens, top_k = topk_ids.shape
    launch(
        _own_routes_kernel,
        (num_tokens,),
        out_ids,
        out_weights,
        is_live,
        topk_ids,
        topk_weights,
        expert_map,
        num_tokens * top_k,
        num_experts,
        num_local_experts,
        TOP_K=top_k,
        BLOCK=triton.next_power_of_2(top_k),
        num_warps=1,
    )


def clear_dead_rows(out: torch.Tensor, is_live: torch.Tensor) -> None:
    """Zeroes the rows of tokens that have no local expert.

    Args:
        out: [T, H], contiguous; changed in place.
        is_live: [T] int32.
    """
    _keep_live_rows(out, None, is_live)


def copy_live_rows(out: torch.Tensor, rows: torch.Tensor, is_live: torch.Tensor) -> None:
    """Copies rows, but writes zeros for tokens without a local expert, whose rows may hold anything.

    Args:
        out: [T, H], contiguous; overwritten.
        rows: [T, H] of the same dtype, contiguous.
        is_live: [T] int32.
    """
    _keep_live_rows(out, rows, is_live)


def _keep_live_rows(out: torch.Tensor, rows: torch.Tensor | None, is_live: torch.Tensor) -> None:
    num_tokens, size = out.shape
    launch(
        _keep_live_rows_kernel,
        (num_tokens, triton.cdiv(size, _COLUMNS)),
        out,
        rows,
        is_live,
        size,
        COPIES=rows is not None,
        BLOCK=min(_COLUMNS, triton.next_power_of_2(size)),
    )
