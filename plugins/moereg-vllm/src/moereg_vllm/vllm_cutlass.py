"""`vllm_cutlass`: vLLM's CUTLASS grouped GEMM for 8-bit floats with per-row and per-token scales."""

from __future__ import annotations

import dataclasses

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    MoEProblem,
    PermutedWeights,
    Platform,
    register_moe_backend,
)
from moereg_vllm._alignment import aligned_tensors
from moereg_vllm._claims import FACTS, REQUIRES, sorting_reasons
from moereg_vllm._library import fused_moe, vllm_module
from moereg_vllm._routes import expert_table, mapped_routes

__all__ = ["VllmCutlassExperts", "moereg_api"]

moereg_api = "1"


# Above vLLM's Triton kernel for the same scheme, as vLLM orders them on Hopper, and below moereg's own. Per-tensor
# activations are left out: vLLM's scale for them spans the rows of routes that have no local expert.
@register_moe_backend(
    name="vllm_cutlass",
    priority=60,
    quant_schemes=("fp8_channel_token",),
    platforms=("cuda:sm90",),
    requires=REQUIRES,
)
class VllmCutlassExperts(Experts):
    """Standard format: rows sorted by expert, two grouped GEMMs, and a weighted sum."""

    facts = dataclasses.replace(
        FACTS,
        # The activation between the matmuls takes no clamp.
        activations=frozenset({"silu", "gelu", "gelu_tanh"}),
        swiglu_limit=False,
        bias=False,
        requires_multiple={"hidden_size": 16, "intermediate_size": 16},
    )
    layouts = ("vllm_cutlass",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """The number of experts."""
        return sorting_reasons(problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views, copies of what does not begin at 16 bytes, and the strides that the kernel takes for each expert."""
        experts, device = problem.num_local_experts, weights.w13.device

        def strides(stride: int) -> torch.Tensor:
            return torch.full((experts,), stride, dtype=torch.int64, device=device)

        # One stride an expert, but of the layer's sizes, so none belongs to an expert that moves.
        shared = {
            "hidden_stride": strides(problem.hidden_size),
            "intermediate_stride": strides(problem.intermediate_size),
            "gate_up_stride": strides(2 * problem.intermediate_size),
            "expert_table": expert_table(problem, device),
        }
        return PermutedWeights(self.layouts[0], aligned_tensors(weights), shared)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate between the matmuls, and what the first one reads and the second one writes."""
        rows = num_tokens * problem.top_k
        intermediate, hidden = problem.intermediate_size, problem.hidden_size
        return (rows, 2 * intermediate), (rows, max(intermediate, hidden))

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Calls what vLLM's layer calls."""
        problem = self.problem
        routes = mapped_routes(inputs, problem, weights["expert_table"])
        activations = fused_moe("activation").MoEActivation
        x, x_scale = vllm_module("_custom_ops").scaled_fp8_quant(routes.hidden_states, use_per_token_if_dynamic=True)
        fused_moe("experts.cutlass_moe").run_cutlass_moe_fp8(
            output=out,
            hidden_states=x,
            w1=weights["w13"],
            w2=weights["w2"],
            topk_ids=routes.topk_ids,
            activation=activations.from_str(problem.activation.name),
            global_num_experts=problem.num_local_experts if routes.expert_map is None else routes.num_experts,
            expert_map=routes.expert_map,
            w1_scale=weights["w13_scale"],
            w2_scale=weights["w2_scale"],
            a1q_scale=x_scale,
            a2_scale=None,
            ab_strides1=weights["hidden_stride"],
            ab_strides2=weights["intermediate_stride"],
            c_strides1=weights["gate_up_stride"],
            c_strides2=weights["hidden_stride"],
            workspace13=workspace13,
            workspace2=workspace2,
            expert_num_tokens=None,
            out_dtype=out.dtype,
            per_act_token=True,
            per_out_ch=True,
            use_batched_format=False,
            topk_weights=routes.topk_weights,
            permute_scratch=None,
        )
