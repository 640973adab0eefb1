"""Quantizes the rows of a `BlockMap` without moving them, in Triton; see `rows`.

This is the batched format: each of E local experts has room for max_T rows, R = E * max_T rows of K columns, `K_pad`
columns of the codes, in code `depth`, G groups of a row. Rows that no tile covers are neither read nor written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.codes import (
    amax_bits,
    divide,
    encode,
    load_rows,
    quantize_e2m1,
    quantize_tile,
    scale_of_bits,
)
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.sizes import AMAX_PROGRAMS

# Programs that share the rows. Every expert has room for all tokens, so most rows are usually not in use, and most
# programs of one row each would end at once.
_ROW_PROGRAMS: Final = 4096


@triton.jit
def _row_in_tiles(slot, tiles, BLOCK_M: tl.constexpr):
    """The row at one position of the tiles laid end to end, its expert, and whether it is in use."""
    block = slot // BLOCK_M
    row = tl.load(tiles.block_row + block) + slot % BLOCK_M
    return row, tl.load(tiles.block_expert + block), row < tl.load(tiles.block_end + block)


@triton.jit
def _amax_batched_kernel(
    amax,
    x,
    tiles,  # Tiles
    size,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.int32)  # bits, which are ordered as magnitudes are
    for slot in range(tl.program_id(0), tl.load(tiles.num_blocks) * BLOCK_M, tl.num_programs(0)):
        row, _, counts = _row_in_tiles(slot, tiles, BLOCK_M)
        columns_in_use = tl.where(counts, size, 0)
        values = load_rows(x, None, row + tl.zeros([1], tl.int32), None, columns, columns_in_use, stride_x)  # [BLOCK]
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(amax + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def _quantize_batched_kernel(
    q,
    scales,
    global_scales,
    x,
    static_scale,
    amax,
    tiles,  # Tiles
    size,
    depth,
    stride_x,
    stride_q,
    stride_scales,
    stride_static,
    GROUP: tl.constexpr,
    MIN_CODE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    E8M0: tl.constexpr,
    NUM_AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    DTYPE: tl.constexpr = q.dtype.element_ty
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    for slot in range(tl.program_id(0), tl.load(tiles.num_blocks) * BLOCK_M, tl.num_programs(0)):
        row, expert, counts = _row_in_tiles(slot, tiles, BLOCK_M)
        if counts:
            values = load_rows(x, None, row + tl.zeros([1, 1], tl.int32), None, columns, size, stride_x)  # [1, BLOCK]
            own_q = q + row.to(tl.int64) * stride_q
            own_scales = scales + row.to(tl.int64) * stride_scales
            if GROUP:
                if global_scales is not None:
                    if static_scale is not None:
                        global_scale = tl.load(static_scale + expert * stride_static)
                    else:
                        # Computed from a whole row, which one program has.
                        global_scale, _ = scale_of_bits(tl.max(amax_bits(values, 1), 0), MAX_CODE * 448.0, False)
                    if first == 0:
                        tl.store(global_scales + row, global_scale)
                    codes, stored = quantize_e2m1(values, tl.zeros([1, 1], tl.float32) + global_scale, GROUP)
                else:
                    codes, stored = quantize_tile(values, DTYPE, GROUP, MIN_CODE, MAX_CODE, E8M0)
                    stored = stored.to(scales.dtype.element_ty)
                groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]  # [1, BLOCK / GROUP]
                tl.store(own_scales + groups, stored, mask=groups < depth // GROUP)
            else:
                if static_scale is not None:
                    # A real division: the quotient may be of any size, which `divide` does not allow.
                    stored = tl.load(static_scale + expert * stride_static)
                    values = tl.div_rn(values, tl.zeros([1, BLOCK], tl.float32) + stored)
                else:
                    if amax is not None:
                        bits = tl.max(tl.load(amax + tl.arange(0, NUM_AMAX)), 0)
                    else:
                        bits = tl.max(amax_bits(values, 1), 0)
                    scale, stored = scale_of_bits(bits, MAX_CODE, E8M0)
                    values = divide(values, tl.zeros([1, 1], tl.float32) + scale)
                codes = encode(values, DTYPE, MIN_CODE, MAX_CODE)  # [1, BLOCK]
                tl.store(own_scales, stored.to(scales.dtype.element_ty))
            if global_scales is not None:
                pairs = first // 2 + tl.arange(0, BLOCK // 2)[None, :]  # [1, BLOCK / 2]
                tl.store(own_q + pairs, codes, mask=pairs < depth // 2)
            else:
                tl.store(own_q + columns, codes, mask=columns < depth)


def quantize_batched_rows(
    out: QuantizedRows, x: torch.Tensor, quantizer: Quantizer, plan: BlockMap, *, overlap: bool = False
) -> None:
    """Quantizes the rows in use: one launch, two where one scale spans them.

    Args:
        out: overwritten in the rows in use.
        x: [R, K] bf16, fp16 or fp32, rows contiguous; rows that are not in use may be NaN.
        plan: from `plan_batches` without slack: the rows in use and their experts.
        overlap: whether to start while the previous kernel, which may be the one that writes `x` or `plan`, still runs.
    """
    quantizer.check(out, x)
    fmt, static_scale, amax = quantizer.fmt, quantizer.static_scale, quantizer.amax
    depth, size = out.depth, x.shape[1]
    assert x.shape[0] == out.q.shape[0]
    assert plan.slack == 0, "a tile that is longer than the others would lose rows"
    block = quantizer.columns_of_program(depth)
    num_warps = min(8, max(1, block // 512))
    if amax is not None:
        launch(
            _amax_batched_kernel,
            (AMAX_PROGRAMS,),
            *(amax, x, plan.tiles),
            *(size, x.stride(0)),
            BLOCK_M=plan.block_m,
            BLOCK=block,
            num_warps=num_warps,
            **overlapping(overlap),
        )
    launch(
        _quantize_batched_kernel,
        (min(plan.max_blocks * plan.block_m, _ROW_PROGRAMS), triton.cdiv(depth, block)),
        *(out.q, out.scale, out.global_scale, x, static_scale, amax, plan.tiles),
        *(size, depth, x.stride(0), out.q.stride(0), out.scale.stride(0), int(quantizer.by_expert)),
        **fmt.constants,
        E8M0=fmt.e8m0,
        NUM_AMAX=AMAX_PROGRAMS,
        BLOCK_M=plan.block_m,
        BLOCK=block,
        num_warps=num_warps,
        **overlapping(overlap),
    )
