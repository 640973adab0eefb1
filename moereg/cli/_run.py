"""The work of `moereg run`: select, build, permute, run, time, compare."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moereg.cli._layer import (
    RoutedWeights,
    check_run_fits,
    layer_device,
    load_layer,
    platform_at_hand,
    random_hidden_states,
    random_layer,
)
from moereg.cli._options import ProblemFlags, find_subject
from moereg.cli._output import console
from moereg.cli._progress import phase
from moereg.cli._show import format_us, machine, of_wheel, print_notices, show_selection, source_of, why_not
from moereg.dispatch import EmulationWarning, select_backend
from moereg.errors import BackendError, UnsupportedProblemError
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.runtime.memory import format_bytes
from moereg.selection.result import SCHEMA, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.tuning.compare import Comparison
from moereg.tuning.inputs import Call
from moereg.weights.permuted import ExpertWeights

DEFAULT_TOKENS: Final = 64

# So that a backend that answers the second as the first is wrong.
_NUM_CALLS: Final = 2

# Bytes of 16-bit weights that are built only to say what quantizing them costs.
_LARGEST_UNQUANTIZED: Final = 2e9


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run; measurements are None if nothing fitted and nothing ran.

    Attributes:
        subject: The model's or checkpoint's name to show.
        selection: How the backend was chosen.
        num_tokens: T.
        relative_error: Error against the reference; NaN if the output holds one.
        scheme_loss: The scheme's own error against fp32; None if the weights are not quantized, or their originals are
            unknown or too large to keep.
        tolerance: Bound of the error.
        time_us: Median of several calls; None if the numbers are wrong.
        permute_ms: Time to permute the weights once.
        weights_bytes: Bytes of the canonical weights.
        failure: The backend's exception, under its name; empty if it ran.
        damage: What the backend wrote to without permission, under its name; empty if nothing.
    """

    subject: str
    selection: Selection
    num_tokens: int
    relative_error: float | None = None
    scheme_loss: float | None = None
    tolerance: float | None = None
    time_us: float | None = None
    permute_ms: float | None = None
    weights_bytes: int | None = None
    failure: str = ""
    damage: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the backend ran and the error is within the tolerance; None if nothing fitted."""
        if self.failure or self.damage:
            return False
        if self.relative_error is None or self.tolerance is None:
            return None
        return self.relative_error <= self.tolerance  # False for NaN.

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg run --json` prints."""
        return {
            "schema": SCHEMA,
            "backend": self.selection.backend,
            "platform": str(self.selection.platform),
            "problem": self.selection.problem.to_dict(),
            "tokens": self.num_tokens,
            "relative_error": self.relative_error,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "failure": self.failure or None,
            "damage": self.damage or None,
            "time_us": self.time_us,
            "permute_ms": self.permute_ms,
            "selection": self.selection.to_dict(),
        }

    def show(self) -> None:
        """Prints the result or, if nothing fitted, the reasons."""
        selection = self.selection
        winner = selection.winner
        target = console(sys.stdout)
        if winner is None or self.failure or self.damage:
            show_selection(selection, self.subject)
            if winner is not None:
                text = f"FAILED: {self.failure}"
                if not self.failure:
                    text = f"WRONG: {winner.backend} of {winner.provider}: {self.damage}"
                target.print(Text(text, style="bold red"))
            return
        assert self.relative_error is not None and self.tolerance is not None
        assert self.permute_ms is not None and self.weights_bytes is not None
        verdict = Text("right", style="bold green") if self.passed else Text("WRONG", style="bold red")
        comparison = "within" if self.passed else "not within"
        tier = "" if winner.tier == "kernel" else f", {winner.tier}: right numbers, not the speed of the scheme"
        time = "none, since the numbers are wrong"
        if self.time_us is not None:
            time = f"{format_us(self.time_us)} a call of {self.num_tokens} tokens"
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        rows: tuple[tuple[str, str | Text], ...] = (
            ("layer", f"{self.subject}: {selection.problem}"),
            ("platform", machine(selection.platform)),
            ("backend", f"{winner.backend} ({winner.experts}){of_wheel(winner)}, {source_of(selection)}{tier}"),
            ("computes", winner.computes),
            ("weights", f"{format_bytes(self.weights_bytes)}, permuted in {format_us(1e3 * self.permute_ms)}"),
            ("time", time),
            ("error", f"{self.relative_error:.2e}, {comparison} the tolerance {self.tolerance:.1e} of the reference"),
            ("numbers", verdict),
        )
        if self.scheme_loss is not None:
            loss = f"{self.scheme_loss:.2e} against fp32, of {winner.computes} itself"
            rows = (*rows[:-1], ("loss", loss), rows[-1])
        for name, value in rows:
            table.add_row(name, value)
        for decision in nearest_by_backend(selection.decisions):
            if decision is not winner:
                table.add_row("not chosen", why_not(decision))
        target.print(table)
        # Those of the request were logged when the backend was selected.
        print_notices(target, [notice for notice in selection.notices if notice not in selection.request.notices])


