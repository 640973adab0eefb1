"""4-bit float weights with quantized activations, where nothing multiplies these: in 16 bits, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import packed, ways
from moereg.backends._triton.workspace import Piece, batched_rows_per_expert, cut
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


class Standard(Emulated, packed.Standard):
    """Standard format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan, global scales of rows, and rows [N, H].

        The rows are rounded tokens, or one for each route, and later those to be reduced.
        """
        problem = self.problem
        routes = num_tokens * problem.top_k
        in_front = self.plan_bytes(num_tokens) + _factors(routes).padded_bytes
        intermediate_size = round_up(problem.intermediate_size, WEIGHT_PAD)
        second = in_front // problem.torch_dtype.itemsize + routes * problem.hidden_size
        return (routes, intermediate_size), (second,)

    def select(self, call: Call) -> ways.PlainWay:
        rows_per_expert = call.inputs.topk_ids.numel() / self.problem.num_experts
        # Also for one token: its rows are rounded in a launch between the products.
        configs = ways.select_tiles(len(call.out), rows_per_expert, call.out, self.packed_bits)
        return RoundedSorted(configs, self.grid())


class Batched(Emulated, packed.Batched):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the plan of the tiles, and global scales of rows."""
        problem = self.problem
        intermediate, _ = super().workspace_shapes(num_tokens)
        num_bytes = self.plan_bytes(num_tokens) + _factors(problem.num_local_experts * num_tokens).padded_bytes
        return intermediate, (num_bytes // problem.torch_dtype.itemsize,)

    def select(self, call: Call) -> ways.PlainWay:
        rows_per_expert = batched_rows_per_expert(self.problem, call.out.shape[1])
        configs = ways.select_tiles(math.inf, rows_per_expert, call.out, self.packed_bits)
        return RoundedBatched(configs, self.grid())


@dataclass(frozen=True, slots=True)
class RoundedSorted(ways.PlainWay):
    """As `ways.Sorted`, with rows rounded in a launch in front of each product.

    Global scales of rows, where the format has them, are factors that the products multiply by.
    """

    configs: GemmPair
    grid: SmallFloats

    def run(self, work: ways.PlainWork) -> None:
        problem, call, inputs, grid = work.problem, work.call, work.call.inputs, self.grid
        num_tokens, hidden_size = call.out.shape
        num_routes = work.num_routes
        plan = work.sort_routes(self.configs.gate_up.block_m)
        a13_scale, a2_scale = call.weights.get("a13_scale"), call.weights.get("a2_scale")
        # A token may go to several experts, whose static scales differ.
        by_route = a13_scale is not None and a13_scale.numel() > 1
        num_rows = num_routes if by_route else num_tokens
        scales, route_rows = cut(
            work.behind_plan, _factors(num_routes), Piece((num_routes, hidden_size), call.out.dtype)
        )  # [N], [N, H]
        factors = scales if grid.global_scale else None
        # The second product's output is not written yet.
        rows = route_rows[:num_rows]  # [T or N, H]
        requantize_rows(
            rows,
            inputs.hidden_states,
            grid,
            factors=factors,
            static_scale=a13_scale,
            route_expert=plan.route_expert if by_route else None,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=problem.apply_router_weight_on_input,
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
class RoundedBatched(ways.PlainWay):
    """As `ways.Batched`, with rows rounded in a launch in front of each product."""

    configs: GemmPair
    grid: SmallFloats

    def run(self, work: ways.PlainWork) -> None:
        call, inputs, grid = work.call, work.call.inputs, self.grid
        counts = inputs.expert_num_tokens
        num_rows = call.out.shape[0] * call.out.shape[1]
        plan = work.plan_batches(self.configs.gate_up.block_m)
        factors = cut(work.behind_plan, _factors(num_rows))[0] if grid.global_scale else None  # [E * max_T]
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


def _factors(num_rows: int) -> Piece:
    """Global scales of rows; there is room for them where the format has none, too."""
    return Piece((num_rows,), torch.float32)
