"""Engines choose among MoE backends by nested branches; docs/selection.md has them as cells and requests, row by row.

Here they stand together, as fakes in one registry: the orders of unquantized, fp8 and nvfp4 layers, each with its
demotions, and what a user forces on and off.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moereg.dispatch import explain_backends
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from tests.support.fakes import EVERYTHING, BatchedExperts, FakeExperts

NO_CLAMP = dataclasses.replace(EVERYTHING, swiglu_limit=False)
NOT_SWIGLUOAI = EVERYTHING.activations - {"swigluoai"}


def experts(base: type[FakeExperts] = FakeExperts, facts: Facts | None = None) -> type[FakeExperts]:
    return type("Fake", (base,), {"facts": facts or base.facts})


def add(cls: type[FakeExperts], name: str, priority: int, schemes: str, platforms: str, **keywords: Any) -> None:
    register_moe_backend(name, priority, schemes.split(), platforms.split(), **keywords)(cls)


@pytest.fixture(autouse=True)
def engine(isolated_registry: BackendRegistry) -> None:
    isolated_registry.restore(())
    # Unquantized. FlashInfer comes first on sm100, last on sm90 and, anywhere, last for swigluoai.
    for name, priority in (("flashinfer_trtllm", 200), ("flashinfer_cutlass", 190)):
        cls = experts()
        add(cls, name, priority, "unquantized", "cuda:sm100+,!sm120", activations=NOT_SWIGLUOAI)
        add(cls, name, priority - 150, "unquantized", "cuda:sm100+,!sm120", activations=("swigluoai",))
        add(cls, name, priority - 150, "unquantized", "cuda:sm90")
    for cls in (experts(), experts(BatchedExperts)):  # One name for both formats of activations.
        add(cls, "triton", 100, "unquantized", "cuda rocm xpu")
    add(experts(), "aiter", 150, "unquantized", "rocm:gfx9*")
    for kind in ("xpu", "cpu", "tpu"):
        add(experts(), f"{kind}_kernels", 150, "unquantized", kind)
    # fp8 on sm90: CUTLASS first under expert parallelism, Triton first without.
    fp8 = experts()
    add(fp8, "flashinfer_cutlass", 120, "fp8_block128", "cuda:sm90", held_experts=("some",))
    add(fp8, "flashinfer_cutlass", 80, "fp8_block128", "cuda:sm90", held_experts=("all",))
    add(experts(), "triton", 100, "fp8_block128", "cuda:sm80+")
    # nvfp4: one backend applies the clamp, one is not chosen unless somebody names it, and emulation comes last.
    add(experts(), "flashinfer_trtllm", 90, "nvfp4", "cuda:sm100f")
    add(experts(facts=NO_CLAMP), "flashinfer_cutedsl", 80, "nvfp4", "cuda:sm100f")
    add(
        experts(BatchedExperts, dataclasses.replace(BatchedExperts.facts, swiglu_limit=False)),
        "flashinfer_cutedsl",
        70,
        "nvfp4",
        "cuda:sm100f",
    )
    add(experts(facts=NO_CLAMP), "marlin", 40, "nvfp4_w4a16", "cuda:sm80+")
    add(experts(facts=NO_CLAMP), "flashinfer_b12x", 300, "nvfp4", "cuda:sm120f", opt_in=True)
    add(experts(), "emulating", 500, "nvfp4", "*", tier="emulation")


def problem_of(**changes: Any) -> MoEProblem:
    return MoEProblem(**{"num_experts": 8, "hidden_size": 64, "intermediate_size": 96, "top_k": 2, **changes})


def order(platform: str, request: dict[str, Any] | None = None, **changes: Any) -> str:
    selection = explain_backends(problem_of(**changes), platform, **(request or {}))
    return " ".join(decision.backend for decision in selection.decisions if decision.accepted)


ORDERS: list[tuple[str, dict[str, Any], str]] = [
    ("cuda:sm100", {}, "flashinfer_trtllm flashinfer_cutlass triton"),
    ("cuda:sm90", {}, "triton flashinfer_trtllm flashinfer_cutlass"),
    ("cuda:sm100", {"activation": "swigluoai"}, "triton flashinfer_trtllm flashinfer_cutlass"),
    ("cuda:sm120", {}, "triton"),
    ("cuda:sm100", {"activation_format": "batched"}, "triton"),
    ("rocm:gfx942", {}, "aiter triton"),
    ("rocm:gfx1100", {}, "triton"),
    ("xpu", {}, "xpu_kernels triton"),
    ("cpu", {}, "cpu_kernels"),
    ("tpu", {}, "tpu_kernels"),
    ("cuda:sm90", {"quant": "fp8_block128"}, "triton flashinfer_cutlass"),
    ("cuda:sm90", {"quant": "fp8_block128", "num_local_experts": 4}, "flashinfer_cutlass triton"),
    ("cuda:sm100", {"quant": "nvfp4"}, "flashinfer_trtllm flashinfer_cutedsl marlin emulating"),
    ("cuda:sm100", {"quant": "nvfp4", "activation": "silu(limit=7.0)"}, "flashinfer_trtllm emulating"),
    ("cuda:sm100", {"quant": "nvfp4", "activation_format": "batched"}, "flashinfer_cutedsl"),
    ("cuda:sm120", {"quant": "nvfp4"}, "marlin emulating"),
    ("cpu", {"quant": "nvfp4"}, "emulating"),
]


@pytest.mark.parametrize(("platform", "problem", "expected"), ORDERS, ids=str)
def test_orders(platform: str, problem: dict[str, Any], expected: str) -> None:
    assert order(platform, **problem) == expected


FLASHINFER = "flashinfer_trtllm,flashinfer_cutlass"
REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # An explicit backend, in either format of activations, or none.
    ("cuda:sm100", {"require": "triton"}, {}, "triton"),
    ("cuda:sm100", {"require": "triton"}, {"activation_format": "batched"}, "triton"),
    ("cuda:sm100", {"require": "auto"}, {}, "flashinfer_trtllm flashinfer_cutlass triton"),
    # FlashInfer forced off, forced on and tried in order, forced to be one of the two.
    ("cuda:sm100", {"deny": "flashinfer_*"}, {}, "triton"),
    ("cuda:sm90", {"require": FLASHINFER}, {}, "flashinfer_trtllm flashinfer_cutlass"),
    ("cuda:sm90", {"require": "flashinfer_cutlass,flashinfer_trtllm"}, {}, "flashinfer_cutlass flashinfer_trtllm"),
    ("cuda:sm100", {"require": "flashinfer_cutlass"}, {}, "flashinfer_cutlass"),
    # Data parallel ranks, of which a layer knows nothing: the engine that does says so.
    ("cuda:sm100", {"prefer": "flashinfer_trtllm,triton"}, {}, "flashinfer_trtllm triton flashinfer_cutlass"),
    ("rocm:gfx942", {"deny": "aiter"}, {}, "triton"),
    ("rocm:gfx942", {"require": "aiter"}, {}, "aiter"),
    ("cuda:sm100", {"require": "nvfp4=marlin"}, {"quant": "nvfp4"}, "marlin"),
    ("cuda:sm120", {"require": "flashinfer_b12x"}, {"quant": "nvfp4"}, "flashinfer_b12x"),
    ("cuda:sm100", {"require": "emulating"}, {"quant": "nvfp4"}, "emulating"),
]


@pytest.mark.parametrize(("platform", "request_", "problem", "expected"), REQUESTS, ids=str)
def test_requests(platform: str, request_: dict[str, Any], problem: dict[str, Any], expected: str) -> None:
    assert order(platform, request_, **problem) == expected
