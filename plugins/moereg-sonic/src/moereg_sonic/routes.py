"""Routes in order of their experts, in torch, without waiting for the device."""

from __future__ import annotations

import dataclasses

import torch

from moereg.author import local_expert_ids


@dataclasses.dataclass(frozen=True)
class SortedRoutes:
    """N = T * K routes in order of their local experts; those of no local expert are last.

    Attributes:
        offsets: [E + 1] int32; where each expert's routes begin, and where the last one's end.
        tokens: [N] int32; token of each sorted route.
        place: [N] int32; where each route was sorted to, -1 if it has no local expert.
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
    device, num_routes = topk_ids.device, topk_ids.numel()
    local = local_expert_ids(topk_ids, num_local_experts, expert_map).flatten()
    # Routes without an expert form a group behind the last one.
    group, order = torch.sort(torch.where(local < 0, num_local_experts, local), stable=True)
    bounds = torch.arange(num_local_experts + 1, device=device)
    place = torch.empty(num_routes, dtype=torch.int32, device=device)
    place[order] = torch.arange(num_routes, dtype=torch.int32, device=device)
    return SortedRoutes(
        offsets=torch.searchsorted(group, bounds, out_int32=True),
        tokens=(order // topk_ids.shape[1]).to(torch.int32),
        place=torch.where(local < 0, -1, place),
    )
