"""`cutlass`: CUTLASS through third-party libraries, on NVIDIA GPUs from Hopper on.

QuACK's kernels, written in CuTe DSL, gather rows and apply the activation themselves; they are compiled at their first
use, in seconds and without nvcc. torch's grouped matmuls are CUTLASS inside PyTorch: they need no package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from moereg.backends._cutlass.package import REQUIRES, cache_can_be_written, can_be_imported
from moereg.backends._loaded import Implementation, LoadedExperts
from moereg.experts import Experts, Facts
from moereg.registry import register_moe_backend

_QUACK_FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    # Gated epilogues store 16 bits.
    dtypes=frozenset({"bfloat16", "float16"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    deterministic=True,
    # Rows of 16 bytes.
    requires_multiple={"hidden_size": 8, "intermediate_size": 8},
    # The scan over experts keeps one value per expert and thread in registers.
    max_experts=1024,
)

_TORCH_FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    # What CUTLASS inside PyTorch multiplies into.
    dtypes=frozenset({"bfloat16"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    deterministic=True,
    # Rows of 16 bytes.
    requires_multiple={"hidden_size": 8, "intermediate_size": 8},
)


def _quack(*schemes: str, platform: str, opt_in: bool = True) -> Callable[[type[Experts]], type[Experts]]:
    """A rectangle of QuACK's kernels; opt-in until they ran on its platform. Engines put FlashInfer's first."""
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
    """QuACK, standard format: sorted routes, two grouped products with epilogues, and a sum.

    Equal inputs give equal bits: no product splits its sums, nothing adds atomically, and a token's rows are added in
    the order of its choices.
    """

    facts = _QUACK_FACTS
    layouts = ("quack_gate_up_interleaved",)

    def _load(self) -> Implementation:
        from moereg.backends._cutlass import interleaved

        return interleaved.Interleaved(self)


# As the unquantized one. On an H200 1.3 to 1.4 times the time of `triton` (docs/board.md).
@_quack("fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", platform="cuda:sm90", opt_in=False)
@_quack("fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", platform="cuda:sm100f")
class QuackCodesExperts(LoadedExperts):
    """QuACK on 8-bit floats with a scale for each row of tokens and of weights; otherwise as `QuackExperts`.

    Tokens are quantized in a launch of their own, and so is the intermediate, which is rounded to the problem's dtype
    first. Sums of products are added up in fp32 every few steps, since Hopper's tensor cores keep 14 bits or so.
    """

    facts = _QUACK_FACTS
    layouts = ("quack_codes_gate_up_interleaved",)

    def _load(self) -> Implementation:
        from moereg.backends._cutlass import interleaved

        return interleaved.InterleavedCodes(self)


# Below fused kernels, since it writes and reads every intermediate, and above the dense loop. On an H200, torch 2.11:
# 5.0 ms for Qwen3-30B's layer at T 4096 and 0.15 ms at T 1, against 32 and 5.7 ms of the dense loop. Other GPUs are
# left out: torch loops over the experts there, and waits for their counts to reach the host.
@register_moe_backend(name="cutlass", priority=25, quant_schemes=("unquantized",), platforms=("cuda:sm90",))
@register_moe_backend(
    name="cutlass", priority=25, quant_schemes=("unquantized",), platforms=("cuda:sm100",), opt_in=True
)
class TorchGroupedExperts(LoadedExperts):
    """torch's `grouped_mm`, standard format."""

    facts = _TORCH_FACTS
    layouts = ("canonical",)

    def _load(self) -> Implementation:
        from moereg.backends._torch import plain

        return plain.Grouped(self)


# As the unquantized one: on an H200 3.9 to 5.1 times the time of `triton` (docs/board.md). torch has these products for
# Hopper alone.
@register_moe_backend(
    name="cutlass",
    priority=25,
    quant_schemes=("fp8_channel_token", "fp8_tensor_static"),
    platforms=("cuda:sm90",),
)
class TorchScaledGroupedExperts(LoadedExperts):
    """torch's `scaled_grouped_mm` with a scale for each row of tokens and of weights, standard format."""

    facts = dataclasses.replace(_TORCH_FACTS, requires_multiple={"hidden_size": 16, "intermediate_size": 16})
    layouts = ("codes_row_scales",)

    def _load(self) -> Implementation:
        from moereg.backends._cutlass import torch_scaled

        return torch_scaled.ScaledGrouped(self)
