"""Rows of unquantized layers: what is asked for, forced on and forced off."""

from __future__ import annotations

from typing import Final

from tests.oracle_parity.rows import CONFLICT, RAN_FIRST, SERVED_HERE, UNCLAIMED, Row

__all__ = ["ROWS"]

_BATCHED: Final = {"activation_format": "batched"}
_FORCED: Final = {"VLLM_USE_FLASHINFER_MOE_FP16": "1"}
_OFF: Final = {"VLLM_USE_FLASHINFER_MOE_FP16": "0"}
_EITHER: Final = {"require": "flashinfer_trtllm,flashinfer_cutlass"}
_NO_FLASHINFER: Final = {"deny": "flashinfer_*"}
_LATENCY: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "latency"}
_THROUGHPUT: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "throughput"}

# One backend that is asked for.
_EXPLICIT: Final = (
    Row(
        platform="cuda:sm100",
        ours="triton",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine={"backend": "triton"},
        request={"require": "triton"},
        reasons={"flashinfer_trtllm": "not_required: requires a backend in .triton., got flashinfer_trtllm"},
    ),
    Row(
        platform="cuda:sm100",
        ours="triton",
        supports="triton",
        problem=_BATCHED,
        engine={"backend": "triton"},
        request={"require": "triton"},
    ),
    Row(
        platform="cuda:sm90",
        ours="flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
    ),
    Row(
        platform="cuda:sm90",
        ours="",
        supports="triton flashinfer_cutlass",
        engine={"backend": "flashinfer_trtllm"},
        request={"require": "flashinfer_trtllm"},
        reasons={"flashinfer_trtllm": "platform: .*got cuda:sm90", "triton": "not_required: "},
    ),
    Row(
        platform="cuda:sm100",
        ours="",
        supports="triton",
        problem=_BATCHED,
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
        reasons={"flashinfer_cutlass": "activation_format: "},
    ),
    Row(
        platform="rocm:gfx942",
        ours="aiter",
        supports="triton aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    Row(
        platform="cuda:sm100",
        ours="",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine={"backend": "flashinfer_trtlm"},
        request={"require": "flashinfer_trtlm"},
        error="unknown backend 'flashinfer_trtlm', did you mean 'flashinfer_trtllm'",
    ),
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        request={"require": "auto"},
        named=True,
    ),
    # An engine's own words are translated by the engine: `auto` in code lifts what the environment requires.
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        request={"MOEREG_REQUIRE": "flashinfer_cutlass", "require": "auto"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="",
        supports="triton flashinfer_cutlass",
        engine={"backend": "flashinfer_cutlass", **_OFF},
        request={"require": "flashinfer_cutlass", "MOEREG_DENY": "flashinfer_*"},
        error=r"both required and denied \(by require and MOEREG_DENY\)",
        why={CONFLICT: "flashinfer_cutlass"},
    ),
    # Several that are asked for are tried in their order, whatever their priorities.
    Row(
        platform="cuda:sm100",
        ours="flashinfer_cutlass flashinfer_trtllm",
        supports="flashinfer_cutlass",
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass,flashinfer_trtllm"},
    ),
    # Asked for by name, the variables of others are not read.
    Row(
        platform="cuda:sm90",
        ours="triton",
        supports="triton flashinfer_cutlass",
        engine={"backend": "triton", **_FORCED},
        request={"require": "triton", "MOEREG_REQUIRE": "flashinfer_trtllm,flashinfer_cutlass"},
    ),
)

