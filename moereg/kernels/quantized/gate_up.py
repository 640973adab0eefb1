"""The first grouped matmul of a Mixture-of-Experts layer with 8-bit or 4-bit weights and activations, in Triton.

Codes are multiplied as they are; scales multiply partial products where they change along the reduced dimension, and
the accumulator at the end where they do not. Gate and up are two products of one tile, so that w13 and its scales stay
in canonical order. Sizes as in `gemm.grouped`, with `I_pad` and `H_pad` multiples of 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.quantized.codes import TRITON_DTYPES, encode, quantize_tile
from moereg.kernels.quantized.operands import CodedOutput, QuantizedMatrices, QuantizedRows
from moereg.kernels.quantized.products import (
    codes_in_byte,
    scale_globally,
    scale_total,
    scaled_by_hardware,
    scaled_products,
    scales_of_columns,
    scales_of_rows,
)
from moereg.kernels.quantized.steps import launch_codes
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import claim_tile
from moereg.kernels.sizes import CODE_PAD


class _Output(NamedTuple):
    """The kernel's constant for what it writes; the defaults where that is no codes.

    Attributes:
        rounded: of `CodedOutput`.
        group: of `RowFormat`, as the next two.
        min_code: smallest code.
        max_code: largest code.
    """

    rounded: tl.dtype | None = None
    group: int = 0
    min_code: float = 0.0
    max_code: float = 0.0


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_gate_up_kernel(
    out,
    out_scale,
    static_scale,
    inputs,  # CodeTensors
    weights,  # CodeTensors
    bias,
    direct,  # RouteArguments
    num_tokens,
    plan,  # PlanArguments
    depth,
    num_columns,
    num_tiles_n,
    group_rows,
    strides,  # CodeStrides
    stride_bias,
    stride_out,
    stride_out_scale,
    stride_static,
    SORTED: tl.constexpr,
    SOURCE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    CODES: tl.constexpr,  # CodePair
    OUTPUT: tl.constexpr,  # _Output
    ACTIVATION: tl.constexpr,  # ActivationConstant
    TILE: tl.constexpr,  # CodeTile
    RELEASE_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    used_blocks = None
    if SORTED:
        wait_for_previous(OVERLAP)
        if not RELEASE_LATE:
            release_next(OVERLAP)
        used_blocks = tl.load(plan.num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, SORTED, False, TOP_K, BLOCK_TOP_K, TILE)
    if not SORTED:
        wait_for_previous(OVERLAP)
        if not RELEASE_LATE:
            release_next(OVERLAP)
        if tile.expert < 0:
            return
    expert, tile_n, rows, routes, row_mask = tile.expert, tile.column_tile, tile.rows, tile.routes, tile.row_mask

    out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = out_columns
    if TILE.mask_n:
        # Columns past the end repeat the last one, which costs no bandwidth and needs no mask.
        columns = tl.minimum(columns, num_columns - 1)
    offs_a = tl.arange(0, BLOCK_K // codes_in_byte(inputs.q.dtype.element_ty))
    offs_b = tl.arange(0, BLOCK_K // codes_in_byte(weights.q.dtype.element_ty))
    MX: tl.constexpr = scaled_by_hardware(inputs.scale.dtype.element_ty)
    expert = expert.to(tl.int64)
    sources = routes // SOURCE  # [BLOCK_M]
    # [BLOCK_M, BLOCK_K], or BLOCK_K / 2 columns where a byte holds two codes; the same goes for the weights.
    a_pointers = inputs.q + sources.to(tl.int64)[:, None] * strides.rows + offs_a[None, :]
    a_scales = scales_of_rows(inputs.scale, sources, strides.row_scales, MX, CODES, TILE)
    # [BLOCK_K, BLOCK_N]
    b_pointers = weights.q + expert * strides.expert + columns[None, :] * strides.column + offs_b[:, None]
    own_scales = weights.scale + expert * strides.scale_expert
    # A tile of nothing but padding has no scale of its own.
    first = tl.minimum(tile_n * BLOCK_N, num_columns - 1)
    b_scales = scales_of_columns(own_scales, first, columns, group_rows, strides.scale_row, MX, CODES, TILE)
    up_pointers = b_pointers + num_columns * strides.column
    up_scales = scales_of_columns(
        own_scales, num_columns + first, num_columns + columns, group_rows, strides.scale_row, MX, CODES, TILE
    )
    HALVES: tl.constexpr = 2 if ACTIVATION.gated else 1
    # [BLOCK_M, BLOCK_N] each
    gate, up = scaled_products(
        a_pointers, b_pointers, up_pointers, a_scales, b_scales, up_scales, row_mask, depth, HALVES, CODES, TILE
    )
    if RELEASE_LATE:
        release_next(OVERLAP)
    gate = scale_total(gate, a_scales, b_scales, row_mask, CODES)
    gate = scale_globally(gate, inputs.global_scale, sources, row_mask, weights.global_scale, expert * HALVES)
    if ACTIVATION.gated:
        up = scale_total(up, a_scales, up_scales, row_mask, CODES)
        up = scale_globally(up, inputs.global_scale, sources, row_mask, weights.global_scale, expert * HALVES + 1)

    if bias is not None:
        own_bias = bias + expert * stride_bias + columns
        gate += tl.load(own_bias).to(tl.float32)[None, :]
        if ACTIVATION.gated:
            up += tl.load(own_bias + num_columns).to(tl.float32)[None, :]
    if ACTIVATION.gated:
        y = activate_halves(gate, up, ACTIVATION)  # [BLOCK_M, BLOCK_N]
    else:
        y = activate(gate, ACTIVATION)
    if TILE.mask_n:
        y = tl.where((out_columns < num_columns)[None, :], y, 0.0)
    mask = row_mask[:, None]
    rows = rows.to(tl.int64)
    out_pointers = out + rows[:, None] * stride_out + out_columns[None, :]
    if out_scale is None:
        tl.store(out_pointers, y.to(out.dtype.element_ty), mask=mask)
    else:
        ROUNDED: tl.constexpr = OUTPUT.rounded
        OUT_GROUP: tl.constexpr = OUTPUT.group
        MIN_CODE: tl.constexpr = OUTPUT.min_code
        MAX_CODE: tl.constexpr = OUTPUT.max_code
        # The reference rounds here.
        y = y.to(ROUNDED).to(tl.float32)
        scale_pointers = out_scale + rows[:, None] * stride_out_scale
        CODE: tl.constexpr = out.dtype.element_ty
        if static_scale is not None:
            scale = tl.load(static_scale + expert * stride_static) + tl.zeros([BLOCK_M, 1], tl.float32)
            codes = encode(tl.div_rn(y, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N))), CODE, MIN_CODE, MAX_CODE)
            tl.store(scale_pointers, scale, mask=mask & (tile_n == 0))
        else:
            # [BLOCK_M, BLOCK_N] and [BLOCK_M, BLOCK_N / OUT_GROUP]
            codes, stored = quantize_tile(y, CODE, OUT_GROUP, MIN_CODE, MAX_CODE, MX)
            groups = tile_n * (BLOCK_N // OUT_GROUP) + tl.arange(0, BLOCK_N // OUT_GROUP)[None, :]
            tl.store(scale_pointers + groups, stored.to(out_scale.dtype.element_ty), mask=mask)
        tl.store(out_pointers, codes, mask=mask)


def quantized_gate_up_gemm(
    out: torch.Tensor | CodedOutput,
    hidden_states: QuantizedRows,
    w13: QuantizedMatrices,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    by_route: bool = False,
    overlap: bool = False,
) -> None:
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every sorted row, or codes of it.

    Accumulation and activation are in fp32, of int8 in int32 where no scale changes along a row.

    Args:
        out: [N, I_pad] bf16, fp16 or fp32, rows contiguous: overwritten up to the last valid row, with zeros from
            column I on. By route for `DirectRoutes`; [E * max_T, I_pad] in the batched format, valid rows overwritten.
            Or codes and scales of the same.
        hidden_states: [T, H_pad], or [N, H_pad] by route, or [E * max_T, H_pad] in the batched format.
        w13: [E, 2 * I, H_pad] gate first, or [E, I, H_pad] where not gated; scales of both halves by canonical row,
            global ones for each half.
        plan: from `sort_routes` or `plan_batches` with `config.block_m`.
        config: launch configuration; `block_n` divides 128 and counts gate and up once.
        epilogue: with a bias [E, 2 * I] or [E, I].
        top_k: K; 1 in the batched format.
        by_route: whether a route has a row of hidden states of its own.
        overlap: whether to start while the kernel in front, the last one of plan and hidden states, still runs.
    """
    halves = 2 if epilogue.gated else 1
    num_columns, block_n, bias = w13.q.shape[1] // halves, config.block_n, epilogue.bias
    if isinstance(out, CodedOutput):
        fmt, static_scale = out.quantizer.fmt, out.quantizer.static_scale
        assert fmt.fits_tile(block_n)
        target, out_scale, out_depth = out.rows.q, out.rows.scale, out.rows.depth
        output = _Output(TRITON_DTYPES[out.rounded], fmt.group, fmt.min_code, fmt.max_code)
    else:
        target, out_scale, static_scale, out_depth = out, None, None, out.shape[1]
        output = _Output()
    assert CODE_PAD % block_n == 0
    assert out_depth % CODE_PAD == 0 and num_columns <= out_depth and target.stride(1) == 1
    assert w13.global_scale is None or w13.global_scale.shape[1] == halves
    launch_codes(
        _quantized_gate_up_kernel,
        hidden_states,
        w13,
        plan,
        config,
        num_columns,
        out_depth // block_n,
        outputs=(target, out_scale, static_scale),
        others=(bias,),
        strides=tuple(0 if tensor is None else tensor.stride(0) for tensor in (bias, target, out_scale, static_scale)),
        top_k=top_k,
        mask_n=num_columns % block_n != 0 or num_columns != out_depth,
        overlap=overlap,
        SOURCE=1 if by_route else top_k,
        OUTPUT=output,
        ACTIVATION=epilogue.constant,
    )
