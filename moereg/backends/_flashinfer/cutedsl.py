"""FlashInfer's CuTe DSL kernels for 4-bit floats: sm100 and its family. No such machine has run this yet.

CuTe DSL compiles GEMMs at their first use; FlashInfer compiles its route sort with nvcc and headers that it downloads.

E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Final

import torch

from moereg.backends._flashinfer import layouts
from moereg.backends._flashinfer.calls import LocalRoutes, first_call
from moereg.backends._flashinfer.layouts import one_for_all, one_scale
from moereg.backends._loaded import Call, Implementation
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_HALVES: Final = 64
"""Rows of up, then of gate, in a tile of the first GEMM."""

_COMPILING_SECONDS: Final = 90.0
"""A guess: CuTe DSL's GEMMs in every process, and FlashInfer's route sort with nvcc once."""

_KEPT: Final = "FlashInfer's sort is kept in its cache, CuTe DSL's products are not"


def _activation_type(name: str) -> int:
    from flashinfer.tllm_enums import ActivationType

    value = {"gelu_tanh": ActivationType.GegluTanh, "relu2": ActivationType.Relu2}.get(name, ActivationType.Swiglu)
    return int(value)


def _scale_blocks(weights: ExpertWeights, matrix: str, halves: int) -> torch.Tensor:
    scale = weights.tensors()[f"{matrix}_scale"]
    if scale.dtype == torch.float8_e8m0fnu:
        # FlashInfer takes power-of-two scales as bytes and refuses torch's dtype for them.
        scale = scale.view(torch.uint8)
    grouped = layouts.grouped_halves(scale, _HALVES) if halves == 2 else scale
    return layouts.each_expert(grouped, layouts.swizzled_scales)


class Standard(LocalRoutes):
    """One call for the whole layer: nvfp4 with static global scales or 16-bit activations, or mxfp4 with mxfp8."""

    @property
    def mode(self) -> str:
        """FlashInfer's name of the operand formats."""
        if self.coded is None:
            return "w4a16"
        return "w4a4" if self.coded.global_scale else "w4a8"

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """`w13` in groups of 64 rows of up and of gate; scales in blocks; combined global scales.

        Raises:
            ValueError: Gate and up have different global scales, or nvfp4 has no static activation scales.
        """
        halves = self.problem.activation.num_halves
        w13 = layouts.grouped_halves(weights.w13, _HALVES) if halves == 2 else aligned(weights.w13)
        tensors = {"w13": w13, "w2": aligned(weights.w2)}
        tensors["w13_scale"] = _scale_blocks(weights, "w13", halves)
        tensors["w2_scale"] = _scale_blocks(weights, "w2", 1)
        ones = torch.ones(weights.num_experts, dtype=torch.float32, device=weights.w13.device)
        first = one_scale(weights.w13_scale_2, "w13_scale_2") if weights.w13_scale_2 is not None else ones
        second = weights.w2_scale_2 if weights.w2_scale_2 is not None else ones
        shared: dict[str, torch.Tensor] = {}
        if self.mode == "w4a4":
            inputs, intermediate = one_for_all(weights, "a13_scale"), one_for_all(weights, "a2_scale")
            first, second = first * inputs, second * intermediate
            shared = {"a13_scale": inputs, "fc2_input_scale": intermediate.reciprocal()}
        tensors |= {"w13_alpha": aligned(first), "w2_alpha": aligned(second)}
        return PermutedWeights(self.layouts[0], tensors, shared)

    def run(self, call: Call) -> None:
        from flashinfer.fused_moe import cute_dsl_fused_moe

        problem, weights = self.problem, call.weights
        scratch = self.place_routes(call)
        tokens, scales = aligned(call.inputs.hidden_states), None
        if self.coded is not None:
            tokens, scales = self.quantize_tokens(call, scratch)
            if self.mode == "w4a4":
                scales = scales.unsqueeze(-1)
        with first_call("flashinfer_cutedsl", problem, _COMPILING_SECONDS, _KEPT, call.out) as out:
            cute_dsl_fused_moe(
                x=tokens,
                x_sf=scales,
                token_selected_experts=scratch["topk_ids"],
                token_final_scales=scratch["topk_weights"],
                w1_weight=weights["w13"],
                w1_weight_sf=layouts.mma_scales(weights["w13_scale"]),
                w1_alpha=weights["w13_alpha"],
                fc2_input_scale=weights.get("fc2_input_scale"),
                w2_weight=weights["w2"],
                w2_weight_sf=layouts.mma_scales(weights["w2_scale"]),
                w2_alpha=weights["w2_alpha"],
                num_experts=problem.num_experts,
                top_k=problem.top_k,
                num_local_experts=problem.num_local_experts,
                local_expert_offset=0,
                output_dtype=problem.torch_dtype,
                # Atomic additions in the second GEMM; mxfp8 has no other finalize.
                use_fused_finalize=self.mode == "w4a8",
                moe_output=out,
                activation_type=_activation_type(problem.activation.name),
                quant_mode=self.mode,
            )


