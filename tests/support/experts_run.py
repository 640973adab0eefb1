"""Runs an experts class on its own, between NaN, and compares with the reference."""

from __future__ import annotations

import torch

from moereg.experts import ExpertInputs, Experts
from moereg.numerics.reference import reference_experts, relative_error
from moereg.platforms import Platform
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.spec.facts import fact_reasons
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import Inputs, make_expert_map, make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights, PermutedWeights

CPU = torch.device("cpu")


def run_experts(
    experts_class: type[Experts],
    problem: MoEProblem,
    weights: ExpertWeights,
    inputs: Inputs,
    platform: Platform,
    expert_map: torch.Tensor | None = None,
    permuted: PermutedWeights | None = None,
) -> torch.Tensor:
    """Applies a class that claims the problem to NaN-filled output and workspaces."""
    assert not fact_reasons(experts_class.facts, problem)
    experts = experts_class(problem, platform)
    permuted = permuted or experts.permute_weights(weights, problem)
    assert permuted.layout in experts_class.layouts
    workspaces = [
        torch.full(shape, float("nan"), dtype=problem.torch_dtype)
        for shape in experts.workspace_shapes(problem, len(inputs.hidden_states))
    ]
    out = torch.full_like(inputs.hidden_states, float("nan"))
    call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    if problem.activation_format == "standard":
        experts.apply(out, ExpertInputs(*call, expert_map=expert_map), permuted, *workspaces)
        return out
    batches = BatchedPrepareFinalize()
    prepared = batches.prepare(*call, problem, expert_map)
    expert_out = torch.full_like(prepared.inputs.hidden_states, float("nan"))
    experts.apply(expert_out, prepared.inputs, permuted, *workspaces)
    batches.finalize(out, expert_out, prepared, problem)
    return out


def error_of(
    experts_class: type[Experts], problem: MoEProblem, platform: Platform, num_tokens: int = 24, routing: str = "skewed"
) -> float:
    """The error of a class on the kit's weights and inputs."""
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, num_tokens, routing, CPU)
    expert_map = make_expert_map(problem, CPU)
    found = run_experts(experts_class, problem, weights, inputs, platform, expert_map)
    return relative_error(found, truth_of(problem, weights, inputs, expert_map))


def truth_of(
    problem: MoEProblem, weights: ExpertWeights, inputs: Inputs, expert_map: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference's result of a call."""
    call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    return reference_experts(problem, weights, *call, expert_map)
