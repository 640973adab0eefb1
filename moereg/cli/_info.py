"""`moereg info`, `moereg models` and `moereg schemes`: this machine, its backends, and names for options."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moereg._version import __version__
from moereg.cli._output import console
from moereg.cli._show import WIDE, machine, named_machine, new_table, print_notices, print_reasons, yes_no
from moereg.dispatch import machine_reasons
from moereg.errors import PluginError
from moereg.evidence.admission import ADMITTED
from moereg.evidence.ledger import arch_name, evidence_of
from moereg.evidence.on_machine import MachineRecord
from moereg.evidence.quarantine import QUARANTINE, Quarantine, QuarantineRecord
from moereg.measured.read import Source, read_tuning
from moereg.platforms import Platform, platform_of_product, probe_platform
from moereg.plugins.loader import current_platform, load_backends, load_movements, plugin_statuses
from moereg.plugins.status import MOVEMENT_GROUP, PLATFORM_GROUP
from moereg.prepare_finalize import MovementCell
from moereg.registry import BUILTIN, BackendCell
from moereg.selection.requirements import lacks
from moereg.selection.result import SCHEMA
from moereg.spec.model_shapes import MODEL_SHAPES
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.spec.reasons import Reason

_MOST_NAMES: Final = 3
"""Most platforms to show on one line; the table of cells has all."""

_Held = list[tuple[BackendCell, tuple[QuarantineRecord, ...]]]
"""Every cell, sorted by backend, with its quarantine records."""

_SHORT_DTYPES: Final = {"uint4": "int4", "float4_e2m1fn": "fp4", "float8_e4m3fn": "fp8"}


def machine_shown() -> tuple[Platform, str | None]:
    """This machine, and an error if several plugins claim it, which are then ignored."""
    try:
        return current_platform(), None
    except PluginError as error:
        return probe_platform(), str(error)


def collect_info() -> dict[str, Any]:
    """The object that `moereg info --json` prints."""
    registry, dispatchers = load_backends(), load_movements()
    platform, platform_error = machine_shown()
    quarantine = QUARANTINE.read()
    return {
        "schema": SCHEMA,
        "version": __version__,
        "platform": str(platform),
        "platform_error": platform_error,
        "backends": [_backend(registry.by_name(name), platform, quarantine) for name in registry.names],
        "plugins": [status.to_dict() for status in plugin_statuses()],
        "platform_claimed_by": platform.claimed_by or None,
        "ways": [_dispatcher(dispatchers.by_name(name), platform) for name in dispatchers.names],
        "packs": [_pack(source, platform) for source in read_tuning()],
    }


def _pack(source: Source, platform: Platform) -> dict[str, Any]:
    pack = source.pack
    return {
        "name": source.name,
        "platform": pack.machine.platform,
        "device": pack.machine.device,
        "sessions": len(pack.sessions),
        "layers": len(pack.layers),
        "unused": source.unused(platform, load_backends().cells),
    }


def _dispatcher(cells: Sequence[MovementCell], platform: Platform) -> dict[str, Any]:
    by_cell = [lacks(cell, cell.rule_for(platform), platform) for cell in cells]
    return _entry(cells, [_movement_cell(cell) for cell in cells], by_cell)


def _entry(
    cells: Sequence[BackendCell | MovementCell], shown: list[dict[str, Any]], by_cell: Sequence[Sequence[Reason]]
) -> dict[str, Any]:
    """The entry of a backend or token dispatcher, which runs here if one of its cells does."""
    nearest = sorted(by_cell, key=len)
    # Each reason once, starting with the cell that is nearest to running.
    reasons = dict.fromkeys(reason for reasons in nearest for reason in reasons) if nearest[0] else ()
    return {
        "name": cells[0].name,
        "origin": cells[0].origin,
        "origin_version": cells[0].origin_version,
        "cells": shown,
        "available": not nearest[0],
        "reasons": [{"code": reason.code, "text": reason.text} for reason in reasons],
    }


def _movement_cell(cell: MovementCell) -> dict[str, Any]:
    return {
        "movement": cell.class_name,
        "activation_formats": list(cell.formats),
        "platforms": [rule.text for rule in cell.rules],
        "transports": sorted(cell.facts.transports),
        "max_group_size": cell.facts.max_group_size,
        "graph_capture": cell.facts.graph_capture,
        "priority": cell.priority,
        "predicted": cell.predicted,
        "opt_in": cell.opt_in,
    }


def _backend(cells: Sequence[BackendCell], platform: Platform, quarantine: Quarantine) -> dict[str, Any]:
    by_cell: list[list[Reason]] = []
    # Probes last, since they may take a second; one running cell suffices.
    for cell in sorted(cells, key=lambda cell: len(cell.probes)):
        by_cell.append(_reasons(cell, platform, quarantine))
        if not by_cell[-1]:
            break
    return _entry(cells, [_cell(cell, quarantine.of_cell(cell, platform), platform) for cell in cells], by_cell)


def _reasons(cell: BackendCell, platform: Platform, quarantine: Quarantine) -> list[Reason]:
    """Why a cell cannot run any problem here: the machine's reasons, or all its schemes are quarantined."""
    held = [record for record in quarantine.of_cell(cell, platform) if record.holds_for(trains=False)]
    is_out = len(held) == len(cell.schemes)
    return [*machine_reasons(cell, platform), *(record.reason for record in held if is_out)]


