"""Workspaces of layers on moereg's own kernels: plan sizes, and the pieces after the plan."""

from __future__ import annotations

import torch

from moereg.backends._workspace import Piece
from moereg.kernels.quantized.operands import RowFormat
from moereg.kernels.rows.block_map import batch_workspace_numel
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD
from moereg.quantize import element_of
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantFormat
from moereg.weights.layouts import round_up


def plan_bytes(problem: MoEProblem, num_tokens: int, shortest_tile: int) -> int:
    """Bytes of the plan for T tokens (max_T in the batched format), enough for any tiles from the shortest one on."""
    if problem.activation_format == "batched":
        words = batch_workspace_numel(problem.num_local_experts, num_tokens, shortest_tile)
    else:
        words = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, shortest_tile)
    return Piece((words,), torch.int32).padded_bytes


def batched_rows_per_expert(problem: MoEProblem, max_tokens: int) -> float:
    """The host's estimate of rows per expert in the batched format, since the counts are on the device.

    moereg's own prepare sets max_T to the number of tokens, as does a token dispatcher with room for every token at
    one expert; then this is the average.
    """
    return max_tokens * problem.top_k / problem.num_experts


def row_pieces(fmt: QuantFormat, rows: int, columns: int) -> tuple[Piece, ...]:
    """Quantized rows and scales, with global scales if the format has them."""
    depth, own = round_up(columns, CODE_PAD), row_format(fmt)
    codes = Piece((rows, fmt.packed_columns(depth)), fmt.storage_dtype)
    scales = Piece((rows, own.num_groups(depth)), own.scale_dtype)
    return (codes, scales, Piece((rows,), torch.float32)) if fmt.global_scale else (codes, scales)


def intermediate_pieces(problem: MoEProblem, fmt: QuantFormat, rows: int) -> tuple[Piece, ...]:
    """The intermediate, each program's largest magnitude, then quantized rows and scales."""
    size = problem.intermediate_size
    plain = Piece((rows, round_up(size, CODE_PAD)), problem.torch_dtype)
    return (plain, Piece((AMAX_PROGRAMS,), torch.int32), *row_pieces(fmt, rows, size))


def row_format(fmt: QuantFormat) -> RowFormat:
    """The format of activations for the kernels."""
    element = element_of(fmt)
    return RowFormat(
        dtype=fmt.storage_dtype,
        min_code=element.min_value,
        max_code=element.max_value,
        group=group_columns(fmt),
        e8m0=fmt.scale_dtype == "float8_e8m0fnu",
        spans_rows=fmt.group[0] == WHOLE and not fmt.static,
        static=fmt.static,
        global_scale=fmt.global_scale,
    )


def group_columns(fmt: QuantFormat) -> int:
    """Elements of a row that share a scale; 0 means all."""
    return 0 if fmt.group[1] == WHOLE else fmt.group[1]


def by_group(scales: torch.Tensor) -> torch.Tensor:
    """Column-major view: a group's scales are contiguous."""
    return scales.view(scales.shape[1], scales.shape[0]).T if scales.shape[1] > 1 else scales
