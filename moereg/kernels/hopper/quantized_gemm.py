"""The two grouped GEMMs with 8-bit weights and activations for many rows an expert, on Hopper, in Triton's Gluon.

The kernel is persistent and warp-specialized like that of `kernel.py`. A producer warp fills the ring by TMA; the
consumers multiply, scale and store. Gate and up are two boxes of one tile, so that w13 and its scales stay in canonical
order. Sizes as in `kernels/quantized/products.py`; rows come in the compact order of a `RoutePlan`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import clipped_map, product_arguments, tensor_map
from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M, HopperQuantizedConfig, select_group_m
from moereg.kernels.hopper.consumer import RowWeights
from moereg.kernels.hopper.quantized_consumer import CodeOutput, CodeScales, consume_codes
from moereg.kernels.hopper.quantized_producer import (
    BLOCK_K,
    BLOCK_M,
    COLUMNS,
    OWN_ROWS,
    CodeRing,
    CodeTile,
    load_early,
    operands_of,
    produce_codes,
)
from moereg.kernels.hopper.ring import TileOrder, allocate_barrier, allocate_barriers, allocate_turns
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.codes import TRITON_DTYPES
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.plan import RoutePlan

# Registers per thread of each consumer and of the producer: all that 384 threads have.
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)

# Columns of a staged store of 16-bit numbers, 128 bytes.
_CHUNK: Final = 64


# Sizes and strides that change from call to call or from layer to layer are not specialized on their divisibility: that
# does not help, and compiles more variants.
@gluon.jit(
    do_not_specialize=[
        *("num_tiles_n", "group_m", "num_steps", "num_columns", "group_rows"),
        *("stride_row_scale", "stride_out_scale", "stride_static"),
    ]
)
def _quantized_grouped_kernel(
    out,
    out_scale,
    static_scale,
    rows,
    row_scale,
    weights,
    column_scale,
    bias,
    topk_weights,
    plan,  # PlanPointers
    num_tiles_n,
    group_m,
    num_steps,
    num_columns,
    group_rows,
    stride_row_scale,
    stride_expert_scale,
    stride_column_scale,
    stride_out_scale,
    stride_static,
    TILE: gl.constexpr,  # CodeTile
    ACTIVATION: gl.constexpr,  # ActivationConstant
    OVERLAP: gl.constexpr,
):
    """Allocates shared memory, then splits a program's warps into a producer and two consumers.

    See `consume_codes` and `produce_codes` for the arguments.
    """
    GATED: gl.constexpr = ACTIVATION.gated
    STAGES: gl.constexpr = TILE.stages
    dtype: gl.constexpr = weights.dtype
    CHUNK: gl.constexpr = [OWN_ROWS, out.block_shape[2]]
    rows_shared = gl.allocate_shared_memory(dtype, [2 * STAGES] + rows.block_shape, rows.layout)
    weights_shared = gl.allocate_shared_memory(dtype, [2 * STAGES] + weights.block_shape, weights.layout)
    staging = gl.allocate_shared_memory(
        out.dtype, [2 * TILE.buffers] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, out.dtype)
    )
    # Unused where scales do not change along a row.
    SCALE_SLOTS: gl.constexpr = STAGES if TILE.grouped else 1
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [SCALE_SLOTS, BLOCK_M], LINE)
    half_scales = gl.allocate_shared_memory(gl.float32, [2 * SCALE_SLOTS, 1], LINE)
    # One arrival announces the boxes' bytes; copies of scales add one for each producer thread.
    full, empty = allocate_barriers(STAGES, 33 if TILE.grouped else 1)
    turns = allocate_turns()
    # Placeholders for barriers that are off.
    lead = turns.taken
    early = turns.taken
    if TILE.leads:
        lead = allocate_barrier()
    if TILE.early:
        early = allocate_barrier()
    fence_async_shared()
    if TILE.early:
        load_early(weights, weights_shared, num_tiles_n, early, num_columns, GATED, STAGES)
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    ring = CodeRing(rows_shared, weights_shared, row_scales, half_scales, full, empty)
    operands = operands_of(ring, STAGES)
    row_weights = RowWeights(None, None)
    if topk_weights is not None:
        row_weights = RowWeights(plan.sorted_routes, topk_weights)
    order = TileOrder(plan, gl.load(plan.num_blocks), num_tiles_n, group_m)
    output = CodeOutput(
        out, out_scale, static_scale, staging, stride_out_scale, stride_static, bias, row_weights, num_columns
    )
    scales = CodeScales(row_scale, column_scale, group_rows, stride_expert_scale)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    # fmt: off
    gl.warp_specialize(
        [(consume_codes, (output, scales, operands, turns, lead, order, num_steps, 0, TILE, ACTIVATION)),
         (consume_codes, (output, scales, operands, turns, lead, order, num_steps, 1, TILE, ACTIVATION)),
         (produce_codes, (rows, weights, scales, ring, turns, early, order, num_steps, num_columns, stride_row_scale,
                          stride_column_scale, GATED, TILE))],
        [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    # fmt: on


def quantized_gate_up_gemm(
    out: torch.Tensor | QuantizedRows,
    rows: QuantizedRows,
    w13: QuantizedMatrices,
    plan: RoutePlan,
    epilogue: GateUpEpilogue,
    config: HopperQuantizedConfig,
    *,
    rounded: torch.dtype | None = None,
    static_scale: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row, quantized if `out` is.

    Args:
        out: [GUARD_ROWS + N, I_pad] bf16 or fp16, contiguous, 16-byte aligned: overwritten behind the guard up to the
            last valid row, with zeros from column I on. Or float8_e4m3fn values of the same shape and the scales of the
            rows behind the guard: [N, I_pad / 128], those of a group together as in `rows`, or [N, 1] static ones.
        rows: [N, H_pad] in sorted order, scales [N, H_pad / 128] fp32, those of a group together, or [N, 1].
        w13: [E, 2 * I, H_pad] gate first, or [E, I, H_pad] where not gated; scales by blocks of 128 x 128 with I a
            multiple of 128, by rows, or one for each of gate and up.
        plan: from `sort_routes` with `QUANTIZED_BLOCK_M` and no slack; its first tile counter is used up.
        epilogue: bias, in the order of w13's rows, and activation.
        rounded: dtype that numbers are rounded to before they are quantized; only where `out` is quantized.
        static_scale: [E] or [1] fp32, the static scales of `out`, or None.
        overlap: whether to start while the previous kernel still runs, and to let the next one start early.
    """
    coded: dict[str, Any] = {"rounded": rounded, "static_scale": static_scale}
    _launch(out, rows, w13, plan, config, bias=epilogue.bias, epilogue=epilogue, **coded, overlap=overlap)


