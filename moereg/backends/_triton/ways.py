"""The ways through a layer: a rule selects one for a call, with its configurations, and it runs.

| way | rows | launches |
|---|---|---|
| `Gemv` | one token | a vector times each chosen expert's matrices, twice; the second adds up the routes |
| `Single` | one token, packed weights | a tile for each route, then a product that adds up the routes |
| `Direct` | up to 16 tokens | tiles whose rows are the tokens themselves, and a reduction |
| `Sorted` | more | a sort, tiles of sorted routes, low or tall as the expert's rows ask, and a reduction |
| `Hopper` | more than 22 an expert on sm90 | a sort, warp-specialized tiles, and a reduction |
| `packed_ways.HopperPacked` | more than 24 an expert on sm90, packed weights | as `Hopper` |
| `packed_ways.Flagged` | 9 to 16 tokens on sm90, packed weights of 4 bits | as `Sorted`, both products in one |
| `Batched`, `HopperBatched` | [E, max_T, H] | a plan of tiles over each expert's rows, then the products |

Sizes: T tokens, K choices of each, N = T * K routes, H hidden size, I_pad padded intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from moereg.backends._triton.work import Way, Work
from moereg.backends._triton.workspace import Piece, cut
from moereg.kernels.gemm import rules
from moereg.kernels.gemm.config import GemmPair, GemvPair, GroupedGemmConfig, SinglePair
from moereg.kernels.gemm.fit import CallShape, fit_pair
from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.gemm.single import MAX_TOP_K, down_single
from moereg.kernels.hopper import gemm as hopper
from moereg.kernels.hopper.config import HopperConfigRule
from moereg.kernels.launch import device as limits
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.copy import copy_rows
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import ReduceConfig, reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS, WEIGHT_PAD
from moereg.layouts import round_up
from moereg.problem import MoEProblem

Weights: TypeAlias = torch.Tensor | PackedMatrix

MIN_HOPPER_ROWS: Final = 22
"""Up to this many rows an expert the tiles of Hopper's kernels would be mostly padding.

On an H200 at 32 rows (gpt-oss-120b, 1,024 tokens) they lose 1 % where loads are even and win 4 % where they are uneven,
59 % where all tokens choose the same experts.
"""


# The second product waits for the first before it lets the reduction start, so that places are written by then.
_EARLY_REDUCE: Final = ReduceConfig(early=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainWork(Work):
    """A call of a layer whose weights are multiplied in 16 or 32 bits.

    Attributes:
        w13, w2: permuted.
    """

    w13: Weights
    w2: Weights


PlainWay: TypeAlias = Way[PlainWork]


def select(
    problem: MoEProblem, hidden_states: torch.Tensor, rows_per_expert: float, packed_bits: int | None
) -> Gemv | Single | Direct | Sorted:
    """The way of a call in the standard format on the Triton kernels.

    Args:
        problem: the layer.
        hidden_states: [T, H].
        rows_per_expert: the average.
        packed_bits: of a weight, where weights are packed.
    """
    single = problem.top_k <= MAX_TOP_K
    configs = _select_config(hidden_states.shape[0], rows_per_expert, hidden_states, packed_bits, single=single)
    if isinstance(configs, GemvPair):
        return Gemv(configs)
    if isinstance(configs, SinglePair):
        return Single(configs)
    configs = _fit(configs, problem, hidden_states, rows_per_expert, packed_bits)
    return Sorted(configs) if configs.sort_routes else Direct(configs)


def select_batched(
    problem: MoEProblem, hidden_states: torch.Tensor, rows_per_expert: float, packed_bits: int | None
) -> Batched:
    """The way of a call in the batched format on the Triton kernels; arguments as in `select`, of [E, max_T, H]."""
    configs = select_tiles(math.inf, rows_per_expert, hidden_states, packed_bits)
    return Batched(_fit(configs, problem, hidden_states, rows_per_expert, packed_bits))


def _fit(
    configs: GemmPair,
    problem: MoEProblem,
    hidden_states: torch.Tensor,
    rows_per_expert: float,
    packed_bits: int | None,
) -> GemmPair:
    depth = round_up(problem.intermediate_size, WEIGHT_PAD)
    shape = CallShape(
        most_rows=hidden_states.shape[-2],
        rows_per_expert=rows_per_expert,
        top_k=problem.top_k,
        gate_up_columns=problem.activation.num_halves * depth,
        down_columns=problem.hidden_size,
        down_depth=depth,
        element_bytes=hidden_states.element_size(),
        is_packed=packed_bits is not None,
        shared_bytes=limits.max_shared_bytes(hidden_states.device),
    )
    return fit_pair(configs, shape)


def select_tiles(
    num_tokens: float, rows_per_expert: float, hidden_states: torch.Tensor, packed_bits: int | None
) -> GemmPair:
    """Configurations of the grouped GEMMs, for rows that come with a plan however few they are.

    Args:
        num_tokens: T; infinity in the batched format.
        rows_per_expert: the average.
        hidden_states: [T, H] or [E, max_T, H].
        packed_bits: of a weight, where weights are packed.
    """
    configs = _select_config(num_tokens, rows_per_expert, hidden_states, packed_bits, single=False)
    assert isinstance(configs, GemmPair)
    return configs


def _select_config(
    num_tokens: float, rows_per_expert: float, hidden_states: torch.Tensor, packed_bits: int | None, *, single: bool
) -> GemvPair | SinglePair | GemmPair:
    device = hidden_states.device
    return rules.select_config(
        num_tokens,
        rows_per_expert,
        hidden_states.element_size(),
        limits.max_shared_bytes(device),
        packed_bits,
        limits.least_block_m(device),
        single=single,
    )


def fits_hopper(
    hidden_states: torch.Tensor, rows_per_expert: float, min_rows_per_expert: float = MIN_HOPPER_ROWS
) -> bool:
    """Whether Hopper's kernels can read the rows of a call, and there are enough an expert for them to pay."""
    return (
        hidden_states.device.type != "cpu"
        and hidden_states.element_size() == 2
        and rows_per_expert > min_rows_per_expert
        # Rows are copied by 16 bytes.
        and hidden_states.shape[-1] % 8 == hidden_states.stride(-2) % 8 == hidden_states.data_ptr() % 16 == 0
    )


