"""Schedules of layers with quantized weights and activations; a rule selects one per call.

| schedule | rows | launches |
|---|---|---|
| `Direct` | up to 16 tokens | quantize tokens, tiles whose rows are the tokens themselves, and a reduction |
| `Sorted` | more | a sort, alongside it quantize tokens, tiles of sorted routes, and a reduction |
| `Hopper` | more than 30 per expert | a sort, quantize sorted rows, warp-specialized tiles, and a reduction |
| `Batched` | [E, max_T, H] | a tile plan over each expert's rows, quantize them, then both GEMMs |

Tokens that arrive quantized are not quantized again: tiles read them in place, or they are copied to pad columns or,
for `Hopper`, to sort them.

The intermediate is rounded to the problem's dtype and then quantized: in the first GEMM if a tile holds whole groups or
the scales are given, otherwise in a launch between the two.

Sizes as in `work`, I_pad padded intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from moereg.backends._triton.work import Schedule, Work
from moereg.backends._triton.workspace import by_group, intermediate_pieces, row_pieces
from moereg.backends._workspace import cut
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.hopper import quantized_gemm as hopper
from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M, HopperQuantizedRule
from moereg.kernels.quantized.operands import CodedOutput, QuantizedMatrices, QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.products import quantized_down_gemm, quantized_gate_up_gemm
from moereg.kernels.quantized.rows import RouteIds, find_amax, quantize_rows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.quantized.rows_sorted import copy_coded_rows, quantize_to_sorted_rows
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS
from moereg.spec.quant_schemes import QuantFormat


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedWork(Work):
    """A call of a layer with quantized weights and activations; `row_format` is `activation_format` for the kernels."""

    activation_format: QuantFormat
    row_format: RowFormat
    w13: QuantizedMatrices
    w2: QuantizedMatrices

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, *global_scale: torch.Tensor) -> QuantizedRows:
        """Workspace pieces as quantized rows."""
        return QuantizedRows(codes, scales, self.row_format.group, *global_scale)

    @property
    def arrived(self) -> QuantizedRows | None:
        """The tokens [T, H] and scales, if they arrived quantized."""
        scales = self.call.inputs.hidden_scale
        if scales is None:
            return None
        # Routing weights would have to multiply them first.
        assert not self.problem.apply_router_weight_on_input
        return self.rows(self.call.inputs.hidden_states, scales.view(self.row_format.scale_dtype))

    @property
    def route_ids(self) -> RouteIds:
        """Ids that map rows to experts before any sort."""
        problem, inputs = self.problem, self.call.inputs
        return RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts)


QuantizedSchedule: TypeAlias = Schedule[QuantizedWork]


@dataclass(frozen=True, slots=True)
class Tiles(QuantizedSchedule):
    """A plan, quantized tokens, both GEMMs over tiles of rows, then the sum over each token's routes."""

    configs: GemmPair

    def plan(self, work: QuantizedWork) -> BlockMap | DirectRoutes:
        """Plans which rows the tiles cover."""
        return work.plan(self.configs.gate_up.block_m)

    def run(self, work: QuantizedWork) -> None:
        problem, call, row_format, overlap = work.problem, work.call, work.row_format, work.overlap
        inputs, weights, configs = call.inputs, call.weights, self.configs
        num_rows, hidden_size = work.num_rows, call.out.shape[-1]
        plan = self.plan(work)
        pieces = intermediate_pieces(problem, work.activation_format, num_rows)
        intermediate, amax, *row_tensors = cut(call.workspace13.view(torch.uint8), *pieces)  # [N or R, I_pad] first
        rows = work.rows(*row_tensors)
        amax_of_all = amax if row_format.spans_rows else None
        a13_scale = weights.get("a13_scale")
        # A token's experts may have different static scales.
        by_route = not work.is_batched and a13_scale is not None and a13_scale.numel() > 1
        num_coded = num_rows if by_route else len(work.tokens)
        tokens = work.rows(*cut(work.behind_plan, *row_pieces(work.activation_format, num_coded, hidden_size)))
        of_tokens = Quantizer(row_format, a13_scale, amax_of_all)
        quantizer = Quantizer(row_format, weights.get("a2_scale"), amax_of_all)
        # Without a sort, quantizing tokens is the layer's first kernel.
        overlap_codes = overlap and configs.sort_routes
        arrived = work.arrived
        if work.is_batched:
            assert isinstance(plan, BlockMap)
            quantize_batched_rows(tokens, work.tokens, of_tokens, plan, overlap=overlap)
        elif arrived is None:
            # Does not read the sort's output.
            more: dict[str, Any] = {"topk_weights": work.input_weights, "independent": True, "overlap": overlap_codes}
            quantize_rows(tokens, inputs.hidden_states, of_tokens, work.route_ids, **more)
        elif arrived.depth == tokens.depth:
            tokens = arrived
        else:
            copy_coded_rows(tokens, arrived, overlap=overlap_codes)
        fuses = row_format.fits_tile(configs.gate_up.block_n)
        out = CodedOutput(rows, quantizer, problem.torch_dtype) if fuses else intermediate
        more = {"top_k": work.top_k, "by_route": by_route, "overlap": overlap}
        quantized_gate_up_gemm(out, tokens, work.w13, plan, configs.gate_up, work.epilogue, **more)
        if not fuses and work.is_batched:
            assert isinstance(plan, BlockMap)
            quantize_batched_rows(rows, intermediate, quantizer, plan, overlap=overlap)
        elif not fuses:
            own = plan if isinstance(plan, RoutePlan) else work.route_ids
            quantize_rows(rows, intermediate, quantizer, own, overlap=overlap)
        route_rows = work.out if work.is_batched else work.route_rows()  # [R, H] or [N, H]
        more = {"bias": work.w2_bias, "topk_weights": work.tile_weights, "overlap": overlap}
        quantized_down_gemm(route_rows, rows, work.w2, plan, configs.down, **more)
        if not work.is_batched:
            work.reduce(route_rows)


