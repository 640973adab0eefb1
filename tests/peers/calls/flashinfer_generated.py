"""What `flashinfer_trtllm`, `flashinfer_cutedsl`, `flashinfer_cutile` and `flashinfer_b12x` call in FlashInfer."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

CALLS = (
    ForeignCall(
        "flashinfer.fused_moe.cutile.moe.run_moe",
        "(hidden_states, topk_ids, topk_weights, w1, w2, output, workspace, *, activation, block_size, "
        "gemm1_config, gemm2_config, sorted_io=False)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.moe.allocate_workspace",
        "(*, num_tokens, hidden_size, intermediate_size, num_experts, top_k, is_gated, block_sizes, device, "
        "allocate_activation_output=True, allocate_gemm1_output=None, gemm1_output_rows=None, "
        "sorted_io=False)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.moe.GemmConfig",
        "(tile_n, tile_k, occupancy)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.fp8.run_moe",
        "(hidden_states, topk_ids, topk_weights, w1, s1, w2, s2, output, workspace, *, activation, "
        "activation_fp8, block_scaled, weight_fp4, block_size, gemm1_config, gemm2_config, "
        "sorted_input=False, fuse_quantization=False, num_sms=0, persistent_factors=(0, 0), "
        "fuse_gemm1_quant=False)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.fp8.allocate_workspace",
        "(*, activation_fp8, block_scaled, **kwargs)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.fp4.run_moe",
        "(hidden_states, topk_ids, topk_weights, w1, w1_scale, w1_global_scale, w2, w2_scale, "
        "w2_global_scale, output, workspace, *, activation, activation_fp4=True, scale_block_size=16, "
        "fuse_gemm1=None, num_sms, block_size, gemm1_config, gemm2_config)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutile.fp4.allocate_workspace",
        "(*, num_tokens, hidden_size, intermediate_size, num_experts, top_k, is_gated, block_sizes, "
        "activation_fp4=True, scale_block_size=16, scale_dtype=torch.float8_e4m3fn, device)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.api.SwiGLU",
        "(alpha=1.0, beta=0.0, limit=3.4028234663852886e+38)",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.api.GeGLU",
        "()",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.api.GeGLUTanh",
        "()",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.api.ReLU2",
        "()",
        package="flashinfer-python",
        backends=("flashinfer_cutile",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.trtllm_bf16_routed_moe",
        "(topk_ids, hidden_states, gemm1_weights, gemm2_weights, num_experts, top_k, n_group, topk_group, "
        "intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor=None, "
        "routing_method_type=0, use_shuffled_weight=True, weight_layout=WeightLayout.BlockMajorK, "
        "do_finalize=True, enable_pdl=True, gemm1_lora_delta=None, tune_max_num_tokens=8192, "
        "activation_type=3, routing_replay_out=None, gemm1_alpha=None, gemm1_beta=None, "
        "gemm1_clamp_limit=None, output=None)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe",
        "(topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, "
        "gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size, "
        "local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0, "
        "use_shuffled_weight=False, weight_layout=0, do_finalize=True, enable_pdl=None, "
        "gemm1_lora_delta=None, output=None, tune_max_num_tokens=8192, "
        "fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8, activation_type=3, gemm1_alpha=None, "
        "gemm1_beta=None, gemm1_clamp_limit=None, valid_hidden_size=None, valid_intermediate_size=None)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.trtllm_fp8_per_tensor_scale_routed_moe",
        "(topk_ids, routing_bias, hidden_states, gemm1_weights, output1_scales_scalar, "
        "output1_scales_gate_scalar, gemm2_weights, output2_scales_scalar, num_experts, top_k, n_group, "
        "topk_group, intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor, "
        "use_routing_scales_on_input, routing_method_type=0, do_finalize=True, enable_pdl=None, "
        "tune_max_num_tokens=8192, activation_type=3, routing_replay_out=None, output=None, "
        "gemm1_clamp_limit=None)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe",
        "(topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, "
        "gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, "
        "gemm2_bias, output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar, num_experts, "
        "top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts, "
        "routed_scaling_factor, routing_method_type=0, do_finalize=True, enable_pdl=None, activation_type=3, "
        "per_token_scale=None, output=None, tune_max_num_tokens=8192, gemm1_lora_delta=None, "
        "valid_hidden_size=None, valid_intermediate_size=None, num_fused_shared_experts=None, "
        "hidden_states_scale_layout=None)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.trtllm_mxint4_block_scale_routed_moe",
        "(topk_ids, hidden_states, gemm1_weights, gemm1_weights_scale, gemm1_alpha, gemm1_beta, "
        "gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, "
        "intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor, "
        "routing_method_type=0, do_finalize=True, enable_pdl=None, gemm1_lora_delta=None, output=None, "
        "tune_max_num_tokens=8192, valid_hidden_size=None, valid_intermediate_size=None)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.tllm_enums.WeightLayout",
        "(MajorK=0, MajorMn=1, BlockMajorK=2)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.tllm_enums.Fp8QuantizationType",
        "(NoneFp8=0, DeepSeekFp8=1, MxFp8=2, PerTensorFp8=3, PerChannelFp8=4)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.tllm_enums.SfLayout",
        "(layout_128x4=0, layout_8x4=1, layout_linear=2)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.tllm_enums.ActivationType",
        "(Gelu=0, Relu=1, Silu=2, Swiglu=3, Geglu=4, SwigluBias=5, Relu2=6, SwigluStep=7, GegluTanh=8, "
        "Identity=9, Situ=10, InvalidType=11, ClampedRelu2=12)",
        package="flashinfer-python",
        backends=(
            "flashinfer_cutedsl",
            "flashinfer_trtllm",
        ),
    ),
    ForeignCall(
        "flashinfer.tllm_enums.RoutingMethodType",
        "(Default=0, Renormalize=1, DeepSeekV3=2, Llama4=3, RenormalizeNaive=4, TopK=5, SigmoidRenorm=6, "
        "MiniMax2=7, Sigmoid=8, TopKSigmoid=9, Unspecified=10)",
        package="flashinfer-python",
        backends=("flashinfer_trtllm",),
    ),
    ForeignCall(
        "flashinfer.cute_dsl.grouped_gemm_nt_masked",
        "(lhs, rhs, out, masked_m, *, ab_dtype, sf_dtype, c_dtype, sf_vec_size, topk_weights=None, "
        "idx_src_info=None, rank_src_info=None, out_ptrs=None, num_ranks=0, dst_signals=None, sm_count=None, "
        "barrier_flag_local=None, barrier_flag_multicast=None, is_combine_fusion=False, is_swap_ab=False, "
        "**kwargs)",
        package="flashinfer-python",
        backends=("flashinfer_cutedsl",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cute_dsl_fused_moe",
        "(x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, "
        "fc2_input_scale, w2_weight, w2_weight_sf, w2_alpha, num_experts, top_k, num_local_experts=None, "
        "local_expert_offset=0, output_dtype=torch.bfloat16, use_fused_finalize=True, moe_output=None, "
        "aux_stream=None, enable_pdl=True, activation_type=3, swiglu_alpha=1.0, swiglu_beta=0.0, "
        "swiglu_limit=3.4028234663852886e+38, situ_beta=None, situ_linear_beta=None, *, quant_mode='w4a4', "
        "per_token_scale=None, tactic=None, localized_weights=None, localized_streams=None, "
        "localized_sm_count=None, localized_memset_stream=None, localized_allow_nonlocalized=False, "
        "autotune_use_cuda_graph=False)",
        package="flashinfer-python",
        backends=("flashinfer_cutedsl",),
    ),
    ForeignCall(
        "flashinfer.scaled_fp4_grouped_quantize",
        "(a, mask, a_global_sf, nvfp4_4over6=_UnsetType)",
        package="flashinfer-python",
        backends=("flashinfer_cutedsl",),
    ),
    ForeignCall(
        "flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize",
        "(a, mask, a_global_sf, nvfp4_4over6=_UnsetType)",
        package="flashinfer-python",
        backends=("flashinfer_cutedsl",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare.prepare_w4a16_modelopt_nvfp4_weights",
        "(w13_fp4, w13_blockscale, w13_global_scale, w2_fp4, w2_blockscale, w2_global_scale, *, activation, "
        "params_dtype=torch.bfloat16, w13_layout='w13', reuse_input_storage=False)",
        package="flashinfer-python",
        backends=("flashinfer_b12x",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch.launch_sm120_moe",
        "(*, a, topk_ids, topk_weights, w1_weight, w1_weight_sf, w1_alpha, fc2_input_scale=None, "
        "input_global_scale=None, w2_weight, w2_weight_sf, w2_alpha, num_experts, top_k, num_local_experts, "
        "scatter_output, expert_map=None, input_scales_are_reciprocal=False, fast_math=True, "
        "activation='silu', swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=None, "
        "activation_precision='fp4', quant_mode=None, source_format='modelopt', _workspace=None, "
        "_weight_views=None, _prepared_weights=None)",
        package="flashinfer-python",
        backends=("flashinfer_b12x",),
    ),
    ForeignCall(
        "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare.W4A16PackedWeights",
        "(w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale, workspace, hidden_size, "
        "intermediate_size, num_experts, is_gated, params_dtype, source_format='modelopt', w13_layout='w13', "
        "weight_layout='packed', scale_format='e4m3_k16')",
        package="flashinfer-python",
        backends=("flashinfer_b12x",),
    ),
)
