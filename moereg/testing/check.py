"""One check of one cell, as a value that can be sent to another process and run there; its outcome, and the report.

pytest must not rewrite its assertions' messages: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from moereg.errors import ArgumentError, described, stops_the_process
from moereg.platforms import Platform, current_platform
from moereg.registry import BackendCell
from moereg.selection.loader import load_backends
from moereg.selection.modules import import_modules
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing import checks, gradients
from moereg.testing.cases import Case, is_imitated, machine, runnable_platform, running_as
from moereg.testing.drawing import DrawnLayer, check_drawn
from moereg.testing.guards import poisoned_empty


@dataclasses.dataclass(frozen=True)
class CellName:
    """The identity of a cell across processes: names of its backend, class, schemes and platform rules.

    `number` is its index among cells that are equal in all that and differ in narrowed facts.
    """

    backend: str
    experts: str
    schemes: tuple[str, ...]
    rules: tuple[str, ...]
    number: int = 0

    @classmethod
    def of_all(cls, cells: tuple[BackendCell, ...]) -> dict[CellName, BackendCell]:
        """Cells by name, in order."""
        counts: collections.Counter[tuple[object, ...]] = collections.Counter()
        found = {}
        for cell in cells:
            schemes = tuple(scheme.name for scheme in cell.schemes)
            key = (cell.name, cell.class_name, schemes, tuple(rule.text for rule in cell.rules))
            found[cls(*key, counts[key])] = cell
            counts[key] += 1
        return found

    def find(self) -> BackendCell:
        """Finds the cell in this process's registry; ArgumentError if it is not there."""
        cell = self.of_all(load_backends().cells).get(self)
        if cell is None:
            raise ArgumentError(f"no cell {self} is registered here; import the module that registers it")
        return cell

    def __str__(self) -> str:
        """Text such as `SomeExperts cpu,cuda:sm80+ unquantized`; long lists of schemes are cut."""
        schemes = self.schemes[0] if len(self.schemes) == 1 else f"{self.schemes[0]}+{len(self.schemes) - 1}"
        number = f" #{self.number + 1}" if self.number else ""
        return f"{self.experts} {','.join(self.rules)} {schemes}{number}"


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise of a cell, for one problem if it needs one. Can be pickled.

    Attributes:
        cell: The cell to check.
        kind: One of `CHECK_KINDS`.
        argument: The kind's argument as JSON: a problem, a scheme, which layers are drawn, or nothing.
        platform: The platform to run as; if empty, the cell's own choice for this machine.
        modules: Modules or files to import first, which register the backend if no entry point does.
    """

    cell: CellName
    kind: str
    argument: str = "null"
    platform: str = ""
    modules: tuple[str, ...] = ()

    @classmethod
    def make(
        cls, cell: CellName, kind: str, argument: object = None, platform: str = "", modules: tuple[str, ...] = ()
    ) -> Check:
        """Makes a check from an argument that is not yet JSON."""
        return cls(cell, kind, json.dumps(argument, sort_keys=True), platform, modules)

    @property
    def id(self) -> str:
        """Unique within a backend's suite and equal in each run: `numbers/SomeExperts/cpu/unquantized/...`."""
        number = [str(self.cell.number)] if self.cell.number else []
        parts = [self.kind, self.cell.experts, "+".join(self.cell.rules), self.cell.schemes[0], *number]
        argument = json.loads(self.argument)
        if self.kind == "drawn":
            parts.append("given" if "layer" in argument else f"seed{argument['seed']}")
        elif argument is not None:
            is_layer = "problem" in argument
            name = MoEProblem.from_dict(argument["problem"]) if is_layer else argument["name"]
            parts.append(str(name).replace(",", "") if is_layer else str(name))
        return "/".join(parts).replace(" ", "-")

    def run(self, tell: Callable[[tuple[int, DrawnLayer]], object] = lambda told: None) -> None:
        """Runs the check in this process; calls `tell` with each drawn layer, and its number, before it is checked.

        Raises:
            AssertionError: The cell breaks its promise or its code raised; one line.
        """
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(checks.watched_imports()) if self.kind == "deciding" else None
            import_modules(self.modules)
            stack.enter_context(running_as(chosen_machine(self.platform)))
            cell = stack.enter_context(ready_to_run(self.cell.find(), has_threads=self.kind in _THREADED_KINDS))
            if self.kind in _POISONED_KINDS:
                stack.enter_context(poisoned_empty())
            try:
                argument: Any = json.loads(self.argument) if watch is None else watch
                CHECK_KINDS[self.kind](cell, {**argument, "tell": tell} if self.kind == "drawn" else argument)
            except BaseException as error:
                if stops_the_process(error) or isinstance(error, AssertionError):
                    raise
                raise AssertionError(described(error)) from error


