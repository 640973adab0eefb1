"""The tiles of a Hopper grouped GEMM of 8-bit codes and the ring of shared memory that they go through, in Gluon.

A tile is 128 rows of activations by two halves of 128 rows of a weight: gate and up of the same columns, or 256 columns
in a row. A slot of the ring holds one step along the reduced dimension, with its scales where they change from step to
step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M
from moereg.kernels.hopper.ring import reinterpret

# Rows of a tile, and of a warpgroup; columns of a half, which is a block of scales and a group of codes.
BLOCK_M = gl.constexpr(QUANTIZED_BLOCK_M)
OWN_ROWS = gl.constexpr(QUANTIZED_BLOCK_M // 2)
COLUMNS = gl.constexpr(128)

# Codes of the reduced dimension per step: 128 bytes, the widest swizzle, and one group of scales.
BLOCK_K = gl.constexpr(128)


class CodeRing(NamedTuple):
    """The shared memory of a ring with STAGES slots.

    Attributes:
        rows: [2 * STAGES, OWN_ROWS, BLOCK_K] codes of a slot's activations, those of each warpgroup by themselves.
        weights: [2 * STAGES, 1, COLUMNS, BLOCK_K] codes of a slot's weights, by halves; for consumers
            [2 * STAGES, COLUMNS, BLOCK_K].
        row_scales: [STAGES, BLOCK_M] fp32 scales of a slot's rows; for consumers [2 * STAGES, OWN_ROWS]. Neither these
            nor the next are read where scales do not change along a row.
        half_scales: [2 * STAGES, 1] fp32 scales of a slot's weights, one per half.
        full: [STAGES, 1] barriers that complete when the bytes of a slot have arrived.
        empty: [STAGES, 1] barriers that complete when both consumers have multiplied them.
    """

    rows: Any
    weights: Any
    row_scales: Any
    half_scales: Any
    full: Any
    empty: Any


@gluon.jit
def operands_of(ring, STAGES: gl.constexpr):
    """Returns a producer's `CodeRing` as its consumers read it: the same memory in other shapes."""
    weights = reinterpret(ring.weights, ring.weights.dtype, [2 * STAGES, COLUMNS, BLOCK_K], ring.rows.layout)
    row_scales = reinterpret(
        ring.row_scales, gl.float32, [2 * ring.row_scales.shape[0], OWN_ROWS], ring.row_scales.layout
    )
    return CodeRing(
        rows=ring.rows,
        weights=weights,
        row_scales=row_scales,
        half_scales=ring.half_scales,
        full=ring.full,
        empty=ring.empty,
    )


@gluon.jit
def first_columns(column_tile, num_columns, GATED: gl.constexpr):
    """The row of an expert's weight, and column of the product, that either half of a tile begins with."""
    low = column_tile * COLUMNS if GATED else column_tile * 2 * COLUMNS
    high = num_columns // 2 + low if GATED else low + COLUMNS
    return low, high
