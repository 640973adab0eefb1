"""Sorts routes by expert on the device, in Triton, and lays tiles over them; `rows.plan` describes the plan.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.block_map import cut_workspace, store_block_map
from moereg.kernels.rows.direct import load_local_expert
from moereg.kernels.rows.plan import DEFAULT_SORT_CONFIG, RoutePlan, SortConfig, plan_sizes
from moereg.kernels.sizes import FLAG_WORDS

# Chunks and experts whose counts one program of the scan sums at a time: 16 registers a thread at 4 warps.
_SCAN_CHUNKS = 64
_SCAN_EXPERTS = 32


@triton.jit
def _store_offsets_and_blocks(
    counts, expert_offsets, tiles, num_local_experts, SHAPE: tl.constexpr, EXPERTS: tl.constexpr
):
    experts = tl.arange(0, EXPERTS)  # [EXPERTS]
    offsets = tl.cumsum(counts, 0) - counts  # [EXPERTS]
    tl.store(expert_offsets + experts, offsets, mask=experts < num_local_experts)
    tl.store(expert_offsets + num_local_experts, tl.sum(counts, 0))
    store_block_map(counts, offsets, tiles, SHAPE, EXPERTS)


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
    tiles,  # Tiles
    num_routes,
    num_experts,
    num_local_experts,
    SHAPE: tl.constexpr,  # TilesShape
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    # A route's place is the number of routes with a smaller (expert, route) key. Counting them takes O(N^2) compares
    # in all, yet needs neither atomics, nor barriers, nor a second launch, and the order is stable.
    pid = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)  # [CHUNK]
    if pid == 0:
        counts = tl.zeros([EXPERTS], dtype=tl.int32)
        for start in range(0, num_routes, CHUNK):
            expert = load_local_expert(topk_ids, expert_map, start + lanes, num_routes, num_experts, num_local_experts)
            counts += tl.histogram(expert, EXPERTS, mask=expert >= 0)
        _store_offsets_and_blocks(counts, expert_offsets, tiles, num_local_experts, SHAPE, EXPERTS)
    else:
        own = (pid - 1) * ROUTES + tl.arange(0, ROUTES)  # [ROUTES]
        own_expert = load_local_expert(topk_ids, expert_map, own, num_routes, num_experts, num_local_experts)
        own_key = own_expert * num_routes + own  # [ROUTES]
        smaller = tl.zeros([ROUTES, CHUNK], dtype=tl.int32)
        for start in range(0, num_routes, CHUNK):
            routes = start + lanes  # [CHUNK]
            expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
            key = tl.where(expert >= 0, expert * num_routes + routes, 0x7FFFFFFF)  # [CHUNK]
            smaller += _count_less(key, own_key)  # [ROUTES, CHUNK]
        place = tl.sum(smaller, 1)  # [ROUTES]
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
    routes = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    tl.store(route_expert + routes, expert, mask=routes < num_routes)
    experts = tl.arange(0, EXPERTS)
    counts = tl.histogram(expert, EXPERTS, mask=expert >= 0)  # [EXPERTS]
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
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)  # [EXPERTS]
    totals = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)  # [CHUNKS]
        mask = (chunks < num_chunks)[:, None] & (experts < num_local_experts)[None, :]
        pointers = chunk_counts + chunks[:, None] * num_local_experts + experts[None, :]
        counts = tl.load(pointers, mask=mask, other=0)  # [CHUNKS, EXPERTS]
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
    tiles,  # Tiles
    num_routes,
    num_local_experts,
    SHAPE: tl.constexpr,  # TilesShape
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    COMPARES: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Places routes, comparing each with COMPARES at a time, and writes the tiles.

    `expert_counts` and the prefix sums in `chunk_counts` come from the scan. With CHUNKS, at least the number of
    chunks, the programs compute both from the chunks' own counts.
    """
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    experts = tl.arange(0, EXPERTS)  # [EXPERTS]
    pid = tl.program_id(0)
    first = (pid - 1) * ROUTES
    chunk = first // CHUNK
    if CHUNKS > 0:
        chunks = tl.arange(0, CHUNKS)  # [CHUNKS]
        known = (chunks * CHUNK < num_routes)[:, None] & (experts < num_local_experts)[None, :]
        pointers = chunk_counts + chunks[:, None] * num_local_experts + experts[None, :]
        by_chunk = tl.load(pointers, mask=known, other=0)  # [CHUNKS, EXPERTS]
        counts = tl.sum(by_chunk, 0)  # [EXPERTS]
    else:
        counts = tl.load(expert_counts + experts, mask=experts < num_local_experts, other=0)  # [EXPERTS]
    if pid == 0:
        _store_offsets_and_blocks(counts, expert_offsets, tiles, num_local_experts, SHAPE, EXPERTS)
    else:
        own = first + tl.arange(0, ROUTES)  # [ROUTES]
        own_expert = tl.load(route_expert + own, mask=own < num_routes, other=-1)  # [ROUTES]
        valid = own_expert >= 0
        offsets = tl.cumsum(counts, 0) - counts  # [EXPERTS]
        if CHUNKS > 0:
            offsets += tl.sum(tl.where((chunks < chunk)[:, None], by_chunk, 0), 0)
            place = tl.gather(offsets, tl.maximum(own_expert, 0), 0)
        else:
            place = tl.load(chunk_counts + chunk * num_local_experts + own_expert, mask=valid, other=0)
            place += tl.gather(offsets, tl.maximum(own_expert, 0), 0)
        # The chunk's routes up to the program's last, COMPARES at a time.
        for start in range(chunk * CHUNK, first + ROUTES, COMPARES):
            routes = start + tl.arange(0, COMPARES)  # [COMPARES]
            expert = tl.load(route_expert + routes, mask=routes < num_routes, other=-1)
            earlier = (expert[None, :] == own_expert[:, None]) & (routes[None, :] < own[:, None])  # [ROUTES, COMPARES]
            place += tl.sum(earlier.to(tl.int32), 1)
        tl.store(sorted_routes + place, own, mask=valid)
        tl.store(route_row + own, tl.where(valid, place, -1), mask=own < num_routes)


