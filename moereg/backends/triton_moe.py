"""The built-in Triton backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from moereg.backends._triton.interleaved import WEIGHT_PAD, InterleavedExperts, elements_of_plan
from moereg.experts import ExpertInputs
from moereg.layouts import round_up
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend
from moereg.weights import PermutedWeights

# Rows in front of both buffers of rows, into which a store of the Gluon kernels is anchored; as those kernels have it.
_GUARD_ROWS = 288


@register_moe_backend(
    name="triton",
    priority=100,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonExperts(InterleavedExperts):
    """Standard format: two grouped GEMMs over sorted routes with the activation between them, then a reduction.

    Up to 16 tokens need no sort, 8 with packed weights, and the second product of one token adds up its routes itself.

    Equal inputs give equal bits: a row of a product does not depend on its place in a tile, no kernel adds
    atomically, and a token's rows are added in an order that only its choices decide.
    """

    facts = dataclasses.replace(InterleavedExperts.facts, activation_formats=frozenset({"standard"}))
    output_form = "reduced"

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan of the routes and the rows [N, H] to be reduced."""
        routes = num_tokens * problem.top_k
        plan = _plan_numel(problem, num_tokens)
        return (
            (_GUARD_ROWS + routes, round_up(problem.intermediate_size, WEIGHT_PAD)),
            (plan + (_GUARD_ROWS + routes) * problem.hidden_size,),
        )

    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.config import (
            GemvPair,
            SinglePair,
            least_block_m,
            max_shared_bytes,
            select_config,
        )
        from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
        from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
        from moereg.kernels.gemm.single import MAX_TOP_K, down_single
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.packed.weights import PackedMatrix
        from moereg.kernels.rows.reduce import reduce_routes
        from moereg.kernels.rows.sort import RoutePlan, sort_routes
        from moereg.kernels.rows.tiles import DirectRoutes

        problem = self.problem
        hidden_states, topk_ids, expert_map = inputs.hidden_states, inputs.topk_ids, inputs.expert_map
        num_tokens, hidden_size = hidden_states.shape
        num_routes = num_tokens * problem.top_k
        configs = select_config(
            num_tokens,
            num_routes / problem.num_experts,
            hidden_states.element_size(),
            max_shared_bytes(hidden_states.device),
            self._packed_bits,
            least_block_m(hidden_states.device),
            single=problem.top_k <= MAX_TOP_K,
        )
        overlap = can_overlap(hidden_states.device)
        intermediate = workspace13[:num_routes]
        epilogue, w2_bias = self._epilogue(weights), weights.get("w2_bias")
        both: dict[str, Any] = {
            "topk_weights": inputs.topk_weights,
            "apply_router_weight_on_input": problem.apply_router_weight_on_input,
            "overlap": overlap,
        }
        w13, w2 = self._matrices(weights)
        if isinstance(configs, GemvPair):
            assert isinstance(w13, torch.Tensor)
            assert isinstance(w2, torch.Tensor)
            routes = DirectRoutes(topk_ids, expert_map, problem.num_experts, num_tokens)
            gate_up_gemv(intermediate, hidden_states, w13, routes, configs.gate_up, epilogue, **both)
            down_gemv(out, intermediate, w2, routes, configs.down, bias=w2_bias, **both)
            return
        if isinstance(configs, SinglePair):
            assert isinstance(w2, PackedMatrix)
            routes = DirectRoutes(topk_ids, expert_map, problem.num_experts, configs.gate_up.block_m)
            gate_up_gemm(
                intermediate, hidden_states, w13, routes, configs.gate_up, epilogue, top_k=problem.top_k, **both
            )
            down_single(out, intermediate, w2, routes, configs.down, bias=w2_bias, **both)
            return
        plan_numel = _plan_numel(problem, num_tokens)
        route_rows = workspace2[plan_numel : plan_numel + num_routes * hidden_size].view(num_routes, hidden_size)
        plan: RoutePlan | DirectRoutes
        if configs.sort_routes:
            plan = sort_routes(
                topk_ids,
                expert_map,
                problem.num_experts,
                problem.num_local_experts,
                configs.gate_up.block_m,
                workspace2[:plan_numel].view(torch.int32),
                overlap=overlap,
            )
        else:
            plan = DirectRoutes(topk_ids, expert_map, problem.num_experts, configs.gate_up.block_m)
        gate_up_gemm(intermediate, hidden_states, w13, plan, configs.gate_up, epilogue, top_k=problem.top_k, **both)
        # Rows in the dtype of the activations: fp32 would double the layer's largest buffer and its traffic to save a
        # rounding that the output makes anyway.
        down_gemm(route_rows, intermediate, w2, plan, configs.down, bias=w2_bias, **both)
        reduce_routes(
            out,
            route_rows,
            topk_ids,
            expert_map=expert_map,
            num_experts=problem.num_experts,
            num_local_experts=problem.num_local_experts,
            overlap=overlap,
        )

    def _warp_specialized(self, inputs: ExpertInputs) -> bool:
        problem, hidden_states = self.problem, inputs.hidden_states
        return (
            self._fits_gluon(hidden_states, inputs.topk_ids.numel() / problem.num_experts)
            and not problem.apply_router_weight_on_input
            # Tokens are copied at 32-bit offsets.
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        )

    def _launch_gluon(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.epilogue import GateUpEpilogue
        from moereg.kernels.hopper.config import select_config
        from moereg.kernels.hopper.gemm import down_gemm, gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.rows.copy import copy_rows
        from moereg.kernels.rows.reduce import reduce_sorted_rows
        from moereg.kernels.rows.sort import sort_routes
        from moereg.kernels.sizes import GUARD_ROWS

        assert GUARD_ROWS == _GUARD_ROWS, "the workspaces were sized for another guard"
        problem = self.problem
        num_tokens, hidden_size = inputs.hidden_states.shape
        num_routes = num_tokens * problem.top_k
        config = select_config(num_routes / problem.num_experts, weights["w13"].shape[1])
        overlap = can_overlap(out.device)
        plan_numel = _plan_numel(problem, num_tokens)
        intermediate = workspace13[: GUARD_ROWS + num_routes]
        sorted_rows = workspace2[plan_numel : plan_numel + (GUARD_ROWS + num_routes) * hidden_size].view(
            -1, hidden_size
        )
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            config.gate_up.block_m,
            workspace2[:plan_numel].view(torch.int32),
            slack=config.gate_up.slack,
            overlap=overlap,
        )
        rows: torch.Tensor = inputs.hidden_states
        if config.copies_rows:
            # The second GEMM's output is not there yet.
            rows = sorted_rows[GUARD_ROWS:]
            copy_rows(rows, inputs.hidden_states, plan.route_row, overlap=overlap)
        gate_up_gemm(
            intermediate,
            rows,
            weights["w13"],
            plan,
            config.gate_up,
            GateUpEpilogue(**self._gate_up_keywords(weights)),
            top_k=None if config.copies_rows else problem.top_k,
            overlap=overlap,
        )
        w2, w2_bias = weights["w2"], weights.get("w2_bias")
        down_gemm(sorted_rows, intermediate, w2, plan, config.down, bias=w2_bias, overlap=overlap)
        reduce_sorted_rows(out, sorted_rows[GUARD_ROWS:], plan.route_row, inputs.topk_weights, overlap=overlap)


