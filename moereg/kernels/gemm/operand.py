"""The product of a tile of activations and a tile of weights, whatever these are kept as, in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.loop import accumulate
from moereg.kernels.packed.product import accumulate_packed
from moereg.kernels.packed.weights import STEP, PackedMatrix


@triton.jit
def product(
    a_rows,
    weights,
    group_scale,
    zero_point,
    row_scale,
    expert,
    columns,
    row_mask,
    depth_a,
    depth,
    num_columns,
    stride_expert,
    stride_column,
    stride_scale,
    stride_zero_point,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_A: tl.constexpr,
    MASK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32: rows of activations times rows of one expert's weights, whatever these are kept as."""
    if ELEMENT is None:
        offs_k = tl.arange(0, BLOCK_K)
        a_pointers = a_rows[:, None] + offs_k[None, :]
        b_pointers = weights + expert * stride_expert + columns[None, :] * stride_column + offs_k[:, None]
        return accumulate(
            a_pointers, b_pointers, row_mask, depth_a, depth, MASK_ROWS, MASK_A, MASK_B, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        if group_scale is not None:
            group_scale += expert * stride_scale
        if zero_point is not None:
            zero_point += expert * stride_zero_point
        x = accumulate_packed(
            a_rows,
            weights + expert * stride_expert,
            group_scale,
            zero_point,
            columns,
            row_mask,
            depth_a,
            depth // 64,
            num_columns,
            ELEMENT,
            GROUP,
            SCALE,
            MASK_ROWS,
            MASK_A,
            MASK_B,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SLICES,
            STAGES,
        )
        if row_scale is not None:
            x *= tl.load(row_scale + expert * num_columns + columns)[None, :]
        return x


@dataclass(frozen=True, slots=True, eq=False)
class WeightOperand:
    """What the kernels are told of weights.

    Attributes:
        num_experts: E.
        num_columns: rows of an expert's weights, columns of a product.
        depth: reduced elements, padded.
        tensors: weights, group scales, zero points and scales of rows; None where there are none.
        strides: from one expert, and one row, of the weights to the next; from one expert to the next of group scales
            and of zero points.
        constants: the kernels' constants that say what the weights are.
    """

    num_experts: int
    num_columns: int
    depth: int
    tensors: tuple[torch.Tensor | None, ...]
    strides: tuple[int, ...]
    constants: dict[str, Any]


def operand_of(weights: torch.Tensor | PackedMatrix, config: GroupedGemmConfig) -> WeightOperand:
    """Weights [E, R, K_pad], rows contiguous, or packed ones, for kernels with that launch configuration."""
    if isinstance(weights, torch.Tensor):
        assert weights.stride(2) == 1
        num_experts, num_rows, depth = weights.shape
        return WeightOperand(
            num_experts,
            num_rows,
            depth,
            (weights, None, None, None),
            (weights.stride(0), weights.stride(1), 0, 0),
            {"ELEMENT": None, "GROUP": 0, "SCALE": None, "SLICES": 1, "STAGES": None},
        )
    assert config.block_k % STEP == 0, f"packed weights are read by {STEP} elements, not {config.block_k}"
    assert config.slices in (1, config.num_warps), f"{config.num_warps} warps cannot share {config.slices} slices"
    tensors = (weights.words, weights.group_scale, weights.zero_point, weights.row_scale)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    scale, zero_point = (0 if tensor is None else tensor.stride(0) for tensor in tensors[1:3])
    return WeightOperand(
        weights.num_experts,
        weights.num_rows,
        weights.depth,
        tensors,
        (weights.words.stride(0), 0, scale, zero_point),
        {
            "ELEMENT": weights.element,
            "GROUP": weights.group,
            "SCALE": weights.scale_dtype,
            "SLICES": config.slices,
            "STAGES": config.num_stages,
        },
    )
