"""The two grouped matmuls of a Mixture-of-Experts layer, with 16- or 32-bit weights or packed ones, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate, `I_pad` and `H_pad`
the sizes of the zero-padded weights. Rows come in the compact order of a `RoutePlan`; where a plain `BlockMap` says,
which is the batched format; or, of a few tokens, unsorted from `DirectRoutes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate_pairs
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.loop import tile_shape
from moereg.kernels.gemm.operand import operand_of, product
from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import claim_tile, plan_arguments
from moereg.kernels.sizes import WEIGHT_PAD


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    out,
    hidden_states,
    w13,
    group_scale,
    zero_point,
    row_scale,
    bias,
    route_factors,
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    hidden_size,
    depth,
    num_columns,
    num_tiles_n,
    stride_hidden,
    stride_expert,
    stride_column,
    stride_scale,
    stride_zero_point,
    stride_bias,
    stride_out,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # ActivationConstant
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    OVERLAP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    GROUP_M: tl.constexpr = TILE.group_m
    used_blocks = None
    if SORTED:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
        used_blocks = tl.load(num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            return
    tile = claim_tile(
        topk_ids,
        expert_map,
        num_tokens,
        num_experts,
        num_local_experts,
        sorted_routes,
        block_expert,
        block_row,
        block_end,
        used_blocks,
        num_tiles_n,
        SORTED=SORTED,
        SINGLE=SINGLE,
        TOP_K=TOP_K,
        BLOCK_TOP_K=BLOCK_TOP_K,
        BLOCK_M=BLOCK_M,
        GROUP_M=GROUP_M,
    )
    if not SORTED:
        if tile.expert < 0:
            return
    expert, tile_n, rows, routes, row_mask = tile.expert, tile.column_tile, tile.rows, tile.routes, tile.row_mask

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if TILE.mask_n:
        # Columns past the end repeat the last one, which costs no bandwidth and needs no mask.
        columns = tl.minimum(columns, num_columns - 1)
    x = product(
        hidden_states + (routes // TOP_K).to(tl.int64) * stride_hidden,
        w13,
        group_scale,
        zero_point,
        row_scale,
        expert.to(tl.int64),
        columns,
        row_mask,
        hidden_size,
        depth,
        num_columns,
        stride_expert,
        stride_column,
        stride_scale,
        stride_zero_point,
        FORMAT,
        TILE,
    )  # [BLOCK_M, BLOCK_N] fp32
    if not SORTED:
        # Not released earlier: the few programs of the second GEMM would crowd onto the multiprocessors that are free
        # first.
        release_next(OVERLAP)

    if route_factors is not None:
        x *= tl.load(route_factors + routes)[:, None]
    if bias is not None:
        x += tl.load(bias + expert.to(tl.int64) * stride_bias + columns).to(tl.float32)[None, :]
    y = activate_pairs(x, ACTIVATION)  # [BLOCK_M, BLOCK_N / HALVES]
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    out_columns = tile_n * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    mask = row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (out_columns < num_columns // HALVES)[None, :]
    out_pointers = out + rows.to(tl.int64)[:, None] * stride_out + out_columns[None, :]
    tl.store(out_pointers, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    out,
    intermediate,
    w2,
    group_scale,
    zero_point,
    row_scale,
    bias,
    topk_weights,
    row_factors,
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    depth,
    num_columns,
    num_tiles_n,
    stride_intermediate,
    stride_expert,
    stride_column,
    stride_scale,
    stride_zero_point,
    stride_bias,
    stride_out,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    OVERLAP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    GROUP_M: tl.constexpr = TILE.group_m
    # The tile map was complete before the previous kernel began, so read it before waiting.
    used_blocks = None
    if SORTED:
        used_blocks = tl.load(num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile(
        topk_ids,
        expert_map,
        num_tokens,
        num_experts,
        num_local_experts,
        sorted_routes,
        block_expert,
        block_row,
        block_end,
        used_blocks,
        num_tiles_n,
        SORTED=SORTED,
        SINGLE=SINGLE,
        TOP_K=TOP_K,
        BLOCK_TOP_K=BLOCK_TOP_K,
        BLOCK_M=BLOCK_M,
        GROUP_M=GROUP_M,
    )
    if not SORTED:
        if tile.expert < 0:
            wait_for_previous(OVERLAP)
            return
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    expert, tile_n, rows, routes, row_mask = tile.expert, tile.column_tile, tile.valid_rows, tile.routes, tile.row_mask

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    x = product(
        intermediate + rows.to(tl.int64) * stride_intermediate,
        w2,
        group_scale,
        zero_point,
        row_scale,
        expert.to(tl.int64),
        loaded_columns,
        row_mask,
        depth,
        depth,
        num_columns,
        stride_expert,
        stride_column,
        stride_scale,
        stride_zero_point,
        FORMAT,
        TILE,
    )  # [BLOCK_M, BLOCK_N] fp32

    if row_factors is not None:
        x *= tl.load(row_factors + rows)[:, None]
    if bias is not None:
        x += tl.load(bias + expert.to(tl.int64) * stride_bias + loaded_columns).to(tl.float32)[None, :]
    if topk_weights is not None:
        x *= tl.load(topk_weights + routes)[:, None]
    mask = row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (columns < num_columns)[None, :]
    out_pointers = out + routes.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_pointers, x.to(out.dtype.element_ty), mask=mask)


def gate_up_gemm(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor | PackedMatrix,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    route_factors: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every sorted row.

    Where gated, column 2j of the product is gate j and column 2j + 1 is up j. Accumulation and epilogue are in fp32.

    Args:
        out: [N, I_pad], dtype of the activations, rows contiguous: overwritten up to the last valid row. Columns
            from I on become zeros, since their weights and biases are. [N, I_pad] by route for `DirectRoutes`;
            [E * max_T, I_pad] in the batched format, valid rows overwritten.
        hidden_states: [T, H] bf16, fp16 or fp32, rows contiguous; read only in its H columns. [E * max_T, H] in the
            batched format, where rows that are not valid may be NaN.
        w13: [E, 2 * I_pad, H_pad] interleaved, or [E, I_pad, H_pad] where not gated; same dtype, zero padded, H_pad a
            multiple of 64, fewer than 2**31 elements per expert. Or packed, for 16-bit activations.
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        config: launch configuration.
        epilogue: bias and activation.
        top_k: K; 1 in the batched format.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
        apply_router_weight_on_input: whether `topk_weights` multiply this product, before the bias, and not the second.
        route_factors: [N] fp32 contiguous, by route: multiplies the product before the bias, where the router's weights
            do not; None: no factor.
        overlap: whether to start while the planning kernel, if any, still runs, and to let `down_gemm` start early.
    """
    operand = operand_of(w13, config)
    num_columns, depth, hidden_size = operand.num_columns, operand.depth, hidden_states.shape[1]
    assert config.block_m == plan.block_m and depth % WEIGHT_PAD == 0 and hidden_size <= depth
    assert hidden_states.stride(1) == out.stride(1) == 1
    assert out.shape[1] == num_columns // (2 if epilogue.gated else 1)
    if apply_router_weight_on_input:
        assert route_factors is None
        route_factors = topk_weights
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    launch(
        _gate_up_kernel,
        (plan.max_blocks * num_tiles_n,),
        out,
        hidden_states,
        *operand.tensors,
        epilogue.bias,
        route_factors,
        *plan_arguments(plan, operand.num_experts),
        hidden_size,
        depth,
        num_columns,
        num_tiles_n,
        hidden_states.stride(0),
        *operand.strides,
        0 if epilogue.bias is None else epilogue.bias.stride(0),
        out.stride(0),
        SORTED=isinstance(plan, BlockMap),
        SINGLE=isinstance(plan, DirectRoutes) and plan.single,
        TOP_K=top_k,
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
        ACTIVATION=epilogue.constant,
        FORMAT=operand.format,
        TILE=tile_shape(config, num_columns, hidden_size, depth, config.block_k * config.slices, config.mask_rows),
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlap_options(overlap and isinstance(plan, BlockMap)),
    )


