"""The parts of an expert: which stored tensor, what it must look like, which rows it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from moereg.checkpoints._formats import FLOATS, Projection, StorageFormat, StoredTensor, as_is
from moereg.checkpoints._models import FusedNames, ModelType
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import tensor_name
from moereg.weights.checks import check_scale
from moereg.weights.layouts import deinterleave_gate_up


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The sizes that shapes of stored tensors follow from: E of the whole layer, H and I."""

    num_experts: int
    hidden_size: int
    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """A stored tensor, or a row of a fused one, and the rows of one expert that it becomes.

    Attributes:
        name: The tensor's name in the checkpoint.
        tensor: How it is stored, with the shapes of all experts where it is fused.
        matrix: `w13` or `w2`, which it belongs to.
        half: Which half of the expert's w13 it is: 0 gate, 1 up; None if it is the whole field.
        row: Row of the fused tensor; None if the tensor belongs to this expert alone.
        num_rows: Rows of it that are this expert's, of which `row` counts; None if it is one, without that dimension.
        is_interleaved: Whether gate and up rows alternate.
    """

    name: str
    tensor: StoredTensor
    matrix: str
    half: int | None = None
    row: int | None = None
    num_rows: int | None = None
    is_interleaved: bool = False

    @property
    def field(self) -> str | None:
        """Field of `ExpertWeights` that it becomes; None where the tensor is only checked."""
        return None if self.tensor.role is None else tensor_name(self.matrix, self.tensor.role)

    def copy_to(self, fields: Mapping[str, torch.Tensor], expert: int, stored: torch.Tensor) -> None:
        """Writes the canonical rows of what is stored into the expert's slice of the field.

        Args:
            fields: Canonical tensors, by field of `ExpertWeights`; the one of this part is written to.
            expert: Index in them.
            stored: The tensor, or the row of it, as the file has it.

        Raises:
            ValueError: Its numbers contradict its format.
        """
        canonical = self.tensor.convert(stored)
        if self.field is None:
            return
        if self.tensor.role in ("scale", "scale_2", "activation_scale"):
            # Checked here, where every part is on the CPU and gate and up are still apart.
            check_scale(self.field, canonical)
        rows = fields[self.field][expert]
        if self.is_interleaved:
            deinterleave_gate_up(canonical, out=rows, dim=0)
        elif self.half is None:
            rows.copy_(canonical)
        elif rows.dim():
            rows.chunk(2)[self.half].copy_(canonical)
        else:
            # Gate and up read the same input, which has one scale: the larger, under which neither saturates.
            rows.copy_(canonical if self.half == 0 else torch.maximum(rows, canonical.to(rows)))


def list_projections(
    model: ModelType, sizes: LayerSizes | MoEProblem, root: str, expert: int, fused: FusedNames | None
) -> Iterator[tuple[str, int | None, Projection]]:
    """The projections of an expert, each with its matrix and its half of it.

    Args:
        model: The model's type.
        sizes: H and I.
        root: What names of the block begin with, up to and with a dot.
        expert: Global index.
        fused: Names of the tensors that hold all experts; None if each expert has its own.
    """
    if fused is None:
        assert model.projections is not None
        *gate_up, down = (f"{root}experts.{expert}.{name}" for name in model.projections)
    else:
        *gate_up, down = (f"{root}{name}" for name in (*fused.w13, fused.w2))
    is_half, has_gate = len(gate_up) == 2, model.projections is None or len(model.projections) == 3
    rows = sizes.intermediate_size * (2 if has_gate and not is_half else 1)
    for half, name in enumerate(gate_up):
        yield "w13", half if is_half else None, Projection(name, rows, sizes.hidden_size, is_half)
    yield "w2", None, Projection(down, sizes.hidden_size, sizes.intermediate_size)


def list_parts(
    model: ModelType, sizes: LayerSizes, storage: StorageFormat, root: str, expert: int, fused: FusedNames | None
) -> Iterator[ExpertPart]:
    """Everything that is read of one expert, stored in some format; other arguments as for `list_projections`.

    Raises:
        CheckpointError: The sizes do not fit the format.
    """
    for matrix, half, projection in list_projections(model, sizes, root, expert, fused):
        biases = [StoredTensor("_bias", ((projection.rows,),), FLOATS, "bias")] if model.has_bias else []
        for tensor in (*storage.tensors(projection), *biases):
            name = f"{projection.module}{tensor.suffix}"
            if fused is None:
                yield ExpertPart(name, tensor, matrix, half)
            elif fused.is_flat:  # Gate, up and down, each [E*I,H].
                shape = (sizes.num_experts * sizes.intermediate_size, sizes.hidden_size)
                convert = as_is if matrix == "w13" else torch.t
                flat = dataclasses.replace(tensor, shapes=(shape,), convert=convert)
                yield ExpertPart(name, flat, matrix, half, expert, num_rows=sizes.intermediate_size)
            else:
                every = dataclasses.replace(tensor, shapes=tuple((sizes.num_experts, *some) for some in tensor.shapes))
                is_interleaved = model.is_interleaved and matrix == "w13"
                yield ExpertPart(name, every, matrix, half, expert, is_interleaved=is_interleaved)
