"""Routes sorted by expert and padded to whole tiles, as Alpha-MoE takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.rows.sort import sort_routes

__all__ = ["PaddedRoutes", "padded_on_host", "padded_routes"]


class PaddedRoutes(NamedTuple):
    """B tiles of M rows; all int32 on one device.

    Attributes:
        routes: [B * M], the route `t * K + k` of each row, and T * K where there is none.
        experts: [B], local expert of each tile.
        num_rows: [1], rows of the tiles in use, which come first.
    """

    routes: torch.Tensor
    experts: torch.Tensor
    num_rows: torch.Tensor


@triton.jit
def _pad_kernel(
    routes,
    experts,
    num_rows,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    num_routes,
    block_m,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0)
    used = tl.load(num_blocks)
    rows = tl.arange(0, ROWS)  # [ROWS]
    # The map of unused tiles is not written.
    expert = tl.load(block_expert + block, mask=block < used, other=0)
    first = tl.load(block_row + block, mask=block < used, other=0) + rows  # [ROWS]
    is_route = (rows < block_m) & (first < tl.load(block_end + block, mask=block < used, other=0))
    found = tl.load(sorted_routes + first, mask=is_route, other=0)
    tl.store(routes + block * block_m + rows, tl.where(is_route, found, num_routes), mask=rows < block_m)
    tl.store(experts + block, expert)
    if block == 0:
        tl.store(num_rows, used * block_m)


def padded_routes(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, num_local_experts: int, block_m: int
) -> PaddedRoutes:
    """Sorts with the launches of the `triton` backend, and pads with one more; no synchronization.

    Args:
        topk_ids: [T,K] int32, contiguous.
        expert_map: [num_experts] int32, or None.
        num_experts: Number of ids.
        num_local_experts: Number of experts here.
        block_m: M, at most 128.
    """
    sizes = (*topk_ids.shape, num_local_experts, block_m)
    workspace = topk_ids.new_empty(route_workspace_numel(*sizes))
    plan = sort_routes(topk_ids, expert_map, num_experts, num_local_experts, block_m, workspace)
    most = plan.max_blocks
    routes, experts, num_rows = topk_ids.new_empty(most * block_m + most + 1).split([most * block_m, most, 1])
    _pad_kernel[(most,)](
        *(routes, experts, num_rows, plan.sorted_routes, plan.block_expert, plan.block_row, plan.block_end),
        *(plan.num_blocks, topk_ids.numel(), block_m),
        ROWS=128,
    )
    return PaddedRoutes(routes, experts, num_rows)


def padded_on_host(local_ids: Sequence[int], num_local_experts: int, block_m: int) -> tuple[list[int], list[int]]:
    """The same for trying many `block_m`, without compiling for each: routes, and the experts of the tiles in use.

    Args:
        local_ids: [T * K], local expert of each route; another number where it has none.
        num_local_experts: Number of experts.
        block_m: M.
    """
    of_expert: list[list[int]] = [[] for _ in range(num_local_experts)]
    for route, expert in enumerate(local_ids):
        if 0 <= expert < num_local_experts:
            of_expert[expert].append(route)
    routes: list[int] = []
    experts: list[int] = []
    for expert, own in enumerate(of_expert):
        padded = [*own, *[len(local_ids)] * (-len(own) % block_m)]
        routes += padded
        experts += [expert] * (len(padded) // block_m)
    return routes, experts
