"""No communication, tokens as they come: [T,H]."""

from __future__ import annotations

import torch

from moereg.experts import ExpertInputs
from moereg.prepare_finalize.base import Prepared, PrepareFinalize, weighted_sum
from moereg.spec.problem import MoEProblem


class StandardPrepareFinalize(PrepareFinalize):
    """Hands the caller's tensors to the experts unchanged."""

    name = "standard"
    activation_format = "standard"

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        return Prepared(
            ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map), hidden_states.shape[0]
        )

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        from moereg.kernels.plain.device import local_expert_ids  # Loads torch, which choosing does without.

        inputs = prepared.inputs
        local = local_expert_ids(inputs.topk_ids, problem.num_local_experts, inputs.expert_map)
        weights = None if problem.apply_router_weight_on_input else inputs.topk_weights
        weighted_sum(out, expert_out, weights, local >= 0)
