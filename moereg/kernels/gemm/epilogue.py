"""The gate/up GEMM's epilogue, built once per layer. Does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class ActivationConstant(NamedTuple):
    """The function between the products: `f(min(gate, limit)) * (softcap(clamp(up, -limit, limit)) + beta)`, or `f(x)`.

    A compile-time constant of kernels, with the fields of an `Activation`; nameless where there is none, as in the
    second product.
    """

    name: str | None = None  # f: `gelu`, `gelu_tanh`, `relu2`, or of other names `softcap(x) * sigmoid(alpha * x)`
    gated: bool = False  # whether w13 holds gates
    alpha: float = 1.0  # slope inside the sigmoid
    beta: float = 0.0  # added to the clamped up half; only where gated
    limit: float | None = None  # the clamp, or None; only where gated
    gate_softcap: float | None = None  # c of softcap(x) = c * tanh(x / c) in f; None: x
    up_softcap: float | None = None  # likewise, of the up half; only where gated


@dataclass(frozen=True, slots=True, eq=False)
class GateUpEpilogue:
    """Bias, then activation."""

    activation: ActivationConstant  # the function
    # [E, rows of an expert's canonical w13] contiguous, gates first, any float dtype; None: no bias
    bias: torch.Tensor | None = None

    @property
    def gated(self) -> bool:
        """Whether w13 holds gates."""
        return self.activation.gated
