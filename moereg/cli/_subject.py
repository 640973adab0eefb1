"""The layer that a command is about: a model's, a checkpoint's, or one of given sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moereg.cli._options import ProblemFlags, UsageError, usage_errors
from moereg.errors import one_line
from moereg.problem import MoEProblem
from moereg.selection import Selection

__all__ = ["Subject", "find_subject"]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A layer and what to call it.

    Attributes:
        name: The model's or checkpoint's name; None where only sizes were given.
        problem: The layer; of a checkpoint, as its headers say.
        checkpoint: Its directory, where the layer is one of a checkpoint.
        layer: The index there.
        notices: What a user may not expect of the options, one line each.
    """

    name: str | None
    problem: MoEProblem
    checkpoint: Path | None = None
    layer: int | None = None
    notices: tuple[str, ...] = ()

    def noted(self, selection: Selection) -> Selection:
        """The selection with these notices first, so that tables and JSON have them."""
        return dataclasses.replace(selection, notices=(*self.notices, *selection.notices))


def find_subject(flags: ProblemFlags, checkpoint: Path | None, layer: int | None) -> Subject:
    """The layer that options name. Of a checkpoint, no more than headers are read.

    Args:
        flags: The problem; with a checkpoint, what it leaves open.
        checkpoint: What `--checkpoint` says.
        layer: What `--layer` says; the first layer with experts where None.

    Raises:
        MoeregError: Options are missing or contradict each other, or the checkpoint cannot be read.
    """
    if checkpoint is None:
        if layer is not None:
            raise UsageError("--layer needs --checkpoint, whose layer it is")
        return Subject(flags.model, flags.problem(), notices=flags.notices())
    from moereg.checkpoints import moe_layers, read_problem

    flags.check_no_checkpoint_facts()
    with usage_errors():
        if layer is None:
            with_experts = moe_layers(checkpoint)
            if not with_experts:
                raise UsageError(f"no layer of {str(checkpoint)!r} has experts; give a Mixture-of-Experts checkpoint")
            layer = with_experts[0]
        problem = read_problem(checkpoint, layer, **flags.wishes())
    name = f"{one_line(checkpoint.resolve().name)}, layer {layer}"
    return Subject(name, problem, checkpoint, layer, flags.notices())
