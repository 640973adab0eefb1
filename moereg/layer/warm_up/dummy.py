"""Calls a layer with meaningless numbers: on torch's device `meta` to record launches, on a real one to load them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from moereg.experts import ExpertInputs, Experts
from moereg.platforms import Platform
from moereg.prepare_finalize import BatchedPrepareFinalize
from moereg.prepare_finalize.batched import runs_kernels
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.weights.expert_weights import ExpertWeights
from moereg.weights.permuted import PermutedWeights

MOVING_KERNELS: Final = (
    "moereg.kernels.rows.batches:",
    "moereg.kernels.rows.reduce:copy_rows_kernel",
    "moereg.kernels.rows.reduce:reduce_sorted_rows_kernel",
)
"""How the names begin of kernels that lay out tokens in the batched format and add up what comes back."""


@dataclasses.dataclass(frozen=True)
class DummyLayer:
    """Experts, and the other inputs of a call.

    Attributes:
        weights: Theirs, or tensors of the same sizes without memory.
        moves: Lays out tokens in the batched format if that launches kernels too; None makes rows of zeros.
    """

    experts: Experts
    weights: PermutedWeights
    expert_map: torch.Tensor | None = None
    moves: BatchedPrepareFinalize | None = None

    def call(self, num_tokens: int) -> None:
        """Calls the experts and the token dispatcher with tokens of zeros, routed evenly to all experts."""
        problem, device = self.experts.problem, self.weights.device
        dtype, top_k = problem.torch_dtype, problem.top_k
        routes = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device).view(num_tokens, top_k)
        topk_ids = routes.remainder_(problem.num_experts)
        topk_weights = torch.ones(num_tokens, top_k, dtype=torch.float32, device=device)
        rows: tuple[int, ...] = (num_tokens, problem.hidden_size)
        if self.moves is not None:
            tokens = torch.zeros(rows, dtype=dtype, device=device)
            prepared = self.moves.prepare(tokens, topk_weights, topk_ids, problem, self.expert_map)
            expert_out = self._multiply(prepared.inputs, num_tokens)
            if self.experts.output_form == "per_expert":
                self.moves.finalize(tokens, expert_out, prepared, problem)
            return
        counts = None
        if problem.activation_format == "batched":
            rows = (problem.num_local_experts, *rows)
            fair_share = -(-num_tokens * top_k // problem.num_experts)
            counts = torch.full((rows[0],), min(num_tokens, fair_share), dtype=torch.int32, device=device)
        hidden_states = torch.zeros(rows, dtype=dtype, device=device)
        self._multiply(ExpertInputs(hidden_states, topk_weights, topk_ids, counts, self.expert_map), num_tokens)

    def _multiply(self, inputs: ExpertInputs, num_tokens: int) -> torch.Tensor:
        """Runs the experts and returns their output."""
        problem, form = self.experts.problem, self.experts.output_form
        dtype = problem.torch_dtype if form == "reduced" else self.experts.rows_dtype
        width = problem.hidden_size * dtype.itemsize // problem.torch_dtype.itemsize
        out = {
            "reduced": (num_tokens, width),
            "per_route": (num_tokens, problem.top_k, width),
            "per_expert": (problem.num_local_experts, num_tokens, width),
        }[form]
        shapes = self.experts.workspace_shapes(problem=problem, num_tokens=num_tokens)
        device = self.weights.device
        workspace13, workspace2, expert_out = WORKSPACES.take((*shapes, out), problem.torch_dtype, device)
        expert_out = expert_out.view(dtype)
        self.experts.apply(
            out=expert_out, inputs=inputs, weights=self.weights, workspace13=workspace13, workspace2=workspace2
        )
        return expert_out


def moving_kernels(problem: MoEProblem, platform: Platform) -> BatchedPrepareFinalize | None:
    """The local dispatcher, if it launches kernels on the platform, which need not be this machine; else None."""
    if problem.activation_format != "batched" or not runs_kernels(platform):
        return None
    return BatchedPrepareFinalize(in_triton=True)


def described(weights: PermutedWeights) -> dict[str, Any] | None:
    """Shapes, strides and dtypes of permuted weights, as JSON; None if some are not tensors."""
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
    """Weights on `meta`, once for each set of tensors that a checkpoint of the problem's scheme may have.

    Scales may be per layer or per expert, and some may be absent.
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
