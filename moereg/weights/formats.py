"""Interprets a `QuantFormat`: its element type, and how a matrix in it is scaled, rounded and dequantized."""

from __future__ import annotations

import dataclasses
import functools

import torch

from moereg.errors import ArgumentError
from moereg.spec.quant_schemes import QuantFormat
from moereg.weights.elements import E2M1, INTEGERS, NF4, Element, float8_element
from moereg.weights.groups import expand_groups


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix: codes, scales and zero points, x = (q - zero_point) * scale * scale_2.

    R rows, K columns (the reduced dimension), and the input's leading dimensions.

    Attributes:
        q: Codes [..., R, K] in the format's storage dtype; 4-bit ones packed [..., R, ceil(K/2)].
        scale: In the format's scale dtype, one per group [..., ceil(R/group rows), ceil(K/group columns)]; [] for a
            single scale, or [halves] if each half of the weights' rows has one. Groups of several rows never span two
            halves: [..., halves * ceil(R/halves/group rows), ...].
        scale_2: Global scale, fp32: [] or [halves] (weights); [] or one per row [..., R, 1] (activations); None if the
            format has none. Of quantized scales [..., 1 + blocks]: their offset, then the scale of each block.
        zero_point: One per group, packed like q along the groups of a row; None if symmetric.
        halves: 2 for gate and up rows, else 1.
    """

    q: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    halves: int = 1

    def of(self, expert: int) -> Quantized:
        """Views of one expert's matrix, where the leading dimension counts experts."""
        scale_2, zero_point = (None if each is None else each[expert] for each in (self.scale_2, self.zero_point))
        return Quantized(self.q[expert], self.scale[expert], scale_2, zero_point, self.halves)


@functools.lru_cache(maxsize=64)
def element_of(fmt: QuantFormat) -> Element:
    """The element type of a format."""
    if fmt.dtype == "float4_e2m1fn":
        element = E2M1
    elif fmt.dtype == "nf4":
        element = NF4
    elif fmt.dtype in INTEGERS:
        element = INTEGERS[fmt.dtype]
    else:
        dtype = getattr(torch, fmt.dtype, None)
        # float8_e8m0fnu holds only positive numbers, for scales.
        if not (
            isinstance(dtype, torch.dtype)
            and dtype.is_floating_point
            and dtype.itemsize == 1
            and torch.finfo(dtype).min < 0
        ):
            known = ", ".join(["float4_e2m1fn", "nf4", *INTEGERS, "the 8-bit floats of torch"])
            raise ArgumentError(f"no element type {fmt.dtype!r} to quantize to or from (known: {known})")
        element = float8_element(dtype)
    if not fmt.symmetric and not fmt.dtype.startswith("uint"):
        raise ArgumentError(f"zero points need an unsigned element type such as uint4, got {fmt.dtype}")
    return element


def total_scale(
    scale: torch.Tensor, scale_2: torch.Tensor | None, fmt: QuantFormat, rows: int, columns: int
) -> torch.Tensor:
    """The divisor that turns numbers into codes: the product of all scales, rounded to fp32.

    Broadcastable to [..., rows, columns].
    """
    product = scale.float() if scale_2 is None else scale.float() * scale_2
    return expand_groups(product, fmt.group, rows, columns)


def spread_zero_points(
    zero_point: torch.Tensor, fmt: QuantFormat, num_groups: int, rows: int, columns: int
) -> torch.Tensor:
    """Zero points of these rows as signed integers in fp32, broadcastable to [..., rows, columns]."""
    return expand_groups(element_of(fmt).decode(zero_point, num_groups), fmt.group, rows, columns)


def restore(
    matrix: Quantized, fmt: QuantFormat, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantizes a matrix to [..., rows, columns], computed in fp32 or fp64.

    Scales of row halves must be expanded to one per row, [rows, 1].
    """
    values = element_of(fmt).decode(matrix.q, columns).to(dtype)
    if matrix.zero_point is not None:
        values = values - spread_zero_points(matrix.zero_point, fmt, matrix.scale.shape[-1], rows, columns)
    # The group scale first: a 4-bit or 8-bit float times an 8-bit one is exact, so only scale_2 rounds.
    values = values * expand_groups(matrix.scale.to(dtype), fmt.group, rows, columns)
    return values if matrix.scale_2 is None else values * matrix.scale_2.to(dtype)
