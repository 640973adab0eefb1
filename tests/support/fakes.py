"""Backends for tests: right, slow, and easy to vary."""

from __future__ import annotations

from typing import Any

import torch

from moereg.author import ExpertInputs, Experts, ExpertWeights, Facts, PermutedWeights
from moereg.kernels.plain.device import local_expert_ids
from moereg.numerics.reference import reference_experts
from moereg.platforms import Platform
from moereg.registry import BackendCell, BackendRegistry, register_moe_backend
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

EVERYTHING = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "situ", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    deterministic=True,
    batch_invariant=True,
)

LITTLE = Facts(
    activations=frozenset({"silu"}),
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"float32"}),
    placements=frozenset({"contiguous"}),
)


class FakeExperts(Experts):
    """Runs the reference; claims everything in the standard format."""

    facts = EVERYTHING
    layouts = ("canonical",)

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        return ("cpu", "cuda")

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (num_tokens, problem.intermediate_size), (num_tokens, problem.hidden_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        self.compute(out, inputs, weights)
        self.spoil(out, inputs, weights, workspace13, workspace2)

    def spoil(self, *given: Any) -> None:
        """Where classes of broken promises break one: it is given what `apply` is."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """`apply` without scratch, which the classes below change."""
        out.copy_(self.result(inputs, weights, self.computes))

    def result(self, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        canonical = ExpertWeights(**dict(weights.per_expert), quant=self.problem.quant)  # type: ignore[arg-type]
        call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map)
        return reference_experts(self.problem, canonical, *call, computes=computes)


class PerRouteExperts(FakeExperts):
    """As FakeExperts, but leaves weighting and summing to finalize."""

    output_form = "per_route"

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        local = local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map)
        for token, slot in torch.nonzero(local >= 0).tolist():
            expert = int(local[token, slot])
            x = inputs.hidden_states[token].float()
            if self.problem.apply_router_weight_on_input:
                x = x * inputs.topk_weights[token, slot]
            out[token, slot] = _expert(self.problem, weights, expert, x)


class BatchedExperts(FakeExperts):
    """One expert after the other on [E,max_T,H]."""

    facts = Facts(**{**vars(EVERYTHING), "activation_formats": frozenset({"batched"})})
    output_form = "per_expert"

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        assert inputs.expert_num_tokens is not None
        for expert, count in enumerate(inputs.expert_num_tokens.tolist()):
            out[expert, :count] = _expert(self.problem, weights, expert, inputs.hidden_states[expert, :count].float())


class WrongExperts(FakeExperts):
    """Off by a factor, so that every comparison must notice."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        super().compute(out, inputs, weights)
        out.mul_(1.5)


class NanExperts(FakeExperts):
    """Leaves one value that is not a number."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        super().compute(out, inputs, weights)
        out[-1, -1] = float("nan")


class LeavingExperts(FakeExperts):
    """Leaves its output as it was."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        return None


class RaisingExperts(FakeExperts):
    """Has a bug."""

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise RuntimeError("a bug\nof two lines")


def cell_of(
    experts: type[Experts], *schemes: str, rules: tuple[str, ...] = ("cpu", "cuda:sm90"), name: str = "fresh"
) -> BackendCell:
    """The cell of a class in a registry of its own; of unquantized weights where no scheme is named."""
    registry = BackendRegistry()
    register_moe_backend(name, 1, schemes or ("unquantized",), rules, registry=registry)(experts)
    (cell,) = registry.cells
    return cell


def _expert(problem: MoEProblem, weights: PermutedWeights, expert: int, x: torch.Tensor) -> Any:
    gemm1 = x @ weights["w13"][expert].float().T
    if "w13_bias" in weights.per_expert:
        gemm1 = gemm1 + weights["w13_bias"][expert].float()
    gemm2 = problem.activation(gemm1) @ weights["w2"][expert].float().T
    if "w2_bias" in weights.per_expert:
        gemm2 = gemm2 + weights["w2_bias"][expert].float()
    return gemm2
