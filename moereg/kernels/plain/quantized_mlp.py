"""One expert's matmuls on a CPU with quantized weights, which stay packed: a few rows at a time are dequantized.

H hidden size, I intermediate size, E local experts, M rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from moereg.kernels.plain import cpu
from moereg.kernels.plain.mlp import ActivationFn, by_pieces

RestoreRows = Callable[[int, slice, torch.dtype], torch.Tensor]
"""Maps an expert, rows and a dtype to those rows of the expert's matrix, [rows, K] in that dtype."""

RoundRows = Callable[[torch.Tensor, int], torch.Tensor]
"""Rounds rows [M,K] of an expert to the activation format's numbers, fp32."""

QuantizeRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Quantizes rows [M,K] to int8 [M,K] and fp32 scales [M,1]."""


_EXACT_COLUMNS: Final = 1024
"""Number of int8 products whose sum fp32 holds exactly, in any order: 1,024 * 128 * 128 is 2**24."""


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredMatrix:
    """Each expert's quantized matrix, whose rows are dequantized block by block."""

    restore: RestoreRows  # Dequantizes some rows of an expert's matrix
    blocks: tuple[slice, ...]  # Slices that cover its rows; their size bounds what is dequantized at a time
    num_rows: int  # N
    bias: torch.Tensor | None = None  # [E,N] or None
    invariant: bool = False  # As in `by_pieces`

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps x [M,K] to [M,N] in x's dtype, a new tensor."""
        out = x.new_empty(len(x), self.num_rows)
        for rows in self.blocks:
            bias = None if self.bias is None else self.bias[expert, rows].to(x.dtype)
            product = functools.partial(F.linear, weight=self.restore(expert, rows, x.dtype), bias=bias)
            out[:, rows] = by_pieces(product, x, self.invariant)
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class RestoringMlp:
    """An expert's two matmuls on dequantized weights; as `moereg.kernels.plain.mlp.ExpertMlp`."""

    w13: RestoredMatrix  # [2I,H] of each expert, or [I,H] where not gated
    w2: RestoredMatrix  # [H,I] of each expert
    activation: ActivationFn  # Applied to the first matmul's output in fp32
    compute_dtype: torch.dtype  # Dtype of the matmuls
    round_input: RoundRows | None = None  # Rounds the first matmul's input, where activations are quantized
    round_intermediate: RoundRows | None = None  # Rounds the second one's

    def intermediate(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The activation of x [M,H], [M,I]: in x's dtype if it is rounded afterwards, else in `compute_dtype`."""
        rows = x if self.round_input is None else self.round_input(x, expert)
        gemm1 = self.w13(rows.to(self.compute_dtype), expert)
        # No rounding is needed here, and in float16 the value may be out of range.
        return self.activation(gemm1.float()).to(self.compute_dtype if self.round_intermediate is None else x.dtype)

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps x [M,H] to [M,H] in `compute_dtype`, a new tensor."""
        hidden = self.intermediate(x, expert)
        rows = hidden if self.round_intermediate is None else self.round_intermediate(hidden, expert)
        return self.w2(rows.to(self.compute_dtype), expert)


@dataclasses.dataclass(frozen=True, eq=False)
class Int8Mlp:
    """An expert's two matmuls in int8 with int32 sums; as `moereg.kernels.plain.mlp.ExpertMlp`."""

    w13: torch.Tensor  # int8 [E,2I,H], or [E,I,H] where not gated
    w2: torch.Tensor  # int8 [E,H,I]
    w13_scale: torch.Tensor  # fp32 [E,2I,1] or [E,I,1]
    w2_scale: torch.Tensor  # fp32 [E,H,1]
    activation: ActivationFn  # Applied to the first matmul's output in fp32
    quantize: QuantizeRows  # Quantizes each row by itself
    w13_bias: torch.Tensor | None = None  # [E,2I] (or [E,I]) or None
    w2_bias: torch.Tensor | None = None  # [E,H] or None

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps x [M,H] to fp32 [M,H], a new tensor."""
        gemm1 = self._linear(x, self.w13[expert], self.w13_scale[expert], self.w13_bias, expert)
        hidden = self.activation(gemm1).to(x.dtype)
        return self._linear(hidden, self.w2[expert], self.w2_scale[expert], self.w2_bias, expert)

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, expert: int
    ) -> torch.Tensor:
        codes, row_scale = self.quantize(x)
        out = int8_matmul(codes, weight).float() * row_scale * scale.t()
        return out if bias is None else out + bias[expert]


def int8_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int32 [M,N]: int8 rows of x [M,K] times those of weight [N,K], which is contiguous."""
    if x.shape[1] == 1:
        # torch recognizes a transposed matrix by its strides; with a single column it cannot, and reads past the end.
        return x.int() * weight.int().t()
    if not cpu.features().int8:
        # torch would use a plain loop, or a oneDNN kernel for AVX2 whose sums of two products saturate.
        parts = zip(x.split(_EXACT_COLUMNS, 1), weight.split(_EXACT_COLUMNS, 1), strict=True)
        return torch.stack([F.linear(own.float(), other.float()).int() for own, other in parts]).sum(0).int()
    return torch._int_mm(x, weight.t())
