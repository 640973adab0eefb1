"""Placements from counted loads: what the greedy method promises, and what it gains on skewed routing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.prepare_finalize.eplb import balance_experts, count_routes, rank_loads
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables, token_turns
from moereg.spec.problem import MoEProblem
from moereg.tuning.inputs import random_call


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
