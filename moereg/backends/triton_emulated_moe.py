"""`triton` for 4-bit float weights with quantized activations, where nothing multiplies these: in 16 bits, exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from moereg.backends._triton.interleaved import WEIGHT_PAD, elements_of_plan
from moereg.backends.triton_packed_moe import TritonPackedBatchedExperts, TritonPackedExperts, _PackedExperts
from moereg.experts import ExpertInputs
from moereg.layouts import aligned, round_up
from moereg.problem import MoEProblem
from moereg.quantize import element_of
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

if TYPE_CHECKING:
    from moereg.kernels.gemm.config import GemmPair
    from moereg.kernels.quantized.emulate import SmallFloats

_SMALLEST_NORMAL: Final = {"float4_e2m1fn": 1.0, "float8_e4m3fn": 2.0**-6}


class _EmulatedExperts(_PackedExperts):
    """What both formats of activations share: scales of activations, and the launch that rounds rows."""

    recorded_weights: ClassVar[tuple[str, ...]] = (*_PackedExperts.recorded_weights, "a13_scale", "a2_scale")

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """As for 16-bit activations.

        Returns:
            The same, and where the checkpoint has them `a13_scale` and `a2_scale`, [E], or shared and [1].
        """
        permuted = super().permute_weights(weights, problem)
        per_expert, shared = dict(permuted.per_expert), dict(permuted.shared)
        for name, scale in (("a13_scale", weights.a13_scale), ("a2_scale", weights.a2_scale)):
            if scale is not None:
                (per_expert if scale.dim() else shared)[name] = aligned(scale.reshape(-1))
        return PermutedWeights(permuted.layout, per_expert, shared)

    def _grid(self) -> SmallFloats:
        from moereg.kernels.quantized.emulate import SmallFloats

        fmt = self.computes.activation
        assert fmt is not None
        assert fmt.group[0] == 1
        assert fmt.scale_dtype == ("float8_e4m3fn" if fmt.global_scale else "float8_e8m0fnu")
        element = element_of(fmt)
        assert element.mantissa_bits is not None
        return SmallFloats(
            element.mantissa_bits, _SMALLEST_NORMAL[fmt.dtype], element.max_value, fmt.group[1], fmt.global_scale
        )

    def _configs(self, num_tokens: float, rows_per_expert: float, out: torch.Tensor) -> GemmPair:
        from moereg.kernels.gemm.config import GemmPair, least_block_m, max_shared_bytes, select_config

        configs = select_config(
            num_tokens,
            rows_per_expert,
            out.element_size(),
            max_shared_bytes(out.device),
            self._packed_bits,
            least_block_m(out.device),
            # One token's rows are rounded in a launch between the products.
            single=False,
        )
        assert isinstance(configs, GemmPair)
        return configs

    def _cut_factors(self, workspace2: torch.Tensor, start: int, num_factors: int) -> torch.Tensor | None:
        """Where global scales of so many rows are kept."""
        if not self._grid().global_scale:
            return None
        end = start + elements_of_plan(self.problem, num_factors)
        return workspace2[start:end].view(torch.float32)[:num_factors]


# As the emulation of mxfp8: right, and no faster than 16-bit activations, which beat it wherever these are allowed.
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("nvfp4",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
    tier="emulation",
)
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("mxfp4_mxfp8",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
    tier="emulation",
    # From 63,488 on float16 numbers are rounded to 65,536, which is none.
    dtypes=("bfloat16",),
)
class TritonEmulatedExperts(_EmulatedExperts, TritonPackedExperts):
    """Standard format: `TritonPackedExperts`, with rows rounded in a launch in front of each GEMM; always sorted."""

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan, global scales of rows, and rows [N, H].

        The rows are rounded tokens, or one for each route, and later those to be reduced.
        """
        routes = num_tokens * problem.top_k
        start = _plan_numel(problem, num_tokens) + elements_of_plan(problem, routes)
        intermediate_size = round_up(problem.intermediate_size, WEIGHT_PAD)
        return (routes, intermediate_size), (start + routes * problem.hidden_size,)

    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.quantized.emulate import requantize_rows
        from moereg.kernels.rows.reduce import reduce_routes
        from moereg.kernels.rows.sort import sort_routes

        problem, grid = self.problem, self._grid()
        num_tokens, hidden_size = out.shape
        num_routes = num_tokens * problem.top_k
        configs = self._configs(num_tokens, num_routes / problem.num_experts, out)
        overlap = can_overlap(out.device)
        plan_numel = _plan_numel(problem, num_tokens)
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            configs.gate_up.block_m,
            workspace2[:plan_numel].view(torch.int32),
            overlap=overlap,
        )
        factors = self._cut_factors(workspace2, plan_numel, num_routes)
        behind = workspace2[plan_numel + elements_of_plan(problem, num_routes) :]
        a13_scale, a2_scale = weights.get("a13_scale"), weights.get("a2_scale")
        # Each expert's static scale means something else to the same token.
        by_route = a13_scale is not None and a13_scale.numel() > 1
        num_rows = num_routes if by_route else num_tokens
        rows = behind[: num_rows * hidden_size].view(num_rows, hidden_size)
        requantize_rows(
            rows,
            inputs.hidden_states,
            grid,
            factors=factors,
            static_scale=a13_scale,
            route_expert=plan.route_expert if by_route else None,
            topk_weights=inputs.topk_weights if problem.apply_router_weight_on_input else None,
            overlap=overlap,
        )
        w13, w2 = self._matrices(weights)
        intermediate = workspace13[:num_routes]
        gate_up_gemm(
            intermediate,
            rows,
            w13,
            plan,
            configs.gate_up,
            self._epilogue(weights),
            top_k=1 if by_route else problem.top_k,
            route_factors=factors,
            overlap=overlap,
        )
        requantize_rows(
            intermediate, intermediate, grid, factors=factors, static_scale=a2_scale, plan=plan, overlap=overlap
        )
        route_rows = behind[: num_routes * hidden_size].view(num_routes, hidden_size)
        down_gemm(
            route_rows,
            intermediate,
            w2,
            plan,
            configs.down,
            bias=weights.get("w2_bias"),
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=problem.apply_router_weight_on_input,
            row_factors=factors,
            overlap=overlap,
        )
        reduce_routes(out, route_rows, plan.route_expert, overlap=overlap)


