"""The second product of a Mixture-of-Experts layer for a single token with packed weights, in Triton.

A token's K routes run side by side as slices of one product, which the program then sums with the routing weights. So
no route's output is stored, and no launch reduces them. Sizes: N = K routes, E local experts, H hidden, `I_pad` the
size of the zero-padded intermediate.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.operand import operand_of, tile_shape
from moereg.kernels.launch.overlap import overlapping, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.product import accumulate_slices
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.direct import DirectRoutes, load_local_expert

# A route takes at least one warp: 512 threads, the most that was ever compiled.
MAX_TOP_K = 16


@triton.jit
def _down_single_kernel(
    out,
    intermediate,
    matrices,  # Matrices
    bias,
    topk_weights,
    topk_ids,
    expert_map,
    num_experts,
    num_local_experts,
    depth,
    num_columns,
    stride_intermediate,
    strides,  # MatrixStrides
    stride_bias,
    TOP_K: tl.constexpr,
    PIECES: tl.constexpr,
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    OVERLAP: tl.constexpr,
):
    SLICES: tl.constexpr = FORMAT.slices
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    # Slice s is piece s % PIECES of route s // PIECES; the weight rows of all slices follow one another.
    ROWS: tl.constexpr = SLICES * BLOCK_N
    rows = tl.arange(0, ROWS)  # [ROWS]
    own_block = rows // BLOCK_N % PIECES * (BLOCK_K // 64)
    columns = tl.program_id(0) * BLOCK_N + rows % BLOCK_N
    if TILE.mask_n:
        columns = tl.minimum(columns, num_columns - 1)
    # A route without a local expert reads the first expert's weights, which are finite, and no activations.
    row_expert = load_local_expert(
        topk_ids, expert_map, rows // BLOCK_N // PIECES, TOP_K, num_experts, num_local_experts
    )
    row_expert = tl.maximum(row_expert, 0).to(tl.int64)
    group_scale = matrices.group_scale
    if group_scale is not None:
        group_scale += row_expert * strides.scale
    zero_point = matrices.zero_point
    if zero_point is not None:
        zero_point += row_expert * strides.zero_point

    slices = tl.arange(0, SLICES)  # [SLICES]
    routes = slices // PIECES
    valid = load_local_expert(topk_ids, expert_map, routes, TOP_K, num_experts, num_local_experts) >= 0
    a_first = routes.to(tl.int64) * stride_intermediate + slices % PIECES * BLOCK_K
    # [SLICES, 1, BLOCK_M]
    a_pointers = intermediate + a_first[:, None, None] + tl.zeros([1, 1, BLOCK_M], tl.int32)
    # Only the first column counts; the matrix units need the others.
    a_mask = valid[:, None, None] & (tl.arange(0, BLOCK_M) == 0)[None, None, :]
    weights = matrices.weights + row_expert * strides.expert
    wait_for_previous(OVERLAP)
    # [SLICES, BLOCK_N, BLOCK_M] fp32
    # fmt: off
    sums = accumulate_slices(a_pointers, weights, group_scale, zero_point, columns, own_block, a_mask, depth,
                             depth // 64, num_columns, FORMAT, TILE, PIECES)
    # fmt: on
    x = tl.sum(sums, 2)  # [SLICES, BLOCK_N]
    if matrices.row_scale is not None:
        x *= tl.reshape(tl.load(matrices.row_scale + row_expert * num_columns + columns), (SLICES, BLOCK_N))
    if bias is not None:
        b = tl.reshape(tl.load(bias + row_expert * stride_bias + columns).to(tl.float32), (SLICES, BLOCK_N))
        x += tl.where((slices % PIECES == 0)[:, None], b, 0.0)
    if topk_weights is not None:
        x *= tl.load(topk_weights + routes, mask=valid, other=0.0)[:, None]
    y = tl.sum(tl.where(valid[:, None], x, 0.0), 0)  # [BLOCK_N]
    out_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + out_columns, y.to(out.dtype.element_ty), mask=out_columns < num_columns)


def down_single(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: PackedMatrix,
    routes: DirectRoutes,
    config: GroupedGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes the sum over a token's routes of `(intermediate[route] @ w2[expert].T + bias) * topk_weight`.

    Arguments as for `down_gemm` of `grouped`.

    Args:
        out: [1, H], rows contiguous: overwritten; zeros where no route has a local expert.
        intermediate: [N, I_pad] bf16 or fp16, rows contiguous; those of routes without a local expert may be NaN.
        routes: of one token, K at most `MAX_TOP_K`.
        config: launch configuration with more than one slice; it gets at least one per route, at the price of stages.
    """
    topk_ids = routes.topk_ids
    top_k = topk_ids.shape[1]
    config, pieces = share_slices(config, top_k)
    operand = operand_of(w2, config)
    num_columns, depth = operand.num_columns, operand.depth
    assert config.slices > 1 and routes.single and topk_ids.is_contiguous() and top_k <= MAX_TOP_K
    assert intermediate.stride(1) == out.stride(1) == 1 and intermediate.shape[1] == depth
    launch(
        _down_single_kernel,
        (triton.cdiv(num_columns, config.block_n),),
        *(out, intermediate, operand.matrices, bias, topk_weights, topk_ids, routes.expert_map),
        *(routes.num_experts, operand.num_experts, depth, num_columns, intermediate.stride(0), operand.strides),
        0 if bias is None else bias.stride(0),
        TOP_K=top_k,
        PIECES=pieces,
        FORMAT=operand.format,
        # Rows are pieces of routes, some of which have no local expert.
        TILE=tile_shape(config, num_columns, depth, depth, config.block_k * pieces, mask_rows=True),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(overlap),
    )


def share_slices(config: GroupedGemmConfig, top_k: int) -> tuple[GroupedGemmConfig, int]:
    """Returns the configuration with at least one slice per route, in the same shared memory, and slices per route."""
    routes = triton.next_power_of_2(top_k)
    if config.slices < routes:
        stages = max(2, config.num_stages * config.slices // routes)
        config = dataclasses.replace(config, slices=routes, num_warps=routes, num_stages=stages)
    return config, config.slices // routes
