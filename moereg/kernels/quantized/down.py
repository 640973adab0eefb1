"""The second grouped matmul of a Mixture-of-Experts layer with 8-bit or 4-bit weights and activations, in Triton.

Codes are multiplied as in `gate_up`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.launch.overlap import release_next, wait_for_previous
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
from moereg.kernels.quantized.steps import launch_codes
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import claim_tile


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_down_kernel(
    out,
    inputs,  # CodeTensors
    weights,  # CodeTensors
    bias,
    topk_weights,
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    depth,
    num_columns,
    num_tiles_n,
    group_rows,
    strides,  # CodeStrides
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
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    # The tile map was complete before the previous kernel began, so read it before waiting.
    used_blocks = None
    if SORTED:
        used_blocks = tl.load(plan.num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, SORTED, False, TOP_K, BLOCK_TOP_K, TILE)
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
    offs_a = tl.arange(0, BLOCK_K // codes_in_byte(inputs.q.dtype.element_ty))
    offs_b = tl.arange(0, BLOCK_K // codes_in_byte(weights.q.dtype.element_ty))
    MX: tl.constexpr = scaled_by_hardware(inputs.scale.dtype.element_ty)
    expert = expert.to(tl.int64)
    # [BLOCK_M, BLOCK_K], or BLOCK_K / 2 columns where a byte holds two codes; the same goes for the weights.
    a_pointers = inputs.q + rows.to(tl.int64)[:, None] * strides.rows + offs_a[None, :]
    a_scales = scales_of_rows(inputs.scale, rows, strides.row_scales, MX, CODES, TILE)
    # [BLOCK_K, BLOCK_N]
    b_pointers = weights.q + expert * strides.expert + loaded_columns[None, :] * strides.column + offs_b[:, None]
    own_scales = weights.scale + expert * strides.scale_expert
    b_scales = scales_of_columns(
        own_scales, tile_n * BLOCK_N, loaded_columns, group_rows, strides.scale_row, MX, CODES, TILE
    )
    # [BLOCK_M, BLOCK_N]
    x, _ = scaled_products(
        a_pointers, b_pointers, b_pointers, a_scales, b_scales, b_scales, row_mask, depth, 1, CODES, TILE
    )
    if RELEASE_LATE:
        release_next(OVERLAP)
    x = scale_total(x, a_scales, b_scales, row_mask, CODES)
    x = scale_globally(x, inputs.global_scale, rows, row_mask, weights.global_scale, expert)

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
        overlap: whether to start while the kernel that writes `intermediate`, launched just before, still runs.
    """
    num_columns = w2.q.shape[1]
    # Sorted routes are looked up, so only direct ones need K.
    top_k = plan.topk_ids.shape[1] if isinstance(plan, DirectRoutes) else 1
    assert out.stride(1) == 1
    assert w2.global_scale is None or w2.global_scale.shape[1] == 1
    launch_codes(
        _quantized_down_kernel,
        intermediate,
        w2,
        plan,
        config,
        num_columns,
        triton.cdiv(num_columns, config.block_n),
        outputs=(out,),
        others=(bias, topk_weights),
        strides=(0 if bias is None else bias.stride(0), out.stride(0)),
        top_k=top_k,
        mask_n=num_columns % config.block_n != 0,
        overlap=overlap,
    )
