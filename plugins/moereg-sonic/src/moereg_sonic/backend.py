"""Registers the backend `sonic`: SonicMoE's forward kernels, bfloat16 on sm90.

SonicMoE sorts the routes. Its first product gathers its rows by route and applies the activation, the second one reads
them in order; both are QuACK's, which compiles their tiles at the first call of a layer and times them at the first
one with each number of tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    Facts,
    MoEProblem,
    PermutedWeights,
    Platform,
    interleave_gate_up,
    register_moe_backend,
)

moereg_api = "1"

_IMPORTED: Final = ("sonicmoe", "quack", "cutlass", "cuda")


def cannot_be_imported(platform: Platform) -> str | None:
    """The reason that SonicMoE cannot be imported here, or None. Looks for packages, imports none."""
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"requires the packages {', '.join(_IMPORTED)}, found no {' or '.join(missing)}; install SonicMoE without its "
        "requirements, as the README of moereg-sonic does"
    )


@register_moe_backend(
    name="sonic",
    priority=40,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm90",),
    # SonicMoE names one CuTe DSL, whose language changes between minor versions; QuACK goes with the language.
    requires=("sonic-moe>=0.1.2,<0.2", "quack-kernels>=0.4.1,<0.5", "nvidia-cutlass-dsl>=4.4.2,<4.5", "triton>=3.6"),
    probes=(cannot_be_imported,),
)
class SonicExperts(Experts):
    """Routes sorted, and both products computed, by SonicMoE; summed by a small Triton kernel."""

    facts = Facts(
        activations=frozenset({"silu", "gelu_tanh"}),
        dtypes=frozenset({"bfloat16"}),
        activation_formats=frozenset({"standard"}),
        placements=frozenset({"contiguous", "map"}),
        requires_multiple={"hidden_size": 64, "intermediate_size": 64},
        graph_capture=True,
    )
    layouts = ("sonic_gate_up_interleaved",)

    @functools.cached_property
    def _layer(self) -> Any:
        # Loads SonicMoE, CuTe DSL and Triton, so only where a layer runs.
        from moereg_sonic.layer import SonicLayer

        return SonicLayer(self.problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """See `Experts`. Interleaves gate and up rows; w2 is the given tensor."""
        return PermutedWeights(self.layouts[0], {"w13": interleave_gate_up(weights.w13), "w2": weights.w2})

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts`."""
        num_routes = num_tokens * problem.top_k
        return (num_routes, problem.hidden_size), (num_routes, problem.intermediate_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """See `Experts`."""
        self._layer.run(out, inputs, weights, workspace13, workspace2)
