"""How checkpoints store a matrix of an expert: what the modules of `quant_method`s answer with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

from moereg.errors import CheckpointError
from moereg.spec.quant_schemes import QuantScheme, TensorRole

__all__ = [
    "FLOATS",
    "FormatOf",
    "Projection",
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
class Projection:
    """One matrix of an expert, or of all experts if they are fused, with the sizes from config.json.

    Attributes:
        module: Name of its module in the checkpoint.
        rows, columns: N and K, of one expert.
        is_half: Whether it is only the gate rows or only the up rows of w13.
    """

    module: str
    rows: int
    columns: int
    is_half: bool = False


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor that a format stores for a projection.

    Attributes:
        suffix: What its name adds to the module's; begins with its dot, if any.
        shapes: Accepted shapes, of one expert.
        dtypes: Accepted dtypes, as safetensors spells them.
        role: What it is to w13 or w2 in `ExpertWeights`; None if the tensor is only checked.
        convert: Makes canonical rows of that field from the stored tensor. Raises CheckpointError where its numbers
            contradict the format.
        required: Whether the tensor has to be there.
    """

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    role: TensorRole | None
    convert: Convert
    required: bool = True


@dataclasses.dataclass(frozen=True)
class StorageFormat:
    """How the experts of a layer are stored.

    Attributes:
        name: For errors; formats of one name are equal.
        scheme: Scheme of the weights.
        tensors: Lists the stored tensors of a projection. Raises CheckpointError where its sizes do not fit.
        is_fused: Whether all experts are in one tensor, with dim 0 the expert.
    """

    name: str
    scheme: QuantScheme
    tensors: Callable[[Projection], Sequence[StoredTensor]] = dataclasses.field(compare=False)
    is_fused: bool = False


FormatOf = Callable[[str], "StorageFormat | None"]
"""The format of a module, by its name in the checkpoint; None if it is unquantized."""


def unquantized_format(is_fused: bool, is_transposed: bool) -> StorageFormat:
    """Weights of 16 or 32 bits, stored as [N,K], or as [K,N] where transposed."""

    def tensors(projection: Projection) -> Sequence[StoredTensor]:
        shape = (projection.rows, projection.columns)
        shape, convert = (shape[::-1], _transposed) if is_transposed else (shape, as_is)
        return (StoredTensor("" if is_fused else ".weight", (shape,), FLOATS, "weight", convert),)

    return StorageFormat("unquantized", QuantScheme("unquantized"), tensors, is_fused)


def as_is(stored: torch.Tensor) -> torch.Tensor:
    """The stored tensor is canonical already."""
    return stored


def _transposed(stored: torch.Tensor) -> torch.Tensor:
    return stored.mT


def one_number(stored: torch.Tensor) -> torch.Tensor:
    """A number that is stored as [1] or [], as []."""
    return stored.reshape(())


def check_divides(projection: Projection, group_size: int) -> None:
    """Checks that groups of columns cover a row.

    Raises:
        CheckpointError: They do not cover it.
    """
    if projection.columns % group_size:
        raise CheckpointError(
            f"the columns of {projection.module} must be a multiple of the group size, got {projection.columns} "
            f"columns in groups of {group_size}; use the config.json that belongs to these tensors"
        )
