"""Former module names, still imported by installed plugins, older code and exported programs."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["FORMER_NAMES", "resolve_former_names"]

FORMER_NAMES: Final = {
    "moereg.activations": "moereg.spec.activations",
    "moereg.agreement": "moereg.prepare_finalize.ranks_agree",
    "moereg.ambient": "moereg.runtime.torch_state",
    "moereg.backend_calls": "moereg.layer.backend_calls",
    "moereg.backends.flashinfer_int4_moe": "moereg.backends.flashinfer_moe",
    "moereg.backends._flashinfer.more_sets": "moereg.backends._flashinfer.building",
    "moereg.balancing": "moereg.prepare_finalize.eplb",
    "moereg.building": "moereg.experts",
    "moereg.call_checks": "moereg.layer.checks",
    "moereg.canonical": "moereg.weights.expert_weights",
    "moereg.cli._rank": "moereg.tuning.over_ranks",
    "moereg.compiled": "moereg.runtime.torch_op",
    "moereg.config_entries": "moereg.routing.config_entries",
    "moereg.decide": "moereg.selection.decide",
    "moereg.digest": "moereg.evidence.code_digest",
    "moereg.discovery": "moereg.plugins.loader",
    "moereg.expert_moves": "moereg.layer.move_experts",
    "moereg.expert_placement": "moereg.prepare_finalize.expert_placement",
    "moereg.exported": "moereg.nn.export_op",
    "moereg.facts": "moereg.spec.facts",
    "moereg.graph_pools": "moereg.runtime.graph_pools",
    "moereg.in_turn": "moereg.layer.in_turn",
    "moereg.inversion": "moereg.weights.unpermute",
    "moereg.layouts": "moereg.weights.layouts",
    "moereg.lazy_torch": "moereg.runtime.lazy_torch",
    "moereg.machine": "moereg.selection.requirements",
    "moereg.memory": "moereg.runtime.memory",
    "moereg.module": "moereg.nn.module",
    "moereg.module_state": "moereg.nn.state",
    "moereg.moe_kernel": "moereg.layer.kernel",
    "moereg.movement": "moereg.layer.movement",
    "moereg.one_expert": "moereg.layer.one_expert",
    "moereg.overlap": "moereg.prepare_finalize.overlap",
    "moereg.parallel": "moereg.layer.plan",
    "moereg.placement": "moereg.layer.expert_map",
    "moereg.problem": "moereg.spec.problem",
    "moereg.python_process": "moereg.runtime.python_process",
    "moereg.quant": "moereg.spec.quant_schemes",
    "moereg.quarantine": "moereg.evidence.quarantine",
    "moereg.quantize.element": "moereg.quantize.elements",
    "moereg.quantize.float4": "moereg.quantize.elements",
    "moereg.quantize.float8": "moereg.quantize.elements",
    "moereg.quantize.integers": "moereg.quantize.elements",
    "moereg.quantize.nibbles": "moereg.quantize.elements",
    "moereg.quantize.scales": "moereg.quantize.groups",
    "moereg.reasons": "moereg.spec.reasons",
    "moereg.reference": "moereg.numerics.reference",
    "moereg.request": "moereg.selection.request",
    "moereg.shapes": "moereg.spec.model_shapes",
    "moereg.tensor_state": "moereg.weights.versions",
    "moereg.testing.deciding": "moereg.testing.checks",
    "moereg.testing.ledger": "moereg.evidence.ledger",
    "moereg.testing.modules": "moereg.plugins.modules",
    "moereg.testing.pointers": "moereg.testing.interpreter",
    "moereg.testing.provenance": "moereg.evidence.provenance",
    "moereg.tolerances": "moereg.numerics.tolerances",
    "moereg.tuning.culprits": "moereg.tuning.compare",
    "moereg.tuning.measurement": "moereg.tuning.compare",
    "moereg.tuning.own_calls": "moereg.tuning.compare",
    "moereg.undisturbed": "moereg.runtime.gc_pause",
    "moereg.waiting": "moereg.runtime.progress",
    "moereg.prepare_finalize.standard": "moereg.prepare_finalize.base",
    "moereg.routing.settings": "moereg.routing.configs",
    "moereg.routing.sizes": "moereg.routing.topk",
    "moereg.layer.warm_up.counts": "moereg.layer.warm_up.result",
    "moereg.warm_up": "moereg.layer.warm_up",
    "moereg.weight_checks": "moereg.weights.checks",
    "moereg.workspace": "moereg.runtime.workspace",
}
"""Maps former names to current ones, including submodules of a package."""


def _present_name(name: str) -> str | None:
    """The current name of a former module or its submodule; None if the name is current."""
    former, rest = name, ""
    while former:
        if former in FORMER_NAMES:
            return FORMER_NAMES[former] + rest
        former, _, last = former.rpartition(".")
        rest = f".{last}{rest}"
    return None


class _FormerNames:
    """Returns the renamed module, so that both names are one module.

    A finder and loader without their base classes, which import `tempfile` before the current folder is off the path.
    """

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("moereg.") or _present_name(fullname) is None:
            return None
        loader: Any = self
        return importlib.machinery.ModuleSpec(fullname, loader)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        present = _present_name(spec.name)
        assert present is not None
        module = importlib.import_module(present)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # Python has set the former name's spec.
        former = module.__spec__
        assert former is not None
        module.__spec__ = self._specs.pop(former.name)

    def get_code(self, name: str) -> types.CodeType | None:
        """The code for `python -m` with a former name."""
        present = _present_name(name)
        assert present is not None
        spec = importlib.util.find_spec(present)
        loader: Any = spec.loader if spec is not None else None
        code: types.CodeType | None = loader.get_code(present)
        return code


def resolve_former_names() -> None:
    """Makes imports of former names work."""
    # First, since a former package's submodule would otherwise be found in its folder and run a second time.
    sys.meta_path.insert(0, _FormerNames())
