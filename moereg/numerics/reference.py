"""The reference that kernels are compared with: experts one by one, in fp32 (or fp64), nothing fused.

It rounds only at these points:

- weights: as the checkpoint stores them, dequantized exactly (fp32 rounds each product with a scale once);
- input: if the scheme quantizes activations, hidden states (times the routing weight, rounded to the problem's
  dtype, if that scales the input) are rounded to the scheme's activation format;
- intermediate: if the scheme quantizes activations, the activation function's output is rounded to the problem's
  dtype (`ROUNDS_INTERMEDIATE`), where that has the range for it, and then to the scheme's activation format.

Both matmuls, biases, the activation function and the weighted sum stay in fp32 or fp64.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from moereg.errors import ArgumentError
from moereg.quantize import (
    activation_scale,
    dequantize_rows,
    expert_matrix,
    quantize_dequantize_activations,
    spans_tokens,
)
from moereg.runtime.torch_state import in_plain_torch
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme, get_scheme
from moereg.weights.permuted import ExpertWeights

ROUNDS_INTERMEDIATE: Final = True
"""Whether the intermediate is rounded to the problem's dtype before it is quantized.

A kernel that quantizes the intermediate in a separate launch cannot avoid this rounding, and one that quantizes in
registers can add it for one instruction, so all kernels can agree on it. Otherwise the two would differ by the effect
of a 16-bit rounding on the quantizer: about 1 % of the output for e4m3, see `moereg.numerics.tolerances`.
"""


@in_plain_torch
def reference_experts(
    problem: MoEProblem,
    weights: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    computes: QuantScheme | str | None = None,
    rounds_intermediate: bool = ROUNDS_INTERMEDIATE,
) -> torch.Tensor:
    """Runs the layer, rounding only where this module says.

    Args:
        problem: The layer.
        weights: Canonical weights.
        hidden_states: [T,H].
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int, global experts; ids outside [0, num_experts) or not mapped add nothing.
        expert_map: [num_experts] int32, local expert or -1; None if local experts are the first ones.
        dtype: torch.float32 or torch.float64.
        computes: The scheme that the compared kernel computes; None means the problem's. Another one has the same
            weights with 16-bit activations, such as `nvfp4_w4a16` for an `nvfp4` checkpoint. A problem with gradients
            has its own weights with 16-bit activations.
        rounds_intermediate: See `ROUNDS_INTERMEDIATE`.

    Returns:
        [T,H] in `dtype`, on the inputs' device. Synchronizes the device.

    Raises:
        ArgumentError: `computes` cannot serve the problem's scheme, or the weights have another scheme.
    """
    call = LayerCall.of(problem, weights, hidden_states, topk_weights, topk_ids, expert_map, dtype, computes)
    return dataclasses.replace(call, rounds_intermediate=rounds_intermediate).output()


@in_plain_torch
def scheme_loss(
    problem: MoEProblem,
    weights: ExpertWeights,
    unquantized: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    computes: QuantScheme | str | None = None,
) -> float:
    """The scheme's own error: its reference against the unquantized fp32 reference.

    Args:
        problem: The layer, with the quantized scheme.
        weights: Its weights.
        unquantized: The weights' unquantized originals.
        hidden_states, topk_weights, topk_ids, expert_map, computes: As in `reference_experts`.
    """
    call = (hidden_states, topk_weights, topk_ids, expert_map)
    found = reference_experts(problem, weights, *call, computes=computes)
    plain = dataclasses.replace(problem, quant=get_scheme("unquantized"))
    return relative_error(found, reference_experts(plain, unquantized, *call))


@in_plain_torch
def calibrate_activation_scales(
    problem: MoEProblem,
    weights: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scheme: QuantScheme | str,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes static activation scales from the largest magnitudes of a sample.

    Args:
        problem: The unquantized layer.
        weights: Its weights.
        hidden_states, topk_weights, topk_ids, expert_map: The sample.
        scheme: The scheme that needs the scales.

    Returns:
        a13_scale and a2_scale, fp32 [E]. An expert without tokens gets the largest of the others.
    """
    call = LayerCall.of(problem, weights, hidden_states, topk_weights, topk_ids, expert_map)
    experts = range(problem.num_local_experts)
    found = []
    for rows in (call.input, call.intermediate):
        amax = torch.stack([_amax(rows(expert)) for expert in experts])
        found.append(activation_scale(torch.where(amax > 0, amax, amax.amax()), scheme))
    return found[0], found[1]


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer, expert by expert, in steps that a diagnosis can get wrong one at a time.

    Attributes:
        tokens: [T,H] in `dtype`.
        topk_ids: [T,K] int64, global experts, as the caller gives them.
        expert_map: [num_experts] int32, local expert or -1; None if local experts are the first ones.
        local_ids: [T,K] int64, local expert or -1.
        scheme: The computed scheme.
        scales_input: Whether routing weights scale the input instead of the output.
        scales: Per-call dynamic scales of both matmuls' inputs, fp32, by name.
    """

    problem: MoEProblem
    weights: ExpertWeights
    tokens: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    local_ids: torch.Tensor
    scheme: QuantScheme
    dtype: torch.dtype
    scales_input: bool
    rounds_intermediate: bool = ROUNDS_INTERMEDIATE
    scales: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        problem: MoEProblem,
        weights: ExpertWeights,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        computes: QuantScheme | str | None = None,
    ) -> LayerCall:
        """Checks the arguments of `reference_experts` and maps ids to local experts."""
        scheme = problem.quant if computes is None else get_scheme(computes)
        if problem.gradients:  # Layers that train restore their weights.
            scheme = problem.quant.weight_only
        if not scheme.serves(problem.quant):
            raise ArgumentError(
                f"computes must have the weights of {problem.quant.name} and its activations or 16-bit ones, "
                f"got {scheme.name}"
            )
        if weights.scheme.weight != scheme.weight:
            raise ArgumentError(
                f"the weights are {weights.scheme.description} but the problem says {problem.quant.description}; make "
                "both name the checkpoint's scheme"
            )
        routes = topk_ids.long(), expert_map, local_expert_of_each(problem, topk_ids, expert_map)
        scales_input = problem.apply_router_weight_on_input
        return cls(problem, weights, hidden_states.to(dtype), topk_weights, *routes, scheme, dtype, scales_input)

    def output(self) -> torch.Tensor:
        """Computes the output, [T,H] in `dtype`."""
        call = self._with_tensor_scales()
        out = torch.zeros(len(self.tokens), self.problem.hidden_size, dtype=self.dtype, device=self.tokens.device)
        for expert in range(self.problem.num_local_experts):
            token, slot = call.routes(expert)
            if len(token):
                out.index_add_(0, token, call.gemm2(expert, self.topk_weights[token, slot].to(self.dtype)))
        return out

    def gemm2(self, expert: int, topk_weights: torch.Tensor) -> torch.Tensor:
        """An expert's part of the output, [rows, H], with the routing weights [rows] of its rows."""
        gemm2 = self.rounded(self.intermediate(expert), expert, "a2") @ self.matrix("w2", expert).T
        if self.weights.w2_bias is not None:
            gemm2 += self.bias("w2", expert)
        if not self.scales_input:
            gemm2 *= topk_weights.unsqueeze(1)
        return gemm2

    def _with_tensor_scales(self) -> LayerCall:
        """Adds the dynamic scales over all routed rows of a call, if the scheme has them."""
        call = self
        if spans_tokens(self.scheme):
            for name in ("a13", "a2"):
                # The second scale depends on the first.
                rows = call.input if name == "a13" else call.intermediate
                amax = torch.stack([_amax(rows(expert)) for expert in range(self.problem.num_local_experts)]).amax()
                call = dataclasses.replace(call, scales={**call.scales, name: activation_scale(amax, self.scheme)})
        return call

    def routes(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and slot of each of an expert's rows."""
        token, slot = torch.nonzero(self.local_ids == expert, as_tuple=True)
        return token, slot

    def matrix(self, name: str, expert: int) -> torch.Tensor:
        """One expert's w13 or w2, dequantized."""
        fmt = self.scheme.weight
        if fmt is None:
            matrix: torch.Tensor = self.weights.tensors()[name][expert].to(self.dtype)
            return matrix
        columns = self.weights.hidden_size if name == "w13" else self.weights.intermediate_size
        quantized = expert_matrix(self.weights.tensors(), name, expert, self.weights.num_halves)
        return dequantize_rows(quantized, fmt, columns, slice(None), self.dtype)

    def bias(self, name: str, expert: int) -> torch.Tensor:
        """One expert's bias of w13 or w2."""
        bias: torch.Tensor = self.weights.tensors()[f"{name}_bias"][expert].to(self.dtype)
        return bias

    def input(self, expert: int) -> torch.Tensor:
        """An expert's rows [rows, H] before quantizing."""
        token, slot = self.routes(expert)
        x = self.tokens[token]
        if self.scales_input:
            x = x * self.topk_weights[token, slot].to(self.dtype).unsqueeze(1)
            if self.scheme.activation is not None:
                x = x.to(self.problem.torch_dtype).to(self.dtype)
        return x

    def intermediate(self, expert: int) -> torch.Tensor:
        """The activation function's output for an expert's rows, [rows, I], before quantizing."""
        gemm1 = self.rounded(self.input(expert), expert, "a13") @ self.matrix("w13", expert).T
        if self.weights.w13_bias is not None:
            gemm1 += self.bias("w13", expert)
        hidden = self.problem.activation(gemm1)
        if self.scheme.activation is not None and self.rounds_intermediate:
            rounded = hidden.to(self.problem.torch_dtype).to(self.dtype)
            hidden = torch.where(rounded.isinf(), hidden, rounded)  # Kernels' infinities are not the layer's numbers.
        return hidden

    def rounded(self, x: torch.Tensor, expert: int, name: str) -> torch.Tensor:
        """Rows rounded to the scheme's activation format; unchanged if it has none."""
        if self.scheme.activation is None:
            return x
        static = self.weights.tensors().get(f"{name}_scale")
        scale = self.scales.get(name) if static is None else static.expand(self.problem.num_local_experts)[expert]
        return quantize_dequantize_activations(x, self.scheme, scale, self.dtype)


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def local_expert_of_each(problem: MoEProblem, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of each route, [T,K] int64, or -1. No kernel shares this code, so a fault in theirs shows."""
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < problem.num_experts)
    if expert_map is not None:
        local = expert_map.long()[ids.clamp(0, problem.num_experts - 1)]
    else:
        local = torch.where(ids < problem.num_local_experts, ids, -1)
    return torch.where(known, local, -1)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in fp64; NaN if `out` has a NaN, 0 if both are zero."""
    difference = torch.linalg.vector_norm(out.double() - reference.double())
    norm = torch.linalg.vector_norm(reference.double())
    if norm == 0:
        return float(difference)
    return float(difference / norm)
