"""`moereg explain --model-dir`: the choice for every layer of a model, as transformers would build it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from rich.text import Text

from moereg.cli._info import selection_with_evidence
from moereg.cli._options import ProblemFlags, usage_errors
from moereg.cli._output import console
from moereg.cli._show import WIDE, machine, new_table, of_wheel, print_notices, print_reasons, source_of
from moereg.errors import one_line
from moereg.integrations.transformers import LayerChoice, explain_model, grouped
from moereg.selection import SCHEMA, Selection, nearest_by_backend

__all__ = ["ModelChoices", "explain_model_dir", "show_model_choices"]


@dataclasses.dataclass(frozen=True)
class ModelChoices:
    """The choice for every layer of a model.

    Attributes:
        path: The model's directory.
        layers: In the order of the model.
    """

    path: Path
    layers: tuple[LayerChoice, ...]

    @property
    def fits(self) -> bool:
        """Whether every layer gets a backend."""
        return all(layer.backend is not None for layer in self.layers)

    @property
    def selections(self) -> list[Selection]:
        """One for each different layer."""
        return list({layer.problem: layer.selection for layer in self.layers if layer.selection}.values())

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`: layers, and each different selection once."""
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


def explain_model_dir(flags: ProblemFlags, path: Path) -> ModelChoices:
    """Asks for every layer.

    Raises:
        MoeregError: Options contradict the model, or no model can be made of the directory.
    """
    flags.check_no_checkpoint_facts("--model-dir")
    with usage_errors():
        layers = explain_model(path, flags.platform, **flags.request(), **flags.wishes())
    return ModelChoices(path, layers)


def show_model_choices(choices: ModelChoices) -> None:
    """Prints a line for each run of equal layers, and why where there is no backend."""
    target = console(sys.stdout)
    selections = choices.selections
    name = one_line(choices.path.resolve().name)
    where = ""
    if selections:
        platform = selections[0].platform
        where = f" on {machine(platform) if platform.probed else f'{platform} (named, not this machine)'}"
    count = len(choices.layers)
    target.print(f"{name}: {count} layer{'' if count == 1 else 's'} with experts{where}")
    table = new_table("experts", "layers", "layer", "backend", "why")
    for column in (table.columns[0], table.columns[3]) if target.width < WIDE else ():
        column.no_wrap = True  # The layer is folded, between its parts.
    for group in grouped(choices.layers):
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
            for decision in nearest_by_backend(selection.decisions):
                reasons = [vars(reason) for reason in decision.reasons]
                print_reasons(target, f"{decision.backend} does not fit {selection.problem}:", reasons)
    print_notices(target, list(dict.fromkeys(notice for selection in selections for notice in selection.notices)))


def _range_of(first: str, last: str) -> str:
    """Names from one to another: `model.layers.0-47.mlp.experts` where they differ in a number alone."""
    if first == last:
        return first
    pairs = list(zip(first.split("."), last.split("."), strict=False))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if first.count(".") != last.count(".") or len(different) != 1 or not all(part.isdecimal() for part in different[0]):
        return f"{first} to {last}"
    return ".".join(one if one == other else f"{one}-{other}" for one, other in pairs)
