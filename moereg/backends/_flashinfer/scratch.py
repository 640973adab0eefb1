"""Plans kernel buffers without allocating, then carves them from a layer's scratch memory.

FlashInfer's kernels take a dataclass of buffers and have a function that allocates one. On torch's meta device that
function gives shapes and dtypes and allocates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from moereg.kernels.sizes import WORKSPACE_ALIGNMENT
from moereg.weights.layouts import ALIGNMENT, round_up

__all__ = ["Piece", "aligned_result", "carved", "carved_fields", "num_bytes", "pieces_of"]

B = TypeVar("B")


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


def pieces_of(plan: Any) -> dict[str, Piece]:
    """The tensors of a dataclass, by field; a tensor that two fields share is planned once, under the first."""
    pieces: dict[str, Piece] = {}
    seen: set[int] = set()
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            pieces[field.name] = Piece(tuple(value.shape), value.dtype)
    return pieces


def carved_fields(plan: B, memory: torch.Tensor) -> B:
    """The dataclass with its tensors carved from memory.

    Args:
        plan: The dataclass with tensors of the meta device.
        memory: As in `carved`, for `pieces_of(plan)`.
    """
    tensors = carved(memory, pieces_of(plan))
    by_identity = {id(getattr(plan, name)): tensor for name, tensor in tensors.items()}
    fields = dataclasses.fields(plan)  # type: ignore[arg-type]  # any dataclass
    values = {field.name: getattr(plan, field.name) for field in fields}
    found = {name: by_identity[id(value)] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(plan, **found)  # type: ignore[type-var]
