"""Experts that move between ranks while calls go on, and what ranks say where they cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moereg.errors import ArgumentError
from moereg.layer.move_experts import plan_moves
from moereg.prepare_finalize.expert_placement import ExpertPlacement
from tests.groups.ranks import results_of

MOVES = ("move_all_to_all", "move_all_gather", "move_int4", "canonical")
OTHERS = ("move_bf16", "move_fp8", "move_with_bias", "canonical")
TEXTS = {
    "differ": r"RanksDifferError: all ranks must be given the same move of experts, got new placement \w+ on rank 0",
    "sizes": r"ArgumentError: a rank must keep its number of experts, whose memory it has, got 8 for 7 on rank 0; make",
    "layer": r"ArgumentError: experts must stay in their layer and group, 12 experts on 2 ranks.*, got 6 experts on 2",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of(
        2, *MOVES, "refusals", "copies_move_alone", "a_call_beside_a_move", "balanced", module="tests.groups.move_cases"
    )


def check(result: dict[str, Any]) -> None:
    for name, case in result.items():
        is_exact = name in ("move_all_to_all", "move_all_gather", "move_with_bias")
        assert case["error"] <= (1e-6 if is_exact else 8e-3), name
        assert case["in_place"], name
        assert case["given"], f"{name}: the caller's weights were written into"
        # The second move turns every rank's experts around; the last one moves nothing.
        assert case["moved"][-1] == 0, name
        assert min(case["moved"][:-1]) > 0, name


@pytest.mark.parametrize("name", MOVES)
def test_calls_before_between_and_after_moves_are_those_of_one_rank(found: list[dict[str, Any]], name: str) -> None:
    for result in found:
        check({name: result[name]})


def test_refusals_are_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        texts = result["refusals"]
        for name, text in TEXTS.items():
            assert re.match(text, texts[name]), texts[name]
        if rank == 0:
            assert texts["one alone"].startswith("ArgumentError: placement must be an ExpertPlacement, got 'elsewhere'")
            assert "make it with own_weights=True" in texts["borrowed"]
        else:
            for name in ("one alone", "borrowed"):
                text = r"RanksDifferError: all ranks must move the experts, and rank 1 could; rank 0 \(ArgumentError"
                assert re.match(text, texts[name]), texts[name]


def test_a_copy_of_a_kernel_keeps_its_experts(found: list[dict[str, Any]]) -> None:
    assert [result["copies_move_alone"] for result in found] == [True, True]
    for result in found:
        assert result["a_call_beside_a_move"].startswith("GroupError: one thread at a time may use a group")


def test_counted_loads_even_out_what_ranks_get(found: list[dict[str, Any]]) -> None:
    for result in found:
        before, after = result["balanced"]
        assert before > 1.3
        assert after < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(("size", "names"), [(2, OTHERS), (3, MOVES), (4, ("move_all_to_all", "move_all_gather"))])
def test_moves_among_more_ranks_and_of_more_schemes(size: int, names: tuple[str, ...]) -> None:
    for result in results_of(size, *names, module="tests.groups.move_cases"):
        check(result)


def test_a_plan_brings_every_expert_from_who_has_it() -> None:
    before = ExpertPlacement(6, ((0, 1, 2), (3, 4, 5), (0, 3, 1)))
    after = ExpertPlacement(6, ((2, 0, 4), (3, 1, 0), (5, 1, 0)))
    held = [list(experts) for experts in before.experts_of_rank]
    moves = plan_moves(before, after)
    for move in moves:
        assert before.experts_of_rank[move.source_rank][move.source_place] == move.expert
        held[move.target_rank][move.target_place] = move.expert
    assert tuple(map(tuple, held)) == after.experts_of_rank
    # Own copies first, and among other ranks the one that has sent the fewest.
    sources = {(move.target_rank, move.target_place): move.source_rank for move in moves}
    assert sources == {(0, 0): 0, (0, 1): 0, (0, 2): 1, (1, 1): 0, (1, 2): 2, (2, 0): 1, (2, 1): 2, (2, 2): 2}
    assert plan_moves(before, before) == ()
    with pytest.raises(ArgumentError, match="got 1 for 3 on rank 1; make the kernel with more replicas"):
        plan_moves(before, ExpertPlacement(6, ((0, 1, 2), (3,), (5, 4, 0))))
