"""The bench of a loss curve: its text, what it calls wrong, a rehearsal on a CPU, and the page."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from benches import training_page

pytest.importorskip("transformers")

from benches.h200 import training_curve

OPTIONS = [
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--steps",
    "8",
    "--sequences",
    "2",
    "--length",
    "32",
    "--warmup",
    "2",
    "--lr",
    "3e-3",
]


def test_the_text_is_the_same_each_time_and_its_sums_are_right() -> None:
    found = training_curve.text(20_000)
    assert len(found) == 20_000
    assert found.startswith(training_curve.text(5_000))
    assert not found.startswith(training_curve.text(5_000, seed=1))
    lines = found.decode("ascii").splitlines()[:-1]
    sums = [tuple(map(int, re.findall(r"\d+", line))) for line in lines if " + " in line]
    assert len(sums) > 50
    assert all(first + second == total for first, second, total in sums)
    assert len(set(lines)) > 0.8 * len(lines)


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


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All runs of a tiny model, in this process."""
    options = training_curve._parser().parse_args(OPTIONS)
    found = [training_curve.train(name, seed, options) for name, seed in training_curve.runs_of(2)]
    monkeypatch.setattr(training_curve, "_in_processes", lambda given, num_texts: found)
    return found


def test_a_tiny_model_trains_as_with_eager_and_twice_to_the_same_bits(
    runs: list[dict[str, Any]], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / training_page.CURVE
    assert training_curve.main([*OPTIONS, "--json", str(file)]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["equal_bits"] == {"losses": True, "parameters": True}
    losses = {run["name"]: run["losses"] for run in record["runs"] if run["text"] == 0}
    assert losses["eager"][-1] < 0.95 * losses["eager"][0]
    # Rounding differs, or both ran the same code.
    assert record["runs"][0]["digest"] != record["runs"][2]["digest"]
    assert [run["backend"] for run in record["runs"]] == [None, None, "torch", "torch", None, "torch"]
    assert record["runs"][1]["losses"] != record["runs"][4]["losses"]
    assert len(record["ends"]) == 2
    shown = capsys.readouterr().out
    assert "| moereg again |" in shown
    assert "losses of all 8 steps are equal bit for bit" in " ".join(shown.split())
    training_page.draw_training_curve(tmp_path / "curve.svg", record)
    drawn = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert drawn.count("<path") > 10
    assert training_page.load_curve(tmp_path) == record
    runs[3]["digest"] = "another"
    assert training_curve.main(OPTIONS) == 1
