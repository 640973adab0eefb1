"""`torch` on CPUs for quantized weights: they stay packed and are dequantized in blocks of one expert's rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from moereg.backends._loaded import Call
from moereg.backends._torch.plain import CANONICAL, HostImplementation
from moereg.experts import ExpertInputs
from moereg.kernels.plain import host
from moereg.kernels.plain.mlp import ExpertMlp, RepeatingMlp, dtype_is_emulated, has_large_weights
from moereg.kernels.plain.quantized_mlp import RestoredMatrix, RestoringMlp
from moereg.quantize import (
    activation_scale,
    dequantize_rows,
    expert_matrix,
    quantize_dequantize_activations,
    row_blocks,
    spans_tokens,
)
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class Restoring(HostImplementation):
    """Dequantizes weights block by block and rounds activations as `computes` says; standard format."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors; a static activation scale becomes one per expert."""
        tensors = weights.tensors()
        for name in ("a13_scale", "a2_scale"):
            if name in tensors:
                tensors[name] = tensors[name].expand(self.problem.num_local_experts).contiguous()
        return PermutedWeights(CANONICAL, tensors)

    def _mlp(self, call: Call) -> ExpertMlp:
        weights, inputs = call.weights, call.inputs
        mlp = self._restoring_mlp(weights, {})
        if mlp.compute_dtype == torch.float16:
            wide = dataclasses.replace(mlp, compute_dtype=torch.float32)
            return RepeatingMlp(mlp, wide, has_large_weights(inputs.topk_weights))
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
            problem.activation,
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
        return RestoredMatrix(restore, blocks, num_rows, weights.get(f"{name}_bias"))

    def _round(
        self, static: torch.Tensor | None, dynamic: torch.Tensor | None, x: torch.Tensor, expert: int
    ) -> torch.Tensor:
        return quantize_dequantize_activations(x, self.computes, dynamic if static is None else static[expert])


class RestoringBatched(Restoring):
    """As `Restoring`, on the rows that prepare laid out for each expert."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: results go straight to `out`."""
        return (0,), (0,)

    def run(self, call: Call) -> None:
        inputs = call.inputs
        assert inputs.expert_num_tokens is not None
        host.host_batched_experts(
            call.out, inputs.hidden_states, inputs.expert_num_tokens, self._isolated_mlp(call), self._w13_rows
        )
