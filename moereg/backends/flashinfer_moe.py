"""FlashInfer's kernels on NVIDIA GPUs from Hopper on: `flashinfer_cutlass` and its siblings.

All of them want the up rows of w13 first and take any routing. Probes read files; only a running layer imports
FlashInfer.

- `flashinfer_cutlass`: FlashInfer's CUTLASS kernels, tuned by timing
- `flashinfer_trtllm`: TensorRT-LLM's generated kernels for Blackwell, through FlashInfer
- `flashinfer_cutedsl`: FlashInfer's CuTe DSL kernels for 4-bit floats on Blackwell
- `flashinfer_b12x`: FlashInfer's kernels for nvfp4 weights on sm120
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moereg.backends._flashinfer.loading import BuiltKernels
from moereg.backends._flashinfer.package import (
    REQUIRES,
    built_module,
    can_be_imported,
    can_compile_at_run_time,
    has_compiler,
    has_generated_headers,
    has_generated_kernels,
)
from moereg.backends._loaded import LoadedExperts
from moereg.experts import Experts, Facts
from moereg.platforms import Platform
from moereg.registry import Probe, register_moe_backend
from moereg.spec.facts import NarrowedFacts
from moereg.spec.problem import MoEProblem

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "FlashInferB12xExperts",
    "FlashInferCuTeDslBatchedExperts",
    "FlashInferCuTeDslExperts",
    "FlashInferCutlassBlockExperts",
    "FlashInferCutlassExperts",
    "FlashInferCutlassFp8Experts",
    "FlashInferCutlassInt4Experts",
    "FlashInferCutlassMxfp8Experts",
    "FlashInferCutlassNvfp4Experts",
    "FlashInferCutlassPackedExperts",
    "FlashInferTrtLlmExperts",
    "FlashInferTrtLlmFloat4Experts",
    "FlashInferTrtLlmFloat8BlockExperts",
    "FlashInferTrtLlmFloat8GroupExperts",
    "FlashInferTrtLlmFloat8TensorExperts",
    "FlashInferTrtLlmInteger4Experts",
]

CODE: Final = (
    *("backends/flashinfer_moe", "backends/_flashinfer", "backends/_loaded", "backends/_triton/workspace"),
    *("backends/_workspace", "weights/layouts", "kernels/sizes"),
    *(f"kernels/{name}/" for name in ("launch", "plain", "quantized", "rows")),
)

Decorator = Callable[[type[Experts]], type[Experts]]

# flashinfer_cutlass. Priorities follow the order in which vLLM tries its kernels, not measurements: on Hopper after
# Triton, on Blackwell before it, everywhere before other CUTLASS kernels. On Hopper, where others were measured, a cell
# stays opt-in until it has run there. None has run on Blackwell: a layer checks its kernel at first use.

_CUTLASS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    bias=True,
    # The sort for many tokens counts a local expert once per token, but a map may name it twice.
    placements=frozenset({"contiguous"}),
    graph_capture=True,
    # A token's rows are summed in order, and a process keeps the tactics of its first call.
    deterministic=True,
    max_experts=1024,
)
_BFLOAT16: Final = frozenset({"bfloat16"})


def _cutlass(
    scheme: str,
    *platforms: str,
    priority: int = 48,
    opt_in: bool = True,
    probes: tuple[Probe, ...] = (),
    **facts: Unpack[NarrowedFacts],
) -> Decorator:
    """A cell of `flashinfer_cutlass`, opt-in until it has run on its platforms."""
    return register_moe_backend(
        name="flashinfer_cutlass",
        priority=priority,
        quant_schemes=(scheme,),
        platforms=platforms,
        requires=(REQUIRES,),
        probes=(can_be_imported, BuiltKernels(scheme), *probes),
        opt_in=opt_in,
        **facts,
    )


# On Blackwell: below `flashinfer_trtllm` and `flashinfer_cutedsl`, above `triton` (110).
_blackwell: Final = functools.partial(_cutlass, priority=115, opt_in=False)


class _CutlassExperts(LoadedExperts):
    """CUTLASS GEMMs, with separate kernels for the activation and the sum over a token's routes."""

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses a clamp or beta for gelu."""
        activation = problem.activation
        if activation.name in ("gelu", "gelu_tanh") and (activation.limit is not None or activation.beta):
            return [f"applies limit and beta to silu and swigluoai alone, got {activation}"]
        return []


# vLLM puts FlashInfer's 16-bit kernels after Triton for swigluoai.
_LATER: Final = frozenset({"swigluoai"})
_SOONER: Final = _CUTLASS.activations - _LATER


# After `triton`: benches/results/board_h200.md has the times of both, and those with FlashInfer's own choice of tiles.
@_cutlass("unquantized", "cuda:sm90", dtypes=("bfloat16",), opt_in=False)
@_cutlass("unquantized", "cuda:sm90", dtypes=("float16",))
@_blackwell("unquantized", "cuda:sm100f", activations=_SOONER)
@_blackwell("unquantized", "cuda:sm100f", activations=_LATER, priority=48)
# Ampere's tiles, the only ones there are.
@_blackwell("unquantized", "cuda:sm120f", dtypes=("bfloat16",), activations=_SOONER)
@_blackwell("unquantized", "cuda:sm120f", dtypes=("bfloat16",), activations=_LATER, priority=48)
class FlashInferCutlassExperts(_CutlassExperts):
    """16-bit weights, standard format."""

    facts = _CUTLASS
    layouts = ("flashinfer_up_gate_pad8",)
    implemented_by = "moereg.backends._flashinfer.cutlass:Plain"


@_cutlass("fp8_tensor_static", "cuda:sm90")
@_blackwell("fp8_tensor_static", "cuda:sm100f", "cuda:sm120f")
class FlashInferCutlassFp8Experts(_CutlassExperts):
    """8-bit floats with per-tensor weight scales and static activation scales, standard format."""

    facts = _CUTLASS
    layouts = ("flashinfer_up_gate_pad16_scaled",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Fp8Tensor"


# On an H200 with Qwen3-30B's sizes: 132 us at T 16, 280 at 256, 1,133 at 4,096.
@_cutlass("fp8_block128", "cuda:sm90", dtypes=("bfloat16",), opt_in=False, probes=(can_compile_at_run_time,))
class FlashInferCutlassBlockExperts(_CutlassExperts):
    """8-bit floats in blocks of 128 x 128, standard format; GEMMs are compiled at run time."""

    facts = dataclasses.replace(_CUTLASS, dtypes=_BFLOAT16)
    layouts = ("flashinfer_up_gate_block128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_blocks:Fp8Block"


@_cutlass("mxfp4_w4a16", "cuda:sm90", dtypes=("bfloat16",))
class FlashInferCutlassPackedExperts(_CutlassExperts):
    """4-bit floats and 16-bit activations, standard format."""

    facts = dataclasses.replace(_CUTLASS, dtypes=_BFLOAT16)
    layouts = ("flashinfer_hopper_fp4_up_gate_pad128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Mxfp4W4A16"


# After kernels with 16-bit activations until a machine has measured it.
@_cutlass("int4_w4a8_g128", "cuda:sm90", dtypes=("bfloat16",))
class FlashInferCutlassInt4Experts(_CutlassExperts):
    """4-bit integers in groups of 128 and static e4m3 activations, standard format. Group scales become bf16."""

    facts = dataclasses.replace(
        _CUTLASS,
        activations=_CUTLASS.activations - {"swigluoai"},
        dtypes=_BFLOAT16,  # Clamp and beta make swigluoai.
    )
    layouts = ("flashinfer_hopper_int4_up_gate_pad128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_int4:Int4W4A8"

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses a clamp and beta: the intermediate's scale is folded into the up rows, and neither would follow."""
        activation = problem.activation
        if activation.limit is None and not activation.beta:
            return []
        return [f"requires no clamp and beta=0, since scales of the intermediate go into up rows, got {activation}"]


