"""Copies rows that arrived as codes to where products read them, in Triton: nothing is rounded here.

Sizes: T tokens, K choices per token, H hidden, `H_pad` columns of the codes, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.operands import QuantizedRows
from moereg.kernels.sizes import CODE_PAD, GROUPED_BLOCK


# The stride between groups is the number of routes, which may or may not be a multiple of 16: not worth a variant.
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
    # Columns that only fill the row hold zeros, whose scale is one.
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
    """Copies codes and scales of each token, filled up with zeros, to its row or to the sorted rows of its routes.

    Args:
        out: [T, H_pad] codes and scales [T, G] of any strides, or [T * K, H_pad] and [T * K, G]: overwritten, up to the
            last valid row where rows are sorted.
        rows: [T, H] codes of 8 bits, rows contiguous, and their scales, groups contiguous; H <= H_pad.
        route_row: [T * K] int32, the row of a route, negative where it adds nothing; None: row t is token t.
        reads_early: whether tokens are read before the kernel in front has ended; no kernel of the call may have
            written `rows`.
        overlap: whether to start while the kernel in front, which may be the one that writes `route_row`, still runs.
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
        # As bytes: no kernel computes with them.
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
