"""Verifies a backend: runs the checks of its cells one at a time, and reports on them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from moereg.errors import ArgumentError, BackendError, unknown_name_message
from moereg.platforms import Platform
from moereg.plugins.modules import is_file_name, own_modules, resolved_modules
from moereg.testing.check import GIVEN, CellName, Check
from moereg.testing.diagnosis import causes_in, split_message
from moereg.testing.drawing import DrawnLayer
from moereg.testing.listing import Suite, draw_check, list_suite, simpler_checks
from moereg.testing.outcomes import IMPORT, NO_TIME, Outcome, Report, Result
from moereg.testing.workers import CHECK_SECONDS, GPU_CHECK_SECONDS, Answer, Here, Worker, run_here, shared_worker

__all__ = ["CHECK_SECONDS", "DRAWN", "Check", "Outcome", "Report", "Result", "checks_of", "run_check", "verify"]

DRAWN: Final = 10
"""Drawn layers per cell if no time limit decides."""

_DRAWN_IMITATED: Final = 3
_MOST_SIMPLER: Final = 40
_SIMPLER_SECONDS: Final = 30.0
_BLAME_SECONDS: Final = 60.0
_MOST_TIMED_OUT: Final = 2

_LABEL: Final = re.compile(r"seed(\d+)-(\d+)((?:\.\d+)*)")
"""The end of a drawn layer's id: its seed, its number, and how it was made simpler."""

Progress = Callable[[int, int, Result], None]
"""Called after each check with the number run, the number known, and the result."""


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
    worker = shared_worker() if isolate else Here()
    names = resolved_modules(modules) or own_modules(name, is_needed=isolate)
    return _Run(worker, str(platform or ""), names, seed, _check_seconds(None)).checks(name, num_drawn)


def run_check(check: Check, isolate: bool = True, seconds: float | None = None) -> Outcome:
    """Runs one check; a crash or a hang of its process is an outcome.

    Args:
        check: One of `checks_of`.
        isolate: Whether it runs in a worker process, which later checks share while it lives. Without, a crash ends
            this process, and it takes its time.
        seconds: Time that it gets; `CHECK_SECONDS` where None, and `GPU_CHECK_SECONDS` beside a GPU.
    """
    return _run(shared_worker() if isolate else Here(), check, _check_seconds(seconds))[0]


def run_again(check: Check, isolate: bool = True, seconds: float | None = None) -> Outcome:
    """Like `run_check`, in a process that has run no other check, with twice the time."""
    worker = shared_worker() if isolate else Here()
    return _run(worker, check, 2 * _check_seconds(seconds), is_alone=True)[0]


def _check_seconds(seconds: float | None) -> float:
    if seconds is not None:
        return seconds
    return GPU_CHECK_SECONDS if torch.cuda.is_available() else CHECK_SECONDS


def _run(worker: Worker | Here, check: Check, seconds: float, is_alone: bool = False) -> tuple[Outcome, int]:
    """A check's outcome, and how many others its process had run if it crashed there but passes alone."""
    # Importing is part of choosing, so that check must see it.
    is_first = is_alone or (check.kind == "deciding" and worker.is_isolated)
    answer = worker.ask(run_here, check, seconds=seconds, fresh=is_first)
    outcome = _outcome_of(answer)
    if outcome.status == "crashed" and answer.before:
        # Another check may have damaged the process.
        alone = _outcome_of(worker.ask(run_here, check, seconds=seconds, fresh=True))
        if alone.status != "passed":
            return alone, 0
        message = f"{outcome.message}, after {answer.before} other checks in that process; alone it passes"
        return dataclasses.replace(outcome, message=message, passes_alone=True), answer.before
    return outcome, 0