@_blackwell("mxfp4_mxfp8", "cuda:sm100f", "cuda:sm120f")
@_blackwell("mxfp8", "cuda:sm100f")
class FlashInferCutlassMxfp8Experts(_CutlassExperts):
    """8-bit float activations in groups of 32, weights likewise or as 4-bit floats, standard format."""

    facts = _CUTLASS
    layouts = ("flashinfer_swizzled_up_gate_pad128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Mxfp8Activations"


@_blackwell("nvfp4", "cuda:sm100f", "cuda:sm120f")
class FlashInferCutlassNvfp4Experts(_CutlassExperts):
    """4-bit floats on both sides in groups of 16, with static global scales; standard format."""

    facts = _CUTLASS
    layouts = ("flashinfer_swizzled_nvfp4_up_gate_pad128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Nvfp4"


# The other families. Priorities again follow vLLM's order: on Blackwell, where none has run, before `triton` (110).

_OWN_KERNELS: Final = (REQUIRES, "triton>=3.6")
"""moereg's own Triton kernels prepare the routes and quantize tokens."""

_TRTLLM_FACTS: Final = Facts(
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
_TRTLLM_PLAIN_FACTS: Final = dataclasses.replace(
    # The kernels apply scalars before the scales, which differ between experts.
    _TRTLLM_FACTS,
    activations=frozenset({"silu", "relu2"}),
    activation_scalars=False,
    swiglu_limit=False,
)

_BLACKWELL: Final = ("cuda:sm100f",)
# CuTe DSL's language changes between minor versions.
_CUTEDSL_REQUIRES: Final = (*_OWN_KERNELS, "nvidia-cutlass-dsl>=4.8,<5")

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


def _trtllm_reasons(problem: MoEProblem) -> list[str]:
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


def _scalar_reasons(problem: MoEProblem) -> list[str]:
    """Activation scalars that FlashInfer's kernels cannot take: all but those of silu and swigluoai."""
    activation = problem.activation
    if activation.name in ("silu", "swigluoai"):
        return []
    reasons = [f"requires beta=0, got {activation}"] if activation.beta else []
    if activation.limit is not None:
        reasons.append(f"requires no clamp, got {activation}")
    return reasons


def _trtllm(scheme: str, *platforms: str, **facts: Unpack[NarrowedFacts]) -> Decorator:
    """A cell of `flashinfer_trtllm`."""
    return register_moe_backend(
        name="flashinfer_trtllm",
        priority=120,
        quant_schemes=(scheme,),
        platforms=platforms or _BLACKWELL,
        requires=_OWN_KERNELS,
        probes=(can_be_imported, _has_launcher),
        **facts,
    )


def _cutedsl(priority: int, *schemes: str, probe: Probe = _has_sort) -> Decorator:
    """A cell of `flashinfer_cutedsl`."""
    return register_moe_backend(
        name="flashinfer_cutedsl",
        priority=priority,
        quant_schemes=schemes,
        platforms=_BLACKWELL,
        requires=_CUTEDSL_REQUIRES,
        probes=(can_be_imported, probe),
    )


class _TrtLlmExperts(LoadedExperts):
    """TensorRT-LLM's generated kernels, standard format. Route ids are local, so any placement works."""

    facts = _TRTLLM_FACTS

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        return _trtllm_reasons(problem) + _scalar_reasons(problem)


@_trtllm("unquantized")
class FlashInferTrtLlmExperts(_TrtLlmExperts):
    """bfloat16."""

    facts = dataclasses.replace(_TRTLLM_FACTS, activations=frozenset({"silu", "relu2"}))
    layouts = ("flashinfer_trtllm_blocks",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Bfloat16"


@_trtllm("fp8_block128")
class FlashInferTrtLlmFloat8BlockExperts(_TrtLlmExperts):
    """8-bit floats in blocks of 128 x 128."""

    facts = dataclasses.replace(_TRTLLM_FACTS, requires_multiple={"hidden_size": 128})
    layouts = ("flashinfer_up_gate",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Blocks"


@_trtllm("mxfp8")
class FlashInferTrtLlmFloat8GroupExperts(_TrtLlmExperts):
    """8-bit floats in groups of 32 columns."""

    facts = dataclasses.replace(_TRTLLM_FACTS, activations=frozenset({"silu", "swigluoai", "relu2"}))
    layouts = ("flashinfer_trtllm_mxfp8",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Groups"


@_trtllm("fp8_tensor_static")
class FlashInferTrtLlmFloat8TensorExperts(_TrtLlmExperts):
    """8-bit floats with static scales; tokens use the largest of the experts' scales."""

    facts = _TRTLLM_PLAIN_FACTS
    layouts = ("flashinfer_trtllm_fp8_tensor",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Tensor"


# FlashInfer's tests expect 16-bit activations to fail on sm103.
@_trtllm("mxfp4_w4a16", "cuda:sm100")
@_trtllm("mxfp4_mxfp8")
# These kernels apply scalars and biases before the scales, which differ between experts.
@_trtllm("nvfp4", activations=("silu",), activation_scalars=False, bias=False)
class FlashInferTrtLlmFloat4Experts(_TrtLlmExperts):
    """mxfp4 with 16-bit or mxfp8 activations; nvfp4 with static global scales, the experts' largest for tokens."""

    facts = dataclasses.replace(_TRTLLM_FACTS, bias=True)
    layouts = ("flashinfer_trtllm_float4",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float4"


@_trtllm("int4_w4a16_g32")
class FlashInferTrtLlmInteger4Experts(_TrtLlmExperts):
    """4-bit integers in groups of 32. Scales (mostly bf16 in checkpoints) and routing weights become bf16."""

    facts = dataclasses.replace(_TRTLLM_FACTS, requires_multiple={"hidden_size": 256, "intermediate_size": 256})
    layouts = ("flashinfer_trtllm_mxint4",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Integer4"


@_cutedsl(117, "nvfp4_w4a16")
@_cutedsl(118, "nvfp4", "mxfp4_mxfp8")
class FlashInferCuTeDslExperts(_TrtLlmExperts):
    """CuTe DSL, standard format: 4-bit floats. nvfp4 tokens use the largest of the experts' scales."""

    facts = dataclasses.replace(
        _TRTLLM_FACTS,
        # For capture FlashInfer has another interface, which keeps its buffers.
        graph_capture=False,
        # Scalars and a clamp exist here too, but vLLM does not use them and what they mean is unverified.
        activations=frozenset({"silu", "gelu_tanh", "relu2"}),
        activation_scalars=False,
        swiglu_limit=False,
    )
    layouts = ("flashinfer_cutedsl_interleaved",)
    implemented_by = "moereg.backends._flashinfer.cutedsl:Standard"


@_cutedsl(116, "nvfp4", probe=_has_quantizer)
class FlashInferCuTeDslBatchedExperts(LoadedExperts):
    """CuTe DSL, batched format: nvfp4 with static scales per expert."""

    facts = dataclasses.replace(
        _TRTLLM_FACTS,
        # Undocumented and untested.
        graph_capture=False,
        # The only activation with a fused quantizing kernel.
        activations=frozenset({"silu"}),
        activation_scalars=False,
        swiglu_limit=False,
        activation_formats=frozenset({"batched"}),
    )
    output_form = "per_expert"
    layouts = ("flashinfer_cutedsl_gate_up",)
    implemented_by = "moereg.backends._flashinfer.cutedsl:Batched"


# Opt-in, as in vLLM: atomic additions give other bits in each run, and later calls free what a graph captured.
@register_moe_backend(
    name="flashinfer_b12x",
    priority=34,
    quant_schemes=("nvfp4_w4a16",),
    platforms=("cuda:sm120f",),
    requires=_CUTEDSL_REQUIRES,
    probes=(can_be_imported,),
    opt_in=True,
)
class FlashInferB12xExperts(LoadedExperts):
    """b12x: nvfp4 weights with 16-bit activations. Sums by atomic additions into process-wide buffers."""

    facts = dataclasses.replace(
        _TRTLLM_PLAIN_FACTS,
        # A later call with more tokens frees buffers that a graph has captured.
        graph_capture=False,
    )
    layouts = ("flashinfer_b12x_packed",)
    implemented_by = "moereg.backends._flashinfer.b12x:Standard"
