"""`torch` on CPUs with gradients: a loop over active experts, whose weights are read where their owner has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from moereg.backends._loaded import Call
from moereg.backends._torch.plain import CANONICAL, Host
from moereg.experts import ExpertInputs, Gradients, SavedShapes
from moereg.kernels.plain.host import SortedRoutes, sort_on_host
from moereg.kernels.plain.mlp import dtype_is_emulated
from moereg.spec.activations import Activation, softcap
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class TrainingHost(Host):
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
        """None: torch's allocator provides temporaries of all rows."""
        return (0,), (0,)

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        inputs, weights, routes = call.inputs, call.weights, self._sorted(call)
        order, parts = _rows_of(routes)
        rows = self._rows(inputs.hidden_states, order // self.problem.top_k)  # [rows, H]
        pre = rows.new_empty(len(rows), self._w13_rows)
        for expert, part in parts:
            _product(pre[part], rows[part], self._matrix(weights["w13"], expert).t(), _row(weights, "w13_bias", expert))
            if (adapter := self._adapter(inputs, "w13", expert)) is not None:
                low = adapter.down(rows[part])
                saved["w13_low"][part, : low.shape[1]] = low
                pre[part].addmm_(low, adapter.b.t())
        kept = saved["pre"][: len(rows)].copy_(pre)
        act = self.problem.activation(kept.float()).to(rows.dtype)
        result = torch.empty_like(rows)
        for expert, part in parts:
            _product(result[part], act[part], self._matrix(weights["w2"], expert).t(), _row(weights, "w2_bias", expert))
            if (adapter := self._adapter(inputs, "w2", expert)) is not None:
                result[part].addmm_(adapter.down(act[part]), adapter.b.t())
        scales = inputs.topk_weights.reshape(-1)[order].unsqueeze(1)
        _add_routes(call.out, order, result.float() * scales, self.problem.top_k)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        inputs, weights, routes = call.inputs, call.weights, self._sorted(call)
        order, parts = _rows_of(routes)
        tokens, add = order // self.problem.top_k, grads.accumulate
        scales = inputs.topk_weights.reshape(-1)[order].unsqueeze(1)  # [rows, 1]
        of_pre = grads.hidden_states, grads.w13, grads.w13_bias, grads.w13_a, grads.w13_b
        needs_pre = any(each is not None for each in of_pre)
        _clear_inactive(grads, {expert for expert, _ in parts}, self.problem.num_local_experts)

        out_grad = self._rows(call.out, tokens)  # [rows, H]
        pre = saved["pre"][: len(order)].float()
        act_grad = out_grad.new_empty(len(order), self.problem.intermediate_size)  # but for the routing weights
        low_grads: dict[int, torch.Tensor] = {}
        for expert, part in parts:
            adapter = self._adapter(inputs, "w2", expert)
            if adapter is not None:
                low_grads[expert] = adapter.up_gradient(out_grad[part])  # [rows of the expert, R]
            if needs_pre or grads.topk_weights is not None:
                torch.mm(out_grad[part], self._matrix(weights["w2"], expert), out=act_grad[part])
                if adapter is not None:
                    act_grad[part].addmm_(low_grads[expert], adapter.a)

        if any(each is not None for each in (grads.topk_weights, grads.w2, grads.w2_a, grads.w2_b)):
            act = self.problem.activation(pre)
        if grads.topk_weights is not None:
            each = (act_grad.float() * act).sum(1)
            if (bias := weights.get("w2_bias")) is not None:
                for expert, part in parts:
                    each[part] += torch.mv(out_grad[part].float(), bias[expert].float())
            grads.topk_weights.zero_().view(-1)[order] = each
        if any(each is not None for each in (grads.w2, grads.w2_a, grads.w2_b)):
            act = (act * scales).to(out_grad.dtype)
        for expert, part in parts:
            if grads.w2 is not None:
                _write_product(grads.w2[expert], out_grad[part].t(), act[part], add)
            if grads.w2_a is not None and expert in low_grads:
                _write_product(grads.w2_a[expert], low_grads[expert].t(), act[part], add)
            if grads.w2_b is not None and (adapter := self._adapter(inputs, "w2", expert)) is not None:
                _write_product(grads.w2_b[expert], out_grad[part].t(), adapter.down(act[part]), add)
            if grads.w2_bias is not None:
                _write(grads.w2_bias[expert], torch.mv(out_grad[part].float().t(), scales[part].view(-1)), add)
        if needs_pre:
            pre_grad = activation_gradient(self.problem.activation, pre, act_grad.float() * scales)
            self._backward_of_pre(call, grads, saved, parts, tokens, order, pre_grad)

    def _backward_of_pre(
        self,
        call: Call,
        grads: Gradients,
        saved: Mapping[str, torch.Tensor],
        parts: list[tuple[int, slice]],
        tokens: torch.Tensor,
        order: torch.Tensor,
        wide_grad: torch.Tensor,
    ) -> None:
        """Gradients through that of the pre-activation, `wide_grad` [rows, 2I] fp32."""
        inputs, weights, add = call.inputs, call.weights, grads.accumulate
        rows = self._rows(inputs.hidden_states, tokens)
        pre_grad, row_grad = wide_grad.to(rows.dtype), torch.empty_like(rows)
        for expert, part in parts:
            if grads.w13_bias is not None:
                _write(grads.w13_bias[expert], wide_grad[part].sum(0), add)
            if grads.w13 is not None:
                _write_product(grads.w13[expert], pre_grad[part].t(), rows[part], add)
            if grads.hidden_states is not None:
                torch.mm(pre_grad[part], self._matrix(weights["w13"], expert), out=row_grad[part])
            if (adapter := self._adapter(inputs, "w13", expert)) is None:
                continue
            low_grad = adapter.up_gradient(pre_grad[part])
            if grads.hidden_states is not None:
                row_grad[part].addmm_(low_grad, adapter.a)
            if grads.w13_a is not None:
                _write_product(grads.w13_a[expert], low_grad.t(), rows[part], add)
            if grads.w13_b is not None:
                low = saved["w13_low"][part, : len(adapter.a)].to(rows.dtype)
                _write_product(grads.w13_b[expert], pre_grad[part].t(), low, add)
        if grads.hidden_states is not None:
            _add_routes(grads.hidden_states, order, row_grad.float(), self.problem.top_k)

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
    u = softcap(up if limit is None else up.clamp(-limit, limit), activation.up_softcap)
    if activation.name in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation.name == "gelu_tanh" else "none"
        value = torch.nn.functional.gelu(g, approximate=approximate)
        gate_grad = torch.ops.aten.gelu_backward(act_grad * (u + activation.beta), g, approximate=approximate)
    else:
        sigmoid, capped = torch.sigmoid(activation.alpha * g), softcap(g, activation.gate_softcap)
        value = capped * sigmoid
        by_gate = _softcap_slope(capped, activation.gate_softcap)
        slope = sigmoid * (by_gate + activation.alpha * capped * (1 - sigmoid))
        gate_grad = act_grad * (u + activation.beta) * slope
    up_grad = act_grad * value * _softcap_slope(u, activation.up_softcap)
    if limit is not None:
        gate_grad = gate_grad.where(gate <= limit, 0.0)
        up_grad = up_grad.where(up.abs() <= limit, 0.0)
    return torch.cat((gate_grad, up_grad), dim=1)


def _softcap_slope(capped: torch.Tensor, cap: float | None) -> torch.Tensor | float:
    return 1.0 if cap is None else 1 - (capped / cap) ** 2


def _row(weights: PermutedWeights, name: str, expert: int) -> torch.Tensor | None:
    bias = weights.get(name)
    return None if bias is None else bias[expert]


def _product(out: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(bias.to(rows.dtype), rows, matrix, out=out)


def _rows_of(routes: SortedRoutes) -> tuple[torch.Tensor, list[tuple[int, slice]]]:
    """The route of each row [rows], and each active expert's rows."""
    parts = [(expert, slice(first, first + count)) for expert, first, count in routes.segments]
    return routes.order[: parts[-1][1].stop if parts else 0], parts


def _add_routes(out: torch.Tensor, order: torch.Tensor, rows: torch.Tensor, top_k: int) -> None:
    """Writes each token's sum of its routes' rows [rows, H], in fp32 and in the order of its choices."""
    by_route = torch.zeros(len(out) * top_k, out.shape[1], dtype=torch.float32, device="cpu")
    by_route[order] = rows
    out.copy_(by_route.view(len(out), top_k, -1).sum(1))


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
