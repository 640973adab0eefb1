"""Groups routes by expert on the device, in Triton: who computes what, and which tile belongs to which expert.

A route is one (token, choice) pair, numbered `t * K + k`. The plan is compact: the rows of one expert follow those of
the one before it with nothing between them, and a block map tells a grouped GEMM where each tile starts.
Sizes: T tokens, K choices per token, N = T * K routes, E local experts, B upper bound on the number of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.block_map import (
    NUM_COUNTS,
    BlockMap,
    aligned,
    block_map_reference,
    cut_workspace,
    store_block_map,
)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How routes are sorted.

    Attributes:
        single_launch_routes: up to this many routes, one launch in which every program reads all of them.
        chunk: routes that are read at a time, and the unit of counting above the limit; a power of two, at least one
            route a thread, since the histogram would count a route twice that two threads hold.
        routes_per_program: routes that one program of the single launch places; a power of two.
        routes_per_placing: routes that one program places above the limit; a power of two that divides `chunk`.
        num_warps: warps per program.
    """

    single_launch_routes: int = 4096
    chunk: int = 512
    routes_per_program: int = 16
    routes_per_placing: int = 32
    num_warps: int = 4


DEFAULT_ROUTING_CONFIG = RoutingConfig()

# Chunks and experts whose counts one program of the scan adds up at a time: 16 registers a thread at 4 warps.
_SCAN_CHUNKS = 64
_SCAN_EXPERTS = 32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoutePlan(BlockMap):
    """Where each route's row is, and which sorted rows each tile covers; all int32 on the device of the ids.

    Attributes:
        route_expert: [N], local expert of a route, or -1 where it adds nothing.
        route_row: [N], sorted row of a route, or -1 where it adds nothing.
        sorted_routes: [N], routes by ascending expert, by ascending route within one; entries from
            `expert_offsets[E]` on are not written.
        expert_offsets: [E + 1], first sorted row of each expert, then the number of valid routes.
    """

    route_expert: torch.Tensor
    route_row: torch.Tensor
    sorted_routes: torch.Tensor
    expert_offsets: torch.Tensor


@triton.jit
def load_local_expert(
    topk_ids,
    expert_map,
    routes,
    num_routes,
    num_experts,
    num_local_experts,
):
    """Local experts of routes of any shape, a single one included; -1 where a route adds nothing."""
    expert = tl.load(topk_ids + routes, mask=routes < num_routes, other=-1)
    expert = tl.where(expert < num_experts, expert, -1)
    if expert_map is not None:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
    return tl.where((expert >= 0) & (expert < num_local_experts), expert, -1)


