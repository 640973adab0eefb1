"""The work of `moereg bench`: every backend that fits, on the same random layer and inputs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from packaging.requirements import Requirement
from rich.text import Text

from moereg.cli._layer import check_run_fits, layer_device, load_layer, platform_at_hand, random_layer
from moereg.cli._options import ProblemFlags, UsageError, find_subject
from moereg.cli._output import console
from moereg.cli._progress import phase
from moereg.cli._show import (
    WIDE,
    format_us,
    format_us_range,
    machine,
    new_table,
    of_wheel,
    print_notices,
    show_selection,
    source_of,
    why_not,
)
from moereg.dispatch import explain_backends
from moereg.errors import UnknownNameError, unknown_name_message
from moereg.evidence.provenance import provenance
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import BUILTIN
from moereg.selection.result import SCHEMA, Decision, Selection, nearest_by_backend
from moereg.tuning.compare import Comparison, Measurement
from moereg.tuning.inputs import ROUTINGS, num_calls, random_calls
from moereg.tuning.roofline import Ceilings, measure_ceilings
from moereg.weights.permuted import ExpertWeights

_GPU_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
_CPU_TOKENS: Final = (1, 4, 16, 64, 256)


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """The result of a bench; without rows if nothing fitted and nothing ran.

    Attributes:
        subject: The model's name to show.
        selection: Every candidate, and the chosen one.
        routing: One of `ROUTINGS`.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        ceilings: Ceilings of the device; None if nothing ran.
        rows: By number of tokens, candidates in the selection's order.
    """

    subject: str
    selection: Selection
    routing: str
    measured_on: dict[str, Any]
    ceilings: Ceilings | None = None
    rows: tuple[Measurement, ...] = ()

    @property
    def passed(self) -> bool | None:
        """Whether everything measured is right; None if nothing ran."""
        return all(row.passed for row in self.rows) if self.rows else None

    @property
    def skipped(self) -> tuple[Decision, ...]:
        """For each backend that does not fit, its nearest candidate."""
        return tuple(decision for decision in nearest_by_backend(self.selection.decisions) if not decision.accepted)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending."""
        return tuple(dict.fromkeys(row.num_tokens for row in self.rows))

    def fastest_first(self, num_tokens: int) -> list[Measurement]:
        """The rows of one number of tokens, wrong ones last."""
        rows = [row for row in self.rows if row.num_tokens == num_tokens]
        return sorted(rows, key=lambda row: (row.timing is None, row.time_us if row.timing else 0.0))

    def labels(self) -> dict[Decision, str]:
        """Name of each measured candidate: its backend, with the class if a backend has several."""
        candidates = list(dict.fromkeys(row.decision for row in self.rows))
        names = [decision.backend for decision in candidates]
        return {
            decision: f"{decision.backend} ({decision.experts})"
            if names.count(decision.backend) > 1
            else decision.backend
            for decision in candidates
        }

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg bench --json` prints."""
        ceilings = dict.fromkeys(field.name for field in dataclasses.fields(Ceilings))
        return {
            "schema": SCHEMA,
            "problem": self.selection.problem.to_dict(),
            "platform": str(self.selection.platform),
            **{name: self.measured_on[name] for name in ("device", "versions", "commit", "date")},
            "routing": self.routing,
            "ceilings": dataclasses.asdict(self.ceilings) if self.ceilings else ceilings,
            "rows": [_row(row) for row in self.rows],
            "skipped": [
                {"backend": decision.backend, "reasons": decision.to_dict()["reasons"]} for decision in self.skipped
            ],
            "notices": list(self.selection.notices),
        }

    def show(self) -> None:
        """Prints the result, fastest first at each number of tokens, or, if nothing fitted, the reasons."""
        selection, winner, ceilings = self.selection, self.selection.winner, self.ceilings
        if winner is None or ceilings is None:
            show_selection(selection, self.subject)
            return
        target = console(sys.stdout)
        target.print(f"{self.subject}: {selection.problem}")
        versions = ", ".join(f"{name} {version}" for name, version in self.measured_on["versions"].items())
        threads = f", threads: {torch.get_num_threads()}" if selection.platform.kind == "cpu" else ""
        target.print(f"on {machine(selection.platform)}{threads}, {versions}, {self.measured_on['date']}")
        target.print(
            f"ceilings: {ceilings.matmul_tflops:.3g} TFLOP/s, "
            f"{ceilings.read_gbps:,.0f} GB/s ({ceilings.read_by}); {self.routing} routing"
        )
        # Only where it says something: the table is as wide as a terminal.
        with_origin = any(row.decision.origin != BUILTIN for row in self.rows)
        origin = ("origin",) if with_origin else ()
        # 80 columns have no room for what follows from the time.
        rates, share = (("TFLOP/s", "GB/s"), "% of roofline") if target.width >= WIDE else ((), "roofline")
        table = new_table("T", "", "backend", *origin, "time", "p10 to p90", *rates, share, "error")
        labels = self.labels()
        for num_tokens in self.token_counts:
            rows = self.fastest_first(num_tokens)
            for place, row in enumerate(rows):
                mark = Text("fastest" if row is rows[0] else "", style="bold green")
                measured = _measured(row, bool(rates))
                first = f"{num_tokens:,}" if place == 0 else ""
                table.add_row(
                    first,
                    mark if row.timing else "",
                    labels[row.decision],
                    *([row.decision.provider] if with_origin else []),
                    *measured,
                    _error(row),
                    end_section=row is rows[-1],
                )
        target.print(table)
        for row in self.rows:
            if row.failure:
                target.print(f"{labels[row.decision]} failed at {row.num_tokens} tokens: {row.failure}")
            if row.damage:
                label = f"{labels[row.decision]} of {row.decision.provider}"
                target.print(f"{label} is WRONG at {row.num_tokens} tokens: {row.damage}")
        target.print(f"a layer gets {labels[winner]}{of_wheel(winner)}: {source_of(selection)}")
        print_notices(target, selection.notices)
        for decision in self.skipped:
            target.print(f"not compared: {why_not(decision)}")


def _row(row: Measurement) -> dict[str, Any]:
    return {
        "backend": row.decision.backend,
        "experts": row.decision.experts,
        "tokens": row.num_tokens,
        "relative_error": row.relative_error,
        "tolerance": row.tolerance,
        "passed": row.passed,
        "failure": row.failure or None,
        "damage": row.damage or None,
        "time_us": row.time_us,
        "p10_us": row.timing.p10_us if row.timing else math.nan,
        "p90_us": row.timing.p90_us if row.timing else math.nan,
        "tflops": row.tflops,
        "gbps": row.gbps,
        "roofline_us": row.roofline_us,
        "share": row.share,
        "origin": row.decision.origin,
        "origin_version": row.decision.origin_version,
    }


def _measured(row: Measurement, with_rates: bool) -> tuple[str | Text, ...]:
    if row.timing is None:
        return Text("WRONG", style="bold red"), "", *(["", ""] if with_rates else []), ""
    return (
        format_us(row.time_us),
        format_us_range(row.timing.p10_us, row.timing.p90_us),
        *([_rate(row.tflops), _rate(row.gbps)] if with_rates else []),
        f"{row.share:.1%}",
    )


def _error(row: Measurement) -> str | Text:
    if row.failure:
        return Text("failed", style="bold red")
    if row.damage:
        return Text("wrote to read-only tensors", style="bold red")
    if row.passed:
        return f"{row.relative_error:.1e}"
    return Text(f"{row.relative_error:.1e} > {row.tolerance:.1e}", style="bold red")


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def parse_counts(text: str, option: str = "--tokens 1,16,64") -> tuple[int, ...]:
    """The numbers of such an option, ascending.

    Raises:
        UsageError: The text has another form.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        name, _, example = option.partition(" ")
        raise UsageError(f"{name} takes numbers of at least 1 such as {example}, got {text!r}")
    return tuple(sorted({int(word) for word in words}))


def check_routing(routing: str) -> None:
    """Checks the name that `--routing` says.

    Raises:
        UnknownNameError: It is not known.
    """
    if routing not in ROUTINGS:
        raise UnknownNameError(unknown_name_message("routing", routing, ROUTINGS))


def bench_layer(
    flags: ProblemFlags,
    checkpoint: Path | None,
    layer: int | None,
    token_counts: Sequence[int] | None,
    routing: str,
    rounds: int,
    seed: int,
) -> BenchResult:
    """Makes one layer for every backend that fits, checks each against the reference and times it.

    Takes the values of the options of those names; `token_counts` ascend. The result has no rows where nothing fits.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    platform = platform_at_hand("bench", flags.platform)
    if token_counts is None:
        token_counts = _CPU_TOKENS if platform.device_type == "cpu" else _GPU_TOKENS
    subject = find_subject(dataclasses.replace(flags, tokens=max(token_counts)), checkpoint, layer)
    problem = subject.problem
    selection = subject.noted(explain_backends(problem, platform, **flags.request()))
    cells = [decision.cell for decision in selection.decisions if decision.accepted and decision.cell is not None]
    distributions = {"torch", *(Requirement(text).name for cell in cells for text in cell.requires)}
    result = BenchResult(subject.name or "random weights", selection, routing, provenance(platform, distributions))
    if selection.winner is None:
        return result
    device = layer_device(selection)
    for num_tokens in token_counts:
        # Each backend has its own inputs and outputs.
        check_run_fits(problem, num_tokens, device, len(cells), (1 + len(cells)) * num_calls(num_tokens))
    with phase("measuring ceilings"):
        ceilings = measure_ceilings(problem.torch_dtype, device)

    def make_weights() -> ExpertWeights:
        if subject.checkpoint is not None and subject.layer is not None:
            with phase("loading weights") as advance:
                return load_layer(subject.checkpoint, subject.layer, problem, device, advance).weights
        with phase("building weights") as advance:
            return random_layer(problem, seed, device, advance).weights

    inputs = {num_tokens: random_calls(problem, num_tokens, routing, seed, device) for num_tokens in token_counts}
    comparison = Comparison(selection, make_weights, inputs, layer_tolerance, phase)
    rows: list[Measurement] = []
    for num_tokens in token_counts:
        with phase(f"comparing {len(cells)} at {num_tokens} tokens"):
            rows += comparison.measure(num_tokens, ceilings, rounds)
    return dataclasses.replace(result, ceilings=ceilings, rows=tuple(rows))
