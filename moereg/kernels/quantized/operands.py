"""Quantized rows and matrices with their scales, and how rows are quantized: host-side values, without Triton.

Sizes: R rows, K columns, `K_pad` columns of the codes, in code `depth`, G groups of a row, E local experts, N rows of a
matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD, GROUPED_BLOCK


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The codes and scales that rows are quantized to."""

    dtype: torch.dtype  # of the codes: an 8-bit float or int8, or uint8 for two float4_e2m1fn
    min_code: float  # smallest code
    max_code: float  # largest code, to which the largest magnitude of a group is mapped
    group: int = 0  # columns that share a scale, a power of two that divides `CODE_PAD`; 0: the whole row
    e8m0: bool = False  # whether scales are powers of two, stored as uint8; else they are fp32
    spans_rows: bool = False  # whether one dynamic scale is for all rows in use
    static: bool = False  # whether scales are given instead of computed
    # whether scales, those of float4_e2m1fn, are float8_e4m3fn on top of a global one for each row, which may be given
    global_scale: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of stored scales."""
        if self.global_scale:
            return torch.float8_e4m3fn
        return torch.uint8 if self.e8m0 else torch.float32

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernels that quantize rows."""
        return {"GROUP": self.group, "MIN_CODE": self.min_code, "MAX_CODE": self.max_code}

    def num_groups(self, depth: int) -> int:
        """G of rows of `depth` codes."""
        return depth // self.group if self.group else 1

    def fits_tile(self, columns: int) -> bool:
        """Whether a GEMM can write codes: a scale is static, or its group lies within a tile.

        A global scale needs the whole row.
        """
        return self.static or (not self.global_scale and self.group > 0 and columns % self.group == 0)


class CodeTensors(NamedTuple):
    """Tensors of `QuantizedRows` or `QuantizedMatrices` as one kernel argument."""

    q: Any
    scale: Any
    global_scale: Any


class CodeStrides(NamedTuple):
    """Strides of both operands of a product as one kernel argument: rows and their scales, then matrices and theirs."""

    rows: Any
    row_scales: Any
    expert: Any
    column: Any
    scale_expert: Any
    scale_row: Any


class _Coded:
    """Codes and scales, as kernels take them."""

    __slots__ = ()

    q: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None

    @property
    def depth(self) -> int:
        """K_pad."""
        return self.q.shape[-1] * (2 if self.q.dtype == torch.uint8 else 1)

    @property
    def tensors(self) -> CodeTensors:
        """All of them as one kernel argument."""
        return CodeTensors(self.q, self.scale, self.global_scale)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows(_Coded):
    """Codes and scales of rows."""

    # [R, K_pad] codes, rows contiguous, zeros from column K on; or [R, K_pad / 2] uint8, two float4_e2m1fn codes per
    # byte, the first in the low half
    q: torch.Tensor
    scale: torch.Tensor  # [R, G] fp32, uint8 where they are powers of two, or float8_e4m3fn where there are global ones
    group: int  # columns that share a scale; 0: the whole row
    global_scale: torch.Tensor | None = None  # [R] fp32, contiguous, or None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrices(_Coded):
    """Codes and scales of one matrix for each expert."""

    # [E, N, K_pad] codes, columns contiguous, zeros from column K on, fewer than 2**31 elements per expert; or [E, N,
    # K_pad / 2] uint8, two float4_e2m1fn codes per byte, the first in the low half
    q: torch.Tensor
    # [E, groups of rows, groups of columns] fp32, uint8 where they are powers of two, or float8_e4m3fn where there are
    # global ones; contiguous
    scale: torch.Tensor
    group_rows: int  # rows that share a scale
    group_columns: int  # columns that share a scale; 0: all
    # [E, halves] fp32, contiguous, one for gate and one for up if the matrix has both; or None
    global_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Quantizer:
    """How to quantize rows, with the tensors that this needs."""

    fmt: RowFormat  # format of the codes and scales
    static_scale: torch.Tensor | None = None  # fp32 [1] or [E], where scales or global ones are static
    amax: torch.Tensor | None = None  # [AMAX_PROGRAMS] int32, overwritten, where one dynamic scale spans the rows

    @property
    def by_expert(self) -> bool:
        """Whether scales differ between experts."""
        return self.static_scale is not None and self.static_scale.numel() > 1

    def check(self, out: QuantizedRows, x: torch.Tensor) -> None:
        """Asserts what every kernel that quantizes rows x to `out` requires of its operands."""
        fmt, depth = self.fmt, out.depth
        assert depth % CODE_PAD == 0 and x.shape[1] <= depth
        assert x.stride(1) == out.q.stride(1) == out.scale.stride(1) == 1 and out.q.dtype == fmt.dtype
        assert out.scale.shape == (out.q.shape[0], fmt.num_groups(depth)) and out.group == fmt.group
        assert fmt.spans_rows == (self.amax is not None) and fmt.global_scale == (out.global_scale is not None)
        assert self.amax is None or self.amax.numel() == AMAX_PROGRAMS
        assert fmt.global_scale or fmt.static == (self.static_scale is not None)
        assert not fmt.global_scale or (fmt.dtype == torch.uint8 and fmt.max_code == 6.0), "written for float4_e2m1fn"

    def columns_of_program(self, depth: int) -> int:
        """Columns per program, a power of two: a whole row if its scale, or its global one, is computed from it."""
        takes_parts = self.fmt.group and not (self.fmt.global_scale and self.static_scale is None)
        columns = min(GROUPED_BLOCK, depth) if takes_parts else depth
        return 1 << (columns - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class CodedOutput:
    """Rows that a GEMM rounds and quantizes before it stores them."""

    rows: QuantizedRows  # overwritten
    quantizer: Quantizer  # its format must fit the GEMM's tiles; see `RowFormat.fits_tile`
    rounded: torch.dtype  # dtype that numbers are rounded to before they are quantized, where the reference rounds
