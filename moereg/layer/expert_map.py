"""Resolves which experts a rank holds: the map from global to local expert ids."""

from __future__ import annotations

import torch

from moereg.errors import ArgumentError
from moereg.layer.checks import check_expert_map, check_tensor
from moereg.spec.problem import MoEProblem

__all__ = ["resolve_expert_map"]


@torch.inference_mode(False)  # Its owner may write it outside of inference mode.
def resolve_expert_map(
    problem: MoEProblem, ep_rank: int, expert_map: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Resolves a rank's expert map.

    Args:
        problem: The layer as this rank sees it.
        ep_rank: Which slice of the experts the rank holds, if placement is `contiguous`.
        expert_map: The caller's map, if placement is `map`: [num_experts] int32.
        device: The weights' device.

    Returns:
        [num_experts] int32 on the device, local expert or -1; the caller's tensor if given, None if all experts are
        local.

    Raises:
        ArgumentError: The map or the rank does not belong to the problem.
    """
    if problem.placement == "contiguous":
        if expert_map is not None:
            raise ArgumentError("expert_map needs placement='map' in the problem, got placement='contiguous'")
        return _slice_of(problem, ep_rank, device)
    return _check_given(problem, expert_map, device)


def _check_given(problem: MoEProblem, expert_map: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if expert_map is None:
        raise ArgumentError("placement 'map' needs expert_map, int32 [num_experts] with the local expert or -1")
    check_tensor("expert_map", expert_map, (problem.num_experts,), (torch.int32,), device)
    if device.type != "meta":
        check_expert_map(expert_map, problem)
    return expert_map


def _slice_of(problem: MoEProblem, ep_rank: int, device: torch.device) -> torch.Tensor | None:
    if not problem.is_expert_parallel:
        if ep_rank != 0:
            raise ArgumentError(f"ep_rank must be 0 where all experts are local, got {ep_rank}")
        return None
    if ep_rank and problem.num_experts % problem.num_local_experts:
        raise ArgumentError(
            f"contiguous placement needs num_experts % num_local_experts == 0, got {problem.num_experts} and "
            f"{problem.num_local_experts}; give uneven ranks placement='map' and an expert_map"
        )
    first = ep_rank * problem.num_local_experts
    if ep_rank < 0 or first + problem.num_local_experts > problem.num_experts:
        raise ArgumentError(
            f"ep_rank must be in [0, {problem.num_experts // problem.num_local_experts}) for "
            f"{problem.num_local_experts} of {problem.num_experts} experts a rank, got {ep_rank}"
        )
    local = torch.arange(problem.num_experts, dtype=torch.int32, device=device) - first
    return torch.where((local >= 0) & (local < problem.num_local_experts), local, -1)
