"""4-bit float weights with quantized activations where no hardware multiplies them: emulated exactly in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import packed, schedules
from moereg.backends._triton.workspace import batched_rows_per_expert
from moereg.backends._workspace import Piece, cut
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.quantized.emulate import SmallFloats, requantize_rows
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_routes
from moereg.kernels.sizes import WEIGHT_PAD
from moereg.quantize import element_of
from moereg.weights.layouts import aligned, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_SMALLEST_NORMAL: Final = {"float4_e2m1fn": 1.0, "float8_e4m3fn": 2.0**-6}


class Emulated(packed.Packed):
    """Activation scales and the choice of the rounding grid, for both activation formats."""

    recorded_weights: ClassVar[tuple[str, ...]] = (*packed.Packed.recorded_weights, "a13_scale", "a2_scale")

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """As for 16-bit activations, with the checkpoint's activation scales.

        Returns:
            The same, and `a13_scale` and `a2_scale` if present: [E], or shared and [1].
        """
        permuted = super().permute_weights(weights)
        per_expert, shared = dict(permuted.per_expert), dict(permuted.shared)
        for name, scale in (("a13_scale", weights.a13_scale), ("a2_scale", weights.a2_scale)):
            if scale is not None:
                (per_expert if scale.dim() else shared)[name] = aligned(scale.reshape(-1))
        return PermutedWeights(permuted.layout, per_expert, shared)

    def grid(self) -> SmallFloats:
        """The values that rows are rounded to."""
        fmt = self.computes.activation
        assert fmt is not None
        assert fmt.group[0] == 1
        assert fmt.scale_dtype == ("float8_e4m3fn" if fmt.global_scale else "float8_e8m0fnu")
        element = element_of(fmt)
        assert element.mantissa_bits is not None
        return SmallFloats(
            element.mantissa_bits, _SMALLEST_NORMAL[fmt.dtype], element.max_value, fmt.group[1], fmt.global_scale
        )

    def select(self, call: Call) -> schedules.PlainSchedule:
        inputs, hidden_states = call.inputs, call.inputs.hidden_states
        rows_per_expert = inputs.topk_ids.numel() / self.problem.num_experts
        if hidden_states.dim() == 3:
            rows_per_expert = batched_rows_per_expert(self.problem, hidden_states.shape[1])
        # For one token too, since a launch between the GEMMs rounds its rows.
        configs = schedules.select_configs(hidden_states, rows_per_expert, self.packed_bits)
        assert isinstance(configs, GemmPair)
        return Rounded(configs, self.grid())


class Standard(Emulated, packed.Standard):
    """Standard format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan, the rows' global scales, and rows [N, H].

        The rows first hold rounded tokens or routes, later the rows to reduce.
        """
        problem = self.problem
        routes = num_tokens * problem.top_k
        in_front = self.plan_bytes(num_tokens) + _factors(routes).padded_bytes
        intermediate_size = round_up(problem.intermediate_size, WEIGHT_PAD)
        second = in_front // problem.torch_dtype.itemsize + routes * problem.hidden_size
        return (routes, intermediate_size), (second,)


class Batched(Emulated, packed.Batched):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the tile plan and the rows' global scales."""
        problem = self.problem
        intermediate, _ = super().workspace_shapes(num_tokens)
        num_bytes = self.plan_bytes(num_tokens) + _factors(problem.num_local_experts * num_tokens).padded_bytes
        return intermediate, (num_bytes // problem.torch_dtype.itemsize,)


@dataclass(frozen=True, slots=True)
class Rounded(schedules.PlainSchedule):
    """Like `schedules.Sorted` and `schedules.Batched`, with a launch that rounds rows before each GEMM.

    If the format has global scales, the GEMMs multiply by each row's.
    """

    configs: GemmPair
    grid: SmallFloats

    def run(self, work: schedules.PlainWork) -> None:
        call, grid, overlap = work.call, self.grid, work.overlap
        plan = work.plan(self.configs.gate_up.block_m)
        a13_scale, a2_scale = call.weights.get("a13_scale"), call.weights.get("a2_scale")
        # A token's experts may have different static scales.
        by_route = not work.is_batched and a13_scale is not None and a13_scale.numel() > 1
        of_tokens: dict[str, Any] = {"topk_weights": work.input_weights, "overlap": overlap}
        of_rows: dict[str, Any] = {"overlap": overlap}
        scales, route_rows = cut(work.behind_plan, _factors(work.num_rows))[0], work.out  # [R], [R, H]
        if isinstance(plan, RoutePlan):
            shape = (work.num_rows, call.out.shape[1])
            scales, route_rows = cut(work.behind_plan, _factors(shape[0]), Piece(shape, call.out.dtype))  # [N], [N, H]
            of_tokens["route_expert"] = plan.route_expert if by_route else None
            of_rows["plan"] = plan
        else:
            of_tokens["expert_num_tokens"] = of_rows["expert_num_tokens"] = call.inputs.expert_num_tokens
        factors = scales if grid.global_scale else None
        # The second GEMM's output is not written yet, so it holds the rows; fp32 ones are twice as long.
        rows = route_rows.view(work.tokens.dtype)[:, : work.tokens.shape[1]]
        rows = rows if by_route else rows[: len(work.tokens)]  # [T, N or R, H]
        requantize_rows(rows, work.tokens, grid, factors=factors, static_scale=a13_scale, **of_tokens)
        intermediate, top_k = work.intermediate(), 1 if by_route else work.top_k  # [N or R, I_pad]
        more: dict[str, Any] = {"top_k": top_k, "route_factors": factors, "overlap": overlap}
        gate_up_gemm(intermediate, rows, work.w13, plan, self.configs.gate_up, work.epilogue, **more)
        requantize_rows(intermediate, intermediate, grid, factors=factors, static_scale=a2_scale, **of_rows)
        more = {"bias": work.w2_bias, "topk_weights": work.output_weights, "row_factors": factors, "overlap": overlap}
        down_gemm(route_rows, intermediate, work.w2, plan, self.configs.down, **more)
        if isinstance(plan, RoutePlan):
            reduce_routes(call.out, route_rows, plan.route_expert, overlap=overlap)


def _factors(num_rows: int) -> Piece:
    """The rows' global scales; the room is there even if the format has none."""
    return Piece((num_rows,), torch.float32)
