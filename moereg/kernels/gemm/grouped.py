"""The two grouped GEMMs of a Mixture-of-Experts layer, with 16- or 32-bit weights or packed ones, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate. Packed weights are
zero-padded, I to `I_pad`. Rows come in the compact order of a `RoutePlan`, in the batched format of a plain
`BlockMap`, or, for a few tokens, unsorted from `DirectRoutes`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate_pairs, canonical_rows
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.operand import (
    Matrices,
    Strides,
    TileShape,
    WeightOperand,
    in_units,
    operand_of,
    product,
    tile_shape,
)
from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.block_map import BlockMap, load_num_tall
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.tiles import claim_tile, plan_arguments, route_shape


class Gemm(NamedTuple):
    """Tensors of a product's tiles, as one kernel argument; see `gate_up_gemm` and `down_gemm`."""

    out: Any  # pointer to the result
    rows: Any  # pointer to rows of activations
    matrices: Matrices
    bias: Any  # pointer, or None
    route_factors: Any  # pointer to what multiplies each route, or None: `topk_weights` in the second product
    row_factors: Any = None  # pointer to what multiplies each row of activations in the second product, or None


@triton.jit
def gate_up_tile(
    tile,
    gemm,
    hidden_size,
    depth,
    num_columns,
    strides,
    ROUTES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes, activates and stores one `Tile` of the first product."""
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if TILE.mask_n:
        # Columns past the end repeat the last one, which costs no bandwidth and needs no mask.
        columns = tl.minimum(columns, num_columns - 1)
    weight_rows = columns
    if FORMAT.element is None:
        weight_rows = canonical_rows(columns, num_columns, ACTIVATION)
    a_rows = gemm.rows + (tile.routes // ROUTES.top_k).to(tl.int64) * in_units(strides.rows, TILE.unit)
    expert = tile.expert.to(tl.int64)
    # [BLOCK_M, BLOCK_N] fp32
    # fmt: off
    x = product(a_rows, gemm.matrices, strides.matrices, depth, num_columns, expert, weight_rows, tile.row_mask,
                hidden_size, FORMAT, TILE)
    # fmt: on
    if not ROUTES.sorted:
        # Not released earlier: the few programs of the second GEMM would crowd onto the first free multiprocessors.
        release_next(OVERLAP)

    if gemm.route_factors is not None:
        x *= tl.load(gemm.route_factors + tile.routes)[:, None]
    if gemm.bias is not None:
        biases = gemm.bias + expert * strides.bias
        if FORMAT.element is None:
            bias = tl.load(biases + weight_rows)  # [BLOCK_N]
        else:
            # Packed weights are interleaved and padded, their biases are not.
            at = canonical_rows(columns, strides.bias, ACTIVATION)
            bias = tl.load(biases + at, mask=columns < strides.bias, other=0.0)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    y = activate_pairs(x, ACTIVATION)  # [BLOCK_M, BLOCK_N / HALVES]
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    out_columns = tile.column_tile * (BLOCK_N // HALVES) + tl.arange(0, BLOCK_N // HALVES)
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (out_columns < num_columns // HALVES)[None, :]
    out_pointers = gemm.out + tile.rows.to(tl.int64)[:, None] * strides.out + out_columns[None, :]
    tl.store(out_pointers, y.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    gemm,  # Gemm
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    hidden_size,
    depth,
    num_columns,
    num_tiles_n,
    strides,  # Strides
    ROUTES: tl.constexpr,  # RouteShape
    ACTIVATION: tl.constexpr,  # ActivationConstant
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    TALL: tl.constexpr,  # TileShape of tall tiles, or None
    OVERLAP: tl.constexpr,
):
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if ROUTES.sorted:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
        used_blocks = tl.load(plan.num_blocks)
    if TALL is not None:
        first_block = load_num_tall(plan.num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            tile = claim_tile(direct, num_tokens, plan, first_block, tall_tiles_n, ROUTES, TALL, number)
            gate_up_tile(
                tile, gemm, hidden_size, depth, num_columns, strides, ROUTES, ACTIVATION, FORMAT, TALL, OVERLAP
            )
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if ROUTES.sorted:
        if number >= used_blocks * num_tiles_n:
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, ROUTES, TILE, number, first_block)
    if not ROUTES.sorted:
        if tile.expert < 0:
            return
    gate_up_tile(tile, gemm, hidden_size, depth, num_columns, strides, ROUTES, ACTIVATION, FORMAT, TILE, OVERLAP)


@triton.jit
def down_tile(tile, gemm, depth, num_columns, strides, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Computes and stores one `Tile` of the second product."""
    BLOCK_N: tl.constexpr = TILE.block_n
    columns = tile.column_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    a_rows = gemm.rows + tile.valid_rows.to(tl.int64) * in_units(strides.rows, TILE.unit)
    expert = tile.expert.to(tl.int64)
    # [BLOCK_M, BLOCK_N] fp32
    # fmt: off
    x = product(a_rows, gemm.matrices, strides.matrices, depth, num_columns, expert, loaded_columns, tile.row_mask,
                depth, FORMAT, TILE)
    # fmt: on

    if gemm.row_factors is not None:
        x *= tl.load(gemm.row_factors + tile.valid_rows)[:, None]
    if gemm.bias is not None:
        bias = tl.load(gemm.bias + tile.expert.to(tl.int64) * strides.bias + loaded_columns)  # [BLOCK_N]
        x += bias.to(tl.float32)[None, :]
    if gemm.route_factors is not None:
        x *= tl.load(gemm.route_factors + tile.routes)[:, None]
    mask = tile.row_mask[:, None]  # [BLOCK_M, 1], or with columns [BLOCK_M, columns]
    if TILE.mask_n:
        mask = mask & (columns < in_units(num_columns, TILE.unit))[None, :]
    out_rows = gemm.out + tile.routes.to(tl.int64) * in_units(strides.out, TILE.unit)
    out_pointers = out_rows[:, None] + columns[None, :]
    tl.store(out_pointers, x.to(gemm.out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    gemm,  # Gemm
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    depth,
    num_columns,
    num_tiles_n,
    strides,  # Strides
    ROUTES: tl.constexpr,  # RouteShape
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    TALL: tl.constexpr,  # TileShape of tall tiles, or None
    OVERLAP: tl.constexpr,
):
    # The tile map was complete before the previous kernel began, so read it before waiting.
    number = tl.program_id(0)
    first_block = 0
    used_blocks = None
    if ROUTES.sorted:
        used_blocks = tl.load(plan.num_blocks)
    if TALL is not None:
        first_block = load_num_tall(plan.num_blocks)
        tall_tiles_n = tl.cdiv(num_columns, TALL.block_n)
        if number < first_block * tall_tiles_n:
            wait_for_previous(OVERLAP)
            release_next(OVERLAP)
            tile = claim_tile(direct, num_tokens, plan, first_block, tall_tiles_n, ROUTES, TALL, number)
            down_tile(tile, gemm, depth, num_columns, strides, FORMAT, TALL)
            return
        number -= first_block * tall_tiles_n
        used_blocks -= first_block
    if ROUTES.sorted:
        if number >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, ROUTES, TILE, number, first_block)
    if not ROUTES.sorted:
        if tile.expert < 0:
            wait_for_previous(OVERLAP)
            return
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    down_tile(tile, gemm, depth, num_columns, strides, FORMAT, TILE)


def _tall_shape(
    config: GroupedGemmConfig, plan: BlockMap | DirectRoutes, operand: WeightOperand, depth_a: int, unit: int
) -> TileShape | None:
    """Returns the `TileShape` of the plan's tall tiles, or None if there are none."""
    tall = config.tall
    if tall is None:
        assert isinstance(plan, DirectRoutes) or plan.tall == 0
        return None
    assert isinstance(plan, BlockMap) and plan.tall == tall.block_m
    assert tall.num_warps == config.num_warps and tall.slices == config.slices == 1
    shape = tile_shape(tall, operand.num_columns, depth_a, operand.depth, tall.block_k, tall.mask_rows, unit)
    return shape._replace(stages=tall.num_stages)


def num_programs(plan: BlockMap | DirectRoutes, config: GroupedGemmConfig, num_columns: int) -> int:
    """Number of programs that suffices for any row counts."""
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    if config.tall is None:
        return int(plan.max_blocks * num_tiles_n)
    tall_tiles_n = triton.cdiv(num_columns, config.tall.block_n)
    most = plan.max_blocks * max(num_tiles_n, tall_tiles_n)
    if isinstance(plan, RoutePlan):
        # An expert has one low tile, or a tall one plus one for every `tall` further rows.
        num_routes = plan.sorted_routes.numel()
        num_experts = min(num_routes, plan.expert_offsets.numel() - 1)
        bound = num_experts * max(num_tiles_n, tall_tiles_n) + num_routes // config.tall.block_m * tall_tiles_n
        most = min(most, bound)
    return int(most)


def gate_up_gemm(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor | PackedMatrix,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    route_factors: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every sorted row.

    Where gated, column 2j of the product is gate j and column 2j + 1 is up j. Accumulation and epilogue are in fp32.

    Args:
        out: [N, I or more], dtype of the activations, rows contiguous: I columns are overwritten up to the last valid
            row; by route for `DirectRoutes`. [E * max_T, I or more] in the batched format, valid rows overwritten.
            Packed weights overwrite I_pad columns, those from I on with zeros.
        hidden_states: [T, H] bf16, fp16 or fp32, rows contiguous; read only in its H columns. [E * max_T, H] in the
            batched format, where invalid rows may be NaN.
        w13: [E, 2I, H], gate rows first, or [E, I, H] where not gated; same dtype, rows contiguous, fewer than 2**31
            elements per expert. Or packed, for 16-bit activations: interleaved.
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        top_k: K; 1 in the batched format.
        route_factors: N fp32, contiguous, by route: multiplies the product before the bias; the router's weights where
            they scale inputs. None: no factor.
        overlap: whether to start while the planning kernel, if any, still runs, and to let `down_gemm` start early.
    """
    operand = operand_of(w13, config)
    num_columns, depth, hidden_size = operand.num_columns, operand.depth, hidden_states.shape[1]
    assert hidden_size == depth or (hidden_size < depth and isinstance(w13, PackedMatrix))
    assert hidden_states.stride(1) == out.stride(1) == 1
    assert out.shape[1] >= num_columns // (2 if epilogue.gated else 1)
    _launch(
        _gate_up_kernel,
        Gemm(out, hidden_states, operand.matrices, epilogue.bias, route_factors),
        operand,
        plan,
        config,
        (hidden_size, depth),
        top_k=top_k,
        overlap=overlap,
        # Without a plan it is the layer's first kernel.
        is_behind=isinstance(plan, BlockMap),
        ACTIVATION=epilogue.activation,
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
    row_factors: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row to its route's row.

    Args:
        out: [N, H], rows contiguous: the rows of valid routes are overwritten, the others stay as they are. Its dtype
            is the caller's choice: that of the activations halves the traffic of this buffer, the layer's largest, at
            the price of one more rounding per route, comparable to that of the output. [E * max_T, H] in the batched
            format: every valid row to its own place.
        intermediate: [N, I or more] bf16, fp16 or fp32, rows contiguous, from `gate_up_gemm`.
        w2: [E, H, I], same dtype, rows contiguous, fewer than 2**31 elements per expert. Or packed.
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        bias: [E, H] contiguous, any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
        row_factors: [N] fp32 contiguous, in the order of `intermediate`: multiplies the product before the bias; None:
            no factor.
        overlap: whether to start while `gate_up_gemm` with `overlap`, launched just before, still runs.
    """
    operand = operand_of(w2, config)
    depth = operand.depth
    # Sorted routes are looked up, so only direct ones need K.
    top_k = plan.topk_ids.shape[1] if isinstance(plan, DirectRoutes) else 1
    assert intermediate.shape[1] >= depth
    assert intermediate.stride(1) == out.stride(1) == 1
    gemm = Gemm(out, intermediate, operand.matrices, bias, topk_weights, row_factors)
    given = operand, plan, config, (depth,)
    _launch(_down_kernel, gemm, *given, top_k=top_k, overlap=overlap, is_behind=True)


def _launch(
    kernel: Any,
    gemm: Gemm,
    operand: WeightOperand,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    depths: tuple[int, ...],
    *,
    top_k: int,
    overlap: bool,
    is_behind: bool,
    **constants: Any,
) -> None:
    """Launches a product; `is_behind`: another kernel of the layer runs before it.

    `depths` are the row lengths of the activations, if the kernel takes that, and of the weights.
    """
    num_columns, depth, depth_a = operand.num_columns, operand.depth, depths[0]
    strides = gemm.rows.stride(0), gemm.out.stride(0), *operand.strides
    unit = 16 if operand.format.element else math.gcd(16, *strides, *depths, num_columns)
    stride_bias = 0 if gemm.bias is None else gemm.bias.shape[1]
    assert config.block_m == plan.block_m and (gemm.bias is None or gemm.bias.is_contiguous())
    launch(
        kernel,
        (num_programs(plan, config, num_columns),),
        gemm,
        *(*plan_arguments(plan, operand.num_experts), *depths, num_columns),
        triton.cdiv(num_columns, config.block_n),
        Strides(gemm.rows.stride(0), operand.strides, stride_bias, gemm.out.stride(0)),
        ROUTES=route_shape(plan, top_k),
        FORMAT=operand.format,
        TILE=tile_shape(config, num_columns, depth_a, depth, config.block_k * config.slices, config.mask_rows, unit),
        TALL=_tall_shape(config, plan, operand, depth_a, unit),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **overlapping(overlap, is_behind),
    )
