"""Chooses the rank that computes a route among the replicas of its expert: tensors, and device code that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Tensors that assign routes to ranks."""

    num_holders: torch.Tensor  # [num_experts] int32, ranks that hold each expert
    holders: torch.Tensor  # [num_experts, R] int32, the ranks, ascending
    expert_maps: torch.Tensor  # [R, num_experts] int32, every rank's local expert or -1
    first_turn: int  # turn of token 0: token t takes holder (first_turn + t) % num_holders of each of its experts


@triton.jit
def rank_of_routes(ids, turns, num_holders, holders, num_experts, num_ranks):
    """The rank that computes each route, -1 if an id is no expert; and the expert, 0 in that case."""
    known = (ids >= 0) & (ids < num_experts)
    experts = tl.where(known, ids, 0)
    replica = turns % tl.load(num_holders + experts)
    return tl.where(known, tl.load(holders + experts * num_ranks + replica), -1), experts
