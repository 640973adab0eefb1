"""`torch` on CPUs with gradients: a loop over active experts, whose weights are read where their owner has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from moereg.backends._loaded import Call
from moereg.backends._loaded_training import TrainingImplementation
from moereg.backends._torch.calls import CANONICAL
from moereg.backends._torch.plain import Host
from moereg.experts import ExpertInputs, Gradients, SavedShapes
from moereg.kernels.plain.host import SortedRoutes, sort_on_host
from moereg.kernels.plain.mlp import dtype_is_emulated
from moereg.spec.activations import Activation
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class TrainingHost(Host, TrainingImplementation):
    """CPU, standard format.

    Saves the rows before the activation, sorted by expert; sorting again is cheaper than keeping the order.
    """

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors."""
        return PermutedWeights(CANONICAL, weights.tensors())

    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        problem = self.problem
        num_routes = num_tokens * problem.top_k
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "pre": ((num_routes, self._w13_rows), problem.torch_dtype)
        }
        if problem.adapter_rank:
            shapes["w13_low"] = ((num_routes, problem.adapter_rank), problem.torch_dtype)
        return shapes

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: torch's allocator provides temporaries of one expert."""
        return (0,), (0,)

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        inputs, weights, routes = call.inputs, call.weights, self._sorted(call)
        flat_weights = inputs.topk_weights.reshape(-1)
        total = torch.zeros(call.out.shape, dtype=torch.float32, device="cpu")
        for expert, first, count in routes.segments:
            order = routes.order[first : first + count]
            tokens = order // self.problem.top_k
            pre = saved["pre"][first : first + count]
            rows = self._rows(inputs.hidden_states, tokens)
            product = _product(rows, self._matrix(weights["w13"], expert).t(), _row(weights, "w13_bias", expert))
            if (adapter := self._adapter(inputs, "w13", expert)) is not None:
                low = adapter.down(rows)
                saved["w13_low"][first : first + count, : low.shape[1]] = low
                product = adapter.added_up(product, low)
            pre.copy_(product)
            hidden = self.problem.activation(pre.float()).to(rows.dtype)
            result = _product(hidden, self._matrix(weights["w2"], expert).t(), _row(weights, "w2_bias", expert))
            if (adapter := self._adapter(inputs, "w2", expert)) is not None:
                result = adapter.added_up(result, adapter.down(hidden))
            # In fp32, and in the order of experts, whatever other tokens there are.
            total.index_add_(0, tokens, result.float() * flat_weights[order].unsqueeze(1))
        call.out.copy_(total)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        inputs, weights, routes = call.inputs, call.weights, self._sorted(call)
        flat_weights, top_k = inputs.topk_weights.reshape(-1), self.problem.top_k
        of_pre = grads.hidden_states, grads.w13, grads.w13_bias, grads.w13_a, grads.w13_b
        needs_pre = any(each is not None for each in of_pre)
        hidden_grad = torch.zeros(call.out.shape, dtype=torch.float32, device="cpu")
        route_grad = None if grads.topk_weights is None else grads.topk_weights.zero_().view(-1)
        _clear_inactive(grads, {expert for expert, _, _ in routes.segments}, self.problem.num_local_experts)
        for expert, first, count in routes.segments:
            order = routes.order[first : first + count]
            tokens = order // top_k
            scales = flat_weights[order].unsqueeze(1)  # [rows, 1]
            out_grad = self._rows(call.out, tokens)  # [rows, H]
            pre = saved["pre"][first : first + count].float()
            w13_adapter, w2_adapter = (self._adapter(inputs, name, expert) for name in ("w13", "w2"))
            w2_low_grad = None if w2_adapter is None else w2_adapter.up_gradient(out_grad)  # [rows, R]
            if needs_pre or route_grad is not None:
                act_grad = torch.mm(out_grad, self._matrix(weights["w2"], expert))  # [rows, I], unscaled
                if w2_adapter is not None and w2_low_grad is not None:
                    act_grad = torch.addmm(act_grad, w2_low_grad, w2_adapter.a)
                act_grad = act_grad.float()
            if route_grad is not None:
                each = (act_grad * self.problem.activation(pre)).sum(1)
                if (bias := weights.get("w2_bias")) is not None:
                    each += torch.mv(out_grad.float(), bias[expert].float())
                route_grad[order] = each
            if grads.w2 is not None or grads.w2_a is not None or grads.w2_b is not None:
                hidden = (self.problem.activation(pre) * scales).to(out_grad.dtype)
            if grads.w2 is not None:
                _write_product(grads.w2[expert], out_grad.t(), hidden, grads.accumulate)
            if grads.w2_a is not None and w2_low_grad is not None:
                _write_product(grads.w2_a[expert], w2_low_grad.t(), hidden, grads.accumulate)
            if grads.w2_b is not None and w2_adapter is not None:
                _write_product(grads.w2_b[expert], out_grad.t(), w2_adapter.down(hidden), grads.accumulate)
            if grads.w2_bias is not None:
                _write(grads.w2_bias[expert], torch.mv(out_grad.float().t(), scales.view(-1)), grads.accumulate)
            if not needs_pre:
                continue
            pre_grad = activation_gradient(self.problem.activation, pre, act_grad * scales)
            if grads.w13_bias is not None:
                _write(grads.w13_bias[expert], pre_grad.sum(0), grads.accumulate)
            pre_grad = pre_grad.to(out_grad.dtype)
            if grads.w13 is not None:
                rows = self._rows(inputs.hidden_states, tokens)
                _write_product(grads.w13[expert], pre_grad.t(), rows, grads.accumulate)
            low_grad = None if w13_adapter is None else w13_adapter.up_gradient(pre_grad)
            if grads.w13_a is not None and low_grad is not None:
                rows = self._rows(inputs.hidden_states, tokens)
                _write_product(grads.w13_a[expert], low_grad.t(), rows, grads.accumulate)
            if grads.w13_b is not None and w13_adapter is not None:
                low = saved["w13_low"][first : first + count, : w13_adapter.a.shape[0]].to(pre_grad.dtype)
                _write_product(grads.w13_b[expert], pre_grad.t(), low, grads.accumulate)
            if grads.hidden_states is not None:
                row_grad = torch.mm(pre_grad, self._matrix(weights["w13"], expert))
                if w13_adapter is not None and low_grad is not None:
                    row_grad = torch.addmm(row_grad, low_grad, w13_adapter.a)
                hidden_grad.index_add_(0, tokens, row_grad.float())
        if grads.hidden_states is not None:
            grads.hidden_states.copy_(hidden_grad)

    def _adapter(self, inputs: ExpertInputs, name: str, expert: int) -> _Adapter | None:
        adapters = inputs.adapters
        a, b = (getattr(adapters, f"{name}_{side}", None) for side in "ab")
        if adapters is None or a is None or b is None:
            return None
        return _Adapter(self._matrix(a, expert), self._matrix(b, expert), getattr(adapters, f"{name}_scaling"))

    def _sorted(self, call: Call) -> SortedRoutes:
        return sort_on_host(call.inputs.topk_ids, self.problem.num_local_experts, call.inputs.expert_map)

    def _rows(self, tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = tensor.index_select(0, tokens)
        return rows.float() if dtype_is_emulated(self.problem.torch_dtype) else rows

    def _matrix(self, weight: torch.Tensor, expert: int) -> torch.Tensor:
        return weight[expert].float() if dtype_is_emulated(self.problem.torch_dtype) else weight[expert]


class _Adapter(NamedTuple):
    """One expert's adapter of one matrix: `a` [R,in], `b` [out,R]. Scaling counts once, where rows become low."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def down(self, rows: torch.Tensor) -> torch.Tensor:
        """Scaled rows of low rank, [rows, R], of [rows, in]."""
        return torch.mm(rows, self.a.t()) * self.scaling

    def added_up(self, product: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """A product [rows, out] and the adapter's own."""
        return torch.addmm(product, low, self.b.t())

    def up_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The scaled gradient of rows of low rank, [rows, R], of that of the output, [rows, out]."""
        return torch.mm(grad, self.b) * self.scaling


def activation_gradient(activation: Activation, pre: torch.Tensor, act_grad: torch.Tensor) -> torch.Tensor:
    """The gradient before the activation.

    Args:
        activation: The function between the two matmuls.
        pre: [rows, 2I] gate first, or [rows, I] where not gated, fp32.
        act_grad: [rows, I] fp32, the gradient after the activation.

    Returns:
        [rows, 2I] or [rows, I] fp32. What the clamp cuts off gets 0, and its edge what it would get without a clamp.
    """
    if not activation.gated:
        return act_grad * torch.relu(pre).mul_(2)
    gate, up = pre.chunk(2, dim=1)
    limit = activation.limit
    g = gate if limit is None else gate.clamp(max=limit)
    u = up if limit is None else up.clamp(-limit, limit)
    if activation.name in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation.name == "gelu_tanh" else "none"
        value = torch.nn.functional.gelu(g, approximate=approximate)
        gate_grad = torch.ops.aten.gelu_backward(act_grad * (u + activation.beta), g, approximate=approximate)
    else:
        sigmoid = torch.sigmoid(activation.alpha * g)
        value = g * sigmoid
        slope = sigmoid * (1 + activation.alpha * g * (1 - sigmoid))
        gate_grad = act_grad * (u + activation.beta) * slope
    up_grad = act_grad * value
    if limit is not None:
        gate_grad = gate_grad.where(gate <= limit, 0.0)
        up_grad = up_grad.where(up.abs() <= limit, 0.0)
    return torch.cat((gate_grad, up_grad), dim=1)


def _row(weights: PermutedWeights, name: str, expert: int) -> torch.Tensor | None:
    bias = weights.get(name)
    return None if bias is None else bias[expert]


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias.to(rows.dtype), rows, matrix)


def _write_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> None:
    """Writes a product over rows, or adds it with one rounding."""
    if not accumulate and target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    else:
        _write(target, torch.mm(left.float(), right.float()), accumulate)


def _write(target: torch.Tensor, gradient: torch.Tensor, accumulate: bool) -> None:
    target.copy_(gradient.add_(target) if accumulate else gradient)


def _clear_inactive(grads: Gradients, active: set[int], num_experts: int) -> None:
    """Writes zeros for experts without tokens."""
    if grads.accumulate:
        return
    inactive = sorted(set(range(num_experts)) - active)
    of_experts = grads.w13, grads.w2, grads.w13_bias, grads.w2_bias, grads.w13_a, grads.w13_b, grads.w2_a, grads.w2_b
    for tensor in of_experts:
        if tensor is not None and inactive:
            tensor[inactive] = 0.0
