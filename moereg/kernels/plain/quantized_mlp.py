"""One expert's matmuls on a CPU with quantized weights, which stay packed: a few rows at a time are dequantized.

H hidden size, I intermediate size, E local experts, M rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from moereg.kernels.plain.mlp import ActivationFn

RestoreRows = Callable[[int, slice, torch.dtype], torch.Tensor]
"""Maps an expert, rows and a dtype to those rows of the expert's matrix, [rows, K] in that dtype."""

RoundRows = Callable[[torch.Tensor, int], torch.Tensor]
"""Rounds rows [M,K] of an expert to the activation format's numbers, fp32."""


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredMatrix:
    """Each expert's quantized matrix, whose rows are dequantized block by block."""

    restore: RestoreRows  # Dequantizes some rows of an expert's matrix
    blocks: tuple[slice, ...]  # Slices that cover its rows; their size bounds what is dequantized at a time
    num_rows: int  # N
    bias: torch.Tensor | None = None  # [E,N] or None

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps x [M,K] to [M,N] in x's dtype, a new tensor."""
        out = x.new_empty(len(x), self.num_rows)
        for rows in self.blocks:
            bias = None if self.bias is None else self.bias[expert, rows].to(x.dtype)
            out[:, rows] = F.linear(x, self.restore(expert, rows, x.dtype), bias)
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
