"""Tensors that kernels seldom meet."""

from __future__ import annotations

import math

import torch


def unaligned(*shape: int) -> torch.Tensor:
    """A contiguous tensor [*shape] of bfloat16 that begins behind the first element of its memory."""
    tensor = torch.empty(math.prod(shape) + 1, dtype=torch.bfloat16)[1:].view(shape)
    assert tensor.data_ptr() % 16 != 0
    return tensor


def split_columns(rows: torch.Tensor, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The inverse of `moereg.prepare_finalize.wire.join_columns`: contiguous columns, each aligned for any dtype."""
    if len(widths) == 1 and rows.is_contiguous() and rows.storage_offset() == 0:
        return (rows,)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, dim=1))
