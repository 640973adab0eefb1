"""`moereg tune`: measures every cell that could run a layer here, in two fresh processes, into the user's pack.

This process only orchestrates. It writes the pack after each point, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moereg.cli._bench import check_routing, parse_counts, platform_at_hand
from moereg.cli._options import ProblemFlags, Subject, UsageError, find_subject
from moereg.cli._output import NOTHING_FITS, OK, UNFINISHED, WRONG_NUMBERS, console
from moereg.cli._progress import countdown
from moereg.cli._show import format_us, machine, new_table, print_notices, print_rejected, show_selection
from moereg.errors import ArgumentError, BackendError, TooLargeError, one_line, shown
from moereg.evidence.admission import ADMITTED, AdmissionRecord
from moereg.evidence.ledger import evidence_of
from moereg.evidence.provenance import provenance
from moereg.evidence.quarantine import QUARANTINE, QuarantineRecord
from moereg.measured.keys import machine_of, problem_key
from moereg.measured.pack import Pack, Row, Session, TunedLayer, write_pack
from moereg.measured.plans import LayerTimes, with_ranges
from moereg.measured.read import VARIABLE, Measured, Source, tuning_path
from moereg.measured.significance import ASKED, NUM_SESSIONS, gains
from moereg.platforms import Platform
from moereg.plugins.modules import own_modules
from moereg.runtime.progress import duration
from moereg.runtime.python_process import python_command
from moereg.selection.decide import candidate_of
from moereg.selection.result import SCHEMA, Decision
from moereg.spec.problem import MoEProblem
from moereg.tuning.compare import IN_TURNS
from moereg.tuning.points import GUARD, Point, first_points, next_points, token_grid
from moereg.tuning.session import BEHIND, Entrants, Key, drifted, entrants, key_of, timed_cell
from moereg.tuning.timing import ROUNDS, SECONDS

_GPU_TOKENS: Final = 8192
_CPU_TOKENS: Final = 512
_ATTEMPTS: Final = 2
"""How often a session is measured, or restarted without a culprit, before the command gives up."""


class Ended(Exception):
    """A session's process ended, or no longer answers for its device.

    Attributes:
        culprit: The candidate whose code ran; None if it may have been another's.
        reason: How it ended.
    """

    def __init__(self, culprit: Key | None, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.reason = reason


class Unfinished(Exception):
    """The measuring stops before its end; running it again goes on."""


class SessionProcess:
    """`moereg.cli._tune_session` in a process of its own."""

    def __init__(self) -> None:
        """Starts it; the first request names the layer."""
        self._log: Final = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: Final = subprocess.Popen(
            python_command("moereg.cli._tune_session"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C ends this process, which then ends that one.
        )
        self._rest = b""
        self._runs: tuple[Key, str] | None = None

    def ask(self, deadline: float, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            Ended: The process ended.
            Unfinished: The deadline passed.
            MoeregError: What the process refused.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        while (line := self._line(deadline)) is not None:
            found = json.loads(line)
            if "answer" in found:
                answer: dict[str, Any] = found["answer"]
                return answer
            if "error" in found:
                kind = TooLargeError if found["error"] == "TooLargeError" else ArgumentError
                raise kind(found["message"])
            self._runs = tuple(found["runs"]), found["step"]
        raise self._ended()

    def _line(self, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            if not select.select([file], [], [], left)[0]:
                raise Unfinished("no time is left")
            more = os.read(file, 1 << 16)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> Ended:
        code = self._process.wait()
        if code > 0:  # A bug of moereg, or a candidate called exit; the last line of a traceback says most.
            how = f"exit code {code}: {one_line(self._written().strip().rpartition(chr(10))[2])}"
        else:
            known = {each.value: each.name for each in signal.Signals}
            how = f"the process died of {known.get(-code, f'signal {-code}')}"
        if self._runs is None:
            raise RuntimeError(f"a session ended before it ran anything: {how}")
        key, step = self._runs
        return Ended(None if step == IN_TURNS else key, f"{how} in {step}")

    def _written(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()


@dataclasses.dataclass(frozen=True)
class Question:
    """A layer, and where to measure it.

    Attributes:
        flags, checkpoint, layer: The layer, as options name it.
        counts: Numbers of tokens of the grid, ascending.
        routings: Routings that are asked.
        seed: Of weights and inputs.
    """

    flags: ProblemFlags
    checkpoint: Path | None
    layer: int | None
    counts: tuple[int, ...] = ()
    routings: tuple[str, ...] = ASKED
    seed: int = 0

    def request(self, cells: Sequence[Key]) -> dict[str, Any]:
        """The first request to a session's process."""
        return {
            "flags": dataclasses.asdict(self.flags),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.resolve()),
            "layer": self.layer,
            "modules": own_modules(is_needed=True),
            "cells": cells,
            "tokens": self.counts[-1],
            "seed": self.seed,
        }


