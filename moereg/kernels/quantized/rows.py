"""Quantizes rows of activations on the device, in Triton, bit for bit as `moereg.quantize` does.

Sizes: R rows, K columns, `K_pad` columns of the codes, G groups of a row. The rows are tokens, routes, or rows in the
order of a `RoutePlan`; what becomes of the others is left open.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.small_floats import amax_bits, quantize_e2m1
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.sort import RoutePlan, load_local_expert
from moereg.kernels.rows.tiles import DirectRoutes

# The reduced dimension of codes and of quantized weights is a multiple of this: one step of a GEMM, and a block of
# 128 x 128 weights.
K_PAD = 128

# Programs that look for the largest magnitude of all rows; whoever needs it reads a number from each.
AMAX_PROGRAMS = 256

# Columns of a program where no scale makes it take a whole row.
_GROUPED_BLOCK = 1024

# What a program works on where there would be many of them.
_PROGRAM_ELEMENTS = 4096
_MANY_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows become codes.

    Attributes:
        dtype: Of the codes: an 8-bit float or int8, or uint8 for two float4_e2m1fn.
        min_code: Smallest code.
        max_code: Largest code, to which the largest magnitude of a group is mapped.
        group: Columns that share a scale, a power of two that divides `K_PAD`; 0: the whole row.
        e8m0: Whether scales are powers of two, stored as uint8; else they are fp32.
        spans_rows: Whether one dynamic scale is for all rows that count.
        static: Whether scales are given.
        global_scale: Whether scales are float8_e4m3fn on top of a global one for each row, which may be given; of
            float4_e2m1fn.
    """

    dtype: torch.dtype
    min_code: float
    max_code: float
    group: int = 0
    e8m0: bool = False
    spans_rows: bool = False
    static: bool = False
    global_scale: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of stored scales."""
        if self.global_scale:
            return torch.float8_e4m3fn
        return torch.uint8 if self.e8m0 else torch.float32

    def num_groups(self, padded_columns: int) -> int:
        """G."""
        return padded_columns // self.group if self.group else 1


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Codes and scales of rows.

    Attributes:
        q: [R, K_pad] codes, rows contiguous, zeros from column K on; or [R, K_pad / 2] uint8, two float4_e2m1fn codes
            each, the first in the low half.
        scale: [R, G] fp32, uint8 where they are powers of two, or float8_e4m3fn where there are global ones.
        group: Columns that share a scale; 0: the whole row.
        global_scale: [R] fp32, contiguous, or None.
    """

    q: torch.Tensor
    scale: torch.Tensor
    group: int
    global_scale: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        """K_pad."""
        return self.q.shape[1] * (2 if self.q.dtype == torch.uint8 else 1)


@dataclass(frozen=True, slots=True, eq=False)
class RouteIds:
    """Rows that are routes, or tokens, as they come.

    Attributes:
        topk_ids: [T, K] int32, contiguous: ids outside [0, num_experts) belong to no expert.
        expert_map: [num_experts] int32, local expert or -1; None: identity.
        num_experts: number of ids.
        num_local_experts: E.
    """

    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    num_experts: int
    num_local_experts: int


@triton.jit
def scale_of_bits(bits, MAX_CODE: tl.constexpr, E8M0: tl.constexpr):
    """Scales that map the largest magnitudes to the largest code.

    Returns:
        What to divide by, fp32, and what to store: the same, or the exponents as int32.
    """
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MAX_CODE, tl.float32))
    if E8M0:
        # Up to the next power of two; what is not above the smallest, 2^-127, which is subnormal in fp32, is that.
        scale_bits = scale.to(tl.int32, bitcast=True)
        code = tl.where(scale_bits <= 0x400000, 0, (scale_bits + 0x7FFFFF) >> 23)
        code = tl.where(bits == 0, 127, tl.where(bits >= 0x7F800000, 255, code))
        scale_bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
        return scale_bits.to(tl.float32, bitcast=True), code
    else:
        scale = tl.where(bits == 0, 1.0, tl.maximum(scale, 1.1754943508222875e-38))
        scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
        return scale, scale


