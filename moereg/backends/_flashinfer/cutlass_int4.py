"""FlashInfer's CUTLASS kernels for 4-bit integer weights with e4m3 activations (W4A8), on Hopper.

FlashInfer quantizes rows itself: it multiplies them by a vector shared by all experts (`1 / scale` in TensorRT-LLM),
rounds to e4m3, and multiplies each GEMM's result by the expert's `alpha`. The vectors are bfloat16, which would round
the scale, so here they are ones. Tokens arrive already rounded to e4m3 values, and the intermediate's scale is folded
into the weights that compute it. So every expert can have its own scales.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from moereg.backends._flashinfer.cutlass import Rows, cut_rows
from moereg.backends._flashinfer.cutlass_quantized import Fp8Tensor
from moereg.backends._flashinfer.layouts import arrange, fold_scales
from moereg.backends._loaded import Call
from moereg.backends._workspace import Piece
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_GROUP: Final = 128
# Turns two codes with an offset of 8 into two's complement.
_SIGN_BITS: Final = 0x88


def interleave_int4(matrix: torch.Tensor) -> torch.Tensor:
    """Reorders one expert's 4-bit integers for Hopper's W4A8 kernels: byte pairs of rows 8 apart alternate.

    `matrix` is [R, K / 2] uint8, two codes to a byte, low nibble first; R a multiple of 16, K of 64; it is not changed.
    Source: the interleaving kernel of FlashInfer 0.7.2.
    """
    rows, width = matrix.shape
    # Row 16 b + 8 h + r, byte 16 p + 8 n + 2 l + j: a row's 32 codes form two runs; n becomes the row half.
    parts = matrix.view(rows // 16, 2, 8, width // 16, 2, 4, 2)  # b h r p n l j
    return parts.permute(0, 4, 2, 3, 5, 1, 6).reshape(rows, width)  # b n r p l h j


class Int4W4A8(Fp8Tensor):
    """4-bit integers in groups of 128, and static e4m3 activations. Hopper, bfloat16.

    As in `Fp8Tensor`, a token scale shared by all experts needs a row per token, per-expert scales a row per route.
    """

    multiple = _GROUP
    flags: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True, "use_packed_weights": True}

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Codes and group scales in the instructions' order, and each expert's two alphas."""
        assert weights.w13_scale is not None and weights.w2_scale is not None
        assert weights.a13_scale is not None and weights.a2_scale is not None
        num_experts, factor = weights.num_experts, self._intermediate_factor(weights)
        first = weights.a13_scale.float().expand(num_experts)
        w13_scale = weights.w13_scale.float()
        if self.num_halves == 2:
            w13_scale = w13_scale.clone()
            w13_scale[:, w13_scale.shape[1] // 2 :] *= factor[:, None, None]
        else:
            first = first * factor
        per_expert = {
            **self._matrix("w13", weights.w13, w13_scale, self.intermediate, self.hidden, self.num_halves),
            **self._matrix("w2", weights.w2, weights.w2_scale, self.hidden, self.intermediate, 1),
            "first_alpha": first.contiguous(),
            "second_alpha": weights.a2_scale.float().expand(num_experts).contiguous(),
        }
        shared = {
            f"{name}_ones": torch.ones(size, dtype=torch.bfloat16, device=weights.w13.device)
            for name, size in (("first", self.hidden), ("second", self.intermediate))
        }
        input_scale = weights.a13_scale.float().clone()
        self._has_own_inputs = bool(input_scale.dim()) or bool(self._has_own_inputs)
        (per_expert if input_scale.dim() else shared)["input_scale"] = input_scale
        return per_expert, shared

    def _intermediate_factor(self, weights: ExpertWeights) -> torch.Tensor:
        """Factor for the up rows, or all of w13, that divides the intermediate by its scale; fp32 [E].

        This cell's gated activations are linear in the up half; the ungated one squares its input.
        """
        assert weights.a2_scale is not None
        inverse = weights.a2_scale.float().reciprocal().expand(weights.num_experts)
        return inverse if self.num_halves == 2 else inverse.sqrt()

    @staticmethod
    def _matrix(
        name: str, codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, halves: int
    ) -> dict[str, torch.Tensor]:
        matrices = codes.new_empty(codes.shape[0], halves * rows, columns // 2)
        for expert in range(codes.shape[0]):
            signed = codes[expert : expert + 1] ^ _SIGN_BITS
            matrices[expert] = interleave_int4(arrange(signed, rows, columns // 2, halves)[0])
        arranged = arrange(scale.to(torch.bfloat16), rows, columns // _GROUP, halves)
        return {name: matrices, f"{name}_scale": fold_scales(arranged, _GROUP)}

    def _biases(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        biases = super()._biases(weights)
        if biases:
            # Up rows come first; without a gate they are all rows. Cloned, since they may be the checkpoint's own.
            bias = biases["w13_bias"] = biases["w13_bias"].clone()
            scaled = bias[:, : self.intermediate]
            scaled.copy_(scaled.float() * self._intermediate_factor(weights)[:, None])
        return biases

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        no_zero_points = weights["first_ones"][:0]
        return [
            weights["w13_scale"],
            weights["w2_scale"],
            weights["first_ones"],
            weights["second_ones"],
            no_zero_points,
            no_zero_points,
            weights["first_alpha"],
            weights["second_alpha"],
        ]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        dtype = self.problem.torch_dtype
        return {"x_dtype": dtype, "weight_dtype": torch.uint8, "output_dtype": dtype}

    def pieces(self, num_tokens: int) -> list[Piece]:
        codes, out = super().pieces(num_tokens)
        return [codes, out, out]

    def make_rows(self, call: Call) -> Rows:
        """The e4m3 values that `Fp8Tensor` makes, in bfloat16, which holds them exactly."""
        rows = super().make_rows(call)
        codes, out = self._pieces_of(rows.x.shape[0])
        numbers = cut_rows(call, [codes, out, out])[2]
        return rows._replace(x=numbers.copy_(rows.x))
