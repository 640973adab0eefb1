"""Activation functions of the gate/up GEMM's epilogue, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def canonical_rows(columns, num_rows, ACTIVATION: tl.constexpr):
    """Rows of a canonical w13, or of its bias, whose product has gates in the even columns and ups in the odd ones.

    `num_rows`: 2I, or I where not gated.
    """
    if ACTIVATION.gated:
        return columns % 2 * (num_rows // 2) + columns // 2
    else:
        return columns


@triton.jit
def activate_pairs(x, ACTIVATION: tl.constexpr):
    """Activates adjacent (gate, up) columns of `x` [M, N] fp32 as `activate_halves` does: [M, N / 2] fp32.

    Where not gated: `f(x)`, [M, N].
    """
    if ACTIVATION.gated:
        gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))  # [M, N / 2] each
        return activate_halves(gate, up, ACTIVATION)
    else:
        return activate(x, ACTIVATION)


@triton.jit
def activate_halves(gate, up, ACTIVATION: tl.constexpr):
    """`f(min(gate, limit)) * (softcap(clamp(up, -limit, limit)) + beta)`, fp32 of equal shapes."""
    BETA: tl.constexpr = ACTIVATION.beta
    LIMIT: tl.constexpr = ACTIVATION.limit
    if LIMIT is not None:
        # tl.where keeps NaN; tl.minimum would replace it by the limit.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return activate(gate, ACTIVATION) * (softcap(up, ACTIVATION.up_softcap)[0] + BETA)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Applies the activation function to fp32 `x`: the gate, or the whole product where not gated."""
    NAME: tl.constexpr = ACTIVATION.name
    ALPHA: tl.constexpr = ACTIVATION.alpha
    if NAME == "silu" or NAME == "swigluoai" or NAME == "situ":
        return softcap(x, ACTIVATION.gate_softcap)[0] / (1.0 + tl.exp(-ALPHA * x))
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(NAME == "relu2")
        # tl.maximum would turn NaN into 0.
        x = tl.where(x < 0.0, 0.0, x)
        return x * x


@triton.jit
def softcap(x, CAP: tl.constexpr, SHORT: tl.constexpr = False):
    """`CAP * tanh(x / CAP)` of fp32 `x`, to within 2e-7 of itself, and its derivative; without a cap x and 1."""
    if CAP is None:
        return x, 1.0
    else:
        z = x * (1.0 / CAP)
        square, tail = z * z, sigmoid(tl.abs(z), -2.0, SHORT)
        # Near 0, where 1 - 2 * tail loses all digits: fitted to least relative errors below 0.6.
        cubic = -0.333325975 + square * (0.133131167 + square * (-0.0522118067 + square * 0.0156126327))
        far = tl.where(z < 0.0, 2.0 * tail - 1.0, 1.0 - 2.0 * tail)
        # The derivative is 1 - tanh(z)^2, which would lose digits far from 0.
        return CAP * tl.where(square < 0.36, z + z * square * cubic, far), 4.0 * tail * (1.0 - tail)


@triton.jit
def sigmoid(x, ALPHA: tl.constexpr, SHORT: tl.constexpr = False):
    """`1 / (1 + exp(-ALPHA * x))`; SHORT: in few instructions of NVIDIA's, with a relative error below 1e-5.

    What is compiled of tl.exp and a division takes three times as many instructions, which scale numbers that cannot
    occur: the sum is at least 1, and a power of two that is too small for it counts as 0.
    """
    POWER: tl.constexpr = -1.4426950408889634 * ALPHA
    if SHORT:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x * POWER],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-ALPHA * x))
