"""Pieces of a workspace: planned without allocating, then cut from a layer's scratch memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from moereg.kernels.sizes import WORKSPACE_ALIGNMENT
from moereg.weights.layouts import round_up


class Piece(NamedTuple):
    """Shape and dtype of a tensor to cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes with the padding after it."""
        return round_up(self.num_bytes, WORKSPACE_ALIGNMENT)


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Total bytes of consecutive pieces."""
    return sum(piece.padded_bytes for piece in pieces)


def cut(buffer: torch.Tensor, *pieces: Piece) -> list[torch.Tensor]:
    """Cuts consecutive views from the front of a uint8 buffer."""
    views, start = [], 0
    for piece in pieces:
        num_bytes = piece.num_bytes
        views.append(buffer[start : start + num_bytes].view(piece.dtype).view(piece.shape))
        start += round_up(num_bytes, WORKSPACE_ALIGNMENT)
    return views
