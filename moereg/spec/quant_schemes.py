"""Quantization schemes as values: the formats of weights and activations, and the tensors that they need.

Cells say which backends support a scheme. A backend or plugin may construct further schemes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import torch

from moereg.arguments import check_flag, check_mapping, check_one_of, check_text, within
from moereg.errors import ArgumentError, UnknownSchemeError, shown, unknown_name_message

WHOLE: Final = -1
"""Group extent that means the whole dimension."""

_PACKED: Final = ("uint4", "float4_e2m1fn", "nf4")
_INTEGERS: Final = ("int8", "uint8")
_USUAL_FLOATS: Final = ("float32", "float8_e4m3fn", "float8_e8m0fnu")
"""Dtypes of moereg's own schemes, which are valid without loading torch for a second to check."""

NESTED_BLOCK: Final = 256
"""Scales of an expert's matrix, in order, that share a scale of their own where scales are quantized too."""


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How one operand of a matmul is stored.

    Attributes:
        dtype: Element type: a torch dtype's name, or `uint4`, `float4_e2m1fn` or `nf4`, stored two per byte, low nibble
            first along the reduced dimension.
        group: (rows, columns) that share a scale; `WHOLE` means a whole dimension. Columns run along the reduced one.
        scale_dtype: Name of the scales' torch dtype. `uint8` means fp32 scales that are quantized too, to the 8-bit
            codes of bitsandbytes' double quantization, `NESTED_BLOCK` at a time.
        global_scale: Whether a second fp32 scale multiplies all groups of an expert.
        symmetric: False if groups have a zero point.
        static: For activations: whether scales come with the checkpoint instead of from the data.

    Raises:
        ArgumentError: The dtype is not a 4-bit or 8-bit type, the scale's dtype is not a torch float, a group is empty,
            or zero points or a global scale do not fit the group.
    """

    dtype: str
    group: tuple[int, int]
    scale_dtype: str = "float32"
    global_scale: bool = False
    symmetric: bool = True
    static: bool = False

    def __post_init__(self) -> None:
        for field in ("global_scale", "symmetric", "static"):
            check_flag(f"{field} of a QuantFormat", getattr(self, field))
        if not isinstance(self.dtype, str) or (
            self.dtype not in (*_PACKED, *_INTEGERS) and not (_is_float(self.dtype) and "float8" in self.dtype)
        ):
            raise ArgumentError(
                f"dtype of a QuantFormat must be one of {', '.join((*_PACKED, *_INTEGERS))} or an 8-bit float of "
                f"torch, got {shown(self.dtype)}; store the codes in one of these"
            )
        # In this order, since torch is loaded to look up what is no float.
        if not (self.nested or _is_float(self.scale_dtype)):
            raise ArgumentError(
                "scale_dtype of a QuantFormat must name a float dtype of torch, or be uint8 for scales that are "
                f"quantized too, got {shown(self.scale_dtype)}; scales of another meaning are converted by the loader"
            )
        if not (isinstance(self.group, tuple) and len(self.group) == 2 and all(map(_is_extent, self.group))):
            raise ArgumentError(
                "group of a QuantFormat must be (rows, columns), each an integer of at least 1 or WHOLE (-1), got "
                f"{shown(self.group)}; give the extents that share a scale"
            )
        if not self.symmetric and self.group == (WHOLE, WHOLE):
            raise ArgumentError(
                "zero points of a QuantFormat belong to groups of a matrix, got one group for all of it; give groups, "
                "such as (1, WHOLE) for rows, or symmetric=True"
            )
        if self.nested and (self.group[0] != 1 or self.global_scale or self.static or not self.symmetric):
            raise ArgumentError(
                "quantized scales of a QuantFormat (scale_dtype uint8) belong to groups within a row, without zero "
                f"points, global or static scales, got {self}; give groups of 1 row, or float32 scales"
            )
        if self.global_scale and self.group[0] != 1:
            raise ArgumentError(
                f"a global scale of a QuantFormat multiplies scales of groups within a row, got group {self.group!r}; "
                "give groups of 1 row, or multiply the two scales of a checkpoint"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantFormat:
        """Inverse of `dataclasses.asdict`, also of JSON's list for the group; errors are as in the constructor."""
        keywords = known_fields(cls, "a QuantFormat", values, required=("dtype", "group"))
        if isinstance(keywords["group"], list):
            keywords["group"] = tuple(keywords["group"])
        return cls(**keywords)

    def __str__(self) -> str:
        rows, columns = ("all" if extent == WHOLE else extent for extent in self.group)
        parts = [f"{self.dtype} in groups of {rows} x {columns}", f"{self.scale_dtype} scales"]
        parts += ["quantized in blocks"] * self.nested
        parts += ["a global scale"] * self.global_scale
        parts += ["zero points"] * (not self.symmetric)
        parts += ["static"] * self.static
        return ", ".join(parts)

    @property
    def nested(self) -> bool:
        """Whether scales are quantized too."""
        return self.scale_dtype == "uint8"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 4 if self.dtype in _PACKED else 8

    @property
    def storage_dtype(self) -> torch.dtype:
        """Torch dtype of the stored tensor."""
        storage: torch.dtype = torch.uint8 if self.bits == 4 else getattr(torch, self.dtype)
        return storage

    def packed_columns(self, columns: int) -> int:
        """Stored columns of a row with that many elements."""
        return -(-columns * self.bits // 8)

    def scale_shape(self, num_experts: int, rows: int, columns: int, num_halves: int = 1) -> tuple[int, ...]:
        """Shape of the scales of an [E, rows, columns] operand, with partial groups; per-tensor scales are [E].

        Groups of several rows never span two of the `num_halves` parts of the rows, gate and up.
        """
        if self.group == (WHOLE, WHOLE):
            return (num_experts,)
        group_rows, group_columns = self.group
        return (
            num_experts,
            1 if group_rows == WHOLE else num_halves * -(-(rows // num_halves) // group_rows),
            1 if group_columns == WHOLE else -(-columns // group_columns),
        )


def _is_float(name: object) -> bool:
    if name in _USUAL_FLOATS:
        return True
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _is_extent(extent: object) -> bool:
    return isinstance(extent, int) and not isinstance(extent, bool) and (1 <= extent < 2**63 or extent == WHOLE)


def known_fields(kind: Any, name: str, values: Mapping[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass's fields out of JSON that others may have written; it has the required ones, and no other's."""
    known = tuple(field.name for field in dataclasses.fields(kind))
    for field in check_mapping(name, values):
        check_one_of(f"field of {name}", field, known)
    for field in required:
        if field not in values:
            raise ArgumentError(f"{field} of {name} is required, got an object with {shown(sorted(values))}")
    return dict(values)


MATRICES: Final = ("w13", "w2")
"""The two expert matrices of a layer, by field of `ExpertWeights`."""

TensorRole = Literal["weight", "bias", "scale", "scale_2", "activation_scale", "zero_point"]
"""The role of a tensor for its matrix."""


def tensor_name(matrix: str, role: TensorRole) -> str:
    """Field of `ExpertWeights` for a matrix's tensor of some role, such as `w13`, `w13_scale` or `a13_scale`."""
    if role == "weight":
        return matrix
    if role == "activation_scale":
        return f"a{matrix.removeprefix('w')}_scale"
    return f"{matrix}_{role}"


TENSOR_ROLES: Final[Mapping[str, TensorRole]] = {
    tensor_name(matrix, role): role for role in get_args(TensorRole) for matrix in MATRICES
}
"""The role of every tensor of `ExpertWeights`, by field, in field order."""


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor that a scheme needs, with its role for the matrix `w13` or `w2`.

    `dtype` is None for the problem's, and of the accepted `shapes` the usual one is first.
    """

    matrix: str
    role: TensorRole
    dtype: torch.dtype | None
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True

    @property
    def name(self) -> str:
        """Field of `ExpertWeights`."""
        return tensor_name(self.matrix, self.role)


@dataclasses.dataclass(frozen=True)
class QuantScheme:
    """A weight format and an activation format; None means 16 or 32 bits, the problem's dtype.

    Attributes:
        name: Its name in requests and tables.
        weight: Format of w13 and w2.
        activation: Format that the hidden states and the intermediate are rounded to.

    Raises:
        ArgumentError: The name is not printable text, or a format is not a QuantFormat.

    Example:
        >>> from moereg.spec.quant_schemes import get_scheme
        >>> scheme = get_scheme("int4_w4a16_g128")
        >>> scheme.weight.dtype, scheme.weight.group, scheme.activation
        ('uint4', (1, 128), None)
    """

    name: str
    weight: QuantFormat | None = None
    activation: QuantFormat | None = None

    def __post_init__(self) -> None:
        if not check_text("name of a QuantScheme", self.name):
            raise ArgumentError("name of a QuantScheme must not be empty, got ''; requests and tables spell it")
        for side in ("weight", "activation"):
            if not isinstance(fmt := getattr(self, side), (QuantFormat, type(None))):
                raise ArgumentError(f"{side} of a QuantScheme must be a QuantFormat or None, got {shown(fmt)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantScheme:
        """Inverse of `dataclasses.asdict`; errors are as in the constructor."""
        keywords = known_fields(cls, "a QuantScheme", values, required=("name",))
        for side in ("weight", "activation"):
            if keywords.get(side) is not None:
                keywords[side] = within(side, QuantFormat.from_dict, keywords[side])
        return cls(**keywords)

    @property
    def description(self) -> str:
        """The name, and for schemes other than moereg's own also the formats."""
        if self == QUANT_SCHEMES.get(self.name):
            return self.name
        weight, activation = (
            "the problem's dtype" if fmt is None else str(fmt) for fmt in (self.weight, self.activation)
        )
        return f"{self.name} (weights {weight}; activations {activation})"

    @property
    def weight_only(self) -> QuantScheme:
        """The same weights with activations of 16 or 32 bits."""
        return dataclasses.replace(self, activation=None)

    def serves(self, checkpoint: QuantScheme) -> bool:
        """Whether a kernel that computes this scheme can run weights of `checkpoint`.

        The weight format must be the checkpoint's; activations must be the same or have 16 bits.
        """
        return self.weight == checkpoint.weight and self.activation in (None, checkpoint.activation)

    def tensor_rows(
        self, num_experts: int, hidden_size: int, intermediate_size: int, num_halves: int, has_bias: bool
    ) -> tuple[TensorRow, ...]:
        """Tensors of weights in this scheme.

        Args:
            num_experts, hidden_size, intermediate_size: E of this rank, H and I.
            num_halves: 2 if the activation is gated, else 1.
            has_bias: Whether both matmuls have a bias.
        """
        sizes = {
            "w13": (num_halves * intermediate_size, hidden_size),
            "w2": (hidden_size, intermediate_size),
        }
        rows: list[TensorRow] = []
        for matrix, (size_n, size_k) in sizes.items():
            if has_bias:
                rows.append(TensorRow(matrix, "bias", None, ((num_experts, size_n),)))
            if self.weight is None:
                rows.append(TensorRow(matrix, "weight", None, ((num_experts, size_n, size_k),)))
                continue
            fmt = self.weight
            packed_shape = (num_experts, size_n, fmt.packed_columns(size_k))
            rows.append(TensorRow(matrix, "weight", fmt.storage_dtype, (packed_shape,)))
            parts = num_halves if matrix == "w13" else 1
            scale_shape = fmt.scale_shape(num_experts, size_n, size_k, parts)
            halves = ((num_experts, num_halves),) if matrix == "w13" else ()
            per_half = halves if scale_shape == (num_experts,) else ()
            rows.append(TensorRow(matrix, "scale", getattr(torch, fmt.scale_dtype), (scale_shape, *per_half)))
            if fmt.global_scale:
                rows.append(TensorRow(matrix, "scale_2", torch.float32, ((num_experts,), *halves)))
            if fmt.nested:
                # The offset, then a scale for each block of scales.
                num_blocks = -(-math.prod(scale_shape[1:]) // NESTED_BLOCK)
                rows.append(TensorRow(matrix, "scale_2", torch.float32, ((num_experts, 1 + num_blocks),)))
            if not fmt.symmetric:
                zero_shape = (num_experts, scale_shape[1], fmt.packed_columns(scale_shape[2]))
                rows.append(TensorRow(matrix, "zero_point", torch.uint8, (zero_shape,)))
            if self.activation is not None and (self.activation.static or self.activation.global_scale):
                shapes = ((num_experts,), ())
                is_static = self.activation.static
                rows.append(TensorRow(matrix, "activation_scale", torch.float32, shapes, required=is_static))
        return tuple(rows)


def get_scheme(name: str | QuantScheme) -> QuantScheme:
    """The scheme of that name; a scheme is returned as it is.

    Raises:
        ArgumentError: The argument is neither.
        UnknownSchemeError: No scheme has that name.
    """
    if isinstance(name, QuantScheme):
        return name
    if not isinstance(name, str):
        raise ArgumentError(f"quant must be a scheme's name or a QuantScheme, got {shown(name)}")
    try:
        return QUANT_SCHEMES[name]
    except KeyError:
        raise UnknownSchemeError(unknown_name_message("quant scheme", name, QUANT_SCHEMES, SCHEMES_CALLED)) from None


def spans_tokens(scheme: QuantScheme | str) -> bool:
    """Whether one dynamic scale spans all tokens of a call, so that tokens affect each other."""
    fmt = get_scheme(scheme).activation
    return fmt is not None and fmt.group[0] == WHOLE and not fmt.static


def _known_schemes() -> dict[str, QuantScheme]:
    fp8_tensor = QuantFormat("float8_e4m3fn", (WHOLE, WHOLE))
    fp8_channel = QuantFormat("float8_e4m3fn", (1, WHOLE))
    mxfp8 = QuantFormat("float8_e4m3fn", (1, 32), scale_dtype="float8_e8m0fnu")
    nvfp4 = QuantFormat("float4_e2m1fn", (1, 16), scale_dtype="float8_e4m3fn", global_scale=True)
    mxfp4 = QuantFormat("float4_e2m1fn", (1, 32), scale_dtype="float8_e8m0fnu")
    int8_channel = QuantFormat("int8", (1, WHOLE))
    schemes = [
        QuantScheme("unquantized"),
        QuantScheme("fp8_tensor_static", fp8_tensor, dataclasses.replace(fp8_tensor, static=True)),
        QuantScheme("fp8_tensor_dynamic", fp8_tensor, fp8_tensor),
        QuantScheme("fp8_channel_token", fp8_channel, fp8_channel),
        QuantScheme("fp8_block128", QuantFormat("float8_e4m3fn", (128, 128)), QuantFormat("float8_e4m3fn", (1, 128))),
        QuantScheme("mxfp8", mxfp8, mxfp8),
        QuantScheme("nvfp4", nvfp4, nvfp4),
        QuantScheme("nvfp4_w4a16", nvfp4),
        QuantScheme("mxfp4_w4a16", mxfp4),
        QuantScheme("mxfp4_mxfp8", mxfp4, mxfp8),
        QuantScheme("int8_w8a8", int8_channel, int8_channel),
        QuantScheme("int8_w8a16", int8_channel),
    ]
    for group in (32, 64, 128, WHOLE):
        suffix = "all" if group == WHOLE else str(group)
        for symmetric in (True, False):
            name = f"int4_w4a16_g{suffix}" + ("" if symmetric else "_zp")
            schemes.append(QuantScheme(name, QuantFormat("uint4", (1, group), symmetric=symmetric)))
    # W4AFP8, as in FlashInfer and TensorRT-LLM, and as in compressed-tensors.
    int4 = QuantFormat("uint4", (1, 128))
    schemes.append(QuantScheme("int4_w4a8_g128", int4, dataclasses.replace(fp8_tensor, static=True)))
    schemes.append(QuantScheme("int4_w4a8_g128_token", int4, fp8_channel))
    nf4 = QuantFormat("nf4", (1, 64))
    schemes.append(QuantScheme("nf4", nf4))
    schemes.append(QuantScheme("nf4_dq", dataclasses.replace(nf4, scale_dtype="uint8")))
    return {scheme.name: scheme for scheme in schemes}


QUANT_SCHEMES: Final[dict[str, QuantScheme]] = _known_schemes()

SCHEMES_CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "fp32", "float32", "none"), ("unquantized",)),
    "mxfp4": ("mxfp4_w4a16",),
    "gptq": ("int4_w4a16_g128",),
    "awq": ("int4_w4a16_g128_zp",),
    "bitsandbytes": ("nf4", "nf4_dq"),
    "int4": ("int4_w4a16_g128", "int4_w4a16_g128_zp", "int4_w4a16_g32", "int4_w4a16_g64"),
    "w4a16": ("int4_w4a16_g128", "mxfp4_w4a16", "nvfp4_w4a16"),
    **dict.fromkeys(("w4a8", "w4afp8", "w4a8_awq"), ("int4_w4a8_g128", "int4_w4a8_g128_token")),
}
"""Other names for schemes, with their usual meanings, for errors about unknown names."""
