"""FlashInfer's b12x kernels: 4-bit floats with 16-bit activations on sm120. No such machine has run this yet.

FlashInfer's own entry point repacks weights at the first call and caches the result by address, so it would miss new
weights in the same memory. Here `permute_weights` repacks them. FlashInfer keeps the kernels' buffers, one set per
process.
"""

from __future__ import annotations

from typing import Final

from moereg.backends._flashinfer.calls import LocalRoutes, first_call
from moereg.backends._flashinfer.layouts import one_scale, swizzled_rows
from moereg.backends._loaded import Call
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_KEPT: Final = "nothing keeps them for the next process"
_PACKED: Final = ("w13", "w13_scale", "w13_global_scale", "w2", "w2_scale", "w2_global_scale")
_COUNTERS: Final = "workspace"
"""Field of FlashInfer's weights that holds device counters and belongs to no expert."""


class Standard(LocalRoutes):
    """nvfp4 weights, 16-bit activations: one call for the whole layer."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Lets FlashInfer repack all experts at once; a ValueError if gate and up have different global scales."""
        from flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare import (
            prepare_w4a16_modelopt_nvfp4_weights,
        )

        assert weights.w13_scale is not None and weights.w13_scale_2 is not None
        assert weights.w2_scale is not None and weights.w2_scale_2 is not None
        prepared = prepare_w4a16_modelopt_nvfp4_weights(
            w13_fp4=aligned(weights.w13),
            w13_blockscale=swizzled_rows(weights.w13_scale),
            w13_global_scale=one_scale(weights.w13_scale_2, "w13_scale_2"),
            w2_fp4=aligned(weights.w2),
            w2_blockscale=swizzled_rows(weights.w2_scale),
            w2_global_scale=weights.w2_scale_2,
            activation=self.problem.activation.name,
            params_dtype=self.problem.torch_dtype,
            w13_layout="gate_up",
        )
        tensors = {name: getattr(prepared, name) for name in _PACKED}
        return PermutedWeights(self.layouts[0], tensors, {_COUNTERS: prepared.workspace})

    def run(self, call: Call) -> None:
        from flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch import launch_sm120_moe
        from flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare import W4A16PackedWeights

        problem, weights = self.problem, call.weights
        experts = problem.num_local_experts
        scratch = self.place_routes(call)
        packed = {name: weights[name] for name in (*_PACKED, _COUNTERS)}
        with first_call("flashinfer_b12x", problem, 60.0, _KEPT, call.out) as out:
            launch_sm120_moe(
                a=aligned(call.inputs.hidden_states),
                topk_ids=scratch["topk_ids"],
                topk_weights=scratch["topk_weights"],
                w1_weight=packed["w13"],
                w1_weight_sf=packed["w13_scale"],
                w1_alpha=packed["w13_global_scale"],
                w2_weight=packed["w2"],
                w2_weight_sf=packed["w2_scale"],
                w2_alpha=packed["w2_global_scale"],
                num_experts=experts,
                top_k=problem.top_k,
                num_local_experts=experts,
                scatter_output=out,
                activation=problem.activation.name,
                quant_mode="w4a16",
                _prepared_weights=W4A16PackedWeights(
                    **packed,
                    hidden_size=problem.hidden_size,
                    intermediate_size=problem.intermediate_size,
                    num_experts=experts,
                    is_gated=problem.activation.gated,
                    params_dtype=problem.torch_dtype,
                    w13_layout="w31",
                ),
            )
