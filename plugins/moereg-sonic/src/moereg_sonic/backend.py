"""Registers the backend `sonic`: SonicMoE's forward kernels, bfloat16 on sm90.

The first product gathers its rows by route and applies the activation, the second one reads them in order. Kernels are
compiled by CuTe DSL at their first use, one for each layer shape.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

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

MIN_HIDDEN_SIZE = 512
"""SonicMoE asserts it."""


def no_sonicmoe(platform: Platform) -> str | None:
    """The reason that SonicMoE cannot be imported here, or None. Looks for packages, imports none."""
    missing = [name for name in ("sonicmoe", "quack") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"requires the packages sonicmoe and quack, found no {' or '.join(missing)}; install SonicMoE from "
        "github.com/Dao-AILab/sonic-moe with its requirements.txt, since it is not on the package index"
    )


@register_moe_backend(
    name="sonic",
    priority=40,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm90",),
    # CuTe DSL changes its language between minor versions.
    requires=("nvidia-cutlass-dsl>=4.2.1,<4.3", "triton>=3.6"),
    probes=(no_sonicmoe,),
)
class SonicExperts(Experts):
    """Both products by SonicMoE; routes sorted by torch, and summed by a small Triton kernel."""

    facts = Facts(
        activations=frozenset({"silu", "gelu_tanh", "relu2"}),
        dtypes=frozenset({"bfloat16"}),
        activation_formats=frozenset({"standard"}),
        placements=frozenset({"contiguous", "map"}),
        requires_multiple={"hidden_size": 64, "intermediate_size": 64},
        graph_capture=True,
    )
    layouts = ("sonic_gate_up_interleaved",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """See `Experts`."""
        reasons = []
        if problem.hidden_size < MIN_HIDDEN_SIZE:
            reasons.append(f"requires hidden_size >= {MIN_HIDDEN_SIZE}, got {problem.hidden_size}")
        if not problem.activation.gated and problem.intermediate_size % 128:
            reasons.append(f"requires intermediate_size % 128 == 0 where not gated, got {problem.intermediate_size}")
        return reasons

    @functools.cached_property
    def _layer(self) -> Any:
        # Loads SonicMoE, CuTe DSL and Triton, so only where a layer runs.
        from moereg_sonic.layer import SonicLayer

        return SonicLayer(self.problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """See `Experts`. Interleaves gate and up rows; w2 is the given tensor."""
        w13 = interleave_gate_up(weights.w13) if problem.activation.gated else weights.w13
        return PermutedWeights(self.layouts[0], {"w13": w13, "w2": weights.w2})

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts`."""
        num_routes, num_halves = num_tokens * problem.top_k, problem.activation.num_halves
        # SonicMoE takes the first product's output as an argument even where it does not write it.
        num_columns = max(num_halves * problem.intermediate_size, problem.hidden_size)
        return (num_routes, num_columns), (num_routes, problem.intermediate_size)

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
