"""What `flashinfer_cutlass` calls in flashinfer-python."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

_PACKAGE = "flashinfer-python"
_BACKENDS = ("flashinfer_cutlass",)

CALLS = (
    ForeignCall(
        "flashinfer.fused_moe.cutlass_fused_moe",
        "(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, "
        "output_dtype, quant_scales, fc1_expert_biases=None, fc2_expert_biases=None, input_sf=None, "
        "swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, "
        "cluster_size=1, cluster_rank=0, output=None, enable_alltoall=False, "
        "use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, use_mxfp8_act_scaling=False, "
        "min_latency_mode=False, use_packed_weights=False, use_wfp4afp8_humming=False, "
        "tune_max_num_tokens=8192, enable_pdl=None, activation_type=ActivationType.Swiglu, "
        "swizzled_input_sf=True, use_fused_finalize=True, profile_ids=None, workspace_buffer=None, *, "
        "clamped_relu2_limit=None, situ_beta=None, situ_linear_beta=None, backend='cutlass')",
        _PACKAGE,
        _BACKENDS,
    ),
    ForeignCall(
        "flashinfer.fused_moe.cutlass_fused_moe_workspace_size",
        "(max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *, x_dtype, weight_dtype,"
        " output_dtype=torch.bfloat16, activation_type=ActivationType.Swiglu, tp_size=1, tp_rank=0, "
        "ep_size=1, ep_rank=0, min_latency_mode=False, use_deepseek_fp8_block_scale=False, "
        "use_w4_group_scaling=False, use_mxfp8_act_scaling=False, use_fused_finalize=True, "
        "use_packed_weights=False, use_wfp4afp8_humming=False, device=None, backend='cutlass')",
        _PACKAGE,
        _BACKENDS,
    ),
    ForeignCall(
        "flashinfer.fused_moe.ActivationType",
        "(Gelu=0, Relu=1, Silu=2, Swiglu=3, Geglu=4, SwigluBias=5, Relu2=6, SwigluStep=7, GegluTanh=8, "
        "Identity=9, Situ=10, InvalidType=11, ClampedRelu2=12)",
        _PACKAGE,
        _BACKENDS,
    ),
    ForeignCall(
        "flashinfer.fused_moe.core.get_cutlass_fused_moe_module",
        "(backend='100', use_fast_build=False)",
        _PACKAGE,
        _BACKENDS,
    ),
    *(
        ForeignCall(
            f"flashinfer.jit.fused_moe.gen_cutlass_fused_moe_{arch}_module",
            "(use_fast_build=False)",
            _PACKAGE,
            _BACKENDS,
        )
        for arch in ("sm90", "sm100", "sm103", "sm120")
    ),
    ForeignCall("flashinfer.jit.core.refresh_current_compilation_context", "()", _PACKAGE, _BACKENDS),
    ForeignCall("flashinfer.jit.core.current_compilation_context", "", _PACKAGE, _BACKENDS),
    # Copies of it with fewer sources are built.
    ForeignCall(
        "flashinfer.jit.core.JitSpecNvcc",
        "(name, sources, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_dirs, is_class=False, "
        "needs_device_linking=False, post_load_adapter=None, embedded_cubin_factory=None, "
        "extra_cuda_cflags_by_source=None)",
        _PACKAGE,
        _BACKENDS,
    ),
)
