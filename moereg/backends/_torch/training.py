"""`torch` on CPUs with gradients: a loop over active experts, whose weights are read where their owner has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moereg.backends._loaded import Call
from moereg.backends._loaded_training import TrainingImplementation
from moereg.backends._torch.calls import CANONICAL
from moereg.backends._torch.plain import Host
from moereg.experts import Gradients, SavedShapes
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
        return {"pre": ((num_tokens * problem.top_k, self._w13_rows), problem.torch_dtype)}

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
            pre.copy_(_product(rows, self._matrix(weights["w13"], expert).t(), _row(weights, "w13_bias", expert)))
            hidden = self.problem.activation(pre.float()).to(rows.dtype)
            result = _product(hidden, self._matrix(weights["w2"], expert).t(), _row(weights, "w2_bias", expert))
            # In fp32, and in the order of experts, whatever other tokens there are.
            total.index_add_(0, tokens, result.float() * flat_weights[order].unsqueeze(1))
        call.out.copy_(total)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        inputs, weights, routes = call.inputs, call.weights, self._sorted(call)
        flat_weights, top_k = inputs.topk_weights.reshape(-1), self.problem.top_k
        needs_pre = grads.hidden_states is not None or grads.w13 is not None or grads.w13_bias is not None
        hidden_grad = torch.zeros(call.out.shape, dtype=torch.float32, device="cpu")
        route_grad = None if grads.topk_weights is None else grads.topk_weights.zero_().view(-1)
        _clear_inactive(grads, {expert for expert, _, _ in routes.segments}, self.problem.num_local_experts)
        for expert, first, count in routes.segments:
            order = routes.order[first : first + count]
            tokens = order // top_k
            scales = flat_weights[order].unsqueeze(1)  # [rows, 1]
            out_grad = self._rows(call.out, tokens)  # [rows, H]
            pre = saved["pre"][first : first + count].float()
            if needs_pre or route_grad is not None:
                act_grad = torch.mm(out_grad, self._matrix(weights["w2"], expert)).float()  # [rows, I], unscaled
            if route_grad is not None:
                each = (act_grad * self.problem.activation(pre)).sum(1)
                if (bias := weights.get("w2_bias")) is not None:
                    each += torch.mv(out_grad.float(), bias[expert].float())
                route_grad[order] = each
            if grads.w2 is not None:
                hidden = (self.problem.activation(pre) * scales).to(out_grad.dtype)
                _write_product(grads.w2[expert], out_grad.t(), hidden, grads.accumulate)
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
            if grads.hidden_states is not None:
                row_grad = torch.mm(pre_grad, self._matrix(weights["w13"], expert))
                hidden_grad.index_add_(0, tokens, row_grad.float())
        if grads.hidden_states is not None:
            grads.hidden_states.copy_(hidden_grad)

    def _sorted(self, call: Call) -> SortedRoutes:
        return sort_on_host(call.inputs.topk_ids, self.problem.num_local_experts, call.inputs.expert_map)

    def _rows(self, tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = tensor.index_select(0, tokens)
        return rows.float() if dtype_is_emulated(self.problem.torch_dtype) else rows

    def _matrix(self, weight: torch.Tensor, expert: int) -> torch.Tensor:
        return weight[expert].float() if dtype_is_emulated(self.problem.torch_dtype) else weight[expert]


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
    for tensor in (grads.w13, grads.w2, grads.w13_bias, grads.w2_bias):
        if tensor is not None and inactive:
            tensor[inactive] = 0.0
