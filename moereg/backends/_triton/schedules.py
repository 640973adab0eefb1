"""Schedules of a layer: which kernels run over which rows. A rule selects one per call, with its configurations.

| schedule | rows | launches |
|---|---|---|
| `Gemv` | one token | a vector times each chosen expert's matrices, twice; the second adds up the routes |
| `Single` | one token, packed weights | a tile for each route, then a GEMM that adds up the routes |
| `Direct` | up to 16 tokens, 8 if packed with few rows per expert | tiles whose rows are the tokens, and a reduction |
| `Sorted` | more | a sort, tiles of sorted routes, low or tall by the expert's rows, and a reduction |
| `Hopper` | more than 22 per expert on sm90 | a sort, warp-specialized tiles, and a reduction |
| `packed.HopperPacked` | more than 24 per expert on sm90, packed weights | as `Hopper` |
| `packed.Flagged` | 9 to 16 tokens on sm90, packed weights of 4 bits | as `Sorted`, both GEMMs in one |
| `Batched`, `Hopper` | [E, max_T, H] | a tile plan over each expert's rows, then both GEMMs |

Route rows are stored already multiplied by their routing weights, except that `Hopper` leaves this to the reduction
unless the layer is float16: see `early_weights`.

Sizes as in `work`, I_pad columns of the intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import torch

from moereg.backends._triton.work import Schedule, Work
from moereg.kernels.gemm import rules
from moereg.kernels.gemm.config import GemmPair, GemvPair, SinglePair
from moereg.kernels.gemm.fit import CallShape, fit_pair
from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.gemm.single import MAX_TOP_K, down_single
from moereg.kernels.hopper import gemm as hopper
from moereg.kernels.hopper.config import HopperConfigRule
from moereg.kernels.hopper.packed_config import HopperPackedRule
from moereg.kernels.launch import device as limits
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import copy_rows, reduce_sorted_rows
from moereg.kernels.sizes import GUARD_ROWS, WEIGHT_PAD
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import round_up

Weights: TypeAlias = torch.Tensor | PackedMatrix

MIN_HOPPER_ROWS: Final = 22
"""Up to this many rows per expert the tiles of Hopper's kernels would be mostly padding.

On an H200 at 32 rows (gpt-oss-120b, 1,024 tokens) they lose 1 % if loads are even, win 4 % if they are uneven, and 59 %
if all tokens choose the same experts.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainWork(Work):
    """A call of a layer whose weights are multiplied in 16 or 32 bits."""

    w13: Weights
    w2: Weights


PlainSchedule: TypeAlias = Schedule[PlainWork]


def select(problem: MoEProblem, hidden_states: torch.Tensor, rows_per_expert: float, packed_bits: int | None) -> Tiles:
    """Selects a call's schedule.

    Args:
        problem: The layer.
        hidden_states: [T, H], or [E, max_T, H] in the batched format.
        rows_per_expert: The average.
        packed_bits: Bits of a packed weight, or None.
    """
    is_batched = hidden_states.dim() == 3
    single = problem.top_k <= MAX_TOP_K and not is_batched
    configs = select_configs(
        hidden_states, rows_per_expert, packed_bits, single=single, invariant=problem.batch_invariant
    )
    if isinstance(configs, GemvPair):
        return Gemv(configs)
    if isinstance(configs, SinglePair):
        return Single(configs)
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
    configs = fit_pair(configs, shape)
    if is_batched:
        return Batched(configs)
    return Sorted(configs) if configs.sort_routes else Direct(configs)


def select_configs(
    hidden_states: torch.Tensor,
    rows_per_expert: float,
    packed_bits: int | None,
    *,
    single: bool = False,
    invariant: bool = False,
) -> GemvPair | SinglePair | GemmPair:
    """Configurations of both GEMMs from the tables; arguments as in `select`, the last two as in `rules.select_config`.

    The batched format counts as infinitely many tokens, since it always has a plan.
    """
    device, num_tokens = hidden_states.device, math.inf if hidden_states.dim() == 3 else len(hidden_states)
    shared_bytes, least = limits.max_shared_bytes(device), limits.least_block_m(device)
    sizes = num_tokens, rows_per_expert, hidden_states.element_size(), shared_bytes, packed_bits, least
    return rules.select_config(*sizes, single=single, invariant=invariant)


def fits_hopper(
    hidden_states: torch.Tensor, rows_per_expert: float, min_rows_per_expert: float = MIN_HOPPER_ROWS
) -> bool:
    """Whether Hopper's kernels can read a call's rows and have enough rows per expert to pay."""
    return (
        hidden_states.device.type != "cpu"
        and hidden_states.element_size() == 2
        and rows_per_expert > min_rows_per_expert
        # Rows are copied in units of 16 bytes.
        and hidden_states.shape[-1] % 8 == hidden_states.stride(-2) % 8 == hidden_states.data_ptr() % 16 == 0
    )


