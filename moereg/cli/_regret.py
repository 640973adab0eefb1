"""`moereg regret`: the time that the present choice loses against the fastest measured cell, by layer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from moereg.arguments import check_count, check_mapping
from moereg.cli._bench import platform_at_hand
from moereg.cli._options import ProblemFlags, Shown, Subject, UsageError, find_subject, first_layer
from moereg.cli._output import NOTHING_FITS, OK, WRONG_NUMBERS, console
from moereg.cli._show import machine, new_table, print_notices, show_selection
from moereg.dispatch import explain_backends
from moereg.evidence.store import read_document
from moereg.measured.read import measured_order, read_tuning
from moereg.measured.regret import Regret, regret_of
from moereg.platforms import Platform
from moereg.selection.decide import alike, candidate_of, unmeasured
from moereg.selection.result import SCHEMA, Decision, Selection

_Calls = Mapping[int, int]


class _Layer(NamedTuple):
    """One distinct layer: where it is, its present choice, that by priority alone, and what the former loses."""

    subjects: list[Subject]
    selection: Selection
    default: Decision | None
    cells: Mapping[int, Decision]
    regret: Regret | None
    left_out: Mapping[Decision, str]
    unknown: list[Decision]

    @property
    def name(self) -> str:
        more = f" and {len(self.subjects) - 1} like it" if len(self.subjects) > 1 else ""
        return f"{self.subjects[0].name or 'sizes'}{more}"

    @property
    def not_measured(self) -> list[str]:
        regret = self.regret
        if regret is None:
            return ["no pack in force has valid times of this layer; moereg tune measures it"]
        lacking = [f"{point.tokens:,}" for point in regret.points if point.loss is None]
        texts = [f"the choice at {', '.join(lacking)} tokens"] if lacking else []
        texts += [f"{_text(decision)}, which fits and has no valid times" for decision in self.unknown]
        if regret.calls_outside:
            first, last = regret.points[0].tokens, regret.points[-1].tokens
            texts.append(f"{regret.calls_outside:,.0f} calls, of fewer than {first} or more than {last:,} tokens")
        return texts

    def points(self) -> list[dict[str, Any]]:
        return [
            {
                "tokens": point.tokens,
                "share": point.share,
                "chosen": _named(_serving(self.selection, point.tokens)),
                "fastest": None if point.fastest is None else _named(self.cells[point.fastest]),
                "loss": point.loss,
                "default_loss": point.default_loss,
            }
            for point in (self.regret.points if self.regret else ())
        ]

    def to_dict(self) -> dict[str, Any]:
        regret = self.regret
        return {
            "layers": [subject.layer for subject in self.subjects if subject.layer is not None],
            "problem": self.selection.problem.to_dict(),
            "selected": None if self.selection.winner is None else _named(self.selection.winner),
            "default": None if self.default is None else _named(self.default),
            "loss": regret and regret.loss,
            "default_loss": regret and regret.default_loss,
            "tokens": self.points(),
            "left_out": [{**_named(decision), "reason": text} for decision, text in self.left_out.items()],
            "not_measured": self.not_measured,
        }

    def show(self, over: str) -> None:
        target, regret = console(sys.stdout), self.regret
        if self.default is None:
            show_selection(self.selection, self.name)
            return
        target.print(f"{self.name}: {self.selection.problem}")
        if regret is not None:
            table = new_table("T", "gets", "loses", "fastest measured", "default loses")
            table.columns[2].justify = table.columns[4].justify = "right"
            for point in regret.points:
                fastest = "" if point.fastest is None else _text(self.cells[point.fastest])
                gets, losses = _text(_serving(self.selection, point.tokens)), (point.loss, point.default_loss)
                table.add_row(f"{point.tokens:,}", gets, _percent(losses[0]), fastest, _percent(losses[1]))
            target.print(table)
        print_notices(target, (*self.subjects[0].notices, *self.selection.notices))
        for decision, text in self.left_out.items():
            target.print(f"left out when it was measured: {_text(decision)}: {text}")
        for text in self.not_measured:
            target.print(Text(f"not measured: {text}", style="yellow"))
        if regret is not None and regret.loss is not None:
            target.print(f"over {over} the choice loses {_percent(regret.loss)} against the fastest measured")
            target.print(f"the default, {_text(self.default)}, loses {_percent(regret.default_loss)}")


def _named(decision: Decision) -> dict[str, str]:
    return {"backend": decision.backend, "experts": decision.experts}


def _text(decision: Decision) -> str:
    return f"{decision.backend} ({decision.experts.removesuffix('Experts')})"


def _serving(selection: Selection, tokens: int) -> Decision:
    return next(decision for most, decision in selection.plan if most is None or tokens <= most)


def _percent(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.1%}"


def compare_choices(
    flags: ProblemFlags, checkpoint: Path | None, layer: int | None, histogram: Path | None, fail_above: float | None
) -> Shown:
    """Compares the choices for a layer, or for all of a checkpoint, with the times of the packs in force.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    calls = None if histogram is None else read_histogram(histogram)
    platform = platform_at_hand("regret", flags.platform)
    places: tuple[int | None, ...] = (layer,)
    if checkpoint is not None and layer is None:
        from moereg.checkpoints import moe_layers

        places = moe_layers(checkpoint) or (first_layer(checkpoint),)
    subjects: dict[Any, list[Subject]] = {}
    for place in places:
        subject = find_subject(flags, checkpoint, place)
        subjects.setdefault(subject.problem, []).append(subject)
    found = [_layer(each, flags, platform, calls) for each in subjects.values()]
    failures = _failures(found, fail_above)
    rows = [one.to_dict() for one in found]
    values = {"schema": SCHEMA, "platform": str(platform), "calls": calls, "rows": rows, "failures": failures}

    def show() -> None:
        console(sys.stdout).print(f"on {machine(platform)}")
        for one in found:
            one.show("equal decades of tokens" if calls is None else f"{sum(calls.values()):,} calls")
        for text in failures:
            console(sys.stdout).print(Text(text, style="bold red"))

    fits = all(one.default is not None for one in found)
    return Shown(lambda: values, show, NOTHING_FITS if not fits else WRONG_NUMBERS if failures else OK)


