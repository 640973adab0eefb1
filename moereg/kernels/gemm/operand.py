"""The product of a tile of activations and a tile of 16-bit, 32-bit or packed weights, in Triton."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.packed.product import accumulate_packed
from moereg.kernels.packed.weights import STEP, PackedMatrix, WeightFormat


class TileShape(NamedTuple):
    """Compile-time constant: a product's tile and which of its loads need a mask."""

    block_m: int  # rows; this and the next three as in `GroupedGemmConfig`
    block_n: int  # columns
    block_k: int  # elements of the reduction per step
    group_m: int  # row tiles that share a column tile
    mask_rows: bool  # whether loads of invalid rows are masked
    mask_a: bool  # whether steps over the weights' reduction reach past a row of activations; see `reaches_past`
    mask_b: bool  # whether they reach past a row of weights
    mask_n: bool  # whether tiles reach past the last column
    unit: int = 16  # number that divides strides and depths; see `in_units`
    stages: int | None = None  # depth of the loop's pipeline; None: the launch's `num_stages`


@triton.jit
def in_units(size, UNIT: tl.constexpr):
    """A stride or depth as a multiple of UNIT, so that rows 8 elements of 16 bits apart are read 16 bytes at a time.

    Triton finds out by itself which arguments are multiples of 16.
    """
    if UNIT < 16:
        return size // UNIT * UNIT
    else:
        return size


@triton.jit
def accumulate(a_pointers, b_pointers, row_mask, depth_a, depth, TILE: tl.constexpr):
    """[BLOCK_M, BLOCK_N] fp32 product of rows of activations and rows of weights.

    `a_pointers` [BLOCK_M, BLOCK_K] and `b_pointers` [BLOCK_K, BLOCK_N] are their first elements. Past the `depth_a`
    elements of a row of activations memory may hold NaN, past the `depth` of a row of weights lies the next row or the
    end of the tensor. `row_mask`: [BLOCK_M] valid rows.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=TILE.stages):
        if TILE.mask_rows and TILE.mask_a:
            a = tl.load(a_pointers, mask=row_mask[:, None] & (start + offs_k < depth_a)[None, :], other=0.0)
        elif TILE.mask_rows:
            a = tl.load(a_pointers, mask=row_mask[:, None], other=0.0)
        elif TILE.mask_a:
            a = tl.load(a_pointers, mask=(start + offs_k < depth_a)[None, :], other=0.0)
        else:
            a = tl.load(a_pointers)
        if TILE.mask_b:
            b = tl.load(b_pointers, mask=(start + offs_k < depth)[:, None], other=0.0)
        else:
            b = tl.load(b_pointers)
        # a [BLOCK_M, BLOCK_K], b [BLOCK_K, BLOCK_N]. TF32 would keep 10 bits of a 32-bit operand's mantissa.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K
    return accumulator


def reaches_past(size: int, depth: int, step: int) -> bool:
    """Whether a loop over `depth` elements by `step` reads past the first `size` elements of a row.

    Packed weights are padded with zeros, which does not help: memory past a row of activations may hold NaN.
    """
    return -(-depth // step) * step > size


def tile_shape(
    config: GroupedGemmConfig, num_columns: int, depth_a: int, depth: int, step: int, mask_rows: bool, unit: int = 16
) -> TileShape:
    """Returns the `TileShape` of a launch whose loop takes `step` elements of a row at a time."""
    return TileShape(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        group_m=config.group_m,
        mask_rows=mask_rows,
        mask_a=reaches_past(depth_a, depth, step),
        mask_b=reaches_past(depth, depth, step),
        mask_n=num_columns % config.block_n != 0,
        unit=unit,
    )


_PLAIN: Final = WeightFormat()


class Matrices(NamedTuple):
    """All experts' weights as one kernel argument; tensors that a format lacks are None."""

    weights: Any  # weights, or the words of packed ones
    group_scale: Any = None  # one per group; this and the next two as in `PackedMatrix`
    zero_point: Any = None  # one per group
    row_scale: Any = None  # one per row


