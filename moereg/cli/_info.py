"""What this machine has: backends, whether they can run here, and plugins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from moereg.discovery import current_platform, load_backends, plugin_statuses
from moereg.dispatch import SCHEMA, Request, evaluate
from moereg.experts import Reason
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import BackendCell
from moereg.testing.ledger import verifications

__all__ = ["collect_info", "machine_reasons", "moereg_version"]

# Reasons that are the machine's, whatever the problem.
_MACHINE_CODES: Final = ("platform", "package", "probe")


def moereg_version() -> str:
    """The version of the package that is running, installed or not."""
    # The front door says it; importing it from inside would tie every module to every other.
    version: str = sys.modules["moereg"].__version__
    return version


def collect_info() -> dict[str, Any]:
    """The object that `moereg info --json` prints.

    Raises:
        PluginError: Two platform plugins claim this machine.
    """
    registry = load_backends()
    platform = current_platform()
    return {
        "schema": SCHEMA,
        "version": moereg_version(),
        "platform": str(platform),
        "backends": [_backend(name, registry.by_name(name), platform) for name in registry.names],
        "plugins": [status.to_dict() for status in plugin_statuses()],
    }


def _backend(name: str, cells: Sequence[BackendCell], platform: Platform) -> dict[str, Any]:
    by_cell = sorted((machine_reasons(cell, platform) for cell in cells), key=len)
    is_available = not by_cell[0]
    # Each reason once, those of the cell that is nearest to running first.
    reasons = [] if is_available else list(dict.fromkeys(reason for reasons in by_cell for reason in reasons))
    return {
        "name": name,
        "origin": cells[0].origin,
        "cells": [_cell(cell) for cell in cells],
        "available": is_available,
        "reasons": [{"code": reason.code, "text": reason.text} for reason in reasons],
    }


def _cell(cell: BackendCell) -> dict[str, Any]:
    return {
        "experts": cell.class_name,
        "quant_schemes": [scheme.name for scheme in cell.schemes],
        "platforms": [rule.text for rule in cell.rules],
        "priority": cell.priority,
        "tier": cell.tier,
        "verified": verifications(cell),
    }


def machine_reasons(cell: BackendCell, platform: Platform) -> list[Reason]:
    """Why a cell cannot run on a platform whatever the problem; empty where it can."""
    # The dispatcher owns these rules. It wants a problem; the reasons that a smallest one adds are dropped.
    problem = MoEProblem(num_experts=1, hidden_size=1, intermediate_size=1, top_k=1, quant=cell.schemes[0])
    reasons = evaluate(cell, problem, platform, Request()).reasons
    return [reason for reason in reasons if reason.code in _MACHINE_CODES]
