"""References of the grouped matmuls: torch, in fp32."""

from __future__ import annotations

import itertools
import math

import torch

from moereg.kernels.gemm.activation import activate_reference
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.rows.plan import RoutePlan


def gate_up_reference(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """The result of `gate_up_gemm`, in torch and fp32, expert by expert; synchronizes.

    Args:
        hidden_states: as for `gate_up_gemm`, and so on.

    Returns:
        [valid routes, I_pad] fp32, rows in sorted order, not rounded.
    """
    offsets = plan.expert_offsets.tolist()
    num_columns = w13.shape[1]
    gated, activation, alpha, limit = epilogue.gated, epilogue.activation, epilogue.alpha, epilogue.limit
    out = hidden_states.new_empty(offsets[-1], num_columns // (2 if gated else 1), dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = hidden_states[routes // top_k].float() @ w13[expert, :, : hidden_states.shape[1]].float().T
        if topk_weights is not None and apply_router_weight_on_input:
            x *= topk_weights.flatten()[routes, None]
        if epilogue.bias is not None:
            x += epilogue.bias[expert].float()
        if gated:
            gate, up = x[:, 0::2], x[:, 1::2]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[row:end] = activate_reference(gate, activation, alpha) * (up + epilogue.beta)
        else:
            out[row:end] = activate_reference(x, activation, alpha)
    return out


def down_reference(
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: RoutePlan,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """The result of `down_gemm`, in torch and fp32, expert by expert; synchronizes.

    Args:
        intermediate: as for `down_gemm`, and so on.

    Returns:
        [N, H] fp32 by route, not rounded; NaN where a route is not valid.
    """
    offsets = plan.expert_offsets.tolist()
    out = intermediate.new_full((plan.route_expert.numel(), w2.shape[1]), math.nan, dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = intermediate[row:end].float() @ w2[expert].float().T
        if bias is not None:
            x += bias[expert].float()
        if topk_weights is not None and not apply_router_weight_on_input:
            x *= topk_weights.flatten()[routes, None]
        out[routes] = x
    return out
