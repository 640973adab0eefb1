"""Facts, predicates and probes shared by `moereg/backends/flashinfer_moe.py`. Imports no kernel library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moereg.backends._flashinfer.downloads import has_generated_headers, has_generated_kernels
from moereg.backends._flashinfer.package import REQUIRES, built_module, can_be_imported, has_compiler
from moereg.backends._flashinfer.tileiras import CUDA_TILE, can_compile_tiles
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.registration import Probe
from moereg.registry import register_moe_backend
from moereg.spec.facts import Facts, NarrowedFacts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantFormat, QuantScheme

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
    "CUTILE_FACTS",
    "CUTILE_FLOAT4_FACTS",
    "CUTILE_FLOAT8_FACTS",
    "CUTILE_PROBES",
    "CUTILE_REQUIRES",
    "FP8_TENSOR_W8A16",
    "MXFP8_W8A16",
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
    "cutile",
    "cutile_reasons",
    "scalar_reasons",
    "trtllm",
    "trtllm_reasons",
]

_E4M3: Final = "float8_e4m3fn"

FP8_TENSOR_W8A16: Final = QuantScheme("fp8_tensor_w8a16", QuantFormat(_E4M3, (WHOLE, WHOLE)))
MXFP8_W8A16: Final = QuantScheme("mxfp8_w8a16", QuantFormat(_E4M3, (1, 32), scale_dtype="float8_e8m0fnu"))
"""8-bit float weights with 16-bit activations: what cuTile kernels compute for fp8 and mxfp8 checkpoints."""

OWN_KERNELS: Final = (REQUIRES, "triton>=3.6")
"""moereg's own Triton kernels prepare the routes and quantize tokens."""

_FACTS: Final = Facts(
    activations=frozenset({"silu", "swigluoai"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16"}),
    placements=frozenset({"contiguous", "map"}),
)

CUTILE_FACTS: Final = dataclasses.replace(
    _FACTS,
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    # FlashInfer documents it for the buffers, which are ours; nothing else allocates or waits. A new size
    # compiles; `first_call` warns of that.
    graph_capture=True,
    # A stable sort, no atomic additions, and sums in the order of a token's experts.
    deterministic=True,
    # Tile copies need 16-byte alignment.
    requires_multiple={"hidden_size": 8, "intermediate_size": 8},
    max_experts=1024,
)
CUTILE_FLOAT8_FACTS: Final = dataclasses.replace(
    CUTILE_FACTS, requires_multiple={"hidden_size": 32, "intermediate_size": 32}
)
CUTILE_FLOAT4_FACTS: Final = dataclasses.replace(
    CUTILE_FACTS, requires_multiple={"hidden_size": 64, "intermediate_size": 64}
)
CUTILE_REQUIRES: Final = (*OWN_KERNELS, CUDA_TILE)
CUTILE_PROBES: Final = (can_be_imported, can_compile_tiles)

TRTLLM_FACTS: Final = dataclasses.replace(
    _FACTS,
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

_SMALLEST: Final = 64
"""Smallest size that FlashInfer has a cuTile tile for: it skips tiles twice as large as the matrix."""

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


def cutile_reasons(problem: MoEProblem) -> list[str]:
    """Sizes without a tile, and scalars that the kernels cannot take."""
    sizes = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
    reasons = [f"requires {name} >= {_SMALLEST}, got {size}" for name, size in sizes.items() if size < _SMALLEST]
    return reasons + scalar_reasons(problem)


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
_TILES: Final = ("cuda:sm90",)


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


def cutile(*schemes: str | QuantScheme, platforms: tuple[str, ...] = _TILES, opt_in: bool = True) -> Decorator:
    """A cell of `flashinfer_cutile`, opt-in until it has run on its platforms."""
    return register_moe_backend(
        name="flashinfer_cutile",
        priority=35,
        quant_schemes=schemes,
        platforms=platforms,
        requires=CUTILE_REQUIRES,
        probes=CUTILE_PROBES,
        opt_in=opt_in,
    )
