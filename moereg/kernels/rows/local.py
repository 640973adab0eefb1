"""Routes for kernels that know only local experts, in Triton: other routes are marked.

Sizes: T tokens, K choices per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.direct import load_local_expert

_ROUTES = 1024


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
