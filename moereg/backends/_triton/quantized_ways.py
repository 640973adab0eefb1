"""The ways through a layer of quantized weights and activations: a rule selects one for a call, and it runs.

| way | rows | launches |
|---|---|---|
| `Direct` | up to 16 tokens | codes of tokens, tiles whose rows are the tokens themselves, and a reduction |
| `Sorted` | more | a sort, codes of tokens beside it, tiles of sorted routes, and a reduction |
| `Hopper` | more than 30 an expert | a sort, codes of sorted rows, warp-specialized tiles, and a reduction |
| `Batched` | [E, max_T, H] | a plan of tiles over each expert's rows, their codes, then the products |

The intermediate is rounded to the problem's dtype and then quantized: in the first product if a tile holds whole groups
or the scales are given, else in a launch between the two.

Sizes: T tokens, K choices of each, N = T * K routes, H hidden size, I_pad padded intermediate size.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton.quantized_workspace import (
    Piece,
    batch_plan_bytes,
    by_group,
    cut,
    intermediate_pieces,
    route_plan_bytes,
    row_pieces,
)
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper import quantized_gemm as hopper
from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M
from moereg.kernels.quantized.down import quantized_down_gemm
from moereg.kernels.quantized.gate_up import quantized_gate_up_gemm
from moereg.kernels.quantized.operands import CodedOutput, QuantizedMatrices, QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.rows import RouteIds, quantize_rows, rows_of_plan
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.quantized.rows_sorted import quantize_to_sorted_rows
from moereg.kernels.rows.block_map import plan_batches
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_routes, reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import GUARD_ROWS
from moereg.problem import MoEProblem
from moereg.quant import QuantFormat


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The arguments of a way: everything that each of its launches reads.

    Attributes:
        problem: the layer.
        call: tensors and workspaces.
        codes: of activations.
        fmt: the same as the kernels read it.
        w13, w2: permuted.
        epilogue: of the first product.
        overlap: whether a launch may start before the one in front of it has ended.
    """

    problem: MoEProblem
    call: Call
    codes: QuantFormat
    fmt: RowFormat
    w13: QuantizedMatrices
    w2: QuantizedMatrices
    epilogue: GateUpEpilogue
    overlap: bool

    def sort_routes(self, block_m: int, words: torch.Tensor) -> RoutePlan:
        """The routes sorted by expert; the plan is written to these bytes."""
        problem, inputs = self.problem, self.call.inputs
        return sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            block_m,
            words.view(torch.int32),
            overlap=self.overlap,
        )

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, *global_scale: torch.Tensor) -> QuantizedRows:
        """Pieces of a workspace as rows of codes."""
        return QuantizedRows(codes, scales, self.fmt.group, *global_scale)


class Way(abc.ABC):
    """One way through a layer, selected for a call."""

    @abc.abstractmethod
    def run(self, work: Work) -> None:
        """Launches everything."""


@dataclass(frozen=True, slots=True)
class Direct(Way):
    """Few tokens: row t of every tile is token t, and nothing is sorted."""

    configs: GemmPair

    def run(self, work: Work) -> None:
        inputs, second = work.call.inputs, work.call.workspace2.view(torch.uint8)
        routes = DirectRoutes(
            inputs.topk_ids, inputs.expert_map, work.problem.num_experts, self.configs.gate_up.block_m
        )
        behind_plan = second[route_plan_bytes(work.problem, len(inputs.topk_ids)) :]
        _run_tiles(work, self.configs, routes, behind_plan)


@dataclass(frozen=True, slots=True)
class Sorted(Way):
    """Routes are sorted by expert, and tiles lie over the sorted routes."""

    configs: GemmPair

    def run(self, work: Work) -> None:
        second = work.call.workspace2.view(torch.uint8)
        plan_bytes = route_plan_bytes(work.problem, len(work.call.inputs.topk_ids))
        plan = work.sort_routes(self.configs.gate_up.block_m, second[:plan_bytes])
        _run_tiles(work, self.configs, plan, second[plan_bytes:])


def _run_tiles(work: Work, configs: GemmPair, plan: RoutePlan | DirectRoutes, behind_plan: torch.Tensor) -> None:
    """Codes of tokens, both products over tiles of rows, then the sum over each token's routes."""
    problem, call, fmt, overlap = work.problem, work.call, work.fmt, work.overlap
    inputs, weights = call.inputs, call.weights
    num_tokens, hidden_size = call.out.shape
    num_routes = num_tokens * problem.top_k
    on_input = problem.apply_router_weight_on_input
    pieces = intermediate_pieces(problem, work.codes, num_routes)
    intermediate, amax, *codes = cut(call.workspace13.view(torch.uint8), *pieces)  # [N, I_pad] first
    rows = work.rows(*codes)
    amax_of_all = amax if fmt.spans_rows else None
    a13_scale = weights.get("a13_scale")
    # A token may go to several experts, whose static scales differ.
    by_route = a13_scale is not None and a13_scale.numel() > 1
    tokens = work.rows(*cut(behind_plan, *row_pieces(work.codes, num_routes if by_route else num_tokens, hidden_size)))
    quantize_rows(
        tokens,
        inputs.hidden_states,
        Quantizer(fmt, a13_scale, amax_of_all),
        RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts),
        topk_weights=inputs.topk_weights,
        apply_router_weight_on_input=on_input,
        # Does not read the sort's output.
        independent=True,
        # Without a sort, this is the layer's first kernel.
        overlap=overlap and configs.sort_routes,
    )
    quantizer = Quantizer(fmt, weights.get("a2_scale"), amax_of_all)
    fuses = fmt.fits_tile(configs.gate_up.block_n)
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
        bias=weights.get("w2_bias"),
        topk_weights=inputs.topk_weights,
        apply_router_weight_on_input=on_input,
        overlap=overlap,
    )
    reduce_routes(
        call.out,
        route_rows,
        inputs.topk_ids,
        expert_map=inputs.expert_map,
        num_experts=problem.num_experts,
        num_local_experts=problem.num_local_experts,
        overlap=overlap,
    )


