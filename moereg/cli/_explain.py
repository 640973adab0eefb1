"""`moereg explain`: the choice for a layer, or for every layer of a checkpoint."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from rich.text import Text

from moereg.cli._options import ProblemFlags, Subject
from moereg.cli._output import NOTHING_FITS, OK, Result
from moereg.cli._show import (
    bad,
    is_checked_at_first_use,
    named_machine,
    new_table,
    print_notices,
    print_rejected,
    say,
    show_selection,
    source_of,
    verification,
)
from moereg.dispatch import explain_backends
from moereg.errors import CheckpointError, one_line
from moereg.evidence.ledger import Evidence, evidence_of
from moereg.selection.loader import load_backends
from moereg.selection.result import SCHEMA, Selection
from moereg.selection.ways_out import ways_out


def explain_layer(
    flags: ProblemFlags, subject: Subject, size: int | None, dispatcher: str | None, all_reasons: bool
) -> Result:
    """Selects for a layer, over several ranks if a number is given. Starts no process.

    Over ranks the selection is for the problem that a rank's experts see, or for a rank's share if no token dispatcher
    fits.
    """
    load_backends()  # A plugin's platforms are known once it is loaded.
    if size is None:
        selection = subject.noted(explain_backends(subject.problem, flags.platform, **flags.request()))
        code = NOTHING_FITS if selection.winner is None else OK
        show = functools.partial(show_selection, selection, subject.name, all_reasons)
        return Result(selection_with_evidence(selection), show, code)
    from moereg.prepare_finalize import GroupFacts
    from moereg.selection.dispatcher import explain_dispatchers

    platform = explain_backends(subject.problem, flags.platform).platform
    group = GroupFacts(size, "gloo" if platform.device_type == "cpu" else "nccl", platform.device_type)
    choice = explain_dispatchers(subject.problem, group, platform, require=dispatcher)
    winner = choice.winner
    problem = choice.problem if winner is None else choice.experts_problem(winner)
    selection = subject.noted(explain_backends(problem, platform, **flags.request()))
    found = {**selection_with_evidence(selection), "ranks": size, "dispatcher": choice.to_dict()}

    def show_both() -> None:
        say(f"{subject.name}: {subject.problem}" if subject.name else str(subject.problem), choice.table())
        if winner is None:
            say(bad("no token dispatcher fits"))
        else:
            say(f"experts of a rank behind {winner.name}:")
            show_selection(selection, None, all_reasons)

    return Result(found, show_both, OK if winner is not None and selection.winner is not None else NOTHING_FITS)


def explain_checkpoint(flags: ProblemFlags, path: Path) -> Result:
    """Selects for every layer with experts, as tensors' headers say, or else as transformers reads config.json."""
    from moereg.checkpoints import read_problems
    from moereg.checkpoints._files import CheckpointFiles
    from moereg.integrations.transformers import LayerChoice, explain_model, grouped

    flags.check_no_checkpoint_facts()
    load_backends()  # A plugin's platforms are known once it is loaded.
    layers: tuple[LayerChoice, ...] = ()
    with CheckpointFiles(path) as files:
        folder = files.path
    notices = list(flags.notices())
    try:
        problems = read_problems(path, **flags.wishes())
        each = {one: explain_backends(one, flags.platform, **flags.request()) for one in {*problems.values()}}
        layers = tuple(LayerChoice(f"layers.{index}", "", one, each[one]) for index, one in problems.items())
    except CheckpointError as error:
        if not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
            raise
        notices.append(f"from config.json alone: {error}")
    layers = layers or explain_model(folder, flags.platform, **flags.request(), **flags.wishes())
    # Each distinct layer's once.
    selections = {layer.problem: layer.selection for layer in layers if layer.selection}
    place = {problem: index for index, problem in enumerate(selections)}
    found = {
        "schema": SCHEMA,
        "checkpoint": str(path),
        "layers": [
            {
                "name": layer.name,
                "class": layer.class_name,
                "selected": layer.backend,
                "refusal": layer.refusal,
                "selection": None if layer.problem is None else place[layer.problem],
            }
            for layer in layers
        ],
        "selections": [selection_with_evidence(selection) for selection in selections.values()],
        "notices": notices,
    }

    def show() -> None:
        where = f" on {named_machine(next(iter(selections.values())).platform)}" if selections else ""
        count = len(layers)
        say(f"{one_line(path.resolve().name)}: {count} layer{'' if count == 1 else 's'} with experts{where}")
        rows: list[tuple[str | Text, ...]] = []
        for group in grouped(layers):
            first, selection = group[0], group[0].selection
            winner = None if selection is None else selection.winner
            why = source_of(selection) if selection is not None and winner is not None else "nothing fits"
            backend = Text("none", style="red") if winner is None else winner.label
            layer = first.class_name if first.problem is None else str(first.problem)
            names = _range_of(first.name, group[-1].name)
            rows.append((names, str(len(group)), layer, backend, first.refusal or why))
        say(new_table("experts", "layers", "layer", "backend", "why", rows=rows))
        for selection in selections.values():
            if selection.winner is None:
                say(f"nothing fits {selection.problem}:")
                print_rejected("rejected", selection, flags.verbose)
                say(*(f"- {way}" for way in ways_out(selection)))
        fitting = [one for one in selections.values() if one.winner is not None]
        say(*dict.fromkeys(f"{one.chosen.label}: {verification(one.chosen, one.platform)}" for one in fitting))
        print_notices(dict.fromkeys((*notices, *(each for one in selections.values() for each in one.notices))))

    return Result(found, show, OK if all(layer.backend is not None for layer in layers) else NOTHING_FITS)


def _range_of(first: str, last: str) -> str:
    """A range of names, such as `model.layers.0-47.mlp.experts` if they differ only in a number."""
    if first == last:
        return first
    pairs = list(zip(first.split("."), last.split("."), strict=False))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if first.count(".") != last.count(".") or len(different) != 1 or not all(part.isdecimal() for part in different[0]):
        return f"{first} to {last}"
    return ".".join(one if one == other else f"{one}-{other}" for one, other in pairs)


def selection_with_evidence(selection: Selection) -> dict[str, Any]:
    """The object that `moereg explain --json` prints: the selection and the chosen cell's evidence.

    `verification` is None if nothing fits or the cell is not registered here; a rejected decision's
    `verified_on_platform` is None. `verified_on` is the machine of the nearest current record, None without one.
    """
    winner = selection.winner
    found = None
    if winner is not None and winner.cell is not None:
        evidence = evidence_of(winner.cell)
        found = {
            **evidence.to_dict(),
            "verified_on_platform": evidence.on(selection.platform) is not None,
            "checked_at_first_use": is_checked_at_first_use(winner, selection.platform, evidence),
        }
    values = selection.to_dict()
    for decision, shown in zip(selection.decisions, values["decisions"], strict=True):
        cell = decision.cell
        evidence = evidence_of(cell) if decision.accepted and cell is not None else Evidence((), (), ())
        is_verified = evidence.on(selection.platform) is not None
        shown["verified_on_platform"] = is_verified if decision.accepted else None
        nearest = evidence.nearest(selection.platform)
        shown["verified_on"] = None if nearest is None else {"device": nearest.device, "versions": nearest.versions}
    return {**values, "verification": found, "ways_out": list(ways_out(selection)) if winner is None else []}
