"""16- and 32-bit weights in canonical layout, as they lie in trained parameters, with gradients.

Sizes: T tokens, K experts per token, N = T * K routes, E local experts, H hidden, I intermediate, P columns of the
pre-activation, 2I where gated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moereg.backends._loaded import Call
from moereg.backends._loaded_training import TrainingImplementation
from moereg.backends._triton.work import gate_up_epilogue
from moereg.backends._triton.workspace import Piece, bytes_of, cut
from moereg.experts import Gradients, SavedShapes
from moereg.kernels.backward.config import (
    MIN_DOWN_INPUT_BLOCK_N,
    MIN_TRAINING_BLOCK_M,
    TrainingConfigs,
    select_training_configs,
)
from moereg.kernels.backward.products import (
    down_input_gradients,
    down_rows,
    gate_up_input_gradients,
    num_partials,
    saving_gate_up,
)
from moereg.kernels.backward.weights import bias_gradients, routing_gradients, weight_gradients
from moereg.kernels.launch import device as limits
from moereg.kernels.rows.plan import plan_in, route_workspace_numel
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class Training(TrainingImplementation):
    """Standard format. A forward pass saves the sorted rows before the activation and the plan of the routes."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors."""
        return PermutedWeights(self.layouts[0], weights.tensors())

    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        """`pre` [N, P], and the plan."""
        problem = self.problem
        return {
            "pre": ((num_tokens * problem.top_k, self._pre_columns), problem.torch_dtype),
            "plan": ((self._plan_words(num_tokens),), torch.int32),
        }

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The activation [N, I]; then routes' results [N, H] and, where nothing is saved, the plan."""
        return (self._numel(self._activation(num_tokens)), self._numel(*self._results(num_tokens)))

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pre-activation's gradient [N, P] and the activation [N, I]; then rows [N, H] and sums of tiles."""
        first = self._pre_gradient(num_tokens), self._activation(num_tokens)
        # As for the narrowest tile, so that more tokens never need less.
        second = self._rows(num_tokens), self._partials(num_tokens, MIN_DOWN_INPUT_BLOCK_N)
        return self._numel(*first), self._numel(*second)

    def run(self, call: Call) -> None:
        plan = cut(call.workspace2.view(torch.uint8), *self._results(len(call.inputs.topk_ids)))[1]
        self._forward(call, None, plan)

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        self._forward(call, saved["pre"], saved["plan"])

    def _forward(self, call: Call, pre: torch.Tensor | None, plan_words: torch.Tensor) -> None:
        problem, inputs, weights = self.problem, call.inputs, call.weights
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        counts = problem.num_experts, problem.num_local_experts
        plan = sort_routes(inputs.topk_ids, inputs.expert_map, *counts, configs.block_m, plan_words)
        act = cut(call.workspace13.view(torch.uint8), self._activation(num_tokens))[0]
        rows = cut(call.workspace2.view(torch.uint8), *self._results(num_tokens))[0]
        epilogue = gate_up_epilogue(problem, weights)
        saving_gate_up(
            act,
            pre,
            inputs.hidden_states,
            weights["w13"],
            plan,
            configs.rows,
            epilogue.constant,
            top_k=problem.top_k,
            bias=epilogue.bias,
        )
        # Weighted before they are rounded, as float16 needs it.
        factors, bias = inputs.topk_weights, weights.get("w2_bias")
        down_rows(rows, act, weights["w2"], plan, configs.rows, topk_weights=factors, bias=bias)
        reduce_sorted_rows(call.out, rows, plan.route_row, None)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        problem, inputs, weights, grad_out = self.problem, call.inputs, call.weights, call.out
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        plan = plan_in(saved["plan"], inputs.topk_ids.numel(), problem.num_local_experts, configs.block_m)
        first, second = call.workspace13.view(torch.uint8), call.workspace2.view(torch.uint8)
        pre_grad, act = cut(first, self._pre_gradient(num_tokens), self._activation(num_tokens))
        rows, partials = cut(second, self._rows(num_tokens), self._partials(num_tokens, configs.down_input.block_n))
        needs_pre_grad = any(one is not None for one in (grads.hidden_states, grads.w13, grads.w13_bias))
        if needs_pre_grad or grads.topk_weights is not None or grads.w2 is not None:
            down_input_gradients(
                pre_grad if needs_pre_grad else None,
                act if grads.w2 is not None else None,
                partials if grads.topk_weights is not None else None,
                grad_out,
                weights["w2"],
                saved["pre"],
                inputs.topk_weights,
                plan,
                configs.down_input,
                gate_up_epilogue(problem, weights).constant,
            )
        if grads.topk_weights is not None:
            routing_gradients(grads.topk_weights, partials, grad_out, plan, bias=weights.get("w2_bias"))
        if grads.hidden_states is not None:
            gate_up_input_gradients(rows, pre_grad, weights["w13"], plan, configs.rows)
            reduce_sorted_rows(grads.hidden_states, rows, plan.route_row, None)
        top_k, add = problem.top_k, grads.accumulate
        if grads.w13 is not None:
            given = grads.w13, pre_grad, inputs.hidden_states, plan, configs.weights
            weight_gradients(*given, top_k=top_k, gathers="right", accumulate=add)
        if grads.w2 is not None:
            given = grads.w2, grad_out, act, plan, configs.weights
            weight_gradients(*given, top_k=top_k, gathers="left", accumulate=add)
        if grads.w13_bias is not None:
            bias_gradients(grads.w13_bias, pre_grad, plan, topk_weights=None, accumulate=add)
        if grads.w2_bias is not None:
            bias_gradients(grads.w2_bias, grad_out, plan, topk_weights=inputs.topk_weights, accumulate=add)

    @property
    def _pre_columns(self) -> int:
        return self.problem.activation.num_halves * self.problem.intermediate_size

    def _configs(self, call: Call) -> TrainingConfigs:
        rows_per_expert = call.inputs.topk_ids.numel() / self.problem.num_experts
        element_bytes = self.problem.torch_dtype.itemsize
        return select_training_configs(rows_per_expert, element_bytes, limits.max_shared_bytes(call.out.device))

    def _plan_words(self, num_tokens: int) -> int:
        problem = self.problem
        return route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_TRAINING_BLOCK_M)

    def _activation(self, num_tokens: int) -> Piece:
        return Piece((num_tokens * self.problem.top_k, self.problem.intermediate_size), self.problem.torch_dtype)

    def _pre_gradient(self, num_tokens: int) -> Piece:
        return Piece((num_tokens * self.problem.top_k, self._pre_columns), self.problem.torch_dtype)

    def _rows(self, num_tokens: int) -> Piece:
        return Piece((num_tokens * self.problem.top_k, self.problem.hidden_size), self.problem.torch_dtype)

    def _results(self, num_tokens: int) -> tuple[Piece, Piece]:
        return self._rows(num_tokens), Piece((self._plan_words(num_tokens),), torch.int32)

    def _partials(self, num_tokens: int, block_n: int) -> Piece:
        problem = self.problem
        return Piece((num_partials(problem.intermediate_size, block_n), num_tokens * problem.top_k), torch.float32)

    def _numel(self, *pieces: Piece) -> tuple[int]:
        """Elements of the problem's dtype, in one dimension."""
        return (bytes_of(pieces) // self.problem.torch_dtype.itemsize,)
