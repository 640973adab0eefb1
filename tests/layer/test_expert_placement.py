"""Placements as values and tables, and those from counted loads: what the greedy method promises, and what it gains."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from moereg.bench.inputs import random_call
from moereg.errors import ArgumentError
from moereg.prepare_finalize.eplb import balance_experts, count_routes, rank_loads
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables, token_turns
from moereg.spec.problem import MoEProblem

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


def zipf_loads(num_experts: int, seed: int) -> list[float]:
    loads = [1 / rank for rank in range(1, num_experts + 1)]
    random.Random(seed).shuffle(loads)
    return loads


def excess(placement: ExpertPlacement, loads: Any) -> float:
    found = rank_loads(placement, loads)
    return max(found) * len(found) / sum(found)


def test_counts_are_those_of_the_ids() -> None:
    ids = torch.tensor([[0, 3], [3, 1], [-1, 3], [9, 0]], dtype=torch.int32)
    assert count_routes(ids, 5).tolist() == [2, 1, 0, 3, 0]
    assert count_routes(ids[:0], 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_replicas"),
    [(256, 8, 32), (64, 64, 64), (10, 3, 5), (4, 2, 4), (4, 4, 12), (6, 3, 6), (5, 1, 0), (7, 7, 0), (3, 5, 7)],
)
def test_every_placement_is_valid_and_ranks_are_equally_large(
    num_experts: int, num_ranks: int, num_replicas: int
) -> None:
    for seed in range(5):
        # Zeros and ties, too.
        loads = [round(load, 1) for load in zipf_loads(num_experts, seed)]
        placement = balance_experts(loads, num_ranks, num_replicas)
        sizes = {len(experts) for experts in placement.experts_of_rank}
        assert sizes == {(num_experts + num_replicas) // num_ranks}
        assert placement.num_replicas == num_replicas
        assert placement == balance_experts(torch.tensor(loads, dtype=torch.float64), num_ranks, num_replicas)


def test_replicas_go_to_the_busiest_experts() -> None:
    placement = balance_experts([60, 30, 1, 1, 1, 1], 2, 2)
    assert placement.ranks_of_expert(0) == (0, 1)
    assert placement.ranks_of_expert(1) == (0, 1)
    assert rank_loads(placement, [60, 30, 1, 1, 1, 1]) == [47.0, 47.0]


@pytest.mark.parametrize(("busy", "holders"), [(6, [2, 2, 1, 1]), (4, [3, 1, 1, 1])])
def test_a_replica_leaves_an_expert_its_share_of_the_load(busy: int, holders: list[int]) -> None:
    placement = balance_experts([10, busy, 3, 1], 3, 2)
    assert [len(placement.ranks_of_expert(expert)) for expert in range(4)] == holders


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_what_is_gained_on_zipf(num_ranks: int) -> None:
    loads = zipf_loads(256, 7)
    as_they_come = excess(ExpertPlacement.contiguous(256, num_ranks), loads)
    moved = excess(balance_experts(loads, num_ranks), loads)
    replicated = excess(balance_experts(loads, num_ranks, 32), loads)
    assert replicated <= moved <= as_they_come
    assert replicated < 1.02
    # The busiest expert has a sixth of all routes: no rank of 32 can hold it and have its share alone.
    assert max(loads) * num_ranks / sum(loads) <= moved <= 1.15 * max(1.0, max(loads) * num_ranks / sum(loads))


def test_counted_routes_are_balanced_where_replicas_share_them() -> None:
    problem = MoEProblem(num_experts=64, hidden_size=8, intermediate_size=8, top_k=4, dtype="float32")
    call = random_call(problem, 4096, "zipf", torch.Generator().manual_seed(3))
    counts = count_routes(call.topk_ids, 64)
    turns = token_turns(4096, 0, torch.device("cpu"))

    def busiest(placement: ExpertPlacement) -> float:
        ranks = PlacementTables(placement, 0, torch.device("cpu")).ranks_of(call.topk_ids, turns)
        return float(count_routes(ranks, 8).max()) * 8 / (4096 * 4)

    assert busiest(ExpertPlacement.contiguous(64, 8)) > 1.5
    assert busiest(balance_experts(counts, 8, 8)) < 1.03


def test_experts_stay_where_they_were_as_far_as_the_groups_allow() -> None:
    loads = zipf_loads(32, 1)
    before = balance_experts(loads, 4, 4)
    assert balance_experts(loads, 4, 4, before) == before
    turned = ExpertPlacement(32, tuple(experts[::-1] for experts in before.experts_of_rank[::-1]))
    assert balance_experts(loads, 4, 4, turned) == turned
    loads[5] *= 1.3
    after, fresh = balance_experts(loads, 4, 4, before), balance_experts(loads, 4, 4)
    assert excess(after, loads) == pytest.approx(excess(fresh, loads))

    def kept(placement: ExpertPlacement) -> int:
        pairs = zip(placement.experts_of_rank, before.experts_of_rank, strict=True)
        return sum(one == other for new, old in pairs for one, other in zip(new, old, strict=True))

    assert kept(after) > kept(fresh)


@pytest.mark.parametrize("num_replicas", [0, 2, 4])
@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_experts_stay_where_they_were_on_ranks_that_hold_more_or_fewer(num_before: int, num_replicas: int) -> None:
    loads = zipf_loads(6, 1)
    before = balance_experts(loads, 2, num_before)
    before = ExpertPlacement(6, tuple(experts[::-1] for experts in before.experts_of_rank))
    after = balance_experts(loads, 2, num_replicas, before)
    fresh = balance_experts(loads, 2, num_replicas)
    assert sorted(map(sorted, after.experts_of_rank)) == sorted(map(sorted, fresh.experts_of_rank))
    for old, new in zip(before.experts_of_rank, after.experts_of_rank, strict=True):
        for place, expert in enumerate(old[: len(new)]):
            assert new[place] == expert or expert not in new


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0, 2.0, 3.0], 2), "got 3 experts and 0 replicas on 2 ranks; take 1 replicas"),
        (([1.0, 2.0], 2, 4), "num_replicas must be at most 2, each expert on all 2 ranks, got 4"),
        (([1.0, -2.0], 2), "loads must not be negative, got -2.0 for expert 1"),
        (([1.0, float("nan")], 2), r"loads\[1\] must be a finite number, got nan"),
        (([], 2), "num_experts must be at least 1, got 0"),
        ((3, 2), "loads must be a list, got 3"),
        ((torch.ones(2, 2), 2), r"loads\[0\] must be a finite number, got \[1.0, 1.0\]"),
        (([1.0, 2.0], 0), "num_ranks must be at least 1, got 0"),
        (([1.0, 2.0], 2, 0, ExpertPlacement.contiguous(4, 2)), "before must have 2 experts on 2 ranks, got 4 experts"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        balance_experts(*arguments)
