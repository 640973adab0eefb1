"""Rows of nvfp4 layers: platforms, formats and clamps."""

from __future__ import annotations

import functools
from typing import Final

from tests.oracle_parity.rows import FACTS_DECIDE, MEASURED, RAN_FIRST, SERVED_HERE, UNCLAIMED, UNMEASURED, row_of

__all__ = ["ROWS"]

_B200: Final = "flashinfer_trtllm flashinfer_cutedsl flashinfer_cutlass"
_WEIGHT_ONLY: Final = "marlin triton~"
_LIMIT: Final = {"activation": "silu(limit=7.0)"}
_BATCHED: Final = {"activation_format": "batched"}
_FORCED: Final = {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}
_OFF: Final = {"VLLM_USE_FLASHINFER_MOE_FP4": "0"}
_LATENCY: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "latency"}
_THROUGHPUT: Final = {**_FORCED, "VLLM_FLASHINFER_MOE_BACKEND": "throughput"}
_MARLIN: Final = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}
_PREFERRED: Final = {"prefer": "flashinfer_*,flashinfer_trtllm,flashinfer_cutedsl,flashinfer_cutlass"}
_ANY_FLASHINFER: Final = {"require": "flashinfer_trtllm,flashinfer_cutlass,flashinfer_cutedsl,flashinfer_b12x"}

_row = functools.partial(row_of, "nvfp4")

