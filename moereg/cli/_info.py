"""`moereg info`, `moereg models` and `moereg schemes`: this machine, its backends, and names for options."""

from __future__ import annotations

import dataclasses
import os
import platform as host
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from packaging.requirements import Requirement
from rich.text import Text

from moereg._version import __version__
from moereg.cli._output import picked
from moereg.cli._show import machine, named_machine, new_table, print_notices, print_reasons, say, yes_no
from moereg.dispatch import machine_reasons
from moereg.errors import PluginError, one_line
from moereg.evidence.ledger import arch_name, evidence_of
from moereg.evidence.measured import read_tuning
from moereg.evidence.on_machine import ADMITTED, QUARANTINE, Quarantine
from moereg.platforms import Platform, current_platform, platform_of_product, probe_cpu, probe_platform
from moereg.prepare_finalize import DispatcherCell
from moereg.registry import BUILTIN, BackendCell
from moereg.selection.decide import requirement_reasons
from moereg.selection.loader import load_backends, load_dispatchers, plugin_statuses
from moereg.selection.plugin_status import DISPATCHER_GROUP, PLATFORM_GROUP
from moereg.selection.result import SCHEMA
from moereg.spec.model_shapes import MODEL_SHAPES
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.spec.reasons import Reason

_PLUGIN: Final = ("group", "name", "distribution", "status", "error")

_VARIABLES: Final = ("MOEREG_", "TRITON_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY")

_MOST_NAMES: Final = 3
"""Most platforms to show on one line; the table of cells has all."""

_SHORT_DTYPES: Final = {"uint4": "int4", "float4_e2m1fn": "fp4", "float8_e4m3fn": "fp8"}


def machine_shown() -> tuple[Platform, str | None]:
    """This machine, and an error if several plugins claim it, which are then ignored."""
    try:
        return current_platform(), None
    except PluginError as error:
        return probe_platform(), str(error)


def collect_info() -> dict[str, Any]:
    """The object that `moereg info --json` prints."""
    registry, dispatchers = load_backends(), load_dispatchers()
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
        "dispatchers": [_dispatcher(dispatchers.by_name(name), platform) for name in dispatchers.names],
        "packs": [
            {
                "name": source.name,
                **picked(source.pack.machine, "platform", "device"),
                "sessions": len(source.pack.sessions),
                "layers": len(source.pack.layers),
                "unused": source.unused(platform, registry.cells),
            }
            for source in read_tuning()
        ],
    }


def _dispatcher(cells: Sequence[DispatcherCell], platform: Platform) -> dict[str, Any]:
    shown = [
        {
            "dispatcher": cell.class_name,
            "activation_formats": list(cell.formats),
            "platforms": [rule.text for rule in cell.rules],
            "transports": sorted(cell.facts.transports),
            **picked(cell.facts, "max_group_size", "graph_capture"),
            **picked(cell, "priority", "predicted", "opt_in"),
        }
        for cell in cells
    ]
    return _entry(cells[0], shown, [requirement_reasons(cell, cell.rule_for(platform), platform) for cell in cells])


def _backend(cells: Sequence[BackendCell], platform: Platform, quarantine: Quarantine) -> dict[str, Any]:
    by_cell: list[list[Reason]] = []
    # Probes last, since they may take a second; one running cell suffices.
    for cell in sorted(cells, key=lambda cell: len(cell.probes)):
        held = [record for record in quarantine.of_cell(cell, platform) if record.holds_for(trains=False)]
        is_out = len(held) == len(cell.schemes)
        by_cell.append([*machine_reasons(cell, platform), *(record.reason for record in held if is_out)])
        if not by_cell[-1]:
            break
    shown = [
        {
            "experts": cell.class_name,
            "quant_schemes": [scheme.name for scheme in cell.schemes],
            "platforms": [rule.text for rule in cell.rules],
            **picked(cell, "priority", "tier"),
            **evidence_of(cell).to_dict(),
            "quarantined": [
                picked(record, "scheme", "trains", "date", "failure") for record in quarantine.of_cell(cell, platform)
            ],
            "admitted": [
                picked(record, "scheme", "trains", "date", "error", "bound")
                for record in ADMITTED.read().of_cell(cell, platform)
            ],
        }
        for cell in cells
    ]
    return _entry(cells[0], shown, by_cell)


def _entry(
    first: BackendCell | DispatcherCell, shown: list[dict[str, Any]], by_cell: Iterable[Sequence[Reason]]
) -> dict[str, Any]:
    """A backend or token dispatcher, which runs here if one of its cells does."""
    nearest = sorted(by_cell, key=len)
    # Each reason once, starting with the cell that is nearest to running.
    reasons = dict.fromkeys(reason for reasons in nearest for reason in reasons) if nearest[0] else ()
    return {
        **picked(first, "name", "origin", "origin_version"),
        "cells": shown,
        "available": not nearest[0],
        "reasons": [picked(reason, "code", "text") for reason in reasons],
    }


