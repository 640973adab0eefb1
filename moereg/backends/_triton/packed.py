"""Weight-only schemes: weights stay packed and are restored tile by tile, in registers."""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import plain, ways
from moereg.backends._triton.packed_ways import Flagged, HopperPacked, has_room_for_flags
from moereg.backends._triton.packing import pack_matrices
from moereg.backends._triton.workspace import group_columns
from moereg.experts import Experts
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.packed_rules import shares_launch
from moereg.kernels.hopper.packed_config import MIN_PACKED_HOPPER_ROWS, select_packed_config
from moereg.kernels.hopper.packed_gemm import MIN_DEPTH, packed_format
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.sizes import WEIGHT_PAD
from moereg.platforms import PlatformRule
from moereg.quant import QuantFormat
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
        # Those kernels read both operands from shared memory; packed weights have kernels of their own.
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
        parts = (weights.get(f"{name}_{part}") for part in _PARTS)
        return PackedMatrix(weights[name], fmt.dtype, group_columns(fmt), fmt.scale_dtype, *parts)


class Standard(Packed, plain.Standard):
    """Standard format."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        is_hopper = PlatformRule("cuda:sm90").matches(self.platform)
        self.has_packed_hopper = is_hopper and self._fits_packed_hopper()
        # Measured there alone, where also programs are known to start in the order of their numbers.
        self.may_share_launch = is_hopper and self.problem.dtype == "bfloat16"

    def _fits_packed_hopper(self) -> bool:
        """Whether Hopper's kernels for packed weights serve the layer; `select` asks whether they serve a call."""
        problem, fmt = self.problem, self._format
        return (
            # Weights are restored to bfloat16, and the codes of float16 would need other instructions.
            problem.dtype == "bfloat16"
            # A zero point would cost a word and an instruction more for each group.
            and fmt.symmetric
            and packed_format(fmt.dtype, group_columns(fmt), fmt.scale_dtype) is not None
            # Their loop takes two steps a turn.
            and min(problem.hidden_size, problem.intermediate_size) > MIN_DEPTH - WEIGHT_PAD
            # A row is weighted when routes are added up.
            and not problem.apply_router_weight_on_input
        )

    def select(self, call: Call) -> ways.PlainWay:
        hidden_states = call.inputs.hidden_states
        rows_per_expert = call.inputs.topk_ids.numel() / self.problem.num_experts
        if (
            self.has_packed_hopper
            and ways.fits_hopper(hidden_states, rows_per_expert, MIN_PACKED_HOPPER_ROWS)
            # Tokens are copied at 32-bit offsets.
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        ):
            return HopperPacked(select_packed_config(rows_per_expert))
        way = super().select(call)
        if isinstance(way, ways.Sorted) and self._shares_launch(call, rows_per_expert):
            assert isinstance(way.configs, GemmPair)
            return Flagged(way.configs)
        return way

    def _shares_launch(self, call: Call, rows_per_expert: float) -> bool:
        num_tokens, num_routes = call.inputs.hidden_states.shape[0], call.inputs.topk_ids.numel()
        return (
            self.may_share_launch
            and shares_launch(num_tokens, rows_per_expert, self._format.bits)
            and has_room_for_flags(self.problem, num_routes)
        )


class Batched(Packed, plain.Batched):
    """Batched format."""