@dataclass(frozen=True, slots=True)
class Gemv(PlainWay):
    """One token: every route is a vector; routes are neither sorted nor stored."""

    configs: GemvPair

    def run(self, work: PlainWork) -> None:
        call, inputs = work.call, work.call.inputs
        on_input = work.problem.apply_router_weight_on_input
        assert isinstance(work.w13, torch.Tensor) and isinstance(work.w2, torch.Tensor)
        routes = work.direct_routes(block_m=1)
        intermediate = call.workspace13[: work.num_routes]  # [K, I_pad]
        gate_up_gemv(
            intermediate,
            inputs.hidden_states,
            work.w13,
            routes,
            self.configs.gate_up,
            work.epilogue,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=on_input,
            overlap=work.overlap,
        )
        down_gemv(
            call.out,
            intermediate,
            work.w2,
            routes,
            self.configs.down,
            bias=work.w2_bias,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=on_input,
            overlap=work.overlap,
        )


@dataclass(frozen=True, slots=True)
class Single(PlainWay):
    """One token, packed weights: the second product adds up the routes itself."""

    configs: SinglePair

    def run(self, work: PlainWork) -> None:
        call, inputs = work.call, work.call.inputs
        assert isinstance(work.w2, PackedMatrix)
        routes = work.direct_routes(self.configs.gate_up.block_m)
        intermediate = call.workspace13[: work.num_routes]  # [K, I_pad]
        _gate_up(work, intermediate, routes, self.configs.gate_up)
        down_single(
            call.out,
            intermediate,
            work.w2,
            routes,
            self.configs.down,
            bias=work.w2_bias,
            topk_weights=inputs.topk_weights,
            apply_router_weight_on_input=work.problem.apply_router_weight_on_input,
            overlap=work.overlap,
        )


@dataclass(frozen=True, slots=True)
class Direct(PlainWay):
    """Few tokens: row t of every tile is token t, and nothing is sorted."""

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        _run_tiles(work, work.direct_routes(self.configs.gate_up.block_m), self.configs)


@dataclass(frozen=True, slots=True)
class Sorted(PlainWay):
    """Routes are sorted by expert, and tiles lie over the sorted routes."""

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        plan = work.sort_routes(self.configs.gate_up.block_m, tall=self.configs.tall)
        _run_tiles(work, plan, self.configs)


