"""The work of `moereg quantize`: a layer of a checkpoint in every scheme that fits, and the copy that was asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, get_args

import torch

from moereg.checkpoints import (
    CheckpointLayer,
    check_can_save,
    load_experts,
    moe_layers,
    quantize_layer,
    read_problem,
    save_quantized,
)
from moereg.cli._layer import random_hidden_states
from moereg.cli._machine import layer_device, platform_at_hand
from moereg.cli._options import ProblemFlags, UsageError, usage_errors
from moereg.cli._progress import phase
from moereg.cli._quantize_result import QuantizeResult, Question, SchemeRow
from moereg.dispatch import explain_backends
from moereg.errors import TooLargeError, one_line
from moereg.memory import format_bytes, free_memory_bytes
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme, TensorRole, get_scheme
from moereg.quantize import dequantize_weights
from moereg.reference import reference_experts, relative_error
from moereg.selection import Decision, Selection
from moereg.testing.provenance import provenance
from moereg.tolerances import layer_tolerance
from moereg.tuning.compare import Comparison, Measurement
from moereg.tuning.inputs import Call, num_calls
from moereg.tuning.roofline import expert_bytes
from moereg.weights import ExpertWeights

__all__ = ["DEFAULT_TOKENS", "compare_schemes"]

DEFAULT_TOKENS: Final = (1, 64)
# Tokens that errors and scales of activations come from, where a call has fewer.
_SAMPLE_TOKENS: Final = 64
_MAX_FRACTION: Final = 0.6
_ROUNDS: Final = 16
_SECONDS: Final = 0.3
"""A choice among twenty schemes needs no third digit, and emulations on a CPU take a second a call."""


def compare_schemes(flags: ProblemFlags, question: Question) -> QuantizeResult:
    """Loads a layer, quantizes it to each scheme in turn, runs what its backend makes of it, and writes the copy.

    Args:
        flags: What a checkpoint leaves open, and the request.
        question: What to compare.

    Returns:
        The result; without rows where nothing fits. Nothing is written where something was wrong.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    if question.out is not None:
        check_copy(question)
    layer = _first_layer(question.checkpoint) if question.layer is None else question.layer
    question = dataclasses.replace(question, layer=layer)
    flags = dataclasses.replace(flags, tokens=max(question.token_counts))
    with usage_errors():
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
        with phase("loading weights") as advance:
            local = problem.num_local_experts if problem.is_expert_parallel else None
            loaded = load_experts(
                question.checkpoint, layer, problem.dtype, device, num_local_experts=local, progress=advance
            )
        work = _Work.of(result, loaded)
        first = work.original_row(original)
        rows = [
            work.row(selection, f"{number} of {len(fitting)}: {selection.problem.quant.name}")
            for number, selection in enumerate(fitting, start=1)
        ]
        result = dataclasses.replace(result, original=first, rows=tuple(rows))
        if question.out is None or not result.passed:
            return result
        return work.write(result)


def _first_layer(checkpoint: Path) -> int:
    with_experts = moe_layers(checkpoint)
    if not with_experts:
        raise UsageError(f"no layer of {str(checkpoint)!r} has experts; give a Mixture-of-Experts checkpoint")
    return with_experts[0]


def check_copy(question: Question) -> None:
    """Checks that the copy can be written, before anything is measured.

    Raises:
        UsageError: It is not clear which scheme to write.
        CheckpointError: The copy cannot be written.
    """
    assert question.out is not None
    if len(question.schemes) != 1:
        raise UsageError(
            f"--out writes one scheme, got {len(question.schemes)}; choose it with --quant, such as --quant "
            f"{question.schemes[0].name}"
        )
    layers = [question.layer] if question.is_one_layer and question.layer is not None else None
    check_can_save(question.checkpoint, question.out, question.schemes[0], layers, question.inputs)


