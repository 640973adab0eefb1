"""What `humming` of moereg-humming calls in humming-kernels."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

CALLS = (
    ForeignCall(
        "humming.config.GemmType",
        "(DENSE='dense', INDEXED='indexed', GROUPED_CONTIGUOUS='grouped_contiguous', GROUPED_MASKED='grouped_masked')",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.kernel.humming.HummingKernel.prepare_kernels",
        "(layer_config, compute_config=None, tuning_config=None, device=None)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.ops.launch_kernel",
        "(*, configs, inputs, weight, weight_scale, weight_scale_2=None, input_scale=None, "
        "input_scale_2=None, zero_point=None, bias=None, outputs=None, sorted_ids=None, expert_ids=None, "
        "num_tokens_padded=None, expert_layout=None, locks=None, top_k=1, valid_shape_m=0)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.schema.HummingWeightSchema",
        "(*, quant_method='humming', b_dtype, bs_dtype=None, weight_scale_group_size=0, "
        "weight_scale_group_size_n=0, weight_scale_type=None, weight_scale_2_type=None, has_zero_point=False,"
        " is_fp_zero_point=False, hadamard_block_size=0)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.transform.prepare_fp16_e8m0_scale",
        "(config, tensors)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.transform.prepare_layer_config",
        "(shape_n, shape_k, weight_schema, input_schema=None, num_experts=None, pad_n_to_multiple=1, "
        "pad_k_to_multiple=1, has_bias=False, torch_dtype=None, device=None, tensors=None)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.transform.transform_humming_tensors",
        "(config, tensors, already_padded=False)",
        package="humming-kernels",
        backends=("humming",),
    ),
    ForeignCall(
        "humming.tune.get_heuristics_config",
        "(layer_config, shape_m=None, use_f16_accum=False, use_batch_invariant=False, "
        "use_m_major_input_scale=False, gemm_type='dense', device=None)",
        package="humming-kernels",
        backends=("humming",),
    ),
)
