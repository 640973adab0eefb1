"""`torch` for 16- and 32-bit weights: in oneDNN's layout on CPUs, in canonical order on other devices."""

from __future__ import annotations

import abc
import sys
from typing import Final

import torch

from moereg.backends._loaded import Call, Implementation
from moereg.kernels.plain import cpu, device, host, mlp
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights

CANONICAL: Final = "canonical"
ONEDNN_FUSED: Final = "onednn_gate_up_down"
ONEDNN: Final = "onednn_w13_w2"

# Active experts of fewer elements in all are faster one after the other: waking a thread for them costs 0.3 ms with
# cold caches, a third of a call with two experts of 0.8 million.
_THREAD_ELEMENTS: Final = 5_000_000


class HostImplementation(Implementation):
    """Standard format: sorts routes on the host and runs each active expert's rows through `_mlp`."""

    @abc.abstractmethod
    def _mlp(self, call: Call) -> mlp.ExpertMlp:
        """The experts' matmuls."""

    def _isolated_mlp(self, call: Call) -> mlp.ExpertMlp:
        problem, matmuls = self.problem, self._mlp(call)
        mixes = cpu.mixes_rows(problem.torch_dtype, problem.hidden_size, problem.intermediate_size)
        return mlp.IsolatingMlp(matmuls) if mixes else matmuls

    @property
    def _w13_rows(self) -> int:
        return self.problem.activation.num_halves * self.problem.intermediate_size

    @property
    def _min_rows(self) -> int:
        """As in `host.bucket_rows`."""
        return host.MIN_ROWS

    @property
    def _min_tasks(self) -> int:
        """Fewest blocks of an expert's rows for which a thread each is faster than all threads on one at a time."""
        return 2

    @property
    def _activation(self) -> mlp.ActivationFn:
        activation = self.problem.activation
        return mlp.row_by_row(activation) if self.problem.batch_invariant else activation

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The routed rows of a chunk of tokens, in the second workspace."""
        problem, dtype = self.problem, host.rows_dtype(self.problem.torch_dtype)
        rows = host.routed_rows(num_tokens, problem.top_k, problem.hidden_size, dtype.itemsize)
        return (0,), (rows, problem.hidden_size * dtype.itemsize // problem.torch_dtype.itemsize)

    def run(self, call: Call) -> None:
        inputs = call.inputs
        host.host_experts(
            call.out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            self._isolated_mlp(call),
            num_local_experts=self.problem.num_local_experts,
            w13_rows=self._w13_rows,
            workspace=call.workspace2.view(host.rows_dtype(self.problem.torch_dtype)),
            expert_map=inputs.expert_map,
            apply_router_weight_on_input=self.problem.apply_router_weight_on_input,
            # As in the reference, scaled inputs are rounded before they are quantized.
            scaled_dtype=host.rows_dtype(self.problem.torch_dtype) if self.computes.activation is None else None,
            min_tasks=sys.maxsize if self.problem.batch_invariant else self._min_tasks,
            min_rows=self._min_rows,
            invariant=self.problem.batch_invariant,
        )


class HostBatchedImplementation(HostImplementation):
    """Batched format: likewise, on the rows that prepare laid out for each expert."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: results go straight to `out`."""
        return (0,), (0,)

    def run(self, call: Call) -> None:
        inputs = call.inputs
        assert inputs.expert_num_tokens is not None
        host.host_batched_experts(
            call.out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            self._isolated_mlp(call),
            w13_rows=self._w13_rows,
            min_tasks=self._min_tasks,
            min_rows=self._min_rows,
        )