def _check_fits(problem: MoEProblem, device: torch.device) -> None:
    """Checks that the original and a quantized layer fit, each canonical and permuted."""
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    weights = problem.activation.num_halves * problem.intermediate_size * problem.hidden_size
    numel = weights + problem.hidden_size * problem.intermediate_size
    plain = numel * (torch.float32.itemsize if problem.quant.weight is not None else 0)
    per_expert = 2 * expert_bytes(problem) + plain + 2 * numel * 1.1
    needed, limit = problem.num_local_experts * per_expert, _MAX_FRACTION * free_bytes
    if needed > limit:
        fitting = int(limit // per_expert)
        cure = f"pass --num-local-experts {fitting}" if fitting >= 1 else "use a machine with more memory"
        raise TooLargeError(
            f"comparing schemes of this layer needs up to {format_bytes(needed)} (the original and a quantized layer, "
            f"each canonical and permuted), over {_MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on "
            f"{device}; {cure}"
        )


@dataclasses.dataclass
class _Work:
    """The layer, its inputs and what its original makes of them."""

    result: QuantizeResult
    layer: CheckpointLayer
    plain: CheckpointLayer
    sample: torch.Tensor
    calls: dict[int, list[Call]]
    expected: torch.Tensor
    original: Comparison | None = None
    is_original_right: bool = False

    @classmethod
    def of(cls, result: QuantizeResult, loaded: CheckpointLayer) -> _Work:
        """Makes inputs and the original's output in fp32."""
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

        # More than one, since the experts of a single token would stay in a cache.
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

    def original_row(self, selection: Selection) -> SchemeRow:
        """Measures the original, and keeps it to be timed beside the others."""
        winner = selection.winner
        assert winner is not None
        weights, problem = self.layer.weights, self.layer.problem
        with phase("the original"):
            self.original = self._comparison(selection, weights)
            measured = tuple(self._measure(self.original, count) for count in self.calls)
            output_error = self._output_error(problem, weights, winner)
        self.is_original_right = all(row.passed for row in measured)
        times = tuple(row.time_us for row in measured)
        return SchemeRow(
            problem.quant.name, winner, _num_bytes(weights), _bits(weights), 0.0, output_error, measured, times
        )

    def row(self, selection: Selection, name: str) -> SchemeRow:
        """Quantizes to a scheme, compares and times it, and forgets it."""
        problem, winner = selection.problem, selection.winner
        assert winner is not None and self.original is not None
        with phase(name) as advance:
            steps = len(self.calls) + 2
            weights = self.quantized(problem.quant)
            errors = _weights_error(weights, self.plain.weights), self._output_error(problem, weights, winner)
            advance(1, steps)
            comparison = self._comparison(selection, weights)
            advance(2, steps)
            measured, original_us = [], []
            for done, count in enumerate(self.calls, start=3):
                # Again for each scheme: a machine's speed drifts, and a ratio needs both of the same minute.
                original_us.append(self._original_us(count))
                measured.append(self._measure(comparison, count))
                advance(done, steps)
        return SchemeRow(
            problem.quant.name,
            winner,
            _num_bytes(weights),
            _bits(weights),
            *errors,
            tuple(measured),
            tuple(original_us),
        )

    def quantized(self, scheme: QuantScheme) -> ExpertWeights:
        """The weights that the copy has too."""
        with usage_errors():
            return quantize_layer(self.plain, scheme, self.sample.to(self.plain.router_weight.dtype))

    def write(self, result: QuantizeResult) -> QuantizeResult:
        """Writes the copy and reads this layer of it."""
        question = result.question
        assert question.out is not None and question.layer is not None
        (scheme,) = question.schemes
        layers = [question.layer] if question.is_one_layer else None
        with phase(f"writing {question.out}") as advance, _cleaned_up_before_the_end():
            saved = save_quantized(
                question.checkpoint,
                question.out,
                scheme,
                layers,
                question.inputs,
                device=self.layer.weights.w13.device,
                progress=advance,
            )
        with phase("reading it back"):
            local = self.layer.problem
            found = load_experts(
                saved.path,
                question.layer,
                device=self.layer.weights.w13.device,
                num_local_experts=local.num_local_experts if local.is_expert_parallel else None,
            ).weights
            # Of some experts alone, the scales of those that no token chose are others.
            roles = [
                role for role in get_args(TensorRole) if not (local.is_expert_parallel and role == "activation_scale")
            ]
            is_same = _same(found.tensors(*roles), self.quantized(scheme).tensors(*roles))
        return dataclasses.replace(result, saved=saved, read_back=is_same)

    def _comparison(self, selection: Selection, weights: ExpertWeights) -> Comparison:
        assert selection.winner is not None
        alone = dataclasses.replace(selection, decisions=(selection.winner,))
        return Comparison(alone, lambda: weights, self.calls, layer_tolerance)

    def _measure(self, comparison: Comparison, count: int) -> Measurement:
        (row,) = comparison.measure(count, None, _ROUNDS, _SECONDS)
        return row

    def _original_us(self, count: int) -> float:
        """The original's time now; NaN where it was wrong or failed."""
        assert self.original is not None
        if not self.is_original_right:
            return math.nan
        (timing,) = self.original.time_again(count, _ROUNDS, _SECONDS).values()
        return timing.median_us

    def _output_error(self, problem: MoEProblem, weights: ExpertWeights, winner: Decision) -> float:
        routes = self.layer.route(self.sample)
        found = reference_experts(problem, weights, self.sample, *routes, computes=winner.scheme)
        return relative_error(found, self.expected)


class _EndedError(BaseException):
    """A signal ends this process."""


@contextlib.contextmanager
def _cleaned_up_before_the_end() -> Iterator[None]:
    """Inside, SIGTERM ends this process once what was half written is gone."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # Another one would end the cleaning up.
        raise _EndedError

    signal.signal(signal.SIGTERM, end)
    try:
        with contextlib.suppress(_EndedError):
            yield
            return
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


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
    """Relative error of the restored weights, expert by expert, so that no copy of all is made."""
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


def _same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether two layers hold the same numbers; a checkpoint keeps gate and up's common scale twice."""
    theirs = dict(expected)
    for name, tensor in found.items():
        other = theirs.pop(name, None)
        if other is None:
            return False
        other = other.unsqueeze(1) if other.dim() < tensor.dim() else other
        if tensor.dtype != other.dtype or not torch.equal(tensor.float(), other.expand_as(tensor).float()):
            return False
    return not theirs
