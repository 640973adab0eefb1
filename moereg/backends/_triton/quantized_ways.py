"""The ways through a layer of quantized weights and activations: a rule selects one for a call, and it runs.

| way | rows | launches |
|---|---|---|
| `Direct` | up to 16 tokens | codes of tokens, tiles whose rows are the tokens themselves, and a reduction |
| `Sorted` | more | a sort, codes of tokens beside it, tiles of sorted routes, and a reduction |
| `Hopper` | more than 30 an expert | a sort, codes of sorted rows, warp-specialized tiles, and a reduction |
| `Batched` | [E, max_T, H] | a plan of tiles over each expert's rows, their codes, then the products |

Tokens that arrive as codes are not quantized: tiles read them where they lie, or where columns have to be filled up, as
`Hopper` has to sort them, they are copied.

The intermediate is rounded to the problem's dtype and then quantized: in the first product if a tile holds whole groups
or the scales are given, else in a launch between the two.

Sizes: T tokens, K choices of each, N = T * K routes, H hidden size, I_pad padded intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from moereg.backends._triton.work import Way, Work
from moereg.backends._triton.workspace import Piece, by_group, cut, intermediate_pieces, row_pieces
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.hopper import quantized_gemm as hopper
from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M, HopperQuantizedRule
from moereg.kernels.quantized.down import quantized_down_gemm
from moereg.kernels.quantized.gate_up import quantized_gate_up_gemm
from moereg.kernels.quantized.operands import CodedOutput, QuantizedMatrices, QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.rows import RouteIds, find_amax, quantize_rows, rows_of_plan
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.quantized.rows_coded import copy_coded_rows
from moereg.kernels.quantized.rows_sorted import quantize_to_sorted_rows
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS
from moereg.quant import QuantFormat


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedWork(Work):
    """A call of a layer whose weights and activations are codes.

    Attributes:
        activation_format: codes and scales of activations.
        row_format: the same as the kernels read it.
        w13, w2: permuted.
    """

    activation_format: QuantFormat
    row_format: RowFormat
    w13: QuantizedMatrices
    w2: QuantizedMatrices

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, *global_scale: torch.Tensor) -> QuantizedRows:
        """Pieces of a workspace as rows of codes."""
        return QuantizedRows(codes, scales, self.row_format.group, *global_scale)

    @property
    def arrived(self) -> QuantizedRows | None:
        """The tokens, [T, H] codes and scales, where they arrived as that."""
        scales = self.call.inputs.hidden_scale
        if scales is None:
            return None
        # A routing weight would have to scale them first.
        assert not self.problem.apply_router_weight_on_input
        return self.rows(self.call.inputs.hidden_states, scales.view(self.row_format.scale_dtype))


QuantizedWay: TypeAlias = Way[QuantizedWork]


@dataclass(frozen=True, slots=True)
class Direct(QuantizedWay):
    """Few tokens: row t of every tile is token t, and nothing is sorted."""

    configs: GemmPair

    def run(self, work: QuantizedWork) -> None:
        _run_tiles(work, self.configs, work.direct_routes(self.configs.gate_up.block_m))


@dataclass(frozen=True, slots=True)
class Sorted(QuantizedWay):
    """Routes are sorted by expert, and tiles lie over the sorted routes."""

    configs: GemmPair

    def run(self, work: QuantizedWork) -> None:
        _run_tiles(work, self.configs, work.sort_routes(self.configs.gate_up.block_m))


def _run_tiles(work: QuantizedWork, configs: GemmPair, plan: RoutePlan | DirectRoutes) -> None:
    """Codes of tokens, both products over tiles of rows, then the sum over each token's routes."""
    problem, call, row_format, overlap = work.problem, work.call, work.row_format, work.overlap
    inputs, weights = call.inputs, call.weights
    num_tokens, hidden_size = call.out.shape
    num_routes, behind_plan = work.num_routes, work.behind_plan
    on_input = problem.apply_router_weight_on_input
    pieces = intermediate_pieces(problem, work.activation_format, num_routes)
    intermediate, amax, *row_tensors = cut(call.workspace13.view(torch.uint8), *pieces)  # [N, I_pad] first
    rows = work.rows(*row_tensors)
    amax_of_all = amax if row_format.spans_rows else None
    a13_scale = weights.get("a13_scale")
    # A token may go to several experts, whose static scales differ.
    by_route = a13_scale is not None and a13_scale.numel() > 1
    num_coded = num_routes if by_route else num_tokens
    tokens = work.rows(*cut(behind_plan, *row_pieces(work.activation_format, num_coded, hidden_size)))
    # Without a sort, codes of tokens are the layer's first kernel.
    overlap_codes = overlap and configs.sort_routes
    arrived = work.arrived
    if arrived is None:
        quantize_rows(
            tokens,
            inputs.hidden_states,
            Quantizer(row_format, a13_scale, amax_of_all),
            RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts),
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=on_input,
            # Does not read the sort's output.
            independent=True,
            overlap=overlap_codes,
        )
    elif arrived.depth == tokens.depth:
        tokens = arrived
    else:
        copy_coded_rows(tokens, arrived, overlap=overlap_codes)
    quantizer = Quantizer(row_format, weights.get("a2_scale"), amax_of_all)
    fuses = row_format.fits_tile(configs.gate_up.block_n)
    quantized_gate_up_gemm(
        CodedOutput(rows, quantizer, problem.torch_dtype) if fuses else intermediate,
        tokens,
        work.w13,
        plan,
        configs.gate_up,
        work.epilogue,
        top_k=problem.top_k,
        by_route=by_route,
        overlap=overlap,
    )
    if not fuses:
        own = rows_of_plan(plan, problem.num_local_experts)
        quantize_rows(rows, intermediate, quantizer, own, overlap=overlap)
    (route_rows,) = cut(behind_plan, Piece((num_routes, hidden_size), problem.torch_dtype))  # [N, H]
    quantized_down_gemm(
        route_rows,
        rows,
        work.w2,
        plan,
        configs.down,
        bias=work.w2_bias,
        topk_weights=inputs.topk_weights,
        apply_router_weight_on_input=on_input,
        overlap=overlap,
    )
    work.reduce(route_rows)


