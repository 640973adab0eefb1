"""The ways through a layer of packed weights that only Hopper has; see `ways.py` for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moereg.backends._triton.ways import Hopper, PlainWay, PlainWork
from moereg.backends._triton.workspace import Piece, cut
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.flagged import both_gemms
from moereg.kernels.hopper.packed_gemm import down_packed, gate_up_packed
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.plan import max_num_blocks
from moereg.kernels.rows.reduce import DEFAULT_REDUCE_CONFIG
from moereg.kernels.sizes import FLAG_WORDS, GUARD_ROWS
from moereg.problem import MoEProblem


class HopperPacked(Hopper):
    """With weights that stay packed until they are in a consumer's registers."""

    gate_up = staticmethod(gate_up_packed)
    down = staticmethod(down_packed)
    reduction = DEFAULT_REDUCE_CONFIG


@dataclass(frozen=True, slots=True)
class Flagged(PlainWay):
    """As `ways.Sorted`, with both products in one launch.

    Flags lie in the call's own scratch, where the launch that sorts its routes clears them. So calls of other streams,
    of copies of the layer and of captured graphs have others.
    """

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        problem, out = work.problem, work.out
        block_m, num_routes = self.configs.gate_up.block_m, work.num_rows
        num_tiles = max_num_blocks(num_routes, problem.num_local_experts, block_m)
        flags, route_rows = cut(work.behind_plan, _flags(num_tiles), Piece((num_routes, out.shape[1]), out.dtype))
        plan = work.sort_routes(block_m, flags=flags)  # flags [tiles, words], route_rows [N, H]
        assert isinstance(work.w13, PackedMatrix) and isinstance(work.w2, PackedMatrix)
        both_gemms(
            route_rows,
            work.intermediate(),  # [N, I_pad]
            work.tokens,
            work.w13,
            work.w2,
            plan,
            self.configs,
            work.epilogue,
            top_k=problem.top_k,
            bias=work.w2_bias,
            route_factors=work.input_weights,
            topk_weights=work.output_weights,
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
