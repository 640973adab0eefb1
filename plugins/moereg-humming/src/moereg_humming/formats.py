"""Canonical tensors as Humming reads them, before it reorders them. Plain torch, on any device.

Humming packs codes along the reduced dimension as moereg does, the first one in the low bits, but in words of 32 bits.
Integer codes are unsigned with a midpoint; zero points are packed along the rows; scales have 16 or 8 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import torch.nn.functional as F

from moereg.author import ExpertWeights, MoEProblem, QuantFormat, round_up

PAD_ROWS: Final = 256
PAD_COLUMNS: Final = 128
"""Rows and columns of a matrix become multiples of these, so that Humming's faster tiles fit."""

_ELEMENTS: Final = {
    "uint4": "uint4",
    "float4_e2m1fn": "float4e2m1",
    "int8": "uint8",
    "float8_e4m3fn": "float8e4m3",
}
_SCALES: Final = {"float32": None, "float8_e8m0fnu": "float8e8m0", "float8_e4m3fn": "float8e4m3"}


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    """How Humming calls one matrix of a layer.

    Attributes:
        element: Humming's name of the element type.
        scale: Humming's name of the scales' type; None for the activations' own.
        scale_type: `tensor` | `channel` | `group` | `block`.
        group: Rows and columns of a block or group; 0 for all.
        has_tensor_scale: Whether one fp32 scale an expert multiplies the others.
        has_zero_point: Whether groups have zero points.
        rows, columns: N and K.
    """

    element: str
    scale: str | None
    scale_type: str
    group: tuple[int, int]
    has_tensor_scale: bool
    has_zero_point: bool
    rows: int
    columns: int

    @property
    def padded_rows(self) -> int:
        """Multiple of `PAD_ROWS` and of a block's rows."""
        return round_up(self.rows, PAD_ROWS)

    @property
    def padded_columns(self) -> int:
        """Multiple of `PAD_COLUMNS` and of a group's columns."""
        return round_up(self.columns, PAD_COLUMNS)


def matrix_format(fmt: QuantFormat, dtype: torch.dtype, rows: int, columns: int) -> MatrixFormat:
    """Humming's words for a format.

    16-bit floats have too small a range for some fp32 scales if they are float16. Then one fp32 scale of each expert
    takes the magnitude.
    """
    group_rows, group_columns = (max(extent, 0) for extent in fmt.group)
    if fmt.group == (-1, -1):
        scale_type = "tensor"
    elif group_rows > 1:
        scale_type = "block"
    else:
        scale_type = "group" if group_columns else "channel"
    in_16_bits = scale_type in ("group", "channel") and dtype == torch.float16
    return MatrixFormat(
        element=_ELEMENTS[fmt.dtype],
        scale=_SCALES[fmt.scale_dtype],
        scale_type=scale_type,
        group=(group_rows if scale_type == "block" else 0, group_columns),
        has_tensor_scale=fmt.global_scale or (in_16_bits and fmt.scale_dtype != "float8_e4m3fn"),
        has_zero_point=not fmt.symmetric,
        rows=rows,
        columns=columns,
    )


def whole_blocks(problem: MoEProblem) -> MoEProblem:
    """The layer as Humming computes it: if rows share scales in blocks, gate ends with a whole one."""
    assert problem.quant.weight is not None
    block = max(problem.quant.weight.group[0], 1)
    return dataclasses.replace(problem, intermediate_size=round_up(problem.intermediate_size, block))


def codes(weight: torch.Tensor, fmt: MatrixFormat) -> torch.Tensor:
    """Codes in words of 32 bits.

    Args:
        weight: [E,N,K] of 8 bits or uint8 [E,N,ceil(K/2)].
        fmt: Of the matrix.

    Returns:
        int32 [E, padded N, padded K * bits / 32].
    """
    stored = weight.view(torch.uint8)
    if fmt.element == "uint8":
        stored = stored ^ 0x80  # Two's complement becomes an offset of 128.
    columns = fmt.padded_columns // 2 if fmt.element in ("uint4", "float4e2m1") else fmt.padded_columns
    return _padded(stored, fmt.padded_rows, columns).view(torch.int32)


