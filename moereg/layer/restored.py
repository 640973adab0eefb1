"""RestoredExperts: experts that train above quantized weights, which are restored for each call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.experts import ExpertInputs, Experts, Gradients, SavedShapes
from moereg.quantize import dequantize_into
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_ALIGNMENT: Final = 256
"""Bytes, that of workspaces."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


class RestoredExperts(Experts):
    """Experts of a quantized layer whose class computes on weights in the problem's dtype.

    A layer keeps the quantized tensors in canonical order. Each call restores them into the first part of workspace13,
    which all layers share: forward, and once more backward, since other layers have used it in between.

    Attributes:
        inner: The class's experts, made for the unquantized layer. They read layout `canonical`.
    """

    layouts = ("canonical",)

    def __init__(self, inner: Experts, problem: MoEProblem) -> None:
        super().__init__(problem, inner.platform, inner.computes)
        self.inner = inner
        experts, hidden, width = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
        self._sizes = (experts, problem.activation.num_halves * width, hidden), (experts, hidden, width)
        multiple = _ALIGNMENT // problem.torch_dtype.itemsize
        self._rooms = tuple(round_up(math.prod(size), multiple) for size in self._sizes)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """The canonical tensors as they are."""
        tensors = weights.tensors()
        shared = {name: tensor for name, tensor in tensors.items() if not tensor.dim()}
        per_expert = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
        return PermutedWeights("canonical", per_expert, shared)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> Shapes:
        """Those of the class, with room for restored weights in the first."""
        return self._with_room(self._shapes_of("workspace_shapes", num_tokens))

    def backward_workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> Shapes:
        """Likewise."""
        return self._with_room(self._shapes_of("backward_workspace_shapes", num_tokens))

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> SavedShapes:
        """Those of the class."""
        return self.inner.saved_shapes(problem=self.inner.problem, num_tokens=num_tokens)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Restores the weights and runs the class."""
        given = self._restored(weights, workspace13, self._shapes_of("workspace_shapes", len(out)))
        self.inner.apply(out=out, inputs=inputs, workspace2=workspace2, **given)

    def apply_saving(
        self,
        out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Likewise."""
        given = self._restored(weights, workspace13, self._shapes_of("workspace_shapes", len(out)))
        self.inner.apply_saving(out=out, saved=saved, inputs=inputs, workspace2=workspace2, **given)

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
        """Likewise."""
        given = self._restored(weights, workspace13, self._shapes_of("backward_workspace_shapes", len(grad_out)))
        given |= {"inputs": inputs, "workspace2": workspace2}
        self.inner.apply_backward(grads=grads, grad_out=grad_out, saved=saved, **given)

    def _shapes_of(self, method: str, num_tokens: int) -> Shapes:
        shapes: Shapes = getattr(self.inner, method)(problem=self.inner.problem, num_tokens=num_tokens)
        return shapes

    def _with_room(self, shapes: Shapes) -> Shapes:
        return (sum(self._rooms) + math.prod(shapes[0]),), shapes[1]

    def _restored(self, weights: PermutedWeights, workspace13: torch.Tensor, shapes: Shapes) -> dict[str, Any]:
        """Restores a layer's weights; returns them and the rest of workspace13, by argument."""
        *parts, rest = workspace13.split((*self._rooms, math.prod(shapes[0])))
        w13, w2 = (part[: math.prod(shape)].view(shape) for part, shape in zip(parts, self._sizes, strict=True))
        held: dict[str, Any] = {**weights.per_expert, **weights.shared}
        quantized = ExpertWeights.unchecked(held, self.problem.quant)
        dequantize_into(quantized, w13, w2)
        read = PermutedWeights("canonical", {"w13": w13, "w2": w2, **quantized.tensors("bias")})
        return {"weights": read, "workspace13": rest.view(shapes[0])}
