"""Which rows and columns a program of a grouped GEMM works on, and its main loop, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.sort import RoutePlan, load_local_expert


@dataclass(frozen=True, slots=True, eq=False)
class DirectRoutes:
    """Routes of at most `block_m` tokens as they come: row t of every tile is token t, and nothing is sorted.

    The programs of the first route to an expert serve all tokens that chose it; those of its other routes end at once.

    Attributes:
        topk_ids: [T, K] int32, contiguous: ids outside [0, num_experts) belong to no expert.
        expert_map: [num_experts] int32, local expert or -1; None: identity.
        num_experts: number of ids.
        block_m: rows per tile.
    """

    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    num_experts: int
    block_m: int

    @property
    def max_blocks(self) -> int:
        """Tiles to launch: one a route."""
        return self.topk_ids.numel()

    @property
    def single(self) -> bool:
        """Whether there is one token."""
        return self.topk_ids.shape[0] == 1


@triton.jit
def tile_of_program(num_blocks, num_tiles_n, GROUP_M: tl.constexpr):
    """Tile of rows and tile of columns of this program.

    Programs run roughly in order, so a group of row tiles times all columns is what the L2 sees at a time.
    """
    pid = tl.program_id(0)
    first_block = pid // (GROUP_M * num_tiles_n) * GROUP_M
    group_blocks = tl.minimum(num_blocks - first_block, GROUP_M)
    within = pid % (GROUP_M * num_tiles_n)
    return first_block + within % group_blocks, within // group_blocks


@triton.jit
def direct_rows(
    topk_ids,
    expert_map,
    own_route,
    num_tokens,
    num_experts,
    num_local_experts,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    SINGLE: tl.constexpr = False,
):
    """What a program of `DirectRoutes` serves; `SINGLE`: there is one token.

    Returns:
        Expert of its route, -1 where that has none or an earlier route serves it; [BLOCK_M] route of every token to
        that expert, 0 where the token has none; [BLOCK_M] whether it has one.
    """
    expert = load_local_expert(topk_ids, expert_map, own_route, own_route + 1, num_experts, num_local_experts)
    if SINGLE:
        # Every route is served by itself, also where two name one expert.
        return expert, tl.full([BLOCK_M], 0, tl.int32) + own_route, tl.arange(0, BLOCK_M) == 0
    tokens = tl.arange(0, BLOCK_M)[:, None]
    choices = tl.arange(0, BLOCK_TOP_K)[None, :]
    routes = tokens * TOP_K + choices
    ids = tl.load(topk_ids + routes, mask=(tokens < num_tokens) & (choices < TOP_K), other=-1)
    # Equal ids mean equal experts; two ids that one map sends to the same local expert would read its weights twice.
    same = (ids == tl.load(topk_ids + own_route)) & (ids >= 0)
    earlier = same & (routes < own_route)
    # A token has one row, so where it names an expert again, against the rules, that route's programs serve it alone.
    # Both questions are one sum: a reduction over the program takes longer than the rest of this.
    weights = tl.where(tokens == own_route // TOP_K, 1 << 20, 1)
    earlier = tl.sum(tl.sum(tl.where(same & (routes < own_route), weights, 0), 1), 0)
    again = earlier >= 1 << 20
    leads = (earlier == 0) | again
    same = same & ((routes == own_route) | (again == 0))
    choice = tl.min(tl.where(same, choices, BLOCK_TOP_K), 1)
    mask = choice < BLOCK_TOP_K
    return tl.where(leads, expert, -1), tl.where(mask, tl.arange(0, BLOCK_M) * TOP_K + choice, 0), mask


@triton.jit
def accumulate(
    a_pointers,
    b_pointers,
    row_mask,
    size_a,
    size_b,
    MASK_ROWS: tl.constexpr,
    MASK_A: tl.constexpr,
    MASK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 product of rows of activations and rows of weights.

    Args:
        a_pointers: [BLOCK_M, BLOCK_K] first elements of the activations.
        b_pointers: [BLOCK_K, BLOCK_N] first elements of the weights.
        row_mask: [BLOCK_M] rows that count.
        size_a: elements of a row of activations; what lies behind them may be NaN.
        size_b: elements of a row of weights, no fewer; behind them lies the next row, or nothing.
        MASK_ROWS: whether to leave out the rows that do not count.
        MASK_A: whether steps of BLOCK_K over `size_b` reach past `size_a`; see `reaches_past`.
        MASK_B: whether they reach past `size_b`.
    """
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, size_b, BLOCK_K):
        if MASK_ROWS and MASK_A:
            a = tl.load(a_pointers, mask=row_mask[:, None] & (start + offs_k < size_a)[None, :], other=0.0)
        elif MASK_ROWS:
            a = tl.load(a_pointers, mask=row_mask[:, None], other=0.0)
        elif MASK_A:
            a = tl.load(a_pointers, mask=(start + offs_k < size_a)[None, :], other=0.0)
        else:
            a = tl.load(a_pointers)
        if MASK_B:
            b = tl.load(b_pointers, mask=(start + offs_k < size_b)[:, None], other=0.0)
        else:
            b = tl.load(b_pointers)
        # Matters for 32-bit operands only: TF32 would keep 10 bits of their mantissa.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K
    return accumulator


def reaches_past(size: int, depth: int, step: int) -> bool:
    """Whether a loop over `depth` elements by `step` reads past the first `size` elements of a row.

    Rows of activations end where the layer's size ends, while the loop goes on to the padded size of the weights, by
    whole steps. Zeros of the weights do not help there: what lies behind a row may be NaN.
    """
    return -(-depth // step) * step > size


def plan_arguments(plan: BlockMap | DirectRoutes, num_local_experts: int) -> tuple[torch.Tensor | int | None, ...]:
    """What the kernels want to know of the rows: of sorted ones the plan, of direct ones the ids."""
    if isinstance(plan, DirectRoutes):
        num_tokens = plan.topk_ids.shape[0]
        assert num_tokens <= plan.block_m, f"{num_tokens} tokens do not fit a tile of {plan.block_m} rows"
        ids = (plan.topk_ids, plan.expert_map, num_tokens, plan.num_experts, num_local_experts)
        return (*ids, None, None, None, None, None)
    blocks = (plan.block_expert, plan.block_row, plan.block_end, plan.num_blocks)
    # Rows that no route was sorted into are where their tokens are.
    sorted_routes = plan.sorted_routes if isinstance(plan, RoutePlan) else None
    return (None, None, 0, 0, num_local_experts, sorted_routes, *blocks)
