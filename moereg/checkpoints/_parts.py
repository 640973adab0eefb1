"""The pieces that an expert is read in: which tensor, what it has to look like, where it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from moereg.checkpoints._formats import FLOATS, Convert, Matrix, StorageFormat, as_is
from moereg.checkpoints._models import ModelType
from moereg.problem import MoEProblem
from moereg.weight_checks import check_scale

__all__ = ["ExpertPart", "list_modules", "list_parts"]

_FUSED: Final = ("gate_up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """One piece of one expert: a tensor, or a row of a fused one, and where it goes.

    Attributes:
        name: Tensor's name in the checkpoint.
        shapes: One of which its header must have.
        dtypes: One of which its header must have, as safetensors spells them.
        field: Of `ExpertWeights`; None where the tensor is only checked.
        convert: From what is stored to the field's canonical rows.
        half: Of the expert's w13 that it is: 0 gate, 1 up; None where it is all of the field.
        row: Of the fused tensor; None where the tensor is this expert's alone.
        is_interleaved: Gate and up rows alternate.
        required: Whether the tensor has to be there.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    field: str | None
    convert: Convert = as_is
    half: int | None = None
    row: int | None = None
    is_interleaved: bool = False
    required: bool = True

    def copy_to(self, fields: Mapping[str, torch.Tensor], expert: int, stored: torch.Tensor) -> None:
        """Writes the piece as stored into its expert's slice of its field, in the canonical order and dtype.

        Raises:
            ValueError: Its numbers contradict its format.
        """
        source = self.convert(stored)
        if self.field is None:
            return
        if self.field.endswith(("_scale", "_scale_2")):
            # Here every part is on the CPU, whatever the device of the layer, and gate and up are still apart.
            check_scale(self.field, source)
        target = fields[self.field][expert]
        if self.is_interleaved:
            gate_rows, up_rows = target.chunk(2)
            gate_rows.copy_(source[0::2])
            up_rows.copy_(source[1::2])
        elif self.half is None:
            target.copy_(source)
        elif target.dim():
            target.chunk(2)[self.half].copy_(source)
        else:
            # Gate and up have one input, so one scale: the larger, under which neither saturates.
            target.copy_(source if self.half == 0 else torch.maximum(target, source.to(target)))


def list_modules(model: ModelType, experts_root: str, experts: range, is_fused: bool) -> Sequence[str]:
    """Names of the experts' projections, as a quantization config spells modules.

    Args:
        model: Its type.
        experts_root: What they begin with, a dot included.
        experts: Local ones.
        is_fused: All experts are in one tensor.
    """
    if is_fused:
        return [f"{experts_root}{projection}" for projection in _FUSED]
    assert model.projections is not None
    return [f"{experts_root}{expert}.{projection}" for expert in experts for projection in model.projections]


def list_parts(
    model: ModelType, problem: MoEProblem, stored: StorageFormat, experts_root: str, expert: int
) -> Iterator[ExpertPart]:
    """Everything that is read of one expert.

    Args:
        model: Its type.
        problem: Sizes of the layer.
        stored: How it is stored.
        experts_root: What names of tensors begin with, a dot included.
        expert: Global index.

    Raises:
        CheckpointError: The sizes do not fit the format.
    """
    list_some = _fused_parts if stored.is_fused else _separate_parts
    return list_some(model, problem, stored, experts_root, expert)


def _fused_parts(
    model: ModelType, problem: MoEProblem, stored: StorageFormat, experts_root: str, expert: int
) -> Iterator[ExpertPart]:
    num_experts, sizes = problem.num_experts, (problem.hidden_size, problem.intermediate_size)
    names = [f"{experts_root}{projection}" for projection in _FUSED]
    for which, matrix in (
        ("13", Matrix(names[0], 2 * sizes[1], sizes[0])),
        ("2", Matrix(names[1], sizes[0], sizes[1])),
    ):
        is_interleaved = model.is_interleaved and which == "13"
        for tensor in stored.tensors(matrix):
            yield ExpertPart(
                f"{matrix.module}{tensor.suffix}",
                tuple((num_experts, *shape) for shape in tensor.shapes),
                tensor.dtypes,
                tensor.field and tensor.field.format(which),
                tensor.convert,
                row=expert,
                is_interleaved=is_interleaved,
                required=tensor.required,
            )
        if model.has_bias:
            yield ExpertPart(
                f"{matrix.module}_bias",
                ((num_experts, matrix.rows),),
                FLOATS,
                f"w{which}_bias",
                row=expert,
                is_interleaved=is_interleaved,
            )


def _separate_parts(
    model: ModelType, problem: MoEProblem, stored: StorageFormat, experts_root: str, expert: int
) -> Iterator[ExpertPart]:
    assert model.projections is not None and not model.has_bias, "no known model has separate experts with biases"
    hidden_size, intermediate_size = problem.hidden_size, problem.intermediate_size
    gate, up, down = (f"{experts_root}{expert}.{projection}" for projection in model.projections)
    for which, half, matrix in (
        ("13", 0, Matrix(gate, intermediate_size, hidden_size, is_half=True)),
        ("13", 1, Matrix(up, intermediate_size, hidden_size, is_half=True)),
        ("2", None, Matrix(down, hidden_size, intermediate_size)),
    ):
        for tensor in stored.tensors(matrix):
            yield ExpertPart(
                f"{matrix.module}{tensor.suffix}",
                tensor.shapes,
                tensor.dtypes,
                tensor.field and tensor.field.format(which),
                tensor.convert,
                half=half,
                required=tensor.required,
            )