@dataclass(frozen=True, slots=True)
class Hopper(QuantizedWay):
    """Routes are sorted, and persistent warp-specialized programs take tiles of them; both buffers have a guard."""

    rule: HopperQuantizedRule

    def run(self, work: QuantizedWork) -> None:
        problem, call, row_format, overlap = work.problem, work.call, work.row_format, work.overlap
        inputs = call.inputs
        hidden_size = call.out.shape[1]
        num_routes = work.num_routes
        num_rows = GUARD_ROWS + num_routes
        on_input = problem.apply_router_weight_on_input
        behind_plan = work.behind_plan
        plan = work.sort_routes(QUANTIZED_BLOCK_M)
        token_codes, token_scales = cut(behind_plan, *row_pieces(work.activation_format, num_routes, hidden_size))
        tokens = work.rows(token_codes, by_group(token_scales))
        pieces = intermediate_pieces(problem, work.activation_format, num_rows)
        # [guard + N, ...] each but the second
        intermediate, amax, codes, scales = cut(call.workspace13.view(torch.uint8), *pieces)
        scales = by_group(scales)
        rows = work.rows(codes[GUARD_ROWS:], scales[GUARD_ROWS:])
        amax_of_all = amax if row_format.spans_rows else None
        early, arrived = self.rule.encodes_early, work.arrived
        if arrived is None:
            if amax_of_all is not None:
                ids = RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts)
                input_weights = inputs.topk_weights if on_input else None
                num_tokens = len(inputs.hidden_states)
                find_amax(amax_of_all, inputs.hidden_states, ids, num_tokens, input_weights, overlap=overlap)
            quantize_to_sorted_rows(
                tokens,
                inputs.hidden_states,
                Quantizer(row_format, call.weights.get("a13_scale"), amax_of_all),
                plan.route_row,
                route_expert=plan.route_expert,
                topk_weights=inputs.topk_weights,
                apply_router_weight_on_input=on_input,
                encodes_early=early,
                overlap=overlap,
            )
        else:
            copy_coded_rows(tokens, arrived, plan.route_row, reads_early=early, overlap=overlap)
        static_scale = call.weights.get("a2_scale")
        # Integers are rounded by other instructions, which the kernel does not have.
        if row_format.group or (static_scale is not None and row_format.dtype == torch.float8_e4m3fn):
            behind_guard = work.rows(codes, scales[GUARD_ROWS:])
            hopper.quantized_gate_up_gemm(
                behind_guard,
                tokens,
                work.w13,
                plan,
                work.epilogue,
                self.rule.gate_up,
                rounded=problem.torch_dtype,
                static_scale=static_scale,
                overlap=overlap,
            )
        else:
            config = self.rule.gate_up
            hopper.quantized_gate_up_gemm(intermediate, tokens, work.w13, plan, work.epilogue, config, overlap=overlap)
            quantizer = Quantizer(row_format, static_scale, amax_of_all)
            quantize_rows(rows, intermediate[GUARD_ROWS:], quantizer, plan, overlap=overlap)
        (sorted_rows,) = cut(behind_plan, Piece((num_rows, hidden_size), problem.torch_dtype))  # [guard + N, H]
        hopper.quantized_down_gemm(sorted_rows, rows, work.w2, plan, self.rule.down, bias=work.w2_bias, overlap=overlap)
        route_weights = None if on_input else inputs.topk_weights
        reduce_sorted_rows(call.out, sorted_rows[GUARD_ROWS:], plan.route_row, route_weights, overlap=overlap)


