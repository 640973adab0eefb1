"""One session of `moereg tune`: functions that a worker process calls, which keeps the layer between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import torch

from moereg.bench.inputs import num_calls
from moereg.bench.points import Point
from moereg.bench.session import Key, LayerSession, entrants, key_of, rivals, row_values
from moereg.cli._bench import build_layer, check_run_fits, layer_device, platform_at_hand
from moereg.cli._options import ProblemFlags, find_subject
from moereg.errors import TooLargeError
from moereg.evidence.significance import ASKED
from moereg.selection.modules import import_modules
from moereg.selection.result import Selection


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
    selection = entrants(subject.problem, platform, **flags.request())
    found = rivals(selection)
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
