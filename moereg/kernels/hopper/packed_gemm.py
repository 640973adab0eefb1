"""The two grouped matmuls of a Mixture-of-Experts layer with packed weights for many rows an expert, on Hopper.

As `hopper/gemm.py`, in Triton's Gluon: persistent, warp-specialized, rows of a weight on wgmma's M side. Weights stay
packed in the ring of shared memory, and each consumer restores its own into registers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import clipped_map, product_arguments, row_arguments, tensor_map
from moereg.kernels.hopper.config import select_group_m
from moereg.kernels.hopper.packed_config import STAGED_ELEMENTS, HopperPackedConfig
from moereg.kernels.hopper.packed_consumer import consume_packed
from moereg.kernels.hopper.packed_producer import produce_packed, produce_packed_by_token
from moereg.kernels.hopper.packed_restore import PackedFormat, PackedTile
from moereg.kernels.hopper.ring import BLOCK_K, TileOrder, allocate_barriers, allocate_turns
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import BLOCK, PackedMatrix
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS


class PackedRing(NamedTuple):
    """The shared memory of a ring with STAGES slots and of CONSUMERS warpgroups, each with its own part of a slot.

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
"""Least padded depth of a weight: the consumers' loop takes two steps a turn and runs at least once."""


@gluon.jit(do_not_specialize=["num_tiles_n", "group_m", "num_steps", "scale_words"])
def _packed_grouped_kernel(
    out,
    weights,
    scales,
    row_scale,
    rows,
    slack_rows,
    bias,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    tile_counter,
    num_tiles_n,
    group_m,
    num_steps,
    num_columns,
    scale_words,
    hidden_chunks,
    stride_chunks,
    BY_TOKEN: gl.constexpr,
    TOP_K: gl.constexpr,
    MASK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLACK: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ODD: gl.constexpr,
    FORMAT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Allocates shared memory, then splits a program's warps into a producer and CONSUMERS consumers.

    See `consume_packed`, `produce_packed` and `produce_packed_by_token` for the arguments. `rows` is the tensor map
    `half_rows` or, where BY_TOKEN, the pointer `hidden_states`.
    """
    dtype: gl.constexpr = out.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COLUMNS: gl.constexpr = BLOCK_N // CONSUMERS
    WORDS: gl.constexpr = weights.block_shape[0] * 32 // COLUMNS
    SPAN: gl.constexpr = FORMAT.span
    TILE: gl.constexpr = PackedTile(CONSUMERS, COLUMNS // 64, STAGES, ODD, BY_TOKEN)
    CHUNK: gl.constexpr = [out.block_shape[1], out.block_shape[2]]
    words_shared = gl.allocate_shared_memory(gl.int32, [CONSUMERS * STAGES] + weights.block_shape, weights.layout)
    rows_shared = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M // 2, BLOCK_K], operand)
    scales_shared = None
    if scales is not None:
        scales_shared = gl.allocate_shared_memory(gl.int32, [CONSUMERS * STAGES] + scales.block_shape, scales.layout)
    slack_shared = None
    if SLACK > 0:
        slack_shared = gl.allocate_shared_memory(dtype, [STAGES, SLACK, BLOCK_K], operand)
    staging = gl.allocate_shared_memory(
        dtype, [2 * CONSUMERS] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, dtype)
    )
    # One arrival announces the boxes' bytes; copies by token add one for each producer thread.
    full, empty = allocate_barriers(STAGES, 129 if BY_TOKEN else 1, CONSUMERS)
    turns = allocate_turns(CONSUMERS)
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    # fmt: off
    ring = PackedRing(weights=words_shared, scales=scales_shared, rows=rows_shared, slack_rows=slack_shared,
                      full=full, empty=empty)
    order = TileOrder(block_expert=block_expert, block_row=block_row, block_end=block_end,
                      num_blocks=gl.load(num_blocks), num_tiles_n=num_tiles_n, group_m=group_m)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consume_packed, (out, bias, row_scale, ring, turns, staging, order, num_steps, num_columns, 0,
                               BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (consume_packed, (out, bias, row_scale, ring, turns, staging, order, num_steps, num_columns, 1,
                               BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (produce_packed_by_token, (weights, scales, rows, sorted_routes, ring, turns, tile_counter, order,
                                        num_steps, num_columns, scale_words, hidden_chunks, stride_chunks,
                                        TOP_K, MASK_K, COLUMNS, CONSUMERS, WORDS, SPAN, BLOCK_M, SLACK, STAGES))
             if BY_TOKEN else
             (produce_packed, (weights, scales, rows, slack_rows, ring, turns, tile_counter, order, num_steps,
                               num_columns, scale_words, COLUMNS, CONSUMERS, WORDS, SPAN, BLOCK_M, SLACK,
                               STAGES))],
            [4, 4 if BY_TOKEN else 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.static_assert(CONSUMERS == 3 and not BY_TOKEN)
        gl.warp_specialize(
            [(consume_packed, (out, bias, row_scale, ring, turns, staging, order, num_steps, num_columns, 0,
                               BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (consume_packed, (out, bias, row_scale, ring, turns, staging, order, num_steps, num_columns, 1,
                               BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (consume_packed, (out, bias, row_scale, ring, turns, staging, order, num_steps, num_columns, 2,
                               BLOCK_M, SLACK, TILE, FORMAT, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (produce_packed, (weights, scales, rows, slack_rows, ring, turns, tile_counter, order, num_steps,
                               num_columns, scale_words, COLUMNS, CONSUMERS, WORDS, SPAN, BLOCK_M, SLACK,
                               STAGES))],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on


def packed_format(element: str, group: int, scale_dtype: str) -> PackedFormat | None:
    """How the kernels restore weights without zero points; None where they cannot. Arguments as in `PackedMatrix`."""
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
    # A box must not reach rows that the one behind it stores.
    box = (1, min(STAGED_ELEMENTS // out_columns, config.block_m), out_columns)
    # As lines of 128 bytes, so that a row's words come without conflicts of banks.
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
        scale_words=0 if weight.group_scale is None else weight.group_scale.shape[1],
        BLOCK_N=config.block_n,
        STAGES=config.num_stages(4 * words),
        CONSUMERS=config.num_consumers,
        ODD=steps % 2 == 1,
        FORMAT=fmt,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        **row_arguments(rows, weight.depth, plan, config, top_k),
        **product_arguments(plan, epilogue, bias, overlap=overlap),
    )