def chosen_machine(name: str) -> Platform | None:
    """The named platform for this machine: itself, its CPU, or one of another device, which classes may imitate.

    Beside a GPU, `TRITON_INTERPRET=1` means its CPU where none is named: interpreted kernels are none of a GPU.
    """
    if not name:
        if os.environ.get("TRITON_INTERPRET") != "1" or current_platform().device_type != "cuda":
            return None
        name = "cpu"
    here, named = current_platform(), Platform.from_name(name)
    if named.kind == here.kind and named.arch in ("", here.arch):
        return here
    if named.kind == "cpu":
        return Platform(named.kind, named.arch, versions=here.versions, probed=True)
    if named.device_type == here.device_type:
        raise ArgumentError(
            f"a kernel for {named} needs such a machine, and this one is {here}; leave the platform out, or go there"
        )
    return named


@contextlib.contextmanager
def ready_to_run(cell: BackendCell, has_threads: bool = False) -> Iterator[BackendCell]:
    """Prepares torch and Triton's interpreter for a cell's checks; most are too small for many threads."""
    num_threads = torch.get_num_threads()
    if not has_threads and (machine().device_type == "cpu" or is_imitated(cell)):
        torch.set_num_threads(1)
    if is_imitated(cell) and os.environ.get("TRITON_INTERPRET") == "1":
        from moereg.testing.interpreter import patch_interpreter

        patch_interpreter()
    try:
        yield cell
    finally:
        torch.set_num_threads(num_threads)


def _case(cell: BackendCell, argument: Mapping[str, Any]) -> Case:
    platform = runnable_platform(cell)
    assert platform is not None, "this machine cannot run the cell"
    return Case(cell, platform, MoEProblem.from_dict(argument["problem"]))


def _check_drawn(cell: BackendCell, argument: Mapping[str, Any]) -> None:
    if "layer" not in argument:
        return check_drawn(cell, lambda layer: check_layer(_case(cell, layer.to_dict()), layer), **argument)
    layer = DrawnLayer.from_dict(argument["layer"])
    argument["tell"]((1, layer))
    case = layer.case()  # Cells that differ only in narrowed facts have the same name in a layer.
    assert case is not None, "this machine cannot run the layer"
    check_layer(case, layer)


def check_layer(case: Case, layer: DrawnLayer) -> None:
    """A drawn layer's two calls give right results, and right gradients if the class computes them."""
    checks.check_case(case, layer, num_calls=2)
    gradients.check_drawn_gradients(case, layer)


CHECK_KINDS: Final[dict[str, Callable[[BackendCell, Any], None]]] = {
    "deciding": checks.check_deciding,
    "rejections": lambda cell, argument: checks.check_rejections(cell),
    "workspaces": lambda cell, argument: checks.check_workspaces_grow(cell),
    "permute": lambda cell, argument: checks.check_permute(cell),
    "numbers": lambda cell, argument: checks.check_numbers(_case(cell, argument), argument["is_first"]),
    "faults": lambda cell, argument: checks.check_faults_are_caught(cell, QuantScheme.from_dict(argument)),
    "rounding": lambda cell, argument: checks.check_activations_are_rounded(cell, QuantScheme.from_dict(argument)),
    "gradients": lambda cell, argument: gradients.check_gradients(_case(cell, argument), argument["is_first"]),
    "gradient_faults": lambda cell, argument: gradients.check_gradient_faults(cell),
    "training": lambda cell, argument: gradients.check_training(cell),
    "reload": lambda cell, argument: checks.check_reload(cell),
    "equal_bits": lambda cell, argument: checks.check_equal_bits(cell),
    "batch_invariance": lambda cell, argument: checks.check_batch_invariance(_case(cell, argument)),
    "graph": lambda cell, argument: checks.check_graph_replay(cell),
    "synchronization": lambda cell, argument: checks.check_no_synchronization(cell),
    "compile": lambda cell, argument: checks.check_compiles(cell),
    "drawn": _check_drawn,
}
"""Every kind of check in running order, cheap and decisive ones first for every cell."""

GRADIENT_KINDS: Final = ("gradients", "gradient_faults", "training")
"""Kinds that fail if gradients are wrong, and only then."""

# A thread's share of the work may depend on the number of tokens.
_THREADED_KINDS: Final = ("equal_bits", "batch_invariance")

# Poisoning would disturb `compile`, which inspects a compiled graph, and GPU kinds that watch launches.
_POISONED_KINDS: Final = (
    *("permute", "numbers", "faults", "rounding", "reload", "drawn"),
    *GRADIENT_KINDS,
)


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
        unchecked: What cells that run here promise and this machine cannot check.
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
