"""Registers the backend `humming`: weight-only quantized experts on NVIDIA GPUs from Turing on.

Humming multiplies by indices: each tile of rows belongs to one expert, and its rows are gathered by their routes. Its
kernels are compiled by NVRTC or nvcc at their first use, one for each layer shape and range of rows, and kept on disk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    Facts,
    MoEProblem,
    PermutedWeights,
    QuantFormat,
    QuantScheme,
    register_moe_backend,
)
from moereg_humming.buffers import Buffers
from moereg_humming.formats import whole_blocks
from moereg_humming.toolchain import no_compiler

moereg_api = "1"

FP8_WEIGHTS = (
    QuantScheme("fp8_tensor_w8a16", QuantFormat("float8_e4m3fn", (-1, -1))),
    QuantScheme("fp8_channel_w8a16", QuantFormat("float8_e4m3fn", (1, -1))),
    QuantScheme("fp8_block128_w8a16", QuantFormat("float8_e4m3fn", (128, 128))),
    QuantScheme("mxfp8_w8a16", QuantFormat("float8_e4m3fn", (1, 32), scale_dtype="float8_e8m0fnu")),
)
"""The formats of FP8 checkpoints, with activations left at 16 bits."""

SCHEMES = (
    *(f"int4_w4a16_g{group}{zero}" for group in (32, 64, 128, "all") for zero in ("", "_zp")),
    "int8_w8a16",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
    *FP8_WEIGHTS,
)

_REQUIRES = ("humming-kernels>=0.1.19,<0.2", "triton>=3.6")


@register_moe_backend(
    name="humming",
    priority=30,
    quant_schemes=SCHEMES,
    platforms=("cuda:sm80+",),
    requires=_REQUIRES,
    probes=(no_compiler,),
)
@register_moe_backend(
    name="humming",
    priority=30,
    quant_schemes=SCHEMES,
    platforms=("cuda:sm75",),
    requires=_REQUIRES,
    probes=(no_compiler,),
    dtypes=("float16",),
)
class HummingIndexedExperts(Experts):
    """Both products by Humming's indexed GEMM; routes, activation and weighted sum by small Triton kernels."""

    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        bias=True,
        dtypes=frozenset({"bfloat16", "float16"}),
        activation_formats=frozenset({"standard"}),
        placements=frozenset({"contiguous", "map"}),
        router_weight_on_input=True,
        # Rows are read and written in vectors of 16 bytes.
        requires_multiple={"hidden_size": 8, "intermediate_size": 8},
        graph_capture=True,
        deterministic=True,
    )
    layouts = ("humming_indexed",)

    @functools.cached_property
    def _layer(self) -> Any:
        # Loads Humming and Triton, so only where weights are permuted or a layer runs.
        from moereg_humming.layer import IndexedLayer

        return IndexedLayer(self.problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """See `Experts`."""
        return PermutedWeights(self.layouts[0], self._layer.permute(weights))

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts`."""
        buffers = Buffers(whole_blocks(problem), num_tokens)
        return (buffers.num_products,), (buffers.num_intermediate,)

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
