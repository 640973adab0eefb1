"""Launch arguments and tensor maps that the grouped GEMMs on Hopper share."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.hopper.config import HopperGemmConfig
from moereg.kernels.hopper.packed_config import HopperPackedConfig
from moereg.kernels.hopper.ring import BLOCK_K, PlanPointers
from moereg.kernels.launch.overlap import overlapping
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS


def product_arguments(
    plan: BlockMap,
    activation: ActivationConstant | None,
    bias: torch.Tensor | None,
    *,
    counter: torch.Tensor | None = None,
    overlap: bool,
) -> dict[str, Any]:
    """Returns a product's tiles, its epilogue and its launch options.

    Args:
        plan: tiles of rows; each product has a tile counter of its own.
        activation: of the first product; None for the second.
        bias: [E, columns of the product] canonical, contiguous, or None.
        counter: [1] int32, zero: the product's tile counter; None: the plan's.
        overlap: whether to start while the previous kernel still runs, and to let the next one start early.
    """
    routes = plan.sorted_routes if isinstance(plan, RoutePlan) else None
    if counter is None:
        counter = plan.tile_counters[1:] if activation is None else plan.tile_counters
    return {
        "bias": bias,
        "plan": PlanPointers(routes, plan.block_expert, plan.block_row, plan.block_end, plan.num_blocks, counter),
        "ACTIVATION": activation or ActivationConstant(),
        "num_warps": 4,
        **overlapping(overlap),
    }


def row_arguments(
    rows: torch.Tensor, plan: BlockMap, config: HopperGemmConfig | HopperPackedConfig, top_k: int | None
) -> dict[str, Any]:
    """Arguments for 16-bit activations: tensor maps where rows lie in order, a pointer where tokens are gathered.

    Args:
        rows: activations, without the guard rows.
        plan: tiles of rows.
        config: launch configuration, with the plan's `block_m` and `slack`.
        top_k: K where `rows` are tokens, which are gathered by route, or None.
    """
    assert plan.block_m == config.block_m and plan.slack == config.slack
    assert config.block_m + config.slack <= GUARD_ROWS
    by_token = top_k is not None

    def boxes(height: int) -> TensorDescriptor:
        return tensor_map(rows, rows.shape, rows.stride(), (height, BLOCK_K.value))

    return {
        "rows": rows if by_token else boxes(config.block_m // 2),
        "slack_rows": None if by_token or not config.slack else boxes(config.slack),
        "hidden_chunks": rows.shape[1] // 8 if by_token else None,
        "stride_chunks": rows.stride(0) // 8 if by_token else None,
    }


def tensor_map(
    base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor:
    """Returns a TMA descriptor whose boxes have the shared-memory swizzle that `wgmma` reads."""
    swizzle_bytes = min(128, box[-1] * base.element_size())
    layout = gl.NVMMASharedLayout(swizzle_bytes, 8 * base.element_size(), len(box))
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


def weight_map(weight: torch.Tensor, block_n: int, halves: int, box_columns: int | None = None) -> TensorDescriptor:
    """Returns the map of canonical weights; what a box takes past their columns and steps are zeros.

    Args:
        weight: [E, columns, depth], or [E, depth, columns] with `box_columns`; contiguous, 16-byte aligned.
        block_n: columns of a tile.
        halves: 2 where gates and ups are to come side by side: 8 gates, then their 8 ups.
        box_columns: columns of a box of BLOCK_K steps; None: rows of the weight are columns.
    """
    num_experts, num_columns, depth = weight.shape
    assert weight.is_contiguous()
    if halves == 2:
        # Axes are groups of 8 columns, halves of all experts, columns of a group, and steps.
        shape = num_columns // 16, 2 * num_experts, 8, depth
        strides = 8 * depth, num_columns // 2 * depth, depth, 1
        return tensor_map(weight, shape, strides, (block_n // 16, 2, 8, BLOCK_K.value))
    box = (1, BLOCK_K.value, box_columns) if box_columns else (1, block_n, BLOCK_K.value)
    return tensor_map(weight, tuple(weight.shape), weight.stride(), box)


def clipped_map(out: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Returns a TMA descriptor of the compact rows behind the guard that clips a box at its expert's end.

    Axis 1 ends where the expert does and begins GUARD_ROWS, the longest tile, before that end:
    [end, GUARD_ROWS - rows + i] is row i of a tile of `rows` rows that ends there.
    """
    width = out.shape[1]
    return tensor_map(out, (out.shape[0] - GUARD_ROWS + 1, GUARD_ROWS, width), (width, width, 1), box)
