"""4-bit integers with e4m3 activations (W4A8) on FlashInfer's CUTLASS kernels, beside the cells of `flashinfer_moe`.

- `flashinfer_cutlass`: FlashInfer's CUTLASS kernels, built on request and tuned by timing
"""

from __future__ import annotations

import dataclasses

from moereg.backends._flashinfer.loading import KernelsProbe
from moereg.backends._flashinfer.package import REQUIRES, can_be_imported
from moereg.backends._loaded import Implementation
from moereg.backends.flashinfer_moe import FlashInferCutlassFp8Experts
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend

__all__ = ["FlashInferCutlassInt4Experts"]


# No machine has run it, so it is opt-in, and behind kernels that keep activations at 16 bits until it is measured.
@register_moe_backend(
    name="flashinfer_cutlass",
    priority=48,
    quant_schemes=("int4_w4a8_g128",),
    platforms=("cuda:sm90",),
    requires=(REQUIRES,),
    probes=(can_be_imported, KernelsProbe("int4_w4a8_g128", "--quant int4_w4a8_g128")),
    opt_in=True,
)
class FlashInferCutlassInt4Experts(FlashInferCutlassFp8Experts):
    """4-bit integers in groups of 128 and static e4m3 activations, standard format. Group scales become bf16."""

    facts = dataclasses.replace(
        FlashInferCutlassFp8Experts.facts,
        # Its clamp and beta are those that `unsupported_reasons` speaks of.
        activations=FlashInferCutlassFp8Experts.facts.activations - {"swigluoai"},
        dtypes=frozenset({"bfloat16"}),
    )
    layouts = ("flashinfer_hopper_int4_up_gate_pad128",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """A clamp or beta of any activation: scales of the intermediate go into the up rows, which neither follows."""
        activation = problem.activation
        if activation.limit is None and not activation.beta:
            return []
        return [f"requires no clamp and beta=0, since scales of the intermediate go into up rows, got {activation}"]

    def _load(self) -> Implementation:
        from moereg.backends._flashinfer import cutlass_int4

        return cutlass_int4.Int4W4A8(self)