def _cell(cell: BackendCell, held: Sequence[QuarantineRecord], platform: Platform) -> dict[str, Any]:
    passed = ADMITTED.read().of_cell(cell, platform)
    return {
        "experts": cell.class_name,
        "quant_schemes": [scheme.name for scheme in cell.schemes],
        "platforms": [rule.text for rule in cell.rules],
        "priority": cell.priority,
        "tier": cell.tier,
        **evidence_of(cell).to_dict(),
        "quarantined": [_parts(record, "failure") for record in held],
        "admitted": [_parts(record, "error", "bound") for record in passed],
    }


def _parts(record: MachineRecord, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("scheme", "trains", "date", *names)}


def show_info(info: Mapping[str, Any], with_cells: bool) -> None:
    """Prints the result of `collect_info`, one line per backend or per cell."""
    target, platform = console(sys.stdout), machine_shown()[0]
    target.print(f"moereg {info['version']} on {machine(platform)}")
    if info["platform_error"] is not None:
        target.print(f"it is not settled which machine this is: {info['platform_error']}")
    (_print_cells if with_cells else _print_backends)(target, info, _held(platform), platform)
    for pack in info["packs"]:
        target.print(_pack_line(pack))
    if not info["plugins"]:
        target.print("no plugins installed")
    if not with_cells:
        target.print("moereg explain --model NAME says what a layer gets, moereg models lists names")


def _pack_line(pack: Mapping[str, Any]) -> str:
    """A line of whose times they are, and why they are not used here."""
    unused = pack["unused"]
    why = unused.get("") or ", ".join(f"{name} ({reason})" for name, reason in unused.items())
    used = "in use" if not unused else f"unused: {why}" if "" in unused else f"unused for {why}"
    return f"{pack['name']} (measured times of {pack['device']}, {pack['layers']} layers): {used}"


def _print_backends(target: Console, info: Mapping[str, Any], held: _Held, platform: Platform) -> None:
    """Prints one line per backend: fits 80 columns and, without plugins, one screen."""
    backends = info["backends"]
    # On 80 columns the lines about plugins say so.
    with_origin = target.width >= WIDE and any(backend["origin"] != BUILTIN for backend in backends)
    table = new_table(
        "backend", *(["origin"] if with_origin else []), "schemes", "platforms", "runs here", "verified on"
    )
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
    records = [record for backend in backends for cell in backend["cells"] for record in cell["verified"]]
    with_versions = sorted({record["machine"] for record in records if not record["stale"]})
    if with_versions:
        target.print(f"verified on: {'; '.join(with_versions)}")
    num_cells = sum(len(backend["cells"]) for backend in backends)
    target.print(f"{len(backends)} backends with {num_cells} cells: moereg info --cells shows all, and every reason")
    target.print(Text(f"ways between ranks: {', '.join(map(_in_brief, info['ways']))}"))
    _print_quarantine(target, held)
    _print_admitted(target, held, platform)
    _print_plugins(target, [plugin for plugin in info["plugins"] if plugin["status"] != "loaded"])
    loaded: dict[str, list[str]] = {}
    for plugin in info["plugins"]:
        if plugin["status"] == "loaded":
            what = {PLATFORM_GROUP: "platform ", MOVEMENT_GROUP: "way "}.get(plugin["group"], "")
            loaded.setdefault(plugin["distribution"], []).append(what + plugin["name"])
    for distribution, names in loaded.items():
        target.print(f"plugin {distribution}: {', '.join(names)}")


