"""Quantizes rows of activations on the device, in Triton, bit for bit as `moereg.quantize` does.

Sizes: R rows, K columns, `K_pad` columns of the codes, in code `depth`, G groups of a row. The rows are tokens, routes,
or rows in the order of a `RoutePlan`. Rows that are not in use are undefined afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from moereg.kernels.rows.direct import load_local_expert
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import AMAX_PROGRAMS

# From this many programs on, fewer are launched, each with about `_PROGRAM_ELEMENTS` numbers of several rows.
_MANY_PROGRAMS: Final = 1024
_PROGRAM_ELEMENTS: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RouteIds:
    """Unsorted rows, of routes or of tokens."""

    topk_ids: torch.Tensor  # [T, K] int32, contiguous: ids outside [0, num_experts) belong to no expert
    expert_map: torch.Tensor | None  # [num_experts] int32, local expert or -1; None: identity
    num_experts: int  # number of ids
    num_local_experts: int  # E


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
    """A row's local expert, the largest if it is routed to several; -1 if there is none."""
    choices = tl.arange(0, BLOCK_ROUTES)  # [BLOCK_ROUTES]
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
    largest = tl.zeros([BLOCK], dtype=tl.int32)  # bits, which are ordered as magnitudes are
    if rows_in_use is not None:
        num_rows = tl.load(rows_in_use)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        values = load_rows(x, topk_weights, row + tl.zeros([1], tl.int32), None, columns, size, stride_x)  # [BLOCK]
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
    depth,
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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    in_use = rows < num_rows
    expert = tl.zeros([ROWS, 1], tl.int32)
    if topk_ids is not None:
        routes = tl.where(in_use, rows, num_routes)
        expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
        in_use = in_use & (expert >= 0)
    if sorted_routes is not None:
        expert = tl.load(route_expert + tl.load(sorted_routes + rows, mask=in_use, other=0), mask=in_use, other=0)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    values = load_rows(x, topk_weights, rows // SOURCE, in_use, columns, size, stride_x)  # [ROWS, BLOCK]
    DTYPE: tl.constexpr = q.dtype.element_ty
    rows = rows.to(tl.int64)
    if GROUP:
        if global_scales is not None:
            if static_scale is not None:
                global_scale = tl.load(static_scale + expert * stride_static, mask=in_use, other=1.0)
            else:
                # Computed from a whole row, which one program has.
                bits = tl.expand_dims(amax_bits(values, 1), 1)  # [ROWS, 1]
                global_scale, _ = scale_of_bits(bits, MAX_CODE * 448.0, False)
            tl.store(global_scales + rows, global_scale, mask=in_use & (tl.program_id(1) == 0))
            codes, stored = quantize_e2m1(values, global_scale, GROUP)  # [ROWS, BLOCK / 2], [ROWS, BLOCK / GROUP]
        else:
            # [ROWS, BLOCK], [ROWS, BLOCK / GROUP]
            codes, stored = quantize_tile(values, DTYPE, GROUP, MIN_CODE, MAX_CODE, E8M0)
            stored = stored.to(scales.dtype.element_ty)
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]  # [1, BLOCK / GROUP]
        tl.store(scales + rows * stride_scales + groups, stored, mask=in_use & (groups < depth // GROUP))
    else:
        if static_scale is not None:
            # A real division: the quotient may be of any size, which `divide` does not allow.
            stored = tl.load(static_scale + expert * stride_static, mask=in_use, other=1.0)  # [ROWS, 1]
            values = tl.div_rn(values, tl.broadcast_to(stored, (ROWS, BLOCK)))
        else:
            if amax is not None:
                bits = tl.max(tl.load(amax + tl.arange(0, NUM_AMAX)), 0) + tl.zeros([ROWS, 1], tl.int32)  # [ROWS, 1]
            else:
                bits = tl.expand_dims(amax_bits(values, 1), 1)  # [ROWS, 1]
            scale, stored = scale_of_bits(bits, MAX_CODE, E8M0)
            values = divide(values, scale)
        codes = encode(values, DTYPE, MIN_CODE, MAX_CODE)  # [ROWS, BLOCK]
        tl.store(scales + rows * stride_scales, stored.to(scales.dtype.element_ty), mask=in_use)
    if global_scales is not None:
        pairs = first // 2 + tl.arange(0, BLOCK // 2)[None, :]  # [1, BLOCK / 2]
        tl.store(q + rows * stride_q + pairs, codes, mask=in_use & (pairs < depth // 2))
    else:
        tl.store(q + rows * stride_q + columns, codes, mask=in_use & (columns < depth))
    if INDEPENDENT:
        # Later kernels assume that the previous one has ended too.
        wait_for_previous(OVERLAP)


def quantize_rows(
    out: QuantizedRows,
    x: torch.Tensor,
    quantizer: Quantizer,
    routes: RoutePlan | RouteIds,
    *,
    topk_weights: torch.Tensor | None = None,
    independent: bool = False,
    overlap: bool = False,
) -> None:
    """Quantizes rows: one launch, two where one scale spans them.

    Args:
        out: overwritten. It has a row for each row of `x`, or K times as many, one for each route, as is necessary
            where scales differ between experts.
        x: [R, K] bf16, fp16 or fp32, rows contiguous; [R / top_k, K] where the rows of `out` are routes of tokens.
        quantizer: format and scales.
        routes: what the rows of `x` or `out` are: a plan if they are sorted, else the choices of tokens, [R, choices]
            if rows are tokens. Rows that are not in use may hold anything; those of sorted and of single routes are
            skipped.
        topk_weights: [R, 1] fp32, contiguous: rows are first multiplied by them and rounded to their dtype; or None.
        independent: whether the previous kernel, if there is one, writes nothing that is read here and accesses
            nothing that is written here, and no kernel before it still runs.
        overlap: whether to start while the previous kernel, which may be the one that writes `x`, still runs.
    """
    quantizer.check(out, x)
    fmt, static_scale, amax = quantizer.fmt, quantizer.static_scale, quantizer.amax
    num_rows, depth, size = out.q.shape[0], out.depth, x.shape[1]
    assert num_rows % x.shape[0] == 0
    topk_ids = expert_map = route_expert = sorted_routes = rows_in_use = None
    num_routes = num_experts = num_local_experts = 0
    routes_per_row = 1
    if isinstance(routes, RoutePlan):
        rows_in_use = routes.expert_offsets[-1:]
        if quantizer.by_expert:
            route_expert, sorted_routes = routes.route_expert, routes.sorted_routes
    else:
        topk_ids, expert_map = routes.topk_ids, routes.expert_map
        num_routes, num_experts, num_local_experts = topk_ids.numel(), routes.num_experts, routes.num_local_experts
        routes_per_row = num_routes // num_rows
    assert not quantizer.by_expert or routes_per_row == 1, "scales of experts need single routes"
    block = quantizer.columns_of_program(depth)
    num_blocks = triton.cdiv(depth, block)
    # Many small programs take longer to start than to run.
    several = max(1, _PROGRAM_ELEMENTS // block) if num_rows * num_blocks >= _MANY_PROGRAMS else 1
    if amax is not None:
        find_amax(amax, x, routes, num_rows, topk_weights, overlap=overlap)
    if routes_per_row > 1:
        # A token with several routes is quantized whether or not any of its experts is local.
        topk_ids = expert_map = None
    launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, several), num_blocks),
        out.q,
        out.scale,
        out.global_scale,
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
        depth,
        x.stride(0),
        out.q.stride(0),
        out.scale.stride(0),
        int(quantizer.by_expert),
        SOURCE=num_rows // x.shape[0],
        **fmt.constants,
        E8M0=fmt.e8m0,
        NUM_AMAX=AMAX_PROGRAMS,
        ROWS=several,
        BLOCK=block,
        INDEPENDENT=independent and amax is None,
        num_warps=min(8, max(1, several * block // 512)),
        **overlapping(overlap),
    )


def find_amax(
    amax: torch.Tensor,
    x: torch.Tensor,
    routes: RoutePlan | RouteIds,
    num_rows: int,
    topk_weights: torch.Tensor | None = None,
    *,
    overlap: bool = False,
) -> None:
    """Writes the largest magnitude that each program found in the rows in use; arguments as for `quantize_rows`.

    Args:
        amax: [AMAX_PROGRAMS] int32, overwritten: bits of fp32 magnitudes.
    """
    assert amax.numel() == AMAX_PROGRAMS and x.stride(1) == 1
    ids = None if isinstance(routes, RoutePlan) else routes
    routes_per_row = 1 if ids is None else ids.topk_ids.numel() // num_rows
    block = triton.next_power_of_2(x.shape[1])
    launch(
        _amax_rows_kernel,
        (AMAX_PROGRAMS,),
        amax,
        x,
        topk_weights,
        None if ids is None else ids.topk_ids,
        None if ids is None else ids.expert_map,
        routes.expert_offsets[-1:] if isinstance(routes, RoutePlan) else None,
        num_rows,
        0 if ids is None else ids.topk_ids.numel(),
        0 if ids is None else ids.num_experts,
        0 if ids is None else ids.num_local_experts,
        x.shape[1],
        x.stride(0),
        ROUTES_PER_ROW=routes_per_row,
        BLOCK_ROUTES=triton.next_power_of_2(routes_per_row),
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **overlapping(overlap),
    )
