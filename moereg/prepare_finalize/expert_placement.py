"""Placement of a layer's experts on ranks, replicas included: as a value, and as tensors that calls read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from moereg.arguments import check_count, check_instance, check_list
from moereg.errors import ArgumentError
from moereg.runtime.json_types import convert


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """The experts of a layer that each rank of a group holds, in order.

    Every expert is on at least one rank. One that is on several has replicas, and each route takes one of them, by its
    token's place in the call; see `PlacementTables.ranks_of`. A rank holds an expert at most once.

    Attributes:
        num_experts: Experts of the layer.
        experts_of_rank: Each rank's experts, in local order.

    Raises:
        ArgumentError: An expert is on no rank, twice on one, or does not exist.

    Example:
        >>> placement = moereg.ExpertPlacement(4, ((0, 1, 2), (3, 2, 0)))
        >>> print(placement)
        4 experts on 2 ranks, 3 a rank, 2 replicas
        >>> placement.ranks_of_expert(2)
        (0, 1)
        >>> moereg.ExpertPlacement.contiguous(num_experts=4, num_ranks=2).experts_of_rank
        ((0, 1), (2, 3))
    """

    num_experts: int
    experts_of_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_count("num_experts", self.num_experts)
        ranks = check_list("experts_of_rank", self.experts_of_rank, _experts)
        object.__setattr__(self, "experts_of_rank", ranks)
        if not ranks:
            raise ArgumentError("experts_of_rank must have a rank at least, got none; give each rank its experts")
        for rank, experts in enumerate(ranks):
            if not experts:
                raise ArgumentError(f"every rank must hold an expert, got none for rank {rank}; use fewer ranks")
            if max(experts) >= self.num_experts:
                raise ArgumentError(
                    f"experts_of_rank[{rank}] must hold experts below num_experts={self.num_experts}, "
                    f"got {max(experts)}; count from 0"
                )
            if len(set(experts)) < len(experts):
                twice = next(expert for expert in experts if experts.count(expert) > 1)
                raise ArgumentError(
                    f"a rank must hold an expert once at most, got expert {twice} twice on rank {rank}; "
                    "give its replicas to different ranks"
                )
        missing = set(range(self.num_experts)).difference(*ranks)
        if missing:
            raise ArgumentError(
                f"every expert must be on a rank, got none for expert {min(missing)} "
                f"({len(missing)} of {self.num_experts} are missing); add them"
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Slices of equal size, in order, without replicas: the default placement.

        Args:
            num_experts: Experts of the layer.
            num_ranks: Ranks of the group.

        Raises:
            ArgumentError: The ranks do not divide the experts.
        """
        check_count("num_experts", num_experts)
        check_count("num_ranks", num_ranks)
        if num_experts % num_ranks:
            raise ArgumentError(
                f"contiguous placement needs num_experts % ranks == 0, got {num_experts} experts on {num_ranks} ranks; "
                "say who holds what with ExpertPlacement(num_experts, experts_of_rank)"
            )
        size = num_experts // num_ranks
        return cls(num_experts, tuple(tuple(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExpertPlacement:
        """Inverse of `to_dict`.

        Raises:
            ArgumentError: A field is missing or not what the constructor takes.
        """
        placement: ExpertPlacement = convert(values, cls, "a placement")
        return placement

    def to_dict(self) -> dict[str, Any]:
        """The fields as lists and numbers, for JSON."""
        return {"num_experts": self.num_experts, "experts_of_rank": [list(experts) for experts in self.experts_of_rank]}

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.experts_of_rank)

    @property
    def num_replicas(self) -> int:
        """Experts of all ranks beyond one for each of the layer."""
        return sum(map(len, self.experts_of_rank)) - self.num_experts

    @property
    def is_contiguous(self) -> bool:
        """Whether ranks hold slices of equal size in order."""
        if self.num_experts % self.num_ranks:
            return False
        return self == ExpertPlacement.contiguous(self.num_experts, self.num_ranks)

    @property
    def digest(self) -> str:
        """A short text that is equal on ranks with the same placement."""
        return hashlib.sha256(repr((self.num_experts, self.experts_of_rank)).encode()).hexdigest()[:16]

    def ranks_of_expert(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold an expert, ascending."""
        return tuple(rank for rank, experts in enumerate(self.experts_of_rank) if expert in experts)

    def expert_map(self, rank: int) -> tuple[int, ...]:
        """Local expert of a rank for each expert of the layer, -1 where it is elsewhere."""
        local = {expert: place for place, expert in enumerate(self.experts_of_rank[rank])}
        return tuple(local.get(expert, -1) for expert in range(self.num_experts))

    def __str__(self) -> str:
        counts = sorted({len(experts) for experts in self.experts_of_rank})
        held = f"{counts[0]} a rank" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} a rank"
        text = f"{self.num_experts} experts on {self.num_ranks} ranks, {held}"
        return f"{text}, {self.num_replicas} replicas" if self.num_replicas else text


class PlacementTables:
    """A placement as tensors on a device, as one rank sees it. Captured graphs see `update`.

    Attributes:
        placement: The placement that the tensors hold.
        rank: The rank that sees it.
        expert_map: [num_experts] int32, the rank's local expert or -1, for calls of this rank's experts.
        num_holders: [num_experts] int32, ranks that hold each expert.
        holders: [num_experts, ranks] int32, the ranks that hold each expert, ascending; then -1.
        expert_maps: [ranks, num_experts] int32, every rank's local expert or -1.
    """

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device) -> None:
        """Makes the tensors on the weights' device."""
        check_instance("placement", placement, ExpertPlacement, "make one with ExpertPlacement(...)")
        check_count("rank", rank, minimum=0)
        if rank >= placement.num_ranks:
            raise ArgumentError(f"rank must be below {placement.num_ranks}, the placement's ranks, got {rank}")
        self.placement = placement
        self.rank = rank
        # Outside inference mode, so that they may be written in any mode.
        with torch.inference_mode(False):
            self.expert_map, self.num_holders, self.holders, self.expert_maps = (
                tensor.to(device) for tensor in _tensors(placement, rank)
            )

    def ranks_of(self, topk_ids: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """The rank that computes each route. No host synchronization; may be captured.

        A token takes replica `turn % replicas` of each of its experts, counted in rank order. So a route's rank depends
        only on its token's place, never on the other tokens or the token dispatcher.

        Args:
            topk_ids: [T,K] int32, experts of the layer.
            turns: [T] integers; `token_turns` makes those of a call.

        Returns:
            [T,K] int32, -1 where an id is no expert.
        """
        known = (topk_ids >= 0) & (topk_ids < self.placement.num_experts)
        experts = torch.where(known, topk_ids, 0).long()
        replica = turns.unsqueeze(1).to(torch.int32) % self.num_holders[experts]
        return torch.where(known, self.holders[experts, replica.long()], -1)

    def update(self, placement: ExpertPlacement) -> None:
        """Writes another placement of the same sizes into the same tensors."""
        with torch.inference_mode():
            mine_now = self.expert_map, self.num_holders, self.holders, self.expert_maps
            for old, new in zip(mine_now, _tensors(placement, self.rank), strict=True):
                old.copy_(new)
        self.placement = placement


def token_turns(num_tokens: int, home_rank: int, device: torch.device) -> torch.Tensor:
    """[T] int32: a token's place in its rank's call plus that rank, so that single tokens of many ranks spread too."""
    return torch.arange(home_rank, home_rank + num_tokens, dtype=torch.int32, device=device)


def _experts(name: str, value: object) -> tuple[int, ...]:
    return check_list(name, value, lambda item, expert: check_count(item, expert, minimum=0))


def _tensors(placement: ExpertPlacement, rank: int) -> tuple[torch.Tensor, ...]:
    """`expert_map`, `num_holders`, `holders` and `expert_maps` on the CPU."""
    num_ranks = placement.num_ranks
    maps = torch.tensor([placement.expert_map(each) for each in range(num_ranks)], dtype=torch.int32)
    ranks = torch.arange(num_ranks, dtype=torch.int32).expand(placement.num_experts, -1)
    # Ranks that do not hold an expert go behind those that do.
    holders = ranks.masked_fill(maps.t() < 0, num_ranks).sort(1).values
    holders[holders == num_ranks] = -1
    return maps[rank].clone(), (maps >= 0).sum(0, dtype=torch.int32), holders, maps
