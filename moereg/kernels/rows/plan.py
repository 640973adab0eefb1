"""Layout of sorted routes in rows: the plan, and the workspace it takes.

A route is one (token, choice) pair, numbered `t * K + k`. The plan is compact: each expert's rows directly follow those
of the expert before it, and a block map tells a grouped GEMM where each tile starts.
Sizes: T tokens, K choices per token, N = T * K routes, E local experts, B upper bound on the number of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moereg.kernels.rows.block_map import NUM_COUNTS, BlockMap, aligned, cut_workspace


@dataclass(frozen=True, slots=True)
class SortConfig:
    """How routes are sorted."""

    single_launch_routes: int = 4096  # up to this many routes, one launch in which every program reads all of them
    # routes read at a time, and counted together above the limit; a power of two, at least one route a thread, since
    # the histogram would count twice a route that two threads hold
    chunk: int = 512
    routes_per_program: int = 16  # routes that one program of the single launch places; a power of two
    routes_per_placing: int = 32  # routes that one program places above the limit; a power of two that divides `chunk`
    # up to this many routes, each placing program sums the chunks' counts itself, without another launch, and compares
    # its routes with `short_compares` at a time: few programs mostly wait for loads
    short_scan_routes: int = 8192
    # and up to this many chunks times experts, both rounded up to powers of two. At most 4096, 32 registers a thread
    short_scan: int = 2048
    short_routes: int = 32  # replaces `routes_per_placing` in that case; a power of two
    short_compares: int = 256  # a power of two that divides `chunk` and is a multiple of `short_routes`
    num_warps: int = 4  # warps per program


DEFAULT_SORT_CONFIG = SortConfig()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoutePlan(BlockMap):
    """The row of each route, and the sorted rows that each tile covers; all int32 on the device of the ids."""

    route_expert: torch.Tensor  # [N], local expert of a route, or -1 where it adds nothing
    route_row: torch.Tensor  # [N], sorted row of a route, or -1 where it adds nothing
    # [N], routes by ascending expert, by ascending route within one; entries from `expert_offsets[E]` on are not
    # written
    sorted_routes: torch.Tensor
    expert_offsets: torch.Tensor  # [E + 1], first sorted row of each expert, then the number of valid routes


def max_num_blocks(num_routes: int, num_local_experts: int, block_m: int) -> int:
    """Returns the most tiles of `block_m` rows that any distribution of the routes over the experts needs."""
    active = min(num_routes, num_local_experts)
    return (num_routes + active * (block_m - 1)) // block_m


def route_workspace_numel(
    num_tokens: int, top_k: int, num_local_experts: int, block_m: int, config: SortConfig = DEFAULT_SORT_CONFIG
) -> int:
    """Returns how many int32 `sort_routes` needs; grows with tokens and experts, shrinks with `block_m`."""
    return sum(map(aligned, plan_sizes(num_tokens * top_k, num_local_experts, block_m, config).values()))


def plan_sizes(num_routes: int, num_local_experts: int, block_m: int, config: SortConfig) -> dict[str, int]:
    """int32 of each piece of a workspace, in order: the plan's tensors, then counts by expert and by chunk."""
    blocks = max_num_blocks(num_routes, num_local_experts, block_m)
    # Needed above the limit of the single launch only, but always counted, so that the size grows with tokens.
    chunks = -(-num_routes // config.chunk)
    return {
        "route_expert": num_routes,
        "route_row": num_routes,
        "sorted_routes": num_routes,
        "expert_offsets": num_local_experts + 1,
        "block_expert": blocks,
        "block_row": blocks,
        "block_end": blocks,
        "counts": NUM_COUNTS,
        "expert_counts": num_local_experts,
        "chunk_counts": chunks * num_local_experts,
    }


def plan_in(workspace: torch.Tensor, num_routes: int, num_local_experts: int, block_m: int) -> RoutePlan:
    """Returns the plan that `sort_routes`, given the same sizes and no other options, wrote to a workspace."""
    pieces = cut_workspace(workspace, plan_sizes(num_routes, num_local_experts, block_m, DEFAULT_SORT_CONFIG))
    del pieces["expert_counts"], pieces["chunk_counts"]
    return RoutePlan(**pieces, block_m=block_m, slack=0, tall=0, heavy_first=False, flags=None)
