"""The two grouped GEMMs of a Mixture-of-Experts layer with packed weights for many rows an expert, on Hopper.

As `hopper/gemm.py`, in Triton's Gluon: persistent, warp-specialized, rows of a weight on wgmma's M side. Weights stay
packed in the ring of shared memory, and each consumer dequantizes its own into registers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import clipped_map, product_arguments, row_arguments, tensor_map, tile_of
from moereg.kernels.hopper.config import select_group_m
from moereg.kernels.hopper.consumer import Output, RowWeights
from moereg.kernels.hopper.packed_config import STAGED_ELEMENTS, HopperPackedConfig
from moereg.kernels.hopper.packed_consumer import consume_packed
from moereg.kernels.hopper.packed_restore import PackedFormat
from moereg.kernels.hopper.producer import WeightBoxes, produce, produce_by_token
from moereg.kernels.hopper.ring import BLOCK_K, TileOrder, allocate_barriers, allocate_turns
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import BLOCK, PackedMatrix
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS


class PackedRing(NamedTuple):
    """Shared memory of a ring with STAGES slots, each divided among CONSUMERS warpgroups.

    Attributes:
        weights: [CONSUMERS * STAGES, lines, 32] int32, the words of a consumer's rows of one block.
        scales: [CONSUMERS * STAGES, lines, 8] int32, a word of each of these rows; None where there are none.
        rows: [2 * STAGES, BLOCK_M // 2, BLOCK_K] a slot's rows of activations, in two halves.
        slack_rows: [STAGES, SLACK, BLOCK_K] the rows behind them; None without slack.
        full: [STAGES, 1] barriers that complete when the bytes of a slot have arrived.
        empty: [STAGES, 1] barriers that complete when all consumers have multiplied them.
    """

    weights: Any
    scales: Any
    rows: Any
    slack_rows: Any
    full: Any
    empty: Any


MIN_DEPTH: Final = 3 * BLOCK
"""Smallest padded depth of a weight: the consumers' loop takes two steps per iteration and runs at least once."""


@gluon.jit(do_not_specialize=["num_tiles_n", "group_m", "num_steps", "bias_columns", "scale_words"])
def _packed_grouped_kernel(
    out,
    weights,
    scales,
    row_scale,
    rows,
    slack_rows,
    bias,
    plan,  # PlanPointers
    num_tiles_n,
    group_m,
    num_steps,
    num_columns,
    bias_columns,
    scale_words,
    hidden_chunks,
    stride_chunks,
    TILE: gl.constexpr,  # ProductTile
    FORMAT: gl.constexpr,  # PackedFormat
    ACTIVATION: gl.constexpr,  # ActivationConstant
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Allocates shared memory, then splits a program's warps into a producer and two or three consumers.

    See `consume_packed`, `produce` and `produce_by_token` for the arguments. `rows` is the tensor map `half_rows` or,
    where tokens are copied, the pointer `hidden_states`.
    """
    BY_TOKEN: gl.constexpr = TILE.top_k is not None
    dtype: gl.constexpr = out.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SLOTS: gl.constexpr = TILE.consumers * TILE.stages
    CHUNK: gl.constexpr = [out.block_shape[1], out.block_shape[2]]
    words_shared = gl.allocate_shared_memory(gl.int32, [SLOTS] + weights.block_shape, weights.layout)
    rows_shared = gl.allocate_shared_memory(dtype, [2 * TILE.stages, TILE.block_m // 2, BLOCK_K], operand)
    scales_shared = None
    if scales is not None:
        scales_shared = gl.allocate_shared_memory(gl.int32, [SLOTS] + scales.block_shape, scales.layout)
    slack_shared = None
    if TILE.slack > 0:
        slack_shared = gl.allocate_shared_memory(dtype, [TILE.stages, TILE.slack, BLOCK_K], operand)
    staging = gl.allocate_shared_memory(
        dtype, [2 * TILE.consumers] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, dtype)
    )
    # One arrival announces the boxes' bytes; copies by token add one for each producer thread.
    full, empty = allocate_barriers(TILE.stages, 129 if BY_TOKEN else 1, TILE.consumers)
    turns = allocate_turns(TILE.consumers)
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    ring = PackedRing(words_shared, scales_shared, rows_shared, slack_shared, full, empty)
    order = TileOrder(plan, gl.load(plan.num_blocks), num_tiles_n, group_m)
    output = Output(out, staging, bias, bias_columns, RowWeights(None, None), row_scale, num_columns, None)
    boxes = WeightBoxes(weights, scales, num_columns, scale_words)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    if TILE.consumers == 2:
        gl.warp_specialize(
            [
                (consume_packed, (output, ring, turns, order, num_steps, 0, TILE, FORMAT, ACTIVATION)),
                (consume_packed, (output, ring, turns, order, num_steps, 1, TILE, FORMAT, ACTIVATION)),
                (produce_by_token, (boxes, rows, ring, turns, order, num_steps, hidden_chunks, stride_chunks, TILE))
                if BY_TOKEN
                else (produce, (boxes, rows, slack_rows, ring, turns, order, num_steps, TILE)),
            ],
            [4, 4 if BY_TOKEN else 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(TILE.consumers == 3 and not BY_TOKEN)
        gl.warp_specialize(
            [
                (consume_packed, (output, ring, turns, order, num_steps, 0, TILE, FORMAT, ACTIVATION)),
                (consume_packed, (output, ring, turns, order, num_steps, 1, TILE, FORMAT, ACTIVATION)),
                (consume_packed, (output, ring, turns, order, num_steps, 2, TILE, FORMAT, ACTIVATION)),
                (produce, (boxes, rows, slack_rows, ring, turns, order, num_steps, TILE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def packed_format(element: str, group: int, scale_dtype: str) -> PackedFormat | None:
    """How the kernels dequantize weights without zero points, or None. Arguments as in `PackedMatrix`."""
    if element == "float4_e2m1fn":
        # One word of scales for a step of 64 elements, or for two.
        known = {("float8_e8m0fnu", 32): ("e8m0", 2), ("float8_e4m3fn", 16): ("e4m3", 1)}.get((scale_dtype, group))
        return None if known is None else PackedFormat(element, *known)
    if element not in ("uint4", "int8") or scale_dtype != "float32":
        return None
    if group == 0:
        return PackedFormat(element, None, 1)
    return PackedFormat(element, "float32", group // BLOCK) if group % BLOCK == 0 else None


def gate_up_packed(
    out: torch.Tensor,
    rows: torch.Tensor,
    w13: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int | None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row; arguments as `gate_up_gemm` of `hopper/gemm.py`.

    Args:
        w13: packed, of a format that `packed_format` knows, without zero points.
    """
    assert rows.shape[1] % 8 == rows.stride(0) % 8 == 0
    assert out.shape[-1] == w13.num_rows // (2 if epilogue.gated else 1)
    _launch(out, rows, w13, plan, config, bias=epilogue.bias, epilogue=epilogue, top_k=top_k, overlap=overlap)


def down_packed(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: None = None,
    overlap: bool = False,
) -> None:
    """Writes `intermediate[row] @ w2[expert].T + bias`, unweighted; arguments as `down_gemm` of `hopper/gemm.py`."""
    assert intermediate.shape[-1] == w2.depth and out.shape[-1] == w2.num_rows
    _launch(out, intermediate[GUARD_ROWS:], w2, plan, config, bias=bias, overlap=overlap)


def _launch(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    *,
    bias: torch.Tensor | None,
    epilogue: GateUpEpilogue | None = None,
    top_k: int | None = None,
    overlap: bool,
) -> None:
    fmt = packed_format(weight.element, weight.group, weight.scale_dtype)
    assert fmt is not None and weight.zero_point is None and out.dtype == torch.bfloat16
    assert weight.depth >= MIN_DEPTH and weight.num_rows % 8 == 0
    assert out.is_contiguous() and config.columns in (64, 128) and (config.num_consumers == 2 or top_k is None)
    num_columns, steps = weight.num_rows, weight.depth // BLOCK
    words = weight.words.shape[3]
    out_columns = 64 // (2 if epilogue is not None and epilogue.gated else 1)
    # A box must not reach rows that the next box stores.
    box = (1, min(STAGED_ELEMENTS // out_columns, config.block_m), out_columns)
    # Lines of 128 bytes, so that reading a row's words causes no bank conflicts.
    lines = weight.words.view(-1, 32)
    scales = None
    if weight.group_scale is not None:
        scale_lines = weight.group_scale.view(torch.int32).view(-1, 8)
        scales = tensor_map(scale_lines, scale_lines.shape, scale_lines.stride(), (config.columns // 8, 8))
    launch(
        _packed_grouped_kernel,
        (config.programs * num_multiprocessors(out.device),),
        out=clipped_map(out, box),
        weights=tensor_map(lines, lines.shape, lines.stride(), (config.columns * words // 32, 32)),
        scales=scales,
        row_scale=weight.row_scale,
        num_tiles_n=triton.cdiv(num_columns, config.block_n),
        group_m=select_group_m(num_columns * weight.depth * words // 16),
        num_steps=steps,
        num_columns=num_columns,
        bias_columns=0 if bias is None else bias.shape[1],
        scale_words=0 if weight.group_scale is None else weight.group_scale.shape[1],
        TILE=tile_of(
            *(config, rows, top_k),
            bodies=0,
            stages=config.num_stages(4 * words),
            consumers=config.num_consumers,
            span=fmt.span,
            odd=steps % 2 == 1,
        ),
        FORMAT=fmt,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        **row_arguments(rows, plan, config, top_k),
        **product_arguments(plan, epilogue, bias, overlap=overlap),
    )
