"""`triton` for weight-only schemes: weights stay packed and are restored tile by tile, in registers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from moereg.backends._triton.interleaved import (
    WEIGHT_PAD,
    InterleavedExperts,
    interleave_and_pad,
    permute_biases,
)
from moereg.backends._triton.packing import pack_matrices, unsupported_format
from moereg.backends.triton_moe import TritonBatchedExperts, TritonExperts
from moereg.experts import ExpertInputs, Facts
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

if TYPE_CHECKING:
    from moereg.backends._triton.interleaved import Matrix

_MATRICES: Final = ("w13", "w2")
_PARTS: Final = ("group_scale", "zero_point", "row_scale")

_WEIGHT_ONLY: Final = tuple(
    scheme
    for scheme in QUANT_SCHEMES.values()
    if scheme.weight is not None and scheme.activation is None and not unsupported_format(scheme.weight)
)


class _PackedExperts(InterleavedExperts):
    """What both formats of activations share."""

    # 32-bit activations would need 32-bit products, which no matrix unit has.
    facts: ClassVar[Facts] = dataclasses.replace(InterleavedExperts.facts, dtypes=frozenset({"bfloat16", "float16"}))
    layouts = ("packed64_gate_up_interleaved",)
    recorded_weights = (
        *InterleavedExperts.recorded_weights,
        *(f"{matrix}_{part}" for matrix in _MATRICES for part in _PARTS),
    )

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        self._packed_bits = self._format.bits

    @property
    def _format(self) -> QuantFormat:
        fmt = self.computes.weight
        assert fmt is not None
        return fmt

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Formats of weights that the kernels do not read, and sizes beyond their 32-bit offsets."""
        fmt = problem.quant.weight
        reasons = [] if fmt is None else unsupported_format(fmt)
        return [*reasons, *super().unsupported_reasons(problem, platform)]

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Reorders the codes of each block of 64 elements and interleaves gate and up row by row.

        Returns:
            `PackedMatrix`'s tensors: `w13` and `w2` are the words, of w13 with 2 * I_pad rows (I_pad where not gated),
            of w2 with H; `w13_group_scale` and so on; and the biases.
        """
        halves = problem.activation.num_halves

        def arrange(rows: torch.Tensor) -> torch.Tensor:
            return interleave_and_pad(rows.unsqueeze(0), halves, columns=rows.shape[1]).squeeze(0)

        per_expert = {
            **pack_matrices(weights, "w13", self._format, arrange),
            **pack_matrices(weights, "w2", self._format, lambda rows: rows),
            **permute_biases(weights, halves),
        }
        return PermutedWeights(self.layouts[0], per_expert)

    def _matrices(self, weights: PermutedWeights) -> tuple[Matrix, Matrix]:
        return self._matrix(weights, "w13"), self._matrix(weights, "w2")

    def _matrix(self, weights: PermutedWeights, name: str) -> Matrix:
        from moereg.kernels.packed.weights import BLOCK, PackedMatrix

        assert BLOCK == WEIGHT_PAD, "rows of the intermediate end with a block"
        fmt = self._format
        group = 0 if fmt.group[1] == WHOLE else fmt.group[1]
        parts = (weights.get(f"{name}_{part}") for part in _PARTS)
        return PackedMatrix(weights[name], fmt.dtype, group, fmt.scale_dtype, *parts)

    def _warp_specialized(self, inputs: ExpertInputs) -> bool:
        # The Gluon kernels read both operands from shared memory.
        return False


# Below the backends that were written for one scheme, above restoring weights in front of a matmul. In sweeps on one
# H200 it took 0.66 of the time that Marlin took on another, in the mean of int4_w4a16_g128 at 1 to 4096 tokens of
# qwen3-30b-a3b and mixtral-8x7b.
@register_moe_backend(
    name="triton",
    priority=60,
    quant_schemes=_WEIGHT_ONLY,
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonPackedExperts(_PackedExperts, TritonExperts):
    """Standard format: `TritonExperts` on packed weights."""

    facts = dataclasses.replace(_PackedExperts.facts, activation_formats=frozenset({"standard"}))


# See above.
@register_moe_backend(
    name="triton",
    priority=60,
    quant_schemes=_WEIGHT_ONLY,
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonPackedBatchedExperts(_PackedExperts, TritonBatchedExperts):
    """Batched format: `TritonBatchedExperts` on packed weights."""

    facts = dataclasses.replace(_PackedExperts.facts, activation_formats=frozenset({"batched"}))
