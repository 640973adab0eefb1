"""Grouped products of sorted rows and canonical weights, forward and back, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate, P columns of the
pre-activation: 2I with gates first, or I where not gated. Rows are in the compact order of a `RoutePlan`. Weights are
read where the trained parameter lies: a product along the other axis of a weight takes its strides the other way
around.

An adapter of rank R adds two thin products to each: rows become low-rank rows [N, R], scaled once there, and these are
expanded by one more step of the full product's reduction.

All functions take a plan from `sort_routes` with `config.block_m`, matrices of one dtype, bf16, fp16 or fp32, with
contiguous rows and fewer than 2**31 elements per expert, biases of any float dtype, or None, and as `low_rank` an
adapter's part, from `expanding`, or None. They overwrite results up to the last valid row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.backward.activation import slopes, slopes_of_halves
from moereg.kernels.backward.config import low_rank_block, product_tile
from moereg.kernels.gemm.activation import activate_pairs
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.tiles import claim_tile, plan_arguments, route_shape


@triton.jit
def _accumulate(a_rows, weights, columns, column_mask, stride_k, stride_n, depth, TILE: tl.constexpr):
    """[BLOCK_M, BLOCK_N] fp32: rows of activations times an expert's weights.

    `a_rows` [BLOCK_M] are the first elements of rows; memory past their `depth` elements may hold NaN. `column_mask`
    [BLOCK_N], columns within the weight, is read where tiles reach past them.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    offs_k = tl.arange(0, BLOCK_K)
    a_pointers = a_rows[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    b_pointers = weights + offs_k[:, None] * stride_k + columns[None, :] * stride_n  # [BLOCK_K, BLOCK_N]
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        known = start + offs_k < depth  # [BLOCK_K]
        a = tl.load(a_pointers, mask=known[None, :], other=0.0) if TILE.mask_k else tl.load(a_pointers)
        if TILE.mask_k and TILE.mask_n:
            b = tl.load(b_pointers, mask=known[:, None] & column_mask[None, :], other=0.0)
        elif TILE.mask_k:
            b = tl.load(b_pointers, mask=known[:, None], other=0.0)
        elif TILE.mask_n:
            b = tl.load(b_pointers, mask=column_mask[None, :], other=0.0)
        else:
            b = tl.load(b_pointers)
        # TF32 would keep 10 bits of a 32-bit operand's mantissa.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K * stride_k
    return accumulator


class LowRank(NamedTuple):
    """An adapter's part of a product, as one kernel argument."""

    rows: torch.Tensor  # [N, R] scaled low-rank rows, sorted
    matrix: torch.Tensor  # [E, R, columns] by strides: expands them
    rank: int  # R
    stride_rows: int  # between rows
    stride_expert: int  # between matrices
    stride_k: int  # between elements of the reduction, R
    stride_n: int  # between columns


@triton.jit
def _expand(x, low_rank, rows, expert, columns, column_mask, LOW_K: tl.constexpr):
    """x, the product [BLOCK_M, BLOCK_N] fp32 without adapter, and the adapter's part; LOW_K elements per step.

    `rows`: [BLOCK_M] valid rows; `expert` is int64; `column_mask` is read in any case.
    """
    a_rows = low_rank.rows + rows.to(tl.int64)[:, None] * low_rank.stride_rows
    b_columns = low_rank.matrix + expert * low_rank.stride_expert + columns[None, :] * low_rank.stride_n
    for start in range(0, low_rank.rank, LOW_K):
        offs_k = start + tl.arange(0, LOW_K)  # [LOW_K]
        known = offs_k < low_rank.rank
        a = tl.load(a_rows + offs_k[None, :], mask=known[None, :], other=0.0)  # [BLOCK_M, LOW_K]
        mask = known[:, None] & column_mask[None, :]
        b = tl.load(b_columns + offs_k[:, None] * low_rank.stride_k, mask=mask, other=0.0)  # [LOW_K, BLOCK_N]
        x = tl.dot(a, b, x, input_precision="ieee")
    return x


@triton.jit
def _halves(x, TILE: tl.constexpr):
    """The left and the right half of [BLOCK_M, BLOCK_N] columns."""
    BLOCK_M: tl.constexpr = TILE.block_m
    HALF: tl.constexpr = TILE.block_n // 2
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit
def _saving_gate_up_kernel(
    act,
    pre,
    hidden_states,
    w13,
    bias,
    low_rank,  # LowRank
    plan,  # PlanArguments
    depth,
    width,
    num_tiles_n,
    stride_act,
    stride_pre,
    stride_hidden,
    stride_expert,
    stride_row,
    stride_bias,
    ROUTES: tl.constexpr,  # RouteShape
    ACTIVATION: tl.constexpr,  # ActivationConstant
    TILE: tl.constexpr,  # ProductTile
    LOW_K: tl.constexpr,
):
    used_blocks = tl.load(plan.num_blocks)
    if tl.program_id(0) >= used_blocks * num_tiles_n:
        return
    tile = claim_tile(None, 0, plan, used_blocks, num_tiles_n, ROUTES, TILE)
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    HALF: tl.constexpr = BLOCK_N // HALVES // 2
    numbers = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # A program takes gate and up of the same columns of the activation, as neighbors.
    columns = numbers % HALVES * width + numbers // HALVES
    column_mask = numbers < HALVES * width
    a_rows = hidden_states + (tile.routes // ROUTES.top_k).to(tl.int64) * stride_hidden
    expert = tile.expert.to(tl.int64)
    # [BLOCK_M, BLOCK_N] fp32
    x = _accumulate(a_rows, w13 + expert * stride_expert, columns, column_mask, 1, stride_row, depth, TILE)
    if low_rank is not None:
        x = _expand(x, low_rank, tile.valid_rows, expert, columns, column_mask, LOW_K)
    if bias is not None:
        x += tl.load(bias + expert * stride_bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]

    # By halves of the columns, since all at once would not fit in the registers.
    both = _halves(x, TILE)  # [BLOCK_M, BLOCK_N / 2] each
    for half in tl.static_range(2):
        y = both[half]
        out_columns = (tile.column_tile * 2 + half) * HALF + tl.arange(0, HALF)  # [HALF]
        mask = tile.row_mask[:, None] & (out_columns < width)[None, :]  # [BLOCK_M, HALF]
        rows = tile.rows.to(tl.int64)[:, None]
        if pre is not None:
            pointers = pre + rows * stride_pre + out_columns[None, :]
            if ACTIVATION.gated:
                gate, up = tl.split(tl.reshape(y, (BLOCK_M, HALF, 2)))  # [BLOCK_M, HALF] each
                tl.store(pointers, gate.to(pre.dtype.element_ty), mask=mask)
                tl.store(pointers + width, up.to(pre.dtype.element_ty), mask=mask)
            else:
                tl.store(pointers, y.to(pre.dtype.element_ty), mask=mask)
        y = activate_pairs(y, ACTIVATION)  # [BLOCK_M, HALF]
        tl.store(act + rows * stride_act + out_columns[None, :], y.to(act.dtype.element_ty), mask=mask)


@triton.jit
def _rows_kernel(
    out,
    rows_in,
    weights,
    bias,
    topk_weights,
    low_rank,  # LowRank
    plan,  # PlanArguments
    depth,
    num_columns,
    num_tiles_n,
    stride_out,
    stride_rows,
    stride_expert,
    stride_k,
    stride_n,
    stride_bias,
    scaling,
    GATHERS: tl.constexpr,
    ROUTES: tl.constexpr,  # RouteShape
    TILE: tl.constexpr,  # ProductTile
    LOW_K: tl.constexpr,
):
    used_blocks = tl.load(plan.num_blocks)
    if tl.program_id(0) >= used_blocks * num_tiles_n:
        return
    tile = claim_tile(None, 0, plan, used_blocks, num_tiles_n, ROUTES, TILE)
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    column_mask = columns < num_columns
    rows = tile.routes // ROUTES.top_k if GATHERS else tile.valid_rows
    a_rows = rows_in + rows.to(tl.int64) * stride_rows
    expert = tile.expert.to(tl.int64)
    # [BLOCK_M, BLOCK_N] fp32
    x = _accumulate(a_rows, weights + expert * stride_expert, columns, column_mask, stride_k, stride_n, depth, TILE)
    if low_rank is not None:
        x = _expand(x, low_rank, tile.valid_rows, expert, columns, column_mask, LOW_K)
    if bias is not None:
        x += tl.load(bias + expert * stride_bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if topk_weights is not None:
        x *= tl.load(topk_weights + tile.routes)[:, None]
    if scaling is not None:
        x *= scaling
    mask = tile.row_mask[:, None] & column_mask[None, :]  # [BLOCK_M, BLOCK_N]
    pointers = out + tile.rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(pointers, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_routes"])
def _down_input_kernel(
    pre_grad,
    act,
    partials,
    grad_out,
    w2,
    pre,
    topk_weights,
    low_rank,  # LowRank
    plan,  # PlanArguments
    num_routes,
    depth,
    width,
    num_tiles_n,
    stride_pre_grad,
    stride_act,
    stride_grad_out,
    stride_pre,
    stride_expert,
    stride_row,
    ROUTES: tl.constexpr,  # RouteShape
    ACTIVATION: tl.constexpr,  # ActivationConstant
    TILE: tl.constexpr,  # ProductTile
    LOW_K: tl.constexpr,
):
    used_blocks = tl.load(plan.num_blocks)
    if tl.program_id(0) >= used_blocks * num_tiles_n:
        return
    tile = claim_tile(None, 0, plan, used_blocks, num_tiles_n, ROUTES, TILE)
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    column_mask = columns < width
    a_rows = grad_out + (tile.routes // ROUTES.top_k).to(tl.int64) * stride_grad_out
    # Gradient of the activation but for the routing weight, [BLOCK_M, BLOCK_N] fp32.
    expert = tile.expert.to(tl.int64)
    x = _accumulate(a_rows, w2 + expert * stride_expert, columns, column_mask, stride_row, 1, depth, TILE)
    if low_rank is not None:
        x = _expand(x, low_rank, tile.valid_rows, expert, columns, column_mask, LOW_K)

    factors = tl.load(topk_weights + tile.routes)[:, None]  # [BLOCK_M, 1]
    BLOCK_M: tl.constexpr = TILE.block_m
    HALF: tl.constexpr = BLOCK_N // 2
    partial = tl.zeros([BLOCK_M], dtype=tl.float32)
    # By halves of the columns, since all at once would not fit in the registers.
    both = _halves(x, TILE)  # [BLOCK_M, BLOCK_N / 2] each
    for half in tl.static_range(2):
        y = both[half]
        columns = (tile.column_tile * 2 + half) * HALF + tl.arange(0, HALF)  # [HALF]
        mask = tile.row_mask[:, None] & (columns < width)[None, :]  # [BLOCK_M, HALF]
        rows = tile.rows.to(tl.int64)[:, None]
        pointers = pre + rows * stride_pre + columns[None, :]
        gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION.gated:
            up = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
            by = slopes_of_halves(gate, up, ACTIVATION)  # [BLOCK_M, HALF] each
        else:
            by = slopes(gate, ACTIVATION)
        # Columns past the end have weights of zero, and rows past it are not stored.
        partial += tl.sum(y * by.value, 1)  # [BLOCK_M]
        if act is not None:
            value = (by.value * factors).to(act.dtype.element_ty)
            tl.store(act + rows * stride_act + columns[None, :], value, mask=mask)
        if pre_grad is not None:
            y *= factors
            pointers = pre_grad + rows * stride_pre_grad + columns[None, :]
            tl.store(pointers, (y * by.gate).to(pre_grad.dtype.element_ty), mask=mask)
            if ACTIVATION.gated:
                tl.store(pointers + width, (y * by.up).to(pre_grad.dtype.element_ty), mask=mask)
    if partials is not None:
        tl.store(partials + tile.column_tile.to(tl.int64) * num_routes + tile.rows, partial, mask=tile.row_mask)


def saving_gate_up(
    act: torch.Tensor,
    pre: torch.Tensor | None,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    activation: ActivationConstant,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> None:
    """Writes `pre = hidden_states[token] @ w13[expert].T + bias` and its activation for every sorted row.

    The activation is that of the product before it is rounded to be saved.

    Args:
        act: [N, I].
        pre: [N, P]; None: not saved.
        hidden_states: [T, H].
        w13: [E, P, H], gates first.
        bias: [E, P].
    """
    width, halves = act.shape[1], 2 if activation.gated else 1
    assert w13.shape[1:] == (halves * width, hidden_states.shape[1])
    assert pre is None or pre.shape[1] == halves * width
    _launch(
        _saving_gate_up_kernel,
        (act, pre, hidden_states, w13, bias, low_rank),
        plan,
        config,
        (hidden_states.shape[1], width),
        (*_row_strides(act, pre, hidden_states), w13.stride(0), w13.stride(1), _row_strides(bias)[0]),
        num_columns=halves * width,
        depth=hidden_states.shape[1],
        top_k=top_k,
        ACTIVATION=activation,
    )


def down_rows(
    out: torch.Tensor,
    act: torch.Tensor,
    w2: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    topk_weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> None:
    """Writes `(act @ w2[expert].T + bias) * topk_weight` for every sorted row.

    Args:
        out: [N, H].
        act: [N, I].
        w2: [E, H, I].
        topk_weights: [T, K] fp32, contiguous.
        bias: [E, H].
    """
    assert w2.shape[1:] == (out.shape[1], act.shape[1]) and topk_weights.is_contiguous()
    _multiply_rows((out, act, w2, bias, topk_weights, low_rank), plan, config, (w2.stride(0), 1, w2.stride(1)))


def low_rank_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    matrix: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    scaling: float,
    top_k: int | None = None,
) -> None:
    """Writes `scaling * rows @ matrix[expert]` for every sorted row: rows of an adapter's rank.

    Args:
        out: [N, R].
        rows: [N, D], sorted; or [T, D], gathered by token, with `top_k`.
        matrix: [E, D, R], any strides.
        scaling: of the adapter.
        top_k: K, where rows are those of tokens.
    """
    assert matrix.shape[1:] == (rows.shape[1], out.shape[1])
    tensors = out, rows, matrix, None, None, None
    _multiply_rows(tensors, plan, config, matrix.stride(), scaling=scaling, top_k=top_k)


def expanding(rows: torch.Tensor, matrix: torch.Tensor) -> LowRank:
    """An adapter's part of a product: rows [N, R] from `low_rank_rows`, and its matrix [E, R, columns], any strides."""
    assert matrix.shape[1] == rows.shape[1] and rows.stride(1) == 1
    return LowRank(rows, matrix, rows.shape[1], rows.stride(0), *matrix.stride())


def gate_up_input_gradients(
    out: torch.Tensor,
    pre_grad: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    low_rank: LowRank | None = None,
) -> None:
    """Writes each sorted row's gradient of its token, `pre_grad @ w13[expert]`: [N, H] from [N, P] and [E, P, H]."""
    assert w13.shape[1:] == (pre_grad.shape[1], out.shape[1])
    _multiply_rows((out, pre_grad, w13, None, None, low_rank), plan, config, (w13.stride(0), w13.stride(1), 1))


def down_input_gradients(
    pre_grad: torch.Tensor | None,
    act: torch.Tensor | None,
    partials: torch.Tensor | None,
    grad_out: torch.Tensor,
    w2: torch.Tensor,
    pre: torch.Tensor,
    topk_weights: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    activation: ActivationConstant,
    *,
    low_rank: LowRank | None = None,
) -> None:
    """Writes for every sorted row what follows from `x = grad_out[token] @ w2[expert]`; a result of None is left out.

    Args:
        pre_grad: [N, P]: gradient of the pre-activation, topk_weight * x times the activation's derivative.
        act: [N, I]: topk_weight * activation, a factor of the gradient of w2.
        partials: [tiles, N] fp32, contiguous: sums of x * activation over the columns of each of `num_partials` tiles.
        grad_out: [T, H].
        w2: [E, H, I].
        pre: [N, P], from `saving_gate_up`.
        topk_weights: [T, K] fp32, contiguous.
    """
    width, num_routes = w2.shape[2], topk_weights.numel()
    assert w2.shape[1] == grad_out.shape[1] and pre.shape[1] == (2 if activation.gated else 1) * width
    assert topk_weights.is_contiguous()
    assert partials is None or partials.shape == (num_partials(width, config.block_n), num_routes)
    _launch(
        _down_input_kernel,
        (pre_grad, act, partials, grad_out, w2, pre, topk_weights, low_rank),
        plan,
        config,
        (num_routes, grad_out.shape[1], width),
        (*_row_strides(pre_grad, act, grad_out, pre), w2.stride(0), w2.stride(1)),
        num_columns=width,
        depth=grad_out.shape[1],
        top_k=topk_weights.shape[1],
        ACTIVATION=activation,
    )


def num_partials(width: int, block_n: int) -> int:
    """Tiles over whose columns `down_input_gradients` adds up; `width` is I."""
    return -(-width // block_n)


def _row_strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    assert all(one is None or one.stride(-1) == 1 for one in tensors)
    return tuple(0 if one is None else one.stride(0) for one in tensors)


def _multiply_rows(
    tensors: tuple[Any, ...],
    plan: RoutePlan,
    config: GroupedGemmConfig,
    weight_strides: tuple[int, ...],
    *,
    scaling: float | None = None,
    top_k: int | None = None,
) -> None:
    """Multiplies sorted rows, or with `top_k` those of tokens.

    `tensors` are result, rows, weights, bias, routing weights and an adapter's part; strides are those of experts, the
    reduction and columns.
    """
    out, rows, _, bias, *_ = tensors
    sizes = rows.shape[1], out.shape[1]
    strides = (*_row_strides(out, rows), *weight_strides, *_row_strides(bias), scaling)
    # Where routes are only looked up, K is not read.
    named = {"num_columns": out.shape[1], "depth": rows.shape[1], "top_k": top_k or 1, "GATHERS": top_k is not None}
    _launch(_rows_kernel, tensors, plan, config, sizes, strides, **named)


def _launch(
    kernel: Any,
    tensors: tuple[Any, ...],
    plan: RoutePlan,
    config: GroupedGemmConfig,
    sizes: tuple[int, ...],
    strides: tuple[Any, ...],
    *,
    num_columns: int,
    depth: int,
    top_k: int,
    **constants: Any,
) -> None:
    """Launches a program for every tile that any counts need; arguments are in the order of the kernels' own.

    An adapter's part, or None, is the last of `tensors`.
    """
    assert config.block_m == plan.block_m
    low_rank = tensors[-1]
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    _, _, arguments = plan_arguments(plan, plan.expert_offsets.numel() - 1)
    launch(
        kernel,
        (plan.max_blocks * num_tiles_n,),
        *(*tensors, arguments, *sizes, num_tiles_n, *strides),
        ROUTES=route_shape(plan, top_k),
        TILE=product_tile(config, num_columns, depth=depth),
        num_warps=config.num_warps,
        LOW_K=16 if low_rank is None else low_rank_block(low_rank.rank),
        num_stages=config.num_stages,
        **constants,
    )
