"""`cutlass`: CUTLASS through libraries that others keep, on GPUs of NVIDIA.

torch's grouped matmuls are CUTLASS inside PyTorch: they need no package, and nothing is compiled at first use.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from moereg.backends._loaded import Implementation, LoadedExperts
from moereg.experts import Facts
from moereg.registry import register_moe_backend

__all__ = ["TorchGroupedExperts", "TorchScaledGroupedExperts"]

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


# Below fused kernels, since it writes and reads every intermediate, and above the dense loop. On an H200, torch 2.11:
# 5.0 ms for Qwen3-30B's layer at T 4096 and 0.15 ms at T 1, against 32 and 5.7 ms of the dense loop. Other GPUs are
# left out: torch loops over the experts there, and waits for their counts to reach the host.
@register_moe_backend(
    name="cutlass", priority=25, quant_schemes=("unquantized",), platforms=("cuda:sm90", "cuda:sm100")
)
class TorchGroupedExperts(LoadedExperts):
    """torch's `grouped_mm`, standard format."""

    facts = _TORCH_FACTS
    layouts = ("canonical",)

    def _load(self) -> Implementation:
        from moereg.backends._torch import plain

        return plain.Grouped(self)


# Not measured, and not run on such a machine yet: as the unquantized one. torch has these products for Hopper alone.
@register_moe_backend(
    name="cutlass", priority=25, quant_schemes=("fp8_channel_token", "fp8_tensor_static"), platforms=("cuda:sm90",)
)
class TorchScaledGroupedExperts(LoadedExperts):
    """torch's `scaled_grouped_mm` with a scale for each row of tokens and of weights, standard format."""

    facts = dataclasses.replace(_TORCH_FACTS, requires_multiple={"hidden_size": 16, "intermediate_size": 16})
    layouts = ("codes_row_scales",)

    def _load(self) -> Implementation:
        from moereg.backends._cutlass import torch_scaled

        return torch_scaled.ScaledGrouped(self)