def down_gemm(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: torch.Tensor | PackedMatrix,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    row_factors: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row to its route's row.

    Args:
        out: [N, H], rows contiguous: the rows of valid routes are overwritten, the others stay as they are. Its dtype
            is the caller's choice: that of the activations halves the traffic of this buffer, the largest of the
            layer, at the price of one more rounding per route, of the size of the output's own. [E * max_T, H] in the
            batched format: every valid row to its own place.
        intermediate: [N, I_pad] bf16, fp16 or fp32, rows contiguous, from `gate_up_gemm`.
        w2: [E, H, I_pad], same dtype, zero padded, I_pad a multiple of 64, fewer than 2**31 elements per expert. Or
            packed.
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        config: launch configuration.
        bias: [E, H], any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
        apply_router_weight_on_input: whether `topk_weights` multiplied the first product, and do not count here.
        row_factors: [N] fp32 contiguous, in the order of `intermediate`: multiplies the product before the bias; None:
            no factor.
        overlap: whether to start while `gate_up_gemm` with `overlap`, launched just before, still runs.
    """
    operand = operand_of(w2, config)
    num_columns, depth = operand.num_columns, operand.depth
    # Sorted routes are looked up, so only direct ones need K.
    top_k = plan.topk_ids.shape[1] if isinstance(plan, DirectRoutes) else 1
    assert config.block_m == plan.block_m and depth % WEIGHT_PAD == 0 and intermediate.shape[1] == depth
    assert intermediate.stride(1) == out.stride(1) == 1
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    launch(
        _down_kernel,
        (plan.max_blocks * num_tiles_n,),
        out,
        intermediate,
        *operand.tensors,
        bias,
        None if apply_router_weight_on_input else topk_weights,
        row_factors,
        *plan_arguments(plan, operand.num_experts),
        depth,
        num_columns,
        num_tiles_n,
        intermediate.stride(0),
        *operand.strides,
        0 if bias is None else bias.stride(0),
        out.stride(0),
        SORTED=isinstance(plan, BlockMap),
        SINGLE=isinstance(plan, DirectRoutes) and plan.single,
        TOP_K=top_k,
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
        FORMAT=operand.format,
        TILE=tile_shape(config, num_columns, depth, depth, config.block_k * config.slices, config.mask_rows),
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlap_options(overlap),
    )