class Direct(Tiles):
    """Few tokens: row t of every tile is token t, and nothing is sorted."""

    def plan(self, work: QuantizedWork) -> DirectRoutes:
        return work.direct_routes(self.configs.gate_up.block_m)


class Sorted(Tiles):
    """Sorts routes by expert, and tiles the sorted routes."""


class Batched(Tiles):
    """Rows are grouped by expert already: tiles cover the valid ones in place."""


@dataclass(frozen=True, slots=True)
class Hopper(QuantizedSchedule):
    """Sorted routes, tiled by persistent warp-specialized programs; both buffers have guard rows."""

    rule: HopperQuantizedRule

    def run(self, work: QuantizedWork) -> None:
        problem, call, row_format, overlap = work.problem, work.call, work.row_format, work.overlap
        inputs, rule, hidden_size = call.inputs, self.rule, call.out.shape[1]
        plan = work.sort_routes(QUANTIZED_BLOCK_M)
        pieces = row_pieces(work.activation_format, work.num_rows, hidden_size)
        token_codes, token_scales = cut(work.behind_plan, *pieces)
        tokens = work.rows(token_codes, by_group(token_scales))
        pieces = intermediate_pieces(problem, work.activation_format, GUARD_ROWS + work.num_rows)
        # [guard + N, ...] each except the second
        intermediate, amax, codes, scales = cut(call.workspace13.view(torch.uint8), *pieces)
        scales = by_group(scales)
        rows = work.rows(codes[GUARD_ROWS:], scales[GUARD_ROWS:])
        amax_of_all = amax if row_format.spans_rows else None
        early, arrived = rule.encodes_early, work.arrived
        if arrived is None:
            if amax_of_all is not None:
                num_tokens = len(inputs.hidden_states)
                find_amax(
                    amax_of_all, inputs.hidden_states, work.route_ids, num_tokens, work.input_weights, overlap=overlap
                )
            quantize_to_sorted_rows(
                tokens,
                inputs.hidden_states,
                Quantizer(row_format, call.weights.get("a13_scale"), amax_of_all),
                plan.route_row,
                route_expert=plan.route_expert,
                topk_weights=work.input_weights,
                encodes_early=early,
                overlap=overlap,
            )
        else:
            copy_coded_rows(tokens, arrived, plan.route_row, reads_early=early, overlap=overlap)
        static_scale = call.weights.get("a2_scale")
        # Rounding to integers needs instructions that the kernel lacks.
        fuses = row_format.group or (static_scale is not None and row_format.dtype == torch.float8_e4m3fn)
        out = work.rows(codes, scales[GUARD_ROWS:]) if fuses else intermediate
        given: dict[str, Any] = {"rounded": problem.torch_dtype, "static_scale": static_scale} if fuses else {}
        hopper.quantized_gate_up_gemm(
            out, tokens, work.w13, plan, work.epilogue, rule.gate_up, overlap=overlap, **given
        )
        if not fuses:
            quantizer = Quantizer(row_format, static_scale, amax_of_all)
            quantize_rows(rows, intermediate[GUARD_ROWS:], quantizer, plan, overlap=overlap)
        sorted_rows = work.route_rows(GUARD_ROWS)  # [guard + N, H]
        more: dict[str, Any] = {"bias": work.w2_bias, "topk_weights": work.early_weights, "overlap": overlap}
        hopper.quantized_down_gemm(sorted_rows, rows, work.w2, plan, rule.down, **more)
        reduce_sorted_rows(call.out, sorted_rows[GUARD_ROWS:], plan.route_row, work.late_weights, overlap=overlap)
