"""Gradients of layers with 16- and 32-bit weights, read where trained parameters lie.

Sizes: T tokens, K experts per token, N = T * K routes, E local experts, H hidden, I intermediate, P columns of the
pre-activation, 2I where gated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import plain
from moereg.backends._triton.training_products import (
    NUM_COUNTERS,
    Products,
    fits_hopper,
    hopper_guard,
    max_partials,
)
from moereg.backends._triton.work import gate_up_epilogue
from moereg.backends._workspace import Piece, bytes_of, cut
from moereg.experts import Gradients, SavedShapes
from moereg.kernels.backward.config import (
    MIN_DOWN_INPUT_BLOCK_N,
    MIN_TRAINING_BLOCK_M,
    TrainingConfigs,
    select_training_configs,
)
from moereg.kernels.backward.products import LowRank, expanding, low_rank_rows
from moereg.kernels.backward.weights import bias_gradients, routing_gradients, weight_gradients
from moereg.kernels.hopper import config as hopper_config
from moereg.kernels.hopper.training_gemm import clear
from moereg.kernels.launch import device as limits
from moereg.kernels.launch.remembered import launch_remembered
from moereg.kernels.rows.plan import RoutePlan, plan_in, route_workspace_numel
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters

_GRADIENTS: Final = tuple(field.name for field in dataclasses.fields(Gradients) if field.name != "accumulate")
_COUNTERS: Final = Piece((NUM_COUNTERS,), torch.int32)


class Training(plain.Standard):
    """Standard format. A forward pass saves the sorted rows before the activation and the plan of the routes.

    Calls without gradients run what infers.
    """

    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        """`pre` [guard + N, P], the plan, and of w13's adapter the low-rank rows [N, R]."""
        problem = self.problem
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "pre": (self._guarded(num_tokens, self._pre_columns).shape, problem.torch_dtype),
            "plan": ((self._plan_words(num_tokens),), torch.int32),
        }
        if problem.adapter_rank:
            shapes["w13_low"] = ((num_tokens * problem.top_k, problem.adapter_rank), problem.torch_dtype)
        return shapes

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those that infer; to save, the second has room for routes' results [guard + N, H] and low-rank rows."""
        intermediate, (numel,) = super().workspace_shapes(num_tokens)
        (results,) = self._numel(*self._results(num_tokens))
        return intermediate, (max(numel, results),)

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pre-activation's gradient [guard + N, P], the activation; rows [guard + N, H], low-rank rows and sums."""
        first = self._pre_gradient(num_tokens), self._activation(num_tokens)
        low = self._low(num_tokens)
        second = self._rows(num_tokens), low, low, low, self._partials(num_tokens), _COUNTERS
        return self._numel(*first), self._numel(*second)

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        self._launch("saving", functools.partial(self._forward, call, saved), call, saved, Gradients())

    def _forward(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        problem, inputs, weights, pre = self.problem, call.inputs, call.weights, saved["pre"]
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        counts = problem.num_experts, problem.num_local_experts
        on_hopper = self._fits_hopper(call, configs, (inputs.hidden_states,), pre)
        heavy_first = self._heavy_first(call) if on_hopper else False
        sorting = inputs.topk_ids, inputs.expert_map, *counts, configs.block_m, saved["plan"]
        plan = sort_routes(*sorting, heavy_first=heavy_first)
        given = plan, configs, self._guard(num_tokens)
        products = Products(*given, plan.tile_counters if on_hopper else None)
        act = cut(call.workspace13.view(-1).view(torch.uint8), self._activation(num_tokens))[0]
        rows, w2_low = cut(call.workspace2.view(torch.uint8), *self._results(num_tokens))
        epilogue = gate_up_epilogue(problem, weights)
        if problem.batch_invariant:
            # Inference's own launches, for its bits. The product that saves rounds otherwise, and is made again.
            self.launch(call)
            products.gate_up(act, pre, inputs.hidden_states, weights["w13"], epilogue, problem.top_k, None)
            return
        w13_adapter, w2_adapter = (_Adapter.of(inputs.adapters, name) for name in ("w13", "w2"))
        w13_part = w2_part = None
        if w13_adapter is not None:
            w13_part = w13_adapter.part(saved["w13_low"], inputs.hidden_states, plan, configs, problem.top_k)
        products.gate_up(act, pre, inputs.hidden_states, weights["w13"], epilogue, problem.top_k, w13_part)
        if w2_adapter is not None:
            w2_part = w2_adapter.part(w2_low, products.rows_of(act), plan, configs)
        # Weighted before they are rounded, as float16 needs it.
        products.down(rows, act, weights["w2"], inputs.topk_weights, weights.get("w2_bias"), w2_part)
        reduce_sorted_rows(call.out, products.rows_of(rows), plan.route_row, None)

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
        launch_remembered((what, self.layer_key), launches, tensors, (grads.accumulate, *scalings))

    def _backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        problem, inputs, weights, grad_out = self.problem, call.inputs, call.weights, call.out
        configs, num_tokens = self._configs(call), len(inputs.topk_ids)
        plan = plan_in(saved["plan"], inputs.topk_ids.numel(), problem.num_local_experts, configs.block_m)
        first, second = call.workspace13.view(torch.uint8), call.workspace2.view(torch.uint8)
        pre_grad, act = cut(first, self._pre_gradient(num_tokens), self._activation(num_tokens))
        low = self._low(num_tokens)
        pieces = self._rows(num_tokens), low, low, low, self._partials(num_tokens), _COUNTERS
        rows, w13_low, w2_low, w2_low_grad, partials, counters = cut(second, *pieces)
        on_hopper = self._fits_hopper(call, configs, (grad_out, inputs.hidden_states), saved["pre"])
        if on_hopper:
            clear(counters)
        products = Products(plan, configs, self._guard(num_tokens), counters if on_hopper else None)
        partials = partials[: products.num_partials(problem.intermediate_size)]
        w13_adapter, w2_adapter = (_Adapter.of(inputs.adapters, name) for name in ("w13", "w2"))
        of_pre_grad = grads.hidden_states, grads.w13, grads.w13_bias, grads.w13_a, grads.w13_b
        needs_pre_grad = any(one is not None for one in of_pre_grad)
        needs_act = any(one is not None for one in (grads.w2, grads.w2_a, grads.w2_b))
        w2_part = None
        if w2_adapter is not None:
            w2_part = w2_adapter.part(w2_low_grad, grad_out, plan, configs, problem.top_k, of_gradient=True)
        if needs_pre_grad or needs_act or grads.topk_weights is not None:
            products.down_input(
                pre_grad if needs_pre_grad else None,
                act if needs_act else None,
                partials if grads.topk_weights is not None else None,
                grad_out,
                weights["w2"],
                saved["pre"],
                inputs.topk_weights,
                gate_up_epilogue(problem, weights).activation,
                w2_part,
            )
        if grads.topk_weights is not None:
            routing_gradients(grads.topk_weights, partials, grad_out, plan, bias=weights.get("w2_bias"))
        w13_part = None
        sorted_pre_grad, sorted_act = products.rows_of(pre_grad), products.rows_of(act)
        if w13_adapter is not None and needs_pre_grad:
            w13_part = w13_adapter.part(w13_low, sorted_pre_grad, plan, configs, of_gradient=True)
        if grads.hidden_states is not None:
            products.gate_up_input(rows, pre_grad, weights["w13"], w13_part)
            reduce_sorted_rows(grads.hidden_states, products.rows_of(rows), plan.route_row, None)
        named: dict[str, Any] = {"top_k": problem.top_k, "accumulate": grads.accumulate}
        if grads.w13 is not None:
            products.w13_gradients(grads.w13, pre_grad, inputs.hidden_states, **named)
        if grads.w2 is not None:
            products.w2_gradients(grads.w2, grad_out, act, **named)
        if grads.w13_a is not None and w13_part is not None:
            tile = configs.a_gradients(w13_part.rank)
            weight_gradients(grads.w13_a, w13_part.rows, inputs.hidden_states, plan, tile, gathers="right", **named)
        if grads.w13_b is not None and w13_adapter is not None:
            saved_low, tile = saved["w13_low"][:, : w13_adapter.rank], configs.b_gradients(w13_adapter.rank)
            weight_gradients(grads.w13_b, sorted_pre_grad, saved_low, plan, tile, gathers=None, **named)
        if grads.w2_a is not None and w2_part is not None:
            weight_gradients(
                grads.w2_a, w2_part.rows, sorted_act, plan, configs.a_gradients(w2_part.rank), gathers=None, **named
            )
        if grads.w2_b is not None and w2_adapter is not None:
            # Of activations that already have their routing weight.
            act_low = w2_adapter.part(w2_low, sorted_act, plan, configs).rows
            tile = configs.b_gradients(w2_adapter.rank)
            weight_gradients(grads.w2_b, grad_out, act_low, plan, tile, gathers="left", **named)
        if grads.w13_bias is not None:
            bias_gradients(grads.w13_bias, sorted_pre_grad, plan, topk_weights=None, accumulate=grads.accumulate)
        if grads.w2_bias is not None:
            given = grads.w2_bias, grad_out, plan
            bias_gradients(*given, topk_weights=inputs.topk_weights, accumulate=grads.accumulate)

    @property
    def _pre_columns(self) -> int:
        return self.problem.activation.num_halves * self.problem.intermediate_size

    def _configs(self, call: Call) -> TrainingConfigs:
        element_bytes = self.problem.torch_dtype.itemsize
        shared_bytes = limits.max_shared_bytes(call.out.device)
        return select_training_configs(self._rows_per_expert(call), element_bytes, shared_bytes)

    def _plan_words(self, num_tokens: int) -> int:
        problem = self.problem
        return route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_TRAINING_BLOCK_M)

    def _fits_hopper(
        self, call: Call, configs: TrainingConfigs, tokens: tuple[torch.Tensor, ...], pre: torch.Tensor
    ) -> bool:
        """Whether a pass that gathers rows of these tokens takes Hopper's products."""
        if not self._guard(len(call.inputs.topk_ids)):
            return False
        inputs, weights = call.inputs, call.weights
        contiguous = weights["w13"], weights["w2"], weights.get("w13_bias"), weights.get("w2_bias"), pre
        adapters = tuple(getattr(inputs.adapters, name, None) for name in ADAPTER_TENSORS)
        # Low-rank rows of a narrower adapter are as far apart as those of the widest.
        if inputs.adapters is not None and self.problem.adapter_rank % 8:
            return False
        return all(fits_hopper(configs.block_m, one, contiguous, adapters) for one in tokens)

    def _heavy_first(self, call: Call) -> int:
        """In which order tiles are fastest, as in inference."""
        columns, num_experts = self._pre_columns, self.problem.num_local_experts
        return hopper_config.select_config(self._rows_per_expert(call), columns, num_experts).heavy_first

    def _rows_per_expert(self, call: Call) -> float:
        return call.inputs.topk_ids.numel() / self.problem.num_experts

    def _guard(self, num_tokens: int) -> int:
        """Rows in front of sorted rows, where a call of so many tokens may take Hopper's products; or 0."""
        num_routes, num_experts = num_tokens * self.problem.top_k, self.problem.num_experts
        return hopper_guard(num_routes, num_routes / num_experts, self.problem.torch_dtype) if self.has_hopper else 0

    def _guarded(self, num_tokens: int, width: int) -> Piece:
        """Sorted rows behind the guard."""
        return Piece((self._guard(num_tokens) + num_tokens * self.problem.top_k, width), self.problem.torch_dtype)

    def _activation(self, num_tokens: int) -> Piece:
        return self._guarded(num_tokens, self.problem.intermediate_size)

    def _pre_gradient(self, num_tokens: int) -> Piece:
        return self._guarded(num_tokens, self._pre_columns)

    def _rows(self, num_tokens: int) -> Piece:
        return self._guarded(num_tokens, self.problem.hidden_size)

    def _low(self, num_tokens: int) -> Piece:
        return Piece((num_tokens * self.problem.top_k, self.problem.adapter_rank), self.problem.torch_dtype)

    def _results(self, num_tokens: int) -> tuple[Piece, Piece]:
        return self._rows(num_tokens), self._low(num_tokens)

    def _partials(self, num_tokens: int) -> Piece:
        """As for the narrowest tile, so that more tokens never need less."""
        problem = self.problem
        on_hopper = self._guard(num_tokens) > 0
        num_partials = max_partials(problem.intermediate_size, MIN_DOWN_INPUT_BLOCK_N, on_hopper)
        return Piece((num_partials, num_tokens * problem.top_k), torch.float32)

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
        self,
        low: torch.Tensor,
        rows: torch.Tensor,
        plan: RoutePlan,
        configs: TrainingConfigs,
        top_k: int | None = None,
        of_gradient: bool = False,
    ) -> LowRank:
        """Writes the low-rank rows of a product's input, and returns the adapter's part of the product.

        Args:
            low: [N, adapter_rank] scratch or saved; its first R columns are written.
            rows: [N,in] sorted, or [T,in] with `top_k`.
            plan, configs: of the call.
            top_k: K, where rows are those of tokens.
            of_gradient: For the gradient of the product's input: rows are those of the output's gradient.
        """
        narrowing, widening = (self.b, self.a) if of_gradient else (self.a.transpose(1, 2), self.b.transpose(1, 2))
        low, config = low[:, : self.rank], configs.low_rank_products(self.rank)
        low_rank_rows(low, rows, narrowing, plan, config, scaling=self.scaling, top_k=top_k)
        return expanding(low, widening)
