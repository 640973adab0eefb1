"""`moereg quantize`: compares a checkpoint's layer in every scheme that fits."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file

from moereg.checkpoints import CheckpointLayer, read_problem
from moereg.cli._bench import MAX_FRACTION, layer_device, load_layer, platform_at_hand, random_hidden_states
from moereg.cli._options import ProblemFlags, UsageError, first_layer
from moereg.cli._output import console
from moereg.cli._progress import SILENT_SECONDS, phase
from moereg.cli._show import answers, format_us, format_us_range, new_table, versions_of
from moereg.dispatch import explain_backends
from moereg.errors import TooLargeError, one_line, shown
from moereg.evidence.provenance import provenance
from moereg.numerics.reference import calibrate_activation_scales, reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.plugins.loader import find_scheme
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.selection.result import SCHEMA, Decision, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme, get_scheme
from moereg.tuning.compare import Comparison, Measurement
from moereg.tuning.inputs import Call, num_calls
from moereg.tuning.roofline import expert_bytes
from moereg.weights.permuted import ExpertWeights

DEFAULT_TOKENS: Final = (1, 64)
# Fewest tokens to compute errors and activation scales from.
_SAMPLE_TOKENS: Final = 64
_ROUNDS: Final = 16
_SECONDS: Final = 0.3
"""Choosing among twenty schemes needs no third digit, and emulations on a CPU take a second per call."""
_LETTERS: Final = string.ascii_lowercase + string.ascii_uppercase
_SKETCH: Final = (60, 12)
_FEWEST_POINTS: Final = 3
_EMULATION: Final = "~"


@dataclasses.dataclass(frozen=True)
class Question:
    """The request: the options' values.

    Attributes:
        token_counts: Tokens of the timed calls, ascending.
        inputs: Real inputs [T,H] by layer; layers without get random ones.
    """

    checkpoint: Path
    layer: int | None
    schemes: tuple[QuantScheme, ...]
    token_counts: tuple[int, ...]
    inputs: Mapping[int, torch.Tensor]
    seed: int


@dataclasses.dataclass(frozen=True)
class SchemeRow:
    """One scheme, or the original.

    Attributes:
        num_bytes: Bytes of the layer's canonical weights.
        bits: Bits per weight, including scales and zero points.
        weights_error: Error of the dequantized weights against the original ones.
        output_error: Error of the scheme's reference output against the original's in fp32.
        measured: Measurements in the order of the question's token counts.
        original_us: Times of the original, taken alongside; NaN if there is none.
    """

    quant: str
    decision: Decision
    num_bytes: int
    bits: float
    weights_error: float
    output_error: float
    measured: tuple[Measurement, ...]
    original_us: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether the backend ran and its numbers are right for the scheme."""
        return all(row.passed for row in self.measured)

    def to_dict(self) -> dict[str, Any]:
        """One row of `moereg quantize --json`."""
        return {
            "quant": self.quant,
            "computes": self.decision.computes,
            "backend": self.decision.backend,
            "experts": self.decision.experts,
            "tier": self.decision.tier,
            "bytes": self.num_bytes,
            "bits": self.bits,
            "weights_error": self.weights_error,
            "output_error": self.output_error,
            "passed": self.passed,
            "times": [
                {
                    "tokens": row.num_tokens,
                    "time_us": row.time_us,
                    "original_us": original_us,
                    "speedup": original_us / row.time_us,
                    "relative_error": row.relative_error,
                    "tolerance": row.tolerance,
                    "passed": row.passed,
                    "failure": row.failure or None,
                    "damage": row.damage or None,
                }
                for row, original_us in zip(self.measured, self.original_us, strict=True)
            ],
        }


