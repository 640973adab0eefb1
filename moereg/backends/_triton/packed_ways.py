"""The ways through a layer of packed weights that only Hopper has; see `ways.py` for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moereg.backends._triton.ways import PlainWay, PlainWork
from moereg.backends._triton.workspace import Piece, cut
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.flagged import both_gemms
from moereg.kernels.hopper.packed_config import HopperPackedRule
from moereg.kernels.hopper.packed_gemm import down_packed, gate_up_packed
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.copy import copy_rows
from moereg.kernels.rows.plan import max_num_blocks
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.sizes import FLAG_WORDS, GUARD_ROWS
from moereg.problem import MoEProblem


@dataclass(frozen=True, slots=True)
class HopperPacked(PlainWay):
    """As `ways.Hopper`, with weights that stay packed until they are in a consumer's registers."""

    config: HopperPackedRule

    def run(self, work: PlainWork) -> None:
        call, inputs, config = work.call, work.call.inputs, self.config
        assert isinstance(work.w13, PackedMatrix) and isinstance(work.w2, PackedMatrix)
        plan = work.sort_routes(config.gate_up.block_m, config.gate_up.slack)
        intermediate = call.workspace13[: GUARD_ROWS + work.num_routes]  # [guard + N, I_pad]
        shape = (GUARD_ROWS + work.num_routes, call.out.shape[1])
        (sorted_rows,) = cut(work.behind_plan, Piece(shape, call.out.dtype))  # [guard + N, H]
        rows: torch.Tensor = inputs.hidden_states
        if config.copies_rows:
            # The second GEMM's output is not written yet.
            rows = sorted_rows[GUARD_ROWS:]
            copy_rows(rows, inputs.hidden_states, plan.route_row, overlap=work.overlap)
        gate_up_packed(
            intermediate,
            rows,
            work.w13,
            plan,
            config.gate_up,
            work.epilogue,
            top_k=None if config.copies_rows else work.problem.top_k,
            overlap=work.overlap,
        )
        down_packed(sorted_rows, intermediate, work.w2, plan, config.down, bias=work.w2_bias, overlap=work.overlap)
        reduce_sorted_rows(
            call.out, sorted_rows[GUARD_ROWS:], plan.route_row, inputs.topk_weights, overlap=work.overlap
        )


@dataclass(frozen=True, slots=True)
class Flagged(PlainWay):
    """As `ways.Sorted`, with both products in one launch.

    Flags lie in the call's own scratch, where the launch that sorts its routes clears them. So calls of other streams,
    of copies of the layer and of captured graphs have others.
    """

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        problem, call, inputs = work.problem, work.call, work.call.inputs
        assert isinstance(work.w13, PackedMatrix) and isinstance(work.w2, PackedMatrix)
        block_m = self.configs.gate_up.block_m
        flags, route_rows = cut(
            work.behind_plan,
            _flags(max_num_blocks(work.num_routes, problem.num_local_experts, block_m)),
            Piece((work.num_routes, call.out.shape[1]), call.out.dtype),
        )  # [tiles, words], [N, H]
        plan = work.sort_routes(block_m, flags=flags)
        both_gemms(
            route_rows,
            call.workspace13[: work.num_routes],  # [N, I_pad]
            inputs.hidden_states,
            work.w13,
            work.w2,
            plan,
            self.configs,
            work.epilogue,
            top_k=problem.top_k,
            bias=work.w2_bias,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=problem.apply_router_weight_on_input,
            overlap=work.overlap,
        )
        work.reduce(route_rows)


def has_room_for_flags(problem: MoEProblem, num_routes: int) -> bool:
    """Whether the guard of the second workspace, which `Flagged` does without, holds as many flags as there are routes.

    There are no more tiles of rows than routes.
    """
    return _flags(num_routes).padded_bytes <= GUARD_ROWS * problem.hidden_size * problem.torch_dtype.itemsize


def _flags(num_tiles: int) -> Piece:
    return Piece((num_tiles, FLAG_WORDS), torch.int32)