# On the rows that count, where torch's batched matmuls (priority 11) run on all of E * max_T: with an even routing
# num_experts / top_k times as many.
@register_moe_backend(
    name="triton",
    priority=100,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonBatchedExperts(InterleavedExperts):
    """Batched format: the grouped GEMMs of `TritonExperts` over each expert's own rows, which stay where they are.

    Rows of `out` past an expert's count hold anything. Equal inputs give equal bits in the others.
    """

    facts = dataclasses.replace(InterleavedExperts.facts, activation_formats=frozenset({"batched"}))
    output_form = "per_expert"

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the plan of the tiles."""
        from moereg.kernels.gemm.config import MIN_BLOCK_M
        from moereg.kernels.rows.block_map import batch_workspace_numel

        num_experts = problem.num_local_experts
        ints = batch_workspace_numel(num_experts, num_tokens, MIN_BLOCK_M)
        intermediate = (num_experts, num_tokens, round_up(problem.intermediate_size, WEIGHT_PAD))
        return intermediate, (elements_of_plan(problem, ints),)

    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.config import GemmPair, least_block_m, max_shared_bytes, select_config
        from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.rows.block_map import plan_batches

        assert inputs.expert_num_tokens is not None
        w13, w2 = self._matrices(weights)
        num_experts, max_tokens, hidden_size = inputs.hidden_states.shape
        num_rows = num_experts * max_tokens
        configs = select_config(
            math.inf,
            self._rows_per_expert(max_tokens),
            inputs.hidden_states.element_size(),
            max_shared_bytes(out.device),
            self._packed_bits,
            least_block_m(out.device),
        )
        assert isinstance(configs, GemmPair)
        overlap = can_overlap(out.device)
        plan = plan_batches(
            inputs.expert_num_tokens,
            max_tokens,
            configs.gate_up.block_m,
            workspace2.view(torch.int32),
            overlap=overlap,
        )
        hidden_rows = inputs.hidden_states.view(num_rows, hidden_size)
        intermediate = workspace13.view(num_rows, -1)
        gate_up_gemm(
            intermediate,
            hidden_rows,
            w13,
            plan,
            configs.gate_up,
            self._epilogue(weights),
            top_k=1,
            overlap=overlap,
        )
        down_gemm(
            out.view(num_rows, hidden_size),
            intermediate,
            w2,
            plan,
            configs.down,
            bias=weights.get("w2_bias"),
            overlap=overlap,
        )

    def _warp_specialized(self, inputs: ExpertInputs) -> bool:
        hidden_states = inputs.hidden_states
        return self._fits_gluon(hidden_states, self._rows_per_expert(hidden_states.shape[1]))

    def _launch_gluon(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.epilogue import GateUpEpilogue
        from moereg.kernels.hopper.config import select_config
        from moereg.kernels.hopper.gemm import down_gemm, gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.rows.block_map import plan_batches

        assert inputs.expert_num_tokens is not None
        overlap = can_overlap(out.device)
        num_experts, max_tokens, hidden_size = inputs.hidden_states.shape
        config = select_config(self._rows_per_expert(max_tokens), math.inf)
        plan = plan_batches(
            inputs.expert_num_tokens,
            max_tokens,
            config.gate_up.block_m,
            workspace2.view(torch.int32),
            slack=config.gate_up.slack,
            overlap=overlap,
        )
        hidden_rows = inputs.hidden_states.view(num_experts * max_tokens, hidden_size)
        gate_up_gemm(
            workspace13,
            hidden_rows,
            weights["w13"],
            plan,
            config.gate_up,
            GateUpEpilogue(**self._gate_up_keywords(weights)),
            top_k=None,
            overlap=overlap,
        )
        w2, w2_bias = weights["w2"], weights.get("w2_bias")
        down_gemm(out, workspace13, w2, plan, config.down, bias=w2_bias, overlap=overlap)

    def _rows_per_expert(self, max_tokens: int) -> float:
        # Only the device knows the counts. Sizes say as much as max_T does: moereg's own prepare makes it the number of
        # tokens, as does a dispatch that has to have room for every token at one expert, and then this is the average.
        return max_tokens * self.problem.top_k / self.problem.num_experts


def _plan_numel(problem: MoEProblem, num_tokens: int) -> int:
    """Elements of the problem's dtype that hold the plan of any shipped configuration."""
    from moereg.kernels.gemm.config import MIN_BLOCK_M
    from moereg.kernels.rows.sort import route_workspace_numel

    ints = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_BLOCK_M)
    return elements_of_plan(problem, ints)
