"""How checkpoints store a matrix of an expert: the vocabulary in which the format families of this package answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

from moereg.errors import CheckpointError
from moereg.quant import QuantScheme

__all__ = [
    "FLOATS",
    "FormatOf",
    "Matrix",
    "StorageFormat",
    "StoredTensor",
    "as_is",
    "check_divides",
    "one_number",
    "unquantized_format",
]

FLOATS: Final = ("BF16", "F16", "F32")

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix of an expert as it should be.

    Attributes:
        module: Its name in the checkpoint, for errors.
        rows, columns: N and K, of one expert.
        is_half: Only the gate rows or only the up rows of w13.
    """

    module: str
    rows: int
    columns: int
    is_half: bool = False


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor that a format stores for a matrix.

    Attributes:
        suffix: Of its name, after the module's; with the dot where there is one.
        shapes: Accepted ones, of one expert.
        dtypes: Accepted ones, as safetensors spells them.
        field: Of `ExpertWeights`, {} standing for 13 or 2; None where the tensor is only checked.
        convert: From the tensor as stored to the field's canonical rows. Raises CheckpointError where its numbers
            contradict the format.
        required: Whether the tensor has to be there.
    """

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    field: str | None
    convert: Convert
    required: bool = True


@dataclasses.dataclass(frozen=True)
class StorageFormat:
    """How the experts of a layer are stored.

    Attributes:
        name: For errors; two formats of one name are the same.
        scheme: That the weights are of.
        tensors: What a matrix consists of. Raises CheckpointError where its sizes do not fit.
        is_fused: All experts are in one tensor, dim 0 the expert.
    """

    name: str
    scheme: QuantScheme
    tensors: Callable[[Matrix], Sequence[StoredTensor]] = dataclasses.field(compare=False)
    is_fused: bool = False


FormatOf = Callable[[str], "StorageFormat | None"]
"""The format of a module, by its name in the checkpoint; None where it is left unquantized."""


def unquantized_format(is_fused: bool, is_transposed: bool) -> StorageFormat:
    """16-bit or 32-bit weights, [N,K], or [K,N] where transposed."""

    def tensors(matrix: Matrix) -> Sequence[StoredTensor]:
        shape = (matrix.rows, matrix.columns)
        shape, convert = (shape[::-1], _transposed) if is_transposed else (shape, as_is)
        return (StoredTensor("" if is_fused else ".weight", (shape,), FLOATS, "w{}", convert),)

    return StorageFormat("unquantized", QuantScheme("unquantized"), tensors, is_fused)


def as_is(stored: torch.Tensor) -> torch.Tensor:
    """What is stored is canonical."""
    return stored


def _transposed(stored: torch.Tensor) -> torch.Tensor:
    return stored.mT


def one_number(stored: torch.Tensor) -> torch.Tensor:
    """A number that is stored as [1] or []."""
    return stored.reshape(())


def check_divides(matrix: Matrix, group_size: int) -> None:
    """Checks that groups of columns cover a row.

    Raises:
        CheckpointError: They do not.
    """
    if matrix.columns % group_size:
        raise CheckpointError(
            f"the columns of {matrix.module} must be a multiple of the group size, got {matrix.columns} columns in "
            f"groups of {group_size}; use the config.json that belongs to these tensors"
        )
