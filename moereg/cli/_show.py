"""The decision table, and how all commands show names, times and tables."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moereg.cli._output import console
from moereg.evidence.ledger import Evidence, arch_name, evidence_of
from moereg.evidence.on_machine import ADMITTED, AdmissionRecord
from moereg.platforms import Platform
from moereg.runtime.memory import format_bytes
from moereg.selection.result import Decision, Selection, nearest_by_backend
from moereg.selection.ways_out import ways_out
from moereg.spec.reasons import Reason

_SOURCES: Final = {
    "required": "required by the request",
    "preferred": "preferred by the request",
    "measured": "chosen by measurement",
    "priority": "chosen by priority",
}

_MARKS: Final = {True: Text("fits", style="green"), False: Text("rejected", style="red")}

_UNITS: Final = (("us", 1.0), ("ms", 1e3), ("s", 1e6))


def say(*lines: RenderableType) -> None:
    """Prints texts and tables on standard output."""
    for line in lines:
        console(sys.stdout).print(line)


def good(text: str) -> Text:
    return Text(text, style="bold green")


def bad(text: str) -> Text:
    return Text(text, style="bold red")


def is_wide() -> bool:
    """Whether tables have room for more than 80 columns hold."""
    return console(sys.stdout).width >= 110


def new_table(*columns: str, rows: Iterable[Sequence[str | Text] | None]) -> RenderableType:
    """A table that breaks no word: `>` before a head aligns its column to the right, a row of None begins a section.

    The widest columns are folded first, between words. A console without room for every column's longest word gets a
    paragraph for each row instead.
    """
    heads, rows = [column.removeprefix(">") for column in columns], list(rows)
    by_column = itertools.zip_longest(heads, *filter(None, rows), fillvalue="")
    texts = [[str(cell) for cell in column] for column in by_column]
    least = [max(map(cell_len, " ".join(column).split()), default=0) for column in texts]
    widths = [max(map(cell_len, "\n".join(column).split("\n"))) for column in texts]
    room = console(sys.stdout).width - 2 * len(columns) + 1
    if sum(least) > room:
        return Group(*(each for row in rows if row for each in _paragraph(heads, row)))
    while sum(widths) > room:
        widths[max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))] -= 1
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head, column, width in zip(heads, columns, widths, strict=True):
        table.add_column(head, width=width, overflow="fold", justify="left" if head == column else "right")
    for row in rows:
        table.add_section() if row is None else table.add_row(*row)
    return table


def _paragraph(heads: Sequence[str], row: Sequence[str | Text]) -> Iterator[RenderableType]:
    """A row of a table as text: its name, and below it the other columns with their heads."""
    start = 1 if heads[0] else 2  # A column without a head marks the row whose name comes next.
    yield Text(" ").join(Text.assemble(cell) for cell in row[:start])
    others = zip(heads[start:], row[start:], strict=False)
    facts = [Text.assemble(f"{head} ", cell) for head, cell in others if str(cell) not in ("", "-")]
    yield Padding(Text("; ").join(facts), (0, 0, 0, 2), expand=False)


def show_selection(selection: Selection, subject: str | None = None, all_reasons: bool = False) -> None:
    """Prints the decision table of what fits, why the others do not, and last what was chosen.

    With `all_reasons` rejected backends are in the table too, with every reason of each.
    """
    platform, winner = selection.platform, selection.winner
    say(f"{subject}: {selection.problem}" if subject else str(selection.problem), f"on {named_machine(platform)}")
    decisions = nearest_by_backend(selection.decisions)
    if winner is not None or all_reasons:
        say(_decision_table([one for one in decisions if one.accepted or all_reasons], winner, platform))
    print_rejected("rejected", selection, all_reasons)
    assumed = dict.fromkeys(text for decision in decisions if decision.accepted for text in decision.assumes)
    if assumed:
        say(f"assumed of {platform}: {', '.join(assumed)}")
    print_notices(selection.notices)
    if winner is None:
        others = selection.alternatives if selection.request.require else ()
        instead = f"; without the request, {' or '.join(others)} would do" if others else ""
        say(bad(f"nothing fits{instead}"), *(f"- {way}" for way in ways_out(selection)))
    else:
        plan = f"; {selection.plan_text}" if selection.ranges else ""
        say(verification(winner, platform), good(f"{winner.label}: {source_of(selection)}{plan}"))


def answers(selection: Selection) -> list[Decision]:
    """The candidates that say why nothing fits: those required, else those of this platform, else the nearest."""
    decisions = nearest_by_backend(selection.decisions)
    code = "not_required" if selection.request.require else "platform"
    found = [one for one in decisions if all(reason.code != code for reason in one.reasons)]
    return found or list(decisions[:1])


def print_rejected(label: str, selection: Selection, all_reasons: bool = False) -> None:
    """Prints why candidates were rejected: on one line those that share a reason; each with all of them if asked.

    Where nothing fits, those that `answers` names come first with every reason, and alone if they were required.
    """
    rejected = [one for one in nearest_by_backend(selection.decisions) if not one.accepted]
    apart = rejected if all_reasons else [] if selection.winner else answers(selection)
    for decision in apart:
        print_reasons(f"{named(decision)} does not fit:", map(vars, decision.reasons))
    if selection.winner is None and selection.request.require and not all_reasons:
        return
    others = {
        "platform": f"requires another platform than {selection.platform}",
        "quant_scheme": f"requires weights in another scheme than {selection.problem.quant.name}",
    }
    shared: dict[str, list[tuple[Decision, Reason]]] = {}
    for decision in rejected:
        if decision not in apart:
            # A backend for other machines has no cure here, whatever else is missing.
            reason = next((one for one in decision.reasons if one.code == "platform"), decision.reasons[0])
            rule = others.get(reason.code) or reason.text.partition(", got ")[0]
            shared.setdefault(rule, []).append((decision, reason))
    for rule, found in shared.items():
        names = dict.fromkeys(named(decision) for decision, _ in found)
        first = found[0][1]
        text = first.text if all(reason == first for _, reason in found) else rule
        has_more = first.code not in others and any(len(decision.reasons) > 1 for decision, _ in found)
        more = ", and more (-v)" if has_more else ""
        say(f"{label}: {', '.join(names)}: {text} [{first.code}]{more}")


def _decision_table(decisions: Sequence[Decision], winner: Decision | None, platform: Platform) -> RenderableType:
    rows = [
        (
            _MARKS[decision.accepted] if decision is not winner else good("chosen"),
            decision.label,
            decision.rule,
            decision.computes if decision.tier == "kernel" else f"{decision.computes}, {decision.tier}",
            str(decision.priority),
            _verified(decision, platform) if decision.accepted else "",
        )
        for decision in decisions
    ]
    return new_table("", "backend", "platforms", "computed as", ">priority", "verified", rows=rows)


def _verified(decision: Decision, platform: Platform) -> Text:
    """Whether a candidate was verified or admitted on this machine, else where it was verified, in a few words."""
    evidence = None if decision.cell is None else evidence_of(decision.cell)
    nearest = None if evidence is None else evidence.nearest(platform)
    if nearest is not None and platform.probed and nearest.is_on(platform):
        return Text(f"yes ({nearest.machine[0]})", style="green")
    if (record := admission_of(decision, platform)) is not None:
        return Text(f"admitted {record.date}", style="green")
    if nearest is not None:
        return Text(f"on {nearest.machine[0]}", style="green" if nearest.is_on(platform) else "yellow")
    return Text("code changed" if evidence is not None and evidence.stale else "no", style="yellow")


def verification(decision: Decision, platform: Platform) -> str:
    """Says where and with what a candidate was verified, and what admission says where no record holds."""
    evidence = Evidence((), (), ()) if decision.cell is None else evidence_of(decision.cell)
    parts = []
    if all(record.platform != str(platform) for record in evidence.current):
        parts.append(f"not verified on {arch_name(str(platform))}")
        evidence = dataclasses.replace(evidence, missing=())  # Which has this platform too.
    if evidence.current or evidence.stale:
        parts.append(f"verified {evidence}")
    if record := admission_of(decision, platform):
        parts.append(f"admitted {record.date}: off by {record.error:.2g}, bound {record.bound:.2g}")
    if is_checked_at_first_use(decision, platform, evidence):
        parts.append(f"checked at first use {'here' if platform.probed else 'there'}")
    elif not platform.probed and evidence.on(platform):
        parts.append("checked at first use on other devices and versions")
    return "; ".join(parts)


def admission_of(decision: Decision, platform: Platform) -> AdmissionRecord | None:
    """The record of a candidate that is admitted on this machine, for its problem or else without gradients."""
    if decision.cell is None or not decision.evidence:
        return None
    return next(iter(ADMITTED.read().of_cell(decision.cell, platform, decision.scheme)), None)


def is_checked_at_first_use(decision: Decision, platform: Platform, evidence: Evidence) -> bool:
    """Whether a layer on that machine would check the candidate's kernel first."""
    if decision.cell is None:
        return False
    is_known = evidence.on(platform) or admission_of(decision, platform)
    return not is_known and (not platform.probed or ADMITTED.path() is not None)


