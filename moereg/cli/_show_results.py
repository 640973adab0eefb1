"""Tables of `moereg run` and `moereg bench`."""

from __future__ import annotations

import sys

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moereg.cli._bench import BenchResult
from moereg.cli._output import console
from moereg.cli._run import RunResult
from moereg.cli._show import WIDE, machine, new_table, of_wheel, print_notices, show_selection, source_of, why_not
from moereg.cli._units import format_us, format_us_range
from moereg.memory import format_bytes
from moereg.registry import BUILTIN
from moereg.selection import nearest_by_backend
from moereg.tuning.compare import Measurement

__all__ = ["show_bench", "show_run"]


def show_run(result: RunResult) -> None:
    """Prints the result of a run or, if nothing fitted, the reasons."""
    selection = result.selection
    winner = selection.winner
    if winner is None:
        show_selection(selection, result.subject)
        return
    if result.failure:
        show_selection(selection, result.subject)
        console(sys.stdout).print(Text(f"FAILED: {result.failure}", style="bold red"))
        return
    if result.damage:
        show_selection(selection, result.subject)
        console(sys.stdout).print(
            Text(f"WRONG: {winner.backend} of {winner.provider}: {result.damage}", style="bold red")
        )
        return
    assert result.relative_error is not None and result.tolerance is not None
    assert result.permute_ms is not None and result.weights_bytes is not None
    verdict = Text("right", style="bold green") if result.passed else Text("WRONG", style="bold red")
    comparison = "within" if result.passed else "not within"
    tier = "" if winner.tier == "kernel" else f", {winner.tier}: right numbers, not the speed of the scheme"
    time = "none, since the numbers are wrong"
    if result.time_us is not None:
        time = f"{format_us(result.time_us)} a call of {result.num_tokens} tokens"
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    rows: tuple[tuple[str, str | Text], ...] = (
        ("layer", f"{result.subject}: {selection.problem}"),
        ("platform", machine(selection.platform)),
        ("backend", f"{winner.backend} ({winner.experts}){of_wheel(winner)}, {source_of(selection)}{tier}"),
        ("computes", winner.computes),
        ("weights", f"{format_bytes(result.weights_bytes)}, permuted in {format_us(1e3 * result.permute_ms)}"),
        ("time", time),
        ("error", f"{result.relative_error:.2e}, {comparison} the tolerance {result.tolerance:.1e} of the reference"),
        ("numbers", verdict),
    )
    if result.scheme_loss is not None:
        loss = f"{result.scheme_loss:.2e} against fp32, of {winner.computes} itself"
        rows = (*rows[:-1], ("loss", loss), rows[-1])
    for name, value in rows:
        table.add_row(name, value)
    for decision in nearest_by_backend(selection.decisions):
        if decision is not winner:
            table.add_row("not chosen", why_not(decision))
    target = console(sys.stdout)
    target.print(table)
    # Those of the request were logged when the backend was selected.
    print_notices(target, [notice for notice in selection.notices if notice not in selection.request.notices])


def show_bench(result: BenchResult) -> None:
    """Prints the result of a bench, fastest first at each number of tokens, or, if nothing fitted, the reasons."""
    selection, winner, ceilings = result.selection, result.selection.winner, result.ceilings
    if winner is None or ceilings is None:
        show_selection(selection, result.subject)
        return
    target = console(sys.stdout)
    target.print(f"{result.subject}: {selection.problem}")
    versions = ", ".join(f"{name} {version}" for name, version in result.measured_on["versions"].items())
    threads = f", threads: {torch.get_num_threads()}" if selection.platform.kind == "cpu" else ""
    target.print(f"on {machine(selection.platform)}{threads}, {versions}, {result.measured_on['date']}")
    target.print(
        f"ceilings: {ceilings.matmul_tflops:.3g} TFLOP/s, "
        f"{ceilings.read_gbps:,.0f} GB/s ({ceilings.read_by}); {result.routing} routing"
    )
    # Only where it says something: the table is as wide as a terminal.
    with_origin = any(row.decision.origin != BUILTIN for row in result.rows)
    origin = ("origin",) if with_origin else ()
    # 80 columns have no room for what follows from the time.
    rates, share = (("TFLOP/s", "GB/s"), "% of roofline") if target.width >= WIDE else ((), "roofline")
    table = new_table("T", "", "backend", *origin, "time", "p10 to p90", *rates, share, "error")
    labels = result.labels()
    for num_tokens in result.token_counts:
        rows = result.fastest_first(num_tokens)
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
    for row in result.rows:
        if row.failure:
            target.print(f"{labels[row.decision]} failed at {row.num_tokens} tokens: {row.failure}")
        if row.damage:
            label = f"{labels[row.decision]} of {row.decision.provider}"
            target.print(f"{label} is WRONG at {row.num_tokens} tokens: {row.damage}")
    target.print(f"a layer gets {labels[winner]}{of_wheel(winner)}: {source_of(selection)}")
    print_notices(target, selection.notices)
    for decision in result.skipped:
        target.print(f"not compared: {why_not(decision)}")


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