def run_layer(flags: ProblemFlags, checkpoint: Path | None, layer: int | None, seed: int) -> RunResult:
    """Builds a layer, runs the selected kernel on this machine and compares it with the reference.

    Takes the values of the options of those names. The result has no measurements where nothing fits.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    num_tokens = DEFAULT_TOKENS if flags.tokens is None else flags.tokens
    flags = dataclasses.replace(flags, tokens=num_tokens)
    found = find_subject(flags, checkpoint, layer)
    problem, subject = found.problem, found.name or "random weights"
    platform = platform_at_hand("run", flags.platform)
    try:
        with warnings.catch_warnings():
            # The result names the tier.
            warnings.simplefilter("ignore", EmulationWarning)
            selection = found.noted(select_backend(problem, platform, **flags.request()))
    except UnsupportedProblemError as error:
        return RunResult(subject, found.noted(error.selection), num_tokens)
    device = layer_device(selection)
    check_run_fits(problem, num_tokens, device, num_calls=_NUM_CALLS)
    with torch.no_grad():
        if found.checkpoint is None or found.layer is None:
            with phase("building weights") as advance:
                built = random_layer(problem, seed, device, advance)
            plain = functools.partial(_unquantized, problem, seed, device)
        else:
            with phase("loading weights") as advance:
                built = load_layer(found.checkpoint, found.layer, problem, device, advance)
            plain = None
        hidden_states = random_hidden_states(problem, num_tokens, seed, device)
        selection = dataclasses.replace(selection, notices=(*selection.notices, *built.notices))
        result = RunResult(subject, selection, num_tokens)
        try:
            return _measure(result, built, plain, hidden_states)
        except BackendError as error:
            # With -v the backend's authors see where.
            logging.getLogger("moereg").info("the layer did not run", exc_info=error.__cause__)
            return dataclasses.replace(result, failure=str(error))


def _unquantized(problem: MoEProblem, seed: int, device: torch.device) -> ExpertWeights | None:
    """The unquantized weights that the random ones were made from, if they are not too large."""
    rows = problem.activation.num_halves + 1
    numel = problem.num_local_experts * rows * problem.intermediate_size * problem.hidden_size
    if problem.quant.weight is None or numel * problem.torch_dtype.itemsize > _LARGEST_UNQUANTIZED:
        return None
    with phase("building unquantized weights") as advance:
        return random_layer(_plain_problem(problem), seed, device, advance).weights


def _plain_problem(problem: MoEProblem) -> MoEProblem:
    return dataclasses.replace(problem, quant=get_scheme("unquantized"))


def _measure(
    result: RunResult,
    layer: RoutedWeights,
    plain: Callable[[], ExpertWeights | None] | None,
    hidden_states: torch.Tensor,
) -> RunResult:
    selection, weights, problem = result.selection, layer.weights, result.selection.problem
    # Before the backend sees anything of the layer.
    inputs = (hidden_states, hidden_states.flip(1))
    assert len(inputs) == _NUM_CALLS
    calls = [Call(rows, *layer.route(rows)) for rows in inputs]
    winner = selection.winner
    assert winner is not None
    alone = dataclasses.replace(selection, decisions=(winner,))
    comparison = Comparison(alone, lambda: weights, {result.num_tokens: calls}, layer_tolerance, phase)
    with phase("running"):
        (row,) = comparison.measure(result.num_tokens, None)
    if row.error is not None:
        raise row.error
    if row.damage:
        return dataclasses.replace(result, damage=row.damage)
    reference = comparison.reference(winner, result.num_tokens)
    # Loaded only now, so that they take no memory while the layer runs.
    unquantized = None if plain is None else plain()
    loss = None
    if unquantized is not None:
        with phase("computing the unquantized reference"):
            loss = relative_error(reference, reference_experts(_plain_problem(problem), unquantized, *calls[0]))
    return dataclasses.replace(
        result,
        tolerance=row.tolerance,
        relative_error=row.relative_error,
        scheme_loss=loss,
        time_us=row.timing.median_us if row.timing else None,
        permute_ms=comparison.permute_ms[winner],
        weights_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values()),
    )
