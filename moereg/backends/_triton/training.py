"""16- and 32-bit weights in canonical layout, as they lie in trained parameters, with gradients.

Sizes: T tokens, K experts per token, N = T * K routes, E local experts, H hidden, I intermediate, P columns of the
pre-activation, 2I where gated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

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
    LowRank,
    down_input_gradients,
    down_rows,
    expanding,
    gate_up_input_gradients,
    low_rank_rows,
    num_partials,
    saving_gate_up,
)
from moereg.kernels.backward.weights import bias_gradients, routing_gradients, weight_gradients
from moereg.kernels.launch import device as limits
from moereg.kernels.launch.remembered import launch_remembered
from moereg.kernels.rows.plan import RoutePlan, plan_in, route_workspace_numel
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_GRADIENTS: Final = tuple(field.name for field in dataclasses.fields(Gradients) if field.name != "accumulate")


@functools.lru_cache(maxsize=1024)
def _shape_of_layer(*_facts: Hashable) -> object:
    """A key that layers with equal facts share, quicker to hash than a problem."""
    return object()


class Training(TrainingImplementation):
    """Standard format. A forward pass saves the sorted rows before the activation and the plan of the routes."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors."""
        return PermutedWeights(self.layouts[0], weights.tensors())

    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        """`pre` [N, P], the plan, and of w13's adapter the low-rank rows [N, R]."""
        problem = self.problem
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "pre": ((num_tokens * problem.top_k, self._pre_columns), problem.torch_dtype),
            "plan": ((self._plan_words(num_tokens),), torch.int32),
        }
        if problem.adapter_rank:
            shapes["w13_low"] = ((num_tokens * problem.top_k, problem.adapter_rank), problem.torch_dtype)
        return shapes

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The activation [N, I]; then routes' results [N, H], low-rank rows and, where nothing is saved, the plan."""
        return (self._numel(self._activation(num_tokens)), self._numel(*self._results(num_tokens)))

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pre-activation's gradient [N, P] and the activation [N, I]; then rows [N, H], low-rank rows, and sums."""
        first = self._pre_gradient(num_tokens), self._activation(num_tokens)
        # As for the narrowest tile, so that more tokens never need less.
        low = self._low(num_tokens)
        second = self._rows(num_tokens), low, low, low, self._partials(num_tokens, MIN_DOWN_INPUT_BLOCK_N)
        return self._numel(*first), self._numel(*second)

    def run(self, call: Call) -> None:
        plan = cut(call.workspace2.view(torch.uint8), *self._results(len(call.inputs.topk_ids)))[2]
        self._forward(call, None, None, plan)

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        launches = functools.partial(self._forward, call, saved["pre"], saved.get("w13_low"), saved["plan"])
        self._launch("saving", launches, call, saved, Gradients())

    def _forward(
        self, call: Call, pre: torch.Tensor | None, w13_low: torch.Tensor | None, plan_words: torch.Tensor
    ) -> None:
        problem, inputs, weights = self.problem, call.inputs, call.weights
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        counts = problem.num_experts, problem.num_local_experts
        plan = sort_routes(inputs.topk_ids, inputs.expert_map, *counts, configs.block_m, plan_words)
        act = cut(call.workspace13.view(torch.uint8), self._activation(num_tokens))[0]
        rows, w2_low, _ = cut(call.workspace2.view(torch.uint8), *self._results(num_tokens))
        epilogue = gate_up_epilogue(problem, weights)
        w13_adapter, w2_adapter = (_Adapter.of(inputs.adapters, name) for name in ("w13", "w2"))
        w13_part = w2_part = None
        if w13_adapter is not None and w13_low is not None:
            w13_part = w13_adapter.part(w13_low, inputs.hidden_states, plan, configs, problem.top_k)
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
            low_rank=w13_part,
        )
        if w2_adapter is not None:
            w2_part = w2_adapter.part(w2_low, act, plan, configs)
        # Weighted before they are rounded, as float16 needs it.
        factors, bias = inputs.topk_weights, weights.get("w2_bias")
        named: dict[str, Any] = {"topk_weights": factors, "bias": bias, "low_rank": w2_part}
        down_rows(rows, act, weights["w2"], plan, configs.rows, **named)
        reduce_sorted_rows(call.out, rows, plan.route_row, None)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        self._launch("backward", functools.partial(self._backward, call, grads, saved), call, saved, grads)

    def _launch(
        self, what: str, launches: Callable[[], None], call: Call, saved: Mapping[str, torch.Tensor], grads: Gradients
    ) -> None:
        """Launches, or replays an earlier step of any layer of this shape: a step of 20 kernels waits for the host."""
        inputs, adapters = call.inputs, call.inputs.adapters
        tensors = (
            *(call.out, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map),
            *(call.workspace13, call.workspace2, *(saved.get(name) for name in ("pre", "plan", "w13_low"))),
            *(call.weights.get(name) for name in ("w13", "w2", "w13_bias", "w2_bias")),
            *(getattr(adapters, name, None) for name in ADAPTER_TENSORS),
            *(getattr(grads, name) for name in _GRADIENTS),
        )
        scalings = () if adapters is None else (adapters.w13_scaling, adapters.w2_scaling)
        key = what, _shape_of_layer(self.problem, str(self.platform))
        launch_remembered(key, launches, tensors, (grads.accumulate, *scalings))

    def _backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        problem, inputs, weights, grad_out = self.problem, call.inputs, call.weights, call.out
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        plan = plan_in(saved["plan"], inputs.topk_ids.numel(), problem.num_local_experts, configs.block_m)
        first, second = call.workspace13.view(torch.uint8), call.workspace2.view(torch.uint8)
        pre_grad, act = cut(first, self._pre_gradient(num_tokens), self._activation(num_tokens))
        low, sums = self._low(num_tokens), self._partials(num_tokens, configs.down_input.block_n)
        rows, w13_low, w2_low, w2_low_grad, partials = cut(second, self._rows(num_tokens), low, low, low, sums)
        w13_adapter, w2_adapter = (_Adapter.of(inputs.adapters, name) for name in ("w13", "w2"))
        of_pre_grad = grads.hidden_states, grads.w13, grads.w13_bias, grads.w13_a, grads.w13_b
        needs_pre_grad = any(one is not None for one in of_pre_grad)
        needs_act = any(one is not None for one in (grads.w2, grads.w2_a, grads.w2_b))
        w2_part = None
        if w2_adapter is not None:
            w2_part = w2_adapter.gradient_part(w2_low_grad, grad_out, plan, configs, problem.top_k)
        if needs_pre_grad or needs_act or grads.topk_weights is not None:
            down_input_gradients(
                pre_grad if needs_pre_grad else None,
                act if needs_act else None,
                partials if grads.topk_weights is not None else None,
                grad_out,
                weights["w2"],
                saved["pre"],
                inputs.topk_weights,
                plan,
                configs.down_input,
                gate_up_epilogue(problem, weights).constant,
                low_rank=w2_part,
            )
        if grads.topk_weights is not None:
            routing_gradients(grads.topk_weights, partials, grad_out, plan, bias=weights.get("w2_bias"))
        w13_part = None
        if w13_adapter is not None and needs_pre_grad:
            w13_part = w13_adapter.gradient_part(w13_low, pre_grad, plan, configs)
        if grads.hidden_states is not None:
            gate_up_input_gradients(rows, pre_grad, weights["w13"], plan, configs.rows, low_rank=w13_part)
            reduce_sorted_rows(grads.hidden_states, rows, plan.route_row, None)
        top_k, add = problem.top_k, grads.accumulate
        if grads.w13 is not None:
            given = grads.w13, pre_grad, inputs.hidden_states, plan, configs.weights
            weight_gradients(*given, top_k=top_k, gathers="right", accumulate=add)
        if grads.w2 is not None:
            given = grads.w2, grad_out, act, plan, configs.weights
            weight_gradients(*given, top_k=top_k, gathers="left", accumulate=add)
        named: dict[str, Any] = {"top_k": top_k, "accumulate": add}
        if grads.w13_a is not None and w13_part is not None:
            tile = configs.a_gradients(w13_part.rank)
            weight_gradients(grads.w13_a, w13_part.rows, inputs.hidden_states, plan, tile, gathers="right", **named)
        if grads.w13_b is not None and w13_adapter is not None:
            saved_low, tile = saved["w13_low"][:, : w13_adapter.rank], configs.b_gradients(w13_adapter.rank)
            weight_gradients(grads.w13_b, pre_grad, saved_low, plan, tile, gathers=None, **named)
        if grads.w2_a is not None and w2_part is not None:
            weight_gradients(
                grads.w2_a, w2_part.rows, act, plan, configs.a_gradients(w2_part.rank), gathers=None, **named
            )
        if grads.w2_b is not None and w2_adapter is not None:
            # Of activations that already have their routing weight.
            act_low, tile = w2_adapter.part(w2_low, act, plan, configs).rows, configs.b_gradients(w2_adapter.rank)
            weight_gradients(grads.w2_b, grad_out, act_low, plan, tile, gathers="left", **named)
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

    def _low(self, num_tokens: int) -> Piece:
        return Piece((num_tokens * self.problem.top_k, self.problem.adapter_rank), self.problem.torch_dtype)

    def _results(self, num_tokens: int) -> tuple[Piece, Piece, Piece]:
        return self._rows(num_tokens), self._low(num_tokens), Piece((self._plan_words(num_tokens),), torch.int32)

    def _partials(self, num_tokens: int, block_n: int) -> Piece:
        problem = self.problem
        return Piece((num_partials(problem.intermediate_size, block_n), num_tokens * problem.top_k), torch.float32)

    def _numel(self, *pieces: Piece) -> tuple[int]:
        """Elements of the problem's dtype, in one dimension."""
        return (bytes_of(pieces) // self.problem.torch_dtype.itemsize,)


class _Adapter(NamedTuple):
    """The experts' adapters of one matrix: `a` [E,R,in], `b` [E,out,R]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @classmethod
    def of(cls, adapters: ExpertAdapters | None, name: str) -> _Adapter | None:
        """Those of w13 or w2, or None."""
        a, b = (getattr(adapters, f"{name}_{side}", None) for side in "ab")
        return None if a is None or b is None else cls(a, b, getattr(adapters, f"{name}_scaling"))

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def part(
        self, low: torch.Tensor, rows: torch.Tensor, plan: RoutePlan, configs: TrainingConfigs, top_k: int | None = None
    ) -> LowRank:
        """Writes the low-rank rows of a product's input, and returns the adapter's part of the product.

        Args:
            low: [N, adapter_rank] scratch or saved; its first R columns are written.
            rows: [N,in] sorted, or [T,in] with `top_k`.
            plan: of the call.
            configs: of the call.
            top_k: K, where rows are those of tokens.
        """
        return self._part(low, rows, self.a.transpose(1, 2), self.b.transpose(1, 2), plan, configs, top_k)

    def gradient_part(
        self, low: torch.Tensor, rows: torch.Tensor, plan: RoutePlan, configs: TrainingConfigs, top_k: int | None = None
    ) -> LowRank:
        """As `part`, for the gradient of the product's input: rows are those of the output's gradient."""
        return self._part(low, rows, self.b, self.a, plan, configs, top_k)

    def _part(
        self,
        low: torch.Tensor,
        rows: torch.Tensor,
        narrowing: torch.Tensor,
        widening: torch.Tensor,
        plan: RoutePlan,
        configs: TrainingConfigs,
        top_k: int | None,
    ) -> LowRank:
        low, config = low[:, : self.rank], configs.low_rank_products(self.rank)
        low_rank_rows(low, rows, narrowing, plan, config, scaling=self.scaling, top_k=top_k)
        return expanding(low, widening)
