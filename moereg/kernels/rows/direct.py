"""Unsorted routes, in Triton: which experts are local, which tokens a program serves, marks for other routes.

A route is one (token, choice) pair, numbered `t * K + k`. Sizes: T tokens, K choices per token, N = T * K routes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.replay import launch

# Routes per program of `local_routes`.
_ROUTES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class DirectRoutes:
    """Unsorted routes of at most `block_m` tokens: row t of every tile is token t.

    The programs of an expert's first route serve all tokens that chose it; those of its other routes exit at once.
    """

    topk_ids: torch.Tensor  # [T, K] int32, contiguous: ids outside [0, num_experts) belong to no expert
    expert_map: torch.Tensor | None  # [num_experts] int32, local expert or -1; None: identity
    num_experts: int  # number of ids
    block_m: int  # rows per tile

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


@triton.jit(do_not_specialize=["num_routes"])
def _local_routes_kernel(
    out_ids,
    out_weights,
    topk_ids,
    topk_weights,
    expert_map,
    num_routes,
    num_experts,
    num_local_experts,
    BLOCK: tl.constexpr,
):
    routes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = routes < num_routes
    expert = load_local_expert(topk_ids, expert_map, routes, num_routes, num_experts, num_local_experts)
    weight = tl.load(topk_weights + routes, mask=inside & (expert >= 0), other=0.0)
    tl.store(out_ids + routes, expert, mask=inside)
    tl.store(out_weights + routes, weight, mask=inside)


def local_routes(
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
) -> None:
    """Writes the local expert of every route, or -1 with weight 0 if it has none.

    Overwrites `out_ids` int32 and `out_weights` fp32, which are [T, K] and contiguous, as `topk_ids` and `topk_weights`
    are; ids, map and number of experts as in `DirectRoutes`.
    """
    num_routes = topk_ids.numel()
    tensors = out_ids, out_weights, topk_ids, topk_weights, expert_map
    sizes = num_routes, num_experts, num_local_experts
    launch(_local_routes_kernel, (triton.cdiv(num_routes, _ROUTES),), *tensors, *sizes, BLOCK=_ROUTES)
