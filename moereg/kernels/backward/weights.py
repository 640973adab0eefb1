"""Gradients of weights and biases, products as deep as an expert has routes, and of routing weights, in Triton.

Sizes as in `products`, and of a weight R rows and C columns. A program adds up all rows of its expert in order, so
equal inputs give equal bits; an expert without rows gets zeros. Plans are from `sort_routes`; tiles are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.backward.config import product_tile
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.tiles import tile_of_number

_ROWS = 64
_COLUMNS = 64


@triton.jit
def _store_gradient(pointers, x, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradients_kernel(
    grad,
    left,
    right,
    sorted_routes,
    expert_offsets,
    num_rows,
    num_columns,
    num_tiles_m,
    num_tiles_n,
    stride_expert,
    stride_row,
    stride_left,
    stride_right,
    LEFT_TOP_K: tl.constexpr,
    RIGHT_TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,  # ProductTile
):
    expert = tl.program_id(0) // (num_tiles_m * num_tiles_n)
    number = tl.program_id(0) % (num_tiles_m * num_tiles_n)
    row_tile, column_tile = tile_of_number(number, num_tiles_m, num_tiles_n, TILE.group_m)
    first = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    if ACCUMULATE and first == end:
        return
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_mask, column_mask = rows < num_rows, columns < num_columns
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # Read a step ahead: to the compiler's pipeline, rows whose number is loaded in the same step are a chain of loads.
    routes = tl.load(sorted_routes + first + offs_k, mask=first + offs_k < end, other=0)  # [BLOCK_K]
    for start in range(first, end, BLOCK_K):
        places = start + offs_k  # [BLOCK_K]
        # Past the end lie the next expert's rows, or rows that may hold NaN: neither side may read them.
        known = places < end
        left_rows = routes // LEFT_TOP_K if LEFT_TOP_K > 0 else places
        right_rows = routes // RIGHT_TOP_K if RIGHT_TOP_K > 0 else places
        ahead = places + BLOCK_K
        routes = tl.load(sorted_routes + ahead, mask=ahead < end, other=0)
        left_mask = known[:, None]  # [BLOCK_K, 1], or with rows [BLOCK_K, BLOCK_M]
        if TILE.mask_m:
            left_mask = left_mask & row_mask[None, :]
        right_mask = known[:, None]  # [BLOCK_K, 1], or with columns [BLOCK_K, BLOCK_N]
        if TILE.mask_n:
            right_mask = right_mask & column_mask[None, :]
        left_pointers = left + left_rows.to(tl.int64)[:, None] * stride_left + rows[None, :]
        right_pointers = right + right_rows.to(tl.int64)[:, None] * stride_right + columns[None, :]
        a = tl.load(left_pointers, mask=left_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
        b = tl.load(right_pointers, mask=right_mask, other=0.0)  # [BLOCK_K, BLOCK_N]
        accumulator = tl.dot(tl.trans(a), b, accumulator, input_precision="ieee")
    mask = row_mask[:, None] & column_mask[None, :]  # [BLOCK_M, BLOCK_N]
    pointers = grad + expert.to(tl.int64) * stride_expert + rows[:, None] * stride_row + columns[None, :]
    _store_gradient(pointers, accumulator, mask, ACCUMULATE)


@triton.jit
def _bias_gradients_kernel(
    grad,
    rows_in,
    topk_weights,
    sorted_routes,
    expert_offsets,
    num_columns,
    stride_expert,
    stride_rows,
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = columns < num_columns
    first = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(first, end, ROWS):
        places = start + tl.arange(0, ROWS)  # [ROWS]
        known = places < end
        rows = places
        if TOP_K > 0:
            rows = tl.load(sorted_routes + places, mask=known, other=0) // TOP_K
        pointers = rows_in + rows.to(tl.int64)[:, None] * stride_rows + columns[None, :]
        x = tl.load(pointers, mask=known[:, None] & column_mask[None, :], other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
        if topk_weights is not None:
            routes = tl.load(sorted_routes + places, mask=known, other=0)
            x *= tl.load(topk_weights + routes, mask=known, other=0.0)[:, None]
        total += tl.sum(x, 0)
    _store_gradient(grad + expert.to(tl.int64) * stride_expert + columns, total, column_mask, ACCUMULATE)


@triton.jit(do_not_specialize=["num_routes"])
def _routing_gradients_kernel(
    grad,
    partials,
    grad_out,
    bias,
    route_row,
    route_expert,
    num_routes,
    num_partials,
    hidden_size,
    stride_grad_out,
    stride_bias,
    TOP_K: tl.constexpr,
    ROUTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    routes = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)  # [ROUTES]
    exists = routes < num_routes
    row = tl.load(route_row + routes, mask=exists, other=-1)
    # Routes that add nothing have no rows.
    valid = row >= 0
    total = tl.zeros([ROUTES], dtype=tl.float32)
    for number in range(0, num_partials):
        total += tl.load(partials + tl.cast(number, tl.int64) * num_routes + row, mask=valid, other=0.0)
    if bias is not None:
        expert = tl.load(route_expert + routes, mask=valid, other=0).to(tl.int64)
        tokens = (routes // TOP_K).to(tl.int64)
        for start in range(0, hidden_size, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)  # [COLUMNS]
            mask = valid[:, None] & (columns < hidden_size)[None, :]  # [ROUTES, COLUMNS]
            x = tl.load(grad_out + tokens[:, None] * stride_grad_out + columns[None, :], mask=mask, other=0.0)
            b = tl.load(bias + expert[:, None] * stride_bias + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(x.to(tl.float32) * b.to(tl.float32), 1)
    tl.store(grad + routes, total, mask=exists)


def weight_gradients(
    grad: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    top_k: int,
    gathers: str | None,
    accumulate: bool,
) -> None:
    """Writes `left[rows].T @ right[rows]` over each expert's rows, summed in fp32 in the order of the plan.

    Args:
        grad: [E, R, C], any float dtype, rows contiguous, fewer than 2**31 elements per expert: overwritten, zeros for
            an expert without rows; or added to.
        left: [N, R] bf16, fp16 or fp32, rows contiguous, or [T, R] if it `gathers`.
        right: [N, C], same dtype, rows contiguous, or [T, C] if it `gathers`.
        gathers: the side, `left` or `right`, that has a row for each token; None: neither.
        accumulate: whether to add to what `grad` holds.
    """
    num_experts, num_rows, num_columns = grad.shape
    assert (left.shape[1], right.shape[1]) == (num_rows, num_columns) and gathers in ("left", "right", None)
    assert grad.stride(2) == left.stride(1) == right.stride(1) == 1
    num_tiles_m, num_tiles_n = triton.cdiv(num_rows, config.block_m), triton.cdiv(num_columns, config.block_n)
    launch(
        _weight_gradients_kernel,
        (num_experts * num_tiles_m * num_tiles_n,),
        *(grad, left, right, plan.sorted_routes, plan.expert_offsets),
        *(num_rows, num_columns, num_tiles_m, num_tiles_n),
        *(grad.stride(0), grad.stride(1), left.stride(0), right.stride(0)),
        LEFT_TOP_K=top_k if gathers == "left" else 0,
        RIGHT_TOP_K=top_k if gathers == "right" else 0,
        ACCUMULATE=accumulate,
        TILE=product_tile(config, num_columns, num_rows=num_rows),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def bias_gradients(
    grad: torch.Tensor,
    rows: torch.Tensor,
    plan: RoutePlan,
    *,
    topk_weights: torch.Tensor | None,
    accumulate: bool,
) -> None:
    """Writes the sum of each expert's rows, in fp32 in the order of the plan.

    Args:
        grad: [E, C], any float dtype, rows contiguous: overwritten, zeros for an expert without rows; or added to.
        rows: [N, C] sorted rows; with `topk_weights` [T, C], gathered by token. Rows contiguous.
        topk_weights: [T, K] fp32, contiguous: multiplies the rows; None: no weight.
        accumulate: whether to add to what `grad` holds.
    """
    num_experts, num_columns = grad.shape
    assert rows.shape[1] == num_columns and grad.stride(1) == rows.stride(1) == 1
    assert topk_weights is None or topk_weights.is_contiguous()
    launch(
        _bias_gradients_kernel,
        (num_experts, triton.cdiv(num_columns, _COLUMNS)),
        *(grad, rows, topk_weights, plan.sorted_routes, plan.expert_offsets),
        *(num_columns, grad.stride(0), rows.stride(0)),
        TOP_K=0 if topk_weights is None else topk_weights.shape[1],
        ACCUMULATE=accumulate,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


def routing_gradients(
    grad: torch.Tensor,
    partials: torch.Tensor,
    grad_out: torch.Tensor,
    plan: RoutePlan,
    *,
    bias: torch.Tensor | None,
) -> None:
    """Writes each route's `<grad_out[token], act @ w2[expert].T + bias>`.

    Args:
        grad: [T, K] fp32, contiguous: overwritten; zero for routes that add nothing.
        partials: [sums, N] fp32, contiguous, from `down_input_gradients` or Hopper's; added in order.
        grad_out: [T, H] bf16, fp16 or fp32, rows contiguous.
        bias: of the second product, [E, H], any float dtype, rows contiguous; None: no bias.
    """
    num_routes = grad.numel()
    assert partials.shape[1] == num_routes and partials.is_contiguous() and grad.is_contiguous()
    assert grad_out.stride(1) == 1 and (bias is None or bias.stride(1) == 1)
    launch(
        _routing_gradients_kernel,
        (triton.cdiv(num_routes, _ROWS),),
        *(grad, partials, grad_out, bias, plan.route_row, plan.route_expert),
        *(num_routes, len(partials), grad_out.shape[1], grad_out.stride(0), 0 if bias is None else bias.stride(0)),
        TOP_K=grad.shape[1],
        ROUTES=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