def _outcome_of(answer: Answer[Outcome]) -> Outcome:
    assert answer.outcome is not None, "a check has an outcome"
    return answer.outcome


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
        only: Texts of which a check's id must contain one, ids of drawn layers or their ends, such as `seed0-3`, or
            lines of JSON of drawn layers; all checks where empty.
        check_seconds: Time that each check gets, as in `run_check`.
        progress: Called after each check.

    Returns:
        The report: `passed` is False if a check failed, None if this machine can run none of the cells.

    Raises:
        UnknownNameError: No backend or platform has that name.
        PluginError: The backend's plugin did not load.
        ArgumentError: A module cannot be imported, registers nothing, or cannot be imported by another process.
    """
    worker = Worker() if isolate else Here()
    names = resolved_modules(modules) or own_modules(name, is_needed=isolate)
    run = _Run(worker, str(platform or ""), names, seed, _check_seconds(check_seconds), progress)
    try:
        return run.report(name, tuple(only), seconds)
    finally:
        worker.stop()


@dataclasses.dataclass
class _Run:
    """The state of one verification."""

    _worker: Worker | Here
    _platform: str
    _modules: tuple[str, ...]
    _seed: int
    _check_seconds: float
    _progress: Progress | None = None

    def __post_init__(self) -> None:
        self._results: list[Result] = []
        self._asked: list[Check] = []
        self._start = time.monotonic()
        self._deadline = float("inf")
        self._has_drawn: set[CellName] = set()
        self._not_drawn: dict[Check, Outcome] = {}

    def checks(self, name: str, num_drawn: int) -> tuple[Check, ...]:
        suite = self._list(name)
        if suite is None:
            raise BackendError(f"the checks of {name} cannot be listed: {self._results[0].outcome.message}")
        drawn = [
            self._draw(cell, number) for cell in suite.running for number in range(_num_drawn(suite, cell, num_drawn))
        ]
        return (*suite.checks, *(check for check in drawn if check is not None))

    def report(self, name: str, only: tuple[str, ...], seconds: float | None) -> Report:
        if seconds is not None:
            self._deadline = self._start + seconds
        suite = self._list(name)
        if suite is None:
            return self._made(name, Suite("", "", {}, (), {}, frozenset()))
        chosen = [check for check in suite.checks if not only or any(text in check.id for text in only)]
        layers = [self._layer_check(suite, text) for text in only if text.startswith("{")]
        layers += [check for text in only for check in self._named(suite, text)]
        only_drawn = tuple(text for text in only if not _LABEL.fullmatch(text.rpartition("/")[2]))
        num_drawn = 0 if seconds is not None else sum(_num_drawn(suite, cell, DRAWN) for cell in suite.running)
        total = len(chosen) + len(layers) + (0 if only else num_drawn)
        for check in chosen:
            self._add(check, total)
        made_simpler: set[CellName] = set()
        drawn = self._drawn(suite, seconds, only_drawn) if only_drawn or not only else ()
        for check in itertools.chain(layers, drawn):
            outcome = self._add(check, total)
            if outcome.is_failure and _is_as_drawn(check) and check.cell not in made_simpler:
                made_simpler.add(check.cell)
                self._make_simpler(len(self._results) - 1)
        if not only:
            self._skip_undrawn(suite)
        if only and suite.running and not self._results:
            raise ArgumentError(unknown_name_message("check", ", ".join(only), {check.kind for check in suite.checks}))
        return self._made(name, suite)

    def _list(self, name: str) -> Suite | None:
        asked = name, self._platform, self._modules
        answer: Answer[Suite] = self._worker.ask(list_suite, *asked, seconds=self._check_seconds)
        if answer.outcome is not None:
            # The backend's import or predicates ended the process.
            check = Check.make(CellName(name, IMPORT, ("*",), ("*",)), "deciding")
            self._results.append(Result(check, answer.outcome))
        return answer.value

    def _layer_check(self, suite: Suite, line: str) -> Check:
        layer = DrawnLayer.from_json(line)
        for cell in suite.running:
            if (cell.experts, cell.rules[0]) == (layer.experts, layer.rule) and layer.computes in cell.schemes:
                argument = {"label": GIVEN, "layer": layer.to_dict()}
                return Check.make(cell, "drawn", argument, self._platform, self._modules)
        raise ArgumentError(f"no cell that runs here is that of the layer {line}; choose the platform it was drawn for")

    def _named(self, suite: Suite, text: str) -> Iterator[Check]:
        """The drawn layers with an id or the end of one, of every cell that runs here."""
        *_, end = text.rpartition("/")
        found = _LABEL.fullmatch(end)
        if found is None:
            return
        seed, number, path = int(found[1]), int(found[2]), tuple(map(int, found[3].split(".")[1:]))
        for cell in suite.running:
            if f"/{Check.make(cell, 'drawn', {'label': end}).id}".endswith(f"/{text}"):
                check = self._draw(cell, number, seed, path)
                if check is not None:
                    yield check

    def _drawn(self, suite: Suite, seconds: float | None, only: tuple[str, ...]) -> Iterator[Check]:
        """Yields drawn layers, one per cell in turn."""
        cells = list(suite.running)
        number = 0
        while cells and time.monotonic() < self._deadline:
            for cell in list(cells):
                is_over = (seconds is None or bool(only)) and number >= _num_drawn(suite, cell, DRAWN)
                check = None if is_over else self._draw(cell, number)
                if number and time.monotonic() >= self._deadline:
                    return
                self._has_drawn.add(cell)
                if check is None or check.layer is None:
                    cells.remove(cell)
                if check is not None and (not only or any(text in check.id for text in only)):
                    yield check
            number += 1

    def _draw(self, cell: CellName, number: int, seed: int | None = None, path: tuple[int, ...] = ()) -> Check | None:
        asked = cell, self._seed if seed is None else seed, number, self._platform, self._modules, path
        answer: Answer[Check] = self._worker.ask(draw_check, *asked, seconds=self._check_seconds)
        if answer.outcome is not None and answer.before:
            # Another check may have damaged the process.
            answer = self._worker.ask(draw_check, *asked, seconds=self._check_seconds, fresh=True)
        if answer.outcome is None:
            return answer.value
        # Drawing asks the cell's predicate, which is what failed.
        check = self._undrawn(cell, number)
        message = f"asking its predicate of a drawn layer: {answer.outcome.message}"
        self._not_drawn[check] = dataclasses.replace(answer.outcome, message=message)
        return check

    def _undrawn(self, cell: CellName, number: int) -> Check:
        """A placeholder for a layer that could not be drawn."""
        label = {"label": f"seed{self._seed}-{number}"}
        return Check.make(cell, "drawn", label, self._platform, self._modules)

    def _skip_undrawn(self, suite: Suite) -> None:
        """Running out of time before the random layers counts as incomplete."""
        for cell in suite.running:
            if cell not in self._has_drawn:
                self._results.append(Result(self._undrawn(cell, 0), Outcome("skipped", NO_TIME)))

    def _ask(self, check: Check) -> Outcome:
        outcome, num_before = _run(self._worker, check, self._check_seconds)
        if outcome.passes_alone:
            outcome = self._blame(check, outcome, self._asked[-num_before:])
        self._asked.append(check)
        return outcome

    def _blame(self, check: Check, outcome: Outcome, before: Sequence[Check]) -> Outcome:
        """Finds the earlier check whose damage made this one crash; that one fails, and this one passes.

        If none is found, no check of that process counts as passed.
        """
        deadline = min(time.monotonic() + _BLAME_SECONDS, self._deadline)
        places = {result.check: place for place, result in enumerate(self._results)}
        suspects = [earlier for earlier in before if earlier in places]
        for earlier in reversed(suspects):
            if time.monotonic() > deadline:
                break
            first, _ = _run(self._worker, earlier, self._check_seconds, is_alone=True)
            self._asked.append(earlier)
            again = self._worker.ask(run_here, check, seconds=self._check_seconds)
            if first.status == "passed" and again.before and _outcome_of(again).status == "crashed":
                message = f"damages its process: after it, {check.id} ends so: {_outcome_of(again).message}"
                damage = dataclasses.replace(outcome, message=message, passes_alone=False)
                self._results[places[earlier]] = Result(earlier, damage)
                return _run(self._worker, check, self._check_seconds, is_alone=True)[0]
        unknown = Outcome("skipped", f"{check.id} crashed in the same process later, and passes alone")
        for earlier in suspects:
            if self._results[places[earlier]].outcome.status == "passed":
                self._results[places[earlier]] = Result(earlier, unknown)
        return outcome

    def _add(self, check: Check, total: int) -> Outcome:
        outcome = self._reason_to_skip(check) or self._not_drawn.get(check) or self._ask(check)
        self._results.append(Result(check, outcome))
        if self._progress is not None:
            self._progress(len(self._results), max(total, len(self._results)), self._results[-1])
        return outcome

    def _reason_to_skip(self, check: Check) -> Outcome | None:
        if time.monotonic() >= self._deadline:
            return Outcome("skipped", NO_TIME)
        if not self._worker.is_isolated and self._has_lost_its_device:
            return Outcome("skipped", "an error of the device ended its use in this process; run with --isolate")
        own = [result.outcome.status for result in self._results if result.check.cell == check.cell]
        if own.count("timed_out") >= _MOST_TIMED_OUT:
            return Outcome("skipped", f"{_MOST_TIMED_OUT} checks of this cell ran out of time")
        return None

    @property
    def _has_lost_its_device(self) -> bool:
        """Whether a failure made the device's context unusable."""
        messages = [result.outcome.message for result in self._results if result.outcome.is_failure]
        return any("CUDA error" in message and "out of memory" not in message for message in messages)

    def _make_simpler(self, place: int) -> None:
        """Replaces a drawn layer that failed by the simplest one found that fails too, and of the same cause."""
        result, tries = self._results[place], 0
        deadline = min(time.monotonic() + _SIMPLER_SECONDS, self._deadline)
        if result.outcome.status == "timed_out":
            return
        _, causes = split_message(result.outcome.message)
        known = set(causes_in(result.outcome.message) if causes else ())
        is_smaller = result.check.layer is not None
        while is_smaller:
            is_smaller = False
            for check in self._worker.ask(simpler_checks, result.check).value or ():
                tries += 1
                if tries > _MOST_SIMPLER or time.monotonic() > deadline:
                    break
                outcome = self._ask(check)
                if outcome.is_failure and known.issubset(causes_in(outcome.message)):
                    result, is_smaller = Result(check, outcome), True
                    break
        self._results[place] = result

    def _made(self, name: str, suite: Suite) -> Report:
        # A file alone says what is verified.
        files = [] if name or len(self._modules) > 1 else [each for each in self._modules if is_file_name(each)]
        options = [f"--module {shlex.quote(_shortest(each))}" for each in self._modules if each not in files]
        options += [f"--platform {self._platform}"] if self._platform else []
        options += [f"--seed {self._seed}"] if self._seed else []
        options += [] if self._worker.is_isolated else ["--no-isolate"]
        cells = {result.check.cell.backend: None for result in self._results}
        return Report(
            backend=name or ",".join(cells),
            platform=suite.platform,
            device=suite.device,
            versions=suite.versions,
            seed=self._seed,
            results=tuple(self._results),
            idle=suite.idle,
            imitated=suite.imitated,
            unchecked=suite.unchecked,
            seconds=time.monotonic() - self._start,
            rerun=" ".join(
                ["moereg verify", *filter(None, [name, *map(shlex.quote, map(_shortest, files))]), *options]
            ),
        )


def _shortest(module: str) -> str:
    """A module's name, or a file's path from the current folder where it is in there."""
    folder = os.path.join(os.getcwd(), "")
    return module[len(folder) :] if is_file_name(module) and module.startswith(folder) else module


def _is_as_drawn(check: Check) -> bool:
    """Whether a check's layer was drawn and not made simpler yet."""
    found = _LABEL.fullmatch(check.label)
    return found is not None and not found[3]


def _num_drawn(suite: Suite, cell: CellName, num_drawn: int) -> int:
    return min(num_drawn, _DRAWN_IMITATED) if cell in suite.imitated else num_drawn
