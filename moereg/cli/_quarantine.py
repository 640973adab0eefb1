"""`moereg verify --quarantine` and `--unquarantine`: adds and lifts quarantine records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from moereg.cli._output import picked
from moereg.evidence.on_machine import QUARANTINE, Quarantine, QuarantineRecord, record_keys
from moereg.platforms import current_platform
from moereg.registry import BackendCell
from moereg.selection.loader import list_cells, load_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing.check import GRADIENT_KINDS, IMPORT, CellName, Check, Outcome, Report, Result

_SHOWN: Final = "backend", "experts", "rule", "scheme", "trains", "failure", "date"


@dataclasses.dataclass(frozen=True)
class Change:
    """Records added and lifted by a command, and failed cells that were left, with the reason.

    `lifts` is the backend whose records should be lifted; empty if a report caused the change.
    """

    added: tuple[QuarantineRecord, ...] = ()
    lifted: tuple[QuarantineRecord, ...] = ()
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lifts: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(QUARANTINE.path()),
            "added": [picked(record, *_SHOWN) for record in self.added],
            "lifted": [picked(record, *_SHOWN) for record in self.lifted],
            "left": dict(self.left),
        }

    def __str__(self) -> str:
        lines = [f"quarantined here: {_named(record)}" for record in self.added]
        lines += [f"no longer quarantined: {_named(record)}" for record in self.lifted]
        lines += [f"not quarantined: {cell}, {reason}" for cell, reason in self.left.items()]
        nothing = f"{self.lifts} is not quarantined here" if self.lifts else "nothing is quarantined or lifted"
        return "\n".join(lines or [nothing])


def _named(record: QuarantineRecord) -> str:
    return f"{record.backend} ({record.experts}, {record.rule}), {record.computed}"


def quarantine_failures(
    report: Report, is_whole: bool = True, again: Callable[[Check], Outcome] | None = None
) -> Change:
    """Quarantines the schemes of cells that failed here, and lifts cells that passed all of their checks.

    What failed in checks of gradients alone is quarantined for problems with gradients alone.

    Unless all checks ran (`is_whole`), nothing is lifted. `again` reruns a check that timed out or crashed, alone and
    with more time, since one time limit says little on a busy machine, and another check may have damaged the process;
    without it such checks quarantine nothing.
    """
    at_import = [result.outcome for result in report.failures if result.check.cell.experts == IMPORT]
    if at_import:
        ended = at_import[0].message
        reason = f"loading ends the process: {ended}; uninstall what does that, or leave it out of MOEREG_PLUGINS"
        if at_import[0].status == "timed_out":
            reason = f"loading took too long: {ended}; give it more --check-seconds"
        return Change(left={report.backend: reason})
    here, known = current_platform(), CellName.of_all(load_backends().cells)
    added: dict[tuple[str, ...], QuarantineRecord] = {}
    left: dict[str, str] = {}
    for result in report.failures:
        name, check = result.check.cell, result.check
        cell = known.get(name)
        if cell is None:
            left[str(name)] = "it is registered where its module is imported, and not by an installed wheel"
        elif name in report.imitated or name in report.idle or cell.rule_for(here) is None:
            left[str(name)] = f"selection on {here} does not offer it"
        else:
            trains = check.kind in GRADIENT_KINDS
            found = Quarantine(added.values())
            schemes = [scheme for scheme in _schemes(result, cell) if not found.record(cell, scheme, here, trains)]
            outcome = result.outcome
            if schemes and outcome.status in ("timed_out", "crashed"):
                # Where it draws some, the very layer that failed: a search would draw no further than its time.
                layer = outcome.layer
                argument = check.argument if layer is None else json.dumps({"layer": layer.to_dict()})
                alone = dataclasses.replace(check, argument=argument)
                outcome = Outcome("passed") if again is None else again(alone)
            if schemes and not outcome.is_failure:
                left[str(name)] = f"{check.id} {result.outcome.status.replace('_', ' ')} once, and passes alone"
                continue
            failure = f"{check.id} {outcome.status.replace('_', ' ')}: {outcome.message}"
            for scheme in schemes:  # A scheme keeps its first failure.
                record = QuarantineRecord.failed(cell, scheme, here, failure, trains)
                added[record.key] = record
    passed = (known[name] for name in report.verified_cells if is_whole and name in known)
    keys = {key for cell in passed for key in record_keys(cell, here)}
    lifted = QUARANTINE.change(added.values(), lambda record: record.key in keys)
    return Change(tuple(added.values()), lifted, left)


def _schemes(result: Result, cell: BackendCell) -> tuple[QuantScheme, ...]:
    """The schemes of a cell that a failure concerns: all, unless it was about one in particular."""
    argument = json.loads(result.check.argument)
    stored = None
    if result.check.kind == "drawn":
        stored = None if result.outcome.layer is None else result.outcome.layer.problem.quant
    elif isinstance(argument, Mapping) and "problem" in argument:
        stored = MoEProblem.from_dict(argument["problem"]).quant
    elif argument is not None:
        stored = QuantScheme.from_dict(argument)
    computed = None if stored is None else cell.scheme_for(stored)
    return cell.schemes if computed is None else (computed,)


def lift_quarantine(backend: str) -> Change:
    """Lifts all of a backend's records on this machine."""
    here = current_platform()
    lifted = QUARANTINE.change(lift=lambda record: record.backend == backend and record.is_from(here))
    if not lifted:
        list_cells(backend)
    return Change(lifted=lifted, lifts=backend)
