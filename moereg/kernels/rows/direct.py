"""Unsorted routes: which experts are local, and which tokens a program serves, in Triton.

A route is one (token, choice) pair, numbered `t * K + k`. Sizes: T tokens, K choices per token, N = T * K routes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class DirectRoutes:
    """Unsorted routes of at most `block_m` tokens: row t of every tile is token t.

    The programs of an expert's first route serve all tokens that chose it; those of its other routes exit at once.

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
        """Tiles to launch: one per route."""
        return self.topk_ids.numel()

    @property
    def single(self) -> bool:
        """Whether there is one token."""
        return self.topk_ids.shape[0] == 1


@triton.jit
def load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts):
    """Local experts of routes, of any shape or a single one; -1 where a route adds nothing."""
    expert = tl.load(topk_ids + routes, mask=routes < num_routes, other=-1)
    expert = tl.where(expert < num_experts, expert, -1)
    if expert_map is not None:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1)
    return tl.where((expert >= 0) & (expert < num_local_experts), expert, -1)


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
    """The routes that a program of `DirectRoutes` serves; `SINGLE`: there is one token.

    Returns:
        Expert of its route, -1 where that has none or an earlier route serves it; [BLOCK_M] route of every token to
        that expert, 0 where the token has none; [BLOCK_M] whether it has one.
    """
    expert = load_local_expert(topk_ids, expert_map, own_route, own_route + 1, num_experts, num_local_experts)
    if SINGLE:
        # Every route is served by itself, even where two name one expert.
        return expert, tl.full([BLOCK_M], 0, tl.int32) + own_route, tl.arange(0, BLOCK_M) == 0
    tokens = tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    choices = tl.arange(0, BLOCK_TOP_K)[None, :]  # [1, BLOCK_TOP_K]
    routes = tokens * TOP_K + choices  # [BLOCK_M, BLOCK_TOP_K]
    ids = tl.load(topk_ids + routes, mask=(tokens < num_tokens) & (choices < TOP_K), other=-1)
    # Equal ids mean equal experts; if a map sends two ids to one local expert, its weights are read twice.
    same = (ids == tl.load(topk_ids + own_route)) & (ids >= 0)
    # A token has one row, so if it names an expert again, against the rules, that route's programs serve it alone.
    # One sum answers both questions, since a reduction over the program takes longer than the rest of this.
    weights = tl.where(tokens == own_route // TOP_K, 1 << 20, 1)
    earlier = tl.sum(tl.sum(tl.where(same & (routes < own_route), weights, 0), 1), 0)
    again = earlier >= 1 << 20
    leads = (earlier == 0) | again
    same = same & ((routes == own_route) | (again == 0))
    choice = tl.min(tl.where(same, choices, BLOCK_TOP_K), 1)  # [BLOCK_M]
    mask = choice < BLOCK_TOP_K
    return tl.where(leads, expert, -1), tl.where(mask, tl.arange(0, BLOCK_M) * TOP_K + choice, 0), mask
