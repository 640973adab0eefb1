"""`moereg explain`: the choice for a layer, or for every layer of a transformers model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from moereg.cli._options import ProblemFlags, Subject
from moereg.cli._output import console
from moereg.cli._show import (
    WIDE,
    is_checked_at_first_use,
    named_machine,
    new_table,
    of_wheel,
    print_notices,
    print_rejected,
    show_selection,
    source_of,
)
from moereg.dispatch import explain_backends
from moereg.errors import one_line
from moereg.evidence.ledger import Evidence, evidence_of
from moereg.platforms import Platform
from moereg.plugins.loader import load_backends
from moereg.selection.result import SCHEMA, Selection

if TYPE_CHECKING:
    from moereg.integrations.transformers import LayerChoice
    from moereg.layer.movement import MovementSelection
    from moereg.prepare_finalize import GroupFacts


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choice for one layer.

    Attributes:
        selection: The selection among backends; over several ranks for the problem that a rank's experts see, or for
            a rank's share if no token dispatcher fits.
        movement: The selection among token dispatchers; None for a single rank.
    """

    subject: Subject
    selection: Selection
    movement: MovementSelection | None = None

    @classmethod
    def of(cls, flags: ProblemFlags, subject: Subject, size: int | None, way: str | None) -> Explanation:
        """Selects for a layer, over several ranks if a number is given. Starts no process.

        Raises:
            MoeregError: The request or the platform is invalid.
        """
        load_backends()  # A plugin's platforms are known once it is loaded.
        if size is None:
            return cls(subject, subject.noted(explain_backends(subject.problem, flags.platform, **flags.request())))
        from moereg.layer.movement import explain_movements

        platform = explain_backends(subject.problem, flags.platform).platform
        movement = explain_movements(subject.problem, group_facts(size, platform), platform, require=way)
        winner = movement.winner
        problem = movement.problem if winner is None else movement.experts_problem(winner)
        return cls(subject, subject.noted(explain_backends(problem, platform, **flags.request())), movement)

    @property
    def fits(self) -> bool:
        """Whether a backend fits, and a token dispatcher if there are several ranks."""
        return self.selection.winner is not None and (self.movement is None or self.movement.winner is not None)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        found, movement = selection_with_evidence(self.selection), self.movement
        return found if movement is None else {**found, "ranks": movement.group.size, "movement": movement.to_dict()}

    def show(self, all_reasons: bool) -> None:
        """Prints the decision table, after that of token dispatchers if there are several ranks."""
        subject, movement = self.subject, self.movement
        if movement is not None:
            target = console(sys.stdout)
            target.print(f"{subject.name}: {subject.problem}" if subject.name else str(subject.problem))
            target.print(movement.table())
            if movement.winner is None:
                target.print(Text("no way of moving tokens fits", style="bold red"))
                return
            target.print(f"experts of a rank behind {movement.winner.name}:")
        show_selection(self.selection, subject.name if movement is None else None, all_reasons)


def group_facts(size: int, platform: Platform) -> GroupFacts:
    """A group of this machine's ranks."""
    from moereg.prepare_finalize import GroupFacts

    return GroupFacts(size, "gloo" if platform.device_type == "cpu" else "nccl", platform.device_type)


@dataclasses.dataclass(frozen=True)
class ModelChoices:
    """The choice for every layer of a directory's model."""

    path: Path
    layers: tuple[LayerChoice, ...]

    @classmethod
    def of(cls, flags: ProblemFlags, path: Path) -> ModelChoices:
        """Selects for every layer.

        Raises:
            MoeregError: Options contradict the model, or the directory has no usable model.
        """
        from moereg.integrations.transformers import explain_model

        flags.check_no_checkpoint_facts("--model-dir")
        return cls(path, explain_model(path, flags.platform, **flags.request(), **flags.wishes()))

    @property
    def fits(self) -> bool:
        """Whether every layer gets a backend."""
        return all(layer.backend is not None for layer in self.layers)

    @property
    def selections(self) -> list[Selection]:
        """One selection per distinct layer."""
        return list({layer.problem: layer.selection for layer in self.layers if layer.selection}.values())

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`: layers, and each distinct selection once."""
        selections = self.selections
        place = {selection.problem: index for index, selection in enumerate(selections)}
        return {
            "schema": SCHEMA,
            "model_dir": str(self.path),
            "layers": [
                {
                    "name": layer.name,
                    "class": layer.class_name,
                    "selected": layer.backend,
                    "refusal": layer.refusal,
                    "selection": None if layer.problem is None else place[layer.problem],
                }
                for layer in self.layers
            ],
            "selections": [selection_with_evidence(selection) for selection in selections],
        }

    def show(self, all_reasons: bool) -> None:
        """Prints a line per run of equal layers, and the reasons if there is no backend."""
        target = console(sys.stdout)
        from moereg.integrations.transformers import grouped

        selections = self.selections
        name = one_line(self.path.resolve().name)
        where = f" on {named_machine(selections[0].platform)}" if selections else ""
        count = len(self.layers)
        target.print(f"{name}: {count} layer{'' if count == 1 else 's'} with experts{where}")
        table = new_table("experts", "layers", "layer", "backend", "why")
        for column in (table.columns[0], table.columns[3]) if target.width < WIDE else ():
            column.no_wrap = True  # The layer's text may be folded between its parts.
        for group in grouped(self.layers):
            first = group[0]
            winner = None if first.selection is None else first.selection.winner
            names = _range_of(first.name, group[-1].name)
            why = first.refusal or ("nothing fits" if first.selection is None else source_of(first.selection))
            backend = Text("none", style="red") if winner is None else Text(f"{winner.backend}{of_wheel(winner)}")
            shown = first.class_name if first.problem is None else str(first.problem)
            table.add_row(names, str(len(group)), shown, backend, why if winner or first.refusal else "nothing fits")
        target.print(table)
        for selection in selections:
            if selection.winner is None:
                target.print(f"nothing fits {selection.problem}:")
                print_rejected(target, "rejected", selection, all_reasons)
        print_notices(target, list(dict.fromkeys(notice for selection in selections for notice in selection.notices)))


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
    return {**values, "verification": found}
