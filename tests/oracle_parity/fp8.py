"""Rows of 8-bit float layers, against the order in which vLLM 0.33 asks its backends."""

from __future__ import annotations

from typing import Final

from tests.oracle_parity.rows import LATER, MEASURED, RAN_FIRST, SERVED_HERE, UNCLAIMED, row_of

__all__ = ["ROWS"]

_BATCHED: Final = {"activation_format": "batched"}
_ONE_OF_FOUR: Final = {"num_local_experts": 16}


_FP8_BLOCK: Final = (
    # Without expert parallelism Triton goes first on Hopper, with it FlashInfer.
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "triton deepgemm flashinfer_cutlass marlin humming",
        "triton flashinfer_cutlass deepgemm humming marlin",
        reasons={"flashinfer_trtllm": "platform: ", "vllm_cutlass": "quant_scheme: "},
        why={RAN_FIRST: "flashinfer_cutlass", LATER: "humming"},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "triton deepgemm flashinfer_cutlass marlin humming",
        "triton flashinfer_cutlass deepgemm humming marlin",
        problem=_ONE_OF_FOUR,
        why={RAN_FIRST: "flashinfer_cutlass triton", LATER: "humming"},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "flashinfer_cutlass",
        "triton flashinfer_cutlass",
        problem=_ONE_OF_FOUR,
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "deepgemm",
        "triton deepgemm",
        engine={"backend": "deepgemm"},
        request={"require": "fp8_block128=deepgemm"},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "triton flashinfer_cutlass marlin",
        "triton flashinfer_cutlass marlin",
        request={"deny": "deepgemm"},
        reasons={"deepgemm": "denied: "},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "triton",
        "triton deepgemm",
        problem=_BATCHED,
        reasons={"deepgemm": "activation_format: ", "marlin": "activation_format: "},
        why={UNCLAIMED: "deepgemm"},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "",
        "triton",
        problem=_BATCHED,
        engine={"backend": "marlin"},
        request={"require": "marlin"},
        reasons={"marlin": "activation_format: ", "triton": "not_required: "},
    ),
    row_of(
        "fp8_block128",
        "cuda:sm100",
        "triton flashinfer_trtllm marlin humming",
        "flashinfer_trtllm triton marlin humming",
        reasons={"deepgemm": "platform: "},
        why={RAN_FIRST: "triton"},
    ),
    # An engine that moves tokens with DeepEP asks for FlashInfer first.
    row_of(
        "fp8_block128",
        "cuda:sm100",
        "flashinfer_trtllm triton",
        "flashinfer_trtllm triton",
        request={"prefer": "flashinfer_trtllm"},
    ),
    row_of("fp8_block128", "cuda:sm120", "triton marlin humming", "triton marlin humming"),
    row_of("fp8_block128", "cuda:sm89", "triton vllm_triton marlin humming", "triton marlin humming"),
    row_of("fp8_block128", "cuda:sm80", "marlin humming", "marlin humming", reasons={"triton": "platform: "}),
    # With dynamic scales, gfx942's own float misses the bound of the numbers.
    row_of(
        "fp8_block128",
        "rocm:gfx942",
        "",
        "aiter",
        reasons={"aiter": "platform: ", "triton": "platform: "},
        why={UNCLAIMED: "aiter"},
    ),
    row_of(
        "fp8_block128",
        "rocm:gfx950",
        "",
        "aiter",
        reasons={"aiter": "opt_in: ", "triton": "platform: "},
        why={RAN_FIRST: "aiter"},
    ),
    row_of(
        "fp8_block128",
        "rocm:gfx950",
        "aiter",
        "aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    row_of("fp8_block128", "xpu", "xpu_kernels", "xpu_kernels", reasons={"triton": "platform: "}),
    row_of("fp8_block128", "cpu", "torch~", "torch~", why={SERVED_HERE: "torch~"}),
    row_of("fp8_block128", "tpu", "", reasons={"torch": "(platform|quant_scheme): "}),
    row_of(
        "fp8_block128",
        "cuda:sm90",
        "triton marlin",
        "triton marlin",
        packages={"flashinfer-python": None},
        failing="deep_gemm",
        reasons={"deepgemm": "probe: ", "flashinfer_cutlass": "package: "},
    ),
)

