"""`torch` on CPUs for quantized weights: they stay packed and are dequantized in blocks of one expert's rows."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable

import torch

from moereg.backends._loaded import Call
from moereg.backends._torch.plain import CANONICAL, HostBatchedImplementation, HostImplementation
from moereg.experts import ExpertInputs
from moereg.kernels.plain import host, quantized_mlp
from moereg.kernels.plain.mlp import ExpertMlp, RepeatingMlp, dtype_is_emulated, has_large_weights
from moereg.kernels.plain.quantized_mlp import RestoredMatrix, RestoringMlp
from moereg.quantize import (
    activation_scale,
    dequantize_rows,
    expert_matrix,
    quantize_activations,
    quantize_dequantize_activations,
    row_blocks,
    spans_tokens,
)
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class _Canonical(HostImplementation):
    """Weights in the checkpoint's form."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors; a static activation scale becomes one per expert."""
        tensors = weights.tensors()
        for name in ("a13_scale", "a2_scale"):
            if name in tensors:
                tensors[name] = tensors[name].expand(self.problem.num_local_experts).contiguous()
        return PermutedWeights(CANONICAL, tensors)


class Restoring(_Canonical):
    """Dequantizes weights block by block and rounds activations as `computes` says; standard format."""

    def _mlp(self, call: Call) -> ExpertMlp:
        weights, inputs = call.weights, call.inputs
        mlp = self._restoring_mlp(weights, {})
        if mlp.compute_dtype == torch.float16:
            wide = dataclasses.replace(mlp, compute_dtype=torch.float32)
            only_wide = self.problem.batch_invariant or has_large_weights(inputs.topk_weights)
            return RepeatingMlp(mlp, wide, only_wide)
        if not spans_tokens(self.computes):
            return mlp
        # A dynamic scale of all rows comes before any is rounded; a2 needs a13, so the first matmul runs twice.
        scales = {"a13": self._scale(x for _, x in self._rows(inputs))}
        mlp = self._restoring_mlp(weights, scales)
        scales["a2"] = self._scale(mlp.intermediate(x, expert) for expert, x in self._rows(inputs))
        return self._restoring_mlp(weights, scales)

    def _scale(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        amax = [part.abs().amax().float() for part in parts]
        none = torch.zeros((), dtype=torch.float32, device="cpu")
        return activation_scale(torch.stack(amax).amax() if amax else none, self.computes)

    def _rows(self, inputs: ExpertInputs) -> Iterable[tuple[int, torch.Tensor]]:
        """Every block of a call's routed rows, with its expert."""
        problem = self.problem
        block = host.row_block(problem.hidden_size, self._w13_rows, problem.torch_dtype.itemsize)
        if inputs.expert_num_tokens is not None:
            return host.batched_rows(inputs.hidden_states, inputs.expert_num_tokens, block)
        return host.routed_inputs(
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            problem.num_local_experts,
            block,
            expert_map=inputs.expert_map,
            apply_router_weight_on_input=problem.apply_router_weight_on_input,
        )

    def _restoring_mlp(self, weights: PermutedWeights, scales: dict[str, torch.Tensor]) -> RestoringMlp:
        """Built for each call, since it holds only views and functions."""
        problem, computes = self.problem, self.computes
        is_fp32 = computes.activation is not None or dtype_is_emulated(problem.torch_dtype)
        rounds = computes.activation is not None
        return RestoringMlp(
            self._matrix(weights, "w13", self._w13_rows, problem.hidden_size),
            self._matrix(weights, "w2", problem.hidden_size, problem.intermediate_size),
            self._activation,
            torch.float32 if is_fp32 else problem.torch_dtype,
            functools.partial(self._round, weights.get("a13_scale"), scales.get("a13")) if rounds else None,
            functools.partial(self._round, weights.get("a2_scale"), scales.get("a2")) if rounds else None,
        )

    def _matrix(self, weights: PermutedWeights, name: str, num_rows: int, columns: int) -> RestoredMatrix:
        fmt = self.computes.weight
        assert fmt is not None
        num_halves = self.problem.activation.num_halves
        parts = (name, f"{name}_scale", f"{name}_scale_2", f"{name}_zero_point")
        tensors = {part: tensor for part in parts if (tensor := weights.get(part)) is not None}

        def restore(expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
            return dequantize_rows(expert_matrix(tensors, name, expert, num_halves), fmt, columns, rows, dtype)

        blocks = tuple(row_blocks(num_rows, columns, fmt))
        bias = weights.get(f"{name}_bias")
        return RestoredMatrix(restore, blocks, num_rows, bias, self.problem.batch_invariant)

    def _round(
        self, static: torch.Tensor | None, dynamic: torch.Tensor | None, x: torch.Tensor, expert: int
    ) -> torch.Tensor:
        return quantize_dequantize_activations(x, self.computes, dynamic if static is None else static[expert])


class RestoringBatched(HostBatchedImplementation, Restoring):
    """As `Restoring`, batched format."""


class Int8(_Canonical):
    """Multiplies int8 codes of weights and of each token; standard format."""

    @property
    def _min_tasks(self) -> int:
        # Many short steps contend for the interpreter: two threads ran at 0.6 to 0.7 of the speed.
        return sys.maxsize

    def _mlp(self, call: Call) -> quantized_mlp.Int8Mlp:
        weights = call.weights
        return quantized_mlp.Int8Mlp(
            weights["w13"],
            weights["w2"],
            weights["w13_scale"],
            weights["w2_scale"],
            self._activation,
            self._quantize,
            weights.get("w13_bias"),
            weights.get("w2_bias"),
        )

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = quantize_activations(x, self.computes)
        return found.q, found.scale


class Int8Batched(HostBatchedImplementation, Int8):
    """As `Int8`, batched format."""
