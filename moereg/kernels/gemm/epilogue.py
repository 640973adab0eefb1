"""The gate/up GEMM's epilogue, built once per layer. Does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class ActivationConstant(NamedTuple):
    """A product's activation as a compile-time constant; the fields are those of `GateUpEpilogue`.

    Without a name there is no activation, as in the second product.
    """

    name: str | None = None
    gated: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GateUpEpilogue:
    """Bias, then activation: `f(min(gate, limit)) * (clamp(up, -limit, limit) + beta)`, or `f(x)` where not gated.

    Sizes: E local experts, R rows of an expert's canonical w13: 2I where gated, else I.

    Attributes:
        activation: f: `silu` and `swigluoai` (`x * sigmoid(alpha * x)`), `gelu`, `gelu_tanh` or `relu2`.
        gated: whether w13 holds gates.
        alpha: slope inside the sigmoid.
        beta: added to the clamped up half; only where gated.
        limit: the clamp, or None; only where gated.
        bias: [E, R] contiguous, gates first, any float dtype; None: no bias.
    """

    activation: str
    gated: bool
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    bias: torch.Tensor | None = None

    @property
    def constant(self) -> ActivationConstant:
        """Everything but the bias, as Triton kernels take it."""
        return ActivationConstant(self.activation, self.gated, self.alpha, self.beta, self.limit)
