"""The two grouped matmuls with 8-bit weights and activations for many rows an expert, on Hopper, in Triton's Gluon.

One persistent program an SM: a producer warp fills a ring of shared memory with boxes of codes, and two warpgroups
multiply, scale and store; see `gluon_quantized_consumer`. Gate and up are two boxes of one tile, so that w13 and its
scales stay in canonical order. Sizes as in `triton_quantized_gemm`; rows come in the compact order of a `RoutePlan`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.config import (
    QUANTIZED_BLOCK_M,
    QUANTIZED_DOWN,
    QUANTIZED_GATE_UP,
    GluonQuantizedConfig,
    select_group_m,
)
from moereg.kernels.hopper.gemm import clipped_map, num_multiprocessors, tensor_map
from moereg.kernels.hopper.quantized_consumer import COLUMNS, OWN_ROWS, ROWS, STEP, consume_codes
from moereg.kernels.hopper.ring import load_box, load_chunks, locate, next_slot, reinterpret
from moereg.kernels.hopper.turns import NO_TILE, TURNS, announce_tile, next_tile
from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.sort import RoutePlan

# All registers of 384 threads: both consumers', then the producer's.
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)

_TRITON_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# Columns of a staged store of 16-bit numbers, 128 bytes.
_CHUNK: Final = 64


@gluon.jit
def _copy_scales(
    ring,
    slot,
    row_scale,
    low_scales,
    high_scales,
    row,
    length,
    k,
    stride_row_scale,
):
    """Copies a step's scales, of the rows of a tile and of either half's columns, into the ring, 4 bytes at a time.

    Boxes would have to begin at multiples of 16 bytes.
    """
    _, _, row_scales, half_scales, full, _ = ring
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = row + gl.minimum(gl.arange(0, ROWS, LINE), length - 1)
    load_chunks(row_scales.index(slot), row_scale + k * stride_row_scale + at)
    one = gl.arange(0, 1, LINE)
    load_chunks(half_scales.index(2 * slot), low_scales + k + one)
    load_chunks(half_scales.index(2 * slot + 1), high_scales + k + one)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def _produce_codes(
    rows,
    row_scale,
    weights,
    column_scale,
    ring,
    turns,
    counter,
    plan,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    group_rows,
    stride_row_scale,
    stride_expert_scale,
    stride_column_scale,
    GROUPED: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills the ring with boxes of rows in sorted order and of both halves' weights, and their scales; one warp."""
    rows_shared, weights_shared, _, _, full, empty = ring
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    turn_phase = gl.to_tensor(1)
    num_tiles = plan[3] * num_tiles_n
    tile = gl.program_id(0)
    while tile < num_tiles:
        turn, turn_phase = announce_tile(tile, turns, turn, turn_phase, 1)
        following = next_tile(counter)
        expert, tile_n, row, length = locate(tile, plan, num_tiles_n, group, ROWS, 0)
        low_row = tile_n * COLUMNS if GATED else tile_n * 2 * COLUMNS
        high_row = num_columns // 2 + low_row if GATED else low_row + COLUMNS
        if GROUPED:
            own_scales = column_scale + expert.to(gl.int64) * stride_expert_scale
            low_scales = own_scales + gl.minimum(low_row, num_columns - 1) // group_rows * stride_column_scale
            high_scales = own_scales + gl.minimum(high_row, num_columns - 1) // group_rows * stride_column_scale
        for k in range(num_k):
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, (OWN_ROWS + 2 * COLUMNS) * STEP, pred=length <= OWN_ROWS)
            mbarrier.expect(ready, (ROWS + 2 * COLUMNS) * STEP, pred=length > OWN_ROWS)
            load_box(rows, [row, k * STEP], ready, rows_shared.index(2 * slot))
            load_box(rows, [row + OWN_ROWS, k * STEP], ready, rows_shared.index(2 * slot + 1), pred=length > OWN_ROWS)
            load_box(weights, [expert, low_row, k * STEP], ready, weights_shared.index(2 * slot))
            load_box(weights, [expert, high_row, k * STEP], ready, weights_shared.index(2 * slot + 1))
            if GROUPED:
                _copy_scales(ring, slot, row_scale, low_scales, high_scales, row, length, k, stride_row_scale)
            slot, phase = next_slot(slot, phase, STAGES)
        tile = following
    announce_tile(NO_TILE, turns, turn, turn_phase, 1)


