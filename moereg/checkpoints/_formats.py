"""How checkpoints store a matrix: the stored tensors of a format, and the rule for all formats that are plain.

Sizes that do not fit a format, and values that contradict it, are a CheckpointError.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from moereg.checkpoints._files import ONE_EXPORT
from moereg.errors import CheckpointError
from moereg.routing import BY_HAND
from moereg.spec.quant_schemes import WHOLE, QuantScheme, TensorRole

OTHERWISE: Final = f"use a release in a format that is read, or the unquantized one, or {BY_HAND}"
"""A cure for formats that are not read."""
FLOATS: Final = ("BF16", "F16", "F32")
WEIGHT_NAMES: Final = ("weight", "weight_packed", "weight_blocks", "qweight")
"""Names of weights in all formats."""

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Projection:
    """One matrix of an expert, or of all experts if they are fused, with the sizes from config.json.

    Attributes:
        module: Name of its module in the checkpoint.
        rows, columns: N and K, of one expert.
        part: Its part of the matrix: `gate` or `up`, both (`gate_up`), or None if it has no halves.
    """

    module: str
    rows: int
    columns: int
    part: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.rows, self.columns

    @property
    def half(self) -> int | None:
        """The half of w13 that it is: 0 gate, 1 up; None if it is a whole matrix."""
        return {"gate": 0, "up": 1}.get(self.part or "")

    def num_groups(self, size: int) -> int:
        """Number of groups of that many columns per row; `WHOLE` means all columns."""
        size = self.columns if size == WHOLE else size
        if self.columns % size:
            raise CheckpointError(
                f"the columns of {self.module} must be a multiple of the group size, got {self.columns} columns in "
                f"groups of {size}; {ONE_EXPORT}"
            )
        return self.columns // size


def as_is(stored: torch.Tensor) -> torch.Tensor:
    """Returns the stored tensor, which is canonical already."""
    return stored


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor that a format stores for a projection.

    Attributes:
        names: Its names in the module, of which the first that exists counts.
        shapes: Accepted shapes for one expert.
        dtypes: Accepted dtypes in safetensors' spelling.
        role: Its role for w13 or w2 in `ExpertWeights`; None if the tensor is only checked.
        convert: Makes canonical rows of that field from the stored tensor.
        required: Whether the tensor must exist.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    role: TensorRole | None = None
    convert: Convert = as_is
    required: bool = True

    def full_names(self, module: str, is_parameter: bool) -> Iterator[str]:
        """Its possible names in the checkpoint, the likeliest first.

        Fused experts are often parameters beside each other: `experts.w1` and `experts.w1_scale` instead of
        `experts.w1.weight` and `experts.w1.weight_scale`.
        """
        as_parameter = [
            f"{module}_{name}"
            for full in self.names
            for name in dict.fromkeys((full.removeprefix("weight_"), full))
            if full != "weight" and not (module.endswith("_weight") and name.startswith("weight_"))
        ]
        as_parameter = [module] * ("weight" in self.names) + as_parameter
        in_module = [f"{module}.{name}" for name in self.names]
        yield from as_parameter + in_module if is_parameter else in_module + as_parameter


@dataclasses.dataclass(frozen=True)
class StorageFormat:
    """How a module's weights are stored.

    Attributes:
        name: For errors; formats of one name are equal.
        scheme: Scheme of the weights.
        tensors: Lists the stored tensors of a projection.
        note: What a layer's user should know about it.
    """

    name: str
    scheme: QuantScheme
    tensors: Callable[[Projection], Sequence[StoredTensor]] = dataclasses.field(compare=False)
    note: str | None = None


FormatOf = Callable[[str], "StorageFormat | None"]
"""Maps a module's name in the checkpoint to its format; None if it is unquantized."""


def _unquantized(projection: Projection) -> Sequence[StoredTensor]:
    return (StoredTensor(("weight",), (projection.shape,), FLOATS, "weight"),)


UNQUANTIZED: Final = StorageFormat("unquantized", QuantScheme("unquantized"), _unquantized)
"""16- or 32-bit weights."""


def transposed(stored: torch.Tensor) -> torch.Tensor:
    """Swaps rows and columns."""
    return stored.mT


# Names of scales in plain formats, by publisher: most; DeepSeek-V3; DeepSeek-V4; Mistral Large 4; gpt-oss; Quark's
# exports for transformers.
_SCALES: Final = (
    "weight_scale",
    "weight_scale_inv",
    "scale",
    "qscale_weight",
    "weight_scales",
    "weight_quantizer.scale",
)
_NUMBER: Final[tuple[tuple[int, ...], ...]] = ((), (1,), (1, 1))
_CODES: Final[Mapping[str, tuple[str, ...]]] = {"float8_e4m3fn": ("F8_E4M3",), "int8": ("I8",)}
_EXPONENTS: Final = ("U8", "F8_E8M0")
_SCALE_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": (*FLOATS, *_EXPONENTS),
    "float8_e4m3fn": ("F8_E4M3",),
    "float8_e8m0fnu": (*_EXPONENTS, "F32"),
}


