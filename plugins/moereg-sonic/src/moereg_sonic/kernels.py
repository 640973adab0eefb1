"""Groups of routes, and the weighted sum of a token's routes, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_routes_kernel(
    topk_ids,
    expert_map,
    groups,
    num_routes,
    num_experts,
    NUM_LOCAL_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Local expert of each route, or the group behind the last one: grid (blocks of routes,).

    Args:
        topk_ids: [N] int32, global.
        expert_map: [num_experts] int32; read if HAS_MAP.
        groups: [N] int32; overwritten.
        num_routes: N.
        num_experts: Ids from here on belong to no expert.
        NUM_LOCAL_EXPERTS: E, which is also that group.
        HAS_MAP: Ids are looked up in `expert_map`.
        BLOCK: Routes at a time.
    """
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = route < num_routes
    local = tl.load(topk_ids + route, mask=mask, other=-1)
    known = (local >= 0) & (local < num_experts)
    if HAS_MAP:
        local = tl.load(expert_map + local, mask=known, other=-1)
    known = known & (local >= 0) & (local < NUM_LOCAL_EXPERTS)
    tl.store(groups + route, tl.where(known, local, NUM_LOCAL_EXPERTS), mask=mask)


@triton.jit
def sum_routes_kernel(rows, topk_weights, place, end, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of a token's local routes in fp32, in order: grid (T, blocks of columns).

    Args:
        rows: [N,H], sorted.
        topk_weights: [N] fp32.
        place: [N] int32; row of each route.
        end: [1] int32; rows from here on add nothing, and neither they nor their weights are read.
        out: [T,H].
        size: H.
        TOP_K: K.
        BLOCK: Columns at a time.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    last = tl.load(end)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(TOP_K):
        route = token * TOP_K + slot
        row = tl.load(place + route).to(tl.int64)
        value = tl.load(rows + row * size + column, mask=mask & (row < last), other=0.0).to(tl.float32)
        total += value * tl.load(topk_weights + route, mask=row < last, other=0.0)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=mask)