# Sizes and strides that change from call to call, or layer to layer, are not specialized: their divisibility says
# nothing, and each would be compiled anew.
@gluon.jit(
    do_not_specialize=[
        *("num_tiles_n", "group", "num_k", "num_columns", "group_rows"),
        *("stride_row_scale", "stride_out_scale"),
    ]
)
def _quantized_grouped_kernel(
    out,
    out_scale,
    rows,
    row_scale,
    weights,
    column_scale,
    bias,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    counter,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    group_rows,
    stride_row_scale,
    stride_expert_scale,
    stride_column_scale,
    stride_out_scale,
    GROUPED: gl.constexpr,
    ROUNDED: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    MASK_N: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    dtype: gl.constexpr = weights.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    CHUNK: gl.constexpr = [OWN_ROWS, out.block_shape[2]]
    rows_boxes = gl.allocate_shared_memory(dtype, [2 * STAGES] + rows.block_shape, rows.layout)
    weights_boxes = gl.allocate_shared_memory(dtype, [2 * STAGES] + weights.block_shape, weights.layout)
    staging = gl.allocate_shared_memory(
        out.dtype, [2 * BUFFERS] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, out.dtype)
    )
    # Not read where scales do not change along a row.
    DEPTH: gl.constexpr = STAGES if GROUPED else 1
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [DEPTH, ROWS], LINE)
    half_scales = gl.allocate_shared_memory(gl.float32, [2 * DEPTH, 1], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # One arrival announces the boxes' bytes; copies of scales add one for each producer thread.
        mbarrier.init(full.index(slot), count=33 if GROUPED else 1)
        mbarrier.init(empty.index(slot), count=2)
    tiles = gl.allocate_shared_memory(gl.int32, [TURNS, 1], LINE)
    announced = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(TURNS):
        mbarrier.init(announced.index(turn), count=1)
        mbarrier.init(taken.index(turn), count=2)
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    boxes = (rows_boxes, weights_boxes, row_scales, half_scales, full, empty)
    halves = reinterpret(weights_boxes, dtype, [2 * STAGES, COLUMNS, STEP], operand)
    own_row_scales = reinterpret(row_scales, gl.float32, [2 * DEPTH, OWN_ROWS], LINE)
    operands = (rows_boxes, halves, own_row_scales, half_scales, full, empty)
    plan = (block_expert, block_row, block_end, gl.load(num_blocks))
    turns = (tiles, announced, taken)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    # fmt: off
    gl.warp_specialize(
        [(consume_codes, (out, out_scale, row_scale, column_scale, bias, operands, turns, staging, plan, num_tiles_n,
                          group, num_k, num_columns, stride_expert_scale, stride_out_scale, 0, STAGES, BUFFERS,
                          GROUPED, ROUNDED, ACTIVATION, GATED, ALPHA, BETA, LIMIT, MASK_N)),
         (consume_codes, (out, out_scale, row_scale, column_scale, bias, operands, turns, staging, plan, num_tiles_n,
                          group, num_k, num_columns, stride_expert_scale, stride_out_scale, 1, STAGES, BUFFERS,
                          GROUPED, ROUNDED, ACTIVATION, GATED, ALPHA, BETA, LIMIT, MASK_N)),
         (_produce_codes, (rows, row_scale, weights, column_scale, boxes, turns, counter, plan, num_tiles_n, group,
                           num_k, num_columns, group_rows, stride_row_scale, stride_expert_scale, stride_column_scale,
                           GROUPED, GATED, STAGES))],
        [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    # fmt: on


class _Product(NamedTuple):
    """One of the two products, as `_launch` takes it.

    Attributes:
        out: as for `quantized_gate_up_gemm` and `quantized_down_gemm`.
        rows: of activations.
        weight: [E, columns of the product, reduced dimension].
        bias: [E, columns of the product], or None.
        epilogue: of the first product, or None.
        rounded: dtype that numbers are rounded to before they are quantized, or None.
        tile_counter: the product's own, of the plan.
    """

    out: torch.Tensor | QuantizedRows
    rows: QuantizedRows
    weight: QuantizedMatrices
    bias: torch.Tensor | None
    epilogue: GateUpEpilogue | None
    rounded: torch.dtype | None
    tile_counter: torch.Tensor


def quantized_gate_up_gemm(
    out: torch.Tensor | QuantizedRows,
    rows: QuantizedRows,
    w13: QuantizedMatrices,
    plan: RoutePlan,
    epilogue: GateUpEpilogue,
    config: GluonQuantizedConfig = QUANTIZED_GATE_UP,
    *,
    rounded: torch.dtype | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row, or codes of it in groups of 128 columns.

    Args:
        out: [GUARD_ROWS + N, I_pad] bf16 or fp16, contiguous, 16-byte aligned: overwritten behind the guard up to the
            last valid row, with zeros from column I on. Or codes of float8_e4m3fn of the same shape, and their scales
            [N, I_pad / 128], of rows behind the guard, those of a group together as in `rows`.
        rows: [N, H_pad] in sorted order, scales [N, H_pad / 128] fp32, those of a group together, or [N, 1].
        w13: [E, 2 * I, H_pad] gate first, or [E, I, H_pad] where not gated; scales by blocks of 128 x 128 with I a
            multiple of 128, or by rows.
        plan: from `sort_routes` with `QUANTIZED_BLOCK_M` and no slack; its first tile counter is used up.
        epilogue: bias, in the order of w13's rows, and activation.
        config: launch configuration.
        rounded: dtype that numbers are rounded to before they are quantized; given with codes.
        overlap: whether to start while the kernel in front still runs, and to let the next one start early.
    """
    product = _Product(
        out=out,
        rows=rows,
        weight=w13,
        bias=epilogue.bias,
        epilogue=epilogue,
        rounded=rounded,
        tile_counter=plan.tile_counters,
    )
    _launch(product, plan, config, overlap=overlap)


def quantized_down_gemm(
    out: torch.Tensor,
    intermediate: QuantizedRows,
    w2: QuantizedMatrices,
    plan: RoutePlan,
    config: GluonQuantizedConfig = QUANTIZED_DOWN,
    *,
    bias: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `intermediate[row] @ w2[expert].T + bias` for every sorted row, unweighted.

    Args:
        out: [GUARD_ROWS + N, H] bf16 or fp16, contiguous, 16-byte aligned, H a multiple of 8: overwritten behind the
            guard up to the last valid row, in sorted order.
        intermediate: codes and scales [N, ...] of rows behind the guard, as `quantized_gate_up_gemm` wrote them.
        w2: [E, H, I_pad].
        plan: as for `quantized_gate_up_gemm`; its second tile counter is used up.
        config: launch configuration.
        bias: [E, H] contiguous, any float dtype, or None.
        overlap: as for `quantized_gate_up_gemm`.
    """
    product = _Product(
        out=out,
        rows=intermediate,
        weight=w2,
        bias=bias,
        epilogue=None,
        rounded=None,
        tile_counter=plan.tile_counters[1:],
    )
    _launch(product, plan, config, overlap=overlap)


def _launch(product: _Product, plan: RoutePlan, config: GluonQuantizedConfig, *, overlap: bool) -> None:
    out, rows, weight, epilogue = product.out, product.rows, product.weight, product.epilogue
    _, num_columns, depth = weight.q.shape
    grouped = rows.group > 0
    gated = epilogue is not None and epilogue.gated
    target, out_scale = (out.q, out.scale) if isinstance(out, QuantizedRows) else (out, None)
    assert plan.block_m == QUANTIZED_BLOCK_M and plan.slack == 0
    assert depth % STEP.value == 0 and rows.q.shape[1] == depth
    assert target.is_contiguous() and weight.q.is_contiguous() and rows.q.stride(1) == 1
    assert grouped == (weight.group_columns > 0) and rows.group in (0, STEP.value)
    assert rows.scale.stride(0) == 1 and (out_scale is None or out_scale.stride(0) == 1)
    assert (out_scale is None) == (product.rounded is None)
    # The epilogue's codes.
    assert out_scale is None or target.dtype == torch.float8_e4m3fn
    columns = num_columns // (2 if gated else 1)
    # Each half of a tile lies within one row of blocks; of up, only where those of gate end with a block.
    assert weight.group_rows == (COLUMNS.value if grouped else 1)
    assert not (grouped and gated) or columns % COLUMNS.value == 0
    out_columns = _CHUNK if out_scale is None else COLUMNS.value
    launch(
        _quantized_grouped_kernel,
        (num_multiprocessors(target.device),),
        out=clipped_map(target, (1, OWN_ROWS.value, out_columns)),
        out_scale=out_scale,
        rows=tensor_map(rows.q, rows.q.shape, rows.q.stride(), (OWN_ROWS.value, STEP.value)),
        row_scale=rows.scale,
        weights=tensor_map(weight.q, weight.q.shape, weight.q.stride(), (1, COLUMNS.value, STEP.value)),
        column_scale=weight.scale,
        bias=product.bias,
        block_expert=plan.block_expert,
        block_row=plan.block_row,
        block_end=plan.block_end,
        num_blocks=plan.num_blocks,
        counter=product.tile_counter,
        num_tiles_n=triton.cdiv(columns, COLUMNS.value * (1 if gated else 2)),
        group=select_group_m(num_columns * depth),
        num_k=depth // STEP.value,
        num_columns=num_columns,
        group_rows=weight.group_rows,
        stride_row_scale=rows.scale.stride(1),
        stride_expert_scale=weight.scale.stride(0),
        stride_column_scale=weight.scale.stride(1),
        stride_out_scale=0 if out_scale is None else out_scale.stride(1),
        GROUPED=grouped,
        ROUNDED=None if product.rounded is None else _TRITON_DTYPES[product.rounded],
        STAGES=config.stages,
        # A half of codes takes 8 KiB too.
        BUFFERS=config.buffers if out_scale is None else 1,
        ACTIVATION=None if epilogue is None else epilogue.activation,
        GATED=gated,
        ALPHA=1.0 if epilogue is None else epilogue.alpha,
        BETA=0.0 if epilogue is None else epilogue.beta,
        LIMIT=None if epilogue is None else epilogue.limit,
        MASK_N=epilogue is not None and columns % COLUMNS.value != 0,
        OVERLAP=overlap,
        num_warps=4,
        **overlap_options(overlap),
    )
