"""`torch`: no kernel library beyond torch; every platform, and the default on CPUs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final

from moereg.backends._loaded import LoadedExperts, scaled_input_reasons
from moereg.experts import Facts
from moereg.platforms import Platform
from moereg.registry import register_moe_backend
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, spans_tokens

CODE: Final = ("backends/torch_moe", "backends/_torch", "backends/_loaded", "kernels/plain/", "weights/layouts")

_BATCHED: Final = frozenset({"batched"})

# CPU classes read the routing on the host, which a graph cannot capture.
_CPU: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "situ", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    deterministic=True,
)
_CPU_BATCHED: Final = dataclasses.replace(_CPU, activation_formats=_BATCHED)
# Products of one shape, and sums in one order, for as long as torch's number of threads stays.
_INVARIANT: Final = dataclasses.replace(_CPU, batch_invariant=True)
_DEVICE: Final = dataclasses.replace(_CPU, graph_capture=True)

# These schemes mean a 16-bit matmul on dequantized weights, and the weights stay packed in memory. So this counts as a
# kernel: no warning, and it serves checkpoints whose activations would otherwise be emulated.
_WEIGHT_ONLY: Final = tuple(
    scheme for scheme in QUANT_SCHEMES.values() if scheme.weight is not None and scheme.activation is None
)
# No CPU multiplies these formats. Activations are rounded to the format's values and multiplied in fp32.
_EMULATED: Final = tuple(
    scheme for scheme in QUANT_SCHEMES.values() if scheme.activation is not None and not spans_tokens(scheme)
)
_SPANNING: Final = tuple(scheme for scheme in QUANT_SCHEMES.values() if spans_tokens(scheme))


def _has_int8_matmul(platform: Platform) -> str | None:
    from moereg.kernels.plain import cpu

    return None if cpu.features().int8 else "requires AVX-512 VNNI, without which torch multiplies int8 in a plain loop"


class _TorchExperts(LoadedExperts):
    """Canonical is shared: `ExpertWeights`' tensors by their names, static activation scales as one per expert."""

    wide_output = True
    wide_intermediate = True
    layouts: ClassVar[tuple[str, ...]] = ("canonical",)
    shared_layouts: ClassVar[tuple[str, ...]] = ("canonical",)


# 1.35 times as fast in bf16 and 1.77 in fp32 as the best of transformers' implementations (geometric means of
# benches/results/cpu_epyc_2threads.json).
@register_moe_backend(name="torch", priority=60, quant_schemes=("unquantized",), platforms=("cpu",))
class TorchPackedExperts(_TorchExperts):
    """CPU, standard format: weights in oneDNN's layout where that is faster, active experts only."""

    facts = _INVARIANT
    layouts = ("onednn_gate_up_down", "onednn_w13_w2", "canonical")
    implemented_by = "moereg.backends._torch.plain:Host"


@register_moe_backend(name="torch", priority=59, quant_schemes=("unquantized",), platforms=("cpu",))
class TorchPackedBatchedExperts(_TorchExperts):
    """CPU, batched format: as `TorchPackedExperts`, on the rows that prepare laid out for each expert."""

    facts = _CPU_BATCHED
    output_form = "per_expert"
    layouts = TorchPackedExperts.layouts
    implemented_by = "moereg.backends._torch.plain:HostBatched"


# Below the packed weights, which serve what computes no gradients.
@register_moe_backend(name="torch", priority=20, quant_schemes=("unquantized",), platforms=("cpu",))
class TorchTrainingExperts(_TorchExperts):
    """CPU, standard format, with all gradients: canonical weights, active experts only."""

    facts = dataclasses.replace(_CPU, gradients=frozenset(GRADIENTS))
    implemented_by = "moereg.backends._torch.training:TrainingHost"

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        return scaled_input_reasons(problem)


# The last resort: E/K times the routed work.
@register_moe_backend(name="torch", priority=10, quant_schemes=("unquantized",), platforms=("*",))
class TorchDenseExperts(_TorchExperts):
    """Any device, standard format: every expert sees every token, unrouted results are dropped."""

    facts = _DEVICE
    implemented_by = "moereg.backends._torch.plain:Dense"


# Batched matmuls over all rows, valid or not (an H200 took 1.0 ms for Qwen3-30B's layer with max_T 64).
@register_moe_backend(name="torch", priority=11, quant_schemes=("unquantized",), platforms=("*",))
class TorchBatchedExperts(_TorchExperts):
    """Any device, batched format: two batched matmuls over all rows."""

    facts = dataclasses.replace(_DEVICE, activation_formats=_BATCHED)
    output_form = "per_expert"
    implemented_by = "moereg.backends._torch.plain:Batched"


# One thread of an AMD EPYC with AVX2, 16 experts of 2048 x 768, top 4, 16 tokens: 63 ms (int8) to 175 ms (int4 with
# zero points), against 69 ms with unquantized weights in oneDNN's layout. Emulated activations add 5 to 20 %.
@register_moe_backend(name="torch", priority=40, quant_schemes=_WEIGHT_ONLY, platforms=("cpu",))
@register_moe_backend(name="torch", priority=30, quant_schemes=_EMULATED, platforms=("cpu",), tier="emulation")
@register_moe_backend(
    name="torch", priority=30, quant_schemes=_SPANNING, platforms=("cpu",), tier="emulation", batch_invariant=False
)
class TorchQuantizedExperts(_TorchExperts):
    """CPU, standard format: any weight and activation format that `moereg.quantize` reads."""

    facts = _INVARIANT
    implemented_by = "moereg.backends._torch.quantized:Restoring"


@register_moe_backend(name="torch", priority=39, quant_schemes=_WEIGHT_ONLY, platforms=("cpu",))
@register_moe_backend(
    name="torch", priority=29, quant_schemes=(*_EMULATED, *_SPANNING), platforms=("cpu",), tier="emulation"
)
class TorchQuantizedBatchedExperts(_TorchExperts):
    """CPU, batched format: as `TorchQuantizedExperts`, on the rows that prepare laid out for each expert."""

    facts = _CPU_BATCHED
    output_form = "per_expert"
    implemented_by = "moereg.backends._torch.quantized:RestoringBatched"


# Above dequantizing int8 weights to 16 bits, since this skips that step. Not measured: no machine with VNNI.
@register_moe_backend(
    name="torch", priority=50, quant_schemes=("int8_w8a8",), platforms=("cpu",), probes=(_has_int8_matmul,)
)
class TorchInt8Experts(_TorchExperts):
    """CPU with int8 instructions, standard format: int8 matmuls with int32 sums."""

    facts = _INVARIANT
    wide_intermediate = False
    implemented_by = "moereg.backends._torch.quantized:Int8"


@register_moe_backend(
    name="torch", priority=49, quant_schemes=("int8_w8a8",), platforms=("cpu",), probes=(_has_int8_matmul,)
)
class TorchInt8BatchedExperts(_TorchExperts):
    """CPU with int8 instructions, batched format: as `TorchInt8Experts`."""

    facts = _CPU_BATCHED
    output_form = "per_expert"
    wide_intermediate = False
    implemented_by = "moereg.backends._torch.quantized:Int8Batched"