def show_info(info: Mapping[str, Any], with_cells: bool) -> None:
    """Prints the result of `collect_info`, one line per backend or per cell."""
    platform = machine_shown()[0]
    say(f"moereg {info['version']} on {machine(platform)}")
    if info["platform_error"] is not None:
        say(f"it is not settled which machine this is: {info['platform_error']}")
    _show_cells(info, platform) if with_cells else _show_backends(info)
    for kind, file in (("quarantined", QUARANTINE), ("admitted", ADMITTED)):
        if records := _records(info, kind):
            say(f"{kind} here, in {file.path()}:", *(f"  - {record}" for record in records))
    _show_plugins(info["plugins"], with_cells)
    for pack in info["packs"]:
        why = pack["unused"].get("") or ", ".join(f"{name} ({reason})" for name, reason in pack["unused"].items())
        used = f"unused{'' if '' in pack['unused'] else ' for'}: {why}" if pack["unused"] else "in use"
        say(f"{pack['name']} (measured times of {pack['device']}, {pack['layers']} layers): {used}")
    if not info["plugins"]:
        say("no plugins installed")
    if not with_cells:
        say("moereg explain --model NAME says what a layer gets, moereg models lists names")


def _records(info: Mapping[str, Any], kind: str) -> list[str]:
    """The `quarantined` or `admitted` cells, a line each."""
    return [
        f"{backend['name']} ({cell['experts']}), {one['scheme']}{', gradients' if one['trains'] else ''}: {one['date']}"
        + (f", {one['failure']}" if "failure" in one else "")
        for backend in info["backends"]
        for cell in backend["cells"]
        for one in cell[kind]
    ]


def report_of(info: Mapping[str, Any]) -> str:
    """The result of `collect_info` as a block to paste into a bug report, without paths of the home folder."""
    import torch  # For this command alone.

    platform, cpu = machine_shown()[0], probe_cpu()
    names = {"torch", "triton", "transformers", "vllm", "sglang"}
    names.update(Requirement(text).name for cell in load_backends().cells for text in cell.requires)
    lines = {
        "moereg": [f"{info['version']} on {info['platform_error'] or info['platform']}"],
        "system": [f"Python {host.python_version()}, {host.platform()}"],
        "packages": [f"{name} {cpu.versions[name]}" for name in sorted(names & {*cpu.versions})],
        "torch": [f"CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'}"],
        "GPUs": [f"{torch.cuda.device_count()} of {machine(platform)}"] if platform.kind != "cpu" else [],
        "CPU": [
            f"{machine(cpu)}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
            f"{torch.backends.cpu.get_cpu_capability()}"
        ],
        "plugins": [" ".join(str(one[key] or "") for key in _PLUGIN).strip() for one in info["plugins"]],
        "variables": [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)],
        "quarantined": _records(info, "quarantined"),
        "admitted": _records(info, "admitted"),
    }
    text = "\n".join(f"{head}: {one_line(each)}" for head, each_of in lines.items() for each in each_of or ["none"])
    home = os.path.expanduser("~")
    return f"```text\n{text.replace(home, '~') if len(home) > 1 else text}\n```"


def _show_backends(info: Mapping[str, Any]) -> None:
    """Prints one line per backend: fits 80 columns and, without plugins, one screen."""
    backends = info["backends"]
    rows = []
    for backend in backends:
        rules = dict.fromkeys(rule for cell in backend["cells"] for rule in cell["platforms"])
        rows.append(
            (
                backend["name"] + ("" if backend["origin"] == BUILTIN else f" of {backend['origin']}"),
                str(len({name for cell in backend["cells"] for name in cell["quant_schemes"]})),
                _short(_rule_name(rule) for rule in rules),
                _runs(backend),
                _verified(backend["cells"]),
            )
        )
    say(new_table("backend", ">schemes", "platforms", "runs here", "verified on", rows=rows))
    records = [record for backend in backends for cell in backend["cells"] for record in cell["verified"]]
    with_versions = sorted({record["machine"] for record in records if not record["stale"]})
    if with_versions:
        say(f"verified on: {'; '.join(with_versions)}")
    num_cells = sum(len(backend["cells"]) for backend in backends)
    say(
        f"{len(backends)} backends with {num_cells} cells: moereg info --cells shows all, and every reason",
        f"token dispatchers: {', '.join(map(_in_brief, info['dispatchers']))}",
    )


