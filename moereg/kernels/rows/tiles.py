"""Which rows and columns a program of a grouped GEMM works on, in Triton.

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
    """A tile of a grouped GEMM, as its program claims it; rows, routes and the mask are [BLOCK_M].

    Attributes:
        expert: local expert; of direct routes -1 where another program serves the route, or none has to.
        column_tile: number of the tile of columns.
        rows: rows of the sorted order, past the expert's end too; of direct routes the routes.
        valid_rows: the same, with those past the end repeating the last one.
        routes: routes of `valid_rows`; the rows themselves in the batched format.
        row_mask: which rows count.
    """

    expert: tl.tensor
    column_tile: tl.tensor
    rows: tl.tensor
    valid_rows: tl.tensor
    routes: tl.tensor
    row_mask: tl.tensor


@triton.jit
def claim_tile(
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    used_blocks,
    num_tiles_n,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    number=None,
    first_block=0,
):
    """The `Tile` of this program, or the one of a number.

    Args:
        topk_ids: like the next four those of `DirectRoutes`; read where the rows are not sorted.
        sorted_routes: like the next four those of a plan, with None for the batched format; read where they are.
        used_blocks: number of tiles of rows; with all columns more tiles than the number of this one.
        num_tiles_n: number of tiles of columns.
        SORTED: whether the rows come from a `BlockMap`.
        SINGLE: whether there is one token.
        number: of the tile among those of `used_blocks`; None: the program's. Read where the rows are sorted.
        first_block: tile of rows that comes first among them.
    """
    if SORTED:
        if number is None:
            number = tl.program_id(0)
        block, column_tile = tile_of_number(number, used_blocks, num_tiles_n, GROUP_M)
        block += first_block
        expert = tl.load(block_expert + block)
        end = tl.load(block_end + block)
        rows = tl.load(block_row + block) + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        row_mask = rows < end  # [BLOCK_M]
        # Rows past the end repeat the last one where they are not masked; they are dropped when stored.
        valid_rows = tl.minimum(rows, end - 1)
        routes = valid_rows
        if sorted_routes is not None:
            routes = tl.load(sorted_routes + valid_rows)
        return Tile(expert, column_tile, rows, valid_rows, routes, row_mask)
    else:
        own_route = tl.program_id(0) // num_tiles_n
        column_tile = tl.program_id(0) % num_tiles_n
        expert, routes, row_mask = direct_rows(
            topk_ids,
            expert_map,
            own_route,
            num_tokens,
            num_experts,
            num_local_experts,
            TOP_K,
            BLOCK_M,
            BLOCK_TOP_K,
            SINGLE,
        )
        return Tile(expert, column_tile, routes, routes, routes, row_mask)


@triton.jit
def claim_tile_of(
    rows,
    number,
    first_block,
    used_blocks,
    num_tiles_n,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """`claim_tile` of `RowArguments` and a `TileShape`."""
    return claim_tile(
        rows.topk_ids,
        rows.expert_map,
        rows.num_tokens,
        rows.num_experts,
        rows.num_local_experts,
        rows.sorted_routes,
        rows.block_expert,
        rows.block_row,
        rows.block_end,
        used_blocks,
        num_tiles_n,
        SORTED=SORTED,
        SINGLE=SINGLE,
        TOP_K=TOP_K,
        BLOCK_TOP_K=BLOCK_TOP_K,
        BLOCK_M=TILE.block_m,
        GROUP_M=TILE.group_m,
        number=number,
        first_block=first_block,
    )


@triton.jit
def tile_of_number(number, num_blocks, num_tiles_n, GROUP_M: tl.constexpr):
    """Tile of rows and tile of columns of the program of a number.

    Programs run roughly in order, so at a time the L2 sees a group of row tiles times all columns.
    """
    first_block = number // (GROUP_M * num_tiles_n) * GROUP_M
    group_blocks = tl.minimum(num_blocks - first_block, GROUP_M)
    within = number % (GROUP_M * num_tiles_n)
    return first_block + within % group_blocks, within // group_blocks


class RowArguments(NamedTuple):
    """The kernels' arguments for the rows, in their order; see `claim_tile`."""

    topk_ids: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    num_tokens: int = 0
    num_experts: int = 0
    num_local_experts: int = 0
    sorted_routes: torch.Tensor | None = None
    block_expert: torch.Tensor | None = None
    block_row: torch.Tensor | None = None
    block_end: torch.Tensor | None = None
    num_blocks: torch.Tensor | None = None


def plan_arguments(plan: BlockMap | DirectRoutes, num_local_experts: int) -> RowArguments:
    """The plan of sorted rows, the ids of direct ones."""
    if isinstance(plan, DirectRoutes):
        num_tokens = plan.topk_ids.shape[0]
        assert num_tokens <= plan.block_m, f"{num_tokens} tokens do not fit a tile of {plan.block_m} rows"
        return RowArguments(
            topk_ids=plan.topk_ids,
            expert_map=plan.expert_map,
            num_tokens=num_tokens,
            num_experts=plan.num_experts,
            num_local_experts=num_local_experts,
        )
    return RowArguments(
        num_local_experts=num_local_experts,
        # Rows that no route was sorted into are where their tokens are.
        sorted_routes=plan.sorted_routes if isinstance(plan, RoutePlan) else None,
        block_expert=plan.block_expert,
        block_row=plan.block_row,
        block_end=plan.block_end,
        num_blocks=plan.counts,
    )
