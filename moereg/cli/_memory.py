"""Refuses a run that would not fit, before anything of it is allocated."""

from __future__ import annotations

import math
from typing import Final

import torch

from moereg.errors import TooLargeError
from moereg.memory import format_bytes, free_memory_bytes
from moereg.problem import MoEProblem

__all__ = ["check_run_fits", "expert_bytes"]

_MAX_FRACTION: Final = 0.6


def expert_bytes(problem: MoEProblem) -> int:
    """Bytes of the canonical weights of one expert."""
    activation = problem.activation
    rows = problem.quant.tensor_rows(
        1, problem.hidden_size, problem.intermediate_size, activation.num_halves, problem.has_bias
    )
    return sum(math.prod(row.shapes[0]) * (row.dtype or problem.torch_dtype).itemsize for row in rows)


def check_run_fits(problem: MoEProblem, num_tokens: int, device: torch.device) -> None:
    """Checks that the layer twice, canonical and permuted, one expert in fp32 and the tokens fit into free memory.

    Raises:
        TooLargeError: They take more than 60 % of it; the message has the size and the option that makes it smaller.
    """
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    one_bytes = expert_bytes(problem)
    fp32_bytes = one_bytes * torch.float32.itemsize // problem.torch_dtype.itemsize
    tokens_bytes = _tokens_bytes(problem, num_tokens)
    layer_bytes = 2 * problem.num_local_experts * one_bytes + fp32_bytes
    limit_bytes = _MAX_FRACTION * free_bytes
    if layer_bytes + tokens_bytes <= limit_bytes:
        return
    cures = []
    num_fitting = int((limit_bytes - fp32_bytes - tokens_bytes) // (2 * one_bytes))
    if 1 <= num_fitting < problem.num_local_experts:
        cures.append(f"--num-local-experts {num_fitting}")
    if problem.dtype == "float32":
        cures.append("--dtype bfloat16")
    if tokens_bytes > layer_bytes:
        cures.append("a smaller --tokens")
    raise TooLargeError(
        f"a run of this layer needs {format_bytes(layer_bytes + tokens_bytes)} ({problem.num_local_experts} experts of "
        f"{format_bytes(one_bytes)} in {problem.dtype}, canonical and permuted, and {num_tokens} tokens), over "
        f"{_MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on {device}; "
        f"{'pass ' + ' or '.join(cures) if cures else 'free memory or use a larger machine'}"
    )


def _tokens_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """Inputs, outputs and intermediate rows of a call, the reference's fp32 and the comparison's fp64 copies."""
    itemsize = problem.torch_dtype.itemsize
    per_token = problem.hidden_size * (2 * itemsize + 2 * torch.float32.itemsize + 2 * torch.float64.itemsize)
    rows = num_tokens * (problem.num_local_experts if problem.activation_format == "batched" else problem.top_k)
    per_row = 2 * problem.hidden_size + (problem.activation.num_halves + 1) * problem.intermediate_size
    return num_tokens * per_token + rows * per_row * itemsize