def sort_routes(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
    block_m: int,
    workspace: torch.Tensor,
    config: SortConfig = DEFAULT_SORT_CONFIG,
    slack: int = 0,
    overlap: bool = False,
    tall: int = 0,
    heavy_first: int = False,
    flags: torch.Tensor | None = None,
) -> RoutePlan:
    """Sorts routes by local expert and lays tiles over them; no allocation and no host synchronization.

    The result is deterministic. The layer's output does not depend on the order within an expert, since a row of a GEMM
    does not depend on its place in a tile and the reduction over K reads rows by route.

    Args:
        topk_ids: [T, K] int32, contiguous, T >= 1: ids outside [0, num_experts) belong to no expert.
        expert_map: [num_experts] int32 to local experts, where values outside [0, E) mean not local; None: identity.
        num_experts: number of ids.
        block_m: rows per tile.
        workspace: [>= route_workspace_numel(...)] int32, contiguous, 16-byte aligned; overwritten, and aliased by the
            plan.
        config: how to sort.
        slack: rows by which the last tile of an expert may be longer.
        overlap: whether the next kernel is launched to start early.
        tall: as in `BlockMap`, which then has no `slack`.
        heavy_first: as in `BlockMap`.
        flags: as in `BlockMap`, int32, contiguous; overwritten along with the plan, so nothing may still read them.

    Returns:
        The plan, made of views of `workspace`, and the flags.
    """
    num_routes = topk_ids.numel()
    assert topk_ids.dtype == workspace.dtype == torch.int32 and topk_ids.is_contiguous()
    assert num_routes > 0, "the caller handles T = 0"
    # Also keeps the keys of the single launch within int32.
    assert num_local_experts * config.single_launch_routes < 2**31
    pieces = cut_workspace(workspace, plan_sizes(num_routes, num_local_experts, block_m, config))
    expert_counts, chunk_counts = pieces.pop("expert_counts"), pieces.pop("chunk_counts")
    plan = RoutePlan(**pieces, block_m=block_m, slack=slack, tall=tall, heavy_first=heavy_first, flags=flags)
    assert flags is None or (flags.shape == (plan.max_blocks, FLAG_WORDS) and flags.is_contiguous())
    # Triton's histogram takes a power of two, on NVIDIA at least 32 bins.
    experts = max(32, triton.next_power_of_2(num_local_experts))

    if num_routes <= config.single_launch_routes:
        launch(
            _sort_routes_kernel,
            (1 + triton.cdiv(num_routes, config.routes_per_program),),
            *(topk_ids, expert_map, plan.route_expert, plan.route_row, plan.sorted_routes, plan.expert_offsets),
            plan.tiles,
            *(num_routes, num_experts, num_local_experts),
            SHAPE=plan.shape,
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
        *(topk_ids, expert_map, plan.route_expert, chunk_counts),
        *(num_routes, num_experts, num_local_experts),
        EXPERTS=experts,
        CHUNK=config.chunk,
        OVERLAP=overlap,
        num_warps=config.num_warps,
    )
    # A power of two, so that different numbers of tokens share compiled variants.
    chunks = triton.next_power_of_2(num_chunks)
    scans_alone = num_routes <= config.short_scan_routes and chunks * experts <= config.short_scan
    routes_per_program = config.short_routes if scans_alone else config.routes_per_placing
    if not scans_alone:
        launch(
            _scan_chunks_kernel,
            (triton.cdiv(num_local_experts, _SCAN_EXPERTS),),
            chunk_counts,
            expert_counts,
            num_chunks,
            num_local_experts,
            EXPERTS=_SCAN_EXPERTS,
            CHUNKS=_SCAN_CHUNKS,
            num_warps=config.num_warps,
            **overlapping(overlap),
        )
    launch(
        _place_routes_kernel,
        (1 + triton.cdiv(num_routes, routes_per_program),),
        *(plan.route_expert, chunk_counts, expert_counts, plan.route_row, plan.sorted_routes, plan.expert_offsets),
        plan.tiles,
        *(num_routes, num_local_experts),
        SHAPE=plan.shape,
        EXPERTS=experts,
        CHUNK=config.chunk,
        ROUTES=routes_per_program,
        COMPARES=config.short_compares if scans_alone else routes_per_program,
        CHUNKS=chunks if scans_alone else 0,
        num_warps=config.num_warps,
        **overlapping(overlap),
    )
    return plan
