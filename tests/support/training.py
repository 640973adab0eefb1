"""A backend for tests that trains: an honest kernel in 16 bits, in steps that a subclass can get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moereg.author import ExpertAdapters, ExpertInputs, ExpertWeights, Gradients, MoEProblem, PermutedWeights
from moereg.backends._torch.training import activation_gradient
from moereg.kernels.plain.device import local_expert_ids
from moereg.numerics.reference import reference_experts
from moereg.spec.problem import GRADIENTS
from tests.support.fakes import EVERYTHING, FakeExperts

Rows = tuple[torch.Tensor, torch.Tensor]
"""Tokens and slots of an expert's rows."""
Operands = dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]
"""Left and right rows of each product by expert and tensor."""


class Adapter(NamedTuple):
    """One expert's adapter of one matrix in fp32; 0 where there is none."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class TrainingExperts(FakeExperts):
    """Rounds to the problem's dtype wherever a kernel of several launches may, and sums in fp32."""

    facts = dataclasses.replace(EVERYTHING, router_weight_on_input=False, gradients=frozenset(GRADIENTS))

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> Any:
        columns = problem.activation.num_halves * problem.intermediate_size
        return {"pre": ((num_tokens, problem.top_k, columns), problem.torch_dtype)}

    def apply_saving(
        self,
        out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        given = {"inputs": inputs, "weights": weights, "workspace13": workspace13, "workspace2": workspace2}
        self.forward(out=out, saved=saved, **given)

    def apply_backward(
        self,
        grads: Gradients,
        grad_out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        given = {"inputs": inputs, "weights": weights, "workspace13": workspace13, "workspace2": workspace2}
        self.backward(grads=grads, grad_out=grad_out, saved=saved, **given)

    def forward(self, *, out: torch.Tensor, saved: Any, inputs: ExpertInputs, weights: Any, **scratch: Any) -> None:
        """`apply_saving`."""
        if inputs.adapters is None:
            self.apply(out, inputs, weights, **scratch)
        else:
            in_fp32 = {name: tensor.float() for name, tensor in weights.per_expert.items()}
            merged = inputs.adapters.merged(ExpertWeights.unchecked(in_fp32, self.problem.quant))
            call = inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
            out.copy_(reference_experts(self.problem, merged, *call))
        for expert, rows in self.experts_with_rows(inputs):
            x, adapter = inputs.hidden_states[rows[0]].float(), self.adapter(inputs, "w13", expert)
            pre = x @ self.matrix(weights, "w13", expert).T + self.down(adapter, x) @ adapter.b.T
            if self.problem.has_bias:
                pre += weights["w13_bias"][expert].float()
            saved["pre"][rows] = pre.to(saved["pre"].dtype)

    def backward(
        self, *, grads: Gradients, grad_out: torch.Tensor, saved: Any, inputs: ExpertInputs, weights: Any, **_: Any
    ) -> None:
        """`apply_backward`."""
        by_route = torch.zeros(*inputs.topk_ids.shape, grad_out.shape[1])
        routing = torch.zeros_like(inputs.topk_weights)
        operands: Operands = {}
        for expert, rows in self.experts_with_rows(inputs):
            x, grad = inputs.hidden_states[rows[0]].float(), grad_out[rows[0]].float()
            scale = self.routing_weights(inputs, rows)
            of_w13, of_w2 = (self.adapter(inputs, name, expert) for name in ("w13", "w2"))
            grad_low = self.rounded(grad @ of_w2.b * of_w2.scaling)
            grad_act = self.rounded(grad @ self.matrix(weights, "w2", expert) + grad_low @ of_w2.a)
            act, grad_pre = self.act(saved["pre"][rows].float(), self.rounded(scale * grad_act))
            routing[rows] = self.routing_gradient(grad_act, act)
            grad_low13 = self.rounded(grad_pre @ of_w13.b * of_w13.scaling)
            by_route[rows] = self.rounded(grad_pre @ self.matrix(weights, "w13", expert) + grad_low13 @ of_w13.a)
            act = self.rounded(scale * act)
            operands[expert] = {"w13": (grad_pre, x), "w2": (grad, act)}
            operands[expert] |= {"w13_a": (grad_low13, x), "w13_b": (grad_pre, self.down(of_w13, x))}
            operands[expert] |= {"w2_a": (grad_low, act), "w2_b": (grad, self.down(of_w2, act))}
            if self.problem.has_bias:
                routing[rows] += (grad * weights["w2_bias"][expert].float()).sum(1)
                one = torch.ones(len(x), 1)
                operands[expert] |= {"w13_bias": (grad_pre, one), "w2_bias": (self.rounded(scale * grad), one)}
        parameters = {**weights.per_expert, **(inputs.adapters.tensors() if inputs.adapters else {})}
        of_experts = {name: torch.zeros(tensor.shape) for name, tensor in parameters.items()}
        for expert, pairs in self.deep(operands).items():
            for name in of_experts:
                left, right = pairs[name]
                of_experts[name][expert] = (left.T @ right).view(of_experts[name][expert].shape)
        found = {"hidden_states": by_route.sum(1), "topk_weights": routing, **of_experts}
        for name, tensor in found.items():
            self.write(name, getattr(grads, name), tensor, grads.accumulate and name in of_experts, inputs)

    def deep(self, operands: Operands) -> Operands:
        """The operands of the products that sum over an expert's rows."""
        return operands

    def write(
        self, name: str, out: torch.Tensor | None, found: torch.Tensor, accumulates: bool, inputs: ExpertInputs
    ) -> None:
        """Writes a gradient that is asked for."""
        if out is not None:
            out.copy_(out + found if accumulates else found)

    def experts_with_rows(self, inputs: ExpertInputs) -> Iterator[tuple[int, Rows]]:
        """Experts in order, each with its rows."""
        local = local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map)
        for expert in range(self.problem.num_local_experts):
            token, slot = torch.nonzero(local == expert, as_tuple=True)
            if len(token):
                yield expert, (token, slot)

    def matrix(self, weights: PermutedWeights, name: str, expert: int) -> torch.Tensor:
        """One expert's w13 or w2 in fp32."""
        return weights[name][expert].float()

    def adapters(self, inputs: ExpertInputs) -> ExpertAdapters | None:
        """Those that saved rows and gradients are computed with; the output is always right."""
        return inputs.adapters

    def adapter(self, inputs: ExpertInputs, name: str, expert: int) -> Adapter:
        """One expert's of w13 or w2."""
        problem, held = self.problem, self.adapters(inputs)
        if held is None or getattr(held, f"{name}_a") is None:
            hidden, width = problem.hidden_size, problem.intermediate_size
            rows, columns = (problem.activation.num_halves * width, hidden) if name == "w13" else (hidden, width)
            return Adapter(torch.zeros(1, columns), torch.zeros(rows, 1), 0.0)
        a, b = (getattr(held, f"{name}_{side}")[expert].float() for side in "ab")
        return Adapter(a, b, getattr(held, f"{name}_scaling"))

    def down(self, adapter: Adapter, rows: torch.Tensor) -> torch.Tensor:
        """Rows of low rank."""
        return self.rounded(rows @ adapter.a.T * adapter.scaling)

    def routing_weights(self, inputs: ExpertInputs, rows: Rows) -> torch.Tensor:
        """[rows, 1], which scale the gradients."""
        return inputs.topk_weights[rows].unsqueeze(1)

    def act(self, pre: torch.Tensor, grad: torch.Tensor) -> Rows:
        """The intermediate, and the gradient of what it is computed from."""
        activation = self.problem.activation
        return activation(pre), self.rounded(activation_gradient(activation, pre, grad))

    def routing_gradient(self, grad_act: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """[rows]."""
        return (grad_act * act).sum(1)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rounds to the problem's dtype."""
        return tensor.to(self.problem.torch_dtype).float()
