"""Pictures of `moereg bench` and `moereg quantize`: no label lies over another, and no pane is empty."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="draws with matplotlib")

from matplotlib.figure import Figure

from moereg.cli import _plot, _quantize
from tests.support.pictures import labels_that_meet


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: found.append(figure))
    return found


def fake_bench(share: float) -> Any:
    """Seven backends with long names and nearly the same times, at counts of tokens that are neighbors."""
    names = {f"decision {number}": f"backend_{number} (SomeLongNamedExperts{number})" for number in range(7)}
    counts = (1, 2, 3, 4, 60, 64, 65, 1000, 1024, 1025, 4096)
    timing = SimpleNamespace(p10_us=99.0, p90_us=105.0)
    rows = [
        SimpleNamespace(
            decision=decision, num_tokens=count, time_us=100.0 + number, timing=timing, share=share, passed=True,
            roofline_us=100.0 * share,
        )
        for number, decision in enumerate(names) for count in counts
    ]  # fmt: skip
    problem = SimpleNamespace(quant=SimpleNamespace(name="unquantized"), dtype="bfloat16")
    measured_on = {"device": "a machine", "date": "2026-01-01", "versions": {"torch": "2.13.0"}}
    ceilings = SimpleNamespace(matmul_tflops=1.0, read_gbps=20.0)
    return SimpleNamespace(
        rows=rows, labels=lambda: names, token_counts=counts, subject="qwen3-30b-a3b", routing="uniform",
        selection=SimpleNamespace(problem=problem), ceilings=ceilings, measured_on=measured_on,
    )  # fmt: skip


@pytest.mark.parametrize(("share", "panes"), [(0.03, 1), (0.6, 2)])
def test_labels_of_bench_are_apart_and_shares_near_zero_have_no_pane(
    figures: list[Figure], share: float, panes: int
) -> None:
    _plot.plot_bench(fake_bench(share), Path("bench.png"))
    (figure,) = figures
    assert not labels_that_meet(figure)
    assert len(figure.axes) == panes
    shown = [label for label in figure.axes[0].get_xticklabels() if label.get_visible()]
    assert len(shown) >= 5


def test_labels_of_quantize_are_apart(figures: list[Figure]) -> None:
    @dataclasses.dataclass
    class Row:
        quant: str
        num_bytes: int
        output_error: float
        time_us: float
        decision: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(tier="kernel"))

        @property
        def measured(self) -> list[Any]:
            return [SimpleNamespace(time_us=self.time_us)]

    rows = [
        Row(
            f"scheme_{number}",
            10**8 + 10**6 * (number % 5),
            0.1 if number == 0 else 1e-3 * (1 + number / 40),
            10.0 ** (number % 6),
        )
        for number in range(20)
    ]
    result: Any = SimpleNamespace(
        rows=rows, original=Row("unquantized", 3 * 10**8, 0.0, 50.0), subject="model, layer 3", problem="E8 H64 I32 k2",
        inputs="given", measured_on={"device": "a machine", "date": "2026-01-01"},
        question=SimpleNamespace(token_counts=(1, 64)),
    )  # fmt: skip
    _quantize.plot_quantize(result, Path("quantize.png"))
    (figure,) = figures
    assert not labels_that_meet(figure)
    letters = "".join(text.get_text() for text in figure.axes[0].texts).replace(",", "")
    assert sorted(letters) == sorted("abcdefghijklmnopqrst")
