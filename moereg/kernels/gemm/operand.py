"""The product of a tile of activations and a tile of 16-bit, 32-bit or packed weights, in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.loop import accumulate
from moereg.kernels.packed.product import accumulate_packed
from moereg.kernels.packed.weights import STEP, PackedMatrix, WeightFormat

_PLAIN: Final = WeightFormat()


class Matrices(NamedTuple):
    """All experts' weights within a kernel.

    Attributes:
        weights: with the next three `OperandTensors`.
        depth: K_pad, elements of a row of weights.
        num_columns: rows of an expert's weights.
        stride_expert: with the next three `OperandStrides`.
    """

    weights: tl.tensor
    group_scale: tl.tensor
    zero_point: tl.tensor
    row_scale: tl.tensor
    depth: tl.tensor
    num_columns: tl.tensor
    stride_expert: tl.tensor
    stride_column: tl.tensor
    stride_scale: tl.tensor
    stride_zero_point: tl.tensor


@triton.jit
def product(a_rows, matrices, expert, columns, row_mask, depth_a, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """[BLOCK_M, BLOCK_N] fp32: rows of activations times rows of one expert's weights, packed or not.

    Args:
        a_rows: [BLOCK_M] first elements of the rows of activations.
        matrices: `Matrices`.
        expert: local expert, int64.
        columns: [BLOCK_N] rows of the expert's weights.
        row_mask: [BLOCK_M] rows of activations that count.
        depth_a: elements of a row of activations.
        FORMAT: `WeightFormat`.
        TILE: `TileShape`.
    """
    weights = matrices.weights + expert * matrices.stride_expert
    if FORMAT.element is None:
        offs_k = tl.arange(0, TILE.block_k)
        a_pointers = a_rows[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
        # [BLOCK_K, BLOCK_N]
        b_pointers = weights + columns[None, :] * matrices.stride_column + offs_k[:, None]
        return accumulate(a_pointers, b_pointers, row_mask, depth_a, matrices.depth, TILE)
    else:
        group_scale = matrices.group_scale
        if group_scale is not None:
            group_scale += expert * matrices.stride_scale
        zero_point = matrices.zero_point
        if zero_point is not None:
            zero_point += expert * matrices.stride_zero_point
        x = accumulate_packed(
            a_rows,
            weights,
            group_scale,
            zero_point,
            columns,
            row_mask,
            depth_a,
            matrices.depth // 64,
            matrices.num_columns,
            FORMAT,
            TILE,
        )
        if matrices.row_scale is not None:
            x *= tl.load(matrices.row_scale + expert * matrices.num_columns + columns)[None, :]
        return x


class OperandTensors(NamedTuple):
    """The kernels' tensors of weights, in the order of their arguments; None where there are none.

    Attributes:
        weights: or words of packed ones.
        group_scale: of `PackedMatrix`, as the next two.
        zero_point: one per group.
        row_scale: one per row.
    """

    weights: torch.Tensor
    group_scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None


class OperandStrides(NamedTuple):
    """The kernels' strides of weights, in the order of their arguments.

    Attributes:
        expert: from one expert's weights to the next.
        column: from one row of weights to the next; 0 where they are packed.
        scale: from one expert's group scales to the next.
        zero_point: from one expert's zero points to the next.
    """

    expert: int
    column: int = 0
    scale: int = 0
    zero_point: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class WeightOperand:
    """Weights as the kernels take them.

    Attributes:
        num_experts: E.
        num_columns: rows of an expert's weights, columns of a product.
        depth: K_pad, elements of a row of weights.
        tensors: weights and their scales.
        strides: within `tensors`.
        format: what the weights are.
    """

    num_experts: int
    num_columns: int
    depth: int
    tensors: OperandTensors
    strides: OperandStrides
    format: WeightFormat


def operand_of(weights: torch.Tensor | PackedMatrix, config: GroupedGemmConfig) -> WeightOperand:
    """Weights [E, R, K_pad], rows contiguous, or packed ones, for kernels with that launch configuration."""
    if isinstance(weights, torch.Tensor):
        assert weights.stride(2) == 1
        num_experts, num_rows, depth = weights.shape
        return WeightOperand(
            num_experts,
            num_rows,
            depth,
            OperandTensors(weights),
            OperandStrides(weights.stride(0), weights.stride(1)),
            _PLAIN,
        )
    assert config.block_k % STEP == 0, f"packed weights are read by {STEP} elements, not {config.block_k}"
    assert config.slices in (1, config.num_warps), f"{config.num_warps} warps cannot share {config.slices} slices"
    tensors = OperandTensors(weights.words, weights.group_scale, weights.zero_point, weights.row_scale)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return WeightOperand(
        weights.num_experts,
        weights.num_rows,
        weights.depth,
        tensors,
        OperandStrides(
            expert=weights.words.stride(0),
            scale=0 if tensors.group_scale is None else tensors.group_scale.stride(0),
            zero_point=0 if tensors.zero_point is None else tensors.zero_point.stride(0),
        ),
        WeightFormat(weights.element, weights.group, weights.scale_dtype, config.slices, config.num_stages),
    )
