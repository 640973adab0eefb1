"""`triton_kernels`: Triton's own matmul library for gpt-oss, in the copy that vLLM ships."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    MoEProblem,
    PermutedWeights,
    Platform,
    interleave_gate_up,
    register_moe_backend,
)
from moereg_vllm._activation import activate
from moereg_vllm._claims import FACTS, REQUIRES
from moereg_vllm._library import fused_moe, vllm_module
from moereg_vllm._routes import local_routes

__all__ = ["TritonKernelsExperts", "moereg_api"]

moereg_api = "1"

_GROUP: Final = 32
_NARROWEST: Final = 128
"""The library takes blocks of 128 columns or fewer for outputs up to this wide, which cannot hold scales of 8 warps."""

_WARPS: Final = 8
"""Warps of a program, which the order of the scales is for."""


# Below moereg's own kernels, above Marlin, as vLLM orders them on Hopper.
@register_moe_backend(
    name="triton_kernels", priority=50, quant_schemes=("mxfp4_w4a16",), platforms=("cuda:sm90",), requires=REQUIRES
)
class TritonKernelsExperts(Experts):
    """Standard format: rows gathered by the first matmul, scattered and summed by the second.

    The activation of gpt-oss runs in the first matmul, on alternating columns of gate and up; others have a launch of
    their own. Routing weights are rounded to bfloat16.
    """

    facts = dataclasses.replace(
        FACTS,
        activations=FACTS.activations - {"relu2"},
        dtypes=frozenset({"bfloat16"}),
        requires_multiple={"hidden_size": 64, "intermediate_size": 64},
    )
    layouts = ("triton_kernels_hopper_alternating", "triton_kernels_hopper")

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Outputs too narrow for a block of scales, which does not compile."""
        reasons = []
        if problem.hidden_size <= _NARROWEST:
            reasons.append(f"requires hidden_size > {_NARROWEST}, got {problem.hidden_size}")
        if 2 * problem.intermediate_size <= _NARROWEST:
            reasons.append(f"requires intermediate_size > {_NARROWEST // 2}, got {problem.intermediate_size}")
        return reasons

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Swizzles expert by expert with vLLM's function."""
        tensors: dict[str, torch.Tensor] = {}
        for matrix in ("w13", "w2"):
            order = _alternating if self._is_fused and matrix == "w13" else _as_it_is
            given = weights.tensors()
            tensors[matrix], tensors[f"{matrix}_scale"] = _swizzled(given[matrix], given[f"{matrix}_scale"], order)
            if (bias := given.get(f"{matrix}_bias")) is not None:
                tensors[f"{matrix}_bias"] = order(bias.float().unsqueeze(-1)).squeeze(-1)
        return PermutedWeights(self.layouts[0 if self._is_fused else 1], tensors)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Output of the first matmul, where the activation is not in it, and the intermediate."""
        rows = num_tokens * problem.top_k
        return (0 if self._is_fused else rows, 2 * problem.intermediate_size), (rows, problem.intermediate_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """As vLLM's layer calls the library."""
        problem = self.problem
        routes = local_routes(inputs, problem)
        layer = fused_moe("experts.gpt_oss_triton_kernels_moe")
        routing, gather, scatter = layer.make_routing_data(
            routes.topk_ids, routes.topk_weights, problem.num_local_experts
        )
        num_tokens, top_k = routes.topk_ids.shape
        rows = num_tokens * top_k
        hidden, intermediate = problem.hidden_size, problem.intermediate_size
        w13, w13_precision = self._operands("w13", weights, hidden, 2 * intermediate)
        w2, w2_precision = self._operands("w2", weights, intermediate, hidden)
        middle = workspace2.view(-1)[: rows * intermediate].view(rows, intermediate)
        if self._is_fused:
            activation = problem.activation
            layer.triton_kernel_fused_experts(
                out,
                routes.hidden_states,
                w13,
                w2,
                routing,
                gather,
                scatter,
                topk=top_k,
                quant_config=types.SimpleNamespace(
                    w1_bias=weights.get("w13_bias"),
                    w2_bias=weights.get("w2_bias"),
                    w1_precision=w13_precision,
                    w2_precision=w2_precision,
                ),
                swiglu_alpha=activation.alpha,
                swiglu_limit=activation.limit,
                intermediate_cache=middle,
            )
            return
        gemm1 = workspace13.view(-1)[: rows * 2 * intermediate].view(1, rows, 2 * intermediate)
        layer.matmul_ogs(
            routes.hidden_states,
            w13,
            weights.get("w13_bias"),
            routing,
            gather_indx=gather,
            precision_config=w13_precision,
            y=gemm1,
        )
        activate(problem, middle, gemm1[0])
        layer.matmul_ogs(
            middle,
            w2,
            weights.get("w2_bias"),
            routing,
            scatter_indx=scatter,
            precision_config=w2_precision,
            gammas=routing.gate_scal,
            y=out.view(1, num_tokens, hidden),
        )

    @property
    def _is_fused(self) -> bool:
        return self.problem.activation.name == "swigluoai"

    def _operands(self, matrix: str, weights: PermutedWeights, columns: int, rows: int) -> tuple[Any, Any]:
        """A matrix [E,columns,rows] as the library's tensor, and the precision, which holds its scales."""
        vllm_module("utils.import_utils").has_triton_kernels()  # Makes the copy importable by its own name.
        from triton_kernels.matmul_ogs import PrecisionConfig
        from triton_kernels.tensor import FP4, Storage, Tensor
        from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

        experts, groups = self.problem.num_local_experts, columns // _GROUP
        values = HopperMXValueLayout([experts, columns // 2, rows], mx_axis=1)
        scales = HopperMXScaleLayout([experts, groups, rows], mx_axis=1, num_warps=_WARPS)
        tensor = Tensor(Storage(weights[matrix].mT, values), dtype=FP4, shape=[experts, columns, rows])
        scale = Tensor(Storage(weights[f"{matrix}_scale"].mT, scales), shape=[experts, groups, rows])
        return tensor, PrecisionConfig(weight_scale=scale)


def _as_it_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Rows [E,2I,...] of gate and up in turn."""
    return interleave_gate_up(rows)


def _swizzled(
    weight: torch.Tensor, scale: torch.Tensor, order: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The storage of all experts' codes and scales, rows first: the library reads both transposed."""
    swizzle = vllm_module("model_executor.layers.quantization.utils.mxfp4_utils")._swizzle_mxfp4
    stacked: list[torch.Tensor] = []
    for expert in range(weight.shape[0]):
        one = slice(expert, expert + 1)
        values, _, scales = swizzle(order(weight[one]), order(scale[one].view(torch.uint8)), num_warps=_WARPS)
        parts = [values.storage.data.mT[0], scales.storage.data.mT[0]]
        stacked = stacked or [part.new_empty((weight.shape[0], *part.shape)) for part in parts]
        for target, part in zip(stacked, parts, strict=True):
            target[expert] = part
    return stacked[0], stacked[1]
