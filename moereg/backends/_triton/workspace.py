"""Workspaces of the `triton` backend: sizes of plans, and shapes and views of the pieces behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from moereg.kernels.rows.block_map import batch_workspace_numel
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD, WORKSPACE_ALIGNMENT
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantFormat
from moereg.weights.layouts import round_up

# As scales are stored; kernels read powers of two as bytes.
_SCALE_DTYPES: Final = {"float8_e8m0fnu": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn}


class Piece(NamedTuple):
    """A piece of a workspace."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes of a piece, padding included."""
        return round_up(self.num_bytes, WORKSPACE_ALIGNMENT)


def plan_bytes(problem: MoEProblem, num_tokens: int, shortest_tile: int) -> int:
    """Bytes that hold the plan of sorted routes, or of the tiles of the batched format, whatever the configuration.

    Args:
        problem: the layer.
        num_tokens: T, or max_T in the batched format.
        shortest_tile: rows of the shortest tile of the shipped configurations.
    """
    if problem.activation_format == "batched":
        words = batch_workspace_numel(problem.num_local_experts, num_tokens, shortest_tile)
    else:
        words = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, shortest_tile)
    return Piece((words,), torch.int32).padded_bytes


def batched_rows_per_expert(problem: MoEProblem, max_tokens: int) -> float:
    """Rows an expert in the batched format, as far as the host knows: only the device knows the counts.

    Sizes say as much as max_T does: moereg's own prepare makes it the number of tokens, as does a dispatch that has to
    have room for every token at one expert, and then this is the average.
    """
    return max_tokens * problem.top_k / problem.num_experts


def row_pieces(fmt: QuantFormat, rows: int, columns: int) -> tuple[Piece, ...]:
    """Codes and scales of rows, and global scales where the format has them."""
    depth = round_up(columns, CODE_PAD)
    groups = 1 if fmt.group[1] == WHOLE else depth // fmt.group[1]
    codes = Piece((rows, fmt.packed_columns(depth)), fmt.storage_dtype)
    scales = Piece((rows, groups), _SCALE_DTYPES.get(fmt.scale_dtype, torch.float32))
    return (codes, scales, Piece((rows,), torch.float32)) if fmt.global_scale else (codes, scales)


def intermediate_pieces(problem: MoEProblem, fmt: QuantFormat, rows: int) -> tuple[Piece, ...]:
    """The intermediate, the largest magnitudes that programs found, and codes and scales."""
    size = problem.intermediate_size
    plain = Piece((rows, round_up(size, CODE_PAD)), problem.torch_dtype)
    return (plain, Piece((AMAX_PROGRAMS,), torch.int32), *row_pieces(fmt, rows, size))


def group_columns(fmt: QuantFormat) -> int:
    """Elements of a row that share a scale; 0: all."""
    return 0 if fmt.group[1] == WHOLE else fmt.group[1]


def by_group(scales: torch.Tensor) -> torch.Tensor:
    """Column-major view: a group's scales are contiguous."""
    return scales.view(scales.shape[1], scales.shape[0]).T if scales.shape[1] > 1 else scales


def bytes_of(pieces: Sequence[Piece]) -> int:
    """Bytes that consecutive pieces take."""
    return sum(piece.padded_bytes for piece in pieces)


def cut(buffer: torch.Tensor, *pieces: Piece) -> list[torch.Tensor]:
    """Consecutive views of the front of a uint8 buffer."""
    views, start = [], 0
    for piece in pieces:
        num_bytes = piece.num_bytes
        views.append(buffer[start : start + num_bytes].view(piece.dtype).view(piece.shape))
        start += round_up(num_bytes, WORKSPACE_ALIGNMENT)
    return views
