"""Rows of unquantized layers: platforms and their orders."""

from __future__ import annotations

from typing import Final

from tests.oracle_parity.rows import DATA_PARALLEL, KEPT_REQUEST, RAN_FIRST, SERVED_HERE, UNCLAIMED, Row

__all__ = ["ROWS"]

_BATCHED: Final = {"activation_format": "batched"}
_OFF: Final = {"VLLM_USE_FLASHINFER_MOE_FP16": "0"}

# Platforms with one backend of their own.
_ONE_BACKEND: Final = (
    Row(platform="cpu", ours="torch jax", by="TorchPackedExperts"),
    Row(platform="cpu", ours="torch", by="TorchPackedBatchedExperts", problem=_BATCHED),
    Row(
        platform="cpu",
        ours="",
        engine={"backend": "triton"},
        request={"require": "triton"},
        reasons={"triton": r"platform: requires platform in \(cuda:sm80\+", "torch": "not_required: .*got torch"},
        why={KEPT_REQUEST: "torch"},
    ),
    Row(
        platform="cpu",
        ours="",
        engine=_OFF,
        request={"deny": "torch,jax"},
        reasons={"torch": "denied: denied by the request"},
        why={KEPT_REQUEST: "torch"},
    ),
    Row(platform="tpu", ours="torch jax"),
    Row(
        platform="tpu",
        ours="",
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
        reasons={"flashinfer_cutlass": "platform: .*got tpu"},
        why={KEPT_REQUEST: "torch"},
    ),
    Row(platform="npu", ours="npu_kernels torch"),
    Row(platform="npu", ours="torch", request={"deny": "npu_*"}, why={KEPT_REQUEST: "npu_kernels"}),
    Row(
        platform="xpu",
        ours="xpu_kernels torch",
        supports="xpu_kernels triton",
        reasons={"triton": "platform: .*got xpu"},
        why={UNCLAIMED: "triton"},
    ),
    Row(platform="xpu", ours="torch", request={"deny": "xpu_kernels"}, why={SERVED_HERE: "torch"}),
)

# Kernels that never ran there wait for their names.
_UNTRIED: Final = tuple(
    Row(
        platform=platform,
        ours=ours,
        supports=f"triton {untried}",
        reasons=dict.fromkeys(untried.split(), "opt_in: "),
        why={RAN_FIRST: untried},
    )
    for platform, ours, untried in (
        ("cuda:sm100", "triton torch", "flashinfer_trtllm flashinfer_cutlass"),
        ("cuda:sm103", "triton torch", "flashinfer_trtllm flashinfer_cutlass"),
        ("cuda:sm120", "triton torch", "flashinfer_cutlass"),
        ("rocm:gfx942", "triton torch", "aiter"),
    )
)

