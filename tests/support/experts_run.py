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
    """Applies a class that claims the problem, whatever its format."""
    assert not fact_reasons(experts_class.facts, problem)
    experts = experts_class(problem, platform)
    permuted = permuted or experts.permute_weights(weights, problem)
    assert permuted.layout in experts_class.layouts
    if problem.activation_format == "standard":
        return apply_experts(experts, ExpertInputs(*inputs.call, expert_map=expert_map), permuted)
    batches = BatchedPrepareFinalize()
    prepared = batches.prepare(*inputs.call, problem, expert_map)
    out = torch.full_like(inputs.hidden_states, float("nan"))
    batches.finalize(out, apply_experts(experts, prepared.inputs, permuted), prepared, problem)
    return out


def apply_experts(experts: Experts, inputs: ExpertInputs, permuted: PermutedWeights) -> torch.Tensor:
    """The output of a call whose output and workspaces were full of NaN."""
    out = torch.full_like(inputs.hidden_states, float("nan"), dtype=experts.problem.torch_dtype)
    shapes = experts.workspace_shapes(experts.problem, out.shape[-2])
    experts.apply(out, inputs, permuted, *(out.new_full(shape, float("nan")) for shape in shapes))
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
    return reference_experts(problem, weights, *inputs.call, expert_map)
