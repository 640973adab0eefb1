"""4-bit float weights with quantized activations, where nothing multiplies these: in 16 bits, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import packed, ways
from moereg.backends._triton.workspace import (
    batch_plan_numel,
    batched_rows_per_expert,
    numel_of_words,
    route_plan_numel,
)
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.quantized.emulate import SmallFloats, requantize_rows
from moereg.kernels.rows.reduce import reduce_routes
from moereg.kernels.sizes import WEIGHT_PAD
from moereg.layouts import aligned, round_up
from moereg.quantize import element_of
from moereg.weights import ExpertWeights, PermutedWeights

_SMALLEST_NORMAL: Final = {"float4_e2m1fn": 1.0, "float8_e4m3fn": 2.0**-6}


class Emulated(packed.Packed):
    """Shared by both activation formats: scales of activations, and the launch that rounds rows."""

    recorded_weights: ClassVar[tuple[str, ...]] = (*packed.Packed.recorded_weights, "a13_scale", "a2_scale")

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """As with 16-bit activations.

        Returns:
            The same, and where the checkpoint has them `a13_scale` and `a2_scale`, [E], or shared and [1].
        """
        permuted = super().permute_weights(weights)
        per_expert, shared = dict(permuted.per_expert), dict(permuted.shared)
        for name, scale in (("a13_scale", weights.a13_scale), ("a2_scale", weights.a2_scale)):
            if scale is not None:
                (per_expert if scale.dim() else shared)[name] = aligned(scale.reshape(-1))
        return PermutedWeights(permuted.layout, per_expert, shared)

    def grid(self) -> SmallFloats:
        """The numbers that rows are rounded to."""
        fmt = self.computes.activation
        assert fmt is not None
        assert fmt.group[0] == 1
        assert fmt.scale_dtype == ("float8_e4m3fn" if fmt.global_scale else "float8_e8m0fnu")
        element = element_of(fmt)
        assert element.mantissa_bits is not None
        return SmallFloats(
            element.mantissa_bits, _SMALLEST_NORMAL[fmt.dtype], element.max_value, fmt.group[1], fmt.global_scale
        )


class Standard(Emulated):
    """Standard format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan, global scales of rows, and rows [N, H].

        The rows are rounded tokens, or one for each route, and later those to be reduced.
        """
        problem = self.problem
        routes = num_tokens * problem.top_k
        start = route_plan_numel(problem, num_tokens) + numel_of_words(problem, routes)
        intermediate_size = round_up(problem.intermediate_size, WEIGHT_PAD)
        return (routes, intermediate_size), (start + routes * problem.hidden_size,)

    def select(self, call: Call) -> ways.Way:
        num_tokens = len(call.out)
        rows_per_expert = call.inputs.topk_ids.numel() / self.problem.num_experts
        # Also for one token: its rows are rounded in a launch between the products.
        return RoundedSorted(ways.select_tiles(num_tokens, rows_per_expert, call.out, self.packed_bits), self.grid())


class Batched(Emulated):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the plan of the tiles, and global scales of rows."""
        problem = self.problem
        rows = problem.num_local_experts * num_tokens
        intermediate_size = round_up(problem.intermediate_size, WEIGHT_PAD)
        return (problem.num_local_experts, num_tokens, intermediate_size), (
            batch_plan_numel(problem, num_tokens) + numel_of_words(problem, rows),
        )

    def select(self, call: Call) -> ways.Way:
        rows_per_expert = batched_rows_per_expert(self.problem, call.out.shape[1])
        return RoundedBatched(ways.select_tiles(math.inf, rows_per_expert, call.out, self.packed_bits), self.grid())


