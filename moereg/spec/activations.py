"""Activation functions between the two expert matmuls: values and their math."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Final

import torch

from moereg.arguments import check_flag, check_number, check_one_of
from moereg.errors import ArgumentError, shown

# The largest scalar that every computed dtype can hold: bfloat16's.
_LARGEST: Final = (2 - 2**-7) * 2.0**127


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function between the two matmuls.

    Gated: with `g` the gate half and `u` the up half of GEMM1's output,
    `g = min(g, limit)`, `u = clamp(u, -limit, limit)`, result `f(g) * (u + beta)`, where `f` is
    `g * sigmoid(alpha * g)` for `silu` and `swigluoai` and GELU for `gelu` and `gelu_tanh`.
    For `situ`, `f` is `softcap(g, gate_softcap) * sigmoid(g)` and `u` becomes `softcap(u, up_softcap)` before beta is
    added, with `softcap(x, c) = c * tanh(x / c)`.
    Not gated: `relu2` is `relu(x) ** 2`.

    Attributes:
        name: One of the known names; two values of one name may differ in their scalars.
        gated: Whether w13 holds gate and up rows, or only up rows.
        alpha: Slope inside the sigmoid.
        beta: Added to the up half.
        limit: Clamp, or None for no clamp.
        gate_softcap: Soft cap of `situ`'s gate, None for all others.
        up_softcap: Soft cap of `situ`'s up half, or None.

    Raises:
        UnknownNameError: The name is not known.
        ArgumentError: A scalar is not finite or has no meaning for the activation, or `gated` contradicts the name.

    Example:
        >>> activation = moereg.Activation.from_name("silu", limit=10.0)
        >>> print(activation, activation.num_halves)
        silu(limit=10.0) 2
    """

    name: str
    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    gate_softcap: float | None = None
    up_softcap: float | None = None

    def __post_init__(self) -> None:
        check_one_of("activation", self.name, (*_GATE_FUNCTIONS, "relu2"))
        if check_flag("activation gated", self.gated) == (self.name == "relu2"):
            rule = "is not gated" if self.name == "relu2" else "is gated"
            raise ArgumentError(f"activation {self.name!r} {rule}, got gated={self.gated}")
        for field in ("alpha", "beta"):
            # Equal values must have equal text, which ranks compare.
            number = check_number(f"activation {field}", getattr(self, field))
            if abs(number) > _LARGEST:
                raise ArgumentError(f"activation {field} must be at most {_LARGEST:.3g} either way, got {number}")
            object.__setattr__(self, field, number)
        for field, label in (("limit", "swiglu_limit"), *((cap, cap) for cap in _SOFTCAPS)):
            bound = getattr(self, field)
            if bound is not None:
                if not (isinstance(bound, (int, float)) and 0 < bound <= _LARGEST) or bound is True:
                    raise ArgumentError(f"{label} must be a positive finite number or None, got {shown(bound)}")
                object.__setattr__(self, field, float(bound))
        caps = (self.gate_softcap, self.up_softcap)
        if caps[0] is None if self.name == "situ" else caps != (None, None):
            rule = "takes a gate_softcap" if self.name == "situ" else "takes no soft caps"
            raise ArgumentError(f"activation {self.name!r} {rule}, got gate_softcap={caps[0]} and up_softcap={caps[1]}")
        if self.alpha != 1.0 and _GATE_FUNCTIONS.get(self.name) is not _sigmoid_gate:
            raise ArgumentError(
                f"alpha is the slope inside the sigmoid, which {self.name!r} does not have, got {self.alpha}"
            )
        if self.beta and not self.gated:
            raise ArgumentError(f"beta is added to the up half, which {self.name!r} does not have, got {self.beta}")
        if self.limit is not None and not self.gated:
            raise ArgumentError(f"swiglu_limit clamps gate and up, but {self.name!r} is not gated; leave it out")

    @classmethod
    def from_name(cls, text: str, limit: float | None = None) -> Activation:
        """Parses the text of `str`: a name, optionally with scalars, such as `silu(limit=10.0)`.

        Args:
            text: The standard name, optionally with scalars in brackets.
            limit: Another clamp, if not None.

        Raises:
            UnknownNameError: The name is not an activation.
            ArgumentError: The brackets do not hold `scalar=number` pairs.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"activation must be a name, got {shown(text)}")
        name, bracket, rest = text.partition("(")
        value = ACTIVATIONS[check_one_of("activation", name, tuple(ACTIVATIONS))]
        if bracket:
            pairs = _SCALAR.findall(rest)
            try:
                scalars = {field: None if number == "None" else float(number) for field, number in pairs}
            except ValueError:  # The pattern also matches text that only looks like a number.
                scalars = {}
            if len(scalars) < len(pairs) or re.sub(_SCALAR, "", rest).strip(" ,") != ")":
                raise ArgumentError(
                    f"activation {shown(text)} is not a name with scalars, such as 'silu(limit=10.0)'; give each once"
                )
            value = dataclasses.replace(value, **scalars)  # type: ignore[arg-type]
        return value if limit is None else dataclasses.replace(value, limit=limit)

    def __str__(self) -> str:
        standard = ACTIVATIONS[self.name]
        scalars = [
            f"{field}={getattr(self, field)}"
            for field in ("alpha", "beta", "limit", *_SOFTCAPS)
            if getattr(self, field) != getattr(standard, field)
        ]
        return f"{self.name}({', '.join(scalars)})" if scalars else self.name

    @property
    def num_halves(self) -> int:
        """Rows of w13 per row of the intermediate: 2 if gated, else 1."""
        return 2 if self.gated else 1

    def __call__(self, gemm1: torch.Tensor) -> torch.Tensor:
        """Applies the activation in the input's dtype.

        Args:
            gemm1: [..., 2I] (gate first) if gated, [..., I] otherwise.

        Returns:
            [..., I], same dtype, a new tensor.

        Raises:
            ArgumentError: The argument is not a floating tensor, or a gated activation got an odd number of columns.
        """
        computed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        if not isinstance(gemm1, torch.Tensor) or gemm1.dim() == 0 or gemm1.dtype not in computed or gemm1.is_sparse:
            raise ArgumentError(
                "an activation takes a dense tensor of floats of 16 bits or more, got "
                f"{f'{gemm1.dtype} {list(gemm1.shape)}' if isinstance(gemm1, torch.Tensor) else shown(gemm1)}"
            )
        if not self.gated:
            return torch.relu(gemm1).square()
        if gemm1.shape[-1] % 2:
            raise ArgumentError(f"activation {self.name!r} takes gate and up halves, got a row of {gemm1.shape[-1]}")
        gate, up = gemm1.chunk(2, dim=-1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        up = softcap(up, self.up_softcap)
        if self.beta:
            up = up + self.beta
        return _GATE_FUNCTIONS[self.name](gate, self) * up


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Returns `cap * tanh(x / cap)`, or x without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


_SOFTCAPS: Final = ("gate_softcap", "up_softcap")
_SCALAR: Final = re.compile(
    r"(alpha|beta|limit|gate_softcap|up_softcap)=((?<=limit=)None|(?<=up_softcap=)None|[-+0-9.e]+)"
)


def _sigmoid_gate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    alpha = activation.alpha
    return torch.nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)


_GATE_FUNCTIONS: Final[dict[str, Callable[[torch.Tensor, Activation], torch.Tensor]]] = {
    "silu": _sigmoid_gate,
    "swigluoai": _sigmoid_gate,
    "gelu": lambda gate, activation: torch.nn.functional.gelu(gate),
    "gelu_tanh": lambda gate, activation: torch.nn.functional.gelu(gate, approximate="tanh"),
    "situ": lambda gate, activation: softcap(gate, activation.gate_softcap) * torch.sigmoid(gate),
}

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0),
    "situ": Activation("situ", gate_softcap=4.0, up_softcap=25.0),
    "relu2": Activation("relu2", gated=False),
}
