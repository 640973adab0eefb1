"""The truth that kernels are compared with: experts one by one, in fp32 (fp64 where asked), nothing fused."""

from __future__ import annotations

import torch

from moereg.problem import MoEProblem
from moereg.weights import ExpertWeights

__all__ = ["reference_experts", "relative_error"]


def reference_experts(
    problem: MoEProblem,
    weights: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Runs the layer without rounding anything but the inputs it is given.

    Rounding points of the scheme `unquantized`: none; hidden states and weights are upcast, the intermediate and the
    weighted sum stay in `dtype`.

    Args:
        problem: The layer.
        weights: Canonical.
        hidden_states: [T,H].
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int, global experts; ids outside [0, num_experts) or not mapped add nothing.
        expert_map: [num_experts] int32, local expert or -1; None where local experts are the first ones.
        dtype: torch.float32 or torch.float64.

    Returns:
        [T,H] in `dtype`, on the inputs' device. Synchronises the device.

    Raises:
        NotImplementedError: The scheme is quantised; its reference comes with the scheme.
    """
    if weights.scheme.weight is not None:
        raise NotImplementedError(f"no reference for scheme {weights.scheme.name} in this version")
    tokens = hidden_states.to(dtype)
    out = torch.zeros(len(tokens), problem.hidden_size, dtype=dtype, device=tokens.device)
    local_ids = _local_ids(problem, topk_ids, expert_map)
    for expert in range(problem.num_local_experts):
        token, slot = torch.nonzero(local_ids == expert, as_tuple=True)
        if not len(token):
            continue
        route_weight = topk_weights[token, slot].to(dtype).unsqueeze(1)
        x = tokens[token]
        if problem.apply_router_weight_on_input:
            x = x * route_weight
        gemm1 = x @ weights.w13[expert].to(dtype).T
        if weights.w13_bias is not None:
            gemm1 += weights.w13_bias[expert].to(dtype)
        gemm2 = problem.activation(gemm1) @ weights.w2[expert].to(dtype).T
        if weights.w2_bias is not None:
            gemm2 += weights.w2_bias[expert].to(dtype)
        out.index_add_(0, token, gemm2 if problem.apply_router_weight_on_input else gemm2 * route_weight)
    return out


def _local_ids(problem: MoEProblem, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < problem.num_experts)
    if expert_map is not None:
        local = expert_map.long()[ids.clamp(0, problem.num_experts - 1)]
    else:
        local = torch.where(ids < problem.num_local_experts, ids, -1)
    return torch.where(known, local, -1)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in fp64; NaN where `out` holds one, 0 where both are zero."""
    difference = torch.linalg.vector_norm(out.double() - reference.double())
    norm = torch.linalg.vector_norm(reference.double())
    if norm == 0:
        return float(difference)
    return float(difference / norm)
