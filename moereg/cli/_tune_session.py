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
from moereg.platforms import Platform
from moereg.selection.modules import import_modules
from moereg.selection.result import Decision, Selection


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


class _Layer(NamedTuple):
    """The layer of this process."""

    session: LayerSession
    platform: Platform
    default: Decision


_LAYERS: Final[list[_Layer]] = []
"""The one of this process, once it is made."""


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
    session = LayerSession(
        fitting,
        lambda: build_layer(subject, question.seed, device).weights,
        device,
        question.seed,
        watch=lambda decision, step: tell((key_of(decision, platform), step)),
    )
    _LAYERS[:] = [_Layer(session, platform, decisions[0])]
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
    (layer,) = _LAYERS
    session, platform = layer.session, layer.platform
    for decision in session.comparison.candidates:
        if key_of(decision, platform) not in keys:
            session.comparison.leave_out(decision)
    rows = session.measure(point, rounds)
    failures = [
        Failure(key_of(row.decision, platform), f"{row.reason}, at {row.num_tokens} tokens", not row.lacks_memory)
        for row in session.leave_out_failed(rows)
    ]
    default = next((row for row in rows if row.decision == layer.default), None)
    values = {key_of(row.decision, platform): row_values(row, default) for row in rows}
    timed = {key: found for key, found in values.items() if found is not None}
    return AtPoint(timed, failures, str(session.comparison.stopped or ""))


def clocks(tell: Callable[[Any], object]) -> dict[str, int]:
    """The device's clocks under load; empty for a CPU."""
    (layer,) = _LAYERS
    return layer.session.clocks(layer.platform)