class LayerRecord:
    """One layer's part of the user's pack, as it is now in the file.

    Attributes:
        path: The file.
        pack: All of it.
    """

    def __init__(self, path: Path, platform: Platform, problem: MoEProblem, found: Entrants, refresh: bool) -> None:
        """Reads the file, and empties the layer if a candidate is new or has changed, or if asked to.

        Raises:
            PackError: The file cannot be used.
        """
        self.path: Final = path
        self._problem: Final = problem
        self._machine: Final = machine_of(platform)
        self._decisions: Final = {key_of(one, platform): one for one in found.decisions}
        self._cells: Final = {key: timed_cell(one, platform) for key, one in self._decisions.items()}
        self._indices: dict[Key, int] = {}
        self.pack = self._change(lambda pack: self._emptied(pack) if refresh else pack)
        known = {*self.participants, *self.left_out}
        if self.rows and not set(self.keys) <= known:
            self.pack = self._change(self._emptied)

    def _change(self, change: Callable[[Pack], Pack]) -> Pack:
        """Changes the file; cells get their indices."""

        def changed(pack: Pack) -> Pack:
            for key, cell in self._cells.items():
                pack, self._indices[key] = pack.with_cell(cell)
            return change(pack)

        return write_pack(self.path, self._machine, changed)

    def _emptied(self, pack: Pack) -> Pack:
        key = problem_key(self._problem)
        layers = tuple(TunedLayer(one.problem, one.default) if one.problem == key else one for one in pack.layers)
        used = {row.session for layer in layers for row in layer.rows}
        sessions = tuple(session for session in pack.sessions if session.number in used)
        return dataclasses.replace(pack, layers=layers, sessions=sessions)

    @property
    def _layers(self) -> list[TunedLayer]:
        """The layer beside each default that it had."""
        key = problem_key(self._problem)
        return [layer for layer in self.pack.layers if layer.problem == key]

    @property
    def wrong(self) -> dict[Key, str]:
        """Candidates that failed, with the reason."""
        found = dict(pair for layer in self._layers for pair in layer.wrong)
        return {key: found[index] for key, index in self._indices.items() if index in found}

    @property
    def keys(self) -> list[Key]:
        """The candidates that did not fail, the default first."""
        wrong = self.wrong
        return [key for key in self._cells if key not in wrong]

    @property
    def layer(self) -> TunedLayer | None:
        """The layer beside its present default."""
        default = self._indices[self.keys[0]] if self.keys else None
        return next((layer for layer in self._layers if layer.default == default), None)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its times."""
        layer = self.layer
        return () if layer is None else layer.rows

    @property
    def left_out(self) -> dict[Key, str]:
        """Candidates that are not measured further, with the reason."""
        found = dict(self.layer.left_out) if self.layer is not None else {}
        return {key: found[index] for key, index in self._indices.items() if index in found}

    @property
    def participants(self) -> list[Key]:
        """The candidates to measure, the default first: all at the beginning, then those that have times."""
        timed = {row.cell for row in self.rows}
        left_out = self.left_out
        return [key for key in self.keys if key not in left_out and (not timed or self._indices[key] in timed)]

    @property
    def sessions(self) -> list[int]:
        """Numbers of its sessions, in order."""
        return sorted({row.session for row in self.rows})

    def index(self, key: Key) -> int:
        """A candidate's index in the pack's cells."""
        return self._indices[key]

    def key_at(self, index: int) -> Key:
        """The candidate at an index of the pack's cells."""
        return next(key for key, own in self._indices.items() if own == index)

    def decision(self, key: Key) -> Decision:
        """A candidate by its key."""
        return self._decisions[key]

    def measured(self, session: int) -> set[Point]:
        """The points of a session."""
        return {Point(row.routing, row.tokens) for row in self.rows if row.session == session}

    def begin(self, number: int | None, platform: Platform, clocks: Mapping[str, int]) -> int:
        """Adds a session, or to one that goes on the name of its next process; returns its number."""
        where, process = provenance(platform, ()), secrets.token_hex(4)
        own = 0

        def begun(pack: Pack) -> Pack:
            nonlocal own
            own = pack.next_session if number is None else number  # Another command may write to the same file.
            before = [one.process for one in pack.sessions if one.number == own]
            names = "+".join((*before, process))
            return pack.with_session(Session(own, where["date"], where["commit"], names, clocks))

        self.pack = self._change(begun)
        return own

    def add(
        self,
        rows: Sequence[Row] = (),
        wrong: Mapping[Key, str] | None = None,
        left_out: Mapping[Key, str] | None = None,
    ) -> None:
        """Writes what was found, beside the present default."""
        default = self._indices[self.keys[0]]
        pairs = [
            [(self._indices[key], one_line(reason, 500)) for key, reason in (found or {}).items()]
            for found in (wrong, left_out)
        ]
        self.pack = self._change(lambda pack: pack.with_rows(self._problem, default, rows, *pairs))

    def row(self, values: Mapping[str, Any], session: int, point: Point) -> Row:
        """A row of the pack, of a session's answer."""
        own = {**values, "cell": self._indices[tuple(values["cell"])]}
        return Row(session=session, routing=point.routing, tokens=point.tokens, **own)

    def drop(self, session: int) -> None:
        """Forgets a session's times."""

        def without(pack: Pack) -> Pack:
            layers = tuple(
                dataclasses.replace(layer, rows=tuple(row for row in layer.rows if row.session != session))
                for layer in pack.layers
            )
            kept = tuple(one for one in pack.sessions if one.number != session)
            return dataclasses.replace(pack, layers=layers, sessions=kept)

        self.pack = self._change(without)


