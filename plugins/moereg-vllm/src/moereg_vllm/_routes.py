"""Routes as vLLM's kernels read them: none without a local expert, and routing weights that the kernel applies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from moereg.author import ExpertInputs, MoEProblem, local_expert_ids

__all__ = ["Routes", "add_routed_bias", "expert_table", "local_routes", "mapped_routes", "sum_routes"]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The routing of one call.

    Attributes:
        hidden_states: [T,H]; scaled by the routing weight where that is on the input.
        topk_weights: [T,K] fp32 to multiply outputs with; 0 where a route has no local expert.
        topk_ids: [T,K] int32.
        expert_map: Where the kernel has to look up ids: [num_experts] int32, local expert or -1.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Ids that the map knows; -1 without one, which vLLM reads as the local experts."""
        return -1 if self.expert_map is None else self.expert_map.shape[0]


def expert_table(problem: MoEProblem, device: torch.device) -> torch.Tensor:
    """The map of `mapped_routes`: local experts by themselves, then -1 for at least one id that has none.

    It has as many ids as the layer has experts, since vLLM estimates the tokens of a rank from that.
    """
    local = problem.num_local_experts
    table = torch.full((max(problem.num_experts, local + 1),), -1, dtype=torch.int32, device=device)
    table[:local] = torch.arange(local, dtype=torch.int32, device=device)
    return table


def mapped_routes(inputs: ExpertInputs, problem: MoEProblem, table: torch.Tensor) -> Routes:
    """For kernels that take a map and leave out what it maps to -1, but trust every id.

    Where all experts are local, such routes go to expert 0 with weight 0 instead, and there is no map: vLLM is faster
    without one.

    Args:
        inputs: Of `apply`.
        problem: The layer.
        table: `expert_table`.
    """
    if inputs.expert_map is None:
        return _routes(inputs, problem, without_expert=0)
    return _routes(inputs, problem, without_expert=problem.num_local_experts, expert_map=table)


def sum_routes(out: torch.Tensor, rows: torch.Tensor, routes: Routes, num_local: int) -> None:
    """Sums the outputs of each token's experts, each times its routing weight, in fp32: one rounding.

    Args:
        out: [T,H]; overwritten.
        rows: [T,K,H]; those of routes that have no local expert may hold anything.
        routes: Of `mapped_routes`.
        num_local: Local experts; an id of as much or more is no expert.
    """
    num_tokens, top_k, hidden = rows.shape
    if not rows.is_cuda:
        known = (routes.topk_ids < num_local).unsqueeze(-1)
        out.copy_((torch.where(known, rows.float(), 0.0) * routes.topk_weights.unsqueeze(-1)).sum(1))
        return
    block = 1024
    _device_code().weighted_sum[(num_tokens, -(-hidden // block))](
        rows, routes.topk_weights, routes.topk_ids, out, num_local, hidden, top_k, BLOCK=block
    )


def add_routed_bias(out: torch.Tensor, bias: torch.Tensor, routes: Routes) -> None:
    """Adds to each token the biases of its experts, each times its routing weight.

    Args:
        out: [T,H]; changed in place.
        bias: [E,H] of the dtype of `out`, E local experts.
        routes: Of `mapped_routes`; an id of E or more is no expert.
    """
    num_experts = bias.shape[0]
    # One more column takes the routes that have no expert; their weight is 0.
    ids = routes.topk_ids.clamp(max=num_experts).long()
    weights = routes.topk_weights.new_zeros((len(out), num_experts + 1)).scatter_add_(1, ids, routes.topk_weights)
    out.addmm_(weights[:, :num_experts].to(out.dtype), bias)


def local_routes(inputs: ExpertInputs, problem: MoEProblem) -> Routes:
    """For kernels that take local experts and leave out -1."""
    return _routes(inputs, problem, without_expert=-1)


def _routes(
    inputs: ExpertInputs, problem: MoEProblem, without_expert: int, expert_map: torch.Tensor | None = None
) -> Routes:
    num_local = problem.num_local_experts
    on_input = problem.apply_router_weight_on_input
    # A route of weight 0 and a route without expert differ where biases are: -1 tells them apart.
    marker = -1 if on_input else without_expert
    if inputs.topk_ids.is_cuda:
        ids, weights = _localized(inputs, num_local, marker)
    else:
        local = local_expert_ids(inputs.topk_ids, num_local, inputs.expert_map)
        ids = torch.where(local < 0, marker, local).int()
        weights = torch.where(local < 0, 0.0, inputs.topk_weights)
    if not on_input:
        return Routes(inputs.hidden_states, weights, ids, expert_map)
    hidden_states = (inputs.hidden_states * weights).to(inputs.hidden_states.dtype)
    found = ids >= 0
    return Routes(hidden_states, found.float(), torch.where(found, ids, without_expert), expert_map)


def _localized(inputs: ExpertInputs, num_local: int, without_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the torch operations for the CPU, in one launch."""
    ids, weights = torch.empty_like(inputs.topk_ids), torch.empty_like(inputs.topk_weights)
    count, block = ids.numel(), 1024
    expert_map = inputs.expert_map
    known = num_local if expert_map is None else expert_map.shape[0]
    _device_code().localize[(-(-count // block),)](
        inputs.topk_ids,
        inputs.topk_weights,
        expert_map,
        ids,
        weights,
        count,
        known,
        num_local,
        without_expert,
        HAS_MAP=expert_map is not None,
        BLOCK=block,
    )
    return ids, weights


@functools.cache
def _device_code() -> Any:
    from moereg_vllm import _localize

    return _localize
