"""Epilogues of QuACK's kernels, applied to a product's sums before they are stored.

QuACK traces these functions into its kernels. A value is one fp32 number on Hopper and a pair of them on Blackwell,
and the same expressions serve both: `F2` is a pair that can be added and multiplied.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from quack.activation import _maxnumf, _minnumf, gelu_erf, relu_sq, sigmoid
from quack.epilogue import F2, EpiMod, gemm_epilogue, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad

INTERMEDIATE: Final = "intermediate"
"""Name of the first product's output where it is gated: half as wide as the product."""

# gelu_tanh(x) = x * sigmoid(x * (LINEAR + CUBIC * x**2)), which needs no tanh: the fast one keeps 11 bits.
_LINEAR: Final = 2 * math.sqrt(2 / math.pi)
_CUBIC: Final = 0.044715 * _LINEAR


@dataclass(frozen=True, slots=True)
class GateUp:
    """The function between the two products, as `moereg.spec.activations` describes it.

    Attributes:
        activation: its name.
        gated: whether columns of the product alternate gate and up.
        alpha: slope inside the sigmoid.
        beta: added to the up half.
        limit: clamp, or None.
    """

    activation: str
    gated: bool
    alpha: float
    beta: float
    limit: float | None


@functools.cache
def gate_up_epilogue(function: GateUp, has_bias: bool, has_scales: bool) -> EpiMod:
    """The epilogue of the first product; operands `bias` [E,N], `row_scale` [rows] and `column_scale` [E,N], all fp32.

    Args:
        function: Between the products.
        has_bias: Whether there is the operand `bias`.
        has_scales: Whether there are the operands `row_scale` and `column_scale`, for 8-bit rows.
    """
    apply = _gated(function) if function.gated else _plain(function)
    epilogue: Callable[..., dict[str, Any]]
    # One function per set of operands: QuACK reads them from the signature.
    if has_scales and has_bias:

        def epilogue(acc, row_scale, column_scale, bias):
            return apply(acc * row_scale * column_scale + bias)

    elif has_scales:

        def epilogue(acc, row_scale, column_scale):
            return apply(acc * row_scale * column_scale)

    elif has_bias:

        def epilogue(acc, bias):
            return apply(acc + bias)

    else:

        def epilogue(acc):
            return apply(acc)

    _name(epilogue, function)
    outputs = (INTERMEDIATE,) if function.gated else ()
    mode = "acc_pair" if function.gated else None
    return gemm_epilogue(outputs=outputs, mode=mode, ops=_operands(has_bias, has_scales))(epilogue)


@functools.cache
def down_epilogue(has_bias: bool, has_scales: bool) -> EpiMod:
    """The epilogue of the second product: as in the first one, then times `weight` [rows] fp32."""
    epilogue: Callable[..., dict[str, Any]]
    if has_scales and has_bias:

        def epilogue(acc, row_scale, column_scale, bias, weight):
            return {"D": (acc * row_scale * column_scale + bias) * weight}

    elif has_scales:

        def epilogue(acc, row_scale, column_scale, weight):
            return {"D": acc * row_scale * column_scale * weight}

    elif has_bias:

        def epilogue(acc, bias, weight):
            return {"D": (acc + bias) * weight}

    else:

        def epilogue(acc, weight):
            return {"D": acc * weight}

    _name(epilogue)
    return gemm_epilogue(ops={**_operands(has_bias, has_scales), "weight": ColVecLoad("weight")})(epilogue)


def _name(epilogue: Callable[..., Any], function: GateUp | None = None) -> None:
    """Names an epilogue after what it computes: QuACK identifies functions of installed packages by name.

    It inspects the code of others, but for these, moereg's own among them, a kernel's key in memory and on disk has
    only the name and the operands. Without this, SiLU could run where GELU is asked for, or a kernel of outdated code.
    """
    epilogue.__qualname__ += f" {function} {_source_digest()}"


@functools.cache
def _source_digest() -> str:
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:16]


def _operands(has_bias: bool, has_scales: bool) -> dict[str, Any]:
    # Named, since QuACK cannot tell rows from columns where a product is square.
    rows = ("column_scale",) * has_scales + ("bias",) * has_bias
    columns = ("row_scale",) * has_scales
    return {**{name: RowVecLoad(name) for name in rows}, **{name: ColVecLoad(name) for name in columns}}


def _gated(function: GateUp) -> Callable[[Any], dict[str, Any]]:
    gate_function = _gate_function(function)
    beta, limit = function.beta, function.limit

    def apply(sums: Any) -> dict[str, Any]:
        gate, up = unpack(sums)
        if limit is not None:
            gate = _value(_minnumf(gate, limit))
            up = _value(_maxnumf(_minnumf(up, limit), -limit))
        if beta:
            up = up + beta
        return {INTERMEDIATE: gate_function(gate) * up}

    return apply


def _plain(function: GateUp) -> Callable[[Any], dict[str, Any]]:
    assert function.activation == "relu2", function.activation

    def apply(sums: Any) -> dict[str, Any]:
        return {"D": relu_sq(sums)}

    return apply


def _gate_function(function: GateUp) -> Callable[[Any], Any]:
    alpha = function.alpha
    if function.activation == "gelu":
        return _gelu
    if function.activation == "gelu_tanh":
        return _gelu_tanh
    assert function.activation in ("silu", "swigluoai"), function.activation

    def gate_function(gate: Any) -> Any:
        return gate * _value(sigmoid(gate * alpha if alpha != 1.0 else gate))

    return gate_function


def _gelu(gate: Any) -> Any:
    return _value(gelu_erf(gate))


def _gelu_tanh(gate: Any) -> Any:
    return gate * _value(sigmoid(gate * (gate * gate * _CUBIC + _LINEAR)))


def _value(result: Any) -> Any:
    """Wraps a result of QuACK's functions, which return plain pairs, as one that can be multiplied."""
    return F2(*result) if isinstance(result, tuple) else result
