"""Rounds rows to the values of a scheme's codes, in 16 bits, in Triton, bit for bit as `moereg.quantize` does.

Products of 16-bit numbers then emulate a scheme whose codes no hardware multiplies. A small float times the scale of
its group, a power of two or a float8_e4m3fn, is again a 16-bit float. Its product with a global scale may not be, so
that scale multiplies the row's product later. All arithmetic is in fp32: not every device converts to small floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.codes import amax_bits, load_rows, round_groups, scale_of_bits, scale_of_group
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GROUPED_BLOCK


@dataclass(frozen=True, slots=True)
class SmallFloats:
    """The values that rows are rounded to: small floats times the scale of their group."""

    mantissa_bits: int  # of the small floats
    smallest_normal: float  # smallest positive normal one
    max_code: float  # largest one, to which the largest magnitude of a group is mapped
    group: int  # columns that share a scale, a power of two
    global_scale: bool  # whether scales are float8_e4m3fn on top of a global one for each row; else powers of two


@triton.jit(do_not_specialize=["max_tokens"])
def _requantize_rows_kernel(
    out,
    factors,
    x,
    topk_weights,
    static_scale,
    route_expert,
    sorted_routes,
    rows_in_use,
    expert_num_tokens,
    max_tokens,
    size,
    stride_x,
    stride_out,
    stride_static,
    SOURCE: tl.constexpr,
    FACTORS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    MAX_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_FACTORS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    row = tl.program_id(0)
    expert = 0
    if rows_in_use is not None:
        if row >= tl.load(rows_in_use):
            return
    if expert_num_tokens is not None:
        expert = row // max_tokens
        if row % max_tokens >= tl.load(expert_num_tokens + expert):
            return
    if route_expert is not None:
        route = row
        if sorted_routes is not None:
            route = tl.load(sorted_routes + row)
        expert = tl.load(route_expert + route)
        if expert < 0:
            return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    values = load_rows(x, topk_weights, row // SOURCE + tl.zeros([1, 1], tl.int32), None, columns, size, stride_x)
    groups = tl.reshape(values, (1, BLOCK // GROUP, GROUP))
    group_bits = amax_bits(groups, 2)  # [1, BLOCK / GROUP]
    if GLOBAL:
        if static_scale is not None:
            global_scale = tl.load(static_scale + expert * stride_static)
        else:
            global_scale, _ = scale_of_bits(tl.max(amax_bits(values, 1), 0), MAX_CODE * 448.0, False)
        if tl.program_id(1) == 0:
            copies = tl.arange(0, BLOCK_FACTORS)
            tl.store(factors + row * FACTORS + copies, global_scale, mask=copies < FACTORS)
        global_scale += tl.zeros([1, 1], tl.float32)
        scale = scale_of_group(group_bits, global_scale, MAX_CODE)  # [1, BLOCK / GROUP]
        total = scale * global_scale
    else:
        scale, _ = scale_of_bits(group_bits, MAX_CODE, True)  # [1, BLOCK / GROUP]
        total = scale
    codes = round_groups(groups, total, MANTISSA_BITS, SMALLEST_NORMAL, MAX_CODE)  # [1, BLOCK / GROUP, GROUP]
    restored = tl.reshape(codes * tl.expand_dims(scale, 2), (1, BLOCK))
    tl.store(out + row.to(tl.int64) * stride_out + columns, restored.to(out.dtype.element_ty), mask=columns < size)


def requantize_rows(
    out: torch.Tensor,
    x: torch.Tensor,
    grid: SmallFloats,
    *,
    factors: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    route_expert: torch.Tensor | None = None,
    plan: RoutePlan | None = None,
    expert_num_tokens: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Rounds rows and writes them without their global scales, in one launch.

    Rows of `out` are routes if `route_expert` is given, sorted routes if `plan` is, rows of the batched format if
    `expert_num_tokens` is, else tokens; at most one of these is given. Rows not in use are left as they are.

    Args:
        out: [R, K] bf16 or fp16, rows contiguous, the dtype of `x`: overwritten; may be `x`.
        x: [R, K] bf16 or fp16, rows contiguous; [R / top_k, K] where `out` has a row for each route of a token.
        grid: the numbers to round to.
        factors: fp32, contiguous, overwritten with each row's global scale, if the grid has them: [R], or [R * n] with
            n copies for each row.
        static_scale: fp32 [1] or [E], static global scales; None: each row has its own, computed from it.
        route_expert: [R] int32, local expert of each row, or negative.
        plan: sorted routes, in whose order the rows are.
        expert_num_tokens: [E] int32, valid rows of each expert.
        topk_weights: [R, 1] fp32, contiguous: rows are first multiplied by them and rounded to their dtype; or None.
        overlap: whether to start while the previous kernel, which may be the one that writes `x`, still runs.
    """
    num_rows, size = out.shape
    assert x.shape[1] == size and x.stride(1) == out.stride(1) == 1 and num_rows % x.shape[0] == 0
    assert x.dtype == out.dtype and x.element_size() == 2, "rounded numbers fit the 16-bit dtype that they had"
    assert grid.global_scale == (factors is not None) and (factors is not None or static_scale is None)
    assert sum(given is not None for given in (route_expert, plan, expert_num_tokens)) <= 1
    num_factors = 1 if factors is None else factors.numel() // num_rows
    assert factors is None or (factors.numel() % num_rows == 0 and factors.is_contiguous())
    whole_rows = grid.global_scale and static_scale is None
    block = triton.next_power_of_2(max(size, grid.group))
    if not whole_rows:
        block = min(block, GROUPED_BLOCK)
    has_many = static_scale is not None and static_scale.numel() > 1
    sorted_routes = rows_in_use = None
    if plan is not None:
        rows_in_use = plan.expert_offsets[-1:]
        if has_many:
            route_expert, sorted_routes = plan.route_expert, plan.sorted_routes
    max_tokens = 0 if expert_num_tokens is None else num_rows // expert_num_tokens.numel()
    launch(
        _requantize_rows_kernel,
        (num_rows, triton.cdiv(size, block)),
        *(out, factors, x, topk_weights, static_scale, route_expert, sorted_routes, rows_in_use),
        *(expert_num_tokens, max_tokens, size, x.stride(0), out.stride(0), int(has_many)),
        SOURCE=num_rows // x.shape[0],
        FACTORS=num_factors,
        MANTISSA_BITS=grid.mantissa_bits,
        SMALLEST_NORMAL=grid.smallest_normal,
        MAX_CODE=grid.max_code,
        GROUP=grid.group,
        GLOBAL=grid.global_scale,
        BLOCK=block,
        BLOCK_FACTORS=triton.next_power_of_2(num_factors),
        num_warps=min(16, max(1, block // 512)),
        **overlapping(overlap),
    )
