"""The bench of a loss curve: what it calls wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benches.h200 import training_curve

LOSSES = [5.0 - 0.1 * step for step in range(40)]
EARLY, END, MEAN = "moereg's first losses are up to", "moereg ends", "from grouped_mm on average"


@pytest.mark.parametrize(
    ("again", "digest", "moereg", "said"),
    [
        (LOSSES, "a", LOSSES, []),
        (LOSSES, "b", LOSSES, ["the second run's parameters differ in bits"]),
        ([*LOSSES[:-1], LOSSES[-1] + 1e-7], "a", LOSSES, ["the second run's losses differ in bits"]),
        (None, "a", [LOSSES[0], 1.02 * LOSSES[1], *LOSSES[2:]], [f"{EARLY} 2.0% from eager's on text 0"]),
        (None, "a", [LOSSES[0], float("nan"), *LOSSES[2:]], [f"{EARLY} nan% from eager's on text 0"]),
        (None, "a", [*LOSSES[:30], *[1.67] * 10], []),
        (None, "a", [*LOSSES[:30], *[1.39] * 10], [f"{END} -5.2% {MEAN}", f"{END} -10.3% from grouped_mm on text 0"]),
    ],
    ids=["right", "parameters", "losses", "early", "nan", "one-text", "last"],
)
def test_what_is_wrong_is_named(again: list[float] | None, digest: str, moereg: list[float], said: list[str]) -> None:
    runs = [
        {"name": "eager", "text": 0, "losses": LOSSES, "digest": "e"},
        {"name": "grouped_mm", "text": 0, "losses": LOSSES, "digest": "g"},
        {"name": "moereg", "text": 0, "losses": moereg, "digest": "a"},
        {"name": "moereg again", "text": 0, "losses": moereg if again is None else again, "digest": digest},
        {"name": "grouped_mm", "text": 1, "losses": LOSSES, "digest": "e"},
        {"name": "moereg", "text": 1, "losses": LOSSES, "digest": "b"},
    ]
    equal, ends, wrong = training_curve.conclude(runs)
    assert wrong == said
    assert ends[1] == 0.0
    assert equal["parameters"] is (digest == "a")