class MatrixStrides(NamedTuple):
    """Strides of `Matrices`."""

    expert: Any  # from one expert's weights to the next
    column: Any = 0  # from one row of weights to the next; 0 where they are packed
    scale: Any = 0  # from one expert's group scales to the next
    zero_point: Any = 0  # from one expert's zero points to the next


class Strides(NamedTuple):
    """Strides of a product's tensors, as one kernel argument."""

    rows: Any  # from one row of activations to the next
    matrices: Any  # `MatrixStrides`
    bias: Any  # from one expert's bias to the next, which are contiguous: rows of the weights without padding
    out: Any  # from one row of the result to the next


@triton.jit
def product(
    a_rows,  # [BLOCK_M] first elements of the rows of activations
    matrices,  # `Matrices`
    strides,  # `MatrixStrides`
    depth,
    num_columns,
    expert,  # local expert, int64
    columns,  # [BLOCK_N] rows of the expert's weights
    row_mask,
    depth_a,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32: rows of activations times rows of one expert's weights, packed or not.

    Arguments as for `accumulate` and `accumulate_packed`.
    """
    weights = matrices.weights + expert * in_units(strides.expert, TILE.unit)
    if FORMAT.element is None:
        depth_a = in_units(depth_a, TILE.unit)
        depth = in_units(depth, TILE.unit)
        offs_k = tl.arange(0, TILE.block_k)
        a_pointers = a_rows[:, None] + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
        # [BLOCK_K, BLOCK_N]
        b_pointers = weights + columns[None, :] * in_units(strides.column, TILE.unit) + offs_k[:, None]
        return accumulate(a_pointers, b_pointers, row_mask, depth_a, depth, TILE)
    else:
        group_scale = matrices.group_scale
        if group_scale is not None:
            group_scale += expert * strides.scale
        zero_point = matrices.zero_point
        if zero_point is not None:
            zero_point += expert * strides.zero_point
        x = accumulate_packed(
            a_rows, weights, group_scale, zero_point, columns, row_mask, depth_a, depth // 64, num_columns, FORMAT, TILE
        )
        if matrices.row_scale is not None:
            x *= tl.load(matrices.row_scale + expert * num_columns + columns)[None, :]
        return x


class WeightOperand(NamedTuple):
    """Weights as the kernels take them."""

    num_experts: int  # E
    num_columns: int  # rows of an expert's weights, columns of a product
    depth: int  # elements of a row of weights, those of packed ones padded
    matrices: Matrices  # weights and their scales
    strides: MatrixStrides  # of `matrices`
    format: WeightFormat  # element type, scales and slices


def operand_of(weights: torch.Tensor | PackedMatrix, config: GroupedGemmConfig) -> WeightOperand:
    """Wraps weights [E, R, K], rows contiguous, or packed ones, for kernels launched with `config`."""
    if isinstance(weights, torch.Tensor):
        assert weights.stride(2) == 1
        num_experts, num_rows, depth = weights.shape
        strides = MatrixStrides(weights.stride(0), weights.stride(1))
        return WeightOperand(num_experts, num_rows, depth, Matrices(weights), strides, _PLAIN)
    assert config.block_k % STEP == 0, f"packed weights are read by {STEP} elements, not {config.block_k}"
    assert config.slices in (1, config.num_warps), f"{config.num_warps} warps cannot share {config.slices} slices"
    matrices = Matrices(weights.words, weights.group_scale, weights.zero_point, weights.row_scale)
    assert all(tensor is None or tensor.is_contiguous() for tensor in matrices)
    words, scale, zero_point = (0 if tensor is None else tensor.stride(0) for tensor in matrices[:3])
    constant = WeightFormat(
        weights.element, weights.group, weights.scale_dtype, config.slices, config.num_stages, config.chained
    )
    sizes = weights.num_experts, weights.num_rows, weights.depth
    return WeightOperand(*sizes, matrices, MatrixStrides(words, 0, scale, zero_point), constant)
