"""`deepgemm`: DeepGEMM's grouped GEMM for 8-bit floats with 128 x 128 scales, as vLLM calls it."""

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
    round_up,
)
from moereg_vllm._activation import activate, is_sigmoid_gate
from moereg_vllm._alignment import aligned_tensors
from moereg_vllm._claims import FACTS, REQUIRES
from moereg_vllm._library import fused_moe, vllm_module
from moereg_vllm._routes import local_routes

__all__ = ["DeepGemmExperts", "moereg_api"]

moereg_api = "1"

_BLOCK = 128


def _has_deep_gemm(platform: Platform) -> str | None:
    """DeepGEMM comes with vLLM or by itself, and compiles kernels with the CUDA toolkit."""
    import importlib.util
    import os
    import shutil

    bundled = importlib.util.find_spec("vllm")
    folders = [] if bundled is None else list(bundled.submodule_search_locations or ())
    if not importlib.util.find_spec("deep_gemm") and not any(
        os.path.isdir(os.path.join(folder, "third_party", "deep_gemm")) for folder in folders
    ):
        return "requires deep_gemm, which this build of vllm lacks"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") or os.path.exists(os.path.join(home, "bin", "nvcc")):
        return None
    return "requires the CUDA compiler nvcc, set CUDA_HOME"


# Above Triton's kernel for the same scheme, as vLLM orders them on Hopper, and below moereg's own.
@register_moe_backend(
    name="deepgemm",
    priority=60,
    quant_schemes=("fp8_block128",),
    platforms=("cuda:sm90",),
    requires=REQUIRES,
    probes=(_has_deep_gemm,),
)
class DeepGemmExperts(Experts):
    """Standard format: rows sorted into runs of 128 for each expert, two grouped GEMMs, and a weighted sum.

    Kernels are compiled for each pair of sizes at the first call, in seconds.
    """

    facts = dataclasses.replace(
        FACTS,
        activations=FACTS.activations - {"relu2"},
        bias=False,
        dtypes=frozenset({"bfloat16"}),
        # The sum over choices takes columns in runs of 1024.
        requires_multiple={"hidden_size": 1024, "intermediate_size": _BLOCK},
    )
    layouts = ("canonical",)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views: on Hopper DeepGEMM reads the canonical order; copies of what does not begin at 16 bytes."""
        return PermutedWeights("canonical", aligned_tensors(weights))

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Codes that a matmul reads, in bytes of 16-bit numbers, and outputs of the matmuls."""
        rows = self._rows(num_tokens)
        halves, intermediate, hidden = (
            problem.activation.num_halves,
            problem.intermediate_size,
            problem.hidden_size,
        )
        return (rows, max(intermediate, hidden) // 2), (rows, max(halves * intermediate, hidden))

    def _rows(self, num_tokens: int) -> int:
        routes = num_tokens * self.problem.top_k
        return round_up(routes + min(routes, self.problem.num_local_experts) * (_BLOCK - 1), _BLOCK)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """As vLLM's layer calls DeepGEMM, with fp32 scales as the scheme has them."""
        problem = self.problem
        routes = local_routes(inputs, problem)
        utils, gemm = fused_moe("deep_gemm_utils"), vllm_module("utils.deep_gemm")
        quant = vllm_module("model_executor.layers.quantization.utils.fp8_utils")
        num_tokens, top_k = routes.topk_ids.shape
        hidden, intermediate = problem.hidden_size, problem.intermediate_size
        rows, _ = utils.compute_aligned_M_and_alignment(
            num_tokens, top_k, problem.num_local_experts, gemm.get_mk_alignment_for_contiguous_layout()[0], None
        )
        codes = workspace13.view(-1).view(torch.float8_e4m3fn)
        results = workspace2.view(-1)

        x, x_scale = quant.per_token_group_quant_fp8(routes.hidden_states, _BLOCK, use_ue8m0=False)
        x, x_scale, row_expert, position, alignment = utils.deepgemm_moe_permute(
            aq=x,
            aq_scale=x_scale,
            topk_ids=routes.topk_ids,
            local_num_experts=problem.num_local_experts,
            expert_map=None,
            expert_tokens_meta=None,
            aq_out=codes[: rows * hidden].view(rows, hidden),
        )
        with gemm.mk_alignment_scope(alignment):
            gemm1 = results[: rows * 2 * intermediate].view(rows, 2 * intermediate)
            gemm.m_grouped_fp8_gemm_nt_contiguous(
                (x, x_scale), (weights["w13"], weights["w13_scale"]), gemm1, row_expert
            )
            middle = codes[: rows * intermediate].view(rows, intermediate)
            middle, middle_scale = self._activated(gemm1, middle)
            gemm2 = results[: rows * hidden].view(rows, hidden)
            gemm.m_grouped_fp8_gemm_nt_contiguous(
                (middle, middle_scale), (weights["w2"], weights["w2_scale"]), gemm2, row_expert
            )
        utils.deepgemm_unpermute_and_reduce(
            a=gemm2,
            topk_ids=routes.topk_ids,
            topk_weights=routes.topk_weights,
            inv_perm=position,
            expert_map=None,
            output=out,
        )

    def _activated(self, gemm1: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [R,I] of the activation of [R,2I], and scales [R,I/128] in columns."""
        quant = vllm_module("model_executor.layers.quantization.utils.fp8_utils")
        activation = self.problem.activation
        if is_sigmoid_gate(self.problem):
            fused: tuple[torch.Tensor, torch.Tensor] = quant.silu_mul_per_token_group_quant_fp8_colmajor(
                gemm1,
                codes,
                use_ue8m0=False,
                clamp_limit=activation.limit,
                group_size=_BLOCK,
                alpha=activation.alpha,
                beta=activation.beta,
            )
            return fused
        intermediate = torch.empty_like(codes, dtype=gemm1.dtype)
        activate(self.problem, intermediate, gemm1)
        quantized: tuple[torch.Tensor, torch.Tensor] = quant.per_token_group_quant_fp8(
            intermediate, _BLOCK, column_major_scales=True, out_q=codes, use_ue8m0=False
        )
        return quantized
