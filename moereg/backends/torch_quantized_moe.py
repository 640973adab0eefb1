"""`torch` on CPUs for quantized weights: they stay packed, and some rows of one expert at a time are restored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Final

import torch

from moereg.experts import ExpertInputs, Experts, Facts
from moereg.kernels.plain import host as torch_moe
from moereg.kernels.plain import mlp as torch_mlp
from moereg.kernels.plain import quantized_mlp as torch_quantized_mlp
from moereg.kernels.plain.quantized_mlp import RestoredMatrix, RestoringMlp
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES
from moereg.quantize import (
    activation_scale,
    dequantize_rows,
    expert_matrix,
    quantize_activations,
    quantize_dequantize_activations,
    row_blocks,
    spans_tokens,
)
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

__all__ = [
    "TorchInt8BatchedExperts",
    "TorchInt8Experts",
    "TorchQuantizedBatchedExperts",
    "TorchQuantizedExperts",
]

CANONICAL: Final = "canonical"

# A 16-bit matmul on restored weights is what these schemes mean, and the weights take the memory that they promise, so
# this is a kernel: it warns nobody, and serves checkpoints whose activations would have to be emulated.
_WEIGHT_ONLY: Final = tuple(
    scheme for scheme in QUANT_SCHEMES.values() if scheme.weight is not None and scheme.activation is None
)
# No CPU multiplies these activations as they are: rounded to the format's numbers they are multiplied in fp32.
_EMULATED: Final = tuple(scheme for scheme in QUANT_SCHEMES.values() if scheme.activation is not None)

_FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    deterministic=True,
)
_BATCHED_FACTS: Final = dataclasses.replace(_FACTS, activation_formats=frozenset({"batched"}))


def _has_int8_matmul(platform: Platform) -> str | None:
    fast = torch_quantized_mlp.int8_matmul_is_fast()
    return None if fast else "requires AVX-512 VNNI, without which torch multiplies int8 in a plain loop"


class _CanonicalExperts(Experts):
    """Weights as checkpoints hold them, standard format."""

    facts = _FACTS
    layouts = (CANONICAL,)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views of the canonical tensors; a static activation scale becomes one for each expert."""
        tensors = weights.tensors()
        for name in ("a13_scale", "a2_scale"):
            if name in tensors:
                tensors[name] = tensors[name].expand(problem.num_local_experts).contiguous()
        return PermutedWeights(CANONICAL, tensors)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None, and the routed rows of a chunk of tokens."""
        itemsize = problem.torch_dtype.itemsize
        rows = torch_moe.routed_rows(num_tokens, problem.top_k, problem.hidden_size, itemsize)
        return (0,), (rows, problem.hidden_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_moe.host_experts`."""
        torch_moe.host_experts(
            out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            self._mlp(weights, inputs),
            self.problem.num_local_experts,
            self.problem.activation.num_halves * self.problem.intermediate_size,
            workspace2,
            inputs.expert_map,
            self.problem.apply_router_weight_on_input,
        )

    def _mlp(self, weights: PermutedWeights, inputs: ExpertInputs) -> torch_mlp.ExpertMlp:
        raise NotImplementedError


class _CanonicalBatchedExperts(_CanonicalExperts):
    """Weights as checkpoints hold them, batched format."""

    facts = _BATCHED_FACTS
    output_form = "per_expert"

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: results go straight to `out`."""
        return (0,), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_moe.host_batched_experts`."""
        assert inputs.expert_num_tokens is not None
        torch_moe.host_batched_experts(
            out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            self._mlp(weights, inputs),
            self.problem.activation.num_halves * self.problem.intermediate_size,
        )


