"""The decision table, and how all commands show names, times and tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moereg.cli._output import console
from moereg.evidence.ledger import arch_name, evidence_of
from moereg.platforms import Platform
from moereg.registry import BUILTIN
from moereg.runtime.memory import format_bytes
from moereg.selection.result import Decision, Selection, nearest_by_backend

_SOURCES: Final = {
    "required": "required by the request",
    "preferred": "preferred by the request",
    "measured": "chosen by measurement",
    "priority": "chosen by priority",
}

_NUMBERS: Final = ("priority", "T", "time", "p10 to p90", "TFLOP/s", "GB/s", "% of roofline", "roofline", "error")
_NUMBERS_OF_LISTS: Final = ("E", "H", "I", "K", "L", "schemes")
"""Right-aligned columns."""

_UNITS: Final = (("us", 1.0), ("ms", 1e3), ("s", 1e6))

WIDE: Final = 110
"""From this many terminal columns on tables show more than 80 have room for."""


def show_selection(selection: Selection, subject: str | None = None, all_reasons: bool = True) -> None:
    """Prints the decision table: every accepted candidate, and the nearest one of each other backend.

    Args:
        selection: The selection.
        subject: The model's or checkpoint's name.
        all_reasons: Whether to show every reason even if something fits; else the first of each backend.
    """
    target = console(sys.stdout)
    platform, winner = selection.platform, selection.winner
    target.print(f"{subject}: {selection.problem}" if subject else str(selection.problem))
    target.print(f"on {named_machine(platform)}")
    decisions = nearest_by_backend(selection.decisions)
    fitting, rejected = ([one for one in decisions if one.accepted is fits] for fits in (True, False))
    if all_reasons or winner is None:
        _print_decisions(target, decisions, winner, platform)
        for decision in rejected:
            print_reasons(target, f"{decision.backend} does not fit:", [vars(reason) for reason in decision.reasons])
    else:
        _print_decisions(target, fitting, winner, platform)
        for decision in rejected:
            first, *others = decision.reasons
            more = f", and {len(others)} more" if others else ""
            target.print(Text(f"rejected  {decision.backend}{of_wheel(decision)}: {first.text} [{first.code}]{more}"))
    assumed = dict.fromkeys(text for decision in decisions if decision.accepted for text in decision.assumes)
    if assumed:
        target.print(f"assumed of {platform}: {', '.join(assumed)}")
    if winner is None:
        target.print(Text("nothing fits", style="bold red"))
    else:
        target.print(Text(f"{winner.backend}{of_wheel(winner)}: {source_of(selection)}", style="bold green"))
        target.print(_verification(winner, platform))
    print_notices(target, selection.notices)


def _print_decisions(
    target: Console, decisions: Sequence[Decision], winner: Decision | None, platform: Platform
) -> None:
    is_wide = target.width >= WIDE
    # On 80 columns, show the class only if it distinguishes candidates, and the origin only if one is a plugin.
    has_origin = is_wide or any(decision.origin != BUILTIN for decision in decisions)
    columns = ["", "backend", *(["origin"] if has_origin else []), *(["experts"] if is_wide else [])]
    table = new_table(*columns, "rule", "computes", "priority", "verified")
    backends = [decision.backend for decision in decisions]
    for decision in decisions:
        is_one_of_many = not is_wide and backends.count(decision.backend) > 1
        table.add_row(
            _mark(decision, winner),
            decision.backend + (f"\n({decision.experts.removesuffix('Experts')})" if is_one_of_many else ""),
            *([decision.provider] if has_origin else []),
            *([decision.experts] if is_wide else []),
            decision.rule,
            decision.computes if decision.tier == "kernel" else f"{decision.computes}, {decision.tier}",
            str(decision.priority),
            _verified(decision, platform) if decision.accepted else "",
        )
    # Fold the rule first, between its parts.
    names = table.columns[: len(columns)]
    width = sum(max((len(str(cell)) for cell in column.cells), default=0) for column in names)
    for column in names if width < target.width / 2 else ():
        column.no_wrap = True
    table.columns[1].min_width = max(map(len, backends), default=0)
    target.print(table)


def _verified(decision: Decision, platform: Platform) -> Text:
    """Whether a candidate was verified on a platform, in a word."""
    evidence = None if decision.cell is None else evidence_of(decision.cell)
    if evidence is None or not (evidence.current or evidence.stale):
        return Text("no", style="yellow")
    if evidence.on(platform):
        return Text("yes", style="green")
    is_stale = any(record.platform == str(platform) for record in evidence.stale)
    return Text("code changed" if is_stale else "elsewhere", style="yellow")


def _verification(decision: Decision, platform: Platform) -> str:
    """Platforms on which a candidate was verified, this one first."""
    arch = arch_name(str(platform))
    if decision.cell is None:
        return f"not verified on {arch}"
    evidence = evidence_of(decision.cell)
    if evidence.on(platform):
        return f"verified {evidence}"
    elsewhere = f"; verified {evidence}" if evidence.current or evidence.stale else ""
    return f"not verified on {arch}{elsewhere}"


def why_not(decision: Decision) -> str:
    """Why a candidate was not chosen, as one line."""
    why = decision.reasons[0].text if decision.reasons else f"fits, priority {decision.priority}"
    return f"{decision.backend} ({decision.experts}){of_wheel(decision)}: {why}"


def of_wheel(decision: Decision) -> str:
    """The plugin that a candidate comes from, for the middle of a line; empty if built in."""
    return "" if decision.origin == BUILTIN else f" of {decision.provider}"


def versions_of(measured_on: Mapping[str, Any]) -> str:
    """Package versions as one line, such as `torch 2.13, triton 3.6`."""
    return ", ".join(f"{name} {version}" for name, version in measured_on["versions"].items())


def print_notices(target: Console, notices: Sequence[str]) -> None:
    """Prints one line per notice."""
    for notice in notices:
        target.print(f"note: {notice}")


def source_of(selection: Selection) -> str:
    """The rule that decided."""
    return _SOURCES.get(selection.source or "", str(selection.source))


def machine(platform: Platform) -> str:
    """A machine and its known details."""
    facts = [platform.device_name] if platform.device_name else []
    if platform.memory_bytes:
        facts.append(format_bytes(platform.memory_bytes))
    claim = f", as {platform.claimed_by} claims" if platform.claimed_by else ""
    return f"{platform} ({', '.join(facts)}){claim}" if facts else f"{platform}{claim}"


def named_machine(platform: Platform) -> str:
    """A machine as in `machine`; a named one is marked as not this machine."""
    return machine(platform) if platform.probed else f"{platform} (named, not this machine)"


def _mark(decision: Decision, winner: Decision | None) -> Text:
    if decision is winner:
        return Text("chosen", style="bold green")
    return Text("fits", style="green") if decision.accepted else Text("rejected", style="red")


def yes_no(value: bool) -> Text:
    """`yes` or `no` in its color."""
    return Text("yes", style="green") if value else Text("no", style="red")


def new_table(*columns: str) -> Table:
    """A table whose columns of numbers are right-aligned."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        # Folded, never truncated, since users need whole names.
        is_number = column in (*_NUMBERS, *_NUMBERS_OF_LISTS)
        table.add_column(column, overflow="fold", justify="right" if is_number else "left")
    return table


def print_reasons(target: Console, heading: str, reasons: Sequence[dict[str, Any]]) -> None:
    """Prints all reasons with their codes, one per line."""
    target.print(heading)
    for reason in reasons:
        target.print(Padding(Text(f"- {reason['text']} [{reason['code']}]"), (0, 0, 0, 2), expand=False))


def format_us(time_us: float) -> str:
    """A time with at least three digits: `8.25 us`, `412 us`, `6.19 ms`, `61.3 s`, `1234 s`."""
    unit, scale = _unit(time_us)
    return f"{_digits(time_us / scale)} {unit}"


def format_us_range(low_us: float, high_us: float) -> str:
    """Two times in the unit of the second: `0.98 to 1.21 ms`."""
    unit, scale = _unit(high_us)
    return f"{_digits(low_us / scale)} to {_digits(high_us / scale)} {unit}"


def _unit(time_us: float) -> tuple[str, float]:
    # Rounded to three digits, 999.7 us is 1 ms.
    return next((pair for pair in _UNITS[:-1] if time_us < 999.5 * pair[1]), _UNITS[-1])


def _digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"
