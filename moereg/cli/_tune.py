"""`moereg tune`: measures every cell that could run a layer here, in two fresh processes, into the user's pack."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moereg.arguments import check_count, check_mapping
from moereg.bench.points import GUARD, first_points, token_grid
from moereg.bench.record import LayerRecord
from moereg.bench.session import Key, candidates_to_time, tuning_candidates
from moereg.bench.timing import ROUNDS, SECONDS
from moereg.cli._bench import check_routing, parse_counts, platform_at_hand
from moereg.cli._options import UsageError, find_subject
from moereg.cli._output import NOTHING_FITS, OK, UNFINISHED, WRONG_NUMBERS, Result
from moereg.cli._progress import phase
from moereg.cli._show import (
    bad,
    format_us,
    good,
    machine,
    new_table,
    print_notices,
    print_rejected,
    say,
    show_selection,
)
from moereg.cli._tuner import Question, Tuner, Unfinished, start_worker
from moereg.errors import shown
from moereg.evidence.ledger import evidence_of
from moereg.evidence.measured import Measured, Source, tuning_path
from moereg.evidence.on_machine import ADMITTED, QUARANTINE, AdmissionRecord
from moereg.evidence.pack import VARIABLE
from moereg.evidence.plans import LayerTimes, with_ranges
from moereg.evidence.significance import ASKED, NUM_SESSIONS
from moereg.evidence.store import read_document
from moereg.platforms import Platform
from moereg.runtime.progress import duration
from moereg.selection.decide import candidate_of
from moereg.selection.result import SCHEMA
from moereg.testing.worker import Worker

_GPU_TOKENS: Final = 8192
_CPU_TOKENS: Final = 512


def _winners(record: LayerRecord | None, routings: Sequence[str]) -> list[dict[str, Any]]:
    """The fastest cell at each number of tokens, whatever its layout: the default where nothing beats it."""
    if record is None or not record.rows:
        return []
    order = [record.index(key) for key in record.participants]
    times = LayerTimes(record.rows, order[0])
    ranges = with_ranges(times, order, order[0], order[1:])
    found = []
    for tokens in times.tokens:
        cell = next(cell for most, cell in ranges if most is None or tokens <= most)
        own = [row for row in times.rows if (row.cell, row.tokens) == (cell, tokens) and row.routing in routings]
        changes = {
            number: [row.log_ratio for row in own if number in (None, row.session)]
            for number in dict.fromkeys((None, *(row.session for row in own)))
        }
        change, *by_session = (math.expm1(statistics.fmean(logs)) for logs in changes.values())
        backend, experts, *_ = record.pack.cells[cell].cell_key
        found.append(
            {
                "tokens": tokens,
                "backend": backend,
                "experts": experts,
                "is_default": cell == times.default,
                "time_us": statistics.fmean(row.median_us for row in own),
                "change": change,
                "sessions": by_session,
            }
        )
    return found


def _show_winners(winners: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for one in winners:
        name = f"{one['backend']} (default)" if one["is_default"] else one["backend"]
        changes = [] if one["is_default"] else [f"{each:+.1%}" for each in (one["change"], *one["sessions"])]
        rows.append((f"{one['tokens']:,}", name, format_us(one["time_us"]), *changes))
    sessions = (f">session {each + 1}" for each in range(NUM_SESSIONS))
    say(new_table(">T", "backend", ">time", ">change", *sessions, rows=rows))


def _show_plan(record: LayerRecord, question: Question) -> None:
    points = len(first_points(question.counts, question.routings))
    done = sum(len(record.measured(number)) for number in record.sessions)
    left = max(0, NUM_SESSIONS * points - done) * len(record.participants)
    say(
        f"would measure: {', '.join(map(_text, record.participants))}",
        f"at {len(question.counts)} numbers of tokens up to {question.counts[-1]:,} and more where the winner changes, "
        f"in {NUM_SESSIONS} sessions: {NUM_SESSIONS * points} points or more, {done} of them measured",
        f"at most {ROUNDS} rounds or {SECONDS:g} s of each: {duration(left * SECONDS)} if all are that slow",
    )


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
) -> Result:
    """Measures a layer into the user's pack, of whose times `refresh` forgets the layer's first.

    Without `counts` the question is about all powers of two up to a number that suits the device; without `calls` by
    number of tokens, which weigh the choice, decades count alike. `start` starts a process that measures.
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
    subject = find_subject(flags)
    flags = dataclasses.replace(flags, layer=subject.layer)
    question = dataclasses.replace(question, flags=flags)
    selection = tuning_candidates(subject.problem, platform, **flags.request())
    path = tuning_path()
    if path is None:
        raise UsageError(f"{VARIABLE} must name a file, got an empty name, which turns measured times off")
    record = None
    unfinished = ""
    if selection.winner is not None:
        record = LayerRecord(path, platform, subject.problem, candidates_to_time(selection), refresh and not dry_run)
    if record is not None and not dry_run:
        deadline = math.inf if seconds is None else began + seconds
        with phase("tuning") as advance:
            try:
                Tuner(question, platform, record, start, deadline, advance).run()
                record.weigh(calls or {})
            except Unfinished as error:
                unfinished = str(error)
        _admit(record, platform)
    keys: Sequence[Key] = [] if record is None else record.keys
    plan = Measured()
    if record is not None:
        # What selection reads from the pack; its ranges have indices of the keys.
        candidates = [candidate_of(record.decisions[key], platform) for key in keys]
        plan = Source(record.pack).order(selection.problem, platform, candidates)
    selected = keys[plan.ranges[-1][1] if plan.ranges else 0] if keys else None
    winners = _winners(record, question.routings)
    values = {
        "schema": SCHEMA,
        "problem": selection.problem.to_dict(),
        "platform": str(platform),
        "file": str(path),
        "tokens": list(question.counts),
        "candidates": [_named(key) for key in keys],
        "default": _named(keys[0]) if keys else None,
        "selected": _named(selected) if selected else None,
        "plan": [[most, _named(keys[index])] for most, index in plan.ranges],
        "note": plan.note or None,
        "winners": winners,
        "left_out": [{**_named(key), "reason": text} for key, text in (record.left_out if record else {}).items()],
        "wrong": [{**_named(key), "reason": text} for key, text in (record.wrong if record else {}).items()],
        "unfinished": unfinished or None,
    }

    def show() -> None:
        if record is None:
            return show_selection(selection, subject.name, flags.verbose)
        say(f"{subject.name or 'sizes'}: {selection.problem}", f"on {machine(platform)}")
        if dry_run:
            _show_plan(record, question)
        elif winners:
            _show_winners(winners)
        say(*(f"left out: {_text(key)}: {reason}" for key, reason in record.left_out.items()))
        kept = "" if QUARANTINE.path() is None else "; it is quarantined here until its code or versions change"
        say(*(bad(f"WRONG: {_text(key)}: {reason}{kept}") for key, reason in record.wrong.items()))
        print_rejected("not measured", selection, flags.verbose)
        print_notices((*subject.notices, *selection.notices))
        if unfinished:
            say(bad(f"unfinished: {unfinished}; the same command goes on"))
        elif dry_run:
            say(f"nothing was measured; times would go to {path}")
        elif selected is None:
            say(bad("every candidate failed: nothing was timed"))
        else:
            say(*(f"calls of up to {most} tokens get {_text(keys[index])}" for most, index in plan.ranges[:-1]))
            text = f"nothing beats the default: layers of this shape get {_text(keys[0])} as before"
            if selected != keys[0]:
                text = f"layers of this shape now get {_text(selected)} (was {_text(keys[0])})"
            say(f"times are in {path}; delete it, or set {VARIABLE}= to choose without it")
            say(good("; ".join(filter(None, (text, plan.note)))))

    code = NOTHING_FITS if record is None else WRONG_NUMBERS if record.wrong else UNFINISHED if unfinished else OK
    return Result(values, show, code)


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
    """Numbers of tokens as an option has them: of one number all powers of two up to it."""
    counts = parse_counts(text, "1,16,4096")
    return token_grid(counts[0]) if len(counts) == 1 else counts


def parse_routings(text: str) -> tuple[str, ...]:
    """Routings as an option has them."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        check_routing(name)
    if not names or not set(names) <= set(ASKED):
        raise UsageError(
            f"--routing takes {' and '.join(ASKED)}, got {shown(text)}; {GUARD} is always measured as a guard"
        )
    return names


def read_histogram(path: Path) -> Mapping[int, int]:
    """Calls by numbers of tokens, at least one."""
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
