"""Tables of `moereg info`: a line a backend, or a line a cell, and the ways of moving tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moereg.cli._output import console
from moereg.cli._show import WIDE, machine, new_table, print_reasons, yes_no
from moereg.discovery import load_backends
from moereg.dispatch import machine_reasons
from moereg.platforms import Platform
from moereg.plugins import MOVEMENT_GROUP, PLATFORM_GROUP
from moereg.quarantine import QuarantineRecord, quarantine_path, read_quarantine
from moereg.registry import BUILTIN, BackendCell
from moereg.testing.ledger import arch_name, evidence_of

__all__ = ["show_cells", "show_info"]

_MOST_NAMES: Final = 3
"""Most platforms shown on one line; the table of cells has all."""


def show_info(info: Mapping[str, Any], platform: Platform) -> None:
    """Prints what `collect_info` found, a line a backend: fits 80 columns and, without wheels, one screen."""
    target = console(sys.stdout)
    _print_machine(target, info, platform)
    backends = info["backends"]
    # On 80 columns the lines about plugins say it.
    with_origin = target.width >= WIDE and any(backend["origin"] != BUILTIN for backend in backends)
    columns = ("backend", *(["origin"] if with_origin else []), "schemes", "platforms", "runs here", "verified on")
    table = new_table(*columns)
    table.columns[0].no_wrap = True
    for backend in backends:
        cells = backend["cells"]
        schemes = {name for cell in cells for name in cell["quant_schemes"]}
        rules = dict.fromkeys(rule for cell in cells for rule in cell["platforms"])
        table.add_row(
            backend["name"],
            *([backend["origin"]] if with_origin else []),
            str(len(schemes)),
            _short(_rule_name(rule) for rule in rules),
            _runs(backend),
            _verified(cells),
        )
    target.print(table)
    num_cells = sum(len(backend["cells"]) for backend in backends)
    target.print(f"{len(backends)} backends with {num_cells} cells: moereg info --cells shows all, and every reason")
    target.print(Text(f"ways between ranks: {', '.join(map(_way_shown, info['ways']))}"))
    _print_quarantine(target, _held(platform))
    _print_plugins(target, [plugin for plugin in info["plugins"] if plugin["status"] != "loaded"])
    loaded: dict[str, list[str]] = {}
    for plugin in info["plugins"]:
        if plugin["status"] == "loaded":
            what = {PLATFORM_GROUP: "platform ", MOVEMENT_GROUP: "way "}.get(plugin["group"], "")
            loaded.setdefault(plugin["distribution"], []).append(what + plugin["name"])
    for distribution, names in loaded.items():
        target.print(f"plugin {distribution}: {', '.join(names)}")
    if not info["plugins"]:
        target.print("no plugins installed")
    target.print("moereg explain --model NAME says what a layer gets, moereg models lists names")


def show_cells(info: Mapping[str, Any], platform: Platform) -> None:
    """Prints every cell with its evidence, every reason against those that cannot run here, and every plugin."""
    target = console(sys.stdout)
    _print_machine(target, info, platform)
    cells = new_table("backend", "experts", "computes", "platforms", "priority", "tier", "runs here", "verified")
    held = _held(platform)
    for cell, records in held:
        is_out = len(records) == len(cell.schemes)
        cells.add_row(
            cell.name,
            cell.class_name,
            ", ".join(scheme.name for scheme in cell.schemes),
            ", ".join(rule.text for rule in cell.rules),
            str(cell.priority),
            cell.tier,
            "quarantined" if is_out else yes_no(not machine_reasons(cell, platform)),
            str(evidence_of(cell)),
        )
    target.print(cells)
    for backend in info["backends"]:
        if not backend["available"]:
            print_reasons(target, f"{backend['name']} ({backend['origin']}) cannot run here:", backend["reasons"])
    target.print(_table_of_ways(info["ways"]))
    for way in info["ways"]:
        if not way["available"]:
            print_reasons(target, f"way {way['name']} ({way['origin']}) cannot run here:", way["reasons"])
    _print_quarantine(target, held)
    if info["plugins"]:
        _print_plugins(target, info["plugins"])
    else:
        target.print("no plugins installed")


def _way_shown(way: Mapping[str, Any]) -> str:
    """`deepep (opt-in, no: package)`."""
    notes = ["opt-in"] if all(cell["opt_in"] for cell in way["cells"]) else []
    notes += [] if way["available"] else [str(_runs(way))]
    return f"{way['name']} ({', '.join(notes)})" if notes else str(way["name"])


def _table_of_ways(ways: Sequence[Mapping[str, Any]]) -> Table:
    """A line a cell of the ways of moving tokens between ranks."""
    table = new_table("way", "class", "experts see", "platforms", "moves over", "priority", "captured", "opt-in")
    for way in ways:
        for cell in way["cells"]:
            most = cell["max_group_size"]
            table.add_row(
                way["name"],
                cell["movement"],
                ", ".join(cell["activation_formats"]),
                ", ".join(cell["platforms"]),
                ", ".join(cell["transports"]) + (f", up to {most} ranks" if most is not None else ""),
                f"{cell['priority']}{' (predicted)' if cell['predicted'] else ''}",
                "yes" if cell["graph_capture"] else "no",
                "yes" if cell["opt_in"] else "no",
            )
    return table


def _print_machine(target: Console, info: Mapping[str, Any], platform: Platform) -> None:
    target.print(f"moereg {info['version']} on {machine(platform)}")
    if info["platform_error"] is not None:
        target.print(f"it is not settled which machine this is: {info['platform_error']}", markup=False)


def _rule_name(rule: str) -> str:
    if rule == "*":
        return "all"
    return ",".join(arch_name(part) for part in rule.split(",")) if ":" in rule else rule


def _short(names: Iterable[str]) -> str:
    """The names, or the first of many and how many more there are."""
    known = list(dict.fromkeys(names))
    if len(known) <= _MOST_NAMES:
        return ", ".join(known)
    return f"{', '.join(known[: _MOST_NAMES - 1])}, {len(known) - _MOST_NAMES + 1} more"


def _runs(backend: Mapping[str, Any]) -> Text:
    if backend["available"]:
        return yes_no(True)
    codes = {reason["code"] for reason in backend["reasons"]}
    # Without the platform no package would help.
    code = next((code for code in ("platform", "package", "probe", "quarantined") if code in codes), "")
    return Text({"": "no", "platform": "no", "quarantined": "quarantined"}.get(code, f"no: {code}"), style="red")


def _verified(cells: Sequence[Mapping[str, Any]]) -> str:
    """Devices on which all of a backend's current cells were verified, or how many of them were."""
    records = [[record for record in cell["verified"] if not record["stale"]] for cell in cells]
    platforms = dict.fromkeys(arch_name(record["platform"]) for of_cell in records for record in of_cell)
    if not platforms:
        return "code changed" if any(cell["verified"] for cell in cells) else "-"
    num_verified = sum(map(bool, records))
    part = f" ({num_verified} of {len(cells)})" if num_verified < len(cells) else ""
    return _short(platforms) + part


def _held(platform: Platform) -> list[tuple[BackendCell, tuple[QuarantineRecord, ...]]]:
    """Every cell by backend, with the records by which it is quarantined."""
    registry, quarantine = load_backends(), read_quarantine()
    cells = [cell for name in registry.names for cell in registry.by_name(name)]
    return [(cell, quarantine.of_cell(cell, platform)) for cell in cells]


def _print_quarantine(target: Console, held: Sequence[tuple[BackendCell, tuple[QuarantineRecord, ...]]]) -> None:
    records = [record for _, of_cell in held for record in of_cell]
    if records:
        target.print(f"quarantined here, in {quarantine_path()}:")
    for record in records:
        target.print(f"  - {record.backend} ({record.experts}), {record.scheme}: {record.reason.text}")


def _print_plugins(target: Console, plugins: Sequence[Mapping[str, Any]]) -> None:
    if not plugins:
        return
    table = new_table("plugin", "group", "distribution", "status", "error")
    for plugin in plugins:
        table.add_row(plugin["name"], plugin["group"], plugin["distribution"], plugin["status"], plugin["error"] or "")
    target.print(table)