def plain_tensors(scheme: QuantScheme, projection: Projection, scales_divide: bool = False) -> Sequence[StoredTensor]:
    """The tensors of a projection whose codes and scales are stored in the canonical order, whoever wrote them.

    - `weight` [N,K]; 4-bit codes are [N,K/2] uint8 or int8, low nibble the even column, or in blocks [N,K/32,16].
    - A scale per group, multiplied by despite "inv": [N,G], per block also [N/128, 1, K/128, 1], per row also [N], per
      matrix a number. Bytes are exponents with bias 127, which are codes of e8m0.
    - With a global scale, `weight_scale_2`. compressed-tensors has `weight_global_scale` and `input_global_scale`
      instead, by which it divides.
    - Static scales of activations and global ones: `input_scale`, a number.

    Source: export/quant_utils.py of nvidia-modelopt 0.47.0; compressors of compressed-tensors 0.20.0;
    integrations/finegrained_fp8.py and mxfp4.py of transformers 5.23; export and utils/pack.py of amd-quark 0.13;
    inference/convert.py of deepseek-ai/DeepSeek-V4.
    """
    fmt = scheme.weight
    assert fmt is not None
    rows, columns = projection.shape
    if fmt.group[0] == 1:
        projection.num_groups(fmt.group[1])
    if fmt.group[0] > 1 and projection.part == "gate_up" and rows // 2 % fmt.group[0]:
        raise CheckpointError(
            f"the gate rows of {projection.module} must be a multiple of {fmt.group[0]}, or one block has gate and up "
            f"rows under one scale, got {rows // 2}; {OTHERWISE}"
        )
    scale_shape = fmt.scale_shape(1, rows, columns)[1:]
    codes = (rows, fmt.packed_columns(columns))
    # In gpt-oss's blocks if they fit.
    code_shapes = (codes, (rows, columns // 32, 16)) if fmt.bits == 4 and columns % 32 == 0 else (codes,)
    halves = _halves(projection)
    scale_shapes: tuple[tuple[int, ...], ...] = (scale_shape,)
    if fmt.group == (WHOLE, WHOLE):
        scale_shapes = (*_NUMBER, *halves)
    elif fmt.group == (1, WHOLE):
        # One for all rows equals the same for each.
        scale_shapes = (scale_shape, (rows,), *_NUMBER)
    elif fmt.group[0] > 1:
        scale_shapes = (scale_shape, (scale_shape[0], 1, scale_shape[1], 1))
    as_codes = functools.partial(_codes, shape=codes, dtype=fmt.storage_dtype)
    as_scale = functools.partial(_scale, shape=scale_shape, is_exponent=fmt.scale_dtype == "float8_e8m0fnu")
    tensors = [
        StoredTensor(WEIGHT_NAMES[:3], code_shapes, _CODES.get(fmt.dtype, ("U8", "I8")), "weight", as_codes),
        StoredTensor(_SCALES, scale_shapes, _SCALE_DTYPES[fmt.scale_dtype], "scale", as_scale),
    ]
    if fmt.global_scale:
        name, convert = ("weight_global_scale", _inverse) if scales_divide else ("weight_scale_2", _number)
        tensors.append(StoredTensor((name,), (*_NUMBER, *halves), FLOATS, "scale_2", convert))
    return (*tensors, *activation_tensors(scheme, projection, scales_divide))


def activation_tensors(
    scheme: QuantScheme, projection: Projection, scales_divide: bool = False
) -> Sequence[StoredTensor]:
    """The scale of a projection's input, a number, if the scheme has one; `plain_tensors` says more."""
    divided, multiplied = "input_global_scale", ("input_scale", "activation_scale", "input_quantizer.scale")
    activation, shapes = scheme.activation, (*_NUMBER, *_halves(projection))
    if activation is None:
        # Written where files quantize activations; computing in 16 bits needs none.
        return (StoredTensor((*multiplied, divided), shapes, FLOATS, required=False),)
    if activation.static:
        return (StoredTensor(multiplied, shapes, FLOATS, "activation_scale", torch.amax),)
    if activation.global_scale:
        names = (divided,) if scales_divide else multiplied
        convert = functools.partial(_calibrated, divides=scales_divide)
        return (StoredTensor(names, shapes, FLOATS, "activation_scale", convert, required=False),)
    return ()


def _halves(projection: Projection) -> tuple[tuple[int, ...], ...]:
    """Shapes of two numbers, gate's and up's."""
    return ((2,), (2, 1)) if projection.part == "gate_up" else ()


def _codes(stored: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return stored.reshape(shape).view(dtype)


def _scale(stored: torch.Tensor, shape: tuple[int, ...], is_exponent: bool = False) -> torch.Tensor:
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    elif is_exponent and stored.dtype == torch.float32:
        floats, stored = stored, stored.to(torch.float8_e8m0fnu)
        if (others := floats[(stored.float() != floats) & ~floats.isnan()]).numel():
            raise CheckpointError(f"scales of 32 columns must be powers of two, got {float(others[0])}; {OTHERWISE}")
    if stored.numel() == 1:
        return stored.reshape(()).expand(shape)
    return stored.reshape(-1 if shape == () else shape)


def _number(stored: torch.Tensor) -> torch.Tensor:
    return _scale(stored, ())


def _inverse(stored: torch.Tensor) -> torch.Tensor:
    number = _number(stored).float()
    if not (number.isfinite() & (number > 0)).all():
        raise CheckpointError(
            "global scales of compressed-tensors must be finite and positive, since they divide, got "
            f"{float(number.flatten()[0])}; export the checkpoint with another"
        )
    return 1 / number


def _calibrated(stored: torch.Tensor, divides: bool) -> torch.Tensor:
    """The global scale of activations; 0 if its expert saw no token when it was calibrated."""
    numbers = stored.float()
    if not (numbers >= 0).all():
        raise CheckpointError(
            f"global scales of activations must be finite and positive, got {float(numbers.flatten()[0])}; take the "
            "tensor out of the file: then the layer's largest is used"
        )
    is_valid = (numbers > 0) & numbers.isfinite()
    return torch.where(is_valid, 1 / numbers if divides else numbers, 0).amax()
