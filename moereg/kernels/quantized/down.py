"""The second grouped matmul of a Mixture-of-Experts layer with 8-bit or 4-bit weights and activations, in Triton.

Codes are multiplied as in `gate_up`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.quantized.products import (
    codes_in_byte,
    scale_globally,
    scale_total,
    scaled_by_hardware,
    scaled_products,
    scales_of_columns,
    scales_of_rows,
)
from moereg.kernels.quantized.steps import check_steps, code_pair, code_tile, releases_late
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import claim_tile, plan_arguments


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_down_kernel(
    out,
    intermediate,
    intermediate_scale,
    intermediate_global,
    w2,
    w2_scale,
    w2_global,
    bias,
    topk_weights,
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
    group_rows,
    stride_intermediate,
    stride_intermediate_scale,
    stride_expert,
    stride_column,
    stride_scale_expert,
    stride_scale_row,
    stride_bias,
    stride_out,
    SORTED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    CODES: tl.constexpr,  # CodePair
    TILE: tl.constexpr,  # CodeTile
    RELEASE_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
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
        SINGLE=False,
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
    if not RELEASE_LATE:
        release_next(OVERLAP)
    expert, tile_n, rows, routes, row_mask = tile.expert, tile.column_tile, tile.valid_rows, tile.routes, tile.row_mask

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    offs_a = tl.arange(0, BLOCK_K // codes_in_byte(intermediate.dtype.element_ty))
    offs_b = tl.arange(0, BLOCK_K // codes_in_byte(w2.dtype.element_ty))
    MX: tl.constexpr = scaled_by_hardware(intermediate_scale.dtype.element_ty)
    expert = expert.to(tl.int64)
    # [BLOCK_M, BLOCK_K], or BLOCK_K / 2 columns where a byte holds two codes; the same goes for the weights.
    a_pointers = intermediate + rows.to(tl.int64)[:, None] * stride_intermediate + offs_a[None, :]
    a_scales = scales_of_rows(intermediate_scale, rows, stride_intermediate_scale, MX, CODES, TILE)
    # [BLOCK_K, BLOCK_N]
    b_pointers = w2 + expert * stride_expert + loaded_columns[None, :] * stride_column + offs_b[:, None]
    own_scales = w2_scale + expert * stride_scale_expert
    b_scales = scales_of_columns(
        own_scales, tile_n * BLOCK_N, loaded_columns, group_rows, stride_scale_row, MX, CODES, TILE
    )
    # [BLOCK_M, BLOCK_N]
    x, _ = scaled_products(
        a_pointers,
        b_pointers,
        b_pointers,
        a_scales,
        b_scales,
        b_scales,
        row_mask,
        depth,
        1,
        CODES,
        TILE,
    )
    if RELEASE_LATE:
        release_next(OVERLAP)
    x = scale_total(x, a_scales, b_scales, row_mask, CODES)
    x = scale_globally(x, intermediate_global, rows, row_mask, w2_global, expert)

    if bias is not None:
        x += tl.load(bias + expert * stride_bias + loaded_columns).to(tl.float32)[None, :]
    if topk_weights is not None:
        x *= tl.load(topk_weights + routes)[:, None]
    mask = row_mask[:, None]
    if TILE.mask_n:
        mask = mask & (columns < num_columns)[None, :]
    out_pointers = out + routes.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_pointers, x.to(out.dtype.element_ty), mask=mask)


def quantized_down_gemm(
    out: torch.Tensor,
    intermediate: QuantizedRows,
    w2: QuantizedMatrices,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row to its route's row.

    Args:
        out: [N, H] bf16, fp16 or fp32, rows contiguous: rows of valid routes are overwritten, the others stay.
            [E * max_T, H] in the batched format: every valid row to its own place.
        intermediate: [N, I_pad], in the order of `quantized_gate_up_gemm`.
        w2: [E, H, I_pad].
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        config: launch configuration.
        bias: [E, H], any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
        apply_router_weight_on_input: whether `topk_weights` multiplied the tokens, and do not count here.
        overlap: whether to start while the kernel that writes `intermediate`, launched just before, still runs.
    """
    num_columns, depth = w2.q.shape[1], w2.depth
    # Sorted routes are looked up, so only direct ones need K.
    top_k = plan.topk_ids.shape[1] if isinstance(plan, DirectRoutes) else 1
    assert config.block_m == plan.block_m and out.stride(1) == 1
    assert w2.global_scale is None or w2.global_scale.shape[1] == 1
    check_steps(intermediate, w2, config)
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    launch(
        _quantized_down_kernel,
        (plan.max_blocks * num_tiles_n,),
        out,
        intermediate.q,
        intermediate.scale,
        intermediate.global_scale,
        w2.q,
        w2.scale,
        w2.global_scale,
        bias,
        None if apply_router_weight_on_input else topk_weights,
        *plan_arguments(plan, w2.q.shape[0]),
        depth,
        num_columns,
        num_tiles_n,
        w2.group_rows,
        intermediate.q.stride(0),
        intermediate.scale.stride(0),
        w2.q.stride(0),
        w2.q.stride(1),
        w2.scale.stride(0),
        w2.scale.stride(1),
        0 if bias is None else bias.stride(0),
        out.stride(0),
        SORTED=isinstance(plan, BlockMap),
        TOP_K=top_k,
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
        CODES=code_pair(intermediate, w2, num_columns, config.block_n),
        TILE=code_tile(config, depth, mask_n=num_columns % config.block_n != 0),
        RELEASE_LATE=releases_late(plan),
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlap_options(overlap),
    )