def _print_cells(target: Console, info: Mapping[str, Any], held: _Held, platform: Platform) -> None:
    """Prints every cell with its evidence, the reasons why some cannot run here, and every plugin."""
    cells = new_table("backend", "experts", "computes", "platforms", "priority", "tier", "runs here", "verified")
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
    table = new_table("way", "class", "experts see", "platforms", "moves over", "priority", "captured", "opt-in")
    for way in info["ways"]:
        for entry in way["cells"]:
            most = entry["max_group_size"]
            table.add_row(
                way["name"],
                entry["movement"],
                ", ".join(entry["activation_formats"]),
                ", ".join(entry["platforms"]),
                ", ".join(entry["transports"]) + (f", up to {most} ranks" if most is not None else ""),
                f"{entry['priority']}{' (predicted)' if entry['predicted'] else ''}",
                "yes" if entry["graph_capture"] else "no",
                "yes" if entry["opt_in"] else "no",
            )
    target.print(table)
    for way in info["ways"]:
        if not way["available"]:
            print_reasons(target, f"way {way['name']} ({way['origin']}) cannot run here:", way["reasons"])
    _print_quarantine(target, held)
    _print_admitted(target, held, platform)
    _print_plugins(target, info["plugins"])


def _in_brief(dispatcher: Mapping[str, Any]) -> str:
    """A short form such as `deepep (opt-in, no: package)`."""
    notes = ["opt-in"] if all(cell["opt_in"] for cell in dispatcher["cells"]) else []
    notes += [] if dispatcher["available"] else [str(_runs(dispatcher))]
    return f"{dispatcher['name']} ({', '.join(notes)})" if notes else str(dispatcher["name"])


def _rule_name(rule: str) -> str:
    if rule == "*":
        return "all"
    return ",".join(arch_name(part) for part in rule.split(",")) if ":" in rule else rule


def _short(names: Iterable[str]) -> str:
    """The names, or the first of many with the number of others."""
    known = list(dict.fromkeys(names))
    if len(known) <= _MOST_NAMES:
        return ", ".join(known)
    return f"{', '.join(known[: _MOST_NAMES - 1])}, {len(known) - _MOST_NAMES + 1} more"


def _runs(backend: Mapping[str, Any]) -> Text:
    if backend["available"]:
        return yes_no(True)
    codes = {reason["code"] for reason in backend["reasons"]}
    # On another platform no package would help.
    code = next((code for code in ("platform", "package", "probe", "quarantined") if code in codes), "")
    return Text({"": "no", "platform": "no", "quarantined": "quarantined"}.get(code, f"no: {code}"), style="red")


def _verified(cells: Sequence[Mapping[str, Any]]) -> str:
    """Devices on which all of a backend's current cells were verified, or the number of verified cells."""
    records = [[record for record in cell["verified"] if not record["stale"]] for cell in cells]
    devices = dict.fromkeys(record["machine"].partition(",")[0] for of_cell in records for record in of_cell)
    if not devices:
        return "code changed" if any(cell["verified"] for cell in cells) else "-"
    num_verified = sum(map(bool, records))
    part = f" ({num_verified} of {len(cells)})" if num_verified < len(cells) else ""
    return _short(devices) + part


def _held(platform: Platform) -> _Held:
    registry, quarantine = load_backends(), QUARANTINE.read()
    cells = [cell for name in registry.names for cell in registry.by_name(name)]
    return [(cell, quarantine.of_cell(cell, platform)) for cell in cells]


def _print_quarantine(target: Console, held: _Held) -> None:
    records = [record for _, of_cell in held for record in of_cell]
    if records:
        target.print(f"quarantined here, in {QUARANTINE.path()}:")
    for record in records:
        target.print(f"  - {record.backend} ({record.experts}), {record.computed}: {record.reason.text}")


