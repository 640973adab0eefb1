"""Verifies a backend: lists the checks of its cells from the registry, runs them in a worker process, and reports."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from packaging.requirements import Requirement

from moereg.errors import (
    ArgumentError,
    BackendError,
    MoeregError,
    UnknownBackendError,
    described,
    one_line,
    unknown_name_message,
)
from moereg.platforms import Platform, current_platform, torch_device
from moereg.registry import BackendCell
from moereg.runtime.torch_state import AmbientState
from moereg.selection.loader import load_backends, missing_backend
from moereg.selection.modules import import_modules, is_file_name, own_modules, registers, resolved_modules
from moereg.testing import cases
from moereg.testing.cases import accepted_problems, is_imitated, runnable_platform, running_as
from moereg.testing.check import CHECK_KINDS, IMPORT, NO_TIME, CellName, Check, Outcome, Report, Result, chosen_machine
from moereg.testing.drawing import DrawnLayer
from moereg.testing.gradients import gradient_cases
from moereg.testing.worker import CHECK_SECONDS, GPU_CHECK_SECONDS, SHARED_WORKER, Worker

__all__ = ["CHECK_SECONDS", "DRAWN", "Check", "Outcome", "Report", "Result", "checks_of", "run_check", "verify"]

DRAWN: Final = 10
"""Drawn layers per cell if no time limit decides."""

_DRAWN_IMITATED: Final = 3
_MOST_TIMED_OUT: Final = 2

Progress = Callable[[int, int, Result], None]
"""Called after each check with the number run, the number of all, and the result."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """A backend's checks on a machine, except drawn layers, in running order, and the report before they have run."""

    checks: tuple[Check, ...]
    report: Report

    @property
    def running(self) -> tuple[CellName, ...]:
        """Cells that can run here."""
        return tuple(dict.fromkeys(check.cell for check in self.checks if check.cell not in self.report.idle))

    def check(self, cell: CellName, kind: str, argument: object) -> Check:
        """Another check of a cell."""
        like = next(check for check in self.checks if check.cell == cell)
        return Check.make(cell, kind, argument, like.platform, like.modules)

    def drawn(self, cell: CellName, seed: int, num_layers: int | None, seconds: float | None = None) -> Check:
        """The check of a cell's drawn layers, with the arguments of `moereg.testing.drawing.check_drawn`."""
        if num_layers is not None and cell in self.report.imitated:
            num_layers = min(num_layers, _DRAWN_IMITATED)
        return self.check(cell, "drawn", {"seed": seed, "num_layers": num_layers, "seconds": seconds})


def list_suite(name: str, platform: str = "", modules: Sequence[str] = ()) -> Suite:
    """Lists the checks of a backend, as `moereg.testing.checks_of`; of its code runs only the predicates.

    Raises:
        UnknownPlatformError: This torch lacks the machine's device, which is no backend's fault.
    """
    import_modules(modules)
    registry = load_backends()
    names = CellName.of_all(registry.cells)
    wanted = {
        cell_name: cell
        for cell_name, cell in names.items()
        if (cell.name == name if name else any(registers(module, cell) for module in modules))
    }
    if not wanted and not name:
        # A module may decorate a class from another module of its package.
        roots = {module.partition(".")[0] for module in modules if not is_file_name(module)}
        wanted = {key: cell for key, cell in names.items() if cell.experts.__module__.partition(".")[0] in roots}
    if not wanted:
        if (error := missing_backend(name)) is not None:
            raise error
        if not name:
            raise ArgumentError(f"{', '.join(modules)} must register a backend, got none; decorate a class there")
        raise UnknownBackendError(unknown_name_message("backend", name, registry.names))
    found: list[Check] = []
    idle, imitated, seen = {}, set(), set()
    unchecked: dict[str, None] = {}
    machine = chosen_machine(platform)
    with running_as(machine):
        # A platform plugin may claim a device that torch does not have here, which is no backend's fault.
        here = cases.machine()
        torch_device(here if here.probed else current_platform())
        for cell_name, cell in wanted.items():
            if runnable_platform(cell) is None:
                idle[cell_name] = cases.why_not_runnable(cell)
            elif is_imitated(cell):
                imitated.add(cell_name)
            for kind, argument in _promises(cell, cell_name in idle, cell.class_name in seen):
                found.append(Check.make(cell_name, kind, argument, platform, tuple(modules)))
            if cell_name not in idle:
                seen.add(cell.class_name)
                unchecked.update(dict.fromkeys(_unchecked(cell)))
    required = {"torch", *(Requirement(text).name for cell in wanted.values() for text in cell.requires)}
    physical = current_platform()
    versions = physical.versions
    report = Report(
        backend=name,
        platform=str(here),
        # This device imitates another platform; the CPU next to a GPU has no device name here.
        device=here.device_name if here.probed else f"imitated by {physical.device_name}",
        versions={name: versions[name] for name in sorted(required) if name in versions},
        seed=0,
        results=(),
        idle=idle,
        imitated=frozenset(imitated),
        unchecked=tuple(unchecked),
    )
    return Suite(_interleaved(found), report)


