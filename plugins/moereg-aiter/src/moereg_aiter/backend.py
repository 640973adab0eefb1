"""Registers the backend `aiter`: AMD's own kernels for Instinct GPUs, assembly and composable_kernel behind one call.

Written against the published source of AITER 0.1.20, compared with that of 0.1.16 to 0.1.20.post1, and not run on any
GPU yet.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import torch

from moereg.author import ExpertInputs, Experts, ExpertWeights, Facts, MoEProblem, PermutedWeights, register_moe_backend
from moereg_aiter.package import REQUIRES, can_be_imported, can_load_kernels
from moereg_aiter.weights import permuted_fp8, shuffled

__all__ = ["AiterExperts", "AiterFp8Experts"]

moereg_api = "1"

_FNUZ_ARCHS: Final = ("gfx942",)

_FACTS: Final = Facts(
    # AITER has others in some of its kernels: which gelu it is, and which kernels clamp, differs between them, and its
    # Swiglu is that of mxfp4 weights alone.
    activations=frozenset({"silu"}),
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    # Its mask says which experts are here and no map in what order, so ids are made local first.
    placements=frozenset({"contiguous", "map"}),
    # What AITER is tuned for, and what its users pad to.
    requires_multiple={"hidden_size": 128, "intermediate_size": 128},
    # Engines capture it. Sums over a token's experts are atomic, so their order varies.
    graph_capture=True,
)


# Not measured: AITER never ran here, so that it is nobody's default. Neither did Triton's kernels on gfx942, which go
# first since their numbers are tested on a CPU.
@register_moe_backend(
    name="aiter",
    priority=55,
    quant_schemes=("unquantized",),
    platforms=("rocm:gfx942", "rocm:gfx950"),
    requires=REQUIRES,
    probes=(can_be_imported, can_load_kernels),
    opt_in=True,
)
class AiterExperts(Experts):
    """16-bit weights in tiles of 16 rows."""

    facts = _FACTS
    layouts = ("aiter_shuffled",)

    @functools.cached_property
    def _layer(self) -> Any:
        # Loads AITER, so only where a layer runs.
        from moereg_aiter.layer import AiterLayer

        return AiterLayer(self.problem, self.computes)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """See `Experts`. Both matrices in AITER's order; a pure permutation."""
        return PermutedWeights(self.layouts[0], {"w13": shuffled(weights.w13), "w2": shuffled(weights.w2)})

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts`. None: AITER allocates from torch's allocator, also while a graph is captured."""
        return (0,), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """See `Experts`."""
        self._layer.run(out, inputs, weights)


# Nothing else serves these schemes there. `fp8_tensor_dynamic` is left out: AITER's scale spans rows that no expert of
# this rank has written.
@register_moe_backend(
    name="aiter",
    priority=55,
    quant_schemes=("fp8_tensor_static", "fp8_channel_token"),
    platforms=("rocm:gfx950",),
    requires=REQUIRES,
    probes=(can_be_imported, can_load_kernels),
    opt_in=True,
)
# Some sizes with few tokens (Qwen3-Next's among them) are tuned to kernels that sort no routes. They read the ids that
# are given and no mask, so that experts of other ranks would index weights that are not there.
@register_moe_backend(
    name="aiter",
    priority=55,
    quant_schemes=("fp8_block128",),
    platforms=("rocm:gfx950",),
    requires=REQUIRES,
    probes=(can_be_imported, can_load_kernels),
    opt_in=True,
    held_experts=("all",),
)
# gfx942's own float ends at 240 and not at 448. With dynamic scales it rounds activations to other numbers than the
# scheme's: an imitation had 1.1 to 1.2 times the error that `moereg.numerics.tolerances` allows. Static scales keep the
# numbers up to the scheme's largest; what is beyond it is clamped at 480 times the scale and not at 448.
@register_moe_backend(
    name="aiter",
    priority=55,
    quant_schemes=("fp8_tensor_static",),
    platforms=("rocm:gfx942",),
    requires=REQUIRES,
    probes=(can_be_imported, can_load_kernels),
    opt_in=True,
)
class AiterFp8Experts(AiterExperts):
    """8-bit floats in tiles of 16 rows; gfx942 has a float of its own."""

    facts = dataclasses.replace(_FACTS, dtypes=frozenset({"bfloat16"}))
    layouts = ("aiter_shuffled", "aiter_shuffled_fnuz")

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """See `Experts`. Codes in AITER's order, on gfx942 as its own 8-bit float."""
        is_fnuz = self.platform.arch in _FNUZ_ARCHS
        return PermutedWeights(self.layouts[is_fnuz], *permuted_fp8(weights, is_fnuz))
