"""Activation functions with their derivatives, in Triton."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moereg.kernels.gemm.activation import activate


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
    if LIMIT is None:
        of_gate = slopes(gate, ACTIVATION, SHORT)
        return Slopes(of_gate.value * (up + BETA), of_gate.gate * (up + BETA), of_gate.value)
    else:
        # tl.where keeps NaN; tl.minimum would replace it by the limit.
        clamped_gate = tl.where(gate > LIMIT, LIMIT, gate)
        clamped_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + BETA
        of_gate = slopes(clamped_gate, ACTIVATION, SHORT)
        by_gate = tl.where(gate > LIMIT, 0.0, of_gate.gate * clamped_up)
        by_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, of_gate.value)
        return Slopes(of_gate.value * clamped_up, by_gate, by_up)


@triton.jit
def slopes(x, ACTIVATION: tl.constexpr, SHORT: tl.constexpr = False):
    """`Slopes` of `activate` at fp32 `x`, which is not gated; SHORT: with a sigmoid in few instructions of NVIDIA's."""
    NAME: tl.constexpr = ACTIVATION.name
    ALPHA: tl.constexpr = ACTIVATION.alpha
    if NAME == "silu" or NAME == "swigluoai":
        sigmoid = _short_sigmoid(x, ALPHA) if SHORT else 1.0 / (1.0 + tl.exp(-ALPHA * x))
        by_x = sigmoid * (1.0 + ALPHA * x * (1.0 - sigmoid))
        return Slopes(x * sigmoid, by_x, by_x)
    else:
        by_x = _slope(x, ACTIVATION)
        return Slopes(activate(x, ACTIVATION), by_x, by_x)


@triton.jit
def _short_sigmoid(x, ALPHA: tl.constexpr):
    """`1 / (1 + exp(-ALPHA * x))` with a relative error below 1e-5.

    What is compiled of tl.exp and a division takes three times as many instructions, which scale numbers that cannot
    occur: the sum is at least 1, and a power of two that is too small for it counts as 0.
    """
    POWER: tl.constexpr = -1.4426950408889634 * ALPHA
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x * POWER],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


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
