"""What the bench of layers over GPUs measures, by the names that it is given."""

from __future__ import annotations

from benches.h200.ep import LAYERS, items


def test_names_leave_out_the_others() -> None:
    every = items(())
    assert {item.part for item in every} == {"first", "halves", "more", "zipf", "sums", "room"}
    assert len(every) == len(set(every)) == 17 * len(LAYERS)
    found = items(("first", "room", "all_gather", "low_latency", "qwen3"))
    assert [(item.tokens, *item.ways) for item in found] == [
        (8192, "all_gather"), (64, "all_gather"), (64, "low_latency"), (1, "low_latency"), (1024, "low_latency")
    ]  # fmt: skip
    assert {item.layer for item in found} == {"qwen3"}
    assert {(item.batches, *item.ways) for item in items(("halves",))} == {(2, "all_gather")}
    assert items(("sums",)) == [item for item in every if item.part == "sums"]
