"""Registers the backend `cpu`: experts in 4 to 32 bits on CPUs, by kernels in C++ that read canonical weights in place.

The library is plain C over pointers (csrc/moereg_cpu.h). It picks kernels by what the processor has.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Final

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    Facts,
    MoEProblem,
    PermutedWeights,
    Platform,
    QuantFormat,
    QuantScheme,
    register_moe_backend,
)
from moereg_cpu.library import (
    ACTIVATIONS,
    FORMATS,
    Call,
    Layer,
    Matrix,
    current_threads,
    load_library,
    why_unavailable,
)

moereg_api = "1"
# What was verified is the sources, not what one compiler made of them.
CODE: Final = ("__init__.py", "backend.py", "library.py", "csrc/")

FP8_WEIGHTS: Final = (
    QuantScheme("fp8_tensor_w8a16", QuantFormat("float8_e4m3fn", (-1, -1))),
    QuantScheme("fp8_channel_w8a16", QuantFormat("float8_e4m3fn", (1, -1))),
    QuantScheme("fp8_block128_w8a16", QuantFormat("float8_e4m3fn", (128, 128))),
    QuantScheme("mxfp8_w8a16", QuantFormat("float8_e4m3fn", (1, 32), scale_dtype="float8_e8m0fnu")),
)
"""The formats of FP8 checkpoints, with activations left at 16 bits."""

INTEGER_PRODUCTS: Final = (
    *(f"int4_w4a16_g{group}{zero}" for group in (32, 64, 128, "all") for zero in ("", "_zp")),
    "int8_w8a16",
    "int8_w8a8",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)
"""Schemes whose products are of integers, at most 16-bit ones: exact enough for 16-bit layers, and not for fp32."""

_16_BITS: Final = ("bfloat16", "float16")

_FACTS: Final = Facts(
    activations=frozenset(ACTIVATIONS),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    deterministic=True,
    batch_invariant=True,
)


def _no_library(platform: Platform) -> str | None:
    return why_unavailable()


class _CpuExperts(Experts):
    """Reads the tensors of `ExpertWeights` where their owner keeps them."""

    wide_output = True
    wide_intermediate = True
    layouts: ClassVar[tuple[str, ...]] = ("canonical",)
    shared_layouts: ClassVar[tuple[str, ...]] = ("canonical",)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views of the canonical tensors; a static activation scale, which is not read, becomes one per expert."""
        tensors = weights.tensors()
        for name, scale in weights.tensors("activation_scale").items():
            tensors[name] = scale.expand(problem.num_local_experts).contiguous()
        return PermutedWeights("canonical", tensors)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sorted routes, packed rows, the intermediate and each route's output, in the second workspace."""
        is_batched = self.output_form == "per_expert"
        size = load_library().workspace_bytes(self._layer, num_tokens, is_batched, self._table)
        return (0,), (-(-size // problem.torch_dtype.itemsize),)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """See `Experts`."""
        # A copy, since layers that run in several threads may share this instance.
        layer = Layer.from_buffer_copy(self._layer)
        _point(layer.w13, weights, "w13")
        _point(layer.w2, weights, "w2")
        # A caller's own tensor has the problem's dtype, whatever `wide_output` says.
        layer.out_format = _format_of(out)
        hidden_states = inputs.hidden_states
        call = Call(
            hidden_states.data_ptr(),
            inputs.topk_weights.data_ptr(),
            inputs.topk_ids.data_ptr(),
            None if inputs.expert_map is None else inputs.expert_map.data_ptr(),
            None if inputs.expert_num_tokens is None else inputs.expert_num_tokens.data_ptr(),
            out.data_ptr(),
            workspace2.data_ptr(),
            hidden_states.shape[-2],
        )
        failed = load_library().run(layer, call, current_threads(), self._table)
        assert not failed, f"the library has no kernel for {self.problem.quant}"

    @functools.cached_property
    def _table(self) -> int:
        return load_library().table()

    @functools.cached_property
    def _layer(self) -> Layer:
        """The layer without its tensors' addresses."""
        problem, activation = self.problem, self.problem.activation
        inner, hidden = problem.intermediate_size, problem.hidden_size
        return Layer(
            w13=_matrix(problem, self.computes, activation.num_halves * inner, hidden, activation.num_halves),
            w2=_matrix(problem, self.computes, hidden, inner, 1),
            num_experts=problem.num_experts,
            num_local_experts=problem.num_local_experts,
            top_k=problem.top_k,
            format=FORMATS[problem.dtype],
            activation=ACTIVATIONS[activation.name],
            scales_input=problem.apply_router_weight_on_input,
            has_limit=activation.limit is not None,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit or 0.0,
            gate_softcap=activation.gate_softcap or 0.0,
            up_softcap=activation.up_softcap or 0.0,
        )


def _matrix(problem: MoEProblem, computes: QuantScheme, rows: int, columns: int, halves: int) -> Matrix:
    fmt, invariant = problem.quant.weight, problem.batch_invariant
    if fmt is None:
        return Matrix(rows=rows, columns=columns, format=FORMATS[problem.dtype], batch_invariant=invariant)
    group_rows, group_columns = (max(extent, 0) for extent in fmt.group)
    return Matrix(
        rows=rows,
        columns=columns,
        format=FORMATS[fmt.dtype],
        scale_format=FORMATS[fmt.scale_dtype],
        group_columns=group_columns,
        group_rows=group_rows,
        scale_halves=halves,
        rounds_tokens=computes.activation is not None,
        batch_invariant=invariant,
    )


def _point(matrix: Matrix, weights: PermutedWeights, name: str) -> None:
    """Fills in the addresses of one matrix's tensors, and what only their shapes tell."""
    tensors = weights.per_expert
    matrix.weight = weights[name].data_ptr()
    for role in ("scale", "scale_2", "zero_point", "bias"):
        if f"{name}_{role}" in tensors:
            setattr(matrix, role, weights[f"{name}_{role}"].data_ptr())
    if matrix.bias is not None:
        matrix.bias_format = _format_of(weights[f"{name}_bias"])
    if matrix.scale is not None and matrix.group_rows == 0:
        matrix.scale_halves = _halves(weights[f"{name}_scale"])
    if matrix.scale_2 is not None:
        matrix.scale_2_halves = _halves(weights[f"{name}_scale_2"])


def _format_of(tensor: torch.Tensor) -> int:
    return FORMATS[str(tensor.dtype).removeprefix("torch.")]


def _halves(scale: torch.Tensor) -> int:
    """Scales of a matrix, 2 where gate and up have their own."""
    return scale.shape[1] if scale.dim() == 2 else 1


@register_moe_backend(
    name="cpu", priority=70, quant_schemes=("unquantized", *FP8_WEIGHTS), platforms=("cpu",), probes=(_no_library,)
)
@register_moe_backend(
    name="cpu",
    priority=70,
    quant_schemes=INTEGER_PRODUCTS,
    platforms=("cpu",),
    probes=(_no_library,),
    dtypes=_16_BITS,
)
class CpuExperts(_CpuExperts):
    """Standard format: routes are sorted, and each expert with rows is read once, by all threads."""

    facts = _FACTS


@register_moe_backend(
    name="cpu", priority=69, quant_schemes=("unquantized", *FP8_WEIGHTS), platforms=("cpu",), probes=(_no_library,)
)
@register_moe_backend(
    name="cpu",
    priority=69,
    quant_schemes=INTEGER_PRODUCTS,
    platforms=("cpu",),
    probes=(_no_library,),
    dtypes=_16_BITS,
)
class CpuBatchedExperts(_CpuExperts):
    """Batched format: likewise, on the rows that prepare laid out for each expert."""

    facts = dataclasses.replace(_FACTS, activation_formats=frozenset({"batched"}), batch_invariant=False)
    output_form = "per_expert"