# FlashInfer forced on and off.
_FLASHINFER: Final = (
    Row(
        platform="cuda:sm100",
        ours="triton cutlass torch",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine=_OFF,
        request=_NO_FLASHINFER,
        reasons={"flashinfer_trtllm": "denied: ", "flashinfer_cutlass": "denied: "},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="triton vllm_triton cutlass torch",
        supports="triton flashinfer_cutlass",
        engine=_OFF,
        request={"MOEREG_DENY": "unquantized=flashinfer_*"},
        reasons={"flashinfer_cutlass": "denied: ", "flashinfer_cutile": "denied: "},
    ),
    Row(
        platform="rocm:gfx942",
        ours="triton aiter torch",
        supports="triton aiter",
        engine=_OFF,
        request=_NO_FLASHINFER,
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="cuda:sm90",
        ours="flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        engine=_THROUGHPUT,
        request={"MOEREG_REQUIRE": "flashinfer_cutlass"},
    ),
    Row(
        platform="cuda:sm100",
        ours="flashinfer_trtllm",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine=_LATENCY,
        request={"MOEREG_REQUIRE": "unquantized=flashinfer_trtllm"},
    ),
    Row(
        platform="cuda:sm90",
        ours="",
        supports="triton flashinfer_cutlass",
        engine=_LATENCY,
        request={"MOEREG_REQUIRE": "flashinfer_trtllm"},
        reasons={"flashinfer_trtllm": "platform: "},
    ),
    # FlashInfer's CuTe DSL kernels are not for unquantized layers.
    Row(
        platform="cuda:sm100",
        ours="",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine={**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "masked_gemm"},
        request={"MOEREG_REQUIRE": "flashinfer_cutedsl"},
        reasons={"flashinfer_cutedsl": r"quant_scheme: requires .*got unquantized"},
    ),
    Row(
        platform="cuda:sm100",
        ours="flashinfer_trtllm flashinfer_cutlass",
        supports="triton flashinfer_trtllm flashinfer_cutlass",
        engine=_FORCED,
        request=_EITHER,
    ),
    Row(
        platform="cuda:sm90",
        ours="flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        engine=_FORCED,
        request=_EITHER,
        reasons={"flashinfer_trtllm": "platform: "},
    ),
    Row(
        platform="cuda:sm100",
        ours="flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        problem={"activation": "swigluoai", "has_bias": True},
        engine=_FORCED,
        request=_EITHER,
        reasons={"flashinfer_trtllm": "bias: "},
    ),
    Row(
        platform="rocm:gfx942",
        ours="",
        supports="triton aiter",
        engine=_FORCED,
        request=_EITHER,
        reasons={"flashinfer_trtllm": "platform: ", "flashinfer_cutlass": "platform: ", "triton": "not_required: "},
    ),
    Row(
        platform="cuda:sm90",
        ours="",
        supports="triton",
        engine=_FORCED,
        request=_EITHER,
        packages={"flashinfer-python": None},
        reasons={"flashinfer_cutlass": "package: ", "triton": "not_required: "},
    ),
)

# AITER forced on and off.
_ROCM: Final = (
    Row(
        platform="rocm:gfx942",
        ours="triton aiter torch",
        supports="triton aiter",
        reasons={"flashinfer_cutlass": "platform: "},
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    Row(
        platform="rocm:gfx942",
        ours="triton torch",
        supports="triton",
        problem=_BATCHED,
        reasons={"aiter": "activation_format: "},
    ),
    Row(
        platform="rocm:gfx942",
        ours="triton torch",
        supports="triton aiter",
        engine={"VLLM_ROCM_USE_AITER": "0"},
        request={"deny": "aiter"},
        reasons={"aiter": "denied: "},
    ),
    # One of the two variables is not enough for vLLM: asking for the one switches AITER off.
    Row(
        platform="rocm:gfx942",
        ours="triton torch",
        supports="triton aiter",
        engine={"VLLM_ROCM_USE_AITER_MOE": "1"},
        request={"MOEREG_DENY": "aiter"},
        reasons={"aiter": "denied: "},
    ),
    Row(
        platform="rocm:gfx942",
        ours="triton torch",
        supports="triton aiter",
        engine={"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"},
        request={"MOEREG_DENY": "unquantized=aiter"},
    ),
    Row(
        platform="cuda:sm90",
        ours="triton flashinfer_cutlass",
        supports="triton flashinfer_cutlass",
        engine={"VLLM_ROCM_USE_AITER": "0"},
        request={"deny": "aiter"},
        named=True,
    ),
    Row(
        platform="rocm:gfx942",
        ours="aiter",
        supports="triton aiter",
        engine={"VLLM_ROCM_USE_AITER": "1"},
        request={"MOEREG_REQUIRE": "unquantized=aiter"},
    ),
    Row(
        platform="rocm:gfx942",
        ours="",
        supports="triton",
        problem=_BATCHED,
        engine={"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "1"},
        request={"require": "aiter"},
        reasons={"aiter": "activation_format: "},
    ),
    Row(
        platform="cuda:sm90",
        ours="",
        supports="triton flashinfer_cutlass",
        engine={"VLLM_ROCM_USE_AITER": "1"},
        request={"require": "aiter"},
        reasons={"aiter": "platform: .*got cuda:sm90"},
    ),
    Row(
        platform="rocm:gfx950",
        ours="torch",
        reasons={"aiter": "opt_in: ", "triton": "platform: "},
        why={SERVED_HERE: "torch"},
    ),
    Row(
        platform="rocm:gfx950",
        ours="aiter",
        supports="triton aiter",
        engine={"backend": "aiter"},
        request={"require": "aiter"},
    ),
    Row(
        platform="rocm:gfx1100",
        ours="torch",
        supports="triton",
        reasons={"triton": "platform: ", "aiter": "platform: "},
        why={UNCLAIMED: "triton"},
    ),
    # A wheel is left out as a package is missing.
    Row(
        platform="rocm:gfx942",
        ours="triton torch",
        supports="triton",
        packages={"amd-aiter": None},
        reasons={"aiter": "package: requires amd-aiter"},
    ),
)

ROWS: Final = (*_EXPLICIT, *_FLASHINFER, *_ROCM)
