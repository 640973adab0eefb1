"""The order of work of `moereg tune`: two sessions in processes of their own, written point by point.

A candidate that crashes its process, or runs longer than a limit, costs the session that process alone. Worker
processes call `begin`, `measure` and `clocks`, and keep the layer between them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from moereg.bench.compare import IN_TURNS
from moereg.bench.inputs import num_calls
from moereg.bench.points import Point, next_points
from moereg.bench.record import LayerRecord
from moereg.bench.session import (
    BEHIND,
    SCREEN_ROUNDS,
    Key,
    LayerSession,
    candidates_to_time,
    drifted,
    key_of,
    row_values,
    tuning_candidates,
)
from moereg.bench.timing import ROUNDS
from moereg.cli._bench import build_layer, check_run_fits, layer_device, platform_at_hand
from moereg.cli._options import ProblemFlags, find_subject
from moereg.errors import BackendError, TooLargeError, WorkerError
from moereg.evidence.on_machine import QUARANTINE, QuarantineRecord
from moereg.evidence.plans import LayerTimes
from moereg.evidence.significance import ASKED, NUM_SESSIONS, gains
from moereg.platforms import Platform
from moereg.runtime.progress import Advance
from moereg.selection.modules import import_modules, own_modules
from moereg.selection.result import Selection
from moereg.testing.worker import GPU_CHECK_SECONDS, Worker

STEP_SECONDS: Final = GPU_CHECK_SECONDS
"""A candidate's time limit for permuting its weights, and for its calls at one point, compiling included."""

_ATTEMPTS: Final = 2
"""How often a session is measured, or goes on after an end without a culprit, before the command gives up."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A layer as options name it, and where to measure it: numbers of tokens, ascending, in each of the routings."""

    flags: ProblemFlags
    counts: tuple[int, ...] = ()
    routings: tuple[str, ...] = ASKED
    seed: int = 0


class Failure(NamedTuple):
    """A candidate that failed at a point; one that only lacked memory is not broken."""

    key: Key
    reason: str
    is_broken: bool


class AtPoint(NamedTuple):
    """The measurements at one point: values of a pack's row, candidates that are not measured further, and an end.

    `stopped` says why the process cannot go on; it is empty if it can.
    """

    rows: dict[Key, dict[str, Any]]
    failures: list[Failure]
    stopped: str


_SESSIONS: Final[list[LayerSession]] = []
"""The one of this process, once it is made; its first candidate is the default."""


def begin(tell: Callable[[Any], object], question: Question, modules: Sequence[str], keys: Sequence[Key]) -> list[Key]:
    """Makes the layer and its candidates; returns those left out, whose weights do not fit beside the others'."""
    import_modules(modules)
    flags = question.flags
    subject = find_subject(flags)
    platform = platform_at_hand("tune", flags.platform)
    selection = tuning_candidates(subject.problem, platform, **flags.request())
    found = candidates_to_time(selection)
    keys = [key for key in keys if key in found]  # Another command may just have put one into quarantine.
    decisions = [found[key] for key in keys]
    device = layer_device(selection)
    fitting = _fitting(dataclasses.replace(selection, decisions=tuple(decisions)), question.counts[-1], device)
    _SESSIONS[:] = [
        LayerSession(
            fitting,
            lambda: build_layer(subject, question.seed, device).weights,
            device,
            question.seed,
            watch=lambda decision, step: tell((key_of(decision, platform), step)),
        )
    ]
    return keys[len(fitting.decisions) :]


def _fitting(selection: Selection, tokens: int, device: torch.device) -> Selection:
    """The first candidates, whose weights fit beside each other; the default and another one at least."""
    number = len(selection.decisions)
    while True:
        try:
            check_run_fits(selection.problem, tokens, device, number, (1 + number) * num_calls(tokens))
            return dataclasses.replace(selection, decisions=selection.decisions[:number])
        except TooLargeError:
            if number < 3:
                raise
            number -= 1


