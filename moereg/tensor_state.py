"""What tells whether a tensor is still the one that was seen, with the numbers that it had."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch

from moereg.errors import ArgumentError
from moereg.weight_checks import DEBUG_VARIABLE

__all__ = ["TensorState", "are_elsewhere", "check_counted", "states_of"]

_WORDS: Final = 2**18
"""Bytes that are summed at a time: as 8-byte numbers they take 8 times as much."""


class TensorState(NamedTuple):
    """Where a tensor is, and how often torch saw it written.

    Writes through `tensor.data`, and those into tensors that were made in inference mode, count no versions.

    Attributes:
        contents: With MOEREG_DEBUG=1 a number that other bytes change; None elsewhere, and while a graph is captured.
    """

    address: int
    version: int
    dtype: torch.dtype
    device: torch.device
    contents: int | None = None


def states_of(tensors: Iterable[torch.Tensor]) -> tuple[TensorState, ...]:
    """What changes when tensors are replaced or written into."""
    reads = os.environ.get(DEBUG_VARIABLE) == "1" and not (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    return tuple(
        TensorState(
            tensor.data_ptr(),
            -1 if tensor.is_inference() else tensor._version,
            tensor.dtype,
            tensor.device,
            _contents(tensor) if reads else None,
        )
        for tensor in tensors
    )


def are_elsewhere(before: tuple[TensorState, ...], now: tuple[TensorState, ...]) -> bool:
    """Whether tensors were replaced, instead of written into."""
    places = [[(state.address, state.dtype, state.device) for state in states] for states in (before, now)]
    return places[0] != places[1]


def check_counted(before: tuple[TensorState, ...], now: tuple[TensorState, ...], cure: str) -> None:
    """Checks, with MOEREG_DEBUG=1, that torch counted what was written.

    Raises:
        ArgumentError: Something was written that a kernel will not see.
    """
    for one, other in zip(before, now, strict=False):
        is_read = one.contents is not None and other.contents is not None
        if is_read and one.contents != other.contents and one[:-1] == other[:-1]:
            raise ArgumentError(
                "weights of this layer were written in a way that torch does not count, through .data or in inference "
                f"mode, so its kernel may have the old ones; {cure}"
            )


def _contents(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    # A plain sum stays the same where rows change places.
    factors = torch.arange(1, _WORDS + 1, device=tensor.device) * 0x9E3779B97F4A7C1 | 1
    total = 0
    for place, piece in enumerate(flat.split(_WORDS)):
        total += (2 * place + 1) * int((piece * factors[: len(piece)]).sum())
    return total
