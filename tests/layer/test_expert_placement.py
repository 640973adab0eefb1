"""Who holds which experts: the value and its errors, and the tensors that calls read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables, token_turns

CPU = torch.device("cpu")
REPLICATED = ExpertPlacement(5, ((0, 1, 2), (3, 0, 4), (0, 4, 1)))


@pytest.mark.parametrize(
    ("num_experts", "ranks", "text"),
    [
        (4, ((0, 1), (2, 4)), r"experts_of_rank\[1\] must hold experts below num_experts=4, got 4; count from 0"),
        (4, ((0, 1), (2,)), r"every expert must be on a rank, got none for expert 3 \(1 of 4 are missing\); add them"),
        (2, ((0, 1), (1, 1)), "a rank must hold an expert once at most, got expert 1 twice on rank 1; give its"),
        (2, ((0, 1), ()), "every rank must hold an expert, got none for rank 1; use fewer ranks"),
        (2, (), "experts_of_rank must have a rank at least, got none"),
        (2, ((0, -1), (1,)), r"experts_of_rank\[0\]\[1\] must be at least 0, got -1"),
        (2, ((0, True),), r"experts_of_rank\[0\]\[1\] must be an integer, got True"),
        (0, ((0,),), "num_experts must be at least 1, got 0"),
        (2, "01", "experts_of_rank must be a list, got '01'"),
    ],
)
def test_what_is_no_placement_is_refused(num_experts: int, ranks: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ExpertPlacement(num_experts, ranks)


def test_contiguous_needs_ranks_that_divide_the_experts() -> None:
    with pytest.raises(ArgumentError, match="got 10 experts on 4 ranks; say who holds what with ExpertPlacement"):
        ExpertPlacement.contiguous(10, 4)
    placement = ExpertPlacement.contiguous(6, 3)
    assert placement.experts_of_rank == ((0, 1), (2, 3), (4, 5))
    assert placement.is_contiguous
    assert not ExpertPlacement(6, ((0, 1), (2, 3), (5, 4))).is_contiguous
    assert not ExpertPlacement(3, ((0, 1), (2,))).is_contiguous


def test_it_says_what_it_holds() -> None:
    assert (REPLICATED.num_ranks, REPLICATED.num_replicas) == (3, 4)
    assert REPLICATED.ranks_of_expert(0) == (0, 1, 2)
    assert REPLICATED.expert_map(2) == (0, 2, -1, -1, 1)
    assert str(REPLICATED) == "5 experts on 3 ranks, 3 a rank, 4 replicas"
    assert str(ExpertPlacement(3, ((0, 1), (2,)))) == "3 experts on 2 ranks, 1 to 2 a rank"


def test_json_and_digest_tell_placements_apart() -> None:
    again = ExpertPlacement.from_dict(json.loads(json.dumps(REPLICATED.to_dict())))
    assert again == REPLICATED
    assert hash(again) == hash(REPLICATED)
    assert again.digest == REPLICATED.digest
    assert ExpertPlacement(5, ((0, 1, 2), (3, 0, 4), (0, 1, 4))).digest != REPLICATED.digest
    with pytest.raises(ArgumentError, match="experts_of_rank is required"):
        ExpertPlacement.from_dict({"num_experts": 2})


def test_each_route_takes_the_replica_of_its_tokens_turn() -> None:
    tables = PlacementTables(REPLICATED, 1, CPU)
    ids = torch.tensor([[0, 4], [0, 4], [0, 2], [0, 7], [-1, 1]], dtype=torch.int32)
    first, second = (tables.ranks_of(ids, token_turns(5, home, CPU)).tolist() for home in (0, 1))
    assert first == [[0, 1], [1, 2], [2, 0], [0, -1], [-1, 0]]
    assert second == [[1, 2], [2, 1], [0, 0], [1, -1], [-1, 2]]
    assert tables.ranks_of(ids[:0], token_turns(0, 1, CPU)).shape == (0, 2)


def test_every_route_meets_its_expert_on_the_rank_that_it_takes() -> None:
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(40)]).int()
    all_tables = [PlacementTables(REPLICATED, rank, CPU) for rank in range(3)]
    ranks = all_tables[0].ranks_of(ids, token_turns(40, 2, CPU))
    local = torch.stack([tables.expert_map for tables in all_tables])[ranks.long(), ids.long()]
    assert int(local.min()) >= 0
    assert all(torch.equal(ranks, tables.ranks_of(ids, token_turns(40, 2, CPU))) for tables in all_tables)


def test_an_update_writes_the_same_tensors() -> None:
    tables = PlacementTables(REPLICATED, 2, CPU)
    tensors = tables.expert_map, tables.num_holders, tables.holders
    other = ExpertPlacement(5, ((4, 3, 2), (1, 0, 4), (2, 3, 1)))
    tables.update(other)
    fresh = PlacementTables(other, 2, CPU)
    for held, wanted in zip(tensors, (fresh.expert_map, fresh.num_holders, fresh.holders), strict=True):
        assert torch.equal(held, wanted)
    with torch.inference_mode():
        PlacementTables(other, 0, CPU).update(REPLICATED)
    with pytest.raises(ArgumentError, match="rank must be below 3, the placement's ranks, got 3"):
        PlacementTables(REPLICATED, 3, CPU)