def named(decision: Decision) -> str:
    return f"{decision.backend}{decision.of_wheel}"


def versions_of(measured_on: Mapping[str, Any]) -> str:
    """Package versions as one line, such as `torch 2.13, triton 3.6`."""
    return ", ".join(f"{name} {version}" for name, version in measured_on["versions"].items())


def print_notices(notices: Iterable[str]) -> None:
    say(*(f"note: {notice}" for notice in notices))


def source_of(selection: Selection) -> str:
    return _SOURCES.get(selection.source or "", str(selection.source))


def machine(platform: Platform) -> str:
    facts = [platform.device_name] if platform.device_name else []
    if platform.memory_bytes:
        facts.append(format_bytes(platform.memory_bytes))
    claim = f", as {platform.claimed_by} claims" if platform.claimed_by else ""
    return f"{platform} ({', '.join(facts)}){claim}" if facts else f"{platform}{claim}"


def named_machine(platform: Platform) -> str:
    """A machine as in `machine`; a named one is marked as not this machine."""
    return machine(platform) if platform.probed else f"{platform} (named, not this machine)"


def yes_no(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("no", style="red")


def print_reasons(heading: str, reasons: Iterable[Mapping[str, Any]]) -> None:
    """Prints all reasons with their codes, one per line."""
    lines = (f"- {reason['text']} [{reason['code']}]" for reason in reasons)
    say(heading, *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines))


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