def _print_admitted(target: Console, held: _Held, platform: Platform) -> None:
    records = [record for cell, _ in held for record in ADMITTED.read().of_cell(cell, platform)]
    if records:
        target.print(f"admitted here, in {ADMITTED.path()}:")
    for record in records:
        target.print(f"  - {record.backend} ({record.experts}), {record.computed}: {record.date}")


def _print_plugins(target: Console, plugins: Sequence[Mapping[str, Any]]) -> None:
    if not plugins:
        return
    table = new_table("plugin", "group", "distribution", "status", "error")
    for plugin in plugins:
        table.add_row(plugin["name"], plugin["group"], plugin["distribution"], plugin["status"], plugin["error"] or "")
    target.print(table)


def list_models() -> dict[str, Any]:
    """The object that `moereg models --json` prints."""
    return {"schema": SCHEMA, "models": [dataclasses.asdict(shape) for shape in MODEL_SHAPES.values()]}


def show_models() -> None:
    """Prints one line per model."""
    target = console(sys.stdout)
    table = new_table("model", "E", "H", "I", "K", "L", "activation", "released as")
    for shape in MODEL_SHAPES.values():
        sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k)
        activation = f"{shape.activation}, bias" if shape.has_bias else shape.activation
        released = "16 bits" if shape.released_quant == "unquantized" else shape.released_quant
        table.add_row(shape.name, *map(str, sizes), str(shape.num_moe_layers or ""), activation, released)
    target.print(table)
    target.print("E experts of sizes H and I, K a token, L layers; 16 bits unless --quant is given")


def list_schemes(name: str | None) -> tuple[dict[str, Any], Platform]:
    """The object that `moereg schemes --json` prints, and the platform.

    Args:
        name: The value of `--platform`; None means this machine.
    """
    registry = load_backends()
    platform = current_platform() if name is None else Platform.from_name(name)
    known = {scheme.name: scheme for cell in registry.cells for scheme in cell.schemes}
    schemes = {**QUANT_SCHEMES, **{name: known[name] for name in sorted(known) if name not in QUANT_SCHEMES}}
    cells = [cell for cell in registry.cells if not machine_reasons(cell, platform)]
    product = None if name is None else platform_of_product(name)
    return {
        "schema": SCHEMA,
        "platform": str(platform),
        "platform_source": "probed" if platform.probed else "named",
        "schemes": [{**dataclasses.asdict(scheme), **_served_by(scheme, cells)} for scheme in schemes.values()],
        "notices": [] if product is None else [f"--platform {name} is {product}"],
    }, platform


def show_schemes(found: dict[str, Any], platform: Platform) -> None:
    """Prints one line per scheme."""
    target = console(sys.stdout)
    target.print(f"on {named_machine(platform)}")
    table = new_table("scheme", "weights", "activations", "backends")
    table.columns[0].no_wrap = True
    for row in found["schemes"]:
        names = [*row["backends"], *(f"{name} (emulated)" for name in row["emulated_by"])]
        formats = _format(row["weight"], "row"), _format(row["activation"], "token")
        table.add_row(row["name"], *formats, ", ".join(names) or "none")
    target.print(table)
    print_notices(target, found["notices"])


def _served_by(checkpoint: QuantScheme, cells: list[BackendCell]) -> dict[str, list[str]]:
    """Names of backends that run such weights, native ones separate from emulations."""
    serving = [cell for cell in cells if any(scheme.serves(checkpoint) for scheme in cell.schemes)]
    kernels = sorted({cell.name for cell in serving if cell.tier == "kernel"})
    return {"backends": kernels, "emulated_by": sorted({cell.name for cell in serving} - {*kernels})}


def _format(values: dict[str, Any] | None, line: str) -> str:
    """A format in few words, such as `fp8 by 128 x 128` or `int4 by 32, zeros`."""
    if values is None:
        return "16 bits"
    value = QuantFormat(**values)
    rows, columns = value.group
    group = {(WHOLE, WHOLE): "tensor", (1, WHOLE): line}.get(value.group, str(columns))
    if rows not in (1, WHOLE):
        group = f"{rows} x {columns}"
    zeros = "" if value.symmetric else ", zeros"
    static = ", static" if value.static else ""
    return f"{_SHORT_DTYPES.get(value.dtype, value.dtype)} by {group}{zeros}{static}"
