"""The conformance kit, with which a backend's author checks a backend against the reference.

`verify` runs everything and returns a `Report`; `checks_of` and `run_check` are its parts. The other names are for an
author's own tests: random weights and inputs that expose mix-ups, guard bands, planted faults and random layers. They
are imported at first use, and need nothing but moereg.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moereg.evidence.ledger import Verification, merge_ledger, read_ledger
    from moereg.testing.cases import Case, accepted_problems, claimed_problems, rejected_problems
    from moereg.testing.check import CellName
    from moereg.testing.checks import GuardedLayer
    from moereg.testing.drawing import DrawnLayer, draw_layer
    from moereg.testing.faults import FAULTS, plant_faults
    from moereg.testing.guards import GuardedMemory, GuardedWorkspaces, guard_permuted, guard_weights
    from moereg.testing.inputs import ROUTINGS, Inputs, make_expert_map, make_inputs, make_weights
    from moereg.testing.interpreter import patch_interpreter
    from moereg.testing.suite import (
        CHECK_SECONDS,
        Check,
        Outcome,
        Report,
        Result,
        checks_of,
        run_check,
        verify,
    )

__all__ = [
    "CHECK_SECONDS",
    "FAULTS",
    "ROUTINGS",
    "Case",
    "CellName",
    "Check",
    "DrawnLayer",
    "GuardedLayer",
    "GuardedMemory",
    "GuardedWorkspaces",
    "Inputs",
    "Outcome",
    "Report",
    "Result",
    "Verification",
    "accepted_problems",
    "checks_of",
    "claimed_problems",
    "draw_layer",
    "guard_permuted",
    "guard_weights",
    "make_expert_map",
    "make_inputs",
    "make_weights",
    "merge_ledger",
    "patch_interpreter",
    "plant_faults",
    "read_ledger",
    "rejected_problems",
    "run_check",
    "verify",
]

_MODULES: Final = {
    "testing.cases": ("Case", "accepted_problems", "claimed_problems", "rejected_problems"),
    "testing.check": ("CellName",),
    "testing.checks": ("GuardedLayer",),
    "testing.drawing": ("DrawnLayer", "draw_layer"),
    "testing.faults": ("FAULTS", "plant_faults"),
    "testing.guards": ("GuardedMemory", "GuardedWorkspaces", "guard_permuted", "guard_weights"),
    "testing.inputs": ("ROUTINGS", "Inputs", "make_expert_map", "make_inputs", "make_weights"),
    "testing.interpreter": ("patch_interpreter",),
    "evidence.ledger": ("Verification", "merge_ledger", "read_ledger"),
    "testing.suite": ("CHECK_SECONDS", "Check", "Outcome", "Report", "Result", "checks_of", "run_check", "verify"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"moereg.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
