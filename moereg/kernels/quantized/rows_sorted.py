"""Quantizes tokens straight to the sorted rows of their routes, or copies tokens that arrived quantized, in Triton.

See `rows`. Copying rounds nothing.

Sizes: T tokens, K choices per token, H hidden, `H_pad` columns of the codes, in code `depth`, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.codes import (
    amax_bits,
    divide,
    divide_by_given,
    encode,
    load_rows,
    quantize_tile,
    scale_of_bits,
)
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer
from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD, GROUPED_BLOCK


# The stride between groups is the number of routes; whether it is a multiple of 16 is not worth a variant.
@triton.jit(do_not_specialize=["stride_group_scale"])
def _quantize_to_sorted_kernel(
    q,
    scales,
    x,
    topk_weights,
    static_scale,
    amax,
    route_row,
    route_expert,
    size,
    depth,
    stride_x,
    stride_q,
    stride_row_scale,
    stride_group_scale,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_CODE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    NUM_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if not EARLY:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
    # By token and not by row, so that a token is read and quantized once.
    token = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    values = load_rows(x, topk_weights, token + tl.zeros([1, 1], tl.int32), None, columns, size, stride_x)  # [1, BLOCK]
    DTYPE: tl.constexpr = q.dtype.element_ty
    if GROUP:
        codes, stored = quantize_tile(values, DTYPE, GROUP, MIN_CODE, MAX_CODE, False)  # [1, BLOCK], [1, BLOCK / GROUP]
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :].to(tl.int64)  # [1, BLOCK / GROUP]
        in_row = groups < depth // GROUP
    else:
        groups = tl.arange(0, 1).to(tl.int64)
        in_row = groups == 0
        if static_scale is None:
            if amax is not None:
                bits = tl.max(tl.load(amax + tl.arange(0, NUM_AMAX)), 0) + tl.zeros([1], tl.int32)  # [1]
            else:
                bits = amax_bits(values, 1)  # [1]
            scale, stored = scale_of_bits(bits, MAX_CODE, False)  # [1] each
            codes = encode(divide(values, scale[:, None]), DTYPE, MIN_CODE, MAX_CODE)  # [1, BLOCK]
        elif route_expert is None:
            given = tl.load(static_scale)
            codes = encode(divide_by_given(values, given), DTYPE, MIN_CODE, MAX_CODE)  # [1, BLOCK]
            stored = given + tl.zeros([1], tl.float32)  # [1]
    if EARLY:
        # Tokens are older than the layer's first kernel; rows of routes are not.
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
    for k in tl.static_range(TOP_K):
        row = tl.load(route_row + token * TOP_K + k).to(tl.int64)
        if route_expert is not None:
            # A token's experts may have different scales.
            expert = tl.load(route_expert + token * TOP_K + k)
            given = tl.load(static_scale + expert, mask=expert >= 0, other=1.0)
            codes = encode(divide_by_given(values, given), DTYPE, MIN_CODE, MAX_CODE)  # [1, BLOCK]
            stored = given + tl.zeros([1], tl.float32)  # [1]
        tl.store(q + row * stride_q + columns, codes, mask=(columns < depth) & (row >= 0))
        tl.store(scales + row * stride_row_scale + groups * stride_group_scale, stored, mask=in_row & (row >= 0))


def quantize_to_sorted_rows(
    out: QuantizedRows,
    x: torch.Tensor,
    quantizer: Quantizer,
    route_row: torch.Tensor,
    *,
    route_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    encodes_early: bool = False,
    overlap: bool = False,
) -> None:
    """Writes codes and scales of each token to the sorted rows of its routes.

    Args:
        out: [T * K, H_pad] codes and fp32 scales [T * K, G] of any strides: overwritten up to the last valid row.
        x: [T, H] bf16 or fp16, rows contiguous.
        quantizer: with fp32 scales; where one dynamic scale spans all rows, `find_amax` has filled its `amax`.
        route_row: [T * K] int32, each route's row, negative if it adds nothing.
        route_expert: [T * K] int32, each route's local expert, negative likewise; read where experts' scales differ.
        topk_weights: [T, 1] fp32, contiguous: tokens are first multiplied by them and rounded; or None.
        encodes_early: whether tokens are read and quantized before the previous kernel has ended; no kernel of the call
            may have written `x` or `topk_weights`.
        overlap: whether to start while the kernel that writes `route_row` still runs.
    """
    fmt = quantizer.fmt
    num_tokens, size = x.shape
    depth = out.q.shape[1]
    assert out.q.shape[0] == route_row.numel() and route_row.numel() % num_tokens == 0
    assert depth % CODE_PAD == 0 and size <= depth
    assert x.stride(1) == out.q.stride(1) == 1
    assert not (fmt.e8m0 or fmt.global_scale or (fmt.group and (fmt.static or fmt.spans_rows)))
    assert fmt.static == (quantizer.static_scale is not None) and fmt.spans_rows == (quantizer.amax is not None)
    assert route_expert is not None or not quantizer.by_expert
    block = triton.next_power_of_2(min(GROUPED_BLOCK, depth) if fmt.group else depth)
    launch(
        _quantize_to_sorted_kernel,
        (num_tokens, triton.cdiv(depth, block)),
        *(out.q, out.scale, x, topk_weights, quantizer.static_scale, quantizer.amax, route_row),
        route_expert if quantizer.by_expert else None,
        *(size, depth, x.stride(0), out.q.stride(0), out.scale.stride(0), out.scale.stride(1)),
        TOP_K=route_row.numel() // num_tokens,
        **fmt.constants,
        NUM_AMAX=AMAX_PROGRAMS,
        BLOCK=block,
        EARLY=encodes_early and overlap,
        num_warps=min(8, max(1, block // 512)),
        **overlapping(overlap),
    )


# The stride between groups is the number of routes; whether it is a multiple of 16 is not worth a variant.
@triton.jit(do_not_specialize=["stride_group_scale"])
def _copy_coded_rows_kernel(
    q,
    scales,
    codes,
    code_scales,
    route_row,
    size,
    depth,
    num_groups,
    stride_codes,
    stride_code_scales,
    stride_q,
    stride_row_scale,
    stride_group_scale,
    ROUTES_PER_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if not EARLY:
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
    # By token and not by row, so that a token is read once.
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)  # [BLOCK]
    values = tl.load(codes + token * stride_codes + columns, mask=columns < size, other=0)
    if GROUP:
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)  # [BLOCK / GROUP]
        in_row = groups < depth // GROUP
    else:
        groups = tl.arange(0, 1)
        in_row = (groups == 0) & (first == 0)
    stored = tl.load(code_scales + token * stride_code_scales + groups, mask=in_row & (groups < num_groups), other=0)
    # Padding columns hold zeros, whose scale is one.
    stored = tl.where(groups < num_groups, stored, PAD_SCALE).to(scales.dtype.element_ty)
    if EARLY:
        # Tokens are older than the layer's first kernel; rows of routes are not.
        wait_for_previous(OVERLAP)
        release_next(OVERLAP)
    for k in tl.static_range(ROUTES_PER_ROW):
        if route_row is not None:
            row = tl.load(route_row + token * ROUTES_PER_ROW + k).to(tl.int64)
        else:
            row = token
        tl.store(q + row * stride_q + columns, values, mask=(columns < depth) & (row >= 0))
        places = scales + row * stride_row_scale + groups.to(tl.int64) * stride_group_scale
        tl.store(places, stored, mask=in_row & (row >= 0))


def copy_coded_rows(
    out: QuantizedRows,
    rows: QuantizedRows,
    route_row: torch.Tensor | None = None,
    *,
    reads_early: bool = False,
    overlap: bool = False,
) -> None:
    """Copies each token's codes and scales, padded with zeros, to its row or to the sorted rows of its routes.

    Args:
        out: [T, H_pad] codes and scales [T, G] of any strides, or [T * K, H_pad] and [T * K, G]: overwritten, up to the
            last valid row where rows are sorted.
        rows: [T, H] codes of 8 bits, rows contiguous, and their scales, groups contiguous; H <= H_pad.
        route_row: [T * K] int32, each route's row, negative if it adds nothing; None: row t is token t.
        reads_early: whether tokens are read before the previous kernel has ended; no kernel of the call may have
            written `rows`.
        overlap: whether to start while the previous kernel, which may be the one that writes `route_row`, still runs.
    """
    (num_tokens, size), depth = rows.q.shape, out.depth
    num_routes = num_tokens if route_row is None else route_row.numel()
    assert out.q.shape[0] == num_routes and num_routes % num_tokens == 0
    assert depth % CODE_PAD == 0 and size <= depth
    assert out.q.dtype == rows.q.dtype and out.q.dtype.itemsize == 1 and out.scale.dtype == rows.scale.dtype
    assert out.group == rows.group and rows.global_scale is None
    assert rows.q.stride(1) == out.q.stride(1) == 1 and (rows.scale.shape[1] == 1 or rows.scale.stride(1) == 1)
    block = triton.next_power_of_2(min(GROUPED_BLOCK, depth))
    launch(
        _copy_coded_rows_kernel,
        (num_tokens, triton.cdiv(depth, block)),
        # As bytes, since they are only copied.
        out.q.view(torch.uint8),
        out.scale,
        rows.q.view(torch.uint8),
        rows.scale,
        route_row,
        size,
        depth,
        rows.scale.shape[1],
        rows.q.stride(0),
        rows.scale.stride(0),
        out.q.stride(0),
        out.scale.stride(0),
        out.scale.stride(1),
        ROUTES_PER_ROW=num_routes // num_tokens,
        GROUP=rows.group,
        PAD_SCALE=127 if rows.scale.dtype == torch.uint8 else 1,
        BLOCK=block,
        EARLY=reads_early and overlap,
        num_warps=min(8, max(1, block // 512)),
        **overlapping(overlap),
    )
