"""Layers over the ranks of a gloo group against the same layers on one rank, and what ranks say where they differ."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from moereg.prepare_finalize.ranks_agree import differences
from tests.groups.ranks import results_of, value_of

EQUAL: Final = (
    *("chosen_without_a_word", "all_to_all", "all_gather", "all_gather_deterministic"),
    *("all_to_all_batched", "all_gather_batched", "all_to_all_sums", "all_to_all_sums_batched", "maps_of_ranks"),
    *("weights_on_inputs", "weights_on_gathered_inputs", "weights_on_summed_inputs"),
    *("replicas_all_to_all", "replicas_all_to_all_sums", "replicas_all_gather"),
)
"""Cases in fp32 with numbers whose sums are exact in any order."""
NEAR: Final = ("all_to_all_fp8", "all_gather_fp8", "all_to_all_sums_fp8", "codes_as_they_come_fp8")
"""Cases with tokens in 8 bits: sums of products depend on how many rows are multiplied together, by a rounding."""
REFUSED: Final = {
    "other_problems": "RanksDifferError: all ranks must run the same layer, got top_k 2 on rank 0, 3 on rank 1; make",
    "other_dispatchers": "RanksDifferError: all ranks must run the same layer, got dispatcher all_gather on rank 0, ",
    "other_rooms": "RanksDifferError: all ranks must run the same layer, got max_num_tokens 8 on rank 0, 9 on rank 1;",
    "experts_that_do_not_divide": "ArgumentError: a group's ranks must divide the experts where no map says who holds",
    "capture_with_counts": "UnsupportedProblemError: no token dispatcher fits .*nearest is all_to_all: waits for c",
}
ONE_FAILS: Final = {
    "one_cannot": r"ArgumentError: w13 must be \[6, 64, 128\]",
    "one_finds_no_dispatcher": "UnknownNameError: unknown dispatcher in require 'no_such_dispatcher'",
}
CALLS: Final = (
    *("layers_in_other_order", "layers_in_other_order_by_counts", "two_threads", "as_on_a_gpu"),
    "float16_beyond_its_range",
)
FIRST_CHECKS: Final = ("first_check_fails", "first_check_fails_unquarantined", "first_check_fails_elsewhere")
CASES: Final = (*EQUAL, *NEAR, "refusals", *CALLS, *FIRST_CHECKS)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return results_of(2, *CASES)


@pytest.mark.parametrize("name", EQUAL)
def test_a_group_computes_the_bits_of_one_rank(two_ranks: list[dict[str, Any]], name: str) -> None:
    assert [value_of(result, name)["equal"] for result in two_ranks] == [True, True]


@pytest.mark.parametrize("name", NEAR)
def test_tokens_in_8_bits_change_no_more_than_a_rounding(two_ranks: list[dict[str, Any]], name: str) -> None:
    # Sums of ranks are rounded to bfloat16 each, those of routes are not seen to be.
    bound = 6e-3 if name in ("all_gather_fp8", "all_to_all_sums_fp8") else 1e-3
    for result in two_ranks:
        assert value_of(result, name)["error"] < bound, value_of(result, name)


def test_results_beyond_the_range_of_float16_travel_in_fp32(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        errors = value_of(result, "float16_beyond_its_range")
        assert len(errors) == 12
        # One rounding of the results is 2e-4. Rows that were rounded before they were weighted are 4.7e-4 and more.
        assert all(error < 3e-4 for error in errors.values()), errors


def test_what_is_chosen_and_how_tokens_travel(two_ranks: list[dict[str, Any]]) -> None:
    found = two_ranks[0]
    assert value_of(found, "chosen_without_a_word")["dispatcher"] == "all_gather"  # Two ranks.
    assert value_of(found, "all_to_all")["wire"] == "float32"
    assert found["all_to_all_fp8"]["wire"] == "float8_e4m3fn with float32 scales"
    assert found["all_to_all_batched"]["format"] == found["all_gather_batched"]["format"] == "batched"


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_cannot_go_together_all_say_so(two_ranks: list[dict[str, Any]], name: str) -> None:
    for result in two_ranks:
        text = value_of(result, "refusals")[name]
        assert re.match(REFUSED[name], text), text


@pytest.mark.parametrize("name", ONE_FAILS)
def test_a_rank_that_fails_keeps_nobody_waiting(two_ranks: list[dict[str, Any]], name: str) -> None:
    own, other = (value_of(result, "refusals")[name] for result in two_ranks)
    assert re.match(ONE_FAILS[name], own), own
    assert other.startswith("RanksDifferError: all ranks must make the kernel, and rank 1 could; rank 0 ("), other
    assert re.search(ONE_FAILS[name], other), other


@pytest.mark.parametrize("name", FIRST_CHECKS)
def test_a_check_that_fails_on_one_rank_fails_on_all(two_ranks: list[dict[str, Any]], name: str) -> None:
    own = "its first check was off by 0.5 at T 1"
    for result, failure in zip(two_ranks, (f"on rank 1: {own}", own), strict=True):
        found = value_of(result, name)
        assert found["backends"] == ["right"] * 3
        (warned,) = found["warnings"]
        assert f": {failure}, bound" in warned
        assert "right (RightExperts) is next" in warned
        quarantined = [text.partition(", bound")[0] for text in found["quarantined"]]
        assert quarantined == ([] if name.endswith("unquarantined") else [failure])
        assert re.match(f"BackendError: .*{failure}.*no other backend that the request allows fits", found["required"])
    admitted = [value_of(result, name)["admitted"] for result in two_ranks]
    assert admitted[1] == ["right"]
    assert admitted[0] == (["right", "wrong_on_one"] if name.endswith("elsewhere") else ["right"])


def test_layers_in_another_order_are_an_error_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    layers = {
        number: f"layer {number} of the group (E12 H128 I{width})"
        for number, width in ((5, 32), (6, 32), (7, 64), (8, 32))
    }
    expected = [f"{layers[other]} on rank 0, {layers[5]} on rank 1" for other in (6, 7, 8)]
    expected.append(f"make_kernel or move_experts on rank 0, {layers[5]} on rank 1")
    for result in two_ranks:
        *refused, then, first = value_of(result, "layers_in_other_order")
        assert [then, first] == ["called", "called"]
        for text, calls in zip(refused, expected, strict=True):
            assert f"all ranks must call the same layer at a time, got {calls}; call layers in the same order" in text


def test_counts_say_which_layer_a_rank_calls(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        refused, then = value_of(result, "layers_in_other_order_by_counts")
        assert "got layer 1 of the group (E12 H128 I32) on rank 0, layer 2 of the group (E12 H128 I32) on ra" in refused
        assert then == "prepared"


def test_a_second_thread_is_refused_before_it_exchanges_anything(two_ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(two_ranks):
        called, making, inside_still, next_call, then = value_of(result, "two_threads")
        inside = (
            f"on rank {rank} of 2 ranks over gloo on cpu while another is to call layer 1 of the group (E12 H128 I32)"
        )
        assert f"got one that wants to call layer 2 of the group (E12 H128 I32) {inside}; call from one th" in called
        assert f"got one that wants to make the kernel {inside}; call from one thread" in making
        assert [inside_still, then] == ["called", "called"]
        assert "the same layer at a time, got layer 1 of the group (E12 H128 I32) on rank 0, layer 2 of" in next_call


def test_where_a_host_must_not_wait_a_layer_is_checked_once(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        found = value_of(result, "as_on_a_gpu")
        assert "layer 1 of the group (E12 H128 I32) on rank 0, layer 2 of the group (" in found["texts"][0]
        assert found["texts"][1:] == ["called"] * 4
        assert found["checked"] == 3
        # What all have read is not kept.
        assert found["keys"] == [False, False, True, False]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_rank_that_differs_is_named(num_ranks: int) -> None:
    for rank in range(num_ranks):
        said = [{"moereg": "1.0", "top_k": 2} for _ in range(num_ranks)]
        assert differences(said) == []
        said[rank]["top_k"] = 3
        found = differences(said)
        assert len(found) == (num_ranks > 1)
        assert all(re.search(rf"^top_k .*\b3 on rank {rank}\b", each) for each in found)


def test_who_differs_and_in_what() -> None:
    said = [{"moereg": "1.0", "code": "builtin ab"} for _ in range(6)]
    said[2]["moereg"], said[5]["moereg"] = "1.1", "1.2"
    del said[0]["code"]
    assert differences(said) == [
        "moereg 1.0 on ranks 0-1 and 3-4, 1.1 on rank 2, 1.2 on rank 5",
        "code nothing on rank 0, builtin ab on ranks 1-5",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed_all_to_all", "stalled_all_gather"])
def test_a_rank_that_ends_or_stalls_ends_the_others(name: str) -> None:
    # More seconds than a busy machine takes to get there, fewer than anybody would wait.
    *others, lost = results_of(3, name, seconds=10)
    assert not lost
    for rank, result in enumerate(others):
        text = value_of(result, name)["text"]
        expected = f"rank {rank} of 3 ranks over gloo on cpu, time limit 10 s could not exchange "
        assert text.startswith(expected), text
        assert "another rank has ended, stalled or raised before it" in text


@pytest.mark.slow
def test_triton_moves_tokens_as_torch_does_in_so_many_launches() -> None:
    pytest.importorskip("triton")
    for result in results_of(2, "dispatchers_in_triton", module="tests.groups.triton_cases"):
        found = value_of(result, "dispatchers_in_triton")
        assert len(found) == 15
        for name, of in found.items():
            assert of["equal"], name
            assert of["launches"] == of["expected"], name
            assert (of["wire"] in ("float32", "bfloat16")) != name.endswith("8"), name


@pytest.mark.slow
def test_three_ranks() -> None:
    results = results_of(3, *EQUAL, *NEAR, "refusals")
    for result in results:
        assert all(value_of(result, name)["equal"] for name in EQUAL)
        assert all(value_of(result, name)["error"] < 6e-3 for name in NEAR)
        assert all("Error: " in text for text in value_of(result, "refusals").values())
