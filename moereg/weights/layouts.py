"""Pure reorderings of expert weights that two or more backends use."""

from __future__ import annotations

from typing import Final

import torch

from moereg.errors import ArgumentError

__all__ = ["ALIGNMENT", "aligned", "deinterleave_gate_up", "in_place", "interleave_gate_up", "pad_columns", "round_up"]


ALIGNMENT: Final = 16
"""Bytes. TMA boxes begin at multiples of this on Hopper, and so do vector loads."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A view if the tensor is contiguous and begins at a multiple of `ALIGNMENT`, else an aligned copy.

    A slice of a larger tensor may begin anywhere; allocators align to far more. The strides are those of a new tensor,
    even for dimensions of size 1, where any stride counts as contiguous.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor.as_strided(tensor.shape, _strides(tensor))
    return tensor.clone(memory_format=torch.contiguous_format)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a new tensor of the same shape."""
    return torch.empty(tensor.shape, device="meta").stride()


def in_place(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which must not be copied; rows that are no multiple of `ALIGNMENT` bytes may begin anywhere."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{name} is read where it lies and must be contiguous, got shape {list(tensor.shape)} with strides "
            f"{list(tensor.stride())}; pass {name}.contiguous()"
        )
    offset = tensor.data_ptr() % ALIGNMENT
    if offset and tensor.shape[-1] * tensor.element_size() % ALIGNMENT == 0:
        raise ArgumentError(
            f"{name} is read where it lies and must begin at a multiple of {ALIGNMENT} bytes, got an address {offset} "
            f"bytes behind one; pass {name}.clone()"
        )
    return tensor.as_strided(tensor.shape, _strides(tensor)) if 1 in tensor.shape else tensor


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def interleave_gate_up(w13: torch.Tensor, out: torch.Tensor | None = None, dim: int = -2) -> torch.Tensor:
    """Rows [g0..gI-1, u0..uI-1] become [g0, u0, g1, u1, ...].

    Args:
        w13: [..., 2I, H], gate rows first.
        out: Tensor of the same shape to write into, of any strides and sharing no memory with w13; None: a new
            contiguous tensor.
        dim: Dimension of the rows; -1 for biases [..., 2I].

    Returns:
        `out`.
    """
    return _reordered(w13, out, dim, (2, -1), (-1, 2))


def deinterleave_gate_up(w13: torch.Tensor, out: torch.Tensor | None = None, dim: int = -2) -> torch.Tensor:
    """Inverse of `interleave_gate_up`; checkpoints such as gpt-oss store the interleaved order.

    Args:
        w13: [..., 2I, H], rows alternate gate and up.
        out, dim: As in `interleave_gate_up`.

    Returns:
        `out`, gate rows first.
    """
    return _reordered(w13, out, dim, (-1, 2), (2, -1))


def _reordered(
    w13: torch.Tensor, out: torch.Tensor | None, dim: int, mine: tuple[int, int], theirs: tuple[int, int]
) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(w13, memory_format=torch.contiguous_format)
    dim = range(w13.dim())[dim]  # From 0 on, since `transpose` below names the one behind it.
    out.unflatten(dim, theirs).copy_(w13.unflatten(dim, mine).transpose(dim, dim + 1))
    return out


def pad_columns(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Zero-pads the last dimension to `columns`; returns the tensor itself if nothing is missing."""
    missing = columns - weight.shape[-1]
    if missing < 0:
        raise ArgumentError(f"columns must be at least {weight.shape[-1]}, got {columns}")
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight
