"""RestoredExperts: experts that train above quantized weights, which are restored for each call."""

from __future__ import annotations

from typing import Any

from moereg.experts import Experts, SavedShapes
from moereg.quantize import dequantize_into
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


class RestoredExperts(Experts):
    """Experts of a quantized layer whose class computes on weights in the problem's dtype.

    A layer keeps the quantized tensors in canonical order. Each call restores them into memory that all layers share:
    forward, and once more backward if another layer's are there, as they are unless the layer was just recomputed.

    Attributes:
        inner: The class's experts, made for the unquantized layer. They read layout `canonical`.
    """

    layouts = ("canonical",)

    def __init__(self, inner: Experts, problem: MoEProblem) -> None:
        super().__init__(problem, inner.platform, inner.computes)
        self.inner = inner
        experts, hidden, width = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
        self._sizes = (experts, problem.activation.num_halves * width, hidden), (experts, hidden, width)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """The canonical tensors as they are."""
        tensors = weights.tensors()
        shared = {name: tensor for name, tensor in tensors.items() if not tensor.dim()}
        per_expert = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
        return PermutedWeights("canonical", per_expert, shared)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> Shapes:
        """Those of the class."""
        return self.inner.workspace_shapes(problem=self.inner.problem, num_tokens=num_tokens)

    def backward_workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> Shapes:
        """Those of the class."""
        return self.inner.backward_workspace_shapes(problem=self.inner.problem, num_tokens=num_tokens)

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> SavedShapes:
        """Those of the class."""
        return self.inner.saved_shapes(problem=self.inner.problem, num_tokens=num_tokens)

    def apply(self, *_: Any, **given: Any) -> None:
        """Restores the weights and runs the class; so do the others. All arguments come by keyword."""
        self._run("apply", **given)

    def apply_saving(self, *_: Any, **given: Any) -> None:  # noqa: D102
        self._run("apply_saving", **given)

    def apply_backward(self, *_: Any, **given: Any) -> None:  # noqa: D102
        self._run("apply_backward", **given)

    def _run(self, step: str, weights: PermutedWeights, **others: Any) -> None:
        held: dict[str, Any] = {**weights.per_expert, **weights.shared}
        quantized = ExpertWeights.unchecked(held, self.problem.quant)
        places = tuple(tensor.data_ptr() for tensor in quantized.tensors().values())
        found, is_there = WORKSPACES.take_for(places, self._sizes, self.problem.torch_dtype, quantized.w13.device)
        # Only between a forward pass and its backward pass are weights known not to change.
        if not (is_there and step == "apply_backward"):
            dequantize_into(quantized, *found)
        read = PermutedWeights("canonical", {"w13": found[0], "w2": found[1], **quantized.tensors("bias")})
        getattr(self.inner, step)(weights=read, **others)
