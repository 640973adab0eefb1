"""The state of this machine: backends and ways of moving tokens, whether they can run here, and plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moereg._version import __version__
from moereg.discovery import current_platform, load_backends, load_movements, plugin_statuses
from moereg.dispatch import machine_reasons
from moereg.errors import PluginError
from moereg.machine import PROBES, lacks
from moereg.platforms import Platform, probe_platform
from moereg.prepare_finalize import MovementCell
from moereg.quarantine import Quarantine, QuarantineRecord, read_quarantine
from moereg.reasons import Reason
from moereg.registry import BackendCell
from moereg.selection import SCHEMA, Decision, Selection
from moereg.testing.ledger import evidence_of

__all__ = ["collect_info", "machine_shown", "selection_with_evidence"]


def machine_shown() -> tuple[Platform, str | None]:
    """This machine; where several plugins claim it, as it is without them, and the error about them."""
    try:
        return current_platform(), None
    except PluginError as error:
        return probe_platform(), str(error)


def collect_info() -> dict[str, Any]:
    """The object that `moereg info --json` prints."""
    registry = load_backends()
    platform, platform_error = machine_shown()
    quarantine = read_quarantine()
    return {
        "schema": SCHEMA,
        "version": __version__,
        "platform": str(platform),
        "platform_error": platform_error,
        "backends": [_backend(name, registry.by_name(name), platform, quarantine) for name in registry.names],
        "plugins": [status.to_dict() for status in plugin_statuses()],
        "platform_claimed_by": platform.claimed_by or None,
        "ways": _ways(platform),
    }


def _ways(platform: Platform) -> list[dict[str, Any]]:
    """Every way of moving tokens between ranks, by name."""
    registry = load_movements()
    return [_way([cell for cell in registry.cells if cell.name == name], platform) for name in registry.names]


def _way(cells: Sequence[MovementCell], platform: Platform) -> dict[str, Any]:
    by_cell = sorted((lacks(cell, cell.rule_for(platform), platform, PROBES) for cell in cells), key=len)
    reasons = list(dict.fromkeys(reason for reasons in by_cell for reason in reasons)) if by_cell[0] else []
    return {
        "name": cells[0].name,
        "origin": cells[0].origin,
        "origin_version": cells[0].origin_version,
        "cells": [_way_cell(cell) for cell in cells],
        "available": not by_cell[0],
        "reasons": [{"code": reason.code, "text": reason.text} for reason in reasons],
    }


def _way_cell(cell: MovementCell) -> dict[str, Any]:
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


def _backend(name: str, cells: Sequence[BackendCell], platform: Platform, quarantine: Quarantine) -> dict[str, Any]:
    by_cell: list[list[Reason]] = []
    # Probes last, which may take a second: a backend runs here if one of its cells does.
    for cell in sorted(cells, key=lambda cell: len(cell.probes)):
        by_cell.append(_reasons(cell, platform, quarantine))
        if not by_cell[-1]:
            break
    by_cell.sort(key=len)
    is_available = not by_cell[0]
    # Each reason once, those of the cell that is nearest to running first.
    reasons = [] if is_available else list(dict.fromkeys(reason for reasons in by_cell for reason in reasons))
    return {
        "name": name,
        "origin": cells[0].origin,
        "origin_version": cells[0].origin_version,
        "cells": [_cell(cell, quarantine.of_cell(cell, platform)) for cell in cells],
        "available": is_available,
        "reasons": [{"code": reason.code, "text": reason.text} for reason in reasons],
    }


def _reasons(cell: BackendCell, platform: Platform, quarantine: Quarantine) -> list[Reason]:
    """Why a cell cannot run here for any problem: the machine, or every one of its schemes is quarantined."""
    held = quarantine.of_cell(cell, platform)
    is_out = len(held) == len(cell.schemes)
    return [*machine_reasons(cell, platform), *(record.reason for record in held if is_out)]


def _cell(cell: BackendCell, held: Sequence[QuarantineRecord]) -> dict[str, Any]:
    return {
        "experts": cell.class_name,
        "quant_schemes": [scheme.name for scheme in cell.schemes],
        "platforms": [rule.text for rule in cell.rules],
        "priority": cell.priority,
        "tier": cell.tier,
        **evidence_of(cell).to_dict(),
        "quarantined": [{"scheme": record.scheme, "date": record.date, "failure": record.failure} for record in held],
    }


def selection_with_evidence(selection: Selection) -> dict[str, Any]:
    """The object that `moereg explain --json` prints: the selection and the evidence of the chosen cell.

    `verification` is None if nothing fits or the cell is not registered here, and a decision's `verified_on_platform`
    where it was rejected.
    """
    winner = selection.winner
    found = None
    if winner is not None and winner.cell is not None:
        evidence = evidence_of(winner.cell)
        found = {**evidence.to_dict(), "verified_on_platform": evidence.on(selection.platform)}
    values = selection.to_dict()
    for decision, shown in zip(selection.decisions, values["decisions"], strict=True):
        shown["verified_on_platform"] = _is_verified(decision, selection.platform) if decision.accepted else None
    return {**values, "verification": found}


def _is_verified(decision: Decision, platform: Platform) -> bool:
    return decision.cell is not None and evidence_of(decision.cell).on(platform)