# The order on NVIDIA's GPUs and what changes it.
_ORDER: Final = (
    Row(
        platform="cuda:sm90",
        ours="triton vllm_triton flashinfer_cutlass cutlass sonic torch jax",
        supports="triton flashinfer_cutlass",
        reasons={"flashinfer_cutile": "opt_in: "},
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_trtllm flashinfer_cutlass vllm_triton cutlass torch",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        reasons={"aiter": "platform: .*got cuda:sm100"},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm103",
        ours="triton flashinfer_trtllm flashinfer_cutlass torch",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton vllm_triton flashinfer_cutlass cutlass sonic flashinfer_cutile torch jax",
        supports="triton flashinfer_cutlass",
        reasons={"flashinfer_trtllm": r"platform: requires platform in .*got cuda:sm90"},
        named=True,
    ),
    Row(
        platform="cuda:sm120",
        ours="triton flashinfer_cutlass vllm_triton torch",
        supports="triton flashinfer_cutlass",
        reasons={"flashinfer_trtllm": "platform: .*got cuda:sm120", "cutlass": "platform"},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(platform="cuda:sm80", ours="triton vllm_triton torch jax", supports="triton"),
    Row(platform="cuda:sm75", ours="torch jax", reasons={"triton": "platform: "}, why={SERVED_HERE: "torch"}),
    # Data parallel ranks, of which a layer knows nothing: the engine that does says so.
    Row(
        platform="cuda:sm100",
        ours="flashinfer_trtllm triton flashinfer_cutlass",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine={"num_data_parallel": 2},
        request={"prefer": "flashinfer_trtllm,triton,flashinfer_cutlass"},
    ),
    *(
        Row(
            platform="cuda:sm100",
            ours="flashinfer_cutlass triton",
            supports="triton flashinfer_cutlass",
            problem={"has_bias": True},
            engine={"num_data_parallel": num_ranks},
            request={"prefer": "flashinfer_cutlass"},
            why={DATA_PARALLEL: "flashinfer_cutlass"} if num_ranks > 1 else {},
        )
        for num_ranks in (1, 2)
    ),
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        engine={"num_data_parallel": 8},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"activation": "swigluoai", "has_bias": True},
        reasons={"flashinfer_trtllm": "bias: does not apply biases"},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"activation": "swigluoai"},
        reasons={"flashinfer_trtllm": "activation: requires activation in"},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"activation": "gelu_tanh"},
        reasons={"flashinfer_trtllm": "activation: requires activation in"},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass cutlass flashinfer_cutile",
        supports="triton flashinfer_cutlass",
        problem={"activation": "swigluoai"},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton torch",
        supports="triton",
        problem=_BATCHED,
        reasons={
            "flashinfer_trtllm": r"activation_format: requires activation format in \(standard\), got batched",
            "flashinfer_cutlass": "activation_format: ",
        },
    ),
    Row(platform="cuda:sm90", ours="triton torch", supports="triton", problem=_BATCHED),
    # Experts of other ranks: FlashInfer takes runs of experts and no map.
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"num_local_experts": 16},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton torch",
        supports="triton",
        problem={"num_local_experts": 16, "placement": "map"},
        reasons={"flashinfer_cutlass": r"(placement|backend): .*(contiguous|map)"},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"has_bias": True},
        reasons={"flashinfer_trtllm": "bias: does not apply biases"},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton vllm_triton flashinfer_cutlass torch jax",
        supports="triton",
        problem={"hidden_size": 2050, "intermediate_size": 1021},
        reasons={"cutlass": "(alignment|backend): requires hidden_size"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton vllm_triton flashinfer_cutlass cutlass torch",
        supports="triton flashinfer_cutlass",
        problem={"dtype": "float16"},
        request={"deny": "flashinfer_cutile"},
        named=True,
    ),
    Row(
        platform="cuda:sm100",
        ours="triton flashinfer_cutlass vllm_triton cutlass torch",
        supports="flashinfer_cutlass triton",
        problem={"dtype": "float16"},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    # CUTLASS by QuACK, or else by torch.
    *(
        Row(
            platform=platform,
            ours="cutlass",
            by=by,
            packages={} if by == "QuackExperts" else {"quack-kernels": None},
            engine={"backend": "cutlass"},
            request={"require": "cutlass"},
            why={SERVED_HERE: "cutlass"},
        )
        for platform in ("cuda:sm90", "cuda:sm100")
        for by in ("QuackExperts", "TorchGroupedExperts")
    ),
    # A machine without packages.
    Row(
        platform="cuda:sm100",
        ours="triton cutlass torch",
        supports="triton",
        packages={"flashinfer-python": None},
        reasons={"flashinfer_trtllm": "package: requires flashinfer-python.*which is not installed"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton cutlass",
        supports="triton",
        packages={"flashinfer-python": "0.8.0"},
        reasons={"flashinfer_cutlass": "package: requires flashinfer-python.*got 0.8.0"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass flashinfer_cutile cutlass torch",
        supports="triton flashinfer_cutlass",
        packages={"quack-kernels": None, "vllm": None},
        reasons={"vllm_triton": "package: requires vllm", "sonic": "package: requires nvidia-cutlass-dsl"},
        named=True,
    ),
    Row(platform="cuda:sm80", ours="torch", packages={"triton": None, "vllm": None}, why={SERVED_HERE: "torch"}),
)

# Nothing that vLLM has fits; moereg's last resort does.
_NOTHING: Final = (
    Row(
        platform="cuda:sm75",
        ours="",
        request={"deny": "torch,jax"},
        reasons={"triton": "platform: ", "torch": "denied: "},
    ),
)

ROWS: Final = (*_ONE_BACKEND, *_UNTRIED, *_ORDER, *_NOTHING)