@triton.jit
def divide(x, scale):
    """Numbers divided by scales that spread to their shape, rounded as a division is; quotients may not overflow.

    A reciprocal of each scale and one step of correction by the surplus: three instructions a number, where a
    division takes twenty.
    """
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    quotient = x * reciprocal
    # In this order zeros keep their sign, also where -x is 0 - x, as Triton 3.6 has it: no zero is negated but x.
    surplus = tl.fma(quotient, tl.broadcast_to(scale, x.shape), -x)
    return tl.fma(surplus, tl.broadcast_to(-reciprocal, x.shape), quotient)


@triton.jit
def encode(values, DTYPE: tl.constexpr, MIN_CODE: tl.constexpr, MAX_CODE: tl.constexpr):
    """Codes of numbers that were divided by their scale: nearest, ties to even, saturated."""
    # Comparisons keep NaN, which a minimum would replace.
    values = tl.where(values > MAX_CODE, MAX_CODE, tl.where(values < MIN_CODE, MIN_CODE, values))
    if DTYPE.is_int():
        # Integers have no NaN. At 1.5 * 2^23 the last place is 1, so that adding rounds.
        values = tl.where(values == values, (values + 12582912.0) - 12582912.0, 0.0)
    return values.to(DTYPE)


@triton.jit
def quantize_tile(
    x,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_CODE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    E8M0: tl.constexpr,
):
    """Codes of [M, N] fp32 in groups of GROUP columns, and what to store of their scales, [M, N / GROUP]."""
    grouped = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    scale, stored = scale_of_bits(amax_bits(grouped, 2), MAX_CODE, E8M0)
    codes = encode(divide(grouped, tl.expand_dims(scale, 2)), DTYPE, MIN_CODE, MAX_CODE)
    return tl.reshape(codes, (x.shape[0], x.shape[1])), stored


@triton.jit
def load_rows(x, topk_weights, source, in_use, columns, size, stride):
    """Columns of the rows `source` of x as fp32, times their weights, zeros from column `size` on."""
    mask = columns < size
    if in_use is not None:
        mask = mask & in_use
        # Rows that do not count are not stored, whatever weight they get.
        source = tl.where(in_use, source, 0)
    values = tl.load(x + source.to(tl.int64) * stride + columns, mask=mask, other=0.0).to(tl.float32)
    if topk_weights is not None:
        # As the reference rounds the weighted input.
        values = (values * tl.load(topk_weights + source)).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _expert_of_row(
    row,
    topk_ids,
    expert_map,
    num_routes,
    num_experts,
    num_local_experts,
    ROUTES_PER_ROW: tl.constexpr,
    BLOCK_ROUTES: tl.constexpr,
):
    """A row's local expert, the largest of those that it is routed to; -1 where there is none."""
    choices = tl.arange(0, BLOCK_ROUTES)
    routes = tl.where(choices < ROUTES_PER_ROW, row * ROUTES_PER_ROW + choices, num_routes)
    experts = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    return tl.max(experts, 0)


