"""What moereg-vllm calls in vLLM, which does not install without CUDA: read from its source."""

from __future__ import annotations

from tests.peers.contract import ForeignCall


def _row(target: str, parameters: str, file: str, *backends: str) -> ForeignCall:
    return ForeignCall(target, parameters, package="vllm", backends=backends, published=f"vLLM 0.26.0, vllm/{file}")


_ACTIVATION = ("deepgemm", "marlin", "triton_kernels", "vllm_triton")
_OPERATORS = "_C_stable_libtorch.abi3.so"

CALLS = (
    _row("vllm._C.gelu_and_mul", "(out, input)", _OPERATORS, *_ACTIVATION),
    _row("vllm._C.gelu_tanh_and_mul", "(out, input)", _OPERATORS, *_ACTIVATION),
    _row("vllm._C.silu_and_mul", "(result, input)", _OPERATORS, *_ACTIVATION),
    _row(
        "vllm._C.silu_and_mul_with_clamp",
        "(result, input, limit, alpha=1.0, beta=0.0)",
        _OPERATORS,
        *_ACTIVATION,
    ),
    _row(
        "vllm._custom_ops",
        "",
        "_custom_ops.py",
        "marlin",
        "vllm_triton",
    ),
    _row(
        "vllm._custom_ops.gptq_marlin_repack",
        "(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False)",
        "_custom_ops.py",
        "marlin",
    ),
    _row(
        "vllm._custom_ops.moe_sum",
        "(input, output, topk_ids=None, expert_map=None)",
        "_custom_ops.py",
        "vllm_triton",
    ),
    _row(
        "vllm._custom_ops.scaled_fp8_quant",
        "(input, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False, "
        "output=None, group_shape=None)",
        "_custom_ops.py",
        "vllm_cutlass",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.activation.MoEActivation",
        "(SILU='silu', GELU='gelu', GELU_TANH='gelu_tanh', RELU2='relu2', SWIGLUOAI='swigluoai', "
        "SWIGLUOAI_UNINTERLEAVE='swigluoai_uninterleave', SWIGLUSTEP='swiglustep', SILU_NO_MUL='silu_no_mul',"
        " GELU_NO_MUL='gelu_no_mul', GELU_TANH_NO_MUL='gelu_tanh_no_mul', RELU2_NO_MUL='relu2_no_mul')",
        "model_executor/layers/fused_moe/activation.py",
        "marlin",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.activation.MoEActivation.from_str",
        "(s)",
        "model_executor/layers/fused_moe/activation.py",
        "vllm_cutlass",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.deep_gemm_utils.compute_aligned_M_and_alignment",
        "(M, num_topk, local_num_experts, alignment, expert_tokens_meta)",
        "model_executor/layers/fused_moe/deep_gemm_utils.py",
        "deepgemm",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.deep_gemm_utils.deepgemm_moe_permute",
        "(aq, aq_scale, topk_ids, local_num_experts, expert_map, expert_tokens_meta, aq_out=None, block_size=None)",
        "model_executor/layers/fused_moe/deep_gemm_utils.py",
        "deepgemm",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.deep_gemm_utils.deepgemm_unpermute_and_reduce",
        "(a, topk_ids, topk_weights, inv_perm, expert_map, output)",
        "model_executor/layers/fused_moe/deep_gemm_utils.py",
        "deepgemm",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.experts.cutlass_moe.run_cutlass_moe_fp8",
        "(output, hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map, w1_scale, "
        "w2_scale, a1q_scale, a2_scale, ab_strides1, ab_strides2, c_strides1, c_strides2, workspace13, "
        "workspace2, expert_num_tokens, out_dtype, per_act_token, per_out_ch, use_batched_format, "
        "topk_weights, permute_scratch)",
        "model_executor/layers/fused_moe/experts/cutlass_moe.py",
        "vllm_cutlass",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe.make_routing_data",
        "(topk_ids, topk_weights, num_local_experts)",
        "model_executor/layers/fused_moe/experts/gpt_oss_triton_kernels_moe.py",
        "triton_kernels",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe.matmul_ogs",
        "",
        "model_executor/layers/fused_moe/experts/gpt_oss_triton_kernels_moe.py",
        "triton_kernels",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe.triton_kernel_fused_experts",
        "(output_tensor, hidden_states, w1, w2, routing_data, gather_indx, scatter_indx, topk, "
        "activation=MoEActivation.SWIGLUOAI, quant_config=None, swiglu_alpha=1.702, swiglu_limit=7.0, "
        "apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None, intermediate_cache=None,"
        " a1q_scale=None)",
        "model_executor/layers/fused_moe/experts/gpt_oss_triton_kernels_moe.py",
        "triton_kernels",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.experts.marlin_moe.fused_marlin_moe",
        "(hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids, quant_type_id, "
        "apply_router_weight_on_input=False, global_num_experts=-1, activation=MoEActivation.SILU, "
        "activation_func=apply_moe_activation, moe_sum=None, expert_map=None, input_global_scale1=None, "
        "input_global_scale2=None, global_scale1=None, global_scale2=None, g_idx1=None, g_idx2=None, "
        "sort_indices1=None, sort_indices2=None, w1_zeros=None, w2_zeros=None, workspace=None, "
        "intermediate_cache13=None, intermediate_cache2=None, is_k_full=True, output=None, input_dtype=None, "
        "clamp_limit=None, gemm1_alpha=1.0, gemm1_beta=0.0)",
        "model_executor/layers/fused_moe/experts/marlin_moe.py",
        "marlin",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.fused_moe.invoke_fused_moe_triton_kernel",
        "(A, B, C, A_scale, B_scale, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded, "
        "mul_routed_weight, top_k, config, compute_type, use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, "
        "use_int4_w4a16, per_channel_quant, block_shape=None, B_bias=None)",
        "model_executor/layers/fused_moe/fused_moe.py",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.fused_moe.try_get_optimal_moe_config",
        "(w1_shape, w2_shape, top_k, dtype, M, block_shape=None)",
        "model_executor/layers/fused_moe/fused_moe.py",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size",
        "(topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False)",
        "model_executor/layers/fused_moe/moe_align_block_size.py",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.quantization.utils.fp8_utils.per_token_group_quant_fp8",
        "(x, group_size, eps=1e-10, dtype=None, column_major_scales=False, tma_aligned_scales=False, "
        "out_q=None, use_ue8m0=None)",
        "model_executor/layers/quantization/utils/fp8_utils.py",
        "deepgemm",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.quantization.utils.fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor",
        "(input, output=None, use_ue8m0=None, eps=1e-10, clamp_limit=None, group_size=128, alpha=1.0, beta=0.0)",
        "model_executor/layers/quantization/utils/fp8_utils.py",
        "deepgemm",
    ),
    _row(
        "vllm.model_executor.layers.quantization.utils.int8_utils.per_token_quant_int8",
        "(x)",
        "model_executor/layers/quantization/utils/int8_utils.py",
        "vllm_triton",
    ),
    _row(
        "vllm.model_executor.layers.quantization.utils.mxfp4_utils._swizzle_mxfp4",
        "(quant_tensor, scale, num_warps=8)",
        "model_executor/layers/quantization/utils/mxfp4_utils.py",
        "triton_kernels",
    ),
    _row(
        "vllm.scalar_type.scalar_types",
        "",
        "scalar_type.py",
        "marlin",
    ),
    _row(
        "vllm.utils.deep_gemm.get_mk_alignment_for_contiguous_layout",
        "()",
        "utils/deep_gemm.py",
        "deepgemm",
    ),
    _row(
        "vllm.utils.deep_gemm.m_grouped_fp8_gemm_nt_contiguous",
        "(*args, **kwargs)",
        "utils/deep_gemm.py",
        "deepgemm",
    ),
    _row(
        "vllm.utils.deep_gemm.mk_alignment_scope",
        "(value)",
        "utils/deep_gemm.py",
        "deepgemm",
    ),
    _row(
        "vllm.utils.import_utils.has_triton_kernels",
        "()",
        "utils/import_utils.py",
        "triton_kernels",
    ),
)
