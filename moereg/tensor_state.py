"""What tells whether a tensor is still the one that was seen, with the numbers that it had."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["TensorState", "are_elsewhere", "states_of"]


class TensorState(NamedTuple):
    """Where a tensor is, and how often torch saw it written.

    Writes through `tensor.data`, and those into tensors that were made in inference mode, count no versions.
    """

    address: int
    version: int
    dtype: torch.dtype
    device: torch.device


def states_of(tensors: Iterable[torch.Tensor]) -> tuple[TensorState, ...]:
    """What changes when tensors are replaced or written into."""
    return tuple(
        TensorState(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version, tensor.dtype, tensor.device)
        for tensor in tensors
    )


def are_elsewhere(before: tuple[TensorState, ...], now: tuple[TensorState, ...]) -> bool:
    """Whether tensors were replaced, instead of written into."""
    return [state._replace(version=0) for state in before] != [state._replace(version=0) for state in now]
