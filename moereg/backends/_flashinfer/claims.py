"""Facts, predicates and probes shared by `moereg/backends/flashinfer_moe.py`. Imports no kernel library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moereg.backends._flashinfer.package import (
    REQUIRES,
    built_module,
    can_be_imported,
    has_compiler,
    has_generated_headers,
    has_generated_kernels,
)
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.registry import Probe, register_moe_backend
from moereg.spec.facts import Facts, NarrowedFacts
from moereg.spec.problem import MoEProblem

if TYPE_CHECKING:
    from typing_extensions import Unpack

Decorator = Callable[[type[Experts]], type[Experts]]

__all__ = [
    "B12X_FACTS",
    "CUTEDSL_BATCHED_FACTS",
    "CUTEDSL_BATCHED_PROBES",
    "CUTEDSL_FACTS",
    "CUTEDSL_PROBES",
    "CUTEDSL_REQUIRES",
    "OWN_KERNELS",
    "TRTLLM_BFLOAT16_FACTS",
    "TRTLLM_BIAS_FACTS",
    "TRTLLM_FACTS",
    "TRTLLM_INTEGER_FACTS",
    "TRTLLM_PLAIN_FACTS",
    "TRTLLM_PROBES",
    "TRTLLM_RELU2_FACTS",
    "UNSCALED",
    "cutedsl",
    "scalar_reasons",
    "trtllm",
    "trtllm_reasons",
]

OWN_KERNELS: Final = (REQUIRES, "triton>=3.6")
"""moereg's own Triton kernels prepare the routes and quantize tokens."""

TRTLLM_FACTS: Final = Facts(
    activations=frozenset({"silu", "swigluoai"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16"}),
    placements=frozenset({"contiguous", "map"}),
    # FlashInfer's own tuner captures these entry points to time them.
    graph_capture=True,
    # FlashInfer checks the intermediate size; block and group scales need both.
    requires_multiple={"hidden_size": 128, "intermediate_size": 128},
)
TRTLLM_RELU2_FACTS: Final = dataclasses.replace(TRTLLM_FACTS, activations=frozenset({"silu", "swigluoai", "relu2"}))
TRTLLM_BFLOAT16_FACTS: Final = dataclasses.replace(TRTLLM_FACTS, activations=frozenset({"silu", "relu2"}))
TRTLLM_BIAS_FACTS: Final = dataclasses.replace(TRTLLM_FACTS, bias=True)
TRTLLM_PLAIN_FACTS: Final = dataclasses.replace(
    # The kernels apply scalars before the scales, which differ between experts.
    TRTLLM_FACTS,
    activations=frozenset({"silu", "relu2"}),
    activation_scalars=False,
    swiglu_limit=False,
)
TRTLLM_INTEGER_FACTS: Final = dataclasses.replace(
    TRTLLM_FACTS, requires_multiple={"hidden_size": 256, "intermediate_size": 256}
)

CUTEDSL_FACTS: Final = dataclasses.replace(
    TRTLLM_FACTS,
    # For capture FlashInfer has another interface, which keeps its buffers.
    graph_capture=False,
    # Scalars and a clamp exist here too, but vLLM does not use them and what they mean is unverified.
    activations=frozenset({"silu", "gelu_tanh", "relu2"}),
    activation_scalars=False,
    swiglu_limit=False,
)
CUTEDSL_BATCHED_FACTS: Final = dataclasses.replace(
    TRTLLM_FACTS,
    # Undocumented and untested.
    graph_capture=False,
    # The only activation with a fused quantizing kernel.
    activations=frozenset({"silu"}),
    activation_scalars=False,
    swiglu_limit=False,
    activation_formats=frozenset({"batched"}),
)
UNSCALED: Final[NarrowedFacts] = {
    # The kernels apply scalars and biases before the scales, which differ between experts.
    "activations": ("silu",),
    "activation_scalars": False,
    "bias": False,
}

B12X_FACTS: Final = dataclasses.replace(
    TRTLLM_PLAIN_FACTS,
    # A later call with more tokens frees buffers that a graph has captured.
    graph_capture=False,
)
# CuTe DSL's language changes between minor versions.
CUTEDSL_REQUIRES: Final = (*OWN_KERNELS, "nvidia-cutlass-dsl>=4.8,<5")

_MOST_EXPERTS: Final = 2048
_MOST_CHOICES: Final = 32
"""Most experts, and most experts per token, that TensorRT-LLM's route-sorting kernels are compiled for."""

_STRICT_LAUNCHER: Final = frozenset({"fp8_block128", "mxfp8"})
"""Schemes whose launcher enforces its own routing's limits on expert counts, even if routes are given."""


def _has_launcher(platform: Platform) -> str | None:
    """Probe: what is missing for TensorRT-LLM's kernels and their launcher."""
    return _lacks(platform, "fused_moe_trtllm_sm100") or has_generated_headers() or has_generated_kernels()


def _has_sort(platform: Platform) -> str | None:
    """Probe: what is missing for the route sort, which includes headers of TensorRT-LLM's kernels."""
    return _lacks(platform, "moe_utils") or has_generated_headers()


def _has_quantizer(platform: Platform) -> str | None:
    """Probe: what is missing to quantize each expert's rows."""
    return _lacks(platform, f"fp4_quantization_{platform.arch.removeprefix('sm')}")


def _lacks(platform: Platform, module: str) -> str | None:
    """Why a module that was not built before cannot be compiled, or None."""
    target = f"{platform.arch.removeprefix('sm')}a"
    return None if built_module(module, target) else has_compiler(platform)


TRTLLM_PROBES: Final = (can_be_imported, _has_launcher)
CUTEDSL_PROBES: Final = (can_be_imported, _has_sort)
CUTEDSL_BATCHED_PROBES: Final = (can_be_imported, _has_quantizer)


def trtllm_reasons(problem: MoEProblem) -> list[str]:
    """Sizes that TensorRT-LLM's route sort is not compiled for or a launcher refuses."""
    reasons = []
    if problem.quant.name in _STRICT_LAUNCHER:
        if problem.num_experts % 4:
            reasons.append(f"requires num_experts % 4 == 0, got {problem.num_experts}")
        if problem.top_k >= problem.num_experts:
            reasons.append(f"requires top_k < num_experts, got {problem.top_k} of {problem.num_experts}")
    if problem.num_experts > _MOST_EXPERTS:
        reasons.append(f"requires num_experts <= {_MOST_EXPERTS}, got {problem.num_experts}")
    if problem.top_k > _MOST_CHOICES:
        reasons.append(f"requires top_k <= {_MOST_CHOICES}, got {problem.top_k}")
    return reasons


def scalar_reasons(problem: MoEProblem) -> list[str]:
    """Activation scalars that FlashInfer's kernels cannot take: all but those of silu and swigluoai."""
    activation = problem.activation
    if activation.name in ("silu", "swigluoai"):
        return []
    reasons = [f"requires beta=0, got {activation}"] if activation.beta else []
    if activation.limit is not None:
        reasons.append(f"requires no clamp, got {activation}")
    return reasons


_BLACKWELL: Final = ("cuda:sm100f",)


def trtllm(scheme: str, *platforms: str, **facts: Unpack[NarrowedFacts]) -> Decorator:
    """A cell of `flashinfer_trtllm`."""
    return register_moe_backend(
        name="flashinfer_trtllm",
        priority=120,
        quant_schemes=(scheme,),
        platforms=platforms or _BLACKWELL,
        requires=OWN_KERNELS,
        probes=TRTLLM_PROBES,
        **facts,
    )


def cutedsl(priority: int, *schemes: str, probes: tuple[Probe, ...] = CUTEDSL_PROBES) -> Decorator:
    """A cell of `flashinfer_cutedsl`."""
    return register_moe_backend(
        name="flashinfer_cutedsl",
        priority=priority,
        quant_schemes=schemes,
        platforms=_BLACKWELL,
        requires=CUTEDSL_REQUIRES,
        probes=probes,
    )
