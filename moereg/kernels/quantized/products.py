"""The two grouped GEMMs of a Mixture-of-Experts layer with 8-bit or 4-bit weights and activations, in Triton.

Codes are multiplied as they are; scales multiply partial products where they change along the reduced dimension, and
the accumulator at the end where they do not. Gate and up are two products of one tile, so that w13 and its scales stay
in canonical order. Sizes as in `gemm.grouped`, with `I_pad` and `H_pad` multiples of 128.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate, activate_halves
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.codes import TRITON_DTYPES, divide_by_given, encode, quantize_tile
from moereg.kernels.quantized.operands import CodedOutput, CodeStrides, QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import claim_tile, plan_arguments, route_shape
from moereg.kernels.sizes import CODE_PAD


@triton.constexpr_function
def codes_in_byte(dtype):
    """Codes per element: two float4_e2m1fn in a uint8, else one."""
    return 2 if dtype == tl.uint8 else 1


@triton.constexpr_function
def scaled_by_hardware(scale_dtype):
    """Whether `tl.dot_scaled` takes scales of this type: powers of two as uint8, or float8_e4m3fn."""
    return scale_dtype == tl.uint8 or scale_dtype == tl.float8e4nv


@triton.jit
def _add_product(
    total,
    a,
    b_pointers,
    a_scale,
    b_scales,
    start,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    A_FORMAT: tl.constexpr,
    MX: tl.constexpr,
):
    """Adds the product of one step to the total [BLOCK_M, BLOCK_N], scaled where scales change from step to step."""
    b = tl.load(b_pointers)  # [BLOCK_K, BLOCK_N] codes
    if MX:
        b_scale = tl.load(b_scales + start // B_GROUP)  # [BLOCK_N, BLOCK_K / B_GROUP]
        B_FORMAT: tl.constexpr = "e2m1" if b.dtype == tl.uint8 else A_FORMAT
        return tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, total)
    elif total.dtype == tl.int32:
        return tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        # A sum of its own: Hopper's tensor cores keep about 14 bits of a sum of 8-bit products, which is enough for one
        # step but not for thousands of columns.
        if a.dtype.is_int():
            partial = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        else:
            partial = tl.dot(a, b)  # [BLOCK_M, BLOCK_N]
        if A_GROUP and B_GROUP:
            partial *= a_scale[:, None] * tl.load(b_scales + start // B_GROUP)
        elif A_GROUP:
            partial *= a_scale[:, None]
        elif B_GROUP:
            partial *= tl.load(b_scales + start // B_GROUP)
        return total + partial


@triton.jit
def scales_of_columns(
    scale, first, rows, group_rows, stride, MX: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr
):
    """Pointers to the first scales of `rows` [BLOCK_N] of weights, that of row `first` where all share one.

    `scale` points to the scale of the expert's first row and column. MX: whether hardware applies scales.

    Returns:
        One pointer where rows share a scale, else [1, BLOCK_N]; [BLOCK_N, BLOCK_K / B_GROUP] where hardware applies
        them.
    """
    GROUPS: tl.constexpr = TILE.block_k // CODES.b_group if MX else 1
    if MX:
        return scale + (rows // group_rows)[:, None] * stride + tl.arange(0, GROUPS)[None, :]
    elif CODES.uniform:
        return scale + first // group_rows * stride
    else:
        return scale + (rows // group_rows)[None, :] * stride


@triton.jit
def scaled_products(
    a_pointers,  # [BLOCK_M, BLOCK_K] first codes of the activations; [BLOCK_M, BLOCK_K / 2] where a byte holds two
    b_pointers,  # [BLOCK_K, BLOCK_N] first codes of the weights; [BLOCK_K / 2, BLOCK_N] where a byte holds two
    up_pointers,  # the same for the second half, if any
    # [BLOCK_M] first scales of the activations' rows; [BLOCK_M, BLOCK_K / A_GROUP] where hardware applies them
    a_scales,
    b_scales,  # first scales of the weights' rows, from `scales_of_columns`
    up_scales,  # the same for the second half
    row_mask,  # [BLOCK_M] rows in use
    depth,  # K_pad, codes of a row, a multiple of BLOCK_K * UNROLL
    HALVES: tl.constexpr,  # 2 if there is a second half; else the second result is meaningless
    CODES: tl.constexpr,  # `CodePair`
    TILE: tl.constexpr,  # `CodeTile`
):
    """Products of rows of activations and rows of weights, for gate and up, scaled where scales change along a row.

    Returns:
        [BLOCK_M, BLOCK_N] fp32 of gate, or of the only half, and of up.
    """
    # Triton 3.6 passes a field on only if it is bound to a name first.
    A_GROUP: tl.constexpr = CODES.a_group
    B_GROUP: tl.constexpr = CODES.b_group
    DOT_FORMAT: tl.constexpr = CODES.dot_format
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    UNROLL: tl.constexpr = TILE.unroll
    MX: tl.constexpr = scaled_by_hardware(a_scales.dtype.element_ty)
    # Sums of int8 products are exact, unless scales have to be applied on the way.
    EXACT: tl.constexpr = a_pointers.dtype.element_ty.is_int() and A_GROUP == 0 and B_GROUP == 0
    TOTAL: tl.constexpr = tl.int32 if EXACT else tl.float32
    SCALE_OF_NONE: tl.constexpr = 0 if a_scales.dtype.element_ty.is_int() else 0.0
    A_STEP: tl.constexpr = BLOCK_K // codes_in_byte(a_pointers.dtype.element_ty)
    B_STEP: tl.constexpr = BLOCK_K // codes_in_byte(b_pointers.dtype.element_ty)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=TOTAL)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], dtype=TOTAL)
    for first in range(0, depth, BLOCK_K * UNROLL):
        for part in tl.static_range(UNROLL):
            start = first + part * BLOCK_K
            a_own = a_pointers + part * A_STEP  # [BLOCK_M, BLOCK_K] codes
            if TILE.mask_rows:
                a = tl.load(a_own, mask=row_mask[:, None], other=0 if a_pointers.dtype.element_ty.is_int() else 0.0)
            else:
                a = tl.load(a_own)
            a_scale = None
            if A_GROUP:
                if MX:
                    # [BLOCK_M, BLOCK_K / A_GROUP]
                    a_scale = tl.load(a_scales + start // A_GROUP, mask=row_mask[:, None], other=SCALE_OF_NONE)
                else:
                    a_scale = tl.load(a_scales + start // A_GROUP, mask=row_mask, other=0.0)  # [BLOCK_M]
            b_own = b_pointers + part * B_STEP
            total = _add_product(total, a, b_own, a_scale, b_scales, start, A_GROUP, B_GROUP, DOT_FORMAT, MX)
            if HALVES == 2:
                up_own = up_pointers + part * B_STEP
                up_total = _add_product(
                    up_total, a, up_own, a_scale, up_scales, start, A_GROUP, B_GROUP, DOT_FORMAT, MX
                )
        a_pointers += A_STEP * UNROLL
        b_pointers += B_STEP * UNROLL
        if HALVES == 2:
            up_pointers += B_STEP * UNROLL
    return total.to(tl.float32), up_total.to(tl.float32)


@triton.jit
def scale_total(total, a_scales, b_scales, row_mask, CODES: tl.constexpr):
    """Multiplies the product [BLOCK_M, BLOCK_N] by the scales that do not change along a row."""
    if CODES.a_group == 0:
        total *= tl.load(a_scales, mask=row_mask, other=0.0)[:, None]
    if CODES.b_group == 0:
        total *= tl.load(b_scales)
    return total


@triton.jit
def scale_globally(total, row_scale, rows, row_mask, matrix_scale, half):
    """Multiplies the product [BLOCK_M, BLOCK_N] by the global scales of its rows and of its matrix half, if any."""
    if row_scale is not None:
        # One after the other: the product of both scales may be too small for fp32.
        total *= tl.load(matrix_scale + half)
        total *= tl.load(row_scale + rows, mask=row_mask, other=0.0)[:, None]
    return total


@triton.jit
def scales_of_rows(scale, rows, stride, MX: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr):
    """Pointers to the first scales of rows of activations, [BLOCK_M].

    Where hardware applies scales, to those of a whole step: [BLOCK_M, BLOCK_K / A_GROUP].
    """
    GROUPS: tl.constexpr = TILE.block_k // CODES.a_group if MX else 1
    if MX:
        return scale + rows.to(tl.int64)[:, None] * stride + tl.arange(0, GROUPS)[None, :]
    else:
        return scale + rows.to(tl.int64) * stride


# Names of the codes in `tl.dot_scaled`.
_DOT_FORMATS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
# Columns that share a scale which hardware applies, by the dtype of the scale.
_SCALED_GROUPS: Final = {torch.uint8: 32, torch.float8_e4m3fn: 16}


class CodeTile(NamedTuple):
    """Compile-time constant: a product's tile."""

    block_m: int  # rows, as in `GroupedGemmConfig`
    block_n: int  # columns, counting gate and up once
    block_k: int  # reduced columns per step; this and the next are from `steps`
    unroll: int  # steps per loop iteration
    group_m: int  # row tiles that share a column tile
    mask_rows: bool  # whether loads of invalid rows are masked
    mask_n: bool  # whether tiles reach past the last column