def _show_cells(info: Mapping[str, Any], platform: Platform) -> None:
    registry, quarantine = load_backends(), QUARANTINE.read()
    columns = "backend", "experts", "computes", "platforms", ">priority", "tier", "runs here", "verified"
    rows = [
        (
            cell.name,
            cell.class_name,
            ", ".join(scheme.name for scheme in cell.schemes),
            ", ".join(rule.text for rule in cell.rules),
            str(cell.priority),
            cell.tier,
            "quarantined"
            if len(quarantine.of_cell(cell, platform)) == len(cell.schemes)
            else yes_no(not machine_reasons(cell, platform)),
            str(evidence_of(cell)),
        )
        for name in registry.names
        for cell in registry.by_name(name)
    ]
    say(new_table(*columns, rows=rows))
    _show_reasons(info["backends"], "")
    columns = "dispatcher", "class", "experts see", "platforms", "moves over", ">priority", "captured", "opt-in"
    rows = [
        (
            dispatcher["name"],
            cell["dispatcher"],
            ", ".join(cell["activation_formats"]),
            ", ".join(cell["platforms"]),
            ", ".join(cell["transports"])
            + (f", up to {cell['max_group_size']} ranks" if cell["max_group_size"] is not None else ""),
            f"{cell['priority']}{' (predicted)' if cell['predicted'] else ''}",
            "yes" if cell["graph_capture"] else "no",
            "yes" if cell["opt_in"] else "no",
        )
        for dispatcher in info["dispatchers"]
        for cell in dispatcher["cells"]
    ]
    say(new_table(*columns, rows=rows))
    _show_reasons(info["dispatchers"], "dispatcher ")


def _show_reasons(entries: Iterable[Mapping[str, Any]], what: str) -> None:
    for entry in entries:
        if not entry["available"]:
            print_reasons(f"{what}{entry['name']} ({entry['origin']}) cannot run here:", entry["reasons"])


def _show_plugins(plugins: Iterable[Mapping[str, Any]], every: bool) -> None:
    """A table of plugins that did not load, or of all, and otherwise a line per distribution."""
    rows = [[plugin[key] or "" for key in _PLUGIN] for plugin in plugins if every or plugin["status"] != "loaded"]
    if rows:
        say(new_table("group", "plugin", *_PLUGIN[2:], rows=rows))
    loaded: dict[str, list[str]] = {}
    for plugin in plugins if not every else ():
        if plugin["status"] == "loaded":
            what = {PLATFORM_GROUP: "platform ", DISPATCHER_GROUP: "dispatcher "}.get(plugin["group"], "")
            loaded.setdefault(plugin["distribution"], []).append(what + plugin["name"])
    say(*(f"plugin {distribution}: {', '.join(names)}" for distribution, names in loaded.items()))


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


def list_models() -> dict[str, Any]:
    return {"schema": SCHEMA, "models": [dataclasses.asdict(shape) for shape in MODEL_SHAPES.values()]}


def show_models() -> None:
    rows = []
    for shape in MODEL_SHAPES.values():
        sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k)
        activation = f"{shape.activation}, bias" if shape.has_bias else shape.activation
        released = "16 bits" if shape.released_quant == "unquantized" else shape.released_quant
        rows.append((shape.name, *map(str, sizes), str(shape.num_moe_layers or ""), activation, released))
    say(
        new_table("model", ">E", ">H", ">I", ">K", ">L", "activation", "released as", rows=rows),
        "E experts of sizes H and I, K a token, L layers; 16 bits unless --quant is given",
    )


def list_schemes(name: str | None) -> tuple[dict[str, Any], Platform]:
    """The object that `moereg schemes --json` prints, and the platform that `--platform` names, or this machine."""
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
        "schemes": [_scheme(scheme, cells) for scheme in schemes.values()],
        "notices": [] if product is None else [f"--platform {name} is {product}"],
    }, platform


def show_schemes(found: dict[str, Any], platform: Platform) -> None:
    rows = []
    for row in found["schemes"]:
        names = [*row["backends"], *(f"{name} (emulated)" for name in row["emulated_by"])]
        formats = _format(row["weight"], "row"), _format(row["activation"], "token")
        rows.append((row["name"], *formats, ", ".join(names) or "none"))
    table = new_table("scheme", "weights", "activations", "backends", rows=rows)
    say(f"on {named_machine(platform)}", table)
    print_notices(found["notices"])


def _scheme(checkpoint: QuantScheme, cells: list[BackendCell]) -> dict[str, Any]:
    serving = [cell for cell in cells if any(scheme.serves(checkpoint) for scheme in cell.schemes)]
    kernels = {cell.name for cell in serving if cell.tier == "kernel"}
    emulated = {cell.name for cell in serving} - kernels
    return {**dataclasses.asdict(checkpoint), "backends": sorted(kernels), "emulated_by": sorted(emulated)}


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
