"""Refuses a run that would not fit, before anything of it is allocated."""

from __future__ import annotations

from typing import Final

import torch

from moereg.errors import TooLargeError
from moereg.memory import format_bytes, free_memory_bytes
from moereg.problem import MoEProblem
from moereg.tuning.roofline import expert_bytes

__all__ = ["check_run_fits"]

_MAX_FRACTION: Final = 0.6


def check_run_fits(
    problem: MoEProblem, num_tokens: int, device: torch.device, num_kernels: int = 1, num_calls: int = 1
) -> None:
    """Checks that the layer's weights, one expert in fp32 and the tokens fit into free memory.

    Args:
        problem: The layer, whose weights take memory once in canonical order and once permuted for each kernel.
        num_tokens: Tokens of one call.
        device: Device to run on.
        num_kernels: Number of kernels at the same time.
        num_calls: Number of inputs and outputs at the same time.

    Raises:
        TooLargeError: They take more than 60 % of it; the message has the size and the option that makes it smaller.
    """
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    one_bytes = expert_bytes(problem)
    numbers = problem.activation.num_halves * problem.intermediate_size * problem.hidden_size
    fp32_bytes = (numbers + problem.hidden_size * problem.intermediate_size) * torch.float32.itemsize
    tokens_bytes = _tokens_bytes(problem, num_tokens, num_calls)
    limit_bytes = _MAX_FRACTION * free_bytes
    copies = 1 + num_kernels
    layer_bytes = copies * problem.num_local_experts * one_bytes + fp32_bytes
    if layer_bytes + tokens_bytes <= limit_bytes:
        return
    cures = []
    num_fitting = int((limit_bytes - fp32_bytes - tokens_bytes) // (copies * one_bytes))
    if 1 <= num_fitting < problem.num_local_experts:
        cures.append(f"--num-local-experts {num_fitting}")
    is_quantized = problem.quant.weight is not None
    if problem.dtype == "float32" and not is_quantized:
        cures.append("--dtype bfloat16")
    if num_kernels > 1:
        cures.append("--require with fewer backends")
    if tokens_bytes > layer_bytes:
        cures.append("a smaller --tokens")
    stored = problem.quant.name if is_quantized else problem.dtype
    permuted = f"permuted for {num_kernels} kernels" if num_kernels > 1 else "permuted"
    raise TooLargeError(
        f"a run of this layer needs {format_bytes(layer_bytes + tokens_bytes)} ({problem.num_local_experts} experts of "
        f"{format_bytes(one_bytes)} in {stored}, canonical and {permuted}, and {num_tokens} tokens), over "
        f"{_MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on {device}; "
        f"{'pass ' + ' or '.join(cures) if cures else 'free memory or use a larger machine'}"
    )


def _tokens_bytes(problem: MoEProblem, num_tokens: int, num_calls: int) -> int:
    """Inputs, outputs and intermediate rows of a call, the reference's fp32 and the comparison's fp64 copies."""
    itemsize = problem.torch_dtype.itemsize
    per_call = 2 * problem.hidden_size * itemsize
    once = problem.hidden_size * (2 * torch.float32.itemsize + 2 * torch.float64.itemsize)
    rows = num_tokens * (problem.num_local_experts if problem.activation_format == "batched" else problem.top_k)
    per_row = 2 * problem.hidden_size + (problem.activation.num_halves + 1) * problem.intermediate_size
    return num_tokens * (num_calls * per_call + once) + rows * per_row * itemsize