def scales(
    scale: torch.Tensor, scale_2: torch.Tensor | None, fmt: MatrixFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and the one fp32 scale of each expert if the format has one.

    Args:
        scale: Canonical scales: [E,N,G], [E,N/n,G] for blocks, [E] or [E,2] for one per matrix.
        scale_2: fp32 [E] or [E,2], or None.
        fmt: Of the matrix.
        dtype: Of the activations, which fp32 group scales are rounded to.

    Returns:
        Scales [E, padded N, padded G] in `dtype` or 8 bits, [E, padded N / n, padded G] fp32 for blocks, fp32 [E] for
        one per matrix; and fp32 [E] or None. Of two halves with scales of their own, the larger one is taken.
    """
    if fmt.scale_type == "tensor":
        return larger_half(scale), None
    num_groups = max(fmt.padded_columns // fmt.group[1], 1) if fmt.group[1] else 1
    num_rows = fmt.padded_rows // fmt.group[0] if fmt.scale_type == "block" else fmt.padded_rows
    tensor_scale = None if scale_2 is None else larger_half(scale_2)
    if fmt.scale is not None:
        # A code of 127 is 1 in e8m0. A zero would be 2^-127, which is less than any 16-bit number.
        fill = 127 if fmt.scale == "float8e8m0" else 0
        padded = _padded(scale.view(torch.uint8), num_rows, num_groups, fill).view(scale.dtype)
        if fmt.has_tensor_scale and tensor_scale is None:
            tensor_scale = torch.ones(len(scale), dtype=torch.float32, device=scale.device)
        return padded, tensor_scale
    if fmt.scale_type == "block":
        return _padded(scale.float(), num_rows, num_groups), None
    if fmt.has_tensor_scale:
        # A power of two, by which dividing is exact.
        tensor_scale = torch.exp2(torch.frexp(scale.float().amax(dim=(1, 2))).exponent.float())
        scale = scale / tensor_scale[:, None, None]
    return _padded(scale.to(dtype), num_rows, num_groups), tensor_scale


def larger_half(scale: torch.Tensor) -> torch.Tensor:
    """[E] of one scale a matrix, or of one each for gate and up [E,2]."""
    return (scale.amax(dim=1) if scale.dim() == 2 else scale).contiguous()


def half_factors(weights: ExpertWeights) -> torch.Tensor | None:
    """Factors left over from scales that differ between gate and up, fp32 [E,2]; None where one scale serves both.

    A gate's product times the larger scale and this factor is the product times the gate's own scale.
    """
    scale = weights.w13_scale if weights.w13_scale_2 is None else weights.w13_scale_2
    if scale is None or scale.dim() != 2:
        return None
    larger = scale.amax(dim=1, keepdim=True)
    return torch.where(larger > 0, scale / larger, 1.0).contiguous()


def zero_points(packed: torch.Tensor, fmt: MatrixFormat, num_groups: int) -> torch.Tensor:
    """Zero points packed along rows instead of groups.

    Args:
        packed: uint8 [E,N,ceil(G/2)], the even group in the low nibble.
        fmt: Of the matrix.
        num_groups: G.

    Returns:
        int32 [E, padded N / 8, padded G], the first row in the low nibble.
    """
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :num_groups]
    padded_groups = fmt.padded_columns // fmt.group[1] if fmt.group[1] else 1
    nibbles = _padded(nibbles, fmt.padded_rows, padded_groups)
    low, high = nibbles[:, 0::2], nibbles[:, 1::2]  # [E, N / 2, G] each
    four = (low | (high << 4)).unflatten(1, (-1, 4)).transpose(2, 3)  # [E, N / 8, G, 4]
    # Flattened first: with one group a transposed tensor counts as contiguous and cannot be viewed in words.
    return four.reshape(-1).view(torch.int32).view(four.shape[:3])


def bias(tensor: torch.Tensor, fmt: MatrixFormat, dtype: torch.dtype) -> torch.Tensor:
    """[E, padded N] in the activations' dtype."""
    return F.pad(tensor.to(dtype), (0, fmt.padded_rows - tensor.shape[1]))


def _padded(tensor: torch.Tensor, rows: int, columns: int, value: int = 0) -> torch.Tensor:
    return F.pad(tensor, (0, columns - tensor.shape[2], 0, rows - tensor.shape[1]), value=value).contiguous()
