"""Rows of the other schemes, against the order in which vLLM 0.33 asks its backends."""

from __future__ import annotations

from typing import Any, Final

from tests.oracle_parity.rows import LATER, MEASURED, RAN_FIRST, SERVED_HERE, UNCLAIMED, Row

__all__ = ["ROWS"]

_BATCHED: Final = {"activation_format": "batched"}
_ONE_OF_FOUR: Final = {"num_local_experts": 16}


def _row(quant: str, platform: str, ours: str, supports: str = "", **keywords: Any) -> Row:
    problem = {"quant": quant, **keywords.pop("problem", {})}
    return Row(platform=platform, ours=ours, supports=supports, problem=problem, **keywords)


_FP8_BLOCK: Final = (
    # Without expert parallelism Triton goes first on Hopper, with it FlashInfer.
    _row(
        "fp8_block128",
        "cuda:sm90",
        "triton deepgemm flashinfer_cutlass marlin humming",
        "triton flashinfer_cutlass deepgemm humming marlin",
        reasons={"flashinfer_trtllm": "platform: ", "vllm_cutlass": "quant_scheme: "},
        why={RAN_FIRST: "flashinfer_cutlass", LATER: "humming"},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "triton deepgemm flashinfer_cutlass marlin humming",
        "triton flashinfer_cutlass deepgemm humming marlin",
        problem=_ONE_OF_FOUR,
        why={RAN_FIRST: "flashinfer_cutlass triton", LATER: "humming"},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "flashinfer_cutlass",
        "triton flashinfer_cutlass",
        problem=_ONE_OF_FOUR,
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "deepgemm",
        "triton deepgemm",
        engine={"backend": "deepgemm"},
        request={"require": "fp8_block128=deepgemm"},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "triton flashinfer_cutlass marlin",
        "triton flashinfer_cutlass marlin",
        request={"deny": "deepgemm"},
        reasons={"deepgemm": "denied: "},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "triton",
        "triton deepgemm",
        problem=_BATCHED,
        reasons={"deepgemm": "activation_format: ", "marlin": "activation_format: "},
        why={UNCLAIMED: "deepgemm"},
    ),
    _row(
        "fp8_block128",
        "cuda:sm90",
        "",
        "triton",
        problem=_BATCHED,
        engine={"backend": "marlin"},
        request={"require": "marlin"},
        reasons={"marlin": "activation_format: ", "triton": "not_required: "},
    ),
    _row(
        "fp8_block128",
        "cuda:sm100",
        "triton flashinfer_trtllm marlin humming",
        "flashinfer_trtllm triton marlin humming",
        reasons={"deepgemm": "platform: "},
        why={RAN_FIRST: "triton"},
    ),
    # An engine that moves tokens with DeepEP asks for FlashInfer first.
    _row(
        "fp8_block128",
        "cuda:sm100",
        "flashinfer_trtllm triton",
        "flashinfer_trtllm triton",
        request={"prefer": "flashinfer_trtllm"},
    ),
    _row("fp8_block128", "cuda:sm120", "triton marlin humming", "triton marlin humming"),
    _row("fp8_block128", "cuda:sm89", "triton vllm_triton marlin humming", "triton marlin humming"),
    _row("fp8_block128", "cuda:sm80", "marlin humming", "marlin humming", reasons={"triton": "platform: "}),
    _row(
        "fp8_block128",
        "rocm:gfx942",
        "",
        "aiter",
        reasons={"aiter": "opt_in: ", "triton": "platform: "},
        why={RAN_FIRST: "aiter"},
    ),
    _row(
        "fp8_block128",
        "rocm:gfx942",
        "aiter",
        "aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    _row("fp8_block128", "xpu", "xpu_kernels", "xpu_kernels", reasons={"triton": "platform: "}),
    _row("fp8_block128", "cpu", "torch~", "torch~", why={SERVED_HERE: "torch~"}),
    _row("fp8_block128", "tpu", "", reasons={"torch": "(platform|quant_scheme): "}),
    _row(
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
    _row(
        "fp8_channel_token",
        "cuda:sm90",
        "triton vllm_cutlass vllm_triton marlin humming",
        "vllm_cutlass triton humming marlin",
        reasons={"deepgemm": "quant_scheme: ", "flashinfer_cutlass": "quant_scheme: "},
        why={MEASURED: "triton", LATER: "humming"},
    ),
    # vLLM leaves its CUTLASS kernels out unless a quantization method allows them.
    _row(
        "fp8_channel_token",
        "cuda:sm90",
        "triton marlin humming",
        "triton humming marlin",
        request={"deny": "vllm_cutlass"},
        why={LATER: "humming"},
    ),
    _row(
        "fp8_channel_token",
        "cuda:sm90",
        "vllm_cutlass",
        "triton vllm_cutlass",
        engine={"backend": "vllm_cutlass"},
        request={"require": "vllm_cutlass"},
    ),
    _row(
        "fp8_channel_token",
        "cuda:sm90",
        "triton",
        "triton vllm_cutlass",
        problem=_BATCHED,
        why={UNCLAIMED: "vllm_cutlass"},
    ),
    _row("fp8_channel_token", "cuda:sm100", "triton vllm_triton marlin humming", "triton marlin humming"),
    _row(
        "fp8_tensor_static",
        "cuda:sm90",
        "triton flashinfer_cutlass humming",
        "flashinfer_cutlass vllm_cutlass triton humming",
        why={RAN_FIRST: "flashinfer_cutlass", UNCLAIMED: "vllm_cutlass"},
    ),
    _row(
        "fp8_tensor_static",
        "cuda:sm100",
        "triton flashinfer_trtllm flashinfer_cutlass marlin humming",
        "flashinfer_trtllm flashinfer_cutlass triton marlin humming",
        why={RAN_FIRST: "triton"},
    ),
    _row(
        "fp8_tensor_static",
        "cuda:sm120",
        "triton flashinfer_cutlass marlin",
        "flashinfer_cutlass triton marlin",
        why={RAN_FIRST: "triton"},
    ),
    _row("fp8_tensor_dynamic", "cuda:sm90", "triton", "triton"),
    _row("fp8_tensor_dynamic", "cuda:sm89", "triton", "triton", problem=_BATCHED),
    _row(
        "fp8_tensor_static",
        "rocm:gfx942",
        "",
        "aiter",
        engine={"VLLM_ROCM_USE_AITER": "1"},
        request={"MOEREG_REQUIRE": "flashinfer_cutlass"},
        reasons={"flashinfer_cutlass": "platform: ", "aiter": "(opt_in|not_required): "},
        why={RAN_FIRST: "aiter"},
    ),
)

_MXFP8: Final = (
    _row(
        "mxfp8",
        "cuda:sm100",
        "triton flashinfer_trtllm humming",
        "flashinfer_trtllm deepgemm marlin humming",
        why={RAN_FIRST: "triton", UNCLAIMED: "deepgemm marlin"},
    ),
    _row("mxfp8", "cuda:sm120", "triton humming", "humming", why={SERVED_HERE: "triton"}),
    _row(
        "mxfp8",
        "cuda:sm90",
        "humming triton~",
        "marlin humming triton~",
        reasons={"flashinfer_trtllm": "platform: ", "marlin": "quant_scheme: "},
        why={UNCLAIMED: "marlin"},
    ),
    _row("mxfp8", "cuda:sm90", "triton~", "triton~", problem={"exact_activations": True}),
    _row(
        "mxfp8",
        "cuda:sm90",
        "triton~",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton~"},
    ),
    _row(
        "mxfp8",
        "cuda:sm100",
        "flashinfer_trtllm",
        "flashinfer_trtllm marlin humming",
        engine={"backend": "flashinfer_trtllm"},
        request={"require": "flashinfer_trtllm"},
    ),
    _row("mxfp8", "cuda:sm100", "triton", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    _row("mxfp8", "cuda:sm80", "humming", "marlin humming", why={UNCLAIMED: "marlin"}),
    _row(
        "mxfp8",
        "cuda:sm100",
        "flashinfer_trtllm humming",
        "flashinfer_trtllm humming",
        packages={"triton": "3.6.0"},
        reasons={"triton": "package: requires triton>=3.8, got 3.6.0"},
    ),
    _row("mxfp8", "xpu", "xpu_kernels", "xpu_kernels"),
    _row("mxfp8", "cpu", "torch~", why={SERVED_HERE: "torch~"}),
)

_GPT_OSS: Final = {"activation": "swigluoai", "has_bias": True}
_MXFP4: Final = (
    _row(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton triton_kernels flashinfer_cutlass marlin humming",
        "triton_kernels flashinfer_cutlass marlin humming",
        problem=_GPT_OSS,
        reasons={"flashinfer_trtllm": "platform: "},
        why={MEASURED: "triton"},
    ),
    _row(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton_kernels",
        "triton_kernels flashinfer_cutlass marlin",
        engine={"backend": "triton_kernels"},
        request={"require": "triton_kernels"},
    ),
    _row(
        "mxfp4_w4a16",
        "cuda:sm100",
        "triton flashinfer_trtllm marlin humming",
        "flashinfer_trtllm triton_kernels marlin humming",
        problem=_GPT_OSS,
        reasons={"triton_kernels": "platform: "},
        why={RAN_FIRST: "triton", UNCLAIMED: "triton_kernels"},
    ),
    # With activations of 8 bits.
    _row(
        "mxfp4_mxfp8",
        "cuda:sm100",
        "triton flashinfer_trtllm flashinfer_cutlass marlin humming triton~",
        "flashinfer_trtllm flashinfer_cutlass marlin humming triton~",
        why={RAN_FIRST: "triton"},
    ),
    _row(
        "mxfp4_mxfp8",
        "cuda:sm120",
        "triton flashinfer_cutlass marlin triton~",
        "flashinfer_cutlass marlin triton~",
        why={RAN_FIRST: "triton"},
    ),
    _row(
        "mxfp4_mxfp8",
        "cuda:sm120",
        "flashinfer_cutlass triton~",
        "flashinfer_cutlass triton~",
        problem={"exact_activations": True},
        request={"prefer": "triton"},
        reasons={"marlin": "precision: "},
    ),
    _row("mxfp4_mxfp8", "cuda:sm90", "triton~", "triton~", problem={"exact_activations": True}),
    _row("mxfp4_mxfp8", "rocm:gfx942", "triton~", "triton~", problem={"exact_activations": True}),
    _row(
        "mxfp4_mxfp8",
        "cuda:sm100",
        "triton triton~",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton"},
    ),
    _row("mxfp4_w4a16", "cuda:sm120", "triton marlin humming", "marlin humming", why={MEASURED: "triton"}),
    _row("mxfp4_w4a16", "cuda:sm80", "triton marlin humming", "marlin humming", why={MEASURED: "triton"}),
    # Marlin forced, and for a clamp that it applies.
    _row(
        "mxfp4_w4a16",
        "cuda:sm90",
        "marlin",
        "triton_kernels flashinfer_cutlass marlin",
        problem=_GPT_OSS,
        engine={"backend": "marlin"},
        request={"MOEREG_REQUIRE": "mxfp4_w4a16=marlin"},
    ),
    _row(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton",
        "marlin",
        problem=_BATCHED,
        reasons={"marlin": "activation_format: ", "triton_kernels": "activation_format: "},
        why={UNCLAIMED: "marlin"},
    ),
    _row("mxfp4_w4a16", "rocm:gfx942", "triton", "triton_kernels", why={UNCLAIMED: "triton_kernels"}),
    _row("mxfp4_w4a16", "xpu", "xpu_kernels", "xpu_kernels"),
    _row("mxfp4_w4a16", "cpu", "torch", "torch"),
    _row("mxfp4_w4a16", "cpu", "torch", "", problem=_BATCHED, why={SERVED_HERE: "torch"}),
)

_INT8: Final = (
    _row(
        "int8_w8a8",
        "cuda:sm90",
        "triton vllm_triton marlin humming",
        "triton humming",
    ),
    _row("int8_w8a8", "cuda:sm80", "triton humming", "triton humming"),
    _row("int8_w8a8", "rocm:gfx942", "triton", "triton"),
    _row("int8_w8a8", "cpu", "torch", "torch"),
    _row(
        "int8_w8a8",
        "cpu",
        "torch torch~",
        "torch",
        packages={},
        failing="int8_matmul",
        reasons={"torch": "probe: requires"},
    ),
    _row("int8_w8a8", "cuda:sm90", "triton", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    _row(
        "int8_w8a8",
        "cuda:sm90",
        "triton vllm_triton",
        "triton",
        problem={"exact_activations": True},
        reasons={"marlin": "precision: ", "humming": "precision: "},
    ),
    _row(
        "int8_w8a8",
        "cuda:sm80",
        "humming",
        "triton humming",
        engine={"backend": "humming"},
        request={"require": "humming"},
    ),
)

_WNA16: Final = (
    _row(
        "int4_w4a16_g128",
        "cuda:sm90",
        "triton marlin humming",
        "marlin triton humming",
        why={MEASURED: "triton"},
    ),
    _row("int4_w4a16_g128", "cuda:sm80", "triton marlin humming", "marlin triton humming", why={MEASURED: "triton"}),
    _row("int4_w4a16_g128", "cuda:sm100", "triton marlin humming", "marlin triton humming", why={MEASURED: "triton"}),
    _row(
        "int4_w4a16_g128_zp",
        "cuda:sm90",
        "triton marlin humming",
        "marlin triton humming",
        why={MEASURED: "triton"},
    ),
    _row("int4_w4a16_gall", "cuda:sm90", "triton marlin", "marlin triton", why={MEASURED: "triton"}),
    _row("int8_w8a16", "cuda:sm90", "triton marlin", "marlin triton", why={MEASURED: "triton"}),
    # TensorRT-LLM's kernels for such weights are no cell yet.
    _row(
        "int4_w4a16_g32",
        "cuda:sm100",
        "triton marlin humming",
        "flashinfer_trtllm marlin triton humming",
        why={MEASURED: "triton", UNCLAIMED: "flashinfer_trtllm"},
    ),
    _row(
        "int4_w4a16_g128",
        "cuda:sm90",
        "marlin",
        "marlin triton humming",
        engine={"backend": "marlin"},
        request={"require": "int4_w4a16_g128=marlin"},
    ),
    _row(
        "int4_w4a16_g128",
        "cuda:sm90",
        "",
        "marlin",
        problem={"hidden_size": 2112},
        engine={"backend": "marlin"},
        request={"require": "marlin"},
        reasons={"marlin": "alignment: requires hidden_size % 128 == 0, got 2112"},
        why={UNCLAIMED: "marlin"},
    ),
    _row("int4_w4a16_g128", "cuda:sm90", "triton", "marlin", problem=_BATCHED, why={UNCLAIMED: "marlin"}),
    _row("int4_w4a16_g128", "rocm:gfx942", "triton", "triton"),
    _row("int4_w4a16_g128", "rocm:gfx942", "triton", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    _row("int4_w4a16_g128", "cpu", "torch", "torch"),
    _row("int4_w4a16_g128", "xpu", "xpu_kernels", "xpu_kernels"),
    _row("int4_w4a16_g128", "cuda:sm75", "", reasons={"triton": "platform: ", "marlin": "platform: "}),
)

ROWS: Final = (*_FP8_BLOCK, *_FP8, *_MXFP8, *_MXFP4, *_INT8, *_WNA16)