# As above.
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("nvfp4",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
    tier="emulation",
)
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("mxfp4_mxfp8",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
    tier="emulation",
    dtypes=("bfloat16",),
)
class TritonEmulatedBatchedExperts(_EmulatedExperts, TritonPackedBatchedExperts):
    """Batched format: `TritonPackedBatchedExperts`, with rows rounded in a launch in front of each GEMM."""

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the plan of the tiles, and global scales of rows."""
        intermediate, (plan_numel,) = super().workspace_shapes(problem, num_tokens)
        return intermediate, (plan_numel + elements_of_plan(problem, problem.num_local_experts * num_tokens),)

    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.quantized.emulate import requantize_rows
        from moereg.kernels.rows.block_map import plan_batches

        counts = inputs.expert_num_tokens
        assert counts is not None
        grid = self._grid()
        num_experts, max_tokens, hidden_size = out.shape
        num_rows = num_experts * max_tokens
        configs = self._configs(math.inf, self._rows_per_expert(max_tokens), out)
        overlap = can_overlap(out.device)
        _, (plan_numel,) = super().workspace_shapes(self.problem, max_tokens)
        plan = plan_batches(
            counts, max_tokens, configs.gate_up.block_m, workspace2[:plan_numel].view(torch.int32), overlap=overlap
        )
        factors = self._cut_factors(workspace2, plan_numel, num_rows)
        # The output is not there yet.
        rows, intermediate = out.view(num_rows, hidden_size), workspace13.view(num_rows, -1)
        requantize: dict[str, Any] = {"factors": factors, "expert_num_tokens": counts, "overlap": overlap}
        hidden_rows = inputs.hidden_states.view(num_rows, hidden_size)
        requantize_rows(rows, hidden_rows, grid, static_scale=weights.get("a13_scale"), **requantize)
        w13, w2 = self._matrices(weights)
        gate_up_gemm(
            intermediate,
            rows,
            w13,
            plan,
            configs.gate_up,
            self._epilogue(weights),
            top_k=1,
            route_factors=factors,
            overlap=overlap,
        )
        requantize_rows(intermediate, intermediate, grid, static_scale=weights.get("a2_scale"), **requantize)
        w2_bias = weights.get("w2_bias")
        down_gemm(rows, intermediate, w2, plan, configs.down, bias=w2_bias, row_factors=factors, overlap=overlap)


def _plan_numel(problem: MoEProblem, num_tokens: int) -> int:
    """Elements of the problem's dtype that hold the plan of any shipped configuration."""
    from moereg.kernels.gemm.config import MIN_BLOCK_M
    from moereg.kernels.rows.sort import route_workspace_numel

    ints = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_BLOCK_M)
    return elements_of_plan(problem, ints)
