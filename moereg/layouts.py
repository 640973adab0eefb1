"""Pure reorderings of expert weights that two or more backends use."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["ALIGNMENT", "aligned", "deinterleave_gate_up", "interleave_gate_up", "pad_columns", "round_up"]


ALIGNMENT: Final = 16
"""Bytes. Boxes of Hopper's copy engine begin at multiples of this, and so do loads of whole vectors."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A view where the tensor is contiguous and begins at a multiple of `ALIGNMENT`, else a copy that does.

    A slice of a larger tensor may begin anywhere; allocators begin at multiples of far more. The strides are those of
    a new tensor, also of dimensions of size 1, which may have any and count as contiguous.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
    return tensor.clone(memory_format=torch.contiguous_format)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def interleave_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """Rows [g0..gI-1, u0..uI-1] become [g0, u0, g1, u1, ...].

    Args:
        w13 [..., 2I, H] weights or, with H absent, [..., 2I] biases given as [..., 2I, 1].

    Returns:
        Same shape, a new contiguous tensor.
    """
    gate, up = w13.chunk(2, dim=-2)
    return torch.stack((gate, up), dim=-2).flatten(-3, -2)


def deinterleave_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """Inverse of `interleave_gate_up`; checkpoints such as gpt-oss store the interleaved order.

    Args:
        w13 [..., 2I, H], rows alternate gate and up.

    Returns:
        Same shape, gate rows first, a new contiguous tensor.
    """
    return torch.cat((w13[..., 0::2, :], w13[..., 1::2, :]), dim=-2)


def pad_columns(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Zero-pads the last dimension to `columns`; a view of the same tensor where nothing is missing."""
    missing = columns - weight.shape[-1]
    if missing < 0:
        raise ValueError(f"columns must be at least the {weight.shape[-1]} that are there, got {columns}")
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight
