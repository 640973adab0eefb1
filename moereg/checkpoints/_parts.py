"""The parts of an expert: which stored tensor, what it must look like, which rows it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from moereg.checkpoints._formats import FLOATS, Convert, Projection, StorageFormat, as_is
from moereg.checkpoints._models import FusedNames, ModelType
from moereg.spec.quant_schemes import TensorRole, tensor_name
from moereg.weights.checks import check_scale
from moereg.weights.layouts import deinterleave_gate_up

__all__ = ["ExpertPart", "LayerSizes", "list_modules", "list_parts"]


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
        shapes: Accepted shapes.
        dtypes: Accepted dtypes, as safetensors spells them.
        matrix: `w13` or `w2`, which it belongs to; empty if neither.
        role: What it is to that matrix; None if the tensor is only checked.
        convert: Makes canonical rows of its field from what is stored.
        half: Which half of the expert's w13 it is: 0 gate, 1 up; None if it is the whole field.
        row: Row of the fused tensor; None if the tensor belongs to this expert alone.
        num_rows: Rows of it that are this expert's, of which `row` counts; None if it is one, without that dimension.
        is_interleaved: Whether gate and up rows alternate.
        required: Whether the tensor has to be there.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    matrix: str = ""
    role: TensorRole | None = None
    convert: Convert = as_is
    half: int | None = None
    row: int | None = None
    num_rows: int | None = None
    is_interleaved: bool = False
    required: bool = True

    @property
    def field(self) -> str | None:
        """Field of `ExpertWeights` that it becomes; None where the tensor is only checked."""
        return None if self.role is None else tensor_name(self.matrix, self.role)

    def copy_to(self, fields: Mapping[str, torch.Tensor], expert: int, stored: torch.Tensor) -> None:
        """Writes the canonical rows of what is stored into the expert's slice of the field.

        Args:
            fields: Canonical tensors, by field of `ExpertWeights`; the one of this part is written to.
            expert: Index in them.
            stored: The tensor, or the row of it, as the file has it.

        Raises:
            ValueError: Its numbers contradict its format.
        """
        canonical = self.convert(stored)
        if self.field is None:
            return
        if self.role in ("scale", "scale_2", "activation_scale"):
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


def list_modules(model: ModelType, root: str, experts: range, fused: FusedNames | None) -> Sequence[str]:
    """Names of the experts' projections, as a quantization config spells modules.

    Args:
        model: The model's type.
        root: What names of the block begin with, up to and with a dot.
        experts: Global indices of the rank's experts.
        fused: Names of the tensors that hold all experts; None if each expert has its own.
    """
    if fused is not None:
        return [f"{root}{projection}" for projection in (*fused.w13, fused.w2)]
    assert model.projections is not None
    return [f"{root}experts.{expert}.{projection}" for expert in experts for projection in model.projections]


def list_parts(
    model: ModelType, sizes: LayerSizes, storage: StorageFormat, root: str, expert: int, fused: FusedNames | None
) -> Iterator[ExpertPart]:
    """Everything that is read of one expert.

    Args:
        model: The model's type.
        sizes: Sizes of the layer.
        storage: How its experts are stored.
        root: What names of the block begin with, up to and with a dot.
        expert: Global index.
        fused: Names of the tensors that hold all experts; None if each expert has its own.

    Raises:
        CheckpointError: The sizes do not fit the format.
    """
    if fused is None:
        return _separate_parts(model, sizes, storage, f"{root}experts.{expert}.")
    if fused.is_flat:
        return _flat_parts(sizes, fused, root, expert)
    return _fused_parts(model, sizes, storage, root, expert, fused)


def _fused_parts(
    model: ModelType, sizes: LayerSizes, storage: StorageFormat, root: str, expert: int, fused: FusedNames
) -> Iterator[ExpertPart]:
    has_gate = model.projections is None or len(model.projections) == 3
    halves: tuple[int | None, ...] = (0, 1) if len(fused.w13) == 2 else (None,)
    rows = sizes.intermediate_size * (2 if has_gate and len(fused.w13) == 1 else 1)
    for matrix, half, projection in (
        *(
            ("w13", half, Projection(f"{root}{name}", rows, sizes.hidden_size))
            for half, name in zip(halves, fused.w13, strict=True)
        ),
        ("w2", None, Projection(f"{root}{fused.w2}", sizes.hidden_size, sizes.intermediate_size)),
    ):
        is_interleaved = model.is_interleaved and matrix == "w13"
        for tensor in storage.tensors(projection):
            yield ExpertPart(
                f"{projection.module}{tensor.suffix}",
                tuple((sizes.num_experts, *shape) for shape in tensor.shapes),
                tensor.dtypes,
                matrix,
                tensor.role,
                tensor.convert,
                half=half,
                row=expert,
                is_interleaved=is_interleaved,
                required=tensor.required,
            )
        if model.has_bias:
            yield ExpertPart(
                f"{projection.module}_bias",
                ((sizes.num_experts, projection.rows),),
                FLOATS,
                matrix,
                "bias",
                row=expert,
                is_interleaved=is_interleaved,
            )


def _flat_parts(sizes: LayerSizes, fused: FusedNames, root: str, expert: int) -> Iterator[ExpertPart]:
    """Gate, up and down, each [E*I,H]."""
    shape = (sizes.num_experts * sizes.intermediate_size, sizes.hidden_size)
    for matrix, half, name in (("w13", 0, fused.w13[0]), ("w13", 1, fused.w13[1]), ("w2", None, fused.w2)):
        yield ExpertPart(
            f"{root}{name}",
            (shape,),
            FLOATS,
            matrix,
            "weight",
            as_is if matrix == "w13" else torch.t,
            half=half,
            row=expert,
            num_rows=sizes.intermediate_size,
        )


def _separate_parts(
    model: ModelType, sizes: LayerSizes, storage: StorageFormat, expert_root: str
) -> Iterator[ExpertPart]:
    assert model.projections is not None and not model.has_bias, "no known model has separate experts with biases"
    hidden_size, intermediate_size = sizes.hidden_size, sizes.intermediate_size
    *gate_up, down = (f"{expert_root}{name}" for name in model.projections)
    has_gate = len(gate_up) == 2
    for matrix, half, projection in (
        *(
            ("w13", half if has_gate else None, Projection(name, intermediate_size, hidden_size, is_half=has_gate))
            for half, name in enumerate(gate_up)
        ),
        ("w2", None, Projection(down, hidden_size, intermediate_size)),
    ):
        for tensor in storage.tensors(projection):
            yield ExpertPart(
                f"{projection.module}{tensor.suffix}",
                tensor.shapes,
                tensor.dtypes,
                matrix,
                tensor.role,
                tensor.convert,
                half=half,
                required=tensor.required,
            )