@dataclass(frozen=True, slots=True)
class Batched(QuantizedWay):
    """Rows lie by expert already: tiles over those that count, which stay where they are."""

    configs: GemmPair

    def run(self, work: QuantizedWork) -> None:
        problem, call, row_format, overlap = work.problem, work.call, work.row_format, work.overlap
        num_experts, max_tokens, hidden_size = call.out.shape
        num_rows = num_experts * max_tokens
        plan = work.plan_batches(self.configs.gate_up.block_m)
        tokens = work.rows(*cut(work.behind_plan, *row_pieces(work.activation_format, num_rows, hidden_size)))
        pieces = intermediate_pieces(problem, work.activation_format, num_rows)
        intermediate, amax, *row_tensors = cut(call.workspace13.view(torch.uint8), *pieces)  # [E * max_T, I_pad] first
        rows = work.rows(*row_tensors)
        amax_of_all = amax if row_format.spans_rows else None
        hidden_rows = call.inputs.hidden_states.view(num_rows, hidden_size)
        of_tokens = Quantizer(row_format, call.weights.get("a13_scale"), amax_of_all)
        quantize_batched_rows(tokens, hidden_rows, of_tokens, plan, overlap=overlap)
        quantizer = Quantizer(row_format, call.weights.get("a2_scale"), amax_of_all)
        fuses = row_format.fits_tile(self.configs.gate_up.block_n)
        quantized_gate_up_gemm(
            CodedOutput(rows, quantizer, problem.torch_dtype) if fuses else intermediate,
            tokens,
            work.w13,
            plan,
            self.configs.gate_up,
            work.epilogue,
            top_k=1,
            overlap=overlap,
        )
        if not fuses:
            quantize_batched_rows(rows, intermediate, quantizer, plan, overlap=overlap)
        quantized_down_gemm(
            call.out.view(num_rows, hidden_size),
            rows,
            work.w2,
            plan,
            self.configs.down,
            bias=work.w2_bias,
            overlap=overlap,
        )
