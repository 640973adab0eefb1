"""Plans kernel buffers without allocating, then carves them from a layer's scratch memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from moereg.kernels.sizes import WORKSPACE_ALIGNMENT
from moereg.weights.layouts import ALIGNMENT, round_up

__all__ = ["Piece", "aligned_result", "carved", "num_bytes"]


class Piece(NamedTuple):
    """Shape and dtype of a tensor to carve."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes, with the padding after it."""
        return round_up(math.prod(self.shape) * self.dtype.itemsize, WORKSPACE_ALIGNMENT)


def num_bytes(pieces: Mapping[str, Piece]) -> int:
    """Bytes of all pieces together."""
    return sum(piece.num_bytes for piece in pieces.values())


def carved(memory: torch.Tensor, pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """Carves consecutive tensors from memory.

    Args:
        memory: Contiguous, any dtype, at least as large as the pieces.
        pieces: Pieces by name.

    Returns:
        Contiguous views of the memory, by name.
    """
    data = memory.view(-1).view(torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for name, piece in pieces.items():
        size = math.prod(piece.shape) * piece.dtype.itemsize
        tensors[name] = data[first : first + size].view(piece.dtype).view(piece.shape)
        first += piece.num_bytes
    return tensors


@contextlib.contextmanager
def aligned_result(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields an output for kernels with vector stores: `out`, or aligned memory that is copied to it.

    Args:
        out: Contiguous, with any alignment.
    """
    if out.data_ptr() % ALIGNMENT == 0:
        yield out
        return
    result = torch.empty_like(out)
    yield result
    out.copy_(result)
