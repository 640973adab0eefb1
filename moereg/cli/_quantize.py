"""`moereg quantize`: compares a checkpoint's layer in every scheme that fits."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file

from moereg.bench.compare import Comparison
from moereg.bench.inputs import Call, num_calls
from moereg.bench.roofline import expert_bytes
from moereg.checkpoints import CheckpointLayer, read_problem
from moereg.cli._bench import MAX_FRACTION, layer_device, load_layer, platform_at_hand, random_hidden_states
from moereg.cli._options import ProblemFlags, UsageError, first_layer
from moereg.cli._output import Result, code_of_verdict, picked
from moereg.cli._progress import phase
from moereg.cli._show import answers, bad, format_us, format_us_range, new_table, say, versions_of
from moereg.dispatch import explain_backends
from moereg.errors import TooLargeError, one_line, shown
from moereg.evidence.provenance import provenance
from moereg.numerics.reference import calibrate_activation_scales, reference_experts, relative_error
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.selection.loader import find_scheme
from moereg.selection.result import SCHEMA, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme, get_scheme
from moereg.weights.permuted import ExpertWeights

DEFAULT_TOKENS: Final = (1, 64)
# Fewest tokens to compute errors and activation scales from.
_SAMPLE_TOKENS: Final = 64
_ROUNDS: Final = 16
_SECONDS: Final = 0.3
"""Choosing among twenty schemes needs no third digit, and emulations on a CPU take a second per call."""


def find_schemes(words: Sequence[str]) -> tuple[QuantScheme, ...]:
    """The schemes of `--quant`: names or patterns such as `int4_*`; by default all of moereg's own."""
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
    """Reads `--inputs`: a safetensors file with [T,H] for some layers, named by index."""
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


def compare_schemes(
    flags: ProblemFlags,
    checkpoint: Path,
    layer: int | None,
    schemes: Sequence[QuantScheme],
    token_counts: Sequence[int],
    inputs: Mapping[int, torch.Tensor],
    seed: int,
) -> Result:
    """Loads a layer, quantizes it to each scheme in turn, and runs its backend.

    `token_counts` ascend, and `inputs` are real inputs [T,H] by layer. The result has no rows if nothing fits.
    """
    layer = first_layer(checkpoint) if layer is None else layer
    problem = read_problem(checkpoint, layer, **dataclasses.replace(flags, tokens=max(token_counts)).wishes())
    platform = platform_at_hand("quantize", flags.platform)
    original = explain_backends(problem, platform, **flags.request())
    selections = {
        scheme.name: explain_backends(dataclasses.replace(problem, quant=scheme), platform, **flags.request())
        for scheme in schemes
    }
    fitting = [selection for selection in selections.values() if selection.winner is not None]
    skipped = {name: selection for name, selection in selections.items() if selection.winner is None}
    where = provenance(platform, {"torch"})
    values = {
        "schema": SCHEMA,
        "checkpoint": str(checkpoint),
        "layer": layer,
        "problem": problem.to_dict(),
        "platform": str(platform),
        **{name: where[name] for name in ("device", "versions", "commit", "date")},
        "inputs": "given" if layer in inputs else "random",
        "original": None,
        "rows": [],
        "unbeaten": [],
        "skipped": [
            {"quant": name, "reasons": nearest_by_backend(selection.decisions)[0].to_dict()["reasons"]}
            for name, selection in skipped.items()
        ],
    }
    if original.winner is not None and fitting:
        device = layer_device(original)
        _check_fits(problem, device)
        with torch.no_grad():
            work = _Work(load_layer(checkpoint, layer, problem, device), token_counts, inputs.get(layer), seed)
            with phase("the original"):
                values["original"] = work.row(original, is_original=True)
            with phase("comparing schemes") as advance:
                advance(0, len(fitting))
                for number, selection in enumerate(fitting, start=1):
                    values["rows"].append(work.row(selection))
                    advance(number, len(fitting))
        values["unbeaten"] = _unbeaten(values["rows"])

    def show() -> None:
        say(
            f"{one_line(checkpoint.resolve().name)}, layer {layer}: {problem}",
            f"on {where['device']} ({platform}), {versions_of(where)}, {where['date']}",
        )
        _show_rows(values)
        why: dict[str, list[str]] = {}
        for name, selection in skipped.items():
            nearest = answers(selection)[0]
            why.setdefault(f"{nearest.backend}: {nearest.reasons[0].text}", []).append(name)
        say(*(f"not on this machine: {', '.join(names)} ({reason})" for reason, names in why.items()))
        for row in (values["original"], *values["rows"]) if values["original"] else ():
            for time in row["times"]:
                if not time["passed"]:
                    error = f"WRONG: {time['relative_error']:.1e} > {time['tolerance']:.1e} from its own reference"
                    label = f"{row['quant']} on {row['backend']} at {time['tokens']} tokens"
                    say(bad(f"{label}: {time['failure'] or time['damage'] or error}"))
        if not values["rows"]:
            what = "nothing here computes the original, which the others are compared with"
            say(bad(what if fitting else "nothing fits"))

    rows = [values["original"], *values["rows"]] if values["rows"] else []
    return Result(values, show, code_of_verdict(all(row["passed"] for row in rows) if rows else None))


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


