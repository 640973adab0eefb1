"""Placements from counted loads: replicas for the busiest experts, and ranks with equal load.

The method is the greedy one that DeepSeek published with DeepSeek-V3 (https://github.com/deepseek-ai/EPLB): each free
place goes to the expert whose replicas are busiest, then replicas are dealt out, the busiest first, to the least loaded
rank that has room. In addition, replicas of an expert go to different ranks, since a second one on a rank relieves
nothing, and experts stay where they were as far as the new groups allow.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

import torch

from moereg.arguments import check_count, check_instance, check_list, check_number
from moereg.errors import ArgumentError
from moereg.prepare_finalize.expert_placement import ExpertPlacement


def count_routes(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Counts the routes of each expert. No host synchronization; may be captured, so that counts can be added up.

    Args:
        topk_ids: [T,K] integers; ids outside [0, num_experts) are not counted.
        num_experts: Experts of the layer.

    Returns:
        [num_experts] int64.
    """
    ids = topk_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    # One extra place takes the ids of no expert.
    counts.scatter_add_(0, torch.where(known, ids, num_experts), torch.ones_like(ids))
    return counts[:num_experts]


def balance_experts(
    loads: Sequence[float] | torch.Tensor,
    num_ranks: int,
    num_replicas: int = 0,
    before: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Returns a placement whose ranks have loads as equal as a greedy method makes them. It is deterministic.

    Args:
        loads: [num_experts], routes that `count_routes` counted, or any other work of each expert.
        num_ranks: Ranks of the group.
        num_replicas: Experts of all ranks beyond one for each of the layer.
        before: The current placement: ranks and local places are assigned so that many experts stay.

    Returns:
        A placement with equally many experts on each rank.

    Raises:
        ArgumentError: A load is negative or not finite, the ranks do not divide the experts and replicas, or there are
            more replicas than different places for them.

    Example:
        >>> loads = [90, 10, 10, 10, 10, 10]
        >>> placement = moereg.balance_experts(loads, num_ranks=2, num_replicas=2)
        >>> placement.experts_of_rank
        ((0, 2, 4, 1), (0, 3, 5, 1))
        >>> moereg.prepare_finalize.eplb.rank_loads(placement, loads)
        [70.0, 70.0]
    """
    own = check_list("loads", loads.tolist() if isinstance(loads, torch.Tensor) else loads, check_number)
    check_count("num_experts", len(own))
    check_count("num_ranks", num_ranks)
    check_count("num_replicas", num_replicas, minimum=0)
    if min(own) < 0:
        raise ArgumentError(f"loads must not be negative, got {min(own)} for expert {own.index(min(own))}")
    if (len(own) + num_replicas) % num_ranks:
        missing = -(len(own) + num_replicas) % num_ranks
        raise ArgumentError(
            f"ranks must get equally many experts, got {len(own)} experts and {num_replicas} replicas on {num_ranks} "
            f"ranks; take {num_replicas + missing} replicas"
        )
    if num_replicas > len(own) * (num_ranks - 1):
        raise ArgumentError(
            f"num_replicas must be at most {len(own) * (num_ranks - 1)}, each expert on all {num_ranks} ranks, "
            f"got {num_replicas}"
        )
    ranks = _deal(own, _replicas(own, num_ranks, num_replicas), num_ranks)
    if before is None:
        return ExpertPlacement(len(own), tuple(map(tuple, ranks)))
    check_instance("before", before, ExpertPlacement, "give the placement of now, or leave it out")
    if (before.num_experts, before.num_ranks) != (len(own), num_ranks):
        raise ArgumentError(f"before must have {len(own)} experts on {num_ranks} ranks, got {before}; leave it out")
    return ExpertPlacement(len(own), _where_they_were(ranks, before))


def rank_loads(placement: ExpertPlacement, loads: Sequence[float] | torch.Tensor) -> list[float]:
    """Load of each rank out of loads [num_experts], with the load of an expert shared evenly by its replicas."""
    own = loads.tolist() if isinstance(loads, torch.Tensor) else loads
    holders = collections.Counter(expert for experts in placement.experts_of_rank for expert in experts)
    return [sum(own[expert] / holders[expert] for expert in experts) for experts in placement.experts_of_rank]


def _replicas(loads: Sequence[float], num_ranks: int, num_replicas: int) -> list[int]:
    holders = [1] * len(loads)
    busiest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(num_replicas):
        while holders[busiest[0][1]] == num_ranks:
            heapq.heappop(busiest)  # It is everywhere already.
        expert = busiest[0][1]
        holders[expert] += 1
        heapq.heapreplace(busiest, (-loads[expert] / holders[expert], expert))
    return holders


def _deal(loads: Sequence[float], holders: Sequence[int], num_ranks: int) -> list[list[int]]:
    size = sum(holders) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    each = [(-load / count, expert) for expert, (load, count) in enumerate(zip(loads, holders, strict=True))]
    for share, expert in sorted(each):
        for _ in range(holders[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < size]
            without = [rank for rank in free if expert not in ranks[rank]]
            if without:
                rank = min(without, key=lambda one: (sums[one], len(ranks[one]), one))
            else:
                rank = _make_room(expert, min(free, key=lambda one: (sums[one], one)), ranks, sums, each)
            ranks[rank].append(expert)
            sums[rank] -= share
    return ranks


def _make_room(
    expert: int, free: int, ranks: list[list[int]], sums: list[float], each: Sequence[tuple[float, int]]
) -> int:
    """Frees a place on a full rank for an expert that every rank with room has, by moving one of its experts there.

    Returns the rank. There always is one: the rank with room has fewer experts, and one of them is this one.
    """
    moves = [
        (sums[free] - each[other][0], rank, place)
        for rank, experts in enumerate(ranks)
        if expert not in experts
        for place, other in enumerate(experts)
        if other not in ranks[free]
    ]
    _, rank, place = min(moves)
    other = ranks[rank].pop(place)
    ranks[free].append(other)
    sums[rank] += each[other][0]
    sums[free] -= each[other][0]
    return rank


def _where_they_were(ranks: list[list[int]], before: ExpertPlacement) -> tuple[tuple[int, ...], ...]:
    """Assigns the same groups of experts to ranks and local places that held many of them before."""
    old = [set(experts) for experts in before.experts_of_rank]
    pairs = [
        (-len(old[rank].intersection(experts)), rank, group)
        for group, experts in enumerate(ranks)
        for rank in range(len(old))
    ]
    group_of: dict[int, int] = {}
    taken: set[int] = set()
    for _, rank, group in sorted(pairs):
        if rank not in group_of and group not in taken:
            group_of[rank] = group
            taken.add(group)
    return tuple(_placed(ranks[group_of[rank]], before.experts_of_rank[rank]) for rank in range(len(old)))


def _placed(experts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Orders the experts of one rank so that those that were there keep their places."""
    places: list[int | None] = [None] * len(experts)
    left = set(experts)
    for place, expert in enumerate(before[: len(experts)]):
        if expert in left:
            places[place] = expert
            left.discard(expert)
    others = [expert for expert in experts if expert in left]
    return tuple(others.pop(0) if place is None else place for place in places)
