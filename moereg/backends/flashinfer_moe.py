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
from collections.abc import Callable
from typing import Final

from moereg.backends._flashinfer import claims
from moereg.backends._flashinfer.loading import built_kernels
from moereg.backends._flashinfer.package import REQUIRES, can_be_imported, can_compile_at_run_time
from moereg.backends._loaded import LoadedExperts
from moereg.experts import Experts, Facts
from moereg.platforms import Platform
from moereg.registry import register_moe_backend
from moereg.spec.problem import MoEProblem

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

# Needed by every cell; kernels that have to be installed or downloaded have further probes.
_REQUIRES: Final = (REQUIRES,)
_PROBES: Final = (can_be_imported,)

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
    priority: int = 55,
    opt_in: bool = True,
    dtypes: tuple[str, ...] = ("bfloat16", "float16"),
    runs_nvcc: bool = False,
) -> Callable[[type[Experts]], type[Experts]]:
    """A cell of `flashinfer_cutlass`, opt-in until it has run on its platforms."""
    nvcc = (can_compile_at_run_time,) if runs_nvcc else ()
    return register_moe_backend(
        name="flashinfer_cutlass",
        priority=priority,
        quant_schemes=(scheme,),
        platforms=platforms,
        requires=_REQUIRES,
        probes=(*_PROBES, built_kernels(scheme), *nvcc),
        opt_in=opt_in,
        dtypes=dtypes,
    )


def _blackwell(
    scheme: str,
    *platforms: str,
    priority: int = 115,
    dtypes: tuple[str, ...] = ("bfloat16", "float16"),
    activations: frozenset[str] = _CUTLASS.activations,
) -> Callable[[type[Experts]], type[Experts]]:
    """A cell on Blackwell: below `flashinfer_trtllm` and `flashinfer_cutedsl`, above `triton` (110)."""
    return register_moe_backend(
        name="flashinfer_cutlass",
        priority=priority,
        quant_schemes=(scheme,),
        platforms=platforms,
        requires=_REQUIRES,
        probes=(*_PROBES, built_kernels(scheme)),
        dtypes=dtypes,
        activations=activations,
    )


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
@_cutlass("unquantized", "cuda:sm90", priority=48, dtypes=("bfloat16",), opt_in=False)
@_cutlass("unquantized", "cuda:sm90", priority=48, dtypes=("float16",))
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


