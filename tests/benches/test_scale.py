"""The model of docs/scale.md: it gives back what it was made of, and counts bytes and routes as they are."""

from __future__ import annotations

import pytest

from benches.scale import model, page
from benches.scale.model import LAYERS, MODELLED, wire_bytes
from benches.scale.routes import num_replicas, shares
from moereg.prepare_finalize import DISPATCHERS

QWEN, DEEPSEEK, GPT_OSS = LAYERS
BY_NAME = {dispatcher.name: dispatcher for dispatcher in MODELLED}


def test_two_ranks_take_what_two_ranks_took() -> None:
    for row in model._load("h200_links.json")["rows"]:
        for name, sent in (("all_to_all_single", 2), ("reduce_scatter_tensor", 2), ("all_gather_into_tensor", 1)):
            time = model._collective(name, row["bytes"] / sent, 2, captured=False)
            assert time == pytest.approx(row[f"{name}_us"])


def test_experts_of_one_rank_take_what_the_layer_took() -> None:
    for row in model._load("h200_table_bf16.json")["rows"]:
        if row["model"] == QWEN.model:
            (ranks,) = shares(128, 1, 8, "uniform", balanced=False)
            time = model._kernel_us(QWEN, ranks[0], row["tokens"], "uniform", MODELLED[0])
            assert time == pytest.approx(row["ours_us"], rel=0.08), row["tokens"]


def test_every_route_has_a_rank() -> None:
    for routing, balanced in page.CASES:
        for size in page.RANKS:
            for ranks in shares(128, size, 8, routing, balanced):
                assert sum(share.routes for share in ranks) == pytest.approx(8)
                assert sum(share.experts for share in ranks) == 128 + balanced * num_replicas(128, size)
                assert all(0 < share.reached <= 1 for share in ranks)
                assert all(share.active(1) == pytest.approx(share.routes) for share in ranks)


def test_bytes_are_those_that_one_counts_by_hand() -> None:
    (ranks,) = shares(128, 2, 8, "uniform", balanced=False)
    found = {name: wire_bytes(QWEN, dispatcher, 64, ranks) for name, dispatcher in BY_NAME.items()}
    row, routes = 2048 * 2, 8 * 8
    assert found["all_gather"] == (64 * (row + routes), 64 * row)
    # Half of the eight routes go to the other rank.
    reached = 1 - 0.9375**64
    assert found["all_to_all"] == pytest.approx((64 * reached * (row + routes), 64 * 4 * row))
    assert wire_bytes(DEEPSEEK, BY_NAME["all_gather, fp8"], 1, ranks)[0] == 7168 + 56 * 4 + routes


def test_priorities_follow_from_the_page() -> None:
    """Above the ranks up to which `all_gather` goes first by default, `all_to_all` wins where there is much to send."""
    (limit,) = {cell.facts.max_group_size for cell in DISPATCHERS.cells if cell.name == "all_gather"} - {None}
    for layer in LAYERS:
        for size in (2, 4, 8, 16):
            assert size <= limit
            for tokens in (1, 64, 1024, 8192):
                times = page.best(layer, size, tokens, "zipf", True)
                times.pop("all_to_all, sums")  # Has to be named.
                gathered = min(time for name, time in times.items() if name.startswith("all_gather"))
                assert gathered < 1.2 * min(time for name, time in times.items() if name != "all_to_all, sums"), (
                    layer.name,
                    size,
                    tokens,
                )
        assert next(iter(page.best(layer, 64, 8192, "zipf", True))).startswith("all_to_all")
