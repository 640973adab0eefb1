"""RestoredExperts: experts that train above quantized weights, which are restored for each call."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from moereg.experts import Experts, SavedShapes
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
        """Those of the class, with the same room."""
        return self._with_room(self._shapes_of("backward_workspace_shapes", num_tokens))

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> SavedShapes:
        """Those of the class."""
        return self.inner.saved_shapes(problem=self.inner.problem, num_tokens=num_tokens)

    def apply(self, *_: Any, **given: Any) -> None:
        """Restores the weights and runs the class; so do the others. All arguments come by keyword."""
        self._run("apply", "workspace_shapes", len(given["out"]), **given)

    def apply_saving(self, *_: Any, **given: Any) -> None:  # noqa: D102
        self._run("apply_saving", "workspace_shapes", len(given["out"]), **given)

    def apply_backward(self, *_: Any, **given: Any) -> None:  # noqa: D102
        self._run("apply_backward", "backward_workspace_shapes", len(given["grad_out"]), **given)

    def _shapes_of(self, method: str, num_tokens: int) -> Shapes:
        shapes: Shapes = getattr(self.inner, method)(problem=self.inner.problem, num_tokens=num_tokens)
        return shapes

    def _with_room(self, shapes: Shapes) -> Shapes:
        return (sum(self._rooms) + math.prod(shapes[0]),), shapes[1]

    def _run(
        self,
        step: str,
        method: str,
        num_tokens: int,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        **others: Any,
    ) -> None:
        shapes = self._shapes_of(method, num_tokens)
        *parts, rest = workspace13.split((*self._rooms, math.prod(shapes[0])))
        w13, w2 = (part[: math.prod(shape)].view(shape) for part, shape in zip(parts, self._sizes, strict=True))
        held: dict[str, Any] = {**weights.per_expert, **weights.shared}
        quantized = ExpertWeights.unchecked(held, self.problem.quant)
        dequantize_into(quantized, w13, w2)
        read = PermutedWeights("canonical", {"w13": w13, "w2": w2, **quantized.tensors("bias")})
        getattr(self.inner, step)(weights=read, workspace13=rest.view(shapes[0]), **others)
