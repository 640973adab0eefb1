"""`moereg tune`: measures every cell that could run a layer here, in two fresh processes, into the user's pack."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from moereg.arguments import check_count, check_mapping
from moereg.cli._bench import check_routing, parse_counts, platform_at_hand
from moereg.cli._options import Subject, UsageError, find_subject
from moereg.cli._output import NOTHING_FITS, OK, UNFINISHED, WRONG_NUMBERS, console
from moereg.cli._progress import countdown
from moereg.cli._show import format_us, machine, new_table, print_notices, print_rejected, show_selection
from moereg.cli._tune_session import Question
from moereg.cli._tuner import Tuner, Unfinished, start_worker
from moereg.errors import shown
from moereg.evidence.admission import ADMITTED, AdmissionRecord
from moereg.evidence.ledger import evidence_of
from moereg.evidence.quarantine import QUARANTINE
from moereg.evidence.store import read_document
from moereg.measured.pack import VARIABLE
from moereg.measured.plans import LayerTimes, with_ranges
from moereg.measured.read import Measured, Source, tuning_path
from moereg.measured.significance import ASKED, NUM_SESSIONS
from moereg.platforms import Platform
from moereg.runtime.progress import duration
from moereg.selection.decide import candidate_of
from moereg.selection.result import SCHEMA, Selection
from moereg.testing.worker import Worker
from moereg.tuning.points import GUARD, first_points, token_grid
from moereg.tuning.record import LayerRecord
from moereg.tuning.session import Key, entrants, rivals
from moereg.tuning.timing import ROUNDS, SECONDS

_GPU_TOKENS: Final = 8192
_CPU_TOKENS: Final = 512


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """The result of tuning one layer.

    Attributes:
        subject: The layer.
        platform: This machine.
        path: The pack's file.
        record: The layer's part of it; None if nothing fits.
        selection: The candidates.
        counts, routings: What was asked.
        unfinished: Why the measuring stopped before its end; empty if it did not.
        is_dry: Whether nothing was to be measured.
    """

    subject: Subject
    platform: Platform
    path: Path
    record: LayerRecord | None
    selection: Selection
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
        candidates = [candidate_of(record.decisions[key], self.platform) for key in record.keys]
        return Source(record.pack).order(self.selection.problem, self.platform, candidates)

    @property
    def selected(self) -> Key | None:
        """The candidate for numbers of tokens without another winner; None if all failed."""
        if self.record is None or not self.record.keys:
            return None
        return self.record.keys[self.plan.ranges[-1][1] if self.plan.ranges else 0]

    def winners(self) -> list[dict[str, Any]]:
        """The fastest cell at each number of tokens, whatever its layout: the default where nothing beats it."""
        record = self.record
        if record is None or not record.rows:
            return []
        order = [record.index(key) for key in record.participants]
        times = LayerTimes(record.rows, order[0])
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
        backend, experts, *_ = self.record.pack.cells[cell].cell_key
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
            "problem": self.selection.problem.to_dict(),
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
            show_selection(self.selection, self.subject.name, all_reasons)
            return
        target.print(f"{self.subject.name or 'sizes'}: {self.selection.problem}")
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
        print_rejected(target, "not measured", self.selection, all_reasons)
        print_notices(target, (*self.subject.notices, *self.selection.notices))
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
    calls: Mapping[int, int] | None = None,
    start: Callable[[], Worker] = start_worker,
) -> TuneResult:
    """Measures a layer into the user's pack.

    Args:
        question: What to measure; without `counts` all powers of two up to a number that suits the device.
        seconds: Time for everything.
        refresh: Whether to forget the layer's times first.
        dry_run: Whether to measure nothing.
        calls: Numbers of calls by number of tokens, which weigh the choice; without, decades count alike.
        start: Starts a process that measures.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    began = time.monotonic()
    platform = platform_at_hand("tune", question.flags.platform)
    if not question.counts:
        most = _CPU_TOKENS if platform.device_type == "cpu" else _GPU_TOKENS
        question = dataclasses.replace(question, counts=token_grid(most))
    first, last = question.counts[0], question.counts[-1]
    if calls is not None and not any(number and first <= at <= last for at, number in calls.items()):
        raise UsageError(
            f"--histogram needs calls of {first} to {last} tokens, which --tokens says to measure, got none"
        )
    flags = dataclasses.replace(question.flags, tokens=last)
    subject = find_subject(flags, question.checkpoint, question.layer)
    question = dataclasses.replace(question, flags=flags, layer=subject.layer)
    selection = entrants(subject.problem, platform, **flags.request())
    path = tuning_path()
    if path is None:
        raise UsageError(f"{VARIABLE} must name a file, got an empty name, which turns measured times off")
    if selection.winner is None:
        return TuneResult(subject, platform, path, None, selection, question.counts, question.routings)
    record = LayerRecord(path, platform, subject.problem, rivals(selection), refresh and not dry_run)
    result = TuneResult(subject, platform, path, record, selection, question.counts, question.routings, is_dry=dry_run)
    if dry_run:
        return result
    deadline = math.inf if seconds is None else began + seconds
    with countdown("tuning") as progress:
        try:
            Tuner(question, platform, record, start, deadline, progress).run()
            record.weigh(calls or {})
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
        cell, scheme, _ = candidate_of(record.decisions[key], platform)
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


def read_histogram(path: Path) -> Mapping[int, int]:
    """Calls by numbers of tokens, at least one.

    Raises:
        UsageError: The file has another form.
    """
    try:
        found = check_mapping("a histogram", read_document(path))
        numbers = {key: int(key) if key.isascii() and key.isdigit() else key for key in found}
        calls = {check_count("tokens", numbers[key]): check_count("calls", found[key], minimum=0) for key in found}
        if not any(calls.values()):
            raise ValueError("it has no calls")
    except ValueError as error:
        form = '{"1": 900, "512": 12}'
        raise UsageError(f"--histogram takes calls by tokens, such as {form}, got {str(path)!r}: {error}") from None
    return calls