class _Work:
    """The layer, its inputs and the original's output in fp32."""

    def __init__(
        self, layer: CheckpointLayer, token_counts: Sequence[int], given: torch.Tensor | None, seed: int
    ) -> None:
        problem, device = layer.problem, layer.weights.w13.device
        self._layer = self._plain = layer
        if problem.quant.weight is not None:
            with phase("restoring the original's numbers"):
                w13, w2 = dequantize_weights(layer.weights, torch.float32)
            self._plain = dataclasses.replace(
                layer,
                problem=dataclasses.replace(problem, quant=get_scheme("unquantized")),
                weights=ExpertWeights(w13=w13, w2=w2, w13_bias=layer.weights.w13_bias, w2_bias=layer.weights.w2_bias),
            )
        if given is not None and given.shape[1] != problem.hidden_size:
            raise UsageError(
                f"--inputs must have hidden_size {problem.hidden_size} columns for layer {layer.layer}, got "
                f"{list(given.shape)}; capture the inputs of this checkpoint's layer"
            )

        def call(count: int, place: int) -> Call:
            if given is None:
                rows = random_hidden_states(problem, count, seed + place, device)
            else:
                rows = given[torch.arange(place * count, (place + 1) * count) % len(given)]
                rows = rows.to(device, problem.torch_dtype)
            return Call(rows, *layer.sample_routes(rows))

        # Several calls, since a single token's experts would stay in the cache.
        self._calls = {
            count: [call(count, place) for place in range(min(4, num_calls(count)))] for count in token_counts
        }
        self._sample = call(max(*token_counts, _SAMPLE_TOKENS) if given is None else len(given), 0)
        with phase("computing the original's output"):
            self._expected = reference_experts(self._plain.problem, self._plain.weights, *self._sample)
        self._original: Comparison | None = None

    def row(self, selection: Selection, is_original: bool = False) -> dict[str, Any]:
        """Compares and times the layer in a scheme, alongside the original, which comes first; a row of `--json`."""
        winner = selection.chosen
        weights = self._layer.weights if is_original else self._quantized(selection.problem.quant)
        found = reference_experts(selection.problem, weights, *self._sample, computes=winner.scheme)
        alone = dataclasses.replace(selection, decisions=(winner,))
        comparison = Comparison(alone, lambda: weights, self._calls)
        times = []
        for count in self._calls:
            original_us = math.nan  # Where it was wrong or failed.
            if self._original is not None:
                # Again for each scheme: a machine's speed drifts, so a ratio needs both times from the same minute.
                (timing,) = self._original.time_again(count, _ROUNDS, _SECONDS).values()
                original_us = timing.median_us
            (row,) = comparison.measure(count, None, _ROUNDS, _SECONDS)
            original_us = row.time_us if is_original else original_us
            times.append(
                {
                    "tokens": count,
                    "time_us": row.time_us,
                    "original_us": original_us,
                    "speedup": original_us / row.time_us,
                    "p10_us": row.timing.p10_us if row.timing else math.nan,
                    "p90_us": row.timing.p90_us if row.timing else math.nan,
                    **picked(row, "relative_error", "tolerance", "passed"),
                    "failure": row.failure or None,
                    "damage": row.damage or None,
                }
            )
        passed = all(row["passed"] for row in times)
        if is_original and passed:
            self._original = comparison
        numel = (weights.num_halves + 1) * weights.intermediate_size * weights.hidden_size
        stored = sum(one.nbytes for one in weights.tensors("weight", "scale", "scale_2", "zero_point").values())
        return {
            "quant": selection.problem.quant.name,
            **picked(winner, "computes", "backend", "experts", "tier"),
            "bytes": weights.num_bytes,
            "bits": 8 * stored / (weights.num_experts * numel),
            "weights_error": 0.0 if is_original else _weights_error(weights, self._plain.weights),
            "output_error": relative_error(found, self._expected),
            "passed": passed,
            "times": times,
        }

    def _quantized(self, scheme: QuantScheme) -> ExpertWeights:
        """The layer's quantized weights; activation scales that a checkpoint stores come from the sample."""
        plain, fmt, a13_scale, a2_scale = self._plain, scheme.activation, None, None
        if fmt is not None and (fmt.static or fmt.global_scale):
            a13_scale, a2_scale = calibrate_activation_scales(plain.problem, plain.weights, *self._sample, scheme)
        return quantize_weights(plain.weights, scheme, a13_scale=a13_scale, a2_scale=a2_scale)


