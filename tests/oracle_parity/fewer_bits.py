"""Rows of 4-bit and integer layers, against the order in which vLLM 0.33 asks its backends."""

from __future__ import annotations

from typing import Final

from tests.oracle_parity.rows import MEASURED, RAN_FIRST, SERVED_HERE, UNCLAIMED, UNMEASURED, row_of

__all__ = ["ROWS"]

_BATCHED: Final = {"activation_format": "batched"}
_GPT_OSS: Final = {"activation": "swigluoai", "has_bias": True}


_MXFP4: Final = (
    row_of(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton triton_kernels flashinfer_cutlass marlin humming",
        "triton_kernels flashinfer_cutlass marlin humming",
        problem=_GPT_OSS,
        reasons={"flashinfer_trtllm": "platform: "},
        why={MEASURED: "triton"},
        named=True,
    ),
    row_of(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton_kernels",
        "triton_kernels flashinfer_cutlass marlin",
        engine={"backend": "triton_kernels"},
        request={"require": "triton_kernels"},
    ),
    row_of(
        "mxfp4_w4a16",
        "cuda:sm100",
        "triton flashinfer_trtllm marlin humming",
        "flashinfer_trtllm triton_kernels marlin humming",
        problem=_GPT_OSS,
        reasons={"triton_kernels": "platform: "},
        why={RAN_FIRST: "triton", UNCLAIMED: "triton_kernels"},
        named=True,
    ),
    # With activations of 8 bits.
    row_of(
        "mxfp4_mxfp8",
        "cuda:sm100",
        "triton marlin humming triton~",
        "flashinfer_trtllm flashinfer_cutlass marlin humming triton~",
        by="TritonQuantizedExperts",
        reasons=dict.fromkeys(("flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl"), "opt_in: "),
        why={RAN_FIRST: "flashinfer_trtllm flashinfer_cutlass"},
    ),
    row_of(
        "mxfp4_mxfp8",
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutedsl flashinfer_cutlass triton triton~",
        "flashinfer_trtllm flashinfer_cutlass triton~",
        problem={"exact_activations": True},
        request={"prefer": "flashinfer_*,flashinfer_trtllm,flashinfer_cutedsl,flashinfer_cutlass"},
    ),
    row_of(
        "mxfp4_mxfp8",
        "cuda:sm120",
        "triton marlin triton~",
        "flashinfer_cutlass marlin triton~",
        reasons={"flashinfer_cutlass": "opt_in: "},
        why={RAN_FIRST: "flashinfer_cutlass"},
    ),
    row_of(
        "mxfp4_mxfp8",
        "cuda:sm120",
        "flashinfer_cutlass triton~",
        "flashinfer_cutlass triton~",
        problem={"exact_activations": True},
        request={"prefer": "flashinfer_cutlass"},
        reasons={"marlin": "precision: "},
    ),
    row_of("mxfp4_mxfp8", "cuda:sm90", "triton~", "triton~", problem={"exact_activations": True}),
    row_of("mxfp4_mxfp8", "rocm:gfx942", "triton~", "triton~", problem={"exact_activations": True}),
    row_of(
        "mxfp4_mxfp8",
        "rocm:gfx942",
        "triton~",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton~"},
    ),
    row_of(
        "mxfp4_mxfp8",
        "cuda:sm100",
        "triton triton~",
        by="TritonQuantizedBatchedExperts",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton"},
    ),
    row_of("mxfp4_w4a16", "cuda:sm120", "triton marlin humming", "marlin humming", why={UNMEASURED: "triton"}),
    row_of("mxfp4_w4a16", "cuda:sm80", "triton marlin humming", "marlin humming", why={UNMEASURED: "triton"}),
    # Marlin forced, and for a clamp that it applies.
    row_of(
        "mxfp4_w4a16",
        "cuda:sm90",
        "marlin",
        "triton_kernels flashinfer_cutlass marlin",
        problem=_GPT_OSS,
        engine={"backend": "marlin"},
        request={"MOEREG_REQUIRE": "mxfp4_w4a16=marlin"},
    ),
    row_of(
        "mxfp4_w4a16",
        "cuda:sm90",
        "triton",
        "marlin",
        problem=_BATCHED,
        reasons={"marlin": "activation_format: ", "triton_kernels": "activation_format: "},
        why={UNCLAIMED: "marlin"},
    ),
    row_of("mxfp4_w4a16", "rocm:gfx942", "triton", "triton_kernels", why={UNCLAIMED: "triton_kernels"}),
    row_of("mxfp4_w4a16", "xpu", "xpu_kernels", "xpu_kernels"),
    row_of("mxfp4_w4a16", "cpu", "torch", "torch"),
    row_of("mxfp4_w4a16", "cpu", "torch", "", problem=_BATCHED, why={SERVED_HERE: "torch"}),
)

