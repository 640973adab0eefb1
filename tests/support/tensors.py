"""Tensors that kernels seldom meet."""

from __future__ import annotations

import math

import torch


def unaligned(*shape: int) -> torch.Tensor:
    """A contiguous tensor [*shape] of bfloat16 that begins behind the first element of its memory."""
    tensor = torch.empty(math.prod(shape) + 1, dtype=torch.bfloat16)[1:].view(shape)
    assert tensor.data_ptr() % 16 != 0
    return tensor
