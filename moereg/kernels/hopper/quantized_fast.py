"""Cheaper instructions for the epilogue of a Hopper grouped GEMM that writes codes, in Triton's Gluon.

64 numbers a thread are activated, rounded and encoded while nothing is multiplied. Divisions and exponentials that
allow for subnormal numbers take 17 instructions a number where 6 do, and single conversions to 16 bits run at the rate
of exponentials.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moereg.kernels.hopper.consumer import activate_halves

_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def activate_fast(gate, up, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr):
    """As `activate_halves`, within a few units in the last place of fp32; zero where a sigmoid is below 2**-126.

    Gates of either infinity and NaN give what `activate_halves` gives: their numbers, minus infinity NaN.
    """
    if ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        if LIMIT is not None:
            # Comparisons keep NaN, which a minimum would replace by the limit.
            gate = gl.where(gate > LIMIT, LIMIT, gate)
            up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
        power = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * (-ALPHA * _LOG2_E)], dtype=gl.float32, is_pure=True, pack=1
        )
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
        )
        return gate * inverse * (up + BETA)
    else:
        return activate_halves(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)


@gluon.jit
def round_pairs(x, DTYPE: gl.constexpr):
    """fp32 `x` rounded to a 16-bit DTYPE, in fp32: the same bits as two conversions."""
    if DTYPE == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,f,f",
            [x],
            dtype=gl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(gl.float32)
