"""Weight-only schemes: weights stay packed and are restored tile by tile, in registers."""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from moereg.backends._triton import plain, ways
from moereg.backends._triton.packing import pack_matrices
from moereg.experts import Experts
from moereg.kernels.packed.weights import PackedMatrix
from moereg.quant import WHOLE, QuantFormat
from moereg.weights import ExpertWeights, PermutedWeights

_MATRICES: Final = ("w13", "w2")
_PARTS: Final = ("group_scale", "zero_point", "row_scale")


class Packed(plain.Interleaved):
    """Shared by both activation formats."""

    recorded_weights: ClassVar[tuple[str, ...]] = (
        *plain.Interleaved.recorded_weights,
        *(f"{matrix}_{part}" for matrix in _MATRICES for part in _PARTS),
    )

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.packed_bits = self._format.bits
        # Hopper's kernels read both operands from shared memory.
        self.has_hopper = False

    @property
    def _format(self) -> QuantFormat:
        fmt = self.computes.weight
        assert fmt is not None
        return fmt

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Reorders the codes of each block of 64 elements and interleaves gate and up row by row.

        Returns:
            `PackedMatrix`'s tensors: `w13` and `w2` are the words, of w13 with 2 * I_pad rows (I_pad where not gated),
            of w2 with H; `w13_group_scale` and so on; and the biases.
        """
        halves = self.problem.activation.num_halves

        def arrange(rows: torch.Tensor) -> torch.Tensor:
            return plain.interleave_and_pad(rows.unsqueeze(0), halves, columns=rows.shape[1]).squeeze(0)

        per_expert = {
            **pack_matrices(weights, "w13", self._format, arrange),
            **pack_matrices(weights, "w2", self._format, lambda rows: rows),
            **plain.permute_biases(weights, halves),
        }
        return PermutedWeights(self.layouts[0], per_expert)

    def matrices(self, weights: PermutedWeights) -> tuple[ways.Weights, ways.Weights]:
        return self._matrix(weights, "w13"), self._matrix(weights, "w2")

    def _matrix(self, weights: PermutedWeights, name: str) -> PackedMatrix:
        fmt = self._format
        group = 0 if fmt.group[1] == WHOLE else fmt.group[1]
        parts = (weights.get(f"{name}_{part}") for part in _PARTS)
        return PackedMatrix(weights[name], fmt.dtype, group, fmt.scale_dtype, *parts)


class Standard(Packed, plain.Standard):
    """Standard format."""


class Batched(Packed, plain.Batched):
    """Batched format."""