class _Restoring(Experts):
    """Restores weights block by block and rounds activations as `computes` says."""

    def _mlp(self, weights: PermutedWeights, inputs: ExpertInputs) -> torch_mlp.ExpertMlp:
        mlp = self._restoring_mlp(weights, {})
        if mlp.compute_dtype == torch.float16:
            return torch_mlp.RepeatingMlp(mlp, dataclasses.replace(mlp, compute_dtype=torch.float32))
        if not spans_tokens(self.computes):
            return mlp
        # One scale for all rows of a call has to be known before any of them is rounded, and the second one depends on
        # the first, so the first matmul runs twice.
        scales = {"a13": self._scale(x for _, x in self._rows(inputs))}
        mlp = self._restoring_mlp(weights, scales)
        scales["a2"] = self._scale(mlp.intermediate(x, expert) for expert, x in self._rows(inputs))
        return self._restoring_mlp(weights, scales)

    def _scale(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        amax = [part.abs().amax().float() for part in parts]
        none = torch.zeros((), dtype=torch.float32, device="cpu")
        return activation_scale(torch.stack(amax).amax() if amax else none, self.computes)

    def _rows(self, inputs: ExpertInputs) -> Iterable[tuple[int, torch.Tensor]]:
        """Every routed row of a call, with its expert."""
        problem = self.problem
        w13_rows = problem.activation.num_halves * problem.intermediate_size
        block = torch_moe.row_block(problem.hidden_size, w13_rows, problem.torch_dtype.itemsize)
        if inputs.expert_num_tokens is not None:
            return torch_moe.batched_rows(inputs.hidden_states, inputs.expert_num_tokens, block)
        return torch_moe.routed_inputs(
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            problem.num_local_experts,
            block,
            inputs.expert_map,
            problem.apply_router_weight_on_input,
        )

    def _restoring_mlp(self, weights: PermutedWeights, scales: dict[str, torch.Tensor]) -> RestoringMlp:
        """Built for each call: it holds views and functions only."""
        problem, computes = self.problem, self.computes
        is_fp32 = computes.activation is not None or torch_mlp.dtype_is_emulated(problem.torch_dtype)
        w13_rows = problem.activation.num_halves * problem.intermediate_size
        rounds = computes.activation is not None
        return RestoringMlp(
            self._matrix(weights, "w13", w13_rows, problem.hidden_size),
            self._matrix(weights, "w2", problem.hidden_size, problem.intermediate_size),
            problem.activation,
            torch.float32 if is_fp32 else problem.torch_dtype,
            functools.partial(self._round, weights.get("a13_scale"), scales.get("a13")) if rounds else None,
            functools.partial(self._round, weights.get("a2_scale"), scales.get("a2")) if rounds else None,
        )

    def _matrix(self, weights: PermutedWeights, name: str, num_rows: int, columns: int) -> RestoredMatrix:
        fmt = self.computes.weight
        assert fmt is not None
        parts = (name, f"{name}_scale", f"{name}_scale_2", f"{name}_zero_point")
        tensors = {part: tensor for part in parts if (tensor := weights.get(part)) is not None}

        def restore(expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
            return dequantize_rows(expert_matrix(tensors, name, expert), fmt, columns, rows, dtype)

        blocks = tuple(row_blocks(num_rows, columns, fmt))
        return RestoredMatrix(restore, blocks, num_rows, weights.get(f"{name}_bias"))

    def _round(
        self, static: torch.Tensor | None, dynamic: torch.Tensor | None, x: torch.Tensor, expert: int
    ) -> torch.Tensor:
        return quantize_dequantize_activations(x, self.computes, dynamic if static is None else static[expert])


class _Int8(Experts):
    """Multiplies int8 codes of weights and of each token."""

    def _mlp(self, weights: PermutedWeights, inputs: ExpertInputs) -> torch_quantized_mlp.Int8Mlp:
        return torch_quantized_mlp.Int8Mlp(
            weights["w13"],
            weights["w2"],
            weights["w13_scale"],
            weights["w2_scale"],
            self.problem.activation,
            self._quantize,
            weights.get("w13_bias"),
            weights.get("w2_bias"),
        )

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = quantize_activations(x, self.computes)
        return found.q, found.scale


# One thread of an AMD EPYC with AVX2, 16 experts of 2048 x 768, top 4, 16 tokens: 63 ms (int8) to 175 ms (int4 with
# zero points), against 69 ms with unquantized weights in oneDNN's order. Emulated activations take 5 to 20 % more.
@register_moe_backend(name="torch", priority=40, quant_schemes=_WEIGHT_ONLY, platforms=("cpu",))
@register_moe_backend(name="torch", priority=30, quant_schemes=_EMULATED, platforms=("cpu",), tier="emulation")
class TorchQuantizedExperts(_Restoring, _CanonicalExperts):
    """CPU, standard format: any weight and activation format that `moereg.quantize` reads."""


@register_moe_backend(name="torch", priority=39, quant_schemes=_WEIGHT_ONLY, platforms=("cpu",))
@register_moe_backend(name="torch", priority=29, quant_schemes=_EMULATED, platforms=("cpu",), tier="emulation")
class TorchQuantizedBatchedExperts(_Restoring, _CanonicalBatchedExperts):
    """CPU, batched format: as `TorchQuantizedExperts`, on the rows that prepare laid out for each expert."""


# Before restoring int8 weights to 16 bits, since nothing is restored. Not measured: there was no machine with VNNI.
@register_moe_backend(
    name="torch", priority=50, quant_schemes=("int8_w8a8",), platforms=("cpu",), probes=(_has_int8_matmul,)
)
class TorchInt8Experts(_Int8, _CanonicalExperts):
    """CPU with int8 instructions, standard format: int8 matmuls with int32 sums."""


@register_moe_backend(
    name="torch", priority=49, quant_schemes=("int8_w8a8",), platforms=("cpu",), probes=(_has_int8_matmul,)
)
class TorchInt8BatchedExperts(_Int8, _CanonicalBatchedExperts):
    """CPU with int8 instructions, batched format: as `TorchInt8Experts`."""
