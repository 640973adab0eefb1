"""Tables for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moereg.cli._bench import BenchResult
from moereg.cli._output import console
from moereg.cli._run import RunResult
from moereg.discovery import load_backends
from moereg.dispatch import machine_reasons
from moereg.memory import format_bytes
from moereg.platforms import Platform
from moereg.quarantine import QuarantineRecord, quarantine_path, read_quarantine
from moereg.registry import BUILTIN
from moereg.selection import Decision, Selection, nearest_by_backend
from moereg.testing.ledger import arch_name, evidence_of
from moereg.tuning.compare import Measurement

__all__ = ["show_bench", "show_info", "show_run", "show_selection"]

_SOURCES: Final = {
    "required": "required by the request",
    "preferred": "preferred by the request",
    "measured": "chosen by measurement",
    "priority": "chosen by priority",
}

_NUMBERS: Final = ("priority", "T", "time us", "p10 to p90", "TFLOP/s", "GB/s", "% of roofline", "error")
"""Columns that are aligned at their right end."""


def show_info(info: dict[str, Any], platform: Platform) -> None:
    """Prints what `collect_info` found."""
    target = console(sys.stdout)
    target.print(f"moereg {info['version']} on {_machine(platform)}")
    if info["platform_error"] is not None:
        target.print(f"it is not settled which machine this is: {info['platform_error']}", markup=False)
    cells = _table("backend", "experts", "computes", "platforms", "priority", "tier", "runs here", "verified")
    quarantine = read_quarantine()
    held: list[QuarantineRecord] = []
    for name in load_backends().names:
        for cell in load_backends().by_name(name):
            of_cell = quarantine.of_cell(cell, platform)
            held += of_cell
            is_out = len(of_cell) == len(cell.schemes)
            cells.add_row(
                cell.name,
                cell.class_name,
                ", ".join(scheme.name for scheme in cell.schemes),
                ", ".join(rule.text for rule in cell.rules),
                str(cell.priority),
                cell.tier,
                "quarantined" if is_out else _yes_no(not machine_reasons(cell, platform)),
                str(evidence_of(cell)),
            )
    target.print(cells)
    for backend in info["backends"]:
        if not backend["available"]:
            _reasons(target, f"{backend['name']} ({backend['origin']}) cannot run here:", backend["reasons"])
    if held:
        target.print(f"quarantined here, in {quarantine_path()}:")
        for record in held:
            target.print(f"  - {record.backend} ({record.experts}), {record.scheme}: {record.reason.text}")
    if not info["plugins"]:
        target.print("no plugins installed")
        return
    plugins = _table("plugin", "group", "distribution", "status", "error")
    for plugin in info["plugins"]:
        plugins.add_row(
            plugin["name"], plugin["group"], plugin["distribution"], plugin["status"], plugin["error"] or ""
        )
    target.print(plugins)


def show_selection(selection: Selection, subject: str | None = None) -> None:
    """Prints the decision table: every accepted candidate, and of each other backend the one nearest to fitting."""
    target = console(sys.stdout)
    platform, winner = selection.platform, selection.winner
    target.print(f"{subject}: {selection.problem}" if subject else str(selection.problem))
    target.print(f"on {_machine(platform) if platform.probed else f'{platform} (named, not this machine)'}")
    decisions = nearest_by_backend(selection.decisions)
    table = _table("", "backend", "origin", "experts", "rule", "computes", "priority", "tier")
    for decision in decisions:
        table.add_row(
            _mark(decision, winner),
            decision.backend,
            decision.provider,
            decision.experts,
            decision.rule,
            decision.computes,
            str(decision.priority),
            decision.tier,
        )
    target.print(table)
    for decision in decisions:
        if not decision.accepted:
            _reasons(target, f"{decision.backend} does not fit:", [vars(reason) for reason in decision.reasons])
    assumed = dict.fromkeys(text for decision in decisions if decision.accepted for text in decision.assumes)
    if assumed:
        target.print(f"assumed of {platform}: {', '.join(assumed)}")
    if winner is None:
        target.print(Text("nothing fits", style="bold red"))
    else:
        target.print(Text(f"{winner.backend}{_origin(winner)}: {_source(selection)}", style="bold green"))
        target.print(_verification(winner, platform))
    _notices(target, selection.notices)


def _verification(decision: Decision, platform: Platform) -> str:
    """Where a candidate was verified, this platform first."""
    arch = arch_name(str(platform))
    if decision.cell is None:
        return f"not verified on {arch}"
    evidence = evidence_of(decision.cell)
    if evidence.on(platform):
        return f"verified {evidence}"
    elsewhere = f"; verified {evidence}" if evidence.current or evidence.stale else ""
    return f"not verified on {arch}{elsewhere}"


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
        time = f"{result.time_us:,.0f} us a call of {result.num_tokens} tokens"
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    rows: tuple[tuple[str, str | Text], ...] = (
        ("layer", f"{result.subject}: {selection.problem}"),
        ("platform", _machine(selection.platform)),
        ("backend", f"{winner.backend} ({winner.experts}){_origin(winner)}, {_source(selection)}{tier}"),
        ("computes", winner.computes),
        ("weights", f"{format_bytes(result.weights_bytes)}, permuted in {result.permute_ms:.0f} ms"),
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
            table.add_row("not chosen", _why_not(decision))
    target = console(sys.stdout)
    target.print(table)
    # Those of the request were logged when the backend was selected.
    _notices(target, [notice for notice in selection.notices if notice not in selection.request.notices])


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
    target.print(f"on {_machine(selection.platform)}{threads}, {versions}, {result.measured_on['date']}")
    target.print(
        f"ceilings: {ceilings.matmul_tflops:.3g} TFLOP/s, "
        f"{ceilings.read_gbps:,.0f} GB/s ({ceilings.read_by}); {result.routing} routing"
    )
    # Only where it says something: the table is as wide as a terminal.
    with_origin = any(row.decision.origin != BUILTIN for row in result.rows)
    origin = ("origin",) if with_origin else ()
    table = _table("T", "", "backend", *origin, "time us", "p10 to p90", "TFLOP/s", "GB/s", "% of roofline", "error")
    labels = result.labels()
    for num_tokens in result.token_counts:
        rows = result.fastest_first(num_tokens)
        for place, row in enumerate(rows):
            mark = Text("fastest" if row is rows[0] else "", style="bold green")
            cells = _measured(row) if row.timing else (Text("WRONG", style="bold red"), "", "", "", "")
            first = f"{num_tokens:,}" if place == 0 else ""
            table.add_row(
                first,
                mark if row.timing else "",
                labels[row.decision],
                *([row.decision.provider] if with_origin else []),
                *cells,
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
    target.print(f"a layer gets {labels[winner]}{_origin(winner)}: {_source(selection)}")
    _notices(target, selection.notices)
    for decision in result.skipped:
        target.print(f"not compared: {_why_not(decision)}")


def _measured(row: Measurement) -> tuple[str, str, str, str, str]:
    assert row.timing is not None
    return (
        _number(row.time_us),
        f"{_number(row.timing.p10_us)} to {_number(row.timing.p90_us)}",
        _rate(row.tflops),
        _rate(row.gbps),
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


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _why_not(decision: Decision) -> str:
    why = decision.reasons[0].text if decision.reasons else f"fits, priority {decision.priority}"
    return f"{decision.backend} ({decision.experts}){_origin(decision)}: {why}"


def _origin(decision: Decision) -> str:
    """The wheel that a candidate comes from, for the middle of a line; nothing if it is built in."""
    return "" if decision.origin == BUILTIN else f" of {decision.provider}"


def _notices(target: Console, notices: Sequence[str]) -> None:
    for notice in notices:
        target.print(f"note: {notice}")


def _source(selection: Selection) -> str:
    return _SOURCES.get(selection.source or "", str(selection.source))


def _machine(platform: Platform) -> str:
    facts = [platform.device_name] if platform.device_name else []
    if platform.memory_bytes:
        facts.append(format_bytes(platform.memory_bytes))
    claim = f", as {platform.claimed_by} claims" if platform.claimed_by else ""
    return f"{platform} ({', '.join(facts)}){claim}" if facts else f"{platform}{claim}"


def _mark(decision: Decision, winner: Decision | None) -> Text:
    if decision is winner:
        return Text("chosen", style="bold green")
    return Text("fits", style="green") if decision.accepted else Text("rejected", style="red")


def _yes_no(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("no", style="red")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        # Folded, never cut: a name that lost its end cannot be asked for.
        table.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
    return table


def _reasons(target: Console, heading: str, reasons: Sequence[dict[str, Any]]) -> None:
    target.print(heading)
    for reason in reasons:
        target.print(Padding(Text(f"- {reason['text']} [{reason['code']}]"), (0, 0, 0, 2), expand=False))
