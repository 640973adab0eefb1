"""Rows of nvfp4 layers: what is asked for, forced on and forced off."""

from __future__ import annotations

import functools
from typing import Final

from tests.oracle_parity.rows import CONFLICT, RAN_FIRST, SERVED_HERE, row_of

__all__ = ["ROWS"]

_B200: Final = "flashinfer_trtllm flashinfer_cutedsl flashinfer_cutlass"
_WEIGHT_ONLY: Final = "marlin triton~"
_BATCHED: Final = {"activation_format": "batched"}
_FORCED: Final = {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}
_OFF: Final = {"VLLM_USE_FLASHINFER_MOE_FP4": "0"}
_LATENCY: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "latency"}
_THROUGHPUT: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "throughput"}
_MARLIN: Final = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}
_ANY_FLASHINFER: Final = {"require": "flashinfer_trtllm,flashinfer_cutlass,flashinfer_cutedsl,flashinfer_b12x"}

_row = functools.partial(row_of, "nvfp4")

# One backend that is asked for.
_EXPLICIT: Final = (
    _row(
        "cuda:sm120",
        "flashinfer_b12x",
        "flashinfer_cutlass flashinfer_b12x",
        engine={"backend": "flashinfer_b12x"},
        request={"require": "flashinfer_b12x"},
    ),
    _row(
        "cuda:sm90",
        "flashinfer_cutile",
        request={"require": "flashinfer_cutile"},
        why={SERVED_HERE: "flashinfer_cutile"},
    ),
    # A pattern names nobody.
    _row(
        "cuda:sm120",
        "flashinfer_cutlass",
        "flashinfer_cutlass",
        engine=_FORCED,
        request={"require": "flashinfer_cutlass,flashinfer_*"},
        reasons={"flashinfer_b12x": "opt_in: "},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutedsl",
        _B200,
        engine={"backend": "flashinfer_cutedsl"},
        request={"require": "flashinfer_cutedsl"},
        reasons={"flashinfer_trtllm": "not_required: ", "marlin": "not_required: "},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutedsl",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        engine={"backend": "flashinfer_cutedsl"},
        request={"require": "flashinfer_cutedsl"},
    ),
    _row(
        "cuda:sm100",
        "",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        engine={"backend": "flashinfer_trtllm"},
        request={"require": "flashinfer_trtllm"},
        reasons={"flashinfer_trtllm": "activation_format: "},
    ),
    _row(
        "cuda:sm90",
        "",
        _WEIGHT_ONLY,
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
        reasons={"flashinfer_cutlass": "platform: ", "triton": "not_required: "},
    ),
    _row(
        "cuda:sm90",
        "marlin",
        _WEIGHT_ONLY,
        engine={"backend": "marlin"},
        request={"MOEREG_REQUIRE": "nvfp4=marlin,unquantized=triton"},
    ),
    _row(
        "cuda:sm100",
        "",
        _B200,
        engine={"backend": "flashinfer_cute"},
        request={"require": "flashinfer_cute"},
        error="unknown backend 'flashinfer_cute', did you mean",
    ),
    _row(
        "cuda:sm100",
        "",
        _B200,
        engine={"backend": "flashinfer_trtllm", **_OFF},
        request={"require": "flashinfer_trtllm", "MOEREG_DENY": "flashinfer_*"},
        error=r"both required and denied \(by require and MOEREG_DENY\)",
        why={CONFLICT: "flashinfer_trtllm"},
    ),
)

# FlashInfer and Marlin forced on and off.
_VARIABLES: Final = (
    _row(
        "cuda:sm100",
        "triton marlin humming triton~",
        f"{_B200} {_WEIGHT_ONLY}",
        engine=_OFF,
        request={"MOEREG_DENY": "nvfp4=flashinfer_*"},
        reasons={name: "denied: " for name in _B200.split()},
        why={RAN_FIRST: "triton"},
    ),
    _row("cuda:sm100", "flashinfer_trtllm", _B200, engine=_LATENCY, request={"require": "flashinfer_trtllm"}),
    _row(
        "cuda:sm120",
        "flashinfer_cutlass",
        "flashinfer_cutlass",
        engine=_THROUGHPUT,
        request={"require": "flashinfer_cutlass"},
    ),
    _row(
        "cuda:sm120",
        "",
        "flashinfer_cutlass",
        engine=_LATENCY,
        request={"require": "flashinfer_trtllm"},
        reasons={"flashinfer_trtllm": "platform: "},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutlass flashinfer_cutedsl",
        _B200,
        engine=_FORCED,
        request=_ANY_FLASHINFER,
    ),
    _row(
        "cuda:sm120",
        "flashinfer_cutlass flashinfer_b12x",
        "flashinfer_cutlass flashinfer_b12x",
        engine=_FORCED,
        request=_ANY_FLASHINFER,
        reasons={"flashinfer_trtllm": "platform: ", "flashinfer_cutedsl": "platform: "},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutedsl",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        engine=_FORCED,
        request=_ANY_FLASHINFER,
        reasons={"flashinfer_trtllm": "activation_format: ", "flashinfer_cutlass": "activation_format: "},
    ),
    _row(
        "cuda:sm90",
        "",
        _WEIGHT_ONLY,
        engine=_FORCED,
        request=_ANY_FLASHINFER,
        reasons={"flashinfer_trtllm": "platform: ", "marlin": "not_required: "},
    ),
    # FlashInfer forced on comes before Marlin forced.
    _row(
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutlass flashinfer_cutedsl",
        f"{_B200} marlin",
        engine={**_FORCED, **_MARLIN},
        request={**_ANY_FLASHINFER, "MOEREG_REQUIRE": "marlin"},
    ),
    _row("cuda:sm100", "marlin", f"{_B200} {_WEIGHT_ONLY}", engine=_MARLIN, request={"MOEREG_REQUIRE": "nvfp4=marlin"}),
    _row(
        "cuda:sm100",
        "",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        engine=_MARLIN,
        request={"MOEREG_REQUIRE": "nvfp4=marlin"},
        reasons={"marlin": "activation_format: "},
    ),
    _row(
        "rocm:gfx942",
        "",
        "triton~",
        engine=_MARLIN,
        request={"require": "marlin"},
        reasons={"marlin": r"platform: requires platform in \(cuda:sm80\+\)"},
    ),
)

ROWS: Final = (*_EXPLICIT, *_VARIABLES)