@dataclass(frozen=True, slots=True)
class Hopper(Way):
    """Routes are sorted, and persistent warp-specialized programs take tiles of them; both buffers have a guard."""

    def run(self, work: Work) -> None:
        problem, call, fmt, overlap = work.problem, work.call, work.fmt, work.overlap
        inputs = call.inputs
        num_tokens, hidden_size = call.out.shape
        num_routes = num_tokens * problem.top_k
        num_rows = GUARD_ROWS + num_routes
        on_input = problem.apply_router_weight_on_input
        second = call.workspace2.view(torch.uint8)
        plan_bytes = route_plan_bytes(problem, num_tokens)
        behind_plan = second[plan_bytes:]
        plan = work.sort_routes(QUANTIZED_BLOCK_M, second[:plan_bytes])
        token_codes, token_scales = cut(behind_plan, *row_pieces(work.codes, num_routes, hidden_size))
        tokens = work.rows(token_codes, by_group(token_scales))
        quantize_to_sorted_rows(
            tokens,
            inputs.hidden_states,
            fmt,
            plan.route_row,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=on_input,
            overlap=overlap,
        )
        pieces = intermediate_pieces(problem, work.codes, num_rows)
        intermediate, _, codes, scales = cut(call.workspace13.view(torch.uint8), *pieces)  # [guard + N, ...] each
        scales = by_group(scales)
        rows = work.rows(codes[GUARD_ROWS:], scales[GUARD_ROWS:])
        if fmt.group:
            behind_guard = work.rows(codes, scales[GUARD_ROWS:])
            hopper.quantized_gate_up_gemm(
                behind_guard, tokens, work.w13, plan, work.epilogue, rounded=problem.torch_dtype, overlap=overlap
            )
        else:
            hopper.quantized_gate_up_gemm(intermediate, tokens, work.w13, plan, work.epilogue, overlap=overlap)
            quantize_rows(rows, intermediate[GUARD_ROWS:], Quantizer(fmt), plan, overlap=overlap)
        (sorted_rows,) = cut(behind_plan, Piece((num_rows, hidden_size), problem.torch_dtype))  # [guard + N, H]
        w2_bias = call.weights.get("w2_bias")
        hopper.quantized_down_gemm(sorted_rows, rows, work.w2, plan, bias=w2_bias, overlap=overlap)
        route_weights = None if on_input else inputs.topk_weights
        reduce_sorted_rows(call.out, sorted_rows[GUARD_ROWS:], plan.route_row, route_weights, overlap=overlap)


@dataclass(frozen=True, slots=True)
class Batched(Way):
    """Rows lie by expert already: tiles over those that count, which stay where they are."""

    configs: GemmPair

    def run(self, work: Work) -> None:
        problem, call, fmt, overlap = work.problem, work.call, work.fmt, work.overlap
        counts = call.inputs.expert_num_tokens
        assert counts is not None
        num_experts, max_tokens, hidden_size = call.out.shape
        num_rows = num_experts * max_tokens
        second = call.workspace2.view(torch.uint8)
        plan_bytes = batch_plan_bytes(problem, max_tokens)
        words = second[:plan_bytes].view(torch.int32)
        plan = plan_batches(counts, max_tokens, self.configs.gate_up.block_m, words, overlap=overlap)
        tokens = work.rows(*cut(second[plan_bytes:], *row_pieces(work.codes, num_rows, hidden_size)))
        pieces = intermediate_pieces(problem, work.codes, num_rows)
        intermediate, amax, *codes = cut(
            call.workspace13.view(torch.uint8), *pieces
        )  # [rows, I_pad], [programs], codes
        rows = work.rows(*codes)
        amax_of_all = amax if fmt.spans_rows else None
        hidden_rows = call.inputs.hidden_states.view(num_rows, hidden_size)
        quantize_batched_rows(
            tokens, hidden_rows, Quantizer(fmt, call.weights.get("a13_scale"), amax_of_all), plan, overlap=overlap
        )
        quantizer = Quantizer(fmt, call.weights.get("a2_scale"), amax_of_all)
        fuses = fmt.fits_tile(self.configs.gate_up.block_n)
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
            bias=call.weights.get("w2_bias"),
            overlap=overlap,
        )