_INT8: Final = (
    row_of(
        "int8_w8a8",
        "cuda:sm90",
        "triton vllm_triton marlin humming",
        "triton humming",
    ),
    row_of("int8_w8a8", "cuda:sm80", "triton humming", "triton humming"),
    row_of("int8_w8a8", "rocm:gfx942", "triton", "triton", by="TritonQuantizedExperts"),
    row_of(
        "int8_w8a8",
        "rocm:gfx942",
        "triton",
        by="TritonQuantizedBatchedExperts",
        problem=_BATCHED,
        why={SERVED_HERE: "triton"},
    ),
    row_of("int8_w8a8", "cpu", "torch", "torch", by="TorchInt8Experts"),
    row_of("int8_w8a8", "cpu", "torch", by="TorchInt8BatchedExperts", problem=_BATCHED, why={SERVED_HERE: "torch"}),
    row_of(
        "int8_w8a8",
        "cpu",
        "torch torch~",
        "torch",
        by="TorchQuantizedExperts",
        packages={},
        failing="int8_matmul",
        reasons={"torch": "probe: requires"},
    ),
    row_of(
        "int8_w8a8",
        "cuda:sm90",
        "triton",
        by="TritonQuantizedBatchedExperts",
        problem=_BATCHED,
        why={SERVED_HERE: "triton"},
    ),
    row_of(
        "int8_w8a8",
        "cuda:sm90",
        "triton vllm_triton",
        "triton",
        problem={"exact_activations": True},
        reasons={"marlin": "precision: ", "humming": "precision: "},
    ),
    row_of(
        "int8_w8a8",
        "cuda:sm80",
        "humming",
        "triton humming",
        engine={"backend": "humming"},
        request={"require": "humming"},
    ),
)

_WNA16: Final = (
    row_of(
        "int4_w4a16_g128",
        "cuda:sm90",
        "triton marlin humming",
        "marlin triton humming",
        why={MEASURED: "triton"},
    ),
    row_of(
        "int4_w4a16_g128", "cuda:sm80", "triton marlin humming", "marlin triton humming", why={UNMEASURED: "triton"}
    ),
    row_of(
        "int4_w4a16_g128", "cuda:sm100", "triton marlin humming", "marlin triton humming", why={UNMEASURED: "triton"}
    ),
    row_of(
        "int4_w4a16_g128_zp",
        "cuda:sm90",
        "triton marlin humming",
        "marlin triton humming",
        why={MEASURED: "triton"},
    ),
    row_of("int4_w4a16_g64", "cuda:sm90", "triton marlin humming", "marlin triton humming", why={MEASURED: "triton"}),
    row_of("int4_w4a16_gall", "cuda:sm90", "triton marlin", "marlin triton", why={MEASURED: "triton"}),
    row_of("int8_w8a16", "cuda:sm90", "triton marlin", "marlin triton", why={MEASURED: "triton"}),
    row_of(
        "int4_w4a16_g32",
        "cuda:sm100",
        "triton flashinfer_trtllm marlin humming",
        "flashinfer_trtllm marlin triton humming",
        why={UNMEASURED: "triton", RAN_FIRST: "triton"},
        named=True,
    ),
    row_of(
        "int4_w4a16_g128",
        "cuda:sm90",
        "marlin",
        "marlin triton humming",
        engine={"backend": "marlin"},
        request={"require": "int4_w4a16_g128=marlin"},
    ),
    row_of(
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
    row_of("int4_w4a16_g128", "cuda:sm90", "triton", "marlin", problem=_BATCHED, why={UNCLAIMED: "marlin"}),
    row_of("int4_w4a16_g128", "rocm:gfx942", "triton", "triton"),
    row_of("int4_w4a16_g128", "rocm:gfx942", "triton", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    row_of("int4_w4a16_g128", "cpu", "torch", "torch"),
    row_of("int4_w4a16_g128", "xpu", "xpu_kernels", "xpu_kernels"),
    row_of(
        "int4_w4a16_g128",
        "cuda:sm75",
        "",
        reasons={"triton": "platform: ", "marlin": "platform: ", "humming": "dtype: requires dtype in .float16."},
    ),
    row_of("int4_w4a16_g128", "cuda:sm75", "humming", "humming", problem={"dtype": "float16"}),
)

_W4A8: Final = (
    row_of(
        "int4_w4a8_g128",
        "cuda:sm90",
        "triton flashinfer_cutlass marlin humming",
        why={SERVED_HERE: "triton"},
        named=True,
    ),
    row_of(
        "int4_w4a8_g128",
        "cuda:sm90",
        "flashinfer_cutlass",
        problem={"exact_activations": True},
        request={"require": "flashinfer_cutlass"},
        why={SERVED_HERE: "flashinfer_cutlass"},
    ),
)

ROWS: Final = (*_MXFP4, *_INT8, *_WNA16, *_W4A8)