class Batched(Implementation):
    """nvfp4, batched format: quantizes rows by expert, then two GEMMs on the valid rows with SiLU between."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """The canonical codes; scales in blocks; combined global scales, and inverses to quantize with, [E].

        Raises:
            ValueError: Gate and up have different global scales, or there are no static activation scales.
        """
        assert weights.w13_scale_2 is not None and weights.w2_scale_2 is not None
        count = weights.num_experts
        inputs = one_for_all(weights, "a13_scale", largest=False).expand(count)
        intermediate = one_for_all(weights, "a2_scale", largest=False).expand(count)
        tensors = {
            "w13": aligned(weights.w13),
            "w2": aligned(weights.w2),
            "w13_scale": _scale_blocks(weights, "w13", 1),
            "w2_scale": _scale_blocks(weights, "w2", 1),
            "w13_alpha": one_scale(weights.w13_scale_2, "w13_scale_2") * inputs,
            "w2_alpha": weights.w2_scale_2 * intermediate,
            "a13_inverse": inputs.reciprocal(),
            "a2_inverse": intermediate.reciprocal(),
        }
        return PermutedWeights(self.layouts[0], tensors)

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of the first GEMM. Quantized rows come from torch's allocator."""
        return (self.problem.num_local_experts, num_tokens, 2 * self.problem.intermediate_size), (0,)

    def run(self, call: Call) -> None:
        from flashinfer import scaled_fp4_grouped_quantize, silu_and_mul_scaled_nvfp4_experts_quantize

        inputs, weights = call.inputs, call.weights
        counts = inputs.expert_num_tokens
        assert counts is not None
        with first_call("flashinfer_cutedsl", self.problem, _COMPILING_SECONDS, _KEPT, call.out) as out:
            codes = scaled_fp4_grouped_quantize(aligned(inputs.hidden_states), counts, weights["a13_inverse"])
            gemm1 = call.workspace13.view(len(counts), -1, 2 * self.problem.intermediate_size)
            _masked_product(gemm1, codes, weights, "w13", counts)
            codes = silu_and_mul_scaled_nvfp4_experts_quantize(gemm1, counts, weights["a2_inverse"])
            _masked_product(out, codes, weights, "w2", counts)


def _masked_product(
    out: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor],
    weights: PermutedWeights,
    name: str,
    counts: torch.Tensor,
) -> None:
    """Multiplies each expert's rows [E, M, K] with its matrix [E, N, K] into `out` [E, M, N]."""
    from flashinfer.cute_dsl import grouped_gemm_nt_masked

    grouped_gemm_nt_masked(
        lhs=codes,
        rhs=(weights[name].permute(1, 2, 0), layouts.mma_scales(weights[f"{name}_scale"])),
        out=out.permute(1, 2, 0),
        masked_m=counts,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype=str(out.dtype).removeprefix("torch."),
        sf_vec_size=16,
        alpha=weights[f"{name}_alpha"],
        alpha_dtype="float32",
    )
