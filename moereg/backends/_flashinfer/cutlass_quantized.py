"""FlashInfer's CUTLASS kernels for quantized weights: 8-bit floats (per tensor or in groups) and 4-bit floats."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import torch

from moereg.backends._flashinfer.cutlass import Cutlass, Rows, cut_rows
from moereg.backends._flashinfer.layouts import arrange, fold_scales, interleave_fp4, swizzled_rows
from moereg.backends._loaded import Call
from moereg.backends._workspace import Piece
from moereg.experts import Experts
from moereg.quantize import quantize_activations
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_E4M3_MAX: Final = 448.0

_MOST_STEPS: Final = 5
"""Powers of two by which float16 values around 1 may be scaled."""


def without_zero_scales(weights: ExpertWeights) -> ExpertWeights:
    """Makes per-tensor or global gate and up scales both zero or both nonzero, without changing a value.

    A half with a scale of 0 is 0 whatever its codes. It gets codes of 0 and the other half's scale, so that the ratio
    of the two scales is neither 0 nor infinite.
    """
    field = "w13_scale" if weights.w13_scale_2 is None else "w13_scale_2"
    scale = getattr(weights, field)
    if scale.dim() != 2 or scale.shape[1] == 1:
        return weights
    is_zero = (scale == 0) & (scale != 0).any(1, keepdim=True)
    if not is_zero.any():
        return weights
    # As bytes: torch does not fill every 8-bit float.
    codes = weights.w13.view(torch.uint8).clone()
    codes.unflatten(1, (2, -1)).masked_fill_(is_zero[:, :, None, None], 0)
    changes: dict[str, Any] = {field: torch.where(is_zero, scale.flip(1), scale)}
    return dataclasses.replace(weights, w13=codes.view(weights.w13.dtype), **changes)


def _per_expert(scale: torch.Tensor, num_experts: int) -> torch.Tensor:
    return scale.float().expand(num_experts)


class _OneScaleForHalves(Cutlass):
    """Kernels with one scale for gate and up, for weights that may have two."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        return super().permute_weights(without_zero_scales(weights))

    def up_share(self, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One w13 scale per expert, as FlashInfer takes it, and the ratio of the up scale to it or None, [E] fp32.

        FlashInfer has one scale for gate and up; if they differ, it gets the gate's. The activation is linear in the up
        half, so the ratio goes into the scale that quantizes the intermediate. float16, whose range is small, holds the
        up rows without it. The weights have gone through `without_zero_scales`.

        Raises:
            ValueError: The scales differ and the activation is not linear in the up half, or much so in float16.
        """
        scale = weights.w13_scale if weights.w13_scale_2 is None else weights.w13_scale_2
        activation = self.problem.activation
        assert scale is not None
        if scale.dim() == 3:  # Group scales alone.
            return scale.new_ones(weights.num_experts, dtype=torch.float32), None
        scale = scale.float()
        if scale.dim() == 1:
            return scale, None
        gate, up = scale[:, 0].contiguous(), scale[:, -1]
        if scale.shape[1] == 1 or torch.equal(gate, up):
            return gate, None
        if activation.limit is not None or activation.beta:
            raise ValueError(
                "FlashInfer's kernels take one scale for gate and up rows where the activation has a clamp or beta, "
                f"got w13 scales {list(scale.shape)} that differ with activation {activation}; quantize both halves "
                "with one"
            )
        # If both are 0, all of w13 is.
        share = torch.where(gate > 0, up / gate, torch.ones_like(gate))
        if self.problem.dtype == "float16" and float(share.log2().abs().max()) > _MOST_STEPS:
            raise ValueError(
                f"FlashInfer's kernels take one scale for gate and up rows, which leaves float16 where they differ by "
                f"more than {2**_MOST_STEPS}, got {float(share.min()):.3g} to {float(share.max()):.3g}; quantize both "
                "halves with one, use bfloat16, or deny this backend"
            )
        return gate, share

    def _biases(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        biases = super()._biases(weights)
        _, up = self.up_share(weights)
        if biases and up is not None:
            # The up rows are computed without the ratio, so their bias is divided by it.
            of_up = biases["w13_bias"][:, : self.intermediate]
            of_up.copy_(of_up.float() / up[:, None])
        return biases


class Fp8Tensor(_OneScaleForHalves):
    """e4m3 weights and static activations, one scale per matrix.

    FlashInfer takes quantized tokens. If each expert has its own scale for them, a token is quantized differently for
    each of its experts: then every route is its own row, and a token's routes are summed here.
    """

    multiple = 16
    flags: ClassVar[dict[str, bool]] = {}

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self._has_own_inputs: bool | None = None
        self._choices = self.problem.top_k

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Scales of both GEMMs and both inputs, combined as FlashInfer applies them."""
        assert weights.w2_scale is not None and weights.a13_scale is not None and weights.a2_scale is not None
        num_experts = weights.num_experts
        w13_scale, up = self.up_share(weights)
        a2_scale = _per_expert(weights.a2_scale, num_experts)
        second_quant = a2_scale.reciprocal()
        per_expert = {
            **self.matrices(weights),
            "first_dequant": w13_scale * _per_expert(weights.a13_scale, num_experts),
            "second_quant": second_quant if up is None else second_quant * up,
            "second_dequant": weights.w2_scale.float() * a2_scale,
        }
        input_scale = weights.a13_scale.float().clone()
        # Workspaces are sized without weights. Once they had to be larger they stay so.
        self._has_own_inputs = bool(input_scale.dim()) or bool(self._has_own_inputs)
        if input_scale.dim():
            return {**per_expert, "input_scale": input_scale}, {"unit": input_scale.new_ones(())}
        return per_expert, {"input_scale": input_scale}

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        input_scale = weights.get("unit")
        return [
            weights["first_dequant"],
            weights["second_quant"],
            weights["second_dequant"],
            weights["input_scale"] if input_scale is None else input_scale,
        ]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        e4m3 = torch.float8_e4m3fn
        return {"x_dtype": e4m3, "weight_dtype": e4m3, "output_dtype": self.problem.torch_dtype}

    def _library_bytes(self, num_tokens: int) -> int:
        of_tokens = self.bytes_for(num_tokens, self.problem.top_k)
        if self._has_own_inputs is False:
            return of_tokens
        return max(of_tokens, self.bytes_for(num_tokens * self.problem.top_k, 1))

    def pieces(self, num_tokens: int) -> list[Piece]:
        return self._pieces_of(num_tokens if self._has_own_inputs is False else num_tokens * self.problem.top_k)

    def _pieces_of(self, num_rows: int) -> list[Piece]:
        shape = (num_rows, self.hidden)
        return [Piece(shape, torch.float8_e4m3fn), Piece(shape, self.problem.torch_dtype)]

    @property
    def choices(self) -> int:
        return self._choices

    def make_rows(self, call: Call) -> Rows:
        """Quantizes tokens, or a row for every route."""
        inputs, weights = call.inputs, call.weights
        ids, topk_weights = self.local_ids(call), inputs.topk_weights
        if "input_scale" in weights.shared:
            scale, source = weights["input_scale"], inputs.hidden_states
        else:
            # FlashInfer skips routes without a local expert, whatever their codes.
            of_routes = ids.clamp(0, self.problem.num_local_experts - 1).long().view(-1)
            scale = weights["input_scale"].index_select(0, of_routes)[:, None]
            source = inputs.hidden_states.repeat_interleave(ids.shape[1], 0)
            ids, topk_weights = ids.view(-1, 1), topk_weights.reshape(-1, 1)
        hidden_size = self.problem.hidden_size
        self._choices = ids.shape[1]
        codes, out = cut_rows(call, self._pieces_of(ids.shape[0]))
        codes[:, :hidden_size] = (source.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(codes.dtype)
        codes[:, hidden_size:].view(torch.uint8).zero_()
        return Rows(codes, ids, topk_weights, out)

    def finish(self, call: Call, rows: Rows) -> None:
        result = rows.out[:, : self.problem.hidden_size]
        if rows.ids.shape[1] != self.problem.top_k:
            result = result.view(-1, self.problem.top_k, result.shape[1]).sum(1, dtype=torch.float32)
        call.out.copy_(result)


class Mxfp4W4A16(Cutlass):
    """4-bit floats with power-of-two scales in groups of 32, dequantized to bfloat16 in the kernel. Hopper."""

    multiple = 128
    flags: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True}

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Codes and scales in the instructions' order, permuted expert by expert."""
        assert weights.w13_scale is not None and weights.w2_scale is not None
        found = {}
        for name, codes, scale, rows, columns, halves in (
            ("w13", weights.w13, weights.w13_scale, self.intermediate, self.hidden, self.num_halves),
            ("w2", weights.w2, weights.w2_scale, self.hidden, self.intermediate, 1),
        ):
            matrices = codes.new_empty(codes.shape[0], halves * rows, columns // 2)
            for expert in range(codes.shape[0]):
                matrices[expert] = interleave_fp4(arrange(codes[expert : expert + 1], rows, columns // 2, halves)[0])
            found[name] = matrices
            arranged = arrange(scale.view(torch.uint8), rows, columns // 32, halves)
            found[f"{name}_scale"] = fold_scales(arranged, group=32)
        return found, {}

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        return [weights["w13_scale"].view(torch.int32), weights["w2_scale"].view(torch.int32)]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {**super().dtypes, "weight_dtype": torch.uint8}


class _ScaledByHardware(_OneScaleForHalves):
    """Blackwell's layout: codes in rows, scales in tiles of 128 rows and 4 groups."""

    multiple = 128
    group: ClassVar[int] = 32

    def scales(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """Block scales of both matrices, four per int32."""
        assert weights.w13_scale is not None and weights.w2_scale is not None
        arranged = {
            "w13_scale": arrange(
                weights.w13_scale.view(torch.uint8), self.intermediate, self.hidden // self.group, self.num_halves
            ),
            "w2_scale": arrange(weights.w2_scale.view(torch.uint8), self.hidden, self.intermediate // self.group),
        }
        return {name: swizzled_rows(scale).view(torch.int32) for name, scale in arranged.items()}


class Mxfp8Activations(_ScaledByHardware):
    """Tokens as e4m3 in groups of 32; weights likewise or as 4-bit floats. Blackwell."""

    flags: ClassVar[dict[str, bool]] = {"use_mxfp8_act_scaling": True}

    @property
    def _is_packed(self) -> bool:
        assert self.problem.quant.weight is not None
        return self.problem.quant.weight.bits == 4

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        matrices = self.matrices(weights, 2 if self._is_packed else 1)
        ones = torch.ones(weights.num_experts, dtype=torch.float32, device=weights.w13.device)
        return {**matrices, **self.scales(weights), "unit": ones}, {}

    def as_taken(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(torch.int64) if self._is_packed else matrix

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        unit = weights["unit"]
        return [weights["w13_scale"], unit, weights["w2_scale"], unit]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        e4m3 = torch.float8_e4m3fn
        weight = torch.int64 if self._is_packed else e4m3
        return {"x_dtype": e4m3, "weight_dtype": weight, "output_dtype": self.problem.torch_dtype}

    def pieces(self, num_tokens: int) -> list[Piece]:
        return [
            Piece((num_tokens, self.hidden), torch.float8_e4m3fn),
            Piece((num_tokens, self.hidden // 32), torch.uint8),
            Piece((num_tokens, self.hidden), self.problem.torch_dtype),
        ]

    def make_rows(self, call: Call) -> Rows:
        """Quantizes the tokens."""
        hidden_size = self.problem.hidden_size
        codes, scales, out = cut_rows(call, self.pieces(len(call.inputs.hidden_states)))
        for piece in (codes.view(torch.uint8), scales):
            piece.zero_()
        quantized = quantize_activations(call.inputs.hidden_states, self.computes)
        codes[:, :hidden_size] = quantized.q
        scales[:, : quantized.scale.shape[1]] = quantized.scale.view(torch.uint8)
        return Rows(codes, self.local_ids(call), call.inputs.topk_weights, out, scales)


class Nvfp4(_ScaledByHardware):
    """4-bit floats on both sides, in groups of 16 with e4m3 scales; FlashInfer quantizes tokens. Blackwell."""

    group = 16

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Global scales of both GEMMs and both inputs, combined as FlashInfer applies them.

        A ValueError if the checkpoint has no static activation scales.
        """
        if weights.a13_scale is None or weights.a2_scale is None:
            raise ValueError(
                "flashinfer_cutlass takes nvfp4 activations with static global scales, got weights without a13_scale "
                "and a2_scale; calibrate them (moereg.numerics.reference.calibrate_activation_scales) or deny this "
                "backend"
            )
        assert weights.w2_scale_2 is not None
        num_experts = weights.num_experts
        w13_scale, up = self.up_share(weights)
        a13_scale, a2_scale = (_per_expert(scale, num_experts) for scale in (weights.a13_scale, weights.a2_scale))
        second = a2_scale.reciprocal()
        return {
            **self.matrices(weights, 2),
            **self.scales(weights),
            "first_input": a13_scale.reciprocal(),
            "first_dequant": w13_scale * a13_scale,
            "second_input": second if up is None else second * up,
            "second_dequant": weights.w2_scale_2.float() * a2_scale,
        }, {}

    def as_taken(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(torch.int64)

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        names = ("first_input", "w13_scale", "first_dequant", "second_input", "w2_scale", "second_dequant")
        return [weights[name] for name in names]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {**super().dtypes, "weight_dtype": torch.int64}