def _run_tiles(work: PlainWork, plan: RoutePlan | DirectRoutes, configs: GemmPair) -> None:
    """Both products over tiles of rows, then the sum over each token's routes."""
    intermediate = work.call.workspace13[: work.num_routes]  # [N, I_pad]
    # Rows in the dtype of the activations: fp32 would double the layer's largest buffer and its traffic to save a
    # rounding that the output makes anyway.
    out = work.call.out
    (route_rows,) = cut(work.behind_plan, Piece((work.num_routes, out.shape[1]), out.dtype))  # [N, H]
    _gate_up(work, intermediate, plan, configs.gate_up)
    down_gemm(
        route_rows,
        intermediate,
        work.w2,
        plan,
        configs.down,
        bias=work.w2_bias,
        topk_weights=work.call.inputs.topk_weights,
        apply_router_weight_on_input=work.problem.apply_router_weight_on_input,
        overlap=work.overlap,
    )
    work.reduce(route_rows)


def _gate_up(work: PlainWork, out: torch.Tensor, plan: RoutePlan | DirectRoutes, config: GroupedGemmConfig) -> None:
    """The first product of the tokens' routes."""
    inputs = work.call.inputs
    gate_up_gemm(
        out,
        inputs.hidden_states,
        work.w13,
        plan,
        config,
        work.epilogue,
        top_k=work.problem.top_k,
        topk_weights=inputs.topk_weights,
        apply_router_weight_on_input=work.problem.apply_router_weight_on_input,
        overlap=work.overlap,
    )


@dataclass(frozen=True, slots=True)
class Hopper(PlainWay):
    """Routes are sorted, and persistent warp-specialized programs take tiles of them; both buffers have a guard."""

    config: HopperConfigRule

    def run(self, work: PlainWork) -> None:
        call, inputs, config = work.call, work.call.inputs, self.config
        assert isinstance(work.w13, torch.Tensor) and isinstance(work.w2, torch.Tensor)
        plan = work.sort_routes(config.gate_up.block_m, config.gate_up.slack, heavy_first=config.heavy_first)
        intermediate = call.workspace13[: GUARD_ROWS + work.num_routes]  # [guard + N, I_pad]
        shape = (GUARD_ROWS + work.num_routes, call.out.shape[1])
        (sorted_rows,) = cut(work.behind_plan, Piece(shape, call.out.dtype))  # [guard + N, H]
        rows: torch.Tensor = inputs.hidden_states
        if config.copies_rows:
            # The second GEMM's output is not written yet.
            rows = sorted_rows[GUARD_ROWS:]
            copy_rows(rows, inputs.hidden_states, plan.route_row, overlap=work.overlap)
        hopper.gate_up_gemm(
            intermediate,
            rows,
            work.w13,
            plan,
            config.gate_up,
            work.epilogue,
            top_k=None if config.copies_rows else work.problem.top_k,
            overlap=work.overlap,
        )
        hopper.down_gemm(sorted_rows, intermediate, work.w2, plan, config.down, bias=work.w2_bias, overlap=work.overlap)
        reduce_sorted_rows(
            call.out,
            sorted_rows[GUARD_ROWS:],
            plan.route_row,
            inputs.topk_weights,
            _EARLY_REDUCE,
            overlap=work.overlap,
        )


@dataclass(frozen=True, slots=True)
class Batched(PlainWay):
    """Rows lie by expert already: tiles over those that count."""

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        call, configs = work.call, self.configs
        num_rows = call.out.shape[0] * call.out.shape[1]
        plan = work.plan_batches(configs.gate_up.block_m, tall=configs.tall)
        intermediate = call.workspace13.view(num_rows, -1)  # [E * max_T, I_pad]
        gate_up_gemm(
            intermediate,
            call.inputs.hidden_states.view(num_rows, -1),
            work.w13,
            plan,
            configs.gate_up,
            work.epilogue,
            top_k=1,
            overlap=work.overlap,
        )
        down_gemm(
            call.out.view(num_rows, -1),
            intermediate,
            work.w2,
            plan,
            configs.down,
            bias=work.w2_bias,
            overlap=work.overlap,
        )


@dataclass(frozen=True, slots=True)
class HopperBatched(PlainWay):
    """As `Batched`, with persistent warp-specialized programs."""

    config: HopperConfigRule

    def run(self, work: PlainWork) -> None:
        call, config = work.call, self.config
        assert isinstance(work.w13, torch.Tensor) and isinstance(work.w2, torch.Tensor)
        plan = work.plan_batches(config.gate_up.block_m, config.gate_up.slack, heavy_first=config.heavy_first)
        hopper.gate_up_gemm(
            call.workspace13,
            call.inputs.hidden_states.view(-1, work.problem.hidden_size),
            work.w13,
            plan,
            config.gate_up,
            work.epilogue,
            top_k=None,
            overlap=work.overlap,
        )
        hopper.down_gemm(
            call.out, call.workspace13, work.w2, plan, config.down, bias=work.w2_bias, overlap=work.overlap
        )
