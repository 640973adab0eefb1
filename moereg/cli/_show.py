"""The decision table, and how all commands show names, times and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moereg.cli._output import console
from moereg.evidence.ledger import Evidence, arch_name, evidence_of
from moereg.evidence.on_machine import ADMITTED, AdmissionRecord
from moereg.platforms import Platform
from moereg.registry import BUILTIN
from moereg.runtime.memory import format_bytes
from moereg.selection.result import Decision, Selection, nearest_by_backend
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


def new_table(*columns: str, rows: Iterable[Sequence[str | Text] | None] = (), keep: Sequence[str] = ()) -> Table:
    """A table: `>` before a head aligns its column to the right, a row of None begins another section.

    Columns to `keep` are never folded.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        name = column.removeprefix(">")
        # Folded, never truncated, since users need whole names.
        table.add_column(name, overflow="fold", justify="left" if name == column else "right", no_wrap=name in keep)
    for row in rows:
        table.add_section() if row is None else table.add_row(*row)
    return table


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
        say(bad(f"nothing fits{instead}"))
    else:
        plan = f"; {selection.plan_text}" if selection.ranges else ""
        say(_verification(winner, platform), good(f"{named(winner)}: {source_of(selection)}{plan}"))


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


def _decision_table(decisions: Sequence[Decision], winner: Decision | None, platform: Platform) -> Table:
    wide, backends = is_wide(), [decision.backend for decision in decisions]
    # On 80 columns, show the class only if it distinguishes candidates, and the origin only if one is a plugin.
    has_origin = wide or any(decision.origin != BUILTIN for decision in decisions)
    columns = ["", "backend", *(["origin"] if has_origin else []), *(["class"] if wide else [])]
    table = new_table(*columns, "platforms", "computed as", ">priority", "verified")
    for decision in decisions:
        is_one_of_many = not wide and backends.count(decision.backend) > 1
        table.add_row(
            _MARKS[decision.accepted] if decision is not winner else good("chosen"),
            decision.backend + (f"\n({decision.experts.removesuffix('Experts')})" if is_one_of_many else ""),
            *([decision.provider] if has_origin else []),
            *([decision.experts] if wide else []),
            decision.rule,
            decision.computes if decision.tier == "kernel" else f"{decision.computes}, {decision.tier}",
            str(decision.priority),
            _verified(decision, platform) if decision.accepted else "",
        )
    # Platforms are folded first, between their parts.
    names = table.columns[: len(columns)]
    width = sum(max((len(str(cell)) for cell in column.cells), default=0) for column in names)
    for column in names if width < console(sys.stdout).width / 2 else ():
        column.no_wrap = True
    table.columns[1].min_width = max(map(len, backends), default=0)
    return table


def _verified(decision: Decision, platform: Platform) -> Text:
    """Whether a candidate was verified or admitted on this machine, else where it was verified, in a few words."""
    evidence = None if decision.cell is None else evidence_of(decision.cell)
    nearest = None if evidence is None else evidence.nearest(platform)
    if nearest is not None and platform.probed and nearest.is_on(platform):
        return Text(f"yes ({nearest.machine_in_brief})", style="green")
    if (record := admission_of(decision, platform)) is not None:
        return Text(f"admitted {record.date}", style="green")
    if nearest is not None:
        return Text(f"on {nearest.machine_in_brief}", style="green" if nearest.is_on(platform) else "yellow")
    return Text("code changed" if evidence is not None and evidence.stale else "no", style="yellow")


def _verification(decision: Decision, platform: Platform) -> str:
    """Says where and with what a candidate was verified, and what admission says where no record holds."""
    evidence = Evidence((), (), ()) if decision.cell is None else evidence_of(decision.cell)
    parts = [f"verified {evidence}"] if evidence.current or evidence.stale else []
    if all(record.platform != str(platform) for record in evidence.current):
        parts.insert(0, f"not verified on {arch_name(str(platform))}")
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


def of_wheel(decision: Decision) -> str:
    """The plugin that a candidate comes from, for the middle of a line; empty if built in."""
    return "" if decision.origin == BUILTIN else f" of {decision.provider}"


def named(decision: Decision) -> str:
    return f"{decision.backend}{of_wheel(decision)}"


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