def _interleaved(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Orders checks by kind and alternates cells within a kind, so that a short run covers every cell."""
    counts: collections.Counter[tuple[CellName, str]] = collections.Counter()
    keys, order = {}, list(CHECK_KINDS)
    for check in checks:
        keys[check] = (order.index(check.kind), counts[check.cell, check.kind])
        counts[check.cell, check.kind] += 1
    return tuple(sorted(checks, key=keys.__getitem__))


def _promises(cell: BackendCell, is_idle: bool, is_known: bool) -> Iterator[tuple[str, object]]:
    """Kinds and arguments of a cell's checks; of one that cannot run here (`is_idle`) only selection can be checked.

    An earlier cell may have the same class (`is_known`).
    """
    yield "deciding", None
    if is_idle:
        return
    yield "rejections", None
    yield "workspaces", None
    yield "permute", None
    platform = runnable_platform(cell)
    assert platform is not None
    problems = accepted_problems(cell, platform)
    if is_imitated(cell) and is_known:
        # Interpreted kernels are slow, and cells of one class share them.
        problems = list({problem.quant: problem for problem in reversed(problems)}.values())[::-1]
    is_batched = cell.experts.output_form == "per_expert"
    for place, problem in enumerate(problems):
        is_first = place == 0 and not is_known and not is_batched
        yield "numbers", {"problem": problem.to_dict(), "is_first": is_first}
    served = [problem.quant for problem in problems]
    for scheme in cases.fault_schemes(cell):
        if scheme in served:
            yield "faults", dataclasses.asdict(scheme)
    for scheme in cell.schemes:
        if scheme.activation is not None and scheme in served:
            yield "rounding", dataclasses.asdict(scheme)
    trained = [] if is_known and is_imitated(cell) else gradient_cases(cell)
    for place, case in enumerate(trained):
        yield "gradients", {"problem": case.problem.to_dict(), "is_first": place == 0 and not is_known}
    if trained:
        yield "gradient_faults", None
        yield "training", None
    yield "reload", None
    if cell.facts.deterministic and not is_imitated(cell):
        yield "equal_bits", None
    if cell.facts.batch_invariant:
        for problem in cases.invariant_problems(cell, platform):
            yield "batch_invariance", {"problem": problem.to_dict()}
    if _has_device(cell):
        if cell.facts.graph_capture:
            yield "graph", None
        yield "synchronization", None
    yield "compile", None


def _has_device(cell: BackendCell) -> bool:
    """Whether a cell runs here on a device that works beside the host, which can wait for it."""
    platform = runnable_platform(cell)
    return platform is not None and platform.device_type == "cuda" and not is_imitated(cell)


def _unchecked(cell: BackendCell) -> Iterator[str]:
    """The promises of a cell that `_promises` leaves out since this machine cannot check them."""
    if is_imitated(cell) and cell.facts.deterministic:
        yield "equal bits of repeated calls"
    if not _has_device(cell) and any(rule.text != "cpu" for rule in cell.rules):
        yield "that a call never waits for the device"
        if cell.facts.graph_capture:
            yield "capture in a CUDA graph"


def checks_of(
    name: str,
    platform: Platform | str | None = None,
    *,
    modules: Sequence[str] = (),
    num_drawn: int = DRAWN,
    seed: int = 0,
    isolate: bool = True,
) -> tuple[Check, ...]:
    """Lists a backend's checks that can run on this machine, without running any.

    Args:
        name: Name of the backend; empty for all that the modules register.
        platform: The platform to run as: this machine, its CPU, or one that experts classes imitate here. If None, each
            cell runs as this machine, or imitates a platform if it can only do that.
        modules: Modules or files to import first, which register the backend if no entry point does.
        num_drawn: Drawn layers per cell; fewer if kernels are interpreted.
        seed: Seed of the drawn layers.
        isolate: Whether to import the backend and run its predicates in a worker process, not in this one.

    Raises:
        UnknownNameError: No backend or platform has that name.
        PluginError: The backend's plugin did not load.
        BackendError: The backend's import or predicates ended the worker process or took too long.
    """
    asked = name, str(platform or ""), resolved_modules(modules) or own_modules(name, is_needed=isolate)
    listed = _worker(isolate).ask(list_suite, *asked, seconds=_check_seconds(None))
    if listed.outcome is not None:
        raise BackendError(f"the checks of {name} cannot be listed: {listed.outcome.message}")
    suite: Suite = listed.value
    return (*suite.checks, *(suite.drawn(cell, seed, num_drawn) for cell in suite.running if num_drawn))


def run_check(check: Check, isolate: bool = True, seconds: float | None = None) -> Outcome:
    """Runs one check; a crash or a hang of its process is an outcome.

    Args:
        check: One of `checks_of`.
        isolate: Whether it runs in a worker process, which later checks share while it lives. Without, a crash ends
            this process, and it takes its time.
        seconds: Time that it gets; `CHECK_SECONDS` where None, and `GPU_CHECK_SECONDS` beside a GPU.
    """
    return _run(_worker(isolate), check, _check_seconds(seconds))


def run_again(check: Check, isolate: bool = True, seconds: float | None = None) -> Outcome:
    """Like `run_check`, in a process that has run no other check, with twice the time."""
    return _run(_worker(isolate), check, 2 * _check_seconds(seconds), is_alone=True)


def run_here(tell: Callable[[Any], object], check: Check) -> Outcome:
    """Runs a check in this process; tells each drawn layer before it is checked."""
    tell((0, None))
    state = AmbientState.now()
    try:
        try:
            check.run(tell)
        finally:
            changed = state.restore()
        assert not changed, f"it changed torch's state for everybody ({', '.join(changed)})"
    except AssertionError as error:
        cause = error.__cause__
        message = one_line(str(cause if isinstance(cause, BackendError) else error)).partition("; do without it")[0]
        return Outcome("failed", message or "an assertion without a message")
    except MoeregError as error:
        return Outcome("failed", described(error))
    return Outcome("passed")


def _worker(isolate: bool) -> Worker:
    return SHARED_WORKER if isolate else Worker(is_isolated=False)


def _check_seconds(seconds: float | None) -> float:
    if seconds is not None:
        return seconds
    return GPU_CHECK_SECONDS if torch.cuda.is_available() else CHECK_SECONDS


def _run(worker: Worker, check: Check, seconds: float, is_alone: bool = False) -> Outcome:
    if check.kind == "drawn" and importlib.util.find_spec("hypothesis") is None:
        return Outcome("skipped", "hypothesis, which draws layers, is not installed: pip install 'moereg[verify]'")
    # A kernel that ran has imported what choosing must not import.
    fresh = is_alone or (worker.has_run and check.kind == "deciding")
    answer = worker.ask(run_here, check, seconds=seconds, in_steps=True, fresh=fresh)
    assert answer.outcome is not None, "a check has an outcome"
    worker.has_run = worker.has_run or check.kind != "deciding"
    number, layer = answer.step or (0, None)
    if check.kind == "drawn" and not number and answer.outcome.status == "passed":
        return Outcome("skipped", f"no layer was drawn: {NO_TIME}, or the cell refuses what its facts allow")
    return dataclasses.replace(answer.outcome, num_layers=number, layer=layer if answer.outcome.is_failure else None)


def verify(
    name: str = "",
    platform: Platform | str | None = None,
    isolate: bool = True,
    seconds: float | None = None,
    *,
    seed: int = 0,
    modules: Sequence[str] = (),
    only: Sequence[str] = (),
    check_seconds: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Runs the conformance kit on one backend.

    Args:
        name: Name of the backend; optional if `modules` are given.
        platform: As in `checks_of`.
        isolate: Whether to import and run the backend only in a worker process, so that a crash or a hang ends that
            process and not this one.
        seconds: Time for everything. Layers are drawn until it is up; checks that do not fit are skipped. If None, all
            checks run, with `DRAWN` drawn layers per cell.
        seed: Equal seeds draw equal layers.
        modules: As in `checks_of`.
        only: Texts of which a check's id must contain one, or lines of JSON of drawn layers; all checks where empty.
        check_seconds: Time that each check gets, as in `run_check`, and each drawn layer.
        progress: Called after each check.

    Returns:
        The report: `passed` is False if a check failed, None if this machine can run none of the cells.

    Raises:
        UnknownNameError: No backend or platform has that name.
        PluginError: The backend's plugin did not load.
        ArgumentError: A module cannot be imported, registers nothing, or cannot be imported by another process.
    """
    asked = name, str(platform or ""), resolved_modules(modules) or own_modules(name, is_needed=isolate)
    start, limit = time.monotonic(), _check_seconds(check_seconds)
    results: list[Result] = []
    worker = Worker(is_isolated=isolate)
    try:
        listed = worker.ask(list_suite, *asked, seconds=limit)
        suite: Suite = listed.value or Suite((), Report(name, "", "", {}, seed, (), {}))
        if listed.outcome is not None:
            # The backend's import or predicates ended the process.
            results.append(Result(Check.make(CellName(name, IMPORT, ("*",), ("*",)), "deciding"), listed.outcome))
        chosen = _chosen(suite, seed, only)
        for place, check in enumerate(chosen):
            left = math.inf if seconds is None else start + seconds - time.monotonic()
            statuses = [result.outcome.status for result in results if result.check.cell == check.cell]
            if left <= 0:
                outcome = Outcome("skipped", NO_TIME)
            elif statuses.count("timed_out") >= _MOST_TIMED_OUT:
                outcome = Outcome("skipped", f"{_MOST_TIMED_OUT} checks of this cell ran out of time")
            else:
                if check == suite.drawn(check.cell, seed, DRAWN) and seconds is not None:
                    check = suite.drawn(check.cell, seed, None, left / (len(chosen) - place))
                outcome = _run(worker, check, limit)
            results.append(Result(check, outcome))
            if progress is not None:
                progress(place + 1, len(chosen), results[-1])
    finally:
        worker.stop()
    cells = [*(result.check.cell for result in results), *suite.report.idle]
    return dataclasses.replace(
        suite.report,
        backend=name or ",".join(dict.fromkeys(cell.backend for cell in cells)),
        seed=seed,
        results=tuple(results),
        seconds=time.monotonic() - start,
        rerun=_rerun(*asked, seed, isolate),
    )


def _chosen(suite: Suite, seed: int, only: Sequence[str]) -> list[Check]:
    """The checks that the texts name; all without a text."""
    # The id of drawn layers ends with their seed, which may be another run's.
    seeds = dict.fromkeys((seed, *(int(found[1]) for text in only if (found := re.search(r"seed(\d+)$", text)))))
    known = [*suite.checks, *(suite.drawn(cell, one, DRAWN) for one in seeds for cell in suite.running)]
    chosen = [check for check in known if not only or any(text in check.id for text in only)]
    for text in only:
        if text.startswith("{"):
            layer = DrawnLayer.from_json(text)
            name = layer.experts, layer.rule
            cells = [cell for cell in suite.running if (cell.experts, cell.rules[0]) == name]
            cells = [cell for cell in cells if layer.computes in cell.schemes]
            if not cells:
                raise ArgumentError(
                    f"no cell that runs here is that of the layer {text}; choose the platform it was drawn for"
                )
            chosen.append(suite.check(cells[0], "drawn", {"layer": layer.to_dict()}))
    if only and suite.running and not chosen:
        raise ArgumentError(unknown_name_message("check", ", ".join(only), {check.kind for check in suite.checks}))
    return chosen


def _rerun(name: str, platform: str, modules: Sequence[str], seed: int, isolate: bool) -> str:
    """The beginning of a command line that reruns checks."""
    folder = os.path.join(os.getcwd(), "")
    shortest = [each.removeprefix(folder) if is_file_name(each) else each for each in modules]
    # A file alone says what is verified.
    is_file = not name and len(modules) == 1 and is_file_name(modules[0])
    options = [shlex.quote(shortest[0])] if is_file else [f"--module {shlex.quote(each)}" for each in shortest]
    options += [f"--platform {platform}"] if platform else []
    options += [f"--seed {seed}"] if seed else []
    options += [] if isolate else ["--no-isolate"]
    return " ".join(["moereg verify", *([name] if name else []), *options])
