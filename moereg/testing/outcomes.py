"""Outcomes of checks, and the report of them."""

from __future__ import annotations

import collections
import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, Final

from moereg.testing.check import CellName, Check
from moereg.testing.drawing import DrawnLayer

SCHEMA: Final = 1

STATUSES: Final = ("passed", "failed", "crashed", "timed_out", "skipped")
"""Kept its promise; broke it; ended its process; exceeded its time limit; was not run, for the given reason."""

IMPORT: Final = "(import)"
"""Class name for a backend whose import or predicates ended the process or took too long."""

NO_TIME: Final = "no time left; give it more --seconds"
"""The message of a check that was skipped because the report's time was over."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one check.

    Attributes:
        status: One of `STATUSES`.
        message: One line; empty if it passed.
        seconds: Time that it took.
        output: The end of the backend's standard output and standard error, if recorded.
        printed: The beginning of its standard output, as one line, if recorded.
        layer: The drawn layer that failed.
        num_layers: How many layers were drawn.
    """

    status: str
    message: str = ""
    seconds: float = 0.0
    output: str = ""
    printed: str = ""
    layer: DrawnLayer | None = None
    num_layers: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether the cell broke its promise."""
        return self.status in ("failed", "crashed", "timed_out")


@dataclasses.dataclass(frozen=True)
class Result:
    """One check with its outcome."""

    check: Check
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of a backend's checks on one machine.

    Attributes:
        backend: Its name, or several, joined by commas, if modules were named instead.
        platform, device, versions: The machine.
        seed: Seed of the drawn layers.
        results: Every check with its outcome, in running order.
        idle: Cells that cannot run on this machine, with their reasons.
        imitated: Cells that ran only by imitating another platform, which is no evidence for that platform.
        seconds: Total time.
        rerun: The beginning of a command line that reruns checks.
    """

    backend: str
    platform: str
    device: str
    versions: Mapping[str, str]
    seed: int
    results: tuple[Result, ...]
    idle: Mapping[CellName, str]
    imitated: frozenset[CellName] = frozenset()
    seconds: float = 0.0
    rerun: str = ""
    unchecked: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Result, ...]:
        """Results that are failures."""
        return tuple(result for result in self.results if result.outcome.is_failure)

    @property
    def passed(self) -> bool | None:
        """Whether every check that ran passed; None if no cell can run here."""
        if self.failures:
            return False
        ran = [result for result in self.results if result.outcome.status == "passed"]
        return True if any(result.check.cell not in self.idle for result in ran) else None

    @property
    def has_no_time(self) -> bool:
        """Whether cells that can run here have no results because time ran out."""
        return self.passed is None and any(
            result.outcome.message == NO_TIME and result.check.cell not in self.idle for result in self.results
        )

    @property
    def cells(self) -> tuple[CellName, ...]:
        """All cells: those that ran, in registration order, then those that cannot run here."""
        return tuple(dict.fromkeys([*(result.check.cell for result in self.results), *self.idle]))

    @property
    def verified_cells(self) -> dict[CellName, int]:
        """Cells that ran natively, passed everything and skipped nothing, with the number of their checks."""
        found: dict[CellName, int] = {}
        for cell in self.cells:
            own = [result.outcome.status for result in self.results if result.check.cell == cell]
            if cell not in self.idle and cell not in self.imitated and own and set(own) == {"passed"}:
                found[cell] = len(own)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings: unexpected output of the backend on standard output."""
        notes = []
        for cell in self.cells:
            printed = [result for result in self.results if result.check.cell == cell and result.outcome.printed]
            if printed:
                times = f"in {len(printed)} checks" if len(printed) > 1 else f"in the check {printed[0].check.kind}"
                notes.append(
                    f"{cell} writes to standard output {times}, where programs print results: "
                    f"{printed[0].outcome.printed!r}; use logging or standard error"
                )
        return tuple(notes)

    def rerun_line(self, result: Result) -> str:
        """The command that reruns one check."""
        if result.check.cell.experts == IMPORT:
            return self.rerun
        return f"{self.rerun} --check {shlex.quote(str(result.outcome.layer or result.check.id))}"

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg verify --json` prints."""
        counts = collections.Counter((result.check.cell, result.outcome.status) for result in self.results)
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "platform": self.platform,
            "device": self.device,
            "versions": dict(self.versions),
            "seed": self.seed,
            "passed": self.passed,
            "seconds": self.seconds,
            "cells": [
                {
                    "backend": cell.backend,
                    "experts": cell.experts,
                    "quant_schemes": list(cell.schemes),
                    "platforms": list(cell.rules),
                    "runs": "no" if cell in self.idle else "imitated" if cell in self.imitated else "natively",
                    "reason": self.idle.get(cell),
                    "counts": {status: counts[cell, status] for status in STATUSES},
                }
                for cell in self.cells
            ],
            "results": [self._result(result) for result in self.results],
            "unchecked": list(self.unchecked),
            "notes": list(self.notes),
        }

    def _result(self, result: Result) -> dict[str, Any]:
        outcome = result.outcome
        return {
            "check": result.check.id,
            "kind": result.check.kind,
            "cell": self.cells.index(result.check.cell),
            "status": outcome.status,
            "message": outcome.message or None,
            "seconds": outcome.seconds,
            "output": (outcome.output or None) if outcome.is_failure else None,
            "rerun": self.rerun_line(result) if outcome.is_failure else None,
            "layer": None if outcome.layer is None else outcome.layer.to_dict(),
        }