_ORDER: Final = (
    # Those that never ran there are opt-in.
    _row(
        "cuda:sm100",
        "triton marlin humming triton~",
        f"{_B200} {_WEIGHT_ONLY}",
        reasons={**dict.fromkeys(_B200.split(), "opt_in: "), "flashinfer_b12x": "platform: .*got cuda:sm100"},
        why={RAN_FIRST: _B200},
    ),
    # Named, all of them by priority.
    _row(
        "cuda:sm100",
        f"triton {_B200} marlin humming triton~",
        f"{_B200} {_WEIGHT_ONLY}",
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    _row(
        "cuda:sm120",
        "triton flashinfer_cutlass marlin flashinfer_b12x humming triton~",
        f"flashinfer_cutlass {_WEIGHT_ONLY}",
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    _row(
        "cuda:sm90",
        "triton marlin flashinfer_cutile humming triton~",
        _WEIGHT_ONLY,
        why={MEASURED: "triton"},
        named=True,
    ),
    _row(
        "cuda:sm100",
        "triton flashinfer_cutedsl triton~",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        why={RAN_FIRST: "triton"},
        named=True,
    ),
    # A pattern gives those that are named beside it one place, in which they go by priority.
    _row(
        "cuda:sm100",
        f"{_B200} triton marlin humming triton~",
        f"{_B200} {_WEIGHT_ONLY}",
        request=_PREFERRED,
    ),
    _row("cuda:sm103", f"{_B200} triton marlin humming triton~", f"{_B200} {_WEIGHT_ONLY}", request=_PREFERRED),
    _row(
        "cuda:sm100",
        f"{_B200} triton triton~",
        f"{_B200} triton~",
        problem={"exact_activations": True},
        request=_PREFERRED,
    ),
    # Without TensorRT-LLM's kernels the next one of the order.
    _row(
        "cuda:sm100",
        "flashinfer_cutedsl flashinfer_cutlass triton marlin",
        "flashinfer_cutedsl flashinfer_cutlass marlin",
        request={"prefer": "flashinfer_*,flashinfer_cutedsl,flashinfer_cutlass", "deny": "flashinfer_trtllm"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutlass triton marlin",
        "flashinfer_cutlass marlin vllm_cutlass",
        request={"prefer": "flashinfer_cutlass", "deny": "flashinfer_trtllm,flashinfer_cutedsl"},
        why={UNCLAIMED: "vllm_cutlass"},
    ),
    _row(
        "cuda:sm120",
        "triton marlin humming triton~",
        f"flashinfer_cutlass {_WEIGHT_ONLY}",
        reasons={"flashinfer_b12x": "opt_in: ", "flashinfer_cutlass": "opt_in: ", "flashinfer_trtllm": "platform: "},
        why={RAN_FIRST: "flashinfer_cutlass"},
    ),
    _row(
        "cuda:sm90",
        "triton marlin humming triton~",
        _WEIGHT_ONLY,
        reasons={"flashinfer_cutlass": "platform: .*got cuda:sm90", "flashinfer_trtllm": "platform: "},
        why={MEASURED: "triton"},
    ),
    _row("cuda:sm80", "triton marlin humming triton~", _WEIGHT_ONLY, why={UNMEASURED: "triton"}),
    # A checkpoint's activations taken at their word: no weight-only kernel, so that emulation is what is left.
    _row(
        "cuda:sm90",
        "triton~",
        "triton~",
        problem={"exact_activations": True},
        reasons={"marlin": "precision: requires activations as nvfp4 has them, got nvfp4_w4a16 instead"},
    ),
    _row(
        "cuda:sm100",
        "triton triton~",
        f"{_B200} triton~",
        problem={"exact_activations": True},
        reasons={name: "opt_in: " for name in _B200.split()},
        why={RAN_FIRST: _B200},
    ),
    _row("rocm:gfx942", "triton triton~", "triton~", why={SERVED_HERE: "triton"}),
    _row("rocm:gfx942", "triton~", "triton~", problem={"exact_activations": True}),
    _row("cpu", "torch torch~", why={SERVED_HERE: "torch"}),
    _row("cpu", "torch~", problem={"exact_activations": True, **_BATCHED}, why={SERVED_HERE: "torch~"}),
    _row("cpu", "torch torch~", problem=_BATCHED, why={SERVED_HERE: "torch"}),
    _row("cuda:sm75", "", reasons={"triton": "platform: ", "marlin": "platform: "}),
    _row(
        "cuda:sm100",
        "triton triton~",
        "flashinfer_cutedsl",
        by="TritonQuantizedBatchedExperts",
        problem=_BATCHED,
        reasons={
            "flashinfer_cutedsl": "opt_in: ",
            "flashinfer_trtllm": "activation_format: ",
            "marlin": "activation_format: ",
        },
        why={RAN_FIRST: "flashinfer_cutedsl"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutedsl triton triton~",
        "flashinfer_cutedsl",
        problem=_BATCHED,
        request=_PREFERRED,
    ),
    _row(
        "cuda:sm103",
        "flashinfer_cutedsl triton~",
        "flashinfer_cutedsl",
        problem={**_BATCHED, "exact_activations": True},
        request=_PREFERRED,
    ),
    _row(
        "cuda:sm100",
        "triton triton~",
        problem={**_BATCHED, "exact_activations": True},
        why={SERVED_HERE: "triton"},
    ),
    _row("cuda:sm90", "triton triton~", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    _row("cuda:sm90", "triton~", problem={**_BATCHED, "exact_activations": True}, why={SERVED_HERE: "triton~"}),
    _row("rocm:gfx942", "triton triton~", problem=_BATCHED, why={SERVED_HERE: "triton"}),
    _row("rocm:gfx942", "triton~", problem={**_BATCHED, "exact_activations": True}, why={SERVED_HERE: "triton~"}),
    _row(
        "cuda:sm100",
        "triton marlin humming triton~",
        "marlin triton~",
        packages={"flashinfer-python": None},
        reasons={"flashinfer_trtllm": "package: ", "flashinfer_cutedsl": "package: "},
        why={RAN_FIRST: "triton"},
    ),
    _row(
        "cuda:sm90",
        "marlin",
        "marlin",
        packages={"triton": None},
        reasons={"triton": "package: requires triton>=3.6, which is not installed"},
    ),
    _row(
        "cuda:sm100",
        "triton marlin triton~",
        "marlin triton~",
        packages={"triton": "3.6.0", "flashinfer-python": None},
        reasons={"triton": "package: requires triton>=3.8, got 3.6.0"},
        why={RAN_FIRST: "triton"},
    ),
)

# A clamp between the matmuls.
_CLAMP: Final = (
    _row(
        "cuda:sm100",
        "triton marlin",
        _B200,
        problem=_LIMIT,
        reasons={"flashinfer_trtllm": "opt_in: "},
        why={RAN_FIRST: "flashinfer_trtllm"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutlass triton marlin",
        _B200,
        problem=_LIMIT,
        request=_PREFERRED,
        reasons={"flashinfer_cutedsl": "swiglu_limit: does not apply the swiglu clamp, got limit 7"},
    ),
    _row(
        "cuda:sm90",
        "triton marlin humming triton~",
        _WEIGHT_ONLY,
        problem=_LIMIT,
        reasons={"flashinfer_trtllm": "platform: "},
        why={FACTS_DECIDE: "triton"},
    ),
    _row(
        "cuda:sm100",
        "",
        _B200,
        problem=_LIMIT,
        engine={"backend": "flashinfer_cutedsl"},
        request={"require": "flashinfer_cutedsl"},
        reasons={"flashinfer_cutedsl": "swiglu_limit: "},
    ),
    _row(
        "cuda:sm100",
        "",
        _B200,
        problem={**_LIMIT, **_BATCHED},
        engine={"backend": "flashinfer_cutedsl"},
        request={"require": "flashinfer_cutedsl"},
        reasons={"flashinfer_cutedsl": "swiglu_limit: "},
    ),
    # Which vLLM's error text recommends for a clamp, and its list of those that apply it leaves out.
    _row(
        "cuda:sm100",
        "flashinfer_cutlass",
        _B200,
        problem=_LIMIT,
        engine={"backend": "flashinfer_cutlass"},
        request={"require": "flashinfer_cutlass"},
        why={FACTS_DECIDE: "flashinfer_cutlass"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_trtllm",
        _B200,
        problem=_LIMIT,
        engine={"backend": "flashinfer_trtllm"},
        request={"require": "flashinfer_trtllm"},
    ),
    _row(
        "cuda:sm100",
        "triton marlin",
        f"{_B200} marlin",
        problem=_LIMIT,
        engine=_OFF,
        request={"deny": "flashinfer_*"},
        reasons={"flashinfer_trtllm": "denied: "},
        why={FACTS_DECIDE: "triton"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_cutlass",
        _B200,
        problem=_LIMIT,
        engine=_THROUGHPUT,
        request={"require": "flashinfer_cutlass"},
        why={FACTS_DECIDE: "flashinfer_cutlass"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_trtllm",
        _B200,
        problem=_LIMIT,
        engine=_LATENCY,
        request={"MOEREG_REQUIRE": "nvfp4=flashinfer_trtllm"},
    ),
    _row(
        "cuda:sm100",
        "flashinfer_trtllm flashinfer_cutlass",
        _B200,
        problem=_LIMIT,
        engine=_FORCED,
        request=_ANY_FLASHINFER,
        reasons={"flashinfer_cutedsl": "swiglu_limit: "},
    ),
    _row(
        "cuda:sm120",
        "flashinfer_cutlass",
        "flashinfer_cutlass",
        problem=_LIMIT,
        engine=_FORCED,
        request=_ANY_FLASHINFER,
        why={FACTS_DECIDE: "flashinfer_cutlass"},
    ),
    # Forced, Marlin is not asked about the clamp by vLLM; it applies it.
    _row(
        "cuda:sm90",
        "marlin",
        _WEIGHT_ONLY,
        problem=_LIMIT,
        engine=_MARLIN,
        request={"require": "nvfp4=marlin"},
    ),
    _row(
        "cuda:sm120",
        "",
        "flashinfer_b12x",
        problem=_LIMIT,
        engine={"backend": "flashinfer_b12x"},
        request={"require": "flashinfer_b12x"},
        reasons={"flashinfer_b12x": "swiglu_limit: "},
    ),
)

ROWS: Final = (*_ORDER, *_CLAMP)
