"""Gradients of routing weights, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan

_ROUTES = 64
_COLUMNS = 64


@triton.jit(do_not_specialize=["num_routes"])
def _routing_gradients_kernel(
    grad,
    partials,
    grad_out,
    bias,
    route_row,
    route_expert,
    num_routes,
    num_partials,
    hidden_size,
    stride_grad_out,
    stride_bias,
    TOP_K: tl.constexpr,
    ROUTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    routes = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)  # [ROUTES]
    exists = routes < num_routes
    row = tl.load(route_row + routes, mask=exists, other=-1)
    # Routes that add nothing have no rows.
    valid = row >= 0
    total = tl.zeros([ROUTES], dtype=tl.float32)
    for number in range(0, num_partials):
        total += tl.load(partials + tl.cast(number, tl.int64) * num_routes + row, mask=valid, other=0.0)
    if bias is not None:
        expert = tl.load(route_expert + routes, mask=valid, other=0).to(tl.int64)
        tokens = (routes // TOP_K).to(tl.int64)
        for start in range(0, hidden_size, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)  # [COLUMNS]
            mask = valid[:, None] & (columns < hidden_size)[None, :]  # [ROUTES, COLUMNS]
            x = tl.load(grad_out + tokens[:, None] * stride_grad_out + columns[None, :], mask=mask, other=0.0)
            b = tl.load(bias + expert[:, None] * stride_bias + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(x.to(tl.float32) * b.to(tl.float32), 1)
    tl.store(grad + routes, total, mask=exists)


def routing_gradients(
    grad: torch.Tensor,
    partials: torch.Tensor,
    grad_out: torch.Tensor,
    plan: RoutePlan,
    *,
    bias: torch.Tensor | None,
) -> None:
    """Writes each route's `<grad_out[token], act @ w2[expert].T + bias>`.

    Args:
        grad: [T, K] fp32, contiguous: overwritten; zero for routes that add nothing.
        partials: [tiles, N] fp32, contiguous, from `down_input_gradients`; added in order.
        grad_out: [T, H] bf16, fp16 or fp32, rows contiguous.
        plan: the sorted routes.
        bias: of the second product, [E, H], any float dtype, rows contiguous; None: no bias.
    """
    num_routes = grad.numel()
    assert partials.shape[1] == num_routes and partials.is_contiguous() and grad.is_contiguous()
    assert grad_out.stride(1) == 1 and (bias is None or bias.stride(1) == 1)
    launch(
        _routing_gradients_kernel,
        (triton.cdiv(num_routes, _ROUTES),),
        *(grad, partials, grad_out, bias, plan.route_row, plan.route_expert),
        *(num_routes, len(partials), grad_out.shape[1], grad_out.stride(0), 0 if bias is None else bias.stride(0)),
        TOP_K=grad.shape[1],
        ROUTES=_ROUTES,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
