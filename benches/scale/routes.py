"""Destinations of tokens: shares of experts and ranks under uniform and Zipf routing, as expectations, not as draws."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence

from moereg.prepare_finalize.eplb import balance_experts
from moereg.prepare_finalize.expert_placement import ExpertPlacement

__all__ = ["Share", "chosen", "num_replicas", "shares"]

_SHUFFLES = 5
"""Orders of experts that are averaged over, where popular experts lie as chance has it."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Load of one rank.

    Attributes:
        routes: Of each token, on average.
        reached: Probability that a token has a route here.
        experts: Experts here.
        chances: Of each of them, that a token takes it here.
    """

    routes: float
    reached: float
    experts: int
    chances: tuple[float, ...]

    def active(self, num_tokens: float) -> float:
        """Experts that get a row, of so many tokens."""
        return sum(1 - (1 - chance) ** num_tokens for chance in self.chances)


@functools.cache
def chosen(num_experts: int, top_k: int, routing: str) -> tuple[float, ...]:
    """For each expert, most popular first, the probability that a token takes it.

    Choosing `top_k` by popularity without replacement is a race of exponential clocks, stopped when `top_k` have rung:
    at time t an expert of weight w has rung with probability 1 - exp(-w t). Taken at the time when `top_k` have rung on
    average.
    """
    weights = [1.0 / rank if routing == "zipf" else 1.0 for rank in range(1, num_experts + 1)]
    low, high = 0.0, 1.0
    while _rung(weights, high) < top_k:
        high *= 2
        if high > 1e9:  # All of them: no time is long enough.
            return (1.0,) * num_experts
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _rung(weights, middle) < top_k else (low, middle)
    return tuple(1 - math.exp(-weight * high) for weight in weights)


def _rung(weights: Sequence[float], time: float) -> float:
    return sum(1 - math.exp(-weight * time) for weight in weights)


@functools.cache
def shares(num_experts: int, num_ranks: int, top_k: int, routing: str, balanced: bool) -> list[list[Share]]:
    """The shares of all ranks, for each of the orders in which experts may lie.

    Args:
        num_experts: Experts of the layer.
        num_ranks: Ranks of the group.
        top_k: Experts a token.
        routing: `uniform` or `zipf`.
        balanced: Whether experts were moved by their loads and replicas added, `num_replicas` of them; otherwise they
            lie in slices.
    """
    chances = chosen(num_experts, top_k, routing)
    if balanced:
        placement = balance_experts(chances, num_ranks, num_replicas(num_experts, num_ranks))
        return [_of(placement, chances)]
    contiguous = ExpertPlacement.contiguous(num_experts, num_ranks)
    if routing == "uniform":
        return [_of(contiguous, chances)]
    found = []
    for seed in range(_SHUFFLES):
        order = list(chances)
        random.Random(seed).shuffle(order)
        found.append(_of(contiguous, order))
    return found


def num_replicas(num_experts: int, num_ranks: int) -> int:
    """An eighth more experts on each rank, one at least; none beyond each expert on all ranks."""
    return min(num_ranks * max(1, num_experts // num_ranks // 8), num_experts * (num_ranks - 1))


def _of(placement: ExpertPlacement, chances: Sequence[float]) -> list[Share]:
    holders = [len(placement.ranks_of_expert(expert)) for expert in range(placement.num_experts)]
    found = []
    for experts in placement.experts_of_rank:
        own = tuple(chances[expert] / holders[expert] for expert in experts)
        found.append(Share(sum(own), 1 - math.prod(1 - chance for chance in own), len(experts), own))
    return found
