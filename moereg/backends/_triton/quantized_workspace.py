"""What the `triton` backend keeps in workspaces where activations are quantized: shapes of the parts, and views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD, WORKSPACE_ALIGNMENT
from moereg.layouts import round_up
from moereg.problem import MoEProblem
from moereg.quant import WHOLE, QuantFormat

# As scales are stored; kernels read powers of two as bytes.
_SCALE_DTYPES: Final = {"float8_e8m0fnu": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn}

Piece = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a part of a workspace."""


def row_pieces(fmt: QuantFormat, rows: int, columns: int) -> tuple[Piece, ...]:
    """Codes and scales of rows, and global scales where the format has them."""
    padded = round_up(columns, CODE_PAD)
    groups = 1 if fmt.group[1] == WHOLE else padded // fmt.group[1]
    codes = ((rows, fmt.packed_columns(padded)), fmt.storage_dtype)
    scales = ((rows, groups), _SCALE_DTYPES.get(fmt.scale_dtype, torch.float32))
    return (codes, scales, ((rows,), torch.float32)) if fmt.global_scale else (codes, scales)


def intermediate_pieces(problem: MoEProblem, fmt: QuantFormat, num_routes: int) -> tuple[Piece, ...]:
    """The intermediate, the largest magnitudes that programs found, and codes and scales."""
    size = problem.intermediate_size
    plain = ((num_routes, round_up(size, CODE_PAD)), problem.torch_dtype)
    return (plain, ((AMAX_PROGRAMS,), torch.int32), *row_pieces(fmt, num_routes, size))


def token_pieces(problem: MoEProblem, fmt: QuantFormat, num_tokens: int, by_route: bool) -> tuple[Piece, ...]:
    """Codes and scales of the tokens, or of a row for each route."""
    return row_pieces(fmt, num_tokens * (problem.top_k if by_route else 1), problem.hidden_size)


def by_group(scales: torch.Tensor) -> torch.Tensor:
    """Column-major view: a group's scales are contiguous."""
    return scales.view(scales.shape[1], scales.shape[0]).T if scales.shape[1] > 1 else scales


def piece_bytes(piece: Piece) -> int:
    """Bytes of a piece, padding included."""
    shape, dtype = piece
    return round_up(math.prod(shape) * dtype.itemsize, WORKSPACE_ALIGNMENT)


def cut(buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Consecutive views of the front of a uint8 buffer."""
    views, start = [], 0
    for shape, dtype in pieces:
        end = start + math.prod(shape) * dtype.itemsize
        views.append(buffer[start:end].view(dtype).view(shape))
        start += piece_bytes((shape, dtype))
    return views
