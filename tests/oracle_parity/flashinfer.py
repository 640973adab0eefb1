"""Rows of FlashInfer asked for by name, scheme by scheme and machine by machine."""

from __future__ import annotations

from typing import Any, Final

from tests.oracle_parity.rows import SERVED_HERE, Row, row_of

__all__ = ["ROWS"]


def _asked(backend: str, scheme: str, platforms: str, **problem: Any) -> list[Row]:
    """vLLM has the backend for the scheme, and takes it where it is asked for."""
    return [
        row_of(
            scheme,
            platform,
            backend,
            backend,
            problem=problem,
            engine={"backend": backend},
            request={"require": backend},
        )
        for platform in platforms.split()
    ]


def _ours_alone(backend: str, scheme: str, platforms: str, **problem: Any) -> list[Row]:
    """vLLM does not have the backend, or not for the scheme."""
    return [
        row_of(
            scheme,
            platform,
            backend,
            problem=problem,
            engine={"backend": backend},
            request={"require": backend},
            why={SERVED_HERE: backend},
        )
        for platform in platforms.split()
    ]


_B200: Final = "cuda:sm100 cuda:sm103"
_EXACT: Final = {"exact_activations": True}
_BATCHED: Final = {"activation_format": "batched"}
_FLOAT16: Final = {"dtype": "float16"}

ROWS: Final = (
    *_asked("flashinfer_trtllm", "unquantized", _B200),
    *_asked("flashinfer_trtllm", "fp8_block128", _B200),
    *_asked("flashinfer_trtllm", "fp8_tensor_static", _B200),
    *_asked("flashinfer_trtllm", "mxfp8", _B200),
    *_asked("flashinfer_trtllm", "nvfp4", _B200),
    *_asked("flashinfer_trtllm", "mxfp4_w4a16", "cuda:sm100", activation="swigluoai", has_bias=True),
    *_asked("flashinfer_trtllm", "mxfp4_mxfp8", _B200, **_EXACT),
    *_asked("flashinfer_trtllm", "int4_w4a16_g32", _B200),
    *_asked("flashinfer_cutedsl", "nvfp4", _B200, **_EXACT),
    *_asked("flashinfer_cutedsl", "nvfp4", _B200, **_EXACT, **_BATCHED),
    *_asked("flashinfer_cutedsl", "nvfp4_w4a16", _B200),
    *_ours_alone("flashinfer_cutedsl", "mxfp4_mxfp8", _B200, **_EXACT),
    *_asked("flashinfer_cutlass", "unquantized", f"cuda:sm90 {_B200} cuda:sm120"),
    *_asked("flashinfer_cutlass", "unquantized", f"cuda:sm90 {_B200}", **_FLOAT16),
    *_asked("flashinfer_cutlass", "fp8_tensor_static", f"cuda:sm90 {_B200} cuda:sm120"),
    *_asked("flashinfer_cutlass", "fp8_block128", "cuda:sm90"),
    *_asked("flashinfer_cutlass", "mxfp4_w4a16", "cuda:sm90", activation="swigluoai", has_bias=True),
    *_ours_alone("flashinfer_cutlass", "mxfp8", _B200),
    *_asked("flashinfer_cutlass", "mxfp4_mxfp8", f"{_B200} cuda:sm120", **_EXACT),
    *_asked("flashinfer_cutlass", "nvfp4", f"{_B200} cuda:sm120", **_EXACT),
    *_ours_alone("flashinfer_cutile", "unquantized", "cuda:sm90"),
    *_ours_alone("flashinfer_cutile", "fp8_tensor_dynamic", "cuda:sm90", **_EXACT),
    *_ours_alone("flashinfer_cutile", "fp8_tensor_static", "cuda:sm90"),
    *_ours_alone("flashinfer_cutile", "mxfp8", "cuda:sm90"),
    *_ours_alone("flashinfer_cutile", "nvfp4", "cuda:sm90"),
    *_ours_alone("flashinfer_cutile", "mxfp4_w4a16", "cuda:sm90"),
    *_asked("flashinfer_b12x", "nvfp4", "cuda:sm120"),
)