def _weights_error(weights: ExpertWeights, plain: ExpertWeights) -> float:
    """Relative error of the dequantized weights, expert by expert to avoid a copy of all."""
    difference = norm = 0.0
    for expert in range(weights.num_experts):
        restored = dequantize_weights(weights.expert(expert), torch.float32)
        for found, matrix in zip(restored, (plain.w13, plain.w2), strict=True):
            expected = matrix[expert].float()
            difference += float(torch.linalg.vector_norm(found[0] - expected)) ** 2
            norm += float(torch.linalg.vector_norm(expected)) ** 2
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _unbeaten(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Schemes that are Pareto-optimal in size, error and time, without wrong ones and emulations."""
    right = [row for row in rows if row["passed"] and row["tier"] == "kernel"]
    points = {row["quant"]: (row["bytes"], row["output_error"], row["times"][-1]["time_us"]) for row in right}
    return [
        name
        for name, own in points.items()
        if not any(
            other != own and all(mine >= theirs for mine, theirs in zip(own, other, strict=True))
            for other in points.values()
        )
    ]


def _show_rows(values: Mapping[str, Any]) -> None:
    original, rows = values["original"], values["rows"]
    if original is None:
        return
    what = "the layer's own inputs" if values["inputs"] == "given" else "random hidden states"
    say(f"errors against the original in fp32, of weights and of output, on {what}")
    unbeaten = values["unbeaten"] if len(rows) > 1 else ()
    counts = (f">T={time['tokens']}" for time in original["times"])
    name = "original" if original["quant"] == "unquantized" else f"original, {original['quant']}"
    beside = [_beside(original, place, rows) for place in range(len(original["times"]))]
    table = [[name, format_bytes(original["bytes"]), "", "", *beside], None]
    for row in rows:
        mark = "*" if row["quant"] in unbeaten else ""
        label = Text(f"{row['quant']}{mark}", style="bold green" if mark else "")
        errors = (f"{row[name]:.1%}" for name in ("weights_error", "output_error"))
        table.append([label, format_bytes(row["bytes"]), *errors, *(_time(row, time) for time in row["times"])])
    say(new_table("scheme", ">size", ">weights", ">output", *counts, rows=table))
    if unbeaten:
        say("* Pareto-optimal: nothing here is smaller, more accurate and faster")
    if any(row["tier"] != "kernel" for row in rows):
        say("~ an emulation here: the scheme's numbers without its speed")
    if others := [f"{row['quant']} as {row['computes']}" for row in rows if row["computes"] != row["quant"]]:
        say(f"computed with 16-bit activations, which are nearer: {', '.join(others)}")
    backends = sorted({row["backend"] for row in rows})
    say(f"ran on {', '.join(backends)}; 2.0x is twice the original's speed, which was timed again beside each scheme")
    times = [time for row in rows for time in row["times"] if time["passed"]]
    spread = max(((time["p90_us"] - time["p10_us"]) / time["time_us"] for time in times), default=0.0)
    say(f"calls of one scheme differ by up to {spread:.0%} of their time (p10 to p90)")


def _time(row: Mapping[str, Any], time: Mapping[str, Any]) -> str | Text:
    if math.isnan(time["time_us"]):
        return bad("WRONG")
    mark, ratio = "" if row["tier"] == "kernel" else "~", time["speedup"]
    return f"{mark}{format_us(time['time_us'])} {ratio:{'.1f' if ratio >= 0.1 else '.1g'}}x"


def _beside(original: Mapping[str, Any], place: int, rows: Sequence[Mapping[str, Any]]) -> str | Text:
    """The original's times beside the schemes, from fastest to slowest: those that speeds divide by."""
    own = original["times"][place]["time_us"]
    if math.isnan(own):
        return bad("WRONG")
    times = [row["times"][place]["original_us"] for row in rows if original["passed"]] or [own]
    low, high = min(times), max(times)
    return format_us(high) if format_us(low) == format_us(high) else format_us_range(low, high)
