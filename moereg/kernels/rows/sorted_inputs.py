"""Inputs of each sorted row, in Triton: for products that gather rows themselves and multiply each by a weight.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, S rows that sorted rows are gathered from:
the tokens, or a row for each route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan

_BLOCK: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class SortedInputs:
    """One number per sorted row. Rows that are not in use gather row 0, with weight and scale 0."""

    source: torch.Tensor  # [N] int32, the row to gather from
    weight: torch.Tensor  # [N] fp32, multiplies the result
    scale: torch.Tensor | None = None  # [N] fp32, scale of the gathered codes; None if rows are not quantized


@triton.jit(do_not_specialize=["num_routes"])
def _sorted_inputs_kernel(
    source,
    weight,
    scale,
    sorted_routes,
    num_rows_in_use,
    topk_weights,
    source_scale,
    num_routes,
    ROUTES_PER_SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_use = rows < tl.load(num_rows_in_use)
    route = tl.load(sorted_routes + rows, mask=in_use, other=0)  # [BLOCK]
    found = route // ROUTES_PER_SOURCE  # [BLOCK]
    exists = rows < num_routes
    tl.store(source + rows, found, mask=exists)
    if topk_weights is not None:
        value = tl.load(topk_weights + route, mask=in_use, other=0.0)  # [BLOCK]
    else:
        value = tl.where(in_use, 1.0, 0.0)  # [BLOCK]
    tl.store(weight + rows, value, mask=exists)
    if scale is not None:
        tl.store(scale + rows, tl.load(source_scale + found, mask=in_use, other=0.0), mask=exists)


def sorted_inputs(
    out: SortedInputs,
    plan: RoutePlan,
    topk_weights: torch.Tensor | None,
    routes_per_source: int,
    source_scale: torch.Tensor | None = None,
) -> None:
    """Writes the inputs of each sorted row of the plan to `out`.

    Args:
        topk_weights: [T, K] fp32, contiguous; None: all weights are 1.
        routes_per_source: K if rows are gathered from tokens, 1 if there is a row for each route.
        source_scale: [S] fp32, contiguous; given with `out.scale`.
    """
    num_routes = out.source.numel()
    assert num_routes == plan.sorted_routes.numel() == out.weight.numel()
    assert (out.scale is None) == (source_scale is None)
    launch(
        _sorted_inputs_kernel,
        (triton.cdiv(num_routes, _BLOCK),),
        *(out.source, out.weight, out.scale, plan.sorted_routes, plan.expert_offsets[-1:], topk_weights),
        source_scale,
        num_routes,
        ROUTES_PER_SOURCE=routes_per_source,
        BLOCK=_BLOCK,
        num_warps=4,
    )