@dataclass(frozen=True, slots=True)
class Tiles(PlainSchedule):
    """A plan, both GEMMs over its tiles of rows, and the sum over each token's routes."""

    configs: GemmPair | SinglePair | GemvPair  # Configurations of both GEMMs
    gate_up: ClassVar[Callable[..., None]] = staticmethod(gate_up_gemm)  # The first GEMM
    down: ClassVar[Callable[..., None]] = staticmethod(down_gemm)  # The second
    finishes: ClassVar[bool] = False  # Whether the second writes the result itself, which leaves nothing to reduce

    def plan(self, work: PlainWork) -> BlockMap | DirectRoutes:
        """Plans which rows the tiles cover."""
        assert not isinstance(self.configs, GemvPair)
        return work.direct_routes(self.configs.gate_up.block_m)

    def run(self, work: PlainWork) -> None:
        configs, overlap = self.configs, work.overlap
        plan = self.plan(work)
        intermediate = work.intermediate()  # [N, I_pad] or [R, I_pad]
        out = work.out if self.finishes else work.route_rows()  # [T, H], [R, H] or [N, H]
        more: dict[str, Any] = {"top_k": work.top_k, "route_factors": work.input_weights, "overlap": overlap}
        self.gate_up(intermediate, work.tokens, work.w13, plan, configs.gate_up, work.epilogue, **more)
        more = {"bias": work.w2_bias, "topk_weights": work.tile_weights, "overlap": overlap}
        self.down(out, intermediate, work.w2, plan, configs.down, **more)
        if not self.finishes:
            work.reduce(out)


class Gemv(Tiles):
    """One token: routes are vectors, neither sorted nor stored."""

    gate_up = staticmethod(gate_up_gemv)
    down = staticmethod(down_gemv)
    finishes = True

    def plan(self, work: PlainWork) -> DirectRoutes:
        return work.direct_routes(block_m=1)


class Single(Tiles):
    """One token, packed weights: the second GEMM adds up the routes."""

    down = staticmethod(down_single)
    finishes = True


class Direct(Tiles):
    """Few tokens: row t of every tile is token t, and nothing is sorted."""


class Sorted(Tiles):
    """Sorts routes by expert, and tiles the sorted routes."""

    def plan(self, work: PlainWork) -> BlockMap:
        assert isinstance(self.configs, GemmPair)
        return work.plan(self.configs.gate_up.block_m, tall=self.configs.tall)


class Batched(Sorted):
    """Rows are grouped by expert already: tiles cover the valid ones."""

    finishes = True


@dataclass(frozen=True, slots=True)
class Hopper(PlainSchedule):
    """Sorted routes, tiled by persistent warp-specialized programs; both buffers have guard rows.

    In the batched format tiles cover the valid rows in place.
    """

    config: HopperConfigRule | HopperPackedRule
    gate_up: ClassVar[Callable[..., None]] = staticmethod(hopper.gate_up_gemm)
    down: ClassVar[Callable[..., None]] = staticmethod(hopper.down_gemm)
    # The second GEMM waits for the first before it lets the reduction start, so the routes' places are written by then.
    reduces_early: ClassVar[bool] = True

    def run(self, work: PlainWork) -> None:
        call, config, overlap = work.call, self.config, work.overlap
        tiles = {"slack": config.gate_up.slack, "heavy_first": config.heavy_first}
        rows, top_k = work.tokens, None if config.copies_rows else work.problem.top_k
        plan: BlockMap
        if work.is_batched:
            plan = work.plan(config.gate_up.block_m, **tiles)
            intermediate, out, top_k = call.workspace13, call.out, None  # [E, max_T, ...]
        else:
            plan = work.sort_routes(config.gate_up.block_m, **tiles)
            intermediate, out = work.intermediate(GUARD_ROWS), work.route_rows(GUARD_ROWS)  # [guard + N, ...]
            if config.copies_rows:
                # The second GEMM's output is not written yet.
                rows = out[GUARD_ROWS:]
                copy_rows(rows, work.tokens, plan.route_row, overlap=overlap)
        self.gate_up(intermediate, rows, work.w13, plan, config.gate_up, work.epilogue, top_k=top_k, overlap=overlap)
        more: dict[str, Any] = {"bias": work.w2_bias, "topk_weights": work.early_weights, "overlap": overlap}
        self.down(out, intermediate, work.w2, plan, config.down, **more)
        if isinstance(plan, RoutePlan):
            rows, weights = out[GUARD_ROWS:], work.late_weights
            reduce_sorted_rows(call.out, rows, plan.route_row, weights, early=self.reduces_early, overlap=overlap)
