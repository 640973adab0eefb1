"""The weighted sum of a token's routes, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_routes_kernel(rows, topk_weights, place, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of a token's local routes in fp32, in order: grid (T, blocks of columns).

    Args:
        rows: [N,H], sorted.
        topk_weights: [N] fp32.
        place: [N] int32; row of each route, -1 where it adds nothing; then neither row nor weight is read.
        out: [T,H].
        size: H.
        TOP_K: K.
        BLOCK: Columns at a time.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(TOP_K):
        route = token * TOP_K + slot
        row = tl.load(place + route).to(tl.int64)
        value = tl.load(rows + row * size + column, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        total += value * tl.load(topk_weights + route, mask=row >= 0, other=0.0)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=mask)
