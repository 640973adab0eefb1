"""Routes in order of their experts, by SonicMoE, without waiting for the device."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton
from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

from moereg_sonic.kernels import group_routes_kernel

_ROUTES_AT_A_TIME: Final = 1024


@dataclasses.dataclass(frozen=True)
class SortedRoutes:
    """N = T * K routes in order of their local experts; those of no local expert are last.

    Attributes:
        offsets: [E + 1] int32; where each expert's routes begin, and where the last one's end.
        tokens: [N] int32; token of each sorted route.
        place: [N] int32; where each route was sorted to, the last offset or behind it if it has no local expert.
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    place: torch.Tensor


def sort_routes(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None) -> SortedRoutes:
    """Sorts routes stably, so that the result is the same each time.

    Args:
        topk_ids: [T,K] int32, global.
        num_local_experts: E.
        expert_map: [num_experts] int32, or None.
    """
    num_routes = topk_ids.numel()
    # SonicMoE sorts ids below a number alone, so routes without an expert form a group behind the last one.
    groups, num_groups = topk_ids.new_empty(topk_ids.shape), num_local_experts + 1
    group_routes_kernel[(triton.cdiv(num_routes, _ROUTES_AT_A_TIME),)](
        topk_ids.contiguous(),
        topk_ids if expert_map is None else expert_map,
        groups,
        num_routes,
        num_local_experts if expert_map is None else len(expert_map),
        NUM_LOCAL_EXPERTS=num_local_experts,
        HAS_MAP=expert_map is not None,
        BLOCK=_ROUTES_AT_A_TIME,
    )
    counts, offsets = topk_ids.new_empty(num_groups), topk_ids.new_empty(num_groups + 1)
    tokens, routes, place = (topk_ids.new_empty(num_routes) for _ in range(3))
    TC_topk_router_metadata_triton(groups, num_groups, counts, offsets, tokens, routes, place)
    return SortedRoutes(offsets[:num_groups], tokens, place)