class CodePair(NamedTuple):
    """Compile-time constant: the codes of both operands of a product and their scales."""

    a_group: int  # columns of activations that share a scale; 0: all
    b_group: int  # columns of weights that share a scale; 0: all
    dot_format: str | None  # name of the activations' codes in `tl.dot_scaled`; None if it does not take them
    uniform: bool  # whether all rows of weights in a tile share a scale


def launch_codes(
    kernel: Any,
    rows: QuantizedRows,
    weights: QuantizedMatrices,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    num_columns: int,
    num_tiles_n: int,
    *,
    outputs: tuple[torch.Tensor | None, ...],
    others: tuple[torch.Tensor | None, ...],
    strides: tuple[int, ...],
    top_k: int,
    mask_n: bool,
    overlap: bool,
    **constants: Any,
) -> None:
    """Launches a product of codes over `num_tiles_n` tiles of columns, which count gate and up once.

    Args:
        outputs: the kernel's first arguments; `others` follow the operands, `strides` the strides of those.
        top_k: K; used where rows are not sorted.
        mask_n: whether tiles reach past the last column.
    """
    assert config.block_m == plan.block_m
    # A step of the main loop lies within one group of each operand, or hardware applies scales within it.
    step = min(config.block_k, CODE_PAD)
    assert rows.depth == weights.depth
    assert config.block_k % step == rows.depth % step == 0 and weights.q.stride(2) == rows.q.stride(1) == 1
    assert (weights.global_scale is None) == (rows.global_scale is None) == (rows.scale.dtype != torch.float8_e4m3fn)
    # 4-bit codes are multiplied by 8-bit ones where powers of two scale both.
    assert weights.q.dtype == rows.q.dtype or (weights.q.dtype == rows.scale.dtype == torch.uint8)
    assert weights.scale.dtype == rows.scale.dtype
    assert weights.scale.stride(2) == 1 and rows.scale.stride(1) == 1
    for group in (rows.group, weights.group_columns):
        if rows.scale.dtype in _SCALED_GROUPS:
            assert group == _SCALED_GROUPS[rows.scale.dtype], "hardware fixes how many columns share a scale"
        else:
            assert group % step == 0, f"a step of {step} columns crosses groups of {group}"
    launch(
        kernel,
        (plan.max_blocks * num_tiles_n,),
        *(*outputs, rows.tensors, weights.tensors, *others),
        *(*plan_arguments(plan, weights.q.shape[0]), weights.depth, num_columns, num_tiles_n, weights.group_rows),
        CodeStrides(rows.q.stride(0), rows.scale.stride(0), *weights.q.stride()[:2], *weights.scale.stride()[:2]),
        *strides,
        # A single token takes an ordinary tile.
        ROUTES=route_shape(plan, top_k)._replace(single=False),
        CODES=CodePair(
            a_group=rows.group,
            b_group=weights.group_columns,
            dot_format=_DOT_FORMATS.get(rows.q.dtype),
            uniform=weights.group_rows % config.block_n == 0,
        ),
        TILE=CodeTile(
            config.block_m, config.block_n, *steps(config, weights.depth), config.group_m, config.mask_rows, mask_n
        ),
        # Otherwise the next kernel's many small programs would crowd onto the multiprocessors that are free first and
        # run there one after the other while the rest idle: 3 % of qwen3-30b-a3b at 64 and 256 tokens on an H200.
        # Programs of a single token all end at the same time.
        RELEASE_LATE=isinstance(plan, BlockMap) or plan.topk_ids.shape[0] > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **overlapping(overlap),
    )