def _failures(found: list[_Layer], fail_above: float | None) -> list[str]:
    if fail_above is None:
        return []
    losses = {one.name: one.regret.loss for one in found if one.regret is not None}
    above = [f"{name} loses {loss:.1%}" for name, loss in losses.items() if loss and 100 * loss > fail_above]
    lacking = [one.name for one in found if one.not_measured]
    texts = [f"more than --fail-above {fail_above:g}: {', '.join(above)}"] if above else []
    return texts + (
        [f"--fail-above needs times of everything, got none or not all of {', '.join(lacking)}"] if lacking else []
    )


def _layer(subjects: list[Subject], flags: ProblemFlags, platform: Platform, calls: _Calls | None) -> _Layer:
    problem = subjects[0].problem
    selection = explain_backends(problem, platform, **flags.request())
    static = unmeasured(selection)
    default, decisions = static.winner, alike(static.decisions, selection.request)
    candidates = [candidate_of(one, platform) for one in decisions]
    layer = measured_order(read_tuning(), problem, platform, candidates).layer
    if default is None or layer is None or not layer.times.tokens:
        return _Layer(subjects, selection, default, {}, None, {}, [])
    cells = {cell: decisions[place] for cell, place in layer.cells.items()}
    indices = {decision: cell for cell, decision in cells.items()}
    chosen = {tokens: indices.get(_serving(selection, tokens)) for tokens in layer.times.tokens}
    regret = regret_of(layer.times, chosen, indices[default], list(cells), calls)
    left_out = {decisions[place]: text for place, text in layer.left_out.items()}
    unknown = [decision for decision in decisions if decision not in indices and decision not in left_out]
    return _Layer(subjects, selection, default, cells, regret, left_out, unknown)


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
