"""4-bit integers with e4m3 activations (W4A8) on FlashInfer's CUTLASS kernels, beside the cells of `flashinfer_moe`.

- `flashinfer_cutlass`: FlashInfer's CUTLASS kernels, built on request and tuned by timing
"""

from __future__ import annotations

from moereg.backends._flashinfer.loading import KernelsProbe
from moereg.backends._flashinfer.package import REQUIRES, can_be_imported
from moereg.backends._loaded import Implementation, LoadedExperts
from moereg.experts import Facts
from moereg.platforms import Platform
from moereg.registry import register_moe_backend
from moereg.spec.problem import MoEProblem

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
class FlashInferCutlassInt4Experts(LoadedExperts):
    """4-bit integers in groups of 128 and static e4m3 activations, standard format. Group scales become bf16."""

    # As the backend's other cells, but for what `unsupported_reasons` speaks of: clamp and beta make swigluoai.
    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        bias=True,
        placements=frozenset({"contiguous"}),
        graph_capture=True,
        deterministic=True,
        max_experts=1024,
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