def steps(config: GroupedGemmConfig, depth: int) -> tuple[int, int]:
    """Returns how many columns a step reduces, and how many steps an iteration of the loop has.

    A step lies within one group of 128. Two steps per iteration read runs of 256 bytes of a row, which DRAM delivers
    4 % faster (measured on an H200); rows of fewer than four iterations end before that pays off.
    """
    step = min(config.block_k, CODE_PAD)
    several = depth % config.block_k == 0 and depth >= 4 * config.block_k
    return step, config.block_k // step if several else 1


class _Output(NamedTuple):
    """Compile-time constant: the codes that the kernel writes; the defaults where it writes none."""

    rounded: tl.dtype | None = None  # as in `CodedOutput`
    group: int = 0  # this and the next two as in `RowFormat`
    min_code: float = 0.0  # smallest code
    max_code: float = 0.0  # largest code


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
    ROUTES: tl.constexpr,  # RouteShape
    SOURCE: tl.constexpr,
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
    if ROUTES.sorted:
        wait_for_previous(OVERLAP)
        if not RELEASE_LATE:
            release_next(OVERLAP)
        used_blocks = tl.load(plan.num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, ROUTES, TILE)
    if not ROUTES.sorted:
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
    # A tile of padding alone has no scale of its own.
    first = tl.minimum(tile_n * BLOCK_N, num_columns - 1)
    b_scales = scales_of_columns(own_scales, first, columns, group_rows, strides.scale_row, MX, CODES, TILE)
    up_pointers = b_pointers + num_columns * strides.column
    # Gate's last group of rows may be short.
    own_scales += tl.cdiv(num_columns, group_rows) * strides.scale_row
    up_scales = scales_of_columns(own_scales, first, columns, group_rows, strides.scale_row, MX, CODES, TILE)
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
            given = tl.load(static_scale + expert * stride_static)
            codes = encode(divide_by_given(y, given), CODE, MIN_CODE, MAX_CODE)
            tl.store(scale_pointers, given + tl.zeros([BLOCK_M, 1], tl.float32), mask=mask & (tile_n == 0))
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
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every sorted row, quantized if `out` is.

    Accumulation and activation are in fp32; int8 accumulates in int32 where no scale changes along a row.

    Args:
        out: [N, I_pad] bf16, fp16 or fp32, rows contiguous: overwritten up to the last valid row, with zeros from
            column I on. By route for `DirectRoutes`; [E * max_T, I_pad] in the batched format, valid rows overwritten.
            Or codes and scales of the same shape.
        hidden_states: [T, H_pad], or [N, H_pad] by route, or [E * max_T, H_pad] in the batched format.
        w13: [E, 2 * I, H_pad] gate first, or [E, I, H_pad] where not gated; no group of rows spans both halves, and
            each has a global scale of its own.
        config: launch configuration; `block_n` divides 128 and counts gate and up once.
        epilogue: with a bias [E, 2 * I] or [E, I].
        by_route: whether each route has a row of hidden states of its own.
        plan, top_k, overlap: as for `gate_up_gemm` of `gemm.grouped`.
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
    assert w13.scale.shape[1] == halves * triton.cdiv(num_columns, w13.group_rows)
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
        ACTIVATION=epilogue.activation,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_down_kernel(
    out,
    inputs,  # CodeTensors
    weights,  # CodeTensors
    bias,
    topk_weights,
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
    ROUTES: tl.constexpr,  # RouteShape
    CODES: tl.constexpr,  # CodePair
    TILE: tl.constexpr,  # CodeTile
    RELEASE_LATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    # The tile map was complete before the previous kernel began, so read it before waiting.
    used_blocks = None
    if ROUTES.sorted:
        used_blocks = tl.load(plan.num_blocks)
        if tl.program_id(0) >= used_blocks * num_tiles_n:
            wait_for_previous(OVERLAP)
            return
    tile = claim_tile(direct, num_tokens, plan, used_blocks, num_tiles_n, ROUTES, TILE)
    if not ROUTES.sorted:
        if tile.expert < 0:
            wait_for_previous(OVERLAP)
            return
    wait_for_previous(OVERLAP)
    if not RELEASE_LATE:
        release_next(OVERLAP)
    expert, tile_n, rows, routes, row_mask = tile.expert, tile.column_tile, tile.valid_rows, tile.routes, tile.row_mask

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    loaded_columns = columns
    if TILE.mask_n:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    offs_a = tl.arange(0, BLOCK_K // codes_in_byte(inputs.q.dtype.element_ty))
    offs_b = tl.arange(0, BLOCK_K // codes_in_byte(weights.q.dtype.element_ty))
    MX: tl.constexpr = scaled_by_hardware(inputs.scale.dtype.element_ty)
    expert = expert.to(tl.int64)
    # [BLOCK_M, BLOCK_K], or BLOCK_K / 2 columns where a byte holds two codes; the same goes for the weights.
    a_pointers = inputs.q + rows.to(tl.int64)[:, None] * strides.rows + offs_a[None, :]
    a_scales = scales_of_rows(inputs.scale, rows, strides.row_scales, MX, CODES, TILE)
    # [BLOCK_K, BLOCK_N]
    b_pointers = weights.q + expert * strides.expert + loaded_columns[None, :] * strides.column + offs_b[:, None]
    own_scales = weights.scale + expert * strides.scale_expert
    b_scales = scales_of_columns(
        own_scales, tile_n * BLOCK_N, loaded_columns, group_rows, strides.scale_row, MX, CODES, TILE
    )
    # [BLOCK_M, BLOCK_N]
    x, _ = scaled_products(
        a_pointers, b_pointers, b_pointers, a_scales, b_scales, b_scales, row_mask, depth, 1, CODES, TILE
    )
    if RELEASE_LATE:
        release_next(OVERLAP)
    x = scale_total(x, a_scales, b_scales, row_mask, CODES)
    x = scale_globally(x, inputs.global_scale, rows, row_mask, weights.global_scale, expert)

    if bias is not None:
        x += tl.load(bias + expert * stride_bias + loaded_columns).to(tl.float32)[None, :]
    if topk_weights is not None:
        x *= tl.load(topk_weights + routes)[:, None]
    mask = row_mask[:, None]
    if TILE.mask_n:
        mask = mask & (columns < num_columns)[None, :]
    out_pointers = out + routes.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_pointers, x.to(out.dtype.element_ty), mask=mask)


def quantized_down_gemm(
    out: torch.Tensor,
    intermediate: QuantizedRows,
    w2: QuantizedMatrices,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row to its route's row.

    Arguments as for `down_gemm` of `gemm.grouped`, with quantized operands.

    Args:
        intermediate: [N, I_pad], in the order of `quantized_gate_up_gemm`.
        w2: [E, H, I_pad].
    """
    num_columns = w2.q.shape[1]
    # Sorted routes are looked up, so only direct ones need K.
    top_k = plan.topk_ids.shape[1] if isinstance(plan, DirectRoutes) else 1
    assert out.stride(1) == 1
    assert w2.global_scale is None or w2.global_scale.shape[1] == 1
    launch_codes(
        _quantized_down_kernel,
        intermediate,
        w2,
        plan,
        config,
        num_columns,
        triton.cdiv(num_columns, config.block_n),
        outputs=(out,),
        others=(bias, topk_weights),
        strides=(0 if bias is None else bias.stride(0), out.stride(0)),
        top_k=top_k,
        mask_n=num_columns % config.block_n != 0,
        overlap=overlap,
    )
