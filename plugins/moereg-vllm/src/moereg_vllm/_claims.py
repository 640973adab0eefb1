"""Claims shared by the backends of this wheel."""

from __future__ import annotations

from typing import Final

from moereg.author import Facts, MoEProblem

__all__ = ["ALIGNED_EXPERTS", "FACTS", "REQUIRES", "sorting_reasons"]

REQUIRES: Final = ("vllm>=0.26,<0.27",)
"""vLLM moves the functions that its layers call from release to release."""

ALIGNED_EXPERTS: Final = 991
"""vLLM's sort has one thread an expert and pads their number to a multiple of 32 below 1024; one is for no expert."""

# Equal bits are not claimed: the order of an expert's rows is that of atomic additions.
FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
    swiglu_limit=True,
    bias=True,
    dtypes=frozenset({"bfloat16", "float16"}),
    activation_formats=frozenset({"standard"}),
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    max_experts=ALIGNED_EXPERTS,
)


def sorting_reasons(problem: MoEProblem) -> list[str]:
    """Why vLLM's sort of routes by expert cannot serve a problem: it counts other ranks' experts too."""
    if problem.num_experts <= ALIGNED_EXPERTS:
        return []
    return [f"requires num_experts <= {ALIGNED_EXPERTS}, got {problem.num_experts}"]
