"""Activation functions with their derivatives, in Triton."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate, sigmoid, softcap


class Slopes(NamedTuple):
    """An activation's value and its derivatives, fp32 of equal shapes."""

    value: tl.tensor  # the activation
    gate: tl.tensor  # derivative by the gate half, or by the whole product where not gated
    up: tl.tensor  # derivative by the up half; as `gate` where not gated


@triton.jit
def slopes_of_halves(gate, up, ACTIVATION: tl.constexpr, SHORT: tl.constexpr = False):
    """`Slopes` of `activate_halves`; as in torch, a clamp passes the gradient of its limit itself."""
    BETA: tl.constexpr = ACTIVATION.beta
    LIMIT: tl.constexpr = ACTIVATION.limit
    at_gate, at_up = gate, up
    if LIMIT is not None:
        # tl.where keeps NaN; tl.minimum would replace it by the limit.
        at_gate = tl.where(gate > LIMIT, LIMIT, gate)
        at_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    of_gate = slopes(at_gate, ACTIVATION, SHORT)
    capped, by_at_up = softcap(at_up, ACTIVATION.up_softcap, SHORT)
    by_gate, by_up = of_gate.gate * (capped + BETA), of_gate.value * by_at_up
    if LIMIT is not None:
        by_gate = tl.where(gate > LIMIT, 0.0, by_gate)
        by_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, by_up)
    return Slopes(of_gate.value * (capped + BETA), by_gate, by_up)


@triton.jit
def slopes(x, ACTIVATION: tl.constexpr, SHORT: tl.constexpr = False):
    """`Slopes` of `activate` at fp32 `x`, which is not gated; SHORT: with a sigmoid in few instructions of NVIDIA's."""
    NAME: tl.constexpr = ACTIVATION.name
    ALPHA: tl.constexpr = ACTIVATION.alpha
    if NAME == "silu" or NAME == "swigluoai" or NAME == "situ":
        gate = sigmoid(x, ALPHA, SHORT)
        capped, slope = softcap(x, ACTIVATION.gate_softcap, SHORT)
        by_x = gate * (slope + ALPHA * capped * (1.0 - gate))
        return Slopes(capped * gate, by_x, by_x)
    else:
        by_x = _slope(x, ACTIVATION)
        return Slopes(activate(x, ACTIVATION), by_x, by_x)


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Derivative of an activation without a sigmoid."""
    NAME: tl.constexpr = ACTIVATION.name
    if NAME == "gelu":
        # The normal distribution, and x times its density.
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        # x * sigmoid(z), with z = 2 * sqrt(2 / pi) * (x + 0.044715 x^3).
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        return sigmoid + x * sigmoid * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(NAME == "relu2")
        return tl.where(x < 0.0, 0.0, 2.0 * x)
