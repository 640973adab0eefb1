"""Both products of a Mixture-of-Experts layer for a single token, in Triton: two launches.

Every route streams its expert's weights once through plain multiply-adds, which at one row cost less than feeding the
matrix units. Nothing is sorted. The second product sums over a token's routes itself, so no route's output is stored.
Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate_pairs, canonical_rows
from moereg.kernels.gemm.config import GemvConfig
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.operand import in_units, reaches_past
from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.direct import DirectRoutes, load_local_expert


@triton.jit
def _gemv_gate_up_kernel(
    out,
    hidden_states,
    w13,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    num_experts,
    num_local_experts,
    hidden_size,
    num_columns,
    num_tiles,
    stride_hidden,
    stride_expert,
    stride_column,
    stride_bias,
    stride_out,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # ActivationConstant
    MASK_K: tl.constexpr,
    UNIT: tl.constexpr,  # as in TileShape
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    route = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    expert = load_local_expert(topk_ids, expert_map, route, route + 1, num_experts, num_local_experts)
    if expert < 0:
        return
    hidden_size, stride_hidden = in_units(hidden_size, UNIT), in_units(stride_hidden, UNIT)
    stride_expert, stride_column = in_units(stride_expert, UNIT), in_units(stride_column, UNIT)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = canonical_rows(tl.minimum(columns, num_columns - 1), num_columns, ACTIVATION)
    x_row = hidden_states + (route // TOP_K).to(tl.int64) * stride_hidden
    w_rows = w13 + expert.to(tl.int64) * stride_expert + loaded_columns[:, None] * stride_column  # [BLOCK_N, 1]
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, hidden_size, BLOCK_K, num_stages=NUM_STAGES):
        # Two-dimensional, so that both loads get the same layout.
        offs_k = start + tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
        if MASK_K:
            mask = offs_k < hidden_size
            x = tl.load(x_row + offs_k, mask=mask, other=0.0)
            w = tl.load(w_rows + offs_k, mask=mask, other=0.0)
        else:
            x = tl.load(x_row + offs_k)
            w = tl.load(w_rows + offs_k)
        sums += w.to(tl.float32) * x.to(tl.float32)
    # Not released earlier: the few programs of the second product would crowd onto the first free multiprocessors.
    release_next(OVERLAP)
    x = tl.sum(sums, 1)  # [BLOCK_N]
    if topk_weights is not None:
        x *= tl.load(topk_weights + route)
    if bias is not None:
        x += tl.load(bias + expert.to(tl.int64) * stride_bias + loaded_columns).to(tl.float32)
    y = activate_pairs(x[None, :], ACTIVATION)  # [1, BLOCK_N / HALVES]
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    out_columns = tile * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)[None, :]
    out_row = out + route.to(tl.int64) * stride_out
    tl.store(out_row + out_columns, y.to(out.dtype.element_ty), mask=out_columns < num_columns // HALVES)


@triton.jit
def _gemv_down_kernel(
    out,
    intermediate,
    w2,
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    num_experts,
    num_local_experts,
    depth,
    num_columns,
    num_tiles,
    stride_intermediate,
    stride_expert,
    stride_column,
    stride_bias,
    stride_out,
    TOP_K: tl.constexpr,
    MASK_K: tl.constexpr,
    UNIT: tl.constexpr,  # as in TileShape
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    depth, stride_intermediate = in_units(depth, UNIT), in_units(stride_intermediate, UNIT)
    stride_expert, stride_column = in_units(stride_expert, UNIT), in_units(stride_column, UNIT)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = tl.minimum(columns, num_columns - 1)
    wait_for_previous(OVERLAP)
    steps = tl.cdiv(depth, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # One loop over all routes, so that the pipeline does not run dry between two.
    for step in tl.range(0, TOP_K * steps, num_stages=NUM_STAGES):
        route = token * TOP_K + step // steps
        offs_k = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
        expert = load_local_expert(topk_ids, expert_map, route, route + 1, num_experts, num_local_experts)
        # A route without a local expert has no row in the intermediate, and its weight may be anything.
        valid = expert >= 0
        mask = (offs_k < depth) & valid if MASK_K else valid
        x = tl.load(intermediate + route.to(tl.int64) * stride_intermediate + offs_k, mask=mask, other=0.0)
        w_rows = w2 + tl.maximum(expert, 0).to(tl.int64) * stride_expert + loaded_columns[:, None] * stride_column
        w = tl.load(w_rows + offs_k, mask=mask, other=0.0)
        x = x.to(tl.float32)
        if topk_weights is not None:
            x *= tl.load(topk_weights + route, mask=valid, other=0.0)
        sums += w.to(tl.float32) * x
    y = tl.sum(sums, 1)  # [BLOCK_N]
    if bias is not None:
        for k in range(TOP_K):
            route = token * TOP_K + k
            expert = load_local_expert(topk_ids, expert_map, route, route + 1, num_experts, num_local_experts)
            if expert >= 0:
                b = tl.load(bias + expert.to(tl.int64) * stride_bias + loaded_columns).to(tl.float32)
                if topk_weights is not None:
                    b *= tl.load(topk_weights + route)
                y += b
    tl.store(out + token.to(tl.int64) * stride_out + columns, y.to(out.dtype.element_ty), mask=columns < num_columns)


def gate_up_gemv(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    routes: DirectRoutes,
    config: GemvConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    route_factors: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every route with a local expert.

    Arguments as for `gate_up_gemm` of `grouped`.

    Args:
        out: [N, I or more], rows contiguous, by route: rows of routes without a local expert stay as they are.
        routes: any number of tokens; its `block_m` is ignored.
        overlap: whether the next kernel, launched with overlap, may start early.
    """
    topk_ids, bias = routes.topk_ids, epilogue.bias
    num_columns = w13.shape[1]
    hidden_size = hidden_states.shape[1]
    assert topk_ids.is_contiguous() and hidden_states.stride(1) == w13.stride(2) == out.stride(1) == 1
    num_tiles = triton.cdiv(num_columns, config.block_n)
    launch(
        _gemv_gate_up_kernel,
        (topk_ids.numel() * num_tiles,),
        *(out, hidden_states, w13, bias, route_factors, topk_ids, routes.expert_map),
        *(routes.num_experts, w13.shape[0], hidden_size, num_columns, num_tiles, hidden_states.stride(0)),
        *(w13.stride(0), w13.stride(1), 0 if bias is None else bias.stride(0), out.stride(0)),
        TOP_K=top_k,
        ACTIVATION=epilogue.activation,
        MASK_K=reaches_past(hidden_size, hidden_size, config.block_k),
        UNIT=math.gcd(16, hidden_size, hidden_states.stride(0), w13.stride(0), w13.stride(1)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages,
        OVERLAP=overlap,
        num_warps=config.num_warps,
    )


def down_gemv(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    routes: DirectRoutes,
    config: GemvConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes the sum over a token's routes of `(intermediate[route] @ w2[expert].T + bias) * topk_weight`.

    Arguments as for `down_gemm` of `grouped`.

    Args:
        out: [T, H], rows contiguous: overwritten; zeros where no route has a local expert.
        routes: as for `gate_up_gemv`.
    """
    topk_ids = routes.topk_ids
    num_columns = w2.shape[1]
    depth = w2.shape[2]
    assert topk_ids.is_contiguous() and intermediate.stride(1) == w2.stride(2) == out.stride(1) == 1
    num_tiles = triton.cdiv(num_columns, config.block_n)
    launch(
        _gemv_down_kernel,
        (topk_ids.shape[0] * num_tiles,),
        *(out, intermediate, w2, bias, topk_weights, topk_ids, routes.expert_map),
        *(routes.num_experts, w2.shape[0], depth, num_columns, num_tiles, intermediate.stride(0), w2.stride(0)),
        *(w2.stride(1), 0 if bias is None else bias.stride(0), out.stride(0)),
        TOP_K=topk_ids.shape[1],
        MASK_K=reaches_past(depth, depth, config.block_k),
        UNIT=math.gcd(16, depth, intermediate.stride(0), w2.stride(0), w2.stride(1)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **overlapping(overlap),
    )
