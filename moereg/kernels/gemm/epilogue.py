"""The gate/up GEMM's epilogue, built once per layer. Does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class ActivationConstant(NamedTuple):
    """The function between the products: `f(min(gate, limit)) * (clamp(up, -limit, limit) + beta)`, or `f(x)`.

    A compile-time constant of kernels. Without a name there is no activation, as in the second product.

    Attributes:
        name: f: `silu` and `swigluoai` (`x * sigmoid(alpha * x)`), `gelu`, `gelu_tanh` or `relu2`.
        gated: whether w13 holds gates.
        alpha: slope inside the sigmoid.
        beta: added to the clamped up half; only where gated.
        limit: the clamp, or None; only where gated.
    """

    name: str | None = None
    gated: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GateUpEpilogue:
    """Bias, then activation.

    Attributes:
        activation: the function.
        bias: [E, rows of an expert's canonical w13] contiguous, gates first, any float dtype; None: no bias.
    """

    activation: ActivationConstant
    bias: torch.Tensor | None = None

    @property
    def gated(self) -> bool:
        """Whether w13 holds gates."""
        return self.activation.gated