class Host(HostImplementation):
    """CPU, standard format."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Packs every expert, or keeps views of the canonical tensors if packing does not pay."""
        problem = self.problem
        biases = weights.tensors("bias")
        if not mlp.packing_is_faster(problem.torch_dtype, "Intel" in self.platform.device_name, self._num_elements):
            return PermutedWeights(CANONICAL, {"w13": weights.w13, "w2": weights.w2, **biases})
        down = mlp.pack_experts(weights.w2)
        # oneDNN's fused matmul takes biases in its own dtype only, and rounding fp32 ones would lose precision.
        has_wide_bias = weights.w13_bias is not None and weights.w13_bias.dtype != problem.torch_dtype
        if has_wide_bias or self._post_op is None:
            return PermutedWeights(ONEDNN, {"w13": mlp.pack_experts(weights.w13), "w2": down, **biases})
        gate, up = weights.w13.chunk(2, dim=1)
        halves = {"gate": mlp.pack_experts(gate), "up": mlp.pack_experts(up)}
        return PermutedWeights(ONEDNN_FUSED, {**halves, "down": down, **biases})

    def _mlp(self, call: Call) -> mlp.ExpertMlp:
        activation, dtype, weights = self._activation, self.problem.torch_dtype, call.weights
        invariant = self.problem.batch_invariant
        biases = (weights.get("w13_bias"), weights.get("w2_bias"))
        narrow: mlp.ExpertMlp
        if weights.layout == ONEDNN_FUSED:
            assert self._post_op is not None
            gate, up, down = (weights.experts(name) for name in ("gate", "up", "down"))
            fused = mlp.PackedFusedMlp(gate, up, down, self._post_op, activation, *biases, invariant)
            narrow, wide = fused, fused.unpacked
        else:
            is_emulated = mlp.dtype_is_emulated(dtype)
            shares = weights.layout == CANONICAL and not invariant
            few_rows = mlp.few_rows(self._num_elements, is_emulated) if shares else 0
            w13, w2 = weights.per_expert["w13"], weights.per_expert["w2"]
            narrow = wide = mlp.PlainMlp(w13, w2, activation, *biases, is_emulated, few_rows, invariant)
        # The other dtypes have the range of fp32.
        if dtype != torch.float16:
            return narrow
        return mlp.RepeatingMlp(narrow, wide, invariant or mlp.has_large_weights(call.inputs.topk_weights))

    @property
    def _min_rows(self) -> int:
        dtype = self.problem.torch_dtype
        return 1 if dtype == torch.float32 or mlp.dtype_is_emulated(dtype) else host.MIN_ROWS

    @property
    def _min_tasks(self) -> int:
        return max(2, -(-_THREAD_ELEMENTS // self._num_elements))

    @property
    def _num_elements(self) -> int:
        """Elements of an expert's weights."""
        return (self._w13_rows + self.problem.intermediate_size) * self.problem.hidden_size

    @property
    def _post_op(self) -> tuple[str, str] | None:
        activation = self.problem.activation
        return mlp.fused_post_op(activation.name, activation.alpha, activation.beta, activation.limit)


class HostBatched(HostBatchedImplementation, Host):
    """CPU, batched format."""


class _Canonical(Implementation):
    """Canonical weights; nothing to permute, no workspace."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors."""
        return PermutedWeights(CANONICAL, weights.tensors())

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: torch's allocator provides temporaries, also during graph capture."""
        return (0,), (0,)


class Dense(_Canonical):
    """Any device, standard format: every expert sees every token."""

    _experts = staticmethod(device.dense_experts)

    def run(self, call: Call) -> None:
        inputs, weights = call.inputs, call.weights
        self._experts(
            call.out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            weights["w13"],
            weights["w2"],
            self.problem.activation,
            w13_bias=weights.get("w13_bias"),
            w2_bias=weights.get("w2_bias"),
            expert_map=inputs.expert_map,
            apply_router_weight_on_input=self.problem.apply_router_weight_on_input,
        )


class Grouped(Dense):
    """GPUs for which torch has a grouped matmul, standard format."""

    _experts = staticmethod(device.grouped_experts)

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors, copied if not 16-byte aligned, which the grouped matmul requires."""
        return PermutedWeights(CANONICAL, {name: aligned(tensor) for name, tensor in weights.tensors().items()})


class Batched(_Canonical):
    """Any device, batched format: two batched matmuls over all rows."""

    def run(self, call: Call) -> None:
        inputs, weights = call.inputs, call.weights
        assert inputs.expert_num_tokens is not None
        device.batched_experts(
            call.out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            weights["w13"],
            weights["w2"],
            self.problem.activation,
            w13_bias=weights.get("w13_bias"),
            w2_bias=weights.get("w2_bias"),
        )