@_cutlass("fp8_tensor_static", "cuda:sm90", priority=48)
@_blackwell("fp8_tensor_static", "cuda:sm100f", "cuda:sm120f")
class FlashInferCutlassFp8Experts(_CutlassExperts):
    """8-bit floats with per-tensor weight scales and static activation scales, standard format."""

    facts = _CUTLASS
    layouts = ("flashinfer_up_gate_pad16_scaled",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Fp8Tensor"


# On an H200 with Qwen3-30B's sizes: 132 us at T 16, 280 at 256, 1,133 at 4,096.
@_cutlass("fp8_block128", "cuda:sm90", priority=48, dtypes=("bfloat16",), opt_in=False, runs_nvcc=True)
class FlashInferCutlassBlockExperts(_CutlassExperts):
    """8-bit floats in blocks of 128 x 128, standard format; GEMMs are compiled at run time."""

    facts = dataclasses.replace(
        _CUTLASS,
        dtypes=_BFLOAT16,
        # Gate and up swap places in whole blocks.
        requires_multiple={"intermediate_size": 128},
    )
    layouts = ("flashinfer_up_gate_block128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_blocks:Fp8Block"


@_cutlass("mxfp4_w4a16", "cuda:sm90", priority=48, dtypes=("bfloat16",))
class FlashInferCutlassPackedExperts(_CutlassExperts):
    """4-bit floats and 16-bit activations, standard format."""

    facts = dataclasses.replace(_CUTLASS, dtypes=_BFLOAT16)
    layouts = ("flashinfer_hopper_fp4_up_gate_pad128",)
    implemented_by = "moereg.backends._flashinfer.cutlass_quantized:Mxfp4W4A16"


# After kernels with 16-bit activations until a machine has measured it.
@_cutlass("int4_w4a8_g128", "cuda:sm90", priority=48, dtypes=("bfloat16",))
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


class _TrtLlmExperts(LoadedExperts):
    """TensorRT-LLM's generated kernels, standard format. Route ids are local, so any placement works."""

    facts = claims.TRTLLM_FACTS

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        return claims.trtllm_reasons(problem) + claims.scalar_reasons(problem)


@claims.trtllm("unquantized")
class FlashInferTrtLlmExperts(_TrtLlmExperts):
    """bfloat16."""

    facts = claims.TRTLLM_BFLOAT16_FACTS
    layouts = ("flashinfer_trtllm_blocks",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Bfloat16"


@claims.trtllm("fp8_block128")
class FlashInferTrtLlmFloat8BlockExperts(_TrtLlmExperts):
    """8-bit floats in blocks of 128 x 128."""

    layouts = ("flashinfer_up_gate",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Blocks"


@claims.trtllm("mxfp8")
class FlashInferTrtLlmFloat8GroupExperts(_TrtLlmExperts):
    """8-bit floats in groups of 32 columns."""

    facts = claims.TRTLLM_RELU2_FACTS
    layouts = ("flashinfer_trtllm_mxfp8",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Groups"


@claims.trtllm("fp8_tensor_static")
class FlashInferTrtLlmFloat8TensorExperts(_TrtLlmExperts):
    """8-bit floats with static scales; tokens use the largest of the experts' scales."""

    facts = claims.TRTLLM_PLAIN_FACTS
    layouts = ("flashinfer_trtllm_fp8_tensor",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float8Tensor"


# FlashInfer's tests expect 16-bit activations to fail on sm103.
@claims.trtllm("mxfp4_w4a16", "cuda:sm100")
@claims.trtllm("mxfp4_mxfp8")
@claims.trtllm("nvfp4", **claims.UNSCALED)
class FlashInferTrtLlmFloat4Experts(_TrtLlmExperts):
    """mxfp4 with 16-bit or mxfp8 activations; nvfp4 with static global scales, the experts' largest for tokens."""

    facts = claims.TRTLLM_BIAS_FACTS
    layouts = ("flashinfer_trtllm_float4",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Float4"


@claims.trtllm("int4_w4a16_g32")
class FlashInferTrtLlmInteger4Experts(_TrtLlmExperts):
    """4-bit integers in groups of 32. Scales (mostly bf16 in checkpoints) and routing weights become bf16."""

    facts = claims.TRTLLM_INTEGER_FACTS
    layouts = ("flashinfer_trtllm_mxint4",)
    implemented_by = "moereg.backends._flashinfer.trtllm:Integer4"


@claims.cutedsl(117, "nvfp4_w4a16")
@claims.cutedsl(118, "nvfp4", "mxfp4_mxfp8")
class FlashInferCuTeDslExperts(_TrtLlmExperts):
    """CuTe DSL, standard format: 4-bit floats. nvfp4 tokens use the largest of the experts' scales."""

    facts = claims.CUTEDSL_FACTS
    layouts = ("flashinfer_cutedsl_interleaved",)
    implemented_by = "moereg.backends._flashinfer.cutedsl:Standard"


@claims.cutedsl(116, "nvfp4", probes=claims.CUTEDSL_BATCHED_PROBES)
class FlashInferCuTeDslBatchedExperts(LoadedExperts):
    """CuTe DSL, batched format: nvfp4 with static scales per expert."""

    facts = claims.CUTEDSL_BATCHED_FACTS
    output_form = "per_expert"
    layouts = ("flashinfer_cutedsl_gate_up",)
    implemented_by = "moereg.backends._flashinfer.cutedsl:Batched"


# Opt-in, as in vLLM: atomic additions give other bits in each run, and later calls free what a graph captured.
@register_moe_backend(
    name="flashinfer_b12x",
    priority=34,
    quant_schemes=("nvfp4_w4a16",),
    platforms=("cuda:sm120f",),
    requires=claims.CUTEDSL_REQUIRES,
    probes=_PROBES,
    opt_in=True,
)
class FlashInferB12xExperts(LoadedExperts):
    """b12x: nvfp4 weights with 16-bit activations. Sums by atomic additions into process-wide buffers."""

    facts = claims.B12X_FACTS
    layouts = ("flashinfer_b12x_packed",)
    implemented_by = "moereg.backends._flashinfer.b12x:Standard"