@triton.jit
def _store_offsets_and_blocks(
    counts,
    expert_offsets,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    num_local_experts,
    BLOCK_M: tl.constexpr,
    SLACK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    experts = tl.arange(0, EXPERTS)
    offsets = tl.cumsum(counts, 0) - counts
    tl.store(expert_offsets + experts, offsets, mask=experts < num_local_experts)
    tl.store(expert_offsets + num_local_experts, tl.sum(counts, 0))
    store_block_map(counts, offsets, block_expert, block_row, block_end, num_blocks, BLOCK_M, SLACK, EXPERTS)


@triton.jit
def _count_less(keys, own_keys):
    return (keys[None, :] < own_keys[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["num_routes"])
def _sort_routes_kernel(
    topk_ids,
    expert_map,
    route_expert,
    route_row,
    sorted_routes,
    expert_offsets,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    num_routes,
    num_experts,
    num_local_experts,
    BLOCK_M: tl.constexpr,
    SLACK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    # A route's place is the number of routes with a smaller (expert, route) key. Counting them takes O(N^2) compares
    # in all, yet needs neither atomics, nor barriers, nor a second launch, and the order is stable.
    pid = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    if pid == 0:
        counts = tl.zeros([EXPERTS], dtype=tl.int32)
        for start in range(0, num_routes, CHUNK):
            expert = load_local_expert(topk_ids, expert_map, start + lanes, num_routes, num_experts, num_local_experts)
            counts += tl.histogram(expert, EXPERTS, mask=expert >= 0)
        _store_offsets_and_blocks(
            counts,
            expert_offsets,
            block_expert,
            block_row,
            block_end,
            num_blocks,
            num_local_experts,
            BLOCK_M,
            SLACK,
            EXPERTS,
        )
    else:
        own = (pid - 1) * ROUTES + tl.arange(0, ROUTES)
        own_expert = load_local_expert(topk_ids, expert_map, own, num_routes, num_experts, num_local_experts)
        own_key = own_expert * num_routes + own
        smaller = tl.zeros([ROUTES, CHUNK], dtype=tl.int32)
        for start in range(0, num_routes, CHUNK):
            routes = start + lanes
            expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
            key = tl.where(expert >= 0, expert * num_routes + routes, 0x7FFFFFFF)
            smaller += _count_less(key, own_key)
        place = tl.sum(smaller, 1)
        tl.store(sorted_routes + place, own, mask=own_expert >= 0)
        tl.store(route_row + own, tl.where(own_expert >= 0, place, -1), mask=own < num_routes)
        tl.store(route_expert + own, own_expert, mask=own < num_routes)


@triton.jit(do_not_specialize=["num_routes"])
def _count_chunks_kernel(
    topk_ids,
    expert_map,
    route_expert,
    chunk_counts,
    num_routes,
    num_experts,
    num_local_experts,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    chunk = tl.program_id(0)
    routes = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    tl.store(route_expert + routes, expert, mask=routes < num_routes)
    experts = tl.arange(0, EXPERTS)
    counts = tl.histogram(expert, EXPERTS, mask=expert >= 0)
    tl.store(chunk_counts + chunk * num_local_experts + experts, counts, mask=experts < num_local_experts)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_chunks_kernel(
    chunk_counts,
    expert_counts,
    num_chunks,
    num_local_experts,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    totals = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        mask = (chunks < num_chunks)[:, None] & (experts < num_local_experts)[None, :]
        pointers = chunk_counts + chunks[:, None] * num_local_experts + experts[None, :]
        counts = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, tl.cumsum(counts, 0) - counts + totals[None, :], mask=mask)
        totals += tl.sum(counts, 0)
    tl.store(expert_counts + experts, totals, mask=experts < num_local_experts)


@triton.jit(do_not_specialize=["num_routes"])
def _place_routes_kernel(
    route_expert,
    chunk_counts,
    expert_counts,
    route_row,
    sorted_routes,
    expert_offsets,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    num_routes,
    num_local_experts,
    BLOCK_M: tl.constexpr,
    SLACK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(expert_counts + experts, mask=experts < num_local_experts, other=0)
    pid = tl.program_id(0)
    if pid == 0:
        _store_offsets_and_blocks(
            counts,
            expert_offsets,
            block_expert,
            block_row,
            block_end,
            num_blocks,
            num_local_experts,
            BLOCK_M,
            SLACK,
            EXPERTS,
        )
    else:
        first = (pid - 1) * ROUTES
        own = first + tl.arange(0, ROUTES)
        own_expert = tl.load(route_expert + own, mask=own < num_routes, other=-1)
        valid = own_expert >= 0
        chunk = first // CHUNK
        place = tl.load(chunk_counts + chunk * num_local_experts + own_expert, mask=valid, other=0)
        place += tl.gather(tl.cumsum(counts, 0) - counts, tl.maximum(own_expert, 0), 0)
        # The chunk's routes up to the program's last, ROUTES at a time.
        for start in range(chunk * CHUNK, first + ROUTES, ROUTES):
            routes = start + tl.arange(0, ROUTES)
            expert = tl.load(route_expert + routes, mask=routes < num_routes, other=-1)
            earlier = (expert[None, :] == own_expert[:, None]) & (routes[None, :] < own[:, None])
            place += tl.sum(earlier.to(tl.int32), 1)
        tl.store(sorted_routes + place, own, mask=valid)
        tl.store(route_row + own, tl.where(valid, place, -1), mask=own < num_routes)


def max_num_blocks(num_routes: int, num_local_experts: int, block_m: int) -> int:
    """Returns the most tiles of `block_m` rows that any distribution of the routes over the experts needs."""
    active = min(num_routes, num_local_experts)
    return (num_routes + active * (block_m - 1)) // block_m


def route_workspace_numel(
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    block_m: int,
    config: RoutingConfig = DEFAULT_ROUTING_CONFIG,
) -> int:
    """Returns how many int32 `sort_routes` needs; grows with tokens and experts, shrinks with `block_m`."""
    return sum(aligned(size) for size in _piece_sizes(num_tokens * top_k, num_local_experts, block_m, config))


def sort_routes(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
    block_m: int,
    workspace: torch.Tensor,
    config: RoutingConfig = DEFAULT_ROUTING_CONFIG,
    slack: int = 0,
    overlap: bool = False,
) -> RoutePlan:
    """Sorts routes by local expert and lays tiles over them; no allocation and no host synchronization.

    The result is deterministic. The layer's output would be so for any order within an expert, since a row of a GEMM
    does not depend on its place in a tile and the reduction over K reads rows by route.

    Args:
        topk_ids: [T, K] int32, contiguous, T >= 1: ids outside [0, num_experts) belong to no expert.
        expert_map: [num_experts] int32 to local experts, where values outside [0, E) mean not here; None: identity.
        num_experts: number of ids.
        num_local_experts: E.
        block_m: rows per tile.
        workspace: [>= route_workspace_numel(...)] int32, contiguous, 16-byte aligned; overwritten, and aliased by the
            plan.
        config: how to sort.
        slack: rows by which the last tile of an expert may be longer.
        overlap: whether the next kernel is launched to start early.

    Returns:
        The plan, made of views of `workspace`.
    """
    num_routes = topk_ids.numel()
    assert topk_ids.dtype == workspace.dtype == torch.int32 and topk_ids.is_contiguous()
    assert num_routes > 0, "the caller handles T = 0"
    # Also keeps the keys of the single launch within int32.
    assert num_local_experts * config.single_launch_routes < 2**31
    pieces = cut_workspace(workspace, _piece_sizes(num_routes, num_local_experts, block_m, config))
    route_expert, route_row, sorted_routes, expert_offsets, *block_pieces = pieces
    block_expert, block_row, block_end, counts, expert_counts, chunk_counts = block_pieces
    plan = RoutePlan(
        route_expert=route_expert,
        route_row=route_row,
        sorted_routes=sorted_routes,
        expert_offsets=expert_offsets,
        block_expert=block_expert,
        block_row=block_row,
        block_end=block_end,
        num_blocks=counts[:1],
        tile_counters=counts[1:],
        block_m=block_m,
        slack=slack,
    )
    block_map = (plan.expert_offsets, plan.block_expert, plan.block_row, plan.block_end, plan.num_blocks)
    # Triton's histogram wants a power of two, and on NVIDIA a warp's worth of bins at least.
    experts = max(32, triton.next_power_of_2(num_local_experts))

    if num_routes <= config.single_launch_routes:
        launch(
            _sort_routes_kernel,
            (1 + triton.cdiv(num_routes, config.routes_per_program),),
            topk_ids,
            expert_map,
            plan.route_expert,
            plan.route_row,
            plan.sorted_routes,
            *block_map,
            num_routes,
            num_experts,
            num_local_experts,
            BLOCK_M=block_m,
            SLACK=slack,
            EXPERTS=experts,
            CHUNK=config.chunk,
            ROUTES=config.routes_per_program,
            OVERLAP=overlap,
            num_warps=config.num_warps,
        )
        return plan

    num_chunks = triton.cdiv(num_routes, config.chunk)
    launch(
        _count_chunks_kernel,
        (num_chunks,),
        topk_ids,
        expert_map,
        plan.route_expert,
        chunk_counts,
        num_routes,
        num_experts,
        num_local_experts,
        EXPERTS=experts,
        CHUNK=config.chunk,
        OVERLAP=overlap,
        num_warps=config.num_warps,
    )
    launch(
        _scan_chunks_kernel,
        (triton.cdiv(num_local_experts, _SCAN_EXPERTS),),
        chunk_counts,
        expert_counts,
        num_chunks,
        num_local_experts,
        EXPERTS=_SCAN_EXPERTS,
        CHUNKS=_SCAN_CHUNKS,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        **overlap_options(overlap),
    )
    launch(
        _place_routes_kernel,
        (1 + triton.cdiv(num_routes, config.routes_per_placing),),
        plan.route_expert,
        chunk_counts,
        expert_counts,
        plan.route_row,
        plan.sorted_routes,
        *block_map,
        num_routes,
        num_local_experts,
        BLOCK_M=block_m,
        SLACK=slack,
        EXPERTS=experts,
        CHUNK=config.chunk,
        ROUTES=config.routes_per_placing,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        **overlap_options(overlap),
    )
    return plan


def sort_routes_reference(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
    block_m: int,
    slack: int = 0,
) -> RoutePlan:
    """The plan of `sort_routes` by a stable sort in torch, with every tensor cut to the part in use.

    Args:
        topk_ids: [T, K] int32.
        expert_map: [num_experts] int32 or None.
        num_experts: number of ids.
        num_local_experts: E.
        block_m: rows per tile.
        slack: rows by which the last tile of an expert may be longer.

    Returns:
        New tensors: `sorted_routes` [valid routes], `block_*` [tiles in use], the others as in `RoutePlan`.
    """
    ids = topk_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    local = ids if expert_map is None else expert_map.long()[ids.where(known, ids.new_zeros(()))]
    local = local.where(known & (local >= 0) & (local < num_local_experts), local.new_tensor(-1))
    counts = local[local >= 0].bincount(minlength=num_local_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    blocks = block_map_reference(counts, offsets[:-1], block_m, slack)
    sorted_routes = local.argsort(stable=True)[(local < 0).sum() :]
    route_row = torch.full_like(local, -1)
    route_row[sorted_routes] = torch.arange(sorted_routes.numel(), device=ids.device)
    return RoutePlan(
        route_expert=local.int(),
        route_row=route_row.int(),
        sorted_routes=sorted_routes.int(),
        expert_offsets=offsets.int(),
        block_expert=blocks.block_expert,
        block_row=blocks.block_row,
        block_end=blocks.block_end,
        num_blocks=blocks.num_blocks,
        tile_counters=blocks.tile_counters,
        block_m=block_m,
        slack=slack,
    )


def _piece_sizes(num_routes: int, num_local_experts: int, block_m: int, config: RoutingConfig) -> tuple[int, ...]:
    """Sizes of the plan's pieces: its fields, the last two in one, then counts by expert and by chunk."""
    blocks = max_num_blocks(num_routes, num_local_experts, block_m)
    # Also below the limit of the single launch, so that the size grows steadily with tokens.
    chunks = -(-num_routes // config.chunk)
    return (
        num_routes,
        num_routes,
        num_routes,
        num_local_experts + 1,
        blocks,
        blocks,
        blocks,
        NUM_COUNTS,
        num_local_experts,
        chunks * num_local_experts,
    )
