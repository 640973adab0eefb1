"""Calls of a layer whose numbers mean nothing: on torch's device `meta` to see launches, on a real one to load them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moereg.canonical import ExpertWeights
from moereg.experts import ExpertInputs, Experts
from moereg.problem import MoEProblem
from moereg.weights import PermutedWeights

__all__ = ["DummyLayer", "described", "empty_weights", "undescribed"]

Take = Callable[[Sequence[tuple[int, ...]], torch.dtype, torch.device], Sequence[torch.Tensor]]
"""Shapes, dtype and device to tensors whose contents are undefined."""


def _take_new(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class DummyLayer:
    """Experts with what a call of them needs.

    Attributes:
        experts: To call.
        weights: What they read, or tensors of the same sizes without memory.
        expert_map: As a layer has it, or None.
        take: Where scratch comes from.
    """

    experts: Experts
    weights: PermutedWeights
    expert_map: torch.Tensor | None = None
    take: Take = _take_new

    def call(self, num_tokens: int) -> None:
        """Calls the experts with tokens that are zeros and go to all experts evenly.

        Args:
            num_tokens: T, or max_T in the batched format.
        """
        problem, device = self.experts.problem, self.weights.device
        dtype, top_k = problem.torch_dtype, problem.top_k
        routes = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device).view(num_tokens, top_k)
        rows: tuple[int, ...] = (num_tokens, problem.hidden_size)
        counts = None
        if problem.activation_format == "batched":
            rows = (problem.num_local_experts, *rows)
            fair_share = -(-num_tokens * top_k // problem.num_experts)
            counts = torch.full((rows[0],), min(num_tokens, fair_share), dtype=torch.int32, device=device)
        inputs = ExpertInputs(
            torch.zeros(rows, dtype=dtype, device=device),
            torch.ones(num_tokens, top_k, dtype=torch.float32, device=device),
            routes.remainder_(problem.num_experts),
            expert_num_tokens=counts,
            expert_map=self.expert_map,
        )
        out = {
            "reduced": (num_tokens, problem.hidden_size),
            "per_route": (num_tokens, top_k, problem.hidden_size),
            "per_expert": (problem.num_local_experts, num_tokens, problem.hidden_size),
        }[self.experts.output_form]
        shapes = self.experts.workspace_shapes(problem=problem, num_tokens=num_tokens)
        workspace13, workspace2, expert_out = self.take((*shapes, out), dtype, device)
        self.experts.apply(
            out=expert_out, inputs=inputs, weights=self.weights, workspace13=workspace13, workspace2=workspace2
        )


def described(weights: PermutedWeights) -> dict[str, Any] | None:
    """Permuted weights without their numbers, as JSON; None where an expert's tensors lie apart."""
    parts: dict[str, Any] = {"layout": weights.layout}
    for part, tensors in (("per_expert", weights.per_expert), ("shared", weights.shared)):
        parts[part] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                return None
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts[part][name] = {"shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": dtype}
    return parts


def undescribed(values: Mapping[str, Any]) -> PermutedWeights:
    """Inverse of `described`, on `meta`."""

    def empty(tensor: Mapping[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, tensor["dtype"])
        return torch.empty_strided(tensor["shape"], tensor["stride"], dtype=dtype, device="meta")

    per_expert, shared = (
        {name: empty(tensor) for name, tensor in values[part].items()} for part in ("per_expert", "shared")
    )
    return PermutedWeights(values["layout"], per_expert, shared)


def empty_weights(experts: Experts) -> Iterator[PermutedWeights]:
    """Weights of the experts' problem on `meta`: once for each set of tensors that a checkpoint of its scheme may have.

    Scales may be one number a layer or one an expert, and some may be absent.
    """
    problem, seen = experts.problem, []
    for canonical in _canonical(problem):
        permuted = experts.permute_weights(weights=canonical, problem=problem)
        description = described(permuted)
        if description not in seen:
            seen.append(description)
            yield permuted


def _canonical(problem: MoEProblem) -> Iterator[ExpertWeights]:
    halves = problem.activation.num_halves
    sizes = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    rows = problem.quant.tensor_rows(*sizes, halves, problem.has_bias)
    for number in range(max(len(row.shapes) for row in rows)):
        for with_optional in (True, False) if not all(row.required for row in rows) else (True,):
            tensors: dict[str, Any] = {
                row.name: torch.empty(
                    row.shapes[min(number, len(row.shapes) - 1)], dtype=row.dtype or problem.torch_dtype, device="meta"
                )
                for row in rows
                if row.required or with_optional
            }
            yield ExpertWeights(**tensors, quant=problem.quant)