def quantized_down_gemm(
    out: torch.Tensor,
    intermediate: QuantizedRows,
    w2: QuantizedMatrices,
    plan: RoutePlan,
    config: HopperQuantizedConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row.

    Args:
        intermediate: values and scales [N, ...] of rows behind the guard, as `quantized_gate_up_gemm` wrote them.
        w2: [E, H, I_pad].
        plan: as for `quantized_gate_up_gemm`; its second tile counter is used up.
        out, config, bias, topk_weights, overlap: as for `down_gemm` of `hopper/gemm.py`.
    """
    _launch(out, intermediate, w2, plan, config, bias=bias, topk_weights=topk_weights, overlap=overlap)


def _launch(
    out: torch.Tensor | QuantizedRows,
    rows: QuantizedRows,
    weight: QuantizedMatrices,
    plan: RoutePlan,
    config: HopperQuantizedConfig,
    *,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    epilogue: GateUpEpilogue | None = None,
    rounded: torch.dtype | None = None,
    static_scale: torch.Tensor | None = None,
    overlap: bool,
) -> None:
    _, num_columns, depth = weight.q.shape
    grouped = rows.group > 0
    gated = epilogue is not None and epilogue.gated
    target, out_scale = (out.q, out.scale) if isinstance(out, QuantizedRows) else (out, None)
    assert plan.block_m == QUANTIZED_BLOCK_M and plan.slack == 0
    assert depth % BLOCK_K.value == 0 and rows.q.shape[1] == depth
    assert target.is_contiguous() and weight.q.is_contiguous() and rows.q.stride(1) == 1
    assert grouped == (weight.group_columns > 0) and rows.group in (0, BLOCK_K.value)
    assert rows.scale.stride(0) == 1 and (out_scale is None or out_scale.stride(0) == 1)
    assert (out_scale is None) == (rounded is None)
    assert topk_weights is None or topk_weights.is_contiguous()
    # The kernel quantizes to no other dtype.
    assert out_scale is None or target.dtype == torch.float8_e4m3fn
    columns = num_columns // (2 if gated else 1)
    # Each half of a tile must lie within one row of scale blocks; up's half does if gate's rows end with a block.
    assert weight.group_rows in ((COLUMNS.value,) if grouped else (1, columns))
    # Groups are quantized as they are stored; a whole row only with a static scale.
    assert out_scale is None or grouped == (static_scale is None)
    assert not (grouped and gated) or columns % COLUMNS.value == 0
    num_steps = depth // BLOCK_K.value
    group_m = select_group_m(num_columns * depth)
    out_columns = _CHUNK if out_scale is None else COLUMNS.value
    given = product_arguments(plan, None if epilogue is None else epilogue.activation, bias, overlap=overlap)
    if topk_weights is None:
        given["plan"] = given["plan"]._replace(sorted_routes=None)
    launch(
        _quantized_grouped_kernel,
        (num_multiprocessors(target.device),),
        out=clipped_map(target, (1, OWN_ROWS.value, out_columns)),
        out_scale=out_scale,
        static_scale=static_scale,
        rows=tensor_map(rows.q, rows.q.shape, rows.q.stride(), (OWN_ROWS.value, BLOCK_K.value)),
        row_scale=rows.scale,
        weights=tensor_map(weight.q, weight.q.shape, weight.q.stride(), (1, COLUMNS.value, BLOCK_K.value)),
        column_scale=weight.scale,
        topk_weights=topk_weights,
        num_tiles_n=triton.cdiv(columns, COLUMNS.value * (1 if gated else 2)),
        group_m=group_m,
        num_steps=num_steps,
        num_columns=num_columns,
        group_rows=weight.group_rows,
        stride_row_scale=rows.scale.stride(1),
        stride_expert_scale=weight.scale.stride(0),
        stride_column_scale=weight.scale.stride(1),
        stride_out_scale=out_scale.stride(1) if out_scale is not None and grouped else 0,
        stride_static=int(static_scale is not None and static_scale.numel() > 1),
        TILE=CodeTile(
            stages=config.num_stages,
            # As 8-bit values, half a tile is one store of 8 KiB.
            buffers=config.num_buffers if out_scale is None else 1,
            grouped=grouped,
            by_column=weight.group_rows == 1,
            rounded=None if rounded is None else TRITON_DTYPES[rounded],
            mask_n=epilogue is not None and columns % COLUMNS.value != 0,
            # With fewer steps, the first warpgroup would arrive twice before the other has waited once.
            leads=config.leads and grouped and num_steps > config.num_stages,
            early=config.early and overlap and group_m == 1 and num_steps >= config.num_stages,
        ),
        **given,
    )