@triton.jit(do_not_specialize=["num_rows", "num_routes"])
def _amax_rows_kernel(
    amax,
    x,
    topk_weights,
    topk_ids,
    expert_map,
    rows_in_use,
    num_rows,
    num_routes,
    num_experts,
    num_local_experts,
    size,
    stride_x,
    ROUTES_PER_ROW: tl.constexpr,
    BLOCK_ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    if rows_in_use is not None:
        num_rows = tl.load(rows_in_use)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        values = load_rows(x, topk_weights, row + tl.zeros([1], tl.int32), None, columns, size, stride_x)
        bits = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        if topk_ids is not None:
            expert = _expert_of_row(
                row, topk_ids, expert_map, num_routes, num_experts, num_local_experts, ROUTES_PER_ROW, BLOCK_ROUTES
            )
            bits = tl.where(expert >= 0, bits, largest)
        largest = bits
    tl.store(amax + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["num_rows", "num_routes"])
def _quantize_rows_kernel(
    q,
    scales,
    global_scales,
    x,
    topk_weights,
    static_scale,
    amax,
    topk_ids,
    expert_map,
    route_expert,
    sorted_routes,
    rows_in_use,
    num_rows,
    num_routes,
    num_experts,
    num_local_experts,
    size,
    padded_size,
    stride_x,
    stride_q,
    stride_scales,
    stride_static,
    SOURCE: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_CODE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    E8M0: tl.constexpr,
    NUM_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if not INDEPENDENT:
        wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    if rows_in_use is not None:
        num_rows = tl.load(rows_in_use)
        if tl.program_id(0) * ROWS >= num_rows:
            return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    in_use = rows < num_rows
    expert = tl.zeros([ROWS, 1], tl.int32)
    if topk_ids is not None:
        routes = tl.where(in_use, rows, num_routes)
        expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
        in_use = in_use & (expert >= 0)
    if sorted_routes is not None:
        expert = tl.load(route_expert + tl.load(sorted_routes + rows, mask=in_use, other=0), mask=in_use, other=0)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    values = load_rows(x, topk_weights, rows // SOURCE, in_use, columns, size, stride_x)
    DTYPE: tl.constexpr = q.dtype.element_ty
    rows = rows.to(tl.int64)
    if GROUP:
        if global_scales is not None:
            if static_scale is not None:
                global_scale = tl.load(static_scale + expert * stride_static, mask=in_use, other=1.0)
            else:
                # Of a whole row, which one program has.
                bits = tl.expand_dims(amax_bits(values, 1), 1)
                global_scale, _ = scale_of_bits(bits, MAX_CODE * 448.0, False)
            tl.store(global_scales + rows, global_scale, mask=in_use & (tl.program_id(1) == 0))
            codes, stored = quantize_e2m1(values, global_scale, GROUP)
        else:
            codes, stored = quantize_tile(values, DTYPE, GROUP, MIN_CODE, MAX_CODE, E8M0)
            stored = stored.to(scales.dtype.element_ty)
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
        tl.store(scales + rows * stride_scales + groups, stored, mask=in_use & (groups < padded_size // GROUP))
    else:
        if static_scale is not None:
            # The quotient may be anything.
            stored = tl.load(static_scale + expert * stride_static, mask=in_use, other=1.0)
            values = tl.div_rn(values, tl.broadcast_to(stored, (ROWS, BLOCK)))
        else:
            if amax is not None:
                bits = tl.max(tl.load(amax + tl.arange(0, NUM_AMAX)), 0) + tl.zeros([ROWS, 1], tl.int32)
            else:
                bits = tl.expand_dims(amax_bits(values, 1), 1)
            scale, stored = scale_of_bits(bits, MAX_CODE, E8M0)
            values = divide(values, scale)
        codes = encode(values, DTYPE, MIN_CODE, MAX_CODE)
        tl.store(scales + rows * stride_scales, stored.to(scales.dtype.element_ty), mask=in_use)
    if global_scales is not None:
        pairs = first // 2 + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(q + rows * stride_q + pairs, codes, mask=in_use & (pairs < padded_size // 2))
    else:
        tl.store(q + rows * stride_q + columns, codes, mask=in_use & (columns < padded_size))
    if INDEPENDENT:
        # Who waits for this kernel counts on the one in front having ended too.
        wait_for_previous(OVERLAP)


def check_rows(
    out: QuantizedRows, x: torch.Tensor, fmt: RowFormat, amax: torch.Tensor | None, static_scale: torch.Tensor | None
) -> None:
    """What the launchers ask of their operands, whichever rows count."""
    assert x.stride(1) == out.q.stride(1) == out.scale.stride(1) == 1 and out.q.dtype == fmt.dtype
    assert out.scale.shape == (out.q.shape[0], fmt.num_groups(out.depth)) and out.group == fmt.group
    assert fmt.spans_rows == (amax is not None) and fmt.global_scale == (out.global_scale is not None)
    assert fmt.global_scale or fmt.static == (static_scale is not None)
    assert not fmt.global_scale or (fmt.dtype == torch.uint8 and fmt.max_code == 6.0), "written for float4_e2m1fn"


def block_of_rows(padded: int, fmt: RowFormat, static_scale: torch.Tensor | None) -> int:
    """Columns of a program: a whole row where its scale, or its global one, is made from it."""
    takes_parts = fmt.group and not (fmt.global_scale and static_scale is None)
    block: int = triton.next_power_of_2(min(_GROUPED_BLOCK, padded) if takes_parts else padded)
    return block


def quantize_rows(
    out: QuantizedRows,
    x: torch.Tensor,
    fmt: RowFormat,
    routes: RoutePlan | RouteIds,
    *,
    amax: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    independent: bool = False,
    overlap: bool = False,
) -> None:
    """Writes codes and scales of rows: one launch, two where one scale spans them.

    Args:
        out: Overwritten; `fmt.group` apart, its number of rows says what rows are: of `x`, or, where there are K times
            as many, routes, which need it where scales of experts differ.
        x: [R, K] bf16, fp16 or fp32, rows contiguous; [R / top_k, K] where the rows of `out` are routes of tokens.
        fmt: What to make of them.
        routes: Whose rows `x` or `out` are: a plan where they are sorted, else what tokens chose, [R, choices] where
            rows are tokens. Rows that are not in use may hold anything; those of sorted and of single routes are left
            out.
        amax: [AMAX_PROGRAMS] int32, overwritten, where one dynamic scale spans the rows.
        static_scale: fp32 [1], or [E], where scales or global ones are given.
        topk_weights: [R] fp32, contiguous: rows are multiplied by these, and rounded to their dtype, first.
        independent: whether the kernel in front, if there is one, writes nothing that is read here and reads and writes
            nothing that is written here, and no kernel in front of it still runs.
        overlap: whether to start while the kernel in front, which may be the one that writes `x`, still runs.
    """
    num_rows, padded = out.q.shape[0], out.depth
    size = x.shape[1]
    assert padded % K_PAD == 0 and size <= padded and num_rows % x.shape[0] == 0
    check_rows(out, x, fmt, amax, static_scale)
    has_many = static_scale is not None and static_scale.numel() > 1
    ids: tuple[torch.Tensor | None, torch.Tensor | None]
    sorted_experts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    rows_in_use: torch.Tensor | None
    if isinstance(routes, RoutePlan):
        routes_per_row, ids, counts = 1, (None, None), (0, 0, 0)
        rows_in_use = routes.expert_offsets[-1:]
        if has_many:
            sorted_experts = routes.route_expert, routes.sorted_routes
    else:
        routes_per_row, ids = routes.topk_ids.numel() // num_rows, (routes.topk_ids, routes.expert_map)
        counts = (routes.topk_ids.numel(), routes.num_experts, routes.num_local_experts)
        rows_in_use = None
    block = block_of_rows(padded, fmt, static_scale)
    num_warps = min(8, max(1, block // 512))
    # Many small programs take longer to start than to run.
    several = max(1, _PROGRAM_ELEMENTS // block) if num_rows * triton.cdiv(padded, block) >= _MANY_PROGRAMS else 1
    if amax is not None:
        launch(
            _amax_rows_kernel,
            (AMAX_PROGRAMS,),
            amax,
            x,
            topk_weights,
            *ids,
            rows_in_use,
            num_rows,
            *counts,
            size,
            x.stride(0),
            ROUTES_PER_ROW=routes_per_row,
            BLOCK_ROUTES=triton.next_power_of_2(routes_per_row),
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=num_warps,
            **overlap_options(overlap),
        )
    assert not has_many or routes_per_row == 1, "scales of experts need single routes"
    launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, several), triton.cdiv(padded, block)),
        out.q,
        out.scale,
        out.global_scale,
        x,
        topk_weights,
        static_scale,
        amax,
        # A token of several routes is quantized whether or not one of them is to a local expert.
        *(ids if routes_per_row == 1 else (None, None)),
        *sorted_experts,
        rows_in_use,
        num_rows,
        *counts,
        size,
        padded,
        x.stride(0),
        out.q.stride(0),
        out.scale.stride(0),
        int(has_many),
        SOURCE=num_rows // x.shape[0],
        GROUP=fmt.group,
        MIN_CODE=fmt.min_code,
        MAX_CODE=fmt.max_code,
        E8M0=fmt.e8m0,
        NUM_AMAX=AMAX_PROGRAMS,
        ROWS=several,
        BLOCK=block,
        INDEPENDENT=independent and amax is None,
        OVERLAP=overlap,
        num_warps=min(8, max(1, several * block // 512)),
        **overlap_options(overlap),
    )


def rows_of_plan(plan: BlockMap | DirectRoutes, num_local_experts: int) -> RoutePlan | RouteIds:
    """Whose rows the first GEMM writes."""
    if isinstance(plan, DirectRoutes):
        return RouteIds(plan.topk_ids, plan.expert_map, plan.num_experts, num_local_experts)
    assert isinstance(plan, RoutePlan)
    return plan
