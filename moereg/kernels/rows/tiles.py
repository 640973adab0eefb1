"""Tile scheduler of a grouped GEMM: the rows and columns that a program works on, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes, direct_rows
from moereg.kernels.rows.plan import RoutePlan


class Tile(NamedTuple):
    """A tile of a grouped GEMM, as its program claims it; rows, routes and the mask are [BLOCK_M]."""

    expert: tl.tensor  # local expert; for direct routes -1 if another program serves the route, or none has to
    column_tile: tl.tensor  # number of the column tile
    rows: tl.tensor  # rows in sorted order, also past the expert's end; for direct routes the routes
    valid_rows: tl.tensor  # the same, with those past the end repeating the last one
    routes: tl.tensor  # routes of `valid_rows`; the rows themselves in the batched format
    row_mask: tl.tensor  # valid rows


class RouteArguments(NamedTuple):
    """Ids and map of `DirectRoutes` as one kernel argument; read where the rows are not sorted."""

    topk_ids: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None


class RouteShape(NamedTuple):
    """Compile-time constant: how tiles find their rows."""

    sorted: bool  # whether rows come from a `BlockMap`
    single: bool  # whether unsorted rows are of a single token
    top_k: int  # K; the token of sorted route r is r // top_k
    block_top_k: int  # a power of two, at least K


class PlanArguments(NamedTuple):
    """The rows of a grouped GEMM as one kernel argument."""

    num_experts: int = 0  # number of ids; this and the next are read where the rows are not sorted
    num_local_experts: int = 0  # E
    sorted_routes: torch.Tensor | None = None  # of a plan; None for the batched format
    block_expert: torch.Tensor | None = None  # this and the next three as in `BlockMap`; read where the rows are sorted
    block_row: torch.Tensor | None = None  # first row of a tile
    block_end: torch.Tensor | None = None  # end of the rows of the tile's expert
    num_blocks: torch.Tensor | None = None  # number of tiles in use


@triton.jit
def claim_tile(
    direct,  # `RouteArguments`
    num_tokens,  # T; read where the rows are not sorted
    plan,  # `PlanArguments`
    used_blocks,  # number of row tiles; `number` is less than used_blocks * num_tiles_n
    num_tiles_n,  # number of column tiles
    ROUTES: tl.constexpr,  # `RouteShape`
    TILE: tl.constexpr,  # with `block_m` and `group_m`
    number=None,  # number of the tile among those of `used_blocks`; None: the program's. Read where the rows are sorted
    first_block=0,  # the first row tile among them
):
    """Returns the `Tile` of this program, or of a number."""
    BLOCK_M: tl.constexpr = TILE.block_m
    if ROUTES.sorted:
        if number is None:
            number = tl.program_id(0)
        block, column_tile = tile_of_number(number, used_blocks, num_tiles_n, TILE.group_m)
        block += first_block
        expert = tl.load(plan.block_expert + block)
        end = tl.load(plan.block_end + block)
        rows = tl.load(plan.block_row + block) + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        row_mask = rows < end  # [BLOCK_M]
        # Rows past the end repeat the last one where they are not masked; they are dropped when stored.
        valid_rows = tl.minimum(rows, end - 1)
        routes = valid_rows
        if plan.sorted_routes is not None:
            routes = tl.load(plan.sorted_routes + valid_rows)
        return Tile(expert, column_tile, rows, valid_rows, routes, row_mask)
    else:
        own_route = tl.program_id(0) // num_tiles_n
        column_tile = tl.program_id(0) % num_tiles_n
        TOP_K: tl.constexpr = ROUTES.top_k
        BLOCK_TOP_K: tl.constexpr = ROUTES.block_top_k
        # fmt: off
        expert, routes, row_mask = direct_rows(
            direct.topk_ids, direct.expert_map, own_route, num_tokens, plan.num_experts, plan.num_local_experts,
            TOP_K, BLOCK_M, BLOCK_TOP_K, ROUTES.single)
        # fmt: on
        return Tile(expert, column_tile, routes, routes, routes, row_mask)


@triton.jit
def tile_of_number(number, num_blocks, num_tiles_n, GROUP_M: tl.constexpr):
    """Row tile and column tile of a tile number.

    Programs run roughly in order, so at any time the L2 serves a group of row tiles times all columns.
    """
    first_block = number // (GROUP_M * num_tiles_n) * GROUP_M
    group_blocks = tl.minimum(num_blocks - first_block, GROUP_M)
    within = number % (GROUP_M * num_tiles_n)
    return first_block + within % group_blocks, within // group_blocks


def route_shape(plan: BlockMap | DirectRoutes, top_k: int) -> RouteShape:
    """Returns the constant of a launch; `top_k` is K, or 1 where routes are only looked up or rows lie by expert."""
    is_single = isinstance(plan, DirectRoutes) and plan.single
    return RouteShape(isinstance(plan, BlockMap), is_single, top_k, triton.next_power_of_2(top_k))


def plan_arguments(plan: BlockMap | DirectRoutes, num_local_experts: int) -> tuple[RouteArguments, int, PlanArguments]:
    """Direct routes, their number of tokens, on which kernels are not specialized, and the plan of sorted rows."""
    if isinstance(plan, DirectRoutes):
        num_tokens = plan.topk_ids.shape[0]
        assert num_tokens <= plan.block_m, f"{num_tokens} tokens do not fit a tile of {plan.block_m} rows"
        direct = RouteArguments(plan.topk_ids, plan.expert_map)
        return direct, num_tokens, PlanArguments(plan.num_experts, num_local_experts)
    # Rows of the batched format are their own routes.
    sorted_routes = plan.sorted_routes if isinstance(plan, RoutePlan) else None
    return RouteArguments(), 0, PlanArguments(0, num_local_experts, sorted_routes, *plan.tiles[:4])
