"""How the command line shows known numbers: units, order, marks and losses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg import cli
from moereg.bench.compare import Measurement
from moereg.bench.roofline import Ceilings
from moereg.bench.timing import Timing
from moereg.cli._bench import result_of_bench, result_of_run
from moereg.cli._output import Result
from moereg.cli._show import format_us, format_us_range
from moereg.dispatch import Decision, Selection, explain_backends
from moereg.spec.problem import MoEProblem

SIZES = "--experts 8 --hidden 64 --intermediate 32 --top-k 2"
PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)


def selection_here() -> Selection:
    return explain_backends(PROBLEM, "cpu")


def test_run_gives_the_median_in_us_and_permuting_in_ms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> Iterator[float]:
        yield from (100.0, 102.5)  # permuting
        yield from itertools.count(103.0)  # first calls

    timing = Timing((7000.0, 1234.0, 20.0))
    monkeypatch.setattr("moereg.bench.compare.time_runs", lambda runs, *_: dict.fromkeys(runs, timing))
    ticks = clock()
    monkeypatch.setattr("moereg.bench.compare.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert cli.main(f"run {SIZES} --platform cpu --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["time_us"], found["permute_ms"]) == (1234.0, 2500.0)
    assert (found["p10_us"], found["p90_us"]) == (timing.p10_us, timing.p90_us)
    assert found["p10_us"] < found["time_us"] < found["p90_us"]


def test_run_for_people_has_units_that_read_well(capsys: pytest.CaptureFixture[str]) -> None:
    selection = selection_here()
    row = measured(selection.decisions[0], 64, (1234.4,))
    result_of_run("layer", selection, 64, row, permute_ms=2500.0).show()
    out = capsys.readouterr().out
    assert "1.23 ms a call of 64 tokens (p10 to p90: 1.23 to 1.23 ms)" in out
    assert "permuted in 2.50 s" in out
    assert "1.00e-03, within the tolerance 8.0e-03" in out


def measured(decision: Decision, num_tokens: int, samples_us: tuple[float, ...]) -> Measurement:
    return Measurement(
        decision=decision,
        num_tokens=num_tokens,
        relative_error=1e-3 if samples_us else 1.0,
        tolerance=8e-3,
        failure="",
        timing=Timing(samples_us) if samples_us else None,
        flops=4e9,
        num_bytes=3e6,
        roofline_us=50.0,
    )


def compared(fast_us: tuple[float, ...] = (90.0, 100.0, 140.0), tier: str = "kernel") -> Result:
    """A bench of three candidates: one of 200 us, another one of 100 us, and one that is wrong."""
    selection = selection_here()
    assert selection.winner is not None
    names = ("slow", "fast", "wrong")
    decisions = [dataclasses.replace(selection.winner, backend=name) for name in names]
    decisions[1] = dataclasses.replace(decisions[1], tier=tier)
    selection = dataclasses.replace(selection, decisions=tuple(decisions))
    samples = ((180.0, 200.0, 260.0), fast_us, ())
    rows = tuple(measured(decision, 16, times) for decision, times in zip(decisions, samples, strict=True))
    measured_on = {"device": "a machine", "versions": {"torch": torch.__version__}, "commit": "", "date": "2026-01-02"}
    return result_of_bench("layer", selection, "uniform", measured_on, Ceilings(80.0, 60.0, "nothing"), rows)


def test_bench_numbers_are_those_of_the_samples() -> None:
    rows: list[dict[str, Any]] = compared().values["rows"]
    slow, fast, wrong = rows
    assert (slow["time_us"], fast["time_us"]) == (200.0, 100.0)
    # Deciles of three samples lie between them: a fifth of the way in from either end.
    assert (fast["p10_us"], fast["p90_us"]) == (pytest.approx(92.0), pytest.approx(132.0))
    assert (fast["tflops"], fast["gbps"], fast["share"]) == (pytest.approx(40.0), pytest.approx(30.0), 0.5)
    assert wrong["passed"] is False
    assert wrong["time_us"] != wrong["time_us"]  # Not a number.


def test_bench_for_people_has_the_fastest_first_and_marks_it(capsys: pytest.CaptureFixture[str]) -> None:
    compared().show()
    lines = capsys.readouterr().out.splitlines()
    fast, slow, wrong = (
        next(line.split() for line in lines if f" {name} " in line) for name in ("fast", "slow", "wrong")
    )
    places = [next(i for i, line in enumerate(lines) if f" {name} " in line) for name in ("fast", "slow", "wrong")]
    assert places == sorted(places)
    assert fast[3:] == [
        "(TorchPackedExperts)",
        *["100", "us", "92.0", "to", "132", "us", "40", "30", "50.0%", "1.0e-03"],
    ]
    assert slow[1:] == [
        "(TorchPackedExperts)",
        *["200", "us", "184", "to", "248", "us", "20", "15", "25.0%", "1.0e-03"],
    ]
    assert wrong[2:] == ["WRONG", "1.0e+00", ">", "8.0e-03"]


def test_bench_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    compared().show()
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80
    fast = next(line.split() for line in table if " fast " in line)
    assert fast[:5] + fast[-2:] == ["16", "fastest", "fast", "100", "us", "50.0%", "1.0e-03"]


@pytest.mark.parametrize(
    ("fast_us", "tier", "text"),
    [
        (
            100.0,
            "kernel",
            "faster at T=16: fast (TorchPackedExperts); MOEREG_PREFER=fast or prefer='fast' gives it to layers",
        ),
        (
            100.0,
            "emulation",
            "faster at T=16: fast (TorchPackedExperts); MOEREG_REQUIRE=fast or require='fast' gives it to layers",
        ),
        (195.0, "kernel", ""),
    ],
    ids=["faster", "an emulation", "a tie"],
)
def test_bench_names_the_next_step(capsys: pytest.CaptureFixture[str], fast_us: float, tier: str, text: str) -> None:
    compared((fast_us,), tier).show()
    assert [line for line in capsys.readouterr().out.splitlines() if "faster" in line] == [text] * bool(text)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0.0, "0.00 us"),
        (8.254, "8.25 us"),
        (99.94, "99.9 us"),
        (99.96, "100 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (6187920.0, "6.19 s"),
        (61_300_000.0, "61.3 s"),
        (4e9, "4000 s"),
    ],
)
def test_times_have_the_unit_that_reads_well(time_us: float, text: str) -> None:
    assert format_us(time_us) == text
    assert format_us_range(time_us, time_us) == text.replace(" ", f" to {text.split()[0]} ")
    assert format_us_range(980.0, 1210.0) == "0.98 to 1.21 ms"