def measure(tell: Callable[[Any], object], keys: Collection[Key], point: Point, rounds: int) -> AtPoint:
    """Measures candidates beside the default, and those that are left no more from then on."""
    (session,) = _SESSIONS
    comparison, platform = session.comparison, session.selection.platform
    for decision in list(comparison.candidates):
        if key_of(decision, platform) not in keys:
            comparison.leave_out(decision)
    rows = session.measure(point, rounds)
    default = next((row for row in rows if row.decision == session.selection.decisions[0]), None)
    timed: dict[Key, dict[str, Any]] = {}
    failures = []
    for row in rows:
        key = key_of(row.decision, platform)
        if (values := row_values(row, default)) is not None:
            timed[key] = values
        if row.is_culprit:
            comparison.leave_out(row.decision)
            failures.append(Failure(key, f"{row.reason}, at {row.num_tokens} tokens", not row.lacks_memory))
    return AtPoint(timed, failures, str(comparison.stopped or ""))


def clocks(tell: Callable[[Any], object]) -> dict[str, int]:
    """The device's clocks under load; empty for a CPU."""
    (session,) = _SESSIONS
    return session.clocks()


class Unfinished(Exception):
    """The measuring stops before its end; running it again goes on."""


class _Ended(Exception):
    """A session's process ended, or no longer answers for its device; with the culprit if it is known."""

    def __init__(self, culprit: Key | None, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


def start_worker() -> Worker:
    """A process for a session. The layer was found to fit, so its memory has no limit."""
    return Worker(memory_bytes=sys.maxsize, interprets=False)


@dataclasses.dataclass
class Tuner:
    """Measures what a layer's record lacks."""

    question: Question
    platform: Platform
    record: LayerRecord
    start: Callable[[], Worker]
    deadline: float
    advance: Advance
    _unexplained: int = 0

    def run(self) -> None:
        """Measures both sessions; Unfinished if the time is over, or the device's clock did not hold still."""
        for place in range(NUM_SESSIONS):
            for attempt in range(_ATTEMPTS):
                drift = self._session(place)
                if not drift:
                    break
                self.record.drop(self.record.sessions[place])
                if attempt + 1 == _ATTEMPTS:
                    raise Unfinished(f"{drift}, twice: its times are not kept; run it again on an idle machine")

    def _left(self, place: int) -> list[Point]:
        record, question = self.record, self.question
        measured = [record.measured(number) for number in record.sessions[: place + 1]]
        measured += [set()] * (place + 1 - len(measured))
        return next_points(measured, question.counts, question.routings, self._winner)

    def _winner(self, tokens: int) -> int:
        """The first session's winner, by more than its noise, as an index of the pack's cells."""
        record = self.record
        default, *others = map(record.index, record.participants)
        times, first, best = LayerTimes(record.rows, default), record.sessions[0], default
        for cell in others:
            ratios = times.at(cell, tokens)
            is_timed = any(session == first for session, _ in ratios)
            if is_timed and gains(ratios, times.at(best, tokens), first):
                best = cell
        return best

    def _session(self, place: int) -> str:
        """Measures what a session lacks; returns why its times cannot be kept, or nothing."""
        worker = self.start()
        try:
            while self.record.keys and self._left(place):
                try:
                    drift = self._sit(worker, place)
                except _Ended as ended:
                    self._blame(ended)
                else:
                    if drift is not None:
                        return drift
        finally:
            worker.stop()
        return ""

    def _sit(self, worker: Worker, place: int) -> str | None:
        """Measures in one process; returns None if another one has to go on, else how the clock drifted."""
        record, question = self.record, self.question
        default = record.keys[0]
        self._report(place)
        is_new = not record.rows
        keys = record.participants
        left_out = self._ask(worker, begin, question, own_modules(is_needed=True), keys, fresh=True)
        if left_out:
            record.leave_out(dict.fromkeys(left_out, "no memory for its weights beside the others'"))
        if is_new:
            self._screen(worker, default)
        if record.keys[:1] != [default]:
            return None
        before = self._ask(worker, clocks)
        number = record.begin(next(iter(record.sessions[place:]), None), before)
        while points := self._left(place):
            self._report(place)
            found = self._ask(worker, measure, record.participants, points[0], ROUNDS)
            if not found.rows and not found.failures:
                raise _Ended(None, found.stopped or f"nothing could be timed at {points[0].tokens} tokens")
            if found.rows:
                record.add_times(number, points[0], found.rows)
            self._failed(found.failures)
            if found.stopped or record.keys[:1] != [default]:
                return None
        return drifted(before, self._ask(worker, clocks))

    def _ask(self, worker: Worker, function: Callable[..., Any], *arguments: Any, fresh: bool = False) -> Any:
        try:
            answer = worker.ask(
                function, *arguments, seconds=STEP_SECONDS, in_steps=True, fresh=fresh, deadline=self.deadline
            )
        except TimeoutError:
            raise Unfinished("no time is left") from None
        if answer.outcome is None:
            return answer.value
        key, step = answer.step or (None, "")
        if key is None and fresh:
            raise WorkerError(f"a session ended before it ran anything: {answer.outcome.message}")
        how = f"{answer.outcome.message} ({step})" if step else answer.outcome.message
        raise _Ended(None if step == IN_TURNS else key, how)

    def _screen(self, worker: Worker, default: Key) -> None:
        """Leaves out candidates that are far behind wherever they are timed."""
        record = self.record
        near: set[Key] = {default}
        timed: set[Key] = set()
        for tokens in self.question.counts:
            found = self._ask(worker, measure, record.participants, Point("uniform", tokens), SCREEN_ROUNDS)
            self._failed(found.failures)
            if found.stopped:
                raise _Ended(None, found.stopped)
            if record.keys[:1] != [default]:
                return
            times = {key: row["median_us"] for key, row in found.rows.items()}
            timed |= times.keys()
            near |= {key for key, time_us in times.items() if time_us <= BEHIND * min(times.values())}
        if behind := [key for key in record.participants if key in timed - near]:
            slow = f"more than {BEHIND}x slower than the fastest at every number of tokens"
            record.leave_out(dict.fromkeys(behind, slow))

    def _failed(self, failures: Iterable[Failure]) -> None:
        """Records candidates that failed, and quarantines those that are broken."""
        record = self.record
        for failure in failures:
            decision = record.decisions[failure.key]
            if failure.is_broken:
                if QUARANTINE.path() is not None and decision.cell is not None and decision.scheme is not None:
                    reason = f"moereg tune: {failure.reason}"
                    failed = QuarantineRecord.failed(decision.cell, decision.scheme, self.platform, reason)
                    QUARANTINE.change([failed])
            elif failure.key == record.keys[0]:
                raise TooLargeError(
                    f"the default, {failure.key[0]}, has to run at every number of tokens, got {failure.reason}; give "
                    "a smaller --tokens"
                )
            record.leave_out({failure.key: failure.reason}, wrong=failure.is_broken)

    def _blame(self, ended: _Ended) -> None:
        if ended.culprit is not None:
            self._failed([Failure(ended.culprit, str(ended), is_broken=True)])
            return
        self._unexplained += 1
        if self._unexplained == _ATTEMPTS:
            names = ", ".join(dict.fromkeys(key[0] for key in self.record.participants))
            raise BackendError(
                f"a session ended twice while several of {names} may have run: {ended}; run moereg verify on each, or "
                "leave one out with --deny"
            )

    def _report(self, place: int) -> None:
        record = self.record
        done = [len(record.measured(number)) for number in record.sessions] + [0] * NUM_SESSIONS
        # The second session measures what the first one has measured in the end.
        left = [len(self._left(0)), len(self._left(1)) if place else done[0] + len(self._left(0))]
        self.advance(sum(done), sum(done) + sum(left))
