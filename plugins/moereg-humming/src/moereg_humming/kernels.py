"""Routes by expert, the activation and the weighted sum, in Triton. Humming does the products between them.

N is T * K routes. A route is local if its expert is one of this rank's; others add nothing, and whatever their rows and
weights hold is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _local_expert(ids, mask, expert_map, num_experts, num_local_experts, HAS_MAP: tl.constexpr):
    """Local expert of each global id, -1 if there is none."""
    known = mask & (ids >= 0) & (ids < num_experts)
    local = ids
    if HAS_MAP:
        local = tl.load(expert_map + ids, mask=known, other=-1)
    return tl.where(known & (local >= 0) & (local < num_local_experts), local, -1)


@triton.jit
def sort_routes_kernel(
    topk_ids,
    expert_map,
    sorted_routes,
    tile_experts,
    totals,
    locks,
    num_routes,
    num_padded,
    num_experts,
    num_local_experts,
    num_locks,
    FIRST_ROWS: tl.constexpr,
    SECOND_ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Routes in order of their experts, each expert's padded to whole tiles, for the tiles of both products.

    A program is one expert and one product. It counts all routes, which says where the expert begins, and writes the
    expert's own in their order, so the result is the same each time.

    Args:
        topk_ids: [N] int32, global.
        expert_map: [num_experts] int32, or any pointer without a map.
        sorted_routes: [2, num_padded] int32; padding is N.
        tile_experts: [2, num_padded / 8] int32.
        totals: [2] int32; padded routes.
        locks: [num_locks] int32; zeroed.
        num_routes: N.
        num_padded: Space for routes.
        num_experts, num_local_experts: Of the layer and of this rank.
        num_locks: Locks to zero.
        FIRST_ROWS, SECOND_ROWS: Rows of a tile of the first and the second product.
        HAS_MAP: Whether there is a map.
        NUM_BINS: Power of two above num_local_experts.
        BLOCK: Routes at a time.
    """
    expert = tl.program_id(0)
    product = tl.program_id(1)
    rows = tl.where(product == 0, FIRST_ROWS, SECOND_ROWS)
    lanes = tl.arange(0, BLOCK)
    bins = tl.arange(0, NUM_BINS)

    counts = tl.zeros((NUM_BINS,), dtype=tl.int32)
    for start in range(0, num_routes, BLOCK):
        route = start + lanes
        mask = route < num_routes
        ids = tl.load(topk_ids + route, mask=mask, other=-1)
        local = _local_expert(ids, mask, expert_map, num_experts, num_local_experts, HAS_MAP)
        counts += tl.histogram(tl.where(local < 0, NUM_BINS - 1, local), NUM_BINS)
    counts = tl.where(bins < num_local_experts, counts, 0)
    padded = (counts + rows - 1) // rows * rows
    begin = tl.sum(tl.where(bins < expert, padded, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    end = begin + (count + rows - 1) // rows * rows

    out = sorted_routes + product * num_padded
    place = begin
    for start in range(0, num_routes, BLOCK):
        route = start + lanes
        mask = route < num_routes
        ids = tl.load(topk_ids + route, mask=mask, other=-1)
        local = _local_expert(ids, mask, expert_map, num_experts, num_local_experts, HAS_MAP)
        own = (local == expert).to(tl.int32)
        tl.store(out + place + tl.cumsum(own, 0) - 1, route, mask=own > 0)
        place += tl.sum(own)
    for start in range(begin + count, end, BLOCK):
        tl.store(out + start + lanes, num_routes, mask=start + lanes < end)
    experts_out = tile_experts + product * (num_padded // 8)
    for start in range(begin // rows, end // rows, BLOCK):
        tl.store(experts_out + start + lanes, expert, mask=start + lanes < end // rows)

    if expert == 0:
        tl.store(totals + product, tl.sum(padded))
        if product == 0:
            for start in range(0, num_locks, BLOCK):
                tl.store(locks + start + lanes, 0, mask=start + lanes < num_locks)


@triton.jit
def scale_rows_kernel(hidden_states, topk_weights, out, num_columns, BLOCK: tl.constexpr):
    """Rows [T,H] times their one routing weight, rounded to their dtype: grid (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    value = tl.load(hidden_states + row * num_columns + column, mask=mask).to(tl.float32) * tl.load(topk_weights + row)
    tl.store(out + row * num_columns + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _activate(x, NAME: tl.constexpr, ALPHA: tl.constexpr):
    """The function of a gate, or of x where there is none; NaN stays NaN."""
    if NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif NAME == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        return x * x
    else:
        return x / (1.0 + tl.exp(-ALPHA * x))


@triton.jit
def activate_kernel(
    products,
    intermediate,
    topk_ids,
    expert_map,
    factors,
    bias,
    size,
    num_experts,
    num_local_experts,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activation of each local route: grid (N, blocks of columns).

    Args:
        products: [N, 2I] where gated, gates first, else [N, I].
        intermediate: [N, I].
        topk_ids: [N] int32.
        expert_map: [num_experts] int32, or any pointer without a map.
        factors: fp32 [E,2]; multiply gate and up.
        bias: [E,2I] or [E,I]; added after the factors.
        size: I.
        num_experts, num_local_experts: Of the layer and of this rank.
        NAME, GATED, ALPHA, BETA, LIMIT: The activation.
        HAS_MAP, HAS_FACTORS, HAS_BIAS: Which arguments count.
        BLOCK: Columns at a time.
    """
    route = tl.program_id(0).to(tl.int64)
    expert = _local_expert(tl.load(topk_ids + route), True, expert_map, num_experts, num_local_experts, HAS_MAP)
    if expert >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < size
        halves = 2 if GATED else 1
        row = products + route * size * halves
        gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            gate *= tl.load(factors + expert * halves)
        if HAS_BIAS:
            gate += tl.load(bias + expert.to(tl.int64) * size * halves + column, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(row + size + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_FACTORS:
                up *= tl.load(factors + expert * 2 + 1)
            if HAS_BIAS:
                up_bias = tl.load(bias + (expert.to(tl.int64) * 2 + 1) * size + column, mask=mask, other=0.0)
                up += up_bias.to(tl.float32)
            if LIMIT is not None:
                # Comparisons keep NaN, which a minimum would replace by the limit.
                gate = tl.where(gate > LIMIT, LIMIT, gate)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
            value = _activate(gate, NAME, ALPHA) * (up + BETA)
        else:
            value = _activate(gate, NAME, ALPHA)
        tl.store(intermediate + route * size + column, value.to(intermediate.dtype.element_ty), mask=mask)


@triton.jit
def sum_routes_kernel(
    rows,
    topk_weights,
    topk_ids,
    expert_map,
    out,
    size,
    num_experts,
    num_local_experts,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of a token's local routes in fp32, in order: grid (T, blocks of columns).

    Args:
        rows: [N,H].
        topk_weights: [N] fp32.
        topk_ids: [N] int32.
        expert_map: [num_experts] int32, or any pointer without a map.
        out: [T,H].
        size: H.
        num_experts, num_local_experts: Of the layer and of this rank.
        TOP_K: K.
        HAS_MAP: Whether there is a map.
        IS_WEIGHTED: Whether routing weights multiply the rows.
        BLOCK: Columns at a time.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(TOP_K):
        route = token * TOP_K + slot
        expert = _local_expert(tl.load(topk_ids + route), True, expert_map, num_experts, num_local_experts, HAS_MAP)
        value = tl.load(rows + route * size + column, mask=mask & (expert >= 0), other=0.0).to(tl.float32)
        if IS_WEIGHTED:
            value *= tl.load(topk_weights + route, mask=expert >= 0, other=0.0)
        total += value
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=mask)
