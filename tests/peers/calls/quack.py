"""What `cutlass` calls in QuACK."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

CALLS = (
    ForeignCall(
        "quack.activation._maxnumf",
        "(x, c, *, loc=None, ip=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.activation._minnumf",
        "(x, c, *, loc=None, ip=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.activation.gelu_erf",
        "(x, *, loc=None, ip=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.activation.relu_sq",
        "(x, *, loc=None, ip=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.activation.sigmoid",
        "(x, *, loc=None, ip=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.cache.CACHE_ENABLED",
        "",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.cache.get_cache_path",
        "()",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.EpiMod",
        "(fn, outputs=(), ops=None, reduces=None, mode=None, paired=(), outs=None, prepass=None, "
        "prepass_outs=(), extra_ops=(), vectorize=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.EpiMod.__call__",
        "(self, A, B, C=None, *, out=None, out_dtype=None, store_d=True, config=None, tuned=True, "
        "dynamic_scheduler=False, cu_seqlens_m=None, A_idx=None, SFA=None, SFB=None, bs_format_a=None, "
        "bs_format_b=None, rounding_mode=RoundingMode.RN, epi_key_overrides=None, concat_layout=None, "
        "transform_a=None, transform_sf=None, transform_operands=None, add_to_output=False, **operands)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.F2",
        "(lo, hi)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.gemm_epilogue",
        "(outputs=(), ops=None, reduces=None, mode=None, paired=(), outs=None, prepass=None, prepass_outs=(),"
        " extra_ops=(), vectorize=None)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.unpack",
        "(value)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.ops.ColVecLoad",
        "(name)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.epilogue.ops.RowVecLoad",
        "(name)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
    ForeignCall(
        "quack.gemm_config.GemmConfig",
        "(tile_m=128, tile_n=192, tile_k=None, num_warps=None, pingpong=True, is_dynamic_persistent=True, "
        "cluster_m=2, cluster_n=1, cluster_k=1, split_k=1, swap_ab=False, max_swizzle_size=8, "
        "device_capacity=9, use_tma_gather=False)",
        package="quack-kernels",
        backends=("cutlass",),
    ),
)
