"""Device code of `_routes`: the local expert of every route, and sums over choices.

Imports triton, so it is imported when a layer runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["localize", "weighted_sum"]


@triton.jit
def localize(
    topk_ids,
    topk_weights,
    expert_map,
    out_ids,
    out_weights,
    count,
    num_experts,
    num_local,
    without_expert,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the local expert and the weight of each of `count` routes; `without_expert` and 0 where it has none."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    expert = tl.load(topk_ids + offset, mask=inside, other=-1)
    known = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=inside & known, other=-1)
        known = known & (expert >= 0) & (expert < num_local)
    weight = tl.load(topk_weights + offset, mask=inside, other=0.0)
    tl.store(out_ids + offset, tl.where(known, expert, without_expert), mask=inside)
    tl.store(out_weights + offset, tl.where(known, weight, 0.0), mask=inside)


@triton.jit
def weighted_sum(rows, topk_weights, topk_ids, out, num_local, hidden, top_k, BLOCK: tl.constexpr):
    """Sums a token's rows [top_k, hidden] in fp32, each times its weight; rows of no local expert are not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for choice in range(top_k):
        route = token * top_k + choice
        known = tl.load(topk_ids + route) < num_local
        row = tl.load(rows + route * hidden + column, mask=inside & known, other=0.0)
        total += tl.load(topk_weights + route) * row.to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
