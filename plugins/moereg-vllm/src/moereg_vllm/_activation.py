"""moereg's activations by vLLM's kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moereg_vllm._library import vllm_module

if TYPE_CHECKING:
    from moereg.author import MoEProblem

__all__ = ["activate", "is_sigmoid_gate"]


def is_sigmoid_gate(problem: MoEProblem) -> bool:
    """Whether the activation is `g * sigmoid(alpha * g) * (u + beta)`, clamped or not."""
    return problem.activation.name in ("silu", "swigluoai")


def activate(problem: MoEProblem, out: torch.Tensor, gemm1: torch.Tensor) -> None:
    """Applies the problem's activation.

    Args:
        problem: The layer.
        out: [R,I]; overwritten.
        gemm1: [R,2I] gate first, or [R,I]; clamped in place where the activation is.
    """
    vllm_module("_custom_ops")  # Registers the operations of torch.ops._C.
    activation, ops = problem.activation, torch.ops._C
    limit = activation.limit
    if activation.name == "relu2":
        torch.square(gemm1.relu_(), out=out)
    elif is_sigmoid_gate(problem):
        if limit is None and (activation.alpha, activation.beta) == (1.0, 0.0):
            ops.silu_and_mul(out, gemm1)
        else:
            ops.silu_and_mul_with_clamp(
                out, gemm1, math.inf if limit is None else limit, activation.alpha, activation.beta
            )
    else:
        if limit is not None:
            gate, up = gemm1.chunk(2, dim=-1)
            gate.clamp_(max=limit)
            up.clamp_(min=-limit, max=limit)
        (ops.gelu_and_mul if activation.name == "gelu" else ops.gelu_tanh_and_mul)(out, gemm1)
