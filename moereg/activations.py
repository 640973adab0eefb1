"""Activation functions between the two expert matmuls: values and their maths."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Final

import torch

from moereg.errors import UnknownNameError, unknown_name_message

__all__ = ["ACTIVATIONS", "Activation"]


@dataclasses.dataclass(frozen=True)
class Activation:
    """What happens between GEMM1 and GEMM2.

    Gated: with `g` the gate half and `u` the up half of GEMM1's output,
    `g = min(g, limit)`, `u = clamp(u, -limit, limit)`, result `f(g) * (u + beta)`, where `f` is
    `g * sigmoid(alpha * g)` for `silu` and `swigluoai` and GELU for `gelu` and `gelu_tanh`.
    Not gated: `relu2` is `relu(x) ** 2`.

    Attributes:
        name: One of the known names; two values of one name may differ in their scalars.
        gated: Whether w13 holds gate and up rows, or up rows alone.
        alpha: Slope inside the sigmoid.
        beta: Added to the up half.
        limit: Clamp, or None for no clamp.
    """

    name: str
    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.name not in _GATE_FUNCTIONS and self.name != "relu2":
            raise UnknownNameError(unknown_name_message("activation", self.name, [*_GATE_FUNCTIONS, "relu2"]))
        if self.gated == (self.name == "relu2"):
            rule = "is not gated" if self.name == "relu2" else "is gated"
            raise ValueError(f"activation {self.name!r} {rule}, got gated={self.gated}")
        for field in ("alpha", "beta"):
            if not math.isfinite(getattr(self, field)):
                raise ValueError(f"activation {field} must be finite, got {getattr(self, field)}")
        for field in ("alpha", "beta", "limit"):
            if isinstance(value := getattr(self, field), int):
                # Equal values have to read the same, since ranks compare text.
                object.__setattr__(self, field, float(value))
        if self.limit is not None and not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"swiglu_limit must be a positive finite number or None, got {self.limit}")
        if self.alpha != 1.0 and _GATE_FUNCTIONS.get(self.name) is not _sigmoid_gate:
            raise ValueError(f"alpha is the slope inside the sigmoid, which {self.name!r} has not, got {self.alpha}")
        if self.beta and not self.gated:
            raise ValueError(f"beta is added to the up half, which {self.name!r} has not, got {self.beta}")
        if self.limit is not None and not self.gated:
            raise ValueError(f"swiglu_limit clamps gate and up, but {self.name!r} is not gated; leave it out")

    @classmethod
    def from_name(cls, text: str, limit: float | None = None) -> Activation:
        """Reads what `str` writes: a name, or a name with other scalars, `silu(limit=10.0)`.

        Args:
            text: The standard name, optionally with scalars in brackets.
            limit: Another clamp, where not None.

        Raises:
            UnknownNameError: The name is not an activation.
            ValueError: The brackets do not hold `scalar=number` pairs.
        """
        name, bracket, rest = text.partition("(")
        try:
            value = ACTIVATIONS[name]
        except KeyError:
            raise UnknownNameError(unknown_name_message("activation", name, ACTIVATIONS)) from None
        if bracket:
            pairs = dict(_SCALAR.findall(rest))
            if re.sub(_SCALAR, "", rest).strip(" ,") != ")":
                raise ValueError(f"activation {text!r} is not a name with scalars, such as 'silu(limit=10.0)'")
            scalars = {field: None if number == "None" else float(number) for field, number in pairs.items()}
            value = dataclasses.replace(value, **scalars)  # type: ignore[arg-type]
        return value if limit is None else dataclasses.replace(value, limit=limit)

    def __str__(self) -> str:
        standard = ACTIVATIONS[self.name]
        scalars = [
            f"{field}={getattr(self, field)}"
            for field in ("alpha", "beta", "limit")
            if getattr(self, field) != getattr(standard, field)
        ]
        return f"{self.name}({', '.join(scalars)})" if scalars else self.name

    @property
    def num_halves(self) -> int:
        """Rows of w13 per row of the intermediate: 2 where gated, else 1."""
        return 2 if self.gated else 1

    def __call__(self, gemm1: torch.Tensor) -> torch.Tensor:
        """Applies the activation in the input's dtype.

        Args:
            gemm1 [..., 2I] (gate first) where gated, [..., I] otherwise.

        Returns:
            [..., I], same dtype, a new tensor.
        """
        if not self.gated:
            return torch.relu(gemm1).square()
        gate, up = gemm1.chunk(2, dim=-1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        if self.beta:
            up = up + self.beta
        return _GATE_FUNCTIONS[self.name](gate, self.alpha) * up


_SCALAR: Final = re.compile(r"(alpha|beta|limit)=((?<=limit=)None|[-+0-9.e]+)")


def _sigmoid_gate(gate: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)


_GATE_FUNCTIONS: Final[dict[str, Callable[[torch.Tensor, float], torch.Tensor]]] = {
    "silu": _sigmoid_gate,
    "swigluoai": _sigmoid_gate,
    "gelu": lambda gate, alpha: torch.nn.functional.gelu(gate),
    "gelu_tanh": lambda gate, alpha: torch.nn.functional.gelu(gate, approximate="tanh"),
}

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0),
    "relu2": Activation("relu2", gated=False),
}
