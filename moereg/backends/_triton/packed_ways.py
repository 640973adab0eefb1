"""The way through a layer of packed weights that only Hopper has; see `ways.py` for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moereg.backends._triton.ways import PlainWay, PlainWork
from moereg.backends._triton.workspace import Piece, cut
from moereg.kernels.hopper.packed_config import HopperPackedRule
from moereg.kernels.hopper.packed_gemm import down_packed, gate_up_packed
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.copy import copy_rows
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS


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