@dataclass(frozen=True, slots=True)
class RoundedSorted(ways.Way):
    """As `ways.Sorted`, with rows rounded in a launch in front of each product.

    Global scales of rows, where the format has them, are factors that the products multiply by.
    """

    configs: GemmPair
    grid: SmallFloats

    def run(self, work: ways.Work) -> None:
        problem, call, inputs, grid = work.problem, work.call, work.call.inputs, self.grid
        num_tokens = len(call.out)
        num_routes = work.num_routes
        plan = work.sort_routes(self.configs.gate_up.block_m)
        start = route_plan_numel(problem, num_tokens)
        factors = _cut_factors(work, grid, start, num_routes)
        behind_factors = numel_of_words(problem, num_routes)
        a13_scale, a2_scale = call.weights.get("a13_scale"), call.weights.get("a2_scale")
        # A token may go to several experts, whose static scales differ.
        by_route = a13_scale is not None and a13_scale.numel() > 1
        rows = work.behind_plan(behind_factors, num_routes if by_route else num_tokens)  # [T or N, H]
        requantize_rows(
            rows,
            inputs.hidden_states,
            grid,
            factors=factors,
            static_scale=a13_scale,
            route_expert=plan.route_expert if by_route else None,
            topk_weights=inputs.topk_weights if problem.apply_router_weight_on_input else None,
            overlap=work.overlap,
        )
        intermediate = call.workspace13[:num_routes]  # [N, I_pad]
        gate_up_gemm(
            intermediate,
            rows,
            work.w13,
            plan,
            self.configs.gate_up,
            work.epilogue,
            top_k=1 if by_route else problem.top_k,
            route_factors=factors,
            overlap=work.overlap,
        )
        requantize_rows(
            intermediate,
            intermediate,
            grid,
            factors=factors,
            static_scale=a2_scale,
            plan=plan,
            overlap=work.overlap,
        )
        route_rows = work.behind_plan(behind_factors, num_routes)  # [N, H]
        down_gemm(
            route_rows,
            intermediate,
            work.w2,
            plan,
            self.configs.down,
            bias=work.w2_bias,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=problem.apply_router_weight_on_input,
            row_factors=factors,
            overlap=work.overlap,
        )
        reduce_routes(call.out, route_rows, plan.route_expert, overlap=work.overlap)


@dataclass(frozen=True, slots=True)
class RoundedBatched(ways.Way):
    """As `ways.Batched`, with rows rounded in a launch in front of each product."""

    configs: GemmPair
    grid: SmallFloats

    def run(self, work: ways.Work) -> None:
        call, inputs, grid = work.call, work.call.inputs, self.grid
        counts = inputs.expert_num_tokens
        num_experts, max_tokens, _ = call.out.shape
        num_rows = num_experts * max_tokens
        plan = work.plan_batches(self.configs.gate_up.block_m)
        factors = _cut_factors(work, grid, batch_plan_numel(work.problem, max_tokens), num_rows)
        # The rows of the output are not written yet.
        rows, intermediate = call.out.view(num_rows, -1), call.workspace13.view(num_rows, -1)
        requantize_rows(
            rows,
            inputs.hidden_states.view(num_rows, -1),
            grid,
            factors=factors,
            static_scale=call.weights.get("a13_scale"),
            expert_num_tokens=counts,
            overlap=work.overlap,
        )
        gate_up_gemm(
            intermediate,
            rows,
            work.w13,
            plan,
            self.configs.gate_up,
            work.epilogue,
            top_k=1,
            route_factors=factors,
            overlap=work.overlap,
        )
        requantize_rows(
            intermediate,
            intermediate,
            grid,
            factors=factors,
            static_scale=call.weights.get("a2_scale"),
            expert_num_tokens=counts,
            overlap=work.overlap,
        )
        down_gemm(
            rows,
            intermediate,
            work.w2,
            plan,
            self.configs.down,
            bias=work.w2_bias,
            row_factors=factors,
            overlap=work.overlap,
        )


def _cut_factors(work: ways.Work, grid: SmallFloats, start: int, num_rows: int) -> torch.Tensor | None:
    """Global scales of that many rows, in the second workspace from an element on; None if there are none."""
    if not grid.global_scale:
        return None
    end = start + numel_of_words(work.problem, num_rows)
    return work.call.workspace2[start:end].view(torch.float32)[:num_rows]
