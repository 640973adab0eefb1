"""`cutlass`: CUTLASS through third-party libraries, on NVIDIA GPUs from Hopper on.

QuACK's kernels, written in CuTe DSL, gather rows and apply the activation themselves; they are compiled at their first
use, in seconds and without nvcc. torch's grouped matmuls are CUTLASS inside PyTorch: they need no package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from moereg.backends._cutlass.package import REQUIRES, cache_can_be_written, can_be_imported
from moereg.backends._loaded import LoadedExperts
from moereg.experts import Experts, Facts
from moereg.registry import register_moe_backend

CODE: Final = (
    *("backends/cutlass_moe", "backends/_cutlass", "backends/_torch", "backends/_loaded", "weights/layouts"),
    *("backends/_flashinfer/package", "backends/_triton/workspace", "backends/_workspace", "kernels/sizes"),
    *("kernels/gemm/epilogue", "kernels/quack"),
    *(f"kernels/{name}/" for name in ("launch", "plain", "quantized", "rows")),
)

_QUACK_FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    # Gated epilogues store 16-bit results.
    dtypes=frozenset({"bfloat16", "float16"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    deterministic=True,
    # Rows need 16-byte alignment.
    requires_multiple={"hidden_size": 8, "intermediate_size": 8},
    # The scan over experts keeps one value per expert and thread in registers.
    max_experts=1024,
)

# torch's CUTLASS GEMM writes bfloat16 only.
_TORCH_FACTS: Final = dataclasses.replace(
    _QUACK_FACTS, activations=_QUACK_FACTS.activations | {"situ"}, dtypes=frozenset({"bfloat16"}), max_experts=None
)


def _quack(*schemes: str, platform: str, opt_in: bool = True) -> Callable[[type[Experts]], type[Experts]]:
    """A cell of QuACK's kernels, opt-in until they have run on its platform. Engines prefer FlashInfer's."""
    return register_moe_backend(
        name="cutlass",
        priority=45,
        quant_schemes=schemes,
        platforms=(platform,),
        requires=REQUIRES,
        probes=(can_be_imported, cache_can_be_written),
        opt_in=opt_in,
    )


@_quack("unquantized", platform="cuda:sm90", opt_in=False)
@_quack("unquantized", platform="cuda:sm100f")
class QuackExperts(LoadedExperts):
    """QuACK, standard format: sorted routes, two grouped GEMMs with epilogues, and a sum.

    Equal inputs give equal bits: no split-K, no atomic additions, and a token's rows are summed in the order of its
    experts.
    """

    facts = _QUACK_FACTS
    layouts = ("quack_gate_up_interleaved",)
    implemented_by = "moereg.backends._cutlass.interleaved:Interleaved"


# As for unquantized weights. On an H200 1.3 to 1.4 times the time of `triton` (docs/board.md).
@_quack("fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", platform="cuda:sm90", opt_in=False)
@_quack("fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", platform="cuda:sm100f")
class QuackCodesExperts(LoadedExperts):
    """QuACK on 8-bit floats with per-row scales of tokens and weights; otherwise as `QuackExperts`.

    Separate launches quantize the tokens and the intermediate, which is first rounded to the problem's dtype. Partial
    sums move to fp32 every few steps, since Hopper's tensor cores accumulate in about 14 bits.
    """

    facts = _QUACK_FACTS
    layouts = ("quack_codes_gate_up_interleaved",)
    implemented_by = "moereg.backends._cutlass.interleaved:InterleavedCodes"


# Below fused kernels, since it writes and reads every intermediate, and above the dense loop. On an H200 with torch
# 2.11, Qwen3-30B's layer takes 5.0 ms at T 4096 and 0.15 ms at T 1; the dense loop takes 32 and 5.7 ms. Not for other
# GPUs, where torch loops over the experts and waits for their counts on the host.
@register_moe_backend(name="cutlass", priority=25, quant_schemes=("unquantized",), platforms=("cuda:sm90",))
@register_moe_backend(
    name="cutlass", priority=25, quant_schemes=("unquantized",), platforms=("cuda:sm100",), opt_in=True
)
class TorchGroupedExperts(LoadedExperts):
    """torch's `grouped_mm`, standard format."""

    facts = _TORCH_FACTS
    layouts = shared_layouts = ("canonical",)
    implemented_by = "moereg.backends._torch.plain:Grouped"


# As for unquantized weights: 3.9 to 5.1 times `triton`'s time on an H200 (docs/board.md). torch has these on Hopper.
@register_moe_backend(
    name="cutlass",
    priority=25,
    quant_schemes=("fp8_channel_token", "fp8_tensor_static"),
    platforms=("cuda:sm90",),
)
class TorchScaledGroupedExperts(LoadedExperts):
    """torch's `scaled_grouped_mm` with per-row scales of tokens and weights, standard format."""

    facts = dataclasses.replace(_TORCH_FACTS, requires_multiple={"hidden_size": 16, "intermediate_size": 16})
    layouts = ("codes_row_scales",)
    implemented_by = "moereg.backends._cutlass.torch_scaled:ScaledGrouped"