_FP8: Final = (
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "triton vllm_cutlass vllm_triton cutlass marlin humming",
        "vllm_cutlass triton humming marlin",
        reasons={"deepgemm": "quant_scheme: ", "flashinfer_cutlass": "quant_scheme: "},
        why={MEASURED: "triton", LATER: "humming"},
    ),
    # vLLM leaves its CUTLASS kernels out unless a quantization method allows them.
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "triton marlin humming",
        "triton humming marlin",
        request={"deny": "vllm_cutlass"},
        why={LATER: "humming"},
    ),
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "vllm_cutlass",
        "triton vllm_cutlass",
        engine={"backend": "vllm_cutlass"},
        request={"require": "vllm_cutlass"},
    ),
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "triton",
        "triton vllm_cutlass",
        problem=_BATCHED,
        why={UNCLAIMED: "vllm_cutlass"},
    ),
    row_of("fp8_channel_token", "cuda:sm100", "triton vllm_triton cutlass marlin humming", "triton marlin humming"),
    # CUTLASS by QuACK, or else by torch.
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "cutlass marlin humming",
        "humming marlin",
        by="QuackCodesExperts",
        packages={},
        request={"deny": "triton,vllm_*"},
        why={LATER: "humming"},
    ),
    row_of(
        "fp8_channel_token",
        "cuda:sm90",
        "marlin humming cutlass",
        "humming marlin",
        packages={"quack-kernels": None},
        request={"deny": "triton,vllm_*"},
        why={LATER: "humming"},
    ),
    row_of(
        "fp8_tensor_static",
        "cuda:sm90",
        "triton flashinfer_cutlass humming",
        "flashinfer_cutlass vllm_cutlass triton humming",
        why={RAN_FIRST: "flashinfer_cutlass", UNCLAIMED: "vllm_cutlass"},
    ),
    row_of(
        "fp8_tensor_static",
        "cuda:sm100",
        "triton flashinfer_trtllm flashinfer_cutlass marlin humming",
        "flashinfer_trtllm flashinfer_cutlass triton marlin humming",
        why={RAN_FIRST: "triton"},
    ),
    row_of(
        "fp8_tensor_static",
        "cuda:sm120",
        "triton flashinfer_cutlass marlin",
        "flashinfer_cutlass triton marlin",
        why={RAN_FIRST: "triton"},
    ),
    row_of("fp8_tensor_dynamic", "cuda:sm90", "triton flashinfer_cutile", "triton"),
    row_of(
        "fp8_tensor_dynamic",
        "cuda:sm90",
        "triton flashinfer_cutile",
        "triton",
        problem={"exact_activations": True},
    ),
    row_of("fp8_tensor_dynamic", "cuda:sm89", "triton", "triton", problem=_BATCHED),
    row_of(
        "fp8_tensor_static",
        "rocm:gfx950",
        "aiter",
        "aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    row_of(
        "fp8_tensor_static",
        "rocm:gfx942",
        "aiter",
        "aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    row_of(
        "fp8_tensor_static",
        "rocm:gfx942",
        "",
        "aiter",
        reasons={"aiter": "opt_in: ", "triton": "platform: "},
        why={RAN_FIRST: "aiter"},
    ),
)

_MXFP8: Final = (
    row_of(
        "mxfp8",
        "cuda:sm100",
        "triton humming",
        "flashinfer_trtllm deepgemm marlin humming",
        reasons={"flashinfer_trtllm": "opt_in: ", "flashinfer_cutlass": "opt_in: "},
        why={RAN_FIRST: "flashinfer_trtllm", UNCLAIMED: "deepgemm marlin"},
    ),
    row_of(
        "mxfp8",
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutlass triton humming",
        "flashinfer_trtllm deepgemm marlin humming",
        request={"prefer": "flashinfer_*,flashinfer_trtllm,flashinfer_cutlass"},
        why={UNCLAIMED: "deepgemm marlin"},
    ),
    row_of("mxfp8", "cuda:sm120", "triton humming", "humming", why={SERVED_HERE: "triton"}),
    row_of(
        "mxfp8",
        "cuda:sm90",
        "humming triton~",
        "marlin humming triton~",
        reasons={"flashinfer_trtllm": "platform: ", "marlin": "quant_scheme: "},
        why={UNCLAIMED: "marlin"},
    ),
    # No wish puts an emulation before a kernel.
    row_of("mxfp8", "cuda:sm90", "humming triton~", "humming triton~", request={"prefer": "triton"}),
    row_of("mxfp8", "cuda:sm90", "triton~", "triton~", problem={"exact_activations": True}),
    row_of(
        "mxfp8",
        "cuda:sm90",
        "flashinfer_cutile",
        request={"require": "flashinfer_cutile"},
        why={SERVED_HERE: "flashinfer_cutile"},
    ),
    row_of(
        "mxfp8",
        "cuda:sm90",
        "triton~",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton~"},
    ),
    row_of(
        "mxfp8",
        "cuda:sm100",
        "flashinfer_trtllm",
        "flashinfer_trtllm marlin humming",
        engine={"backend": "flashinfer_trtllm"},
        request={"require": "flashinfer_trtllm"},
    ),
    row_of("mxfp8", "cuda:sm100", "triton", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    row_of("mxfp8", "cuda:sm80", "humming", "marlin humming", why={UNCLAIMED: "marlin"}),
    row_of(
        "mxfp8",
        "cuda:sm100",
        "humming",
        "flashinfer_trtllm humming",
        packages={"triton": "3.6.0"},
        reasons={"triton": "package: requires triton>=3.8, got 3.6.0", "flashinfer_trtllm": "opt_in: "},
        why={RAN_FIRST: "flashinfer_trtllm"},
    ),
    row_of("mxfp8", "xpu", "xpu_kernels", "xpu_kernels"),
    row_of("mxfp8", "cpu", "torch~", why={SERVED_HERE: "torch~"}),
)

ROWS: Final = (*_FP8_BLOCK, *_FP8, *_MXFP8)