@dataclasses.dataclass(frozen=True)
class QuantizeResult:
    """The result; `original` is None if nothing fitted.

    Attributes:
        problem: The layer as stored.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        inputs: `random` or `given`.
        rows: Schemes that fit, in the question's order.
        skipped: Name and nearest candidate of each scheme that nothing here computes.
    """

    question: Question
    subject: str
    problem: MoEProblem
    platform: Platform
    measured_on: Mapping[str, Any]
    inputs: str
    original: SchemeRow | None = None
    rows: tuple[SchemeRow, ...] = ()
    skipped: tuple[tuple[str, Selection], ...] = ()

    @property
    def passed(self) -> bool | None:
        """Whether everything that ran was right; None if nothing fitted."""
        if not self.rows or self.original is None:
            return None
        return all(row.passed for row in (self.original, *self.rows))

    def unbeaten(self) -> tuple[SchemeRow, ...]:
        """Rows that are Pareto-optimal in size, error and time, without wrong ones and emulations."""

        def values(row: SchemeRow) -> tuple[float, ...]:
            return (row.num_bytes, row.output_error, row.measured[-1].time_us)

        rows = [row for row in self.rows if row.passed and row.decision.tier == "kernel"]
        return tuple(
            row
            for row in rows
            if not any(
                values(other) != values(row)
                and all(mine >= theirs for mine, theirs in zip(values(row), values(other), strict=True))
                for other in rows
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg quantize --json` prints."""
        return {
            "schema": SCHEMA,
            "checkpoint": str(self.question.checkpoint),
            "layer": self.question.layer,
            "problem": self.problem.to_dict(),
            "platform": str(self.platform),
            **{name: self.measured_on[name] for name in ("device", "versions", "commit", "date")},
            "inputs": self.inputs,
            "original": None if self.original is None else self.original.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "unbeaten": [row.quant for row in self.unbeaten()],
            "skipped": [
                {"quant": name, "reasons": nearest_by_backend(selection.decisions)[0].to_dict()["reasons"]}
                for name, selection in self.skipped
            ],
        }

    def show(self) -> None:
        """Prints the comparison, or the reasons if nothing fitted."""
        target = console(sys.stdout)
        question, original = self.question, self.original
        target.print(f"{self.subject}: {self.problem}")
        versions = versions_of(self.measured_on)
        target.print(f"on {self.measured_on['device']} ({self.platform}), {versions}, {self.measured_on['date']}")
        if original is not None:
            what = "the layer's own inputs" if self.inputs == "given" else "random hidden states"
            target.print(f"errors against the original in fp32, of weights and of output, on {what}")
            target.print(_table(self, original))
            _print_notes(target.print, self)
            if len(self.rows) >= _FEWEST_POINTS:
                size = format_bytes(original.num_bytes)
                target.print(f"\nerror of the output (log) over size, up to the original's {size}:")
                for line in sketch(self):
                    target.print(f"  {line}")
        why: dict[str, list[str]] = {}
        for name, selection in self.skipped:
            nearest = answers(selection)[0]
            why.setdefault(f"{nearest.backend}: {nearest.reasons[0].text}", []).append(name)
        for reason, names in why.items():
            target.print(f"not on this machine: {', '.join(names)} ({reason})")
        for row in (*([original] if original else []), *self.rows):
            for measured in row.measured:
                if not measured.passed:
                    error = f"WRONG: {measured.relative_error:.1e} > {measured.tolerance:.1e} from its own reference"
                    fault = measured.failure or measured.damage or error
                    label = f"{row.quant} on {row.decision.backend} at {measured.num_tokens} tokens"
                    target.print(Text(f"{label}: {fault}", style="bold red"))
        if not self.rows:
            is_original = len(self.skipped) < len(question.schemes)
            what = "nothing here computes the original, which the others are compared with"
            target.print(Text(what if is_original else "nothing fits", "bold red"))


def _print_notes(show: Any, result: QuantizeResult) -> None:
    unbeaten = [row.quant for row in result.unbeaten()]
    if len(result.rows) > 1 and unbeaten:
        show("* Pareto-optimal: nothing here is smaller, more accurate and faster")
    if any(row.decision.tier != "kernel" for row in result.rows):
        show(f"{_EMULATION} an emulation here: the scheme's numbers without its speed")
    others = [row for row in result.rows if row.decision.computes != row.quant]
    if others:
        names = ", ".join(f"{row.quant} as {row.decision.computes}" for row in others)
        show(f"computed with 16-bit activations, which are nearer: {names}")
    backends = sorted({row.decision.backend for row in result.rows})
    show(f"ran on {', '.join(backends)}; 2.0x is twice the original's speed, which was timed again beside each scheme")


def _table(result: QuantizeResult, original: SchemeRow) -> Table:
    table = new_table("scheme", "size", "weights", "output", *(f"T={count}" for count in result.question.token_counts))
    for column in table.columns[1:]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    unbeaten = result.unbeaten() if len(result.rows) > 1 else ()
    name = "original" if original.quant == "unquantized" else f"original, {original.quant}"
    table.add_row(name, format_bytes(original.num_bytes), "", "", *_original_times(original, result.rows))
    table.add_section()
    for letter, row in zip(_letters(result.rows), result.rows, strict=True):
        mark = "*" if row in unbeaten else ""
        table.add_row(
            Text(f"{letter} {row.quant}{mark}", style="bold green" if mark else ""),
            format_bytes(row.num_bytes),
            f"{row.weights_error:.1%}",
            f"{row.output_error:.1%}",
            *_times(row),
        )
    return table


def _letters(rows: Sequence[SchemeRow]) -> str:
    return (_LETTERS * (len(rows) // len(_LETTERS) + 1))[: len(rows)]


def _times(row: SchemeRow) -> Iterator[str | Text]:
    mark = _EMULATION if row.decision.tier != "kernel" else ""
    for measured, original_us in zip(row.measured, row.original_us, strict=True):
        ratio = original_us / measured.time_us
        digits = f"{ratio:.1f}" if ratio >= 0.1 else f"{ratio:.1g}"
        time = f"{mark}{format_us(measured.time_us)} {digits}x"
        yield time if measured.timing else Text("WRONG", style="bold red")


def _original_times(original: SchemeRow, rows: Sequence[SchemeRow]) -> Iterator[str | Text]:
    """The original's times beside the schemes, from fastest to slowest: those that speeds divide by."""
    for place, measured in enumerate(original.measured):
        times = [row.original_us[place] for row in rows if original.passed] or [measured.time_us]
        low, high = min(times), max(times)
        time = format_us(high) if format_us(low) == format_us(high) else format_us_range(low, high)
        yield time if measured.timing else Text("WRONG", style="bold red")


def sketch(result: QuantizeResult) -> list[str]:
    """A text plot of output error (log) over size, with the table's letters."""
    width, height = _SKETCH
    rows = [row for row in result.rows if row.output_error > 0]
    assert result.original is not None
    if not rows:
        return []
    low, high = (math.log10(choose(row.output_error for row in rows)) for choose in (min, max))
    right = max(result.original.num_bytes, *(row.num_bytes for row in rows))
    left = min(row.num_bytes for row in rows)
    grid = [[" "] * width for _ in range(height)]
    for letter, point in zip(_letters(result.rows), result.rows, strict=True):
        if point not in rows:
            continue
        x = round((point.num_bytes - left) / max(right - left, 1) * (width - 1))
        y = round((high - math.log10(point.output_error)) / max(high - low, 1e-9) * (height - 1))
        # Coinciding points spread around the spot; a letter is twice as high as wide.
        free = [(row, column) for row in range(height) for column in range(width) if grid[row][column] == " "]
        y, x = min(free, key=lambda cell, at=(y, x): (2 * abs(cell[0] - at[0]) + abs(cell[1] - at[1]), cell))  # type: ignore[misc]
        grid[y][x] = letter
    marks = {0: f"{10**high:.1%}", height - 1: f"{10**low:.1%}"}
    lines = [f"{marks.get(y, ''):>7} |{''.join(cells).rstrip()}" for y, cells in enumerate(grid)]
    first, last = format_bytes(left), format_bytes(right)
    return [*lines, f"{'':>7} +{'-' * width}", f"{'':>9}{first}{last:>{width - len(first)}}"]


def find_schemes(words: Sequence[str]) -> tuple[QuantScheme, ...]:
    """The schemes of `--quant`: names or patterns such as `int4_*`; by default all of moereg's own.

    Raises:
        UnknownSchemeError: A name is unknown.
        UsageError: A pattern matches nothing, or a scheme has nothing to quantize to.
    """
    known = {name: scheme for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None}
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    found: dict[str, QuantScheme] = {}
    for name in names or ["*"]:
        if "*" in name or "?" in name:
            matching = fnmatch.filter(known, name)
            if not matching:
                raise UsageError(f"--quant {shown(name)} matches no scheme (known: {', '.join(known)})")
            found |= {match: known[match] for match in matching}
            continue
        scheme = find_scheme(name)  # A plugin may bring its own.
        if scheme.weight is None:
            raise UsageError(f"--quant names what to quantize to, got {name}; the original is always in the table")
        found[name] = scheme
    return tuple(found.values())


def read_inputs(path: Path | None) -> dict[int, torch.Tensor]:
    """Reads `--inputs`: a safetensors file with [T,H] for some layers, named by index.

    Raises:
        UsageError: The file has another form.
    """
    if path is None:
        return {}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs takes a safetensors file, got {str(path)!r}: {one_line(str(error))}") from None
    for name, tensor in tensors.items():
        if not name.isdecimal() or tensor.dim() != 2 or not tensor.is_floating_point() or not len(tensor):
            raise UsageError(
                "--inputs takes hidden states [T,H] by the index of their layer, such as '12', got "
                f"{shown(name)} {list(tensor.shape)} {tensor.dtype}; save each layer's under its index"
            )
        if not tensor.isfinite().all():
            raise UsageError(f"--inputs takes finite numbers, got infinity or NaN in {shown(name)}; capture them again")
    return {int(name): tensor for name, tensor in tensors.items()}


def compare_schemes(flags: ProblemFlags, question: Question) -> QuantizeResult:
    """Loads a layer, quantizes it to each scheme in turn, and runs its backend.

    The result has no rows if nothing fits.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    layer = first_layer(question.checkpoint) if question.layer is None else question.layer
    question = dataclasses.replace(question, layer=layer)
    flags = dataclasses.replace(flags, tokens=max(question.token_counts))
    problem = read_problem(question.checkpoint, layer, **flags.wishes())
    platform = platform_at_hand("quantize", flags.platform)
    selections = {
        scheme.name: explain_backends(dataclasses.replace(problem, quant=scheme), platform, **flags.request())
        for scheme in question.schemes
    }
    original = explain_backends(problem, platform, **flags.request())
    result = QuantizeResult(
        question,
        f"{one_line(question.checkpoint.resolve().name)}, layer {layer}",
        problem,
        platform,
        provenance(platform, {"torch"}),
        "given" if layer in question.inputs else "random",
        skipped=tuple((name, selection) for name, selection in selections.items() if selection.winner is None),
    )
    fitting = [selection for selection in selections.values() if selection.winner is not None]
    if original.winner is None or not fitting:
        return result
    device = layer_device(original)
    _check_fits(problem, device)
    with torch.no_grad():
        work = _Work.of(result, load_layer(question.checkpoint, layer, problem, device))
        first = work.row(original, "the original", is_original=True)
        rows: list[SchemeRow] = []
        start, is_said = time.monotonic(), False
        for number, selection in enumerate(fitting, start=1):
            rows.append(work.row(selection, f"{number} of {len(fitting)}: {selection.problem.quant.name}"))
            done_seconds, num_left = time.monotonic() - start, len(fitting) - number
            left_seconds = done_seconds / number * num_left
            if not is_said and min(done_seconds, left_seconds) > SILENT_SECONDS:
                is_said = True
                about = f"{left_seconds / 60:.0f} min" if left_seconds >= 90 else f"{left_seconds:.0f} s"
                print(f"about {about} left for {num_left} of {len(fitting)} schemes", file=sys.stderr, flush=True)
        return dataclasses.replace(result, original=first, rows=tuple(rows))


def _check_fits(problem: MoEProblem, device: torch.device) -> None:
    """Checks that the original and a quantized layer fit, both canonical and permuted."""
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    weights = problem.activation.num_halves * problem.intermediate_size * problem.hidden_size
    numel = weights + problem.hidden_size * problem.intermediate_size
    plain = numel * (torch.float32.itemsize if problem.quant.weight is not None else 0)
    per_expert = 2 * expert_bytes(problem) + plain + 2 * numel * 1.1
    needed, limit = problem.num_local_experts * per_expert, MAX_FRACTION * free_bytes
    if needed > limit:
        fitting = int(limit // per_expert)
        cure = f"pass --num-local-experts {fitting}" if fitting >= 1 else "use a machine with more memory"
        raise TooLargeError(
            f"comparing schemes of this layer needs up to {format_bytes(needed)} (the original and a quantized layer, "
            f"each canonical and permuted), over {MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on "
            f"{device}; {cure}"
        )


@dataclasses.dataclass
class _Work:
    """The layer, its inputs and the original's output."""

    result: QuantizeResult
    layer: CheckpointLayer
    plain: CheckpointLayer
    sample: torch.Tensor
    calls: dict[int, list[Call]]
    expected: torch.Tensor
    original: Comparison | None = None

    @classmethod
    def of(cls, result: QuantizeResult, loaded: CheckpointLayer) -> _Work:
        """Makes the inputs and the original's output in fp32."""
        question, problem = result.question, loaded.problem
        plain = loaded
        if problem.quant.weight is not None:
            with phase("restoring the original's numbers"):
                w13, w2 = dequantize_weights(loaded.weights, torch.float32)
            plain = dataclasses.replace(
                loaded,
                problem=dataclasses.replace(problem, quant=get_scheme("unquantized")),
                weights=ExpertWeights(w13=w13, w2=w2, w13_bias=loaded.weights.w13_bias, w2_bias=loaded.weights.w2_bias),
            )
        given = question.inputs.get(loaded.layer)
        if given is not None and given.shape[1] != problem.hidden_size:
            raise UsageError(
                f"--inputs must have hidden_size {problem.hidden_size} columns for layer {loaded.layer}, got "
                f"{list(given.shape)}; capture the inputs of this checkpoint's layer"
            )
        device = loaded.weights.w13.device
        most = max(*question.token_counts, _SAMPLE_TOKENS)

        def tokens(count: int, place: int) -> torch.Tensor:
            if given is None:
                return random_hidden_states(problem, count, question.seed + place, device)
            start = place * count
            rows = torch.arange(start, start + count) % len(given)
            return given[rows].to(device, problem.torch_dtype)

        # Several calls, since a single token's experts would stay in the cache.
        calls = {
            count: [
                Call(rows, *loaded.route(rows)) for rows in (tokens(count, place) for place in range(_calls(count)))
            ]
            for count in question.token_counts
        }
        sample = tokens(most if given is None else len(given), 0)
        with phase("computing the original's output"):
            expected = reference_experts(plain.problem, plain.weights, sample, *loaded.route(sample))
        return cls(result, loaded, plain, sample, calls, expected)

    def row(self, selection: Selection, name: str, is_original: bool = False) -> SchemeRow:
        """Compares and times the layer in a scheme, alongside the original, which comes first and is kept."""
        problem, winner = selection.problem, selection.winner
        assert winner is not None
        with phase(name) as advance:
            steps = len(self.calls) + 2
            weights = self.layer.weights if is_original else self.quantized(problem.quant)
            weights_error = 0.0 if is_original else _weights_error(weights, self.plain.weights)
            routes = self.layer.route(self.sample)
            found = reference_experts(problem, weights, self.sample, *routes, computes=winner.scheme)
            advance(1, steps)
            alone = dataclasses.replace(selection, decisions=(winner,))
            comparison = Comparison(alone, lambda: weights, self.calls, layer_tolerance)
            advance(2, steps)
            measured: list[Measurement] = []
            original_us = []
            for done, count in enumerate(self.calls, start=3):
                # Again for each scheme: a machine's speed drifts, so a ratio needs both times from the same minute.
                original_us.append(self._original_us(count))
                measured += comparison.measure(count, None, _ROUNDS, _SECONDS)
                advance(done, steps)
        if is_original:
            self.original = comparison if all(row.passed for row in measured) else None
            original_us = [row.time_us for row in measured]
        return SchemeRow(
            problem.quant.name,
            winner,
            _num_bytes(weights),
            _bits(weights),
            weights_error,
            relative_error(found, self.expected),
            tuple(measured),
            tuple(original_us),
        )

    def quantized(self, scheme: QuantScheme) -> ExpertWeights:
        """The layer's quantized weights; activation scales that a checkpoint stores come from the sample."""
        plain, fmt, a13_scale, a2_scale = self.plain, scheme.activation, None, None
        if fmt is not None and (fmt.static or fmt.global_scale):
            call = (self.sample, *self.layer.route(self.sample))
            a13_scale, a2_scale = calibrate_activation_scales(plain.problem, plain.weights, *call, scheme)
        return quantize_weights(plain.weights, scheme, a13_scale=a13_scale, a2_scale=a2_scale)

    def _original_us(self, count: int) -> float:
        """The original's current time; NaN if it was wrong or failed."""
        if self.original is None:
            return math.nan
        (timing,) = self.original.time_again(count, _ROUNDS, _SECONDS).values()
        return timing.median_us


def _calls(count: int) -> int:
    return min(4, num_calls(count))


def _num_bytes(weights: ExpertWeights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values())


def _bits(weights: ExpertWeights) -> float:
    tensors = weights.tensors("weight", "scale", "scale_2", "zero_point").values()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    per_expert = (weights.num_halves + 1) * weights.intermediate_size * weights.hidden_size
    return 8 * num_bytes / (weights.num_experts * per_expert)


def _weights_error(weights: ExpertWeights, plain: ExpertWeights) -> float:
    """Relative error of the dequantized weights, expert by expert to avoid a copy of all."""
    difference = norm = 0.0
    for expert in range(weights.num_experts):
        one = {name: tensor[expert : expert + 1] for name, tensor in weights.tensors().items() if tensor.dim()}
        one = {name: tensor for name, tensor in one.items() if not name.startswith("a") and "bias" not in name}
        quant = dataclasses.replace(weights.scheme, activation=None)
        restored = dequantize_weights(ExpertWeights(**one, quant=quant), torch.float32)
        for found, matrix in zip(restored, (plain.w13, plain.w2), strict=True):
            expected = matrix[expert].float()
            difference += float(torch.linalg.vector_norm(found[0] - expected)) ** 2
            norm += float(torch.linalg.vector_norm(expected)) ** 2
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