Progress = Callable[[int, int, float | None], object]
"""Called with (points done, all points known so far, seconds left)."""


class Tuner:
    """Measures what a layer's record lacks."""

    def __init__(
        self,
        question: Question,
        platform: Platform,
        record: LayerRecord,
        start: Callable[[], SessionProcess] = SessionProcess,
        deadline: float = math.inf,
        progress: Progress = lambda done, total, left: None,
    ) -> None:
        """Takes what to measure and how: a process at a time, until the deadline of `time.monotonic`."""
        self._question: Final = question
        self._platform: Final = platform
        self._record: Final = record
        self._start: Final = start
        self._deadline: Final = deadline
        self._progress: Final = progress
        self._began: Final = time.monotonic()
        self._done = 0
        self._unexplained = 0

    def run(self) -> None:
        """Measures both sessions.

        Raises:
            Unfinished: The time is over, or the device's clock did not hold still.
            BackendError: Processes end, and no candidate's code ran alone.
            TooLargeError: The layer does not fit.
        """
        for place in range(NUM_SESSIONS):
            for attempt in range(_ATTEMPTS):
                drift = self._session(place)
                if not drift:
                    break
                self._record.drop(self._record.sessions[place])
                if attempt + 1 == _ATTEMPTS:
                    raise Unfinished(f"{drift}, twice: its times are not kept; run it again on an idle machine")

    def _left(self, place: int) -> list[Point]:
        record, question = self._record, self._question
        sessions = record.sessions
        measured = [record.measured(number) for number in sessions[: place + 1]]
        measured += [set()] * (place + 1 - len(measured))
        return next_points(measured, question.counts, question.routings, self._winner)

    def _winner(self, tokens: int) -> int:
        """The first session's winner, by more than its noise, as an index of the pack's cells."""
        record = self._record
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
        while self._record.keys and self._left(place):
            process = self._start()
            try:
                drift = self._sit(process, place)
            except Ended as ended:
                self._blame(ended)
            else:
                if drift is not None:
                    return drift
            finally:
                process.close()
        return ""

    def _sit(self, process: SessionProcess, place: int) -> str | None:
        """Measures in one process; returns None if another one has to go on, else how the clock drifted."""
        record = self._record
        default = record.keys[0]
        self._tell(place)
        self._make(process)
        if record.keys[:1] != [default]:
            return None
        before = self._clocks(process)
        number = record.begin(next(iter(record.sessions[place:]), None), self._platform, before)
        while points := self._left(place):
            self._tell(place)
            can_go_on = self._measure(process, number, points[0])
            if not can_go_on or record.keys[:1] != [default]:
                return None
        return drifted(before, self._clocks(process))

    def _clocks(self, process: SessionProcess) -> dict[str, int]:
        found: dict[str, int] = process.ask(self._deadline, clocks=True)["clocks"]
        return found

    def _make(self, process: SessionProcess) -> None:
        """Makes the layer in a process; the first time it also finds out what is far behind."""
        record, question = self._record, self._question
        is_new = not record.rows
        found = process.ask(self._deadline, **question.request(record.participants))
        left_out = {tuple(key): "no memory for its weights beside the others'" for key in found["left_out"]}
        if left_out:
            record.add(left_out=left_out)
        if is_new:
            found = process.ask(self._deadline, screen=question.counts)
            slow = f"more than {BEHIND}x slower than the fastest at every number of tokens"
            self._failed(found, {tuple(key): slow for key in found["behind"]})
            if found["stopped"]:
                raise Ended(None, found["stopped"])

    def _measure(self, process: SessionProcess, number: int, point: Point) -> bool:
        """Measures one point and writes it; returns whether the process can go on."""
        record = self._record
        found = process.ask(self._deadline, point=point)
        if not found["rows"] and not found["wrong"]:
            raise Ended(None, found["stopped"] or f"nothing could be timed at {point.tokens} tokens")
        if found["rows"]:
            record.add([record.row(values, number, point) for values in found["rows"]])
        self._failed(found, {})
        self._done += 1
        return not found["stopped"]

    def _failed(self, found: Mapping[str, Any], left_out: Mapping[Key, str]) -> None:
        """Records candidates that failed, and quarantines those that are broken."""
        record = self._record
        kept = dict(left_out)
        wrong: dict[Key, str] = {}
        for one in found["wrong"]:
            (wrong if one["is_broken"] else kept)[tuple(one["cell"])] = one["reason"]
        default = record.keys[0]
        if default in kept:
            raise TooLargeError(
                f"the default, {default[0]}, has to run at every number of tokens, got {kept[default]}; give a smaller "
                "--tokens"
            )
        for key, reason in wrong.items():
            self._quarantine(key, reason)
        if wrong or kept:
            record.add(wrong=wrong, left_out=kept)

    def _blame(self, ended: Ended) -> None:
        if ended.culprit is not None:
            self._failed({"wrong": [{"cell": ended.culprit, "reason": ended.reason, "is_broken": True}]}, {})
            return
        self._unexplained += 1
        if self._unexplained == _ATTEMPTS:
            names = ", ".join(dict.fromkeys(key[0] for key in self._record.participants))
            raise BackendError(
                f"a session ended twice while several of {names} may have run: {ended.reason}; run moereg verify on "
                "each, or leave one out with --deny"
            )

    def _quarantine(self, key: Key, reason: str) -> None:
        decision = self._record.decision(key)
        if QUARANTINE.path() is not None and decision.cell is not None and decision.scheme is not None:
            failed = QuarantineRecord.failed(decision.cell, decision.scheme, self._platform, f"moereg tune: {reason}")
            QUARANTINE.change([failed])

    def _tell(self, place: int) -> None:
        record = self._record
        done = [len(record.measured(number)) for number in record.sessions] + [0] * NUM_SESSIONS
        # The second session measures what the first one has measured in the end.
        left = [len(self._left(0)), len(self._left(1)) if place else done[0] + len(self._left(0))]
        spent = time.monotonic() - self._began
        seconds = spent / self._done * sum(left) if self._done else None
        self._progress(sum(done), sum(done) + sum(left), seconds)


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """The result of tuning one layer.

    Attributes:
        subject: The layer.
        platform: This machine.
        path: The pack's file.
        record: The layer's part of it; None if nothing fits.
        found: The candidates.
        counts, routings: What was asked.
        unfinished: Why the measuring stopped before its end; empty if it did not.
        is_dry: Whether nothing was to be measured.
    """

    subject: Subject
    platform: Platform
    path: Path
    record: LayerRecord | None
    found: Entrants
    counts: tuple[int, ...]
    routings: tuple[str, ...]
    unfinished: str = ""
    is_dry: bool = False

    @property
    def code(self) -> int:
        """The exit code."""
        if self.record is None:
            return NOTHING_FITS
        return WRONG_NUMBERS if self.record.wrong else UNFINISHED if self.unfinished else OK

    @functools.cached_property
    def plan(self) -> Measured:
        """The plan that selection reads from the pack; its ranges have indices of `LayerRecord.keys`."""
        record = self.record
        if record is None:
            return Measured()
        candidates = [candidate_of(record.decision(key), self.platform) for key in record.keys]
        return Source(record.pack).order(self.found.selection.problem, self.platform, candidates)

    @property
    def selected(self) -> Key | None:
        """The candidate for numbers of tokens without another winner; None if all failed."""
        if self.record is None or not self.record.keys:
            return None
        return self.record.keys[self.plan.ranges[-1][1] if self.plan.ranges else 0]

    def winners(self) -> list[dict[str, Any]]:
        """The fastest cell at each number of tokens, whatever its layout: the default where nothing beats it."""
        record = self.record
        if record is None or record.layer is None or not record.rows:
            return []
        times = LayerTimes(record.rows, record.layer.default)
        order = [record.index(key) for key in record.participants]
        ranges = with_ranges(times, order, order[0], order[1:])
        return [
            self._winner(times, tokens, next(cell for most, cell in ranges if most is None or tokens <= most))
            for tokens in times.tokens
        ]

    def _winner(self, times: LayerTimes, tokens: int, cell: int) -> dict[str, Any]:
        assert self.record is not None
        own = [row for row in times.rows if (row.cell, row.tokens) == (cell, tokens) and row.routing in self.routings]
        by_session = [
            math.expm1(statistics.fmean(row.log_ratio for row in own if row.session == number))
            for number in dict.fromkeys(row.session for row in own)
        ]
        backend, experts, *_ = self.record.key_at(cell)
        return {
            "tokens": tokens,
            "backend": backend,
            "experts": experts,
            "is_default": cell == times.default,
            "time_us": statistics.fmean(row.median_us for row in own),
            "change": math.expm1(statistics.fmean(row.log_ratio for row in own)),
            "sessions": by_session,
        }

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg tune --json` prints."""
        record = self.record
        keys = [] if record is None else record.keys
        return {
            "schema": SCHEMA,
            "problem": self.found.selection.problem.to_dict(),
            "platform": str(self.platform),
            "file": str(self.path),
            "tokens": list(self.counts),
            "candidates": [_named(key) for key in keys],
            "default": _named(keys[0]) if keys else None,
            "selected": _named(self.selected) if self.selected else None,
            "plan": [[most, _named(keys[index])] for most, index in self.plan.ranges],
            "note": self.plan.note or None,
            "winners": self.winners(),
            "left_out": [{**_named(key), "reason": text} for key, text in (record.left_out if record else {}).items()],
            "wrong": [{**_named(key), "reason": text} for key, text in (record.wrong if record else {}).items()],
            "unfinished": self.unfinished or None,
        }

    def show(self, all_reasons: bool = False) -> None:
        """Prints the winners, what was left out or is wrong, and last what layers get."""
        record, target = self.record, console(sys.stdout)
        if record is None:
            show_selection(self.found.selection, self.subject.name, all_reasons)
            return
        target.print(f"{self.subject.name or 'sizes'}: {self.found.selection.problem}")
        target.print(f"on {machine(self.platform)}")
        if self.is_dry:
            self._show_plan(target)
        elif winners := self.winners():
            table = new_table(
                "T", "backend", "time", "change", *(f"session {each + 1}" for each in range(NUM_SESSIONS))
            )
            for column in table.columns[3:]:
                column.justify = "right"
            for one in winners:
                name = f"{one['backend']} (default)" if one["is_default"] else one["backend"]
                changes = [] if one["is_default"] else [f"{each:+.1%}" for each in (one["change"], *one["sessions"])]
                table.add_row(f"{one['tokens']:,}", name, format_us(one["time_us"]), *changes)
            target.print(table)
        for key, reason in record.left_out.items():
            target.print(f"left out: {key[0]} ({key[1]}): {reason}")
        for key, reason in record.wrong.items():
            kept = "" if QUARANTINE.path() is None else "; it is quarantined here until its code or versions change"
            target.print(Text(f"WRONG: {key[0]} ({key[1]}): {reason}{kept}", style="bold red"))
        print_rejected(target, "not measured", self.found.selection, all_reasons)
        print_notices(target, (*self.subject.notices, *self.found.selection.notices))
        if self.unfinished:
            target.print(Text(f"unfinished: {self.unfinished}; the same command goes on", style="bold red"))
        else:
            self._show_verdict(target)

    def _show_plan(self, target: Console) -> None:
        record = self.record
        assert record is not None
        points = len(first_points(self.counts, self.routings))
        names = ", ".join(f"{key[0]} ({key[1]})" for key in record.participants)
        done = sum(len(record.measured(number)) for number in record.sessions)
        target.print(f"would measure: {names}")
        target.print(
            f"at {len(self.counts)} numbers of tokens up to {self.counts[-1]:,} and more where the winner changes, in "
            f"{NUM_SESSIONS} sessions: {NUM_SESSIONS * points} points or more, {done} of them measured"
        )
        left = max(0, NUM_SESSIONS * points - done) * len(record.participants)
        target.print(
            f"at most {ROUNDS} rounds or {SECONDS:g} s of each: {duration(left * SECONDS)} if all are that slow"
        )

    def _show_verdict(self, target: Console) -> None:
        record, selected = self.record, self.selected
        if self.is_dry:
            target.print(f"nothing was measured; times would go to {self.path}")
        elif record is None or selected is None:
            target.print(Text("every candidate failed: nothing was timed", style="bold red"))
        else:
            default = record.keys[0]
            for most, index in self.plan.ranges[:-1]:
                target.print(f"calls of up to {most} tokens get {_text(record.keys[index])}")
            text = f"nothing beats the default: layers of this shape get {_text(default)} as before"
            if selected != default:
                text = f"layers of this shape now get {_text(selected)} (was {_text(default)})"
            target.print(f"times are in {self.path}; delete it, or set {VARIABLE}= to choose without it")
            target.print(Text("; ".join(filter(None, (text, self.plan.note))), style="bold green"))


def _named(key: Key) -> dict[str, str]:
    return dict(zip(("backend", "experts", "rule", "computes", "facts"), key, strict=True))


def _text(key: Key) -> str:
    return f"{key[0]} ({key[1]})"


def tune_layer(
    question: Question,
    seconds: float | None = None,
    refresh: bool = False,
    dry_run: bool = False,
    start: Callable[[], SessionProcess] = SessionProcess,
) -> TuneResult:
    """Measures a layer into the user's pack.

    Args:
        question: What to measure; without `counts` all powers of two up to a number that suits the device.
        seconds: Time for everything.
        refresh: Whether to forget the layer's times first.
        dry_run: Whether to measure nothing.
        start: Starts a process that measures.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    began = time.monotonic()
    platform = platform_at_hand("tune", question.flags.platform)
    if not question.counts:
        most = _CPU_TOKENS if platform.device_type == "cpu" else _GPU_TOKENS
        question = dataclasses.replace(question, counts=token_grid(most))
    flags = dataclasses.replace(question.flags, tokens=question.counts[-1])
    subject = find_subject(flags, question.checkpoint, question.layer)
    question = dataclasses.replace(question, flags=flags, layer=subject.layer)
    found = entrants(subject.problem, platform, **flags.request())
    path = tuning_path()
    if path is None:
        raise UsageError(f"{VARIABLE} must name a file, got an empty name, which turns measured times off")
    if found.default is None:
        return TuneResult(subject, platform, path, None, found, question.counts, question.routings)
    record = LayerRecord(path, platform, subject.problem, found, refresh and not dry_run)
    result = TuneResult(subject, platform, path, record, found, question.counts, question.routings, is_dry=dry_run)
    if dry_run:
        return result
    deadline = math.inf if seconds is None else began + seconds
    with countdown("tuning") as progress:
        try:
            Tuner(question, platform, record, start, deadline, progress).run()
        except Unfinished as error:
            result = dataclasses.replace(result, unfinished=str(error))
    _admit(record, platform)
    return result


def _admit(record: LayerRecord, platform: Platform) -> None:
    """Records the cells that nothing vouched for here: each one's numbers were right wherever it was timed."""
    worst: dict[int, float] = {}
    for row in record.rows:
        worst[row.cell] = max(worst.get(row.cell, 0.0), row.error)
    found = []
    for key in record.participants:
        cell, scheme, _ = candidate_of(record.decision(key), platform)
        if record.index(key) in worst and not evidence_of(cell).on(platform):
            error = worst[record.index(key)]
            found.append(AdmissionRecord.of(cell, scheme, platform, error=error, bound=1.0))
    if found and ADMITTED.path() is not None:
        ADMITTED.change(found)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens as an option has them: of one number all powers of two up to it.

    Raises:
        UsageError: The text has another form.
    """
    counts = parse_counts(text, "--tokens 1,16,4096")
    return token_grid(counts[0]) if len(counts) == 1 else counts


def parse_routings(text: str) -> tuple[str, ...]:
    """Routings as an option has them.

    Raises:
        UsageError: One is not asked for by anybody.
        UnknownNameError: One is unknown.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        check_routing(name)
    if not names or not set(names) <= set(ASKED):
        raise UsageError(
            f"--routing takes {' and '.join(ASKED)}, got {shown(text)}; {GUARD} is always measured as a guard"
        )
    return names
