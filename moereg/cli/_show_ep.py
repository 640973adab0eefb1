"""Tables of `--ep`."""

from __future__ import annotations

import sys
from typing import Any

from rich.text import Text

from moereg.cli._ep import EpExplanation, EpResult
from moereg.cli._output import console
from moereg.cli._show import machine, new_table, print_notices, show_selection
from moereg.cli._units import format_us

__all__ = ["show_ep", "show_ep_explanation"]


def show_ep_explanation(found: EpExplanation, all_reasons: bool) -> None:
    """Prints the ways of moving tokens, then the backends for what the experts of a rank see."""
    target = console(sys.stdout)
    target.print(f"{found.subject.name}: {found.subject.problem}" if found.subject.name else str(found.subject.problem))
    target.print(found.movement.table())
    winner = found.movement.winner
    if winner is None:
        target.print(Text("no way of moving tokens fits", style="bold red"))
        return
    target.print(f"experts of a rank behind {winner.name}:")
    show_selection(found.selection, None, all_reasons=all_reasons)


def show_ep(result: EpResult) -> None:
    """Prints the result of a bench or a run over several ranks."""
    target = console(sys.stdout)
    subject, movement = result.subject, result.movement
    target.print(f"{subject.name or 'random weights'}: {subject.problem}")
    versions = ", ".join(f"{name} {version}" for name, version in result.measured_on["versions"].items())
    placed = f", balanced with {result.replicas} replicas" if result.replicas is not None else ""
    target.print(f"{movement.group}{placed}, {machine(movement.platform)}, {versions}, {result.measured_on['date']}")
    if movement.winner is None:
        target.print(movement.table())
    if result.rows:
        table = new_table("T", "routing", "way", "wire", "backend", "time", "one rank", "ratio", "bare", "error", "")
        for row in result.rows:
            table.add_row(f"{row['tokens']:,}", row["routing"], _way(row), *_cells(row))
        target.print(table)
        target.print(
            "one rank: a rank's experts with as many routes, without a group; bare: the same tokens, routes and rows "
            "by all_to_all_single alone"
        )
    for row in result.rows:
        if row["failure"]:
            target.print(f"{_way(row)} at {row['tokens']:,} tokens, {row['routing']}: {row['failure']}")
        if row["one_rank_error"] is not None:
            same = "equal bits" if row["one_rank_equal"] else f"error {row['one_rank_error']:.1e}"
            target.print(f"{_way(row)} against the whole layer on one rank: {same}")
    if result.failure:
        target.print(Text(f"FAILED: {result.failure}", style="bold red"))
    print_notices(target, subject.notices)


def _way(row: dict[str, Any]) -> str:
    return f"{row['way']}, {row['batches']} parts" if row["batches"] > 1 else str(row["way"])


def _cells(row: dict[str, Any]) -> tuple[str | Text, ...]:
    if row["failure"]:
        return ("", "", "", "", "", "", "", Text("failed", style="bold red"))
    error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    if not row["passed"]:
        shown = Text(f"{error} > {row['tolerance']:.1e}", style="bold red")
        return (row["wire"], row["backend"], Text("WRONG", style="bold red"), "", "", "", shown, "")
    one, over = row["one_rank_us"], row["over_one_rank"]
    notes = ["captured"] if row["captured"] else []
    notes += [] if row["repeats"] else ["bits differ between calls"]
    return (
        row["wire"],
        row["backend"],
        format_us(row["time_us"]),
        format_us(one) if one is not None else "-",
        f"{over:.2f}" if over is not None else "-",
        format_us(row["bare_us"]),
        error,
        ", ".join(notes),
    )
