"""How checkpoints store an expert's matrix: the results of the readers of `quant_method`.

Sizes that do not fit a format, and values that contradict it, are a CheckpointError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

from moereg.errors import CheckpointError
from moereg.spec.quant_schemes import WHOLE, QuantScheme, TensorRole

FLOATS: Final = ("BF16", "F16", "F32")
FP8_BLOCK: Final = 128
"""Rows and columns per scale of e4m3 codes in blocks."""

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

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.rows, self.columns

    def num_groups(self, size: int) -> int:
        """Number of groups of that many columns per row; `WHOLE` means all columns."""
        size = self.columns if size == WHOLE else size
        if self.columns % size:
            raise CheckpointError(
                f"the columns of {self.module} must be a multiple of the group size, got {self.columns} columns in "
                f"groups of {size}; use the config.json that belongs to these tensors"
            )
        return self.columns // size


def as_is(stored: torch.Tensor) -> torch.Tensor:
    """Returns the stored tensor, which is canonical already."""
    return stored


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor that a format stores for a projection.

    Attributes:
        suffix: Suffix of its name after the module's, with its dot, if any.
        shapes: Accepted shapes for one expert.
        dtypes: Accepted dtypes in safetensors' spelling.
        role: Its role for w13 or w2 in `ExpertWeights`; None if the tensor is only checked.
        convert: Makes canonical rows of that field from the stored tensor.
        required: Whether the tensor must exist.
    """

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    role: TensorRole | None = None
    convert: Convert = as_is
    required: bool = True


@dataclasses.dataclass(frozen=True)
class StorageFormat:
    """How the experts of a layer are stored.

    Attributes:
        name: For errors; formats of one name are equal.
        scheme: Scheme of the weights.
        tensors: Lists the stored tensors of a projection.
        is_fused: Whether one tensor has all experts, along dim 0.
    """

    name: str
    scheme: QuantScheme
    tensors: Callable[[Projection], Sequence[StoredTensor]] = dataclasses.field(compare=False)
    is_fused: bool = False


FormatOf = Callable[[str], "StorageFormat | None"]
"""Maps a module's name in the checkpoint to its format; None if it is unquantized."""


def unquantized_format(is_fused: bool, is_transposed: bool) -> StorageFormat:
    """The format of 16- or 32-bit weights stored as [N,K], or as [K,N] if transposed."""

    def tensors(projection: Projection) -> Sequence[StoredTensor]:
        shape, convert = (projection.shape[::-1], transposed) if is_transposed else (projection.shape, as_is)
        return (StoredTensor("" if is_fused else ".weight", (shape,), FLOATS, "weight", convert),)

    return StorageFormat("unquantized", QuantScheme("unquantized"), tensors, is_fused)


def transposed(stored: torch.Tensor) -> torch.Tensor:
    """Swaps rows and columns."""
    return stored.mT


def one_number(stored: torch.Tensor) -> torch.Tensor:
    """Reshapes a number stored as [1] or [] to []."""
    return stored.reshape(())


def exponents(stored: torch.Tensor) -> torch.Tensor:
    """Views bytes as e8m0, whose exponent bias is 127."""
    return stored.view(torch.float8_e8m0fnu)


def block_tensors(projection: Projection, scale_name: str) -> Sequence[StoredTensor]:
    """A projection's e4m3 codes and block scales; `scale_name` follows the module's name."""
    blocks = (-(-projection.rows // FP8_BLOCK), -(-projection.columns // FP8_BLOCK))
    return (
        StoredTensor(".weight", (projection.shape,), ("F8_E4M3",), "weight"),
        StoredTensor(f".{scale_name}", (blocks,), ("F32", "BF16", "F16", "F8_E8M0"), "scale"),
    )
