"""`moereg run` and `moereg bench`: build, check and time a random layer or a checkpoint's on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from packaging.requirements import Requirement
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moereg.cli._options import ProblemFlags, Subject, UsageError, find_subject
from moereg.cli._output import console
from moereg.cli._progress import Advance, phase
from moereg.cli._show import (
    WIDE,
    format_us,
    format_us_range,
    machine,
    new_table,
    of_wheel,
    print_notices,
    print_rejected,
    show_selection,
    source_of,
    versions_of,
)
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import (
    BackendError,
    EmulationWarning,
    TooLargeError,
    UnknownNameError,
    UnsupportedProblemError,
    unknown_name_message,
)
from moereg.evidence.provenance import provenance
from moereg.layer.backend_calls import device_types
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform, probe_cpu, torch_device
from moereg.plugins.loader import current_platform, load_backends
from moereg.registry import BUILTIN
from moereg.routing import softmax_topk
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.selection.result import SCHEMA, Decision, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.testing.diagnosis import diagnose
from moereg.tuning.compare import Comparison, Measurement
from moereg.tuning.inputs import ROUTINGS, Call, num_calls, random_weights
from moereg.tuning.points import Point
from moereg.tuning.roofline import Ceilings, expert_bytes, measure_ceilings
from moereg.tuning.session import LayerSession
from moereg.weights.permuted import ExpertWeights

if TYPE_CHECKING:
    from moereg.checkpoints import CheckpointLayer

MAX_FRACTION: Final = 0.6
"""The share of free memory that a command may use."""

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps hidden_states [T,H] to topk_weights [T,K] fp32 and topk_ids [T,K] int32."""


@dataclasses.dataclass(frozen=True)
class RoutedWeights:
    """The parts of a layer that a run needs, with notes on what the layer lacks."""

    weights: ExpertWeights
    route: Router
    notices: tuple[str, ...] = ()


def random_layer(problem: MoEProblem, seed: int, device: torch.device, advance: Advance) -> RoutedWeights:
    """Makes a layer with `random_weights` and random routing, equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(problem, generator, device, advance)

    def route(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(len(hidden_states), problem.num_experts, generator=generator)
        # With one expert per token, renormalizing gives a weight of 1, which a kernel could ignore and pass.
        topk_weights, topk_ids = softmax_topk(logits, problem.top_k, renormalize=problem.top_k > 1)
        return topk_weights.to(hidden_states.device), topk_ids.to(hidden_states.device)

    return RoutedWeights(weights, route)


def load_layer(path: Path, layer: int, problem: MoEProblem, device: torch.device) -> CheckpointLayer:
    """Loads one layer of a checkpoint with its own router; `problem` comes from `read_problem`.

    Raises:
        CheckpointError: The layer cannot be read.
        TooLargeError: The layer does not fit.
    """
    from moereg.checkpoints import load_experts

    local = problem.num_local_experts if problem.is_expert_parallel else None
    with phase("loading weights") as advance:
        return load_experts(path, layer, problem.dtype, device, num_local_experts=local, progress=advance)


def build_layer(subject: Subject, seed: int, device: torch.device) -> RoutedWeights | CheckpointLayer:
    """Loads a checkpoint's layer, or makes a random one."""
    if subject.checkpoint is not None and subject.layer is not None:
        return load_layer(subject.checkpoint, subject.layer, subject.problem, device)
    with phase("building weights") as advance:
        return random_layer(subject.problem, seed, device, advance)


def random_hidden_states(problem: MoEProblem, num_tokens: int, seed: int, device: torch.device) -> torch.Tensor:
    """Normal random numbers [T,H] in the problem's dtype, equal on every device."""
    # Another random stream than the weights', so that the two do not correlate.
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(num_tokens, problem.hidden_size, generator=generator).to(device, problem.torch_dtype)


def platform_at_hand(command: str, name: str | None) -> Platform:
    """This machine as a platform; `--platform` must name this machine or its CPU.

    Raises:
        UsageError: The name is another machine's.
        UnknownPlatformError: No platform has that name.
    """
    load_backends()  # A plugin's platforms are known once it is loaded.
    named = None if name is None else Platform.from_name(name)
    # The CPU is always there, whatever accelerator the machine has or a plugin claims.
    here = probe_cpu() if named is not None and named.kind == "cpu" else current_platform()
    if named is None or (named.kind == here.kind and named.arch in ("", here.arch)):
        return here
    raise UsageError(
        f"{command} needs the machine itself, and this one is {here.kind}:{here.arch}, not {name}; "
        f"moereg explain --platform {name} answers what would be chosen there"
    )


def layer_device(selection: Selection) -> torch.device:
    """The device on which a command builds the selected layer.

    Raises:
        UnknownPlatformError: This torch has no such device.
    """
    platform, winner = selection.platform, selection.winner
    types: tuple[str, ...] = ()
    if winner is not None and winner.cell is not None:
        with contextlib.suppress(Exception):  # Building the layer fails again, with the backend's name.
            types = device_types(selection, winner.cell.experts)
    # A backend may read another device's tensors, such as through DLPack.
    return torch_device(platform, None if not types or platform.device_type in types else types[0])


def check_run_fits(
    problem: MoEProblem, num_tokens: int, device: torch.device, num_kernels: int = 1, num_calls: int = 1
) -> None:
    """Checks that a layer's weights (canonical and permuted for each kernel), one expert in fp32 and the tokens fit.

    Args:
        problem: The layer.
        num_tokens: Tokens of one call.
        device: The device to fit on.
        num_kernels, num_calls: Kernels, and inputs with their outputs, that exist at the same time.

    Raises:
        TooLargeError: They take more than 60 % of free memory; the message has the size and options that reduce it.
    """
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    one_bytes = expert_bytes(problem)
    numbers = problem.activation.num_halves * problem.intermediate_size * problem.hidden_size
    fp32_bytes = (numbers + problem.hidden_size * problem.intermediate_size) * torch.float32.itemsize
    tokens_bytes = _tokens_bytes(problem, num_tokens, num_calls)
    limit_bytes = MAX_FRACTION * free_bytes
    copies = 1 + num_kernels
    layer_bytes = copies * problem.num_local_experts * one_bytes + fp32_bytes
    if layer_bytes + tokens_bytes <= limit_bytes:
        return
    cures = []
    num_fitting = int((limit_bytes - fp32_bytes - tokens_bytes) // (copies * one_bytes))
    if 1 <= num_fitting < problem.num_local_experts:
        cures.append(f"--num-local-experts {num_fitting}")
    is_quantized = problem.quant.weight is not None
    if problem.dtype == "float32" and not is_quantized:
        cures.append("--dtype bfloat16")
    if num_kernels > 1:
        cures.append("--require with fewer backends")
    if tokens_bytes > layer_bytes:
        cures.append("a smaller --tokens")
    stored = problem.quant.name if is_quantized else problem.dtype
    permuted = f"permuted for {num_kernels} kernels" if num_kernels > 1 else "permuted"
    raise TooLargeError(
        f"a run of this layer needs {format_bytes(layer_bytes + tokens_bytes)} ({problem.num_local_experts} experts of "
        f"{format_bytes(one_bytes)} in {stored}, canonical and {permuted}, and {num_tokens} tokens), over "
        f"{MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on {device}; "
        f"{'pass ' + ' or '.join(cures) if cures else 'free memory or use a larger machine'}"
    )


def _tokens_bytes(problem: MoEProblem, num_tokens: int, num_calls: int) -> int:
    """Inputs, outputs and intermediate rows of a call, the reference's fp32 and the comparison's fp64 copies."""
    itemsize = problem.torch_dtype.itemsize
    per_call = 2 * problem.hidden_size * itemsize
    once = problem.hidden_size * (2 * torch.float32.itemsize + 2 * torch.float64.itemsize)
    rows = num_tokens * (problem.num_local_experts if problem.activation_format == "batched" else problem.top_k)
    per_row = 2 * problem.hidden_size + (problem.activation.num_halves + 1) * problem.intermediate_size
    return num_tokens * (num_calls * per_call + once) + rows * per_row * itemsize


DEFAULT_TOKENS: Final = 64

# Two, to catch a backend that repeats its first answer.
_NUM_CALLS: Final = 2

# Largest 16-bit weights, in bytes, that are built only to report the error of quantizing them.
_LARGEST_UNQUANTIZED: Final = 2e9


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run; measurements are None if nothing fitted and nothing ran.

    Attributes:
        subject: The model's or checkpoint's name to show.
        relative_error: Error against the reference; NaN if the output has a NaN.
        scheme_loss: The scheme's own error against fp32; None if the weights are not quantized, or their originals are
            unknown or too large to keep.
        time_us: Median of several calls; None if the numbers are wrong.
        permute_ms: Time to permute the weights once.
        weights_bytes: Bytes of the canonical weights.
        causes: Usual mistakes that explain wrong numbers.
        failure: The backend's exception, with its name; empty if it ran.
        damage: Memory that the backend wrote but must not, with its name; empty if none.
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
    causes: tuple[str, ...] = ()
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
            "causes": list(self.causes),
            "failure": self.failure or None,
            "damage": self.damage or None,
            "time_us": self.time_us,
            "permute_ms": self.permute_ms,
            "selection": self.selection.to_dict(),
        }

    def show(self, all_reasons: bool = False) -> None:
        """Prints the result and last whether it is right, or the reasons if nothing fitted; every one if asked."""
        selection = self.selection
        winner = selection.winner
        target = console(sys.stdout)
        if winner is None or self.failure or self.damage:
            show_selection(selection, self.subject, all_reasons)
            if winner is not None:
                text = f"FAILED: {self.failure}"
                if not self.failure:
                    text = f"WRONG: {winner.backend} of {winner.provider}: {self.damage}"
                target.print(Text(text, style="bold red"))
            return
        assert self.relative_error is not None and self.tolerance is not None
        assert self.permute_ms is not None and self.weights_bytes is not None
        verdict = Text("right", style="bold green") if self.passed else Text("WRONG", style="bold red")
        verdict.append(f": error {self.relative_error:.2e}, {'' if self.passed else 'not '}within the tolerance ")
        verdict.append(f"{self.tolerance:.1e} of the reference")
        tier = "" if winner.tier == "kernel" else f", {winner.tier}: right numbers, not the speed of the scheme"
        time = "none, since the numbers are wrong"
        if self.time_us is not None:
            time = f"{format_us(self.time_us)} a call of {self.num_tokens} tokens"
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        rows: tuple[tuple[str, str], ...] = (
            ("layer", f"{self.subject}: {selection.problem}"),
            ("platform", machine(selection.platform)),
            ("backend", f"{winner.backend} ({winner.experts}){of_wheel(winner)}, {source_of(selection)}{tier}"),
            ("computed as", winner.computes),
            ("weights", f"{format_bytes(self.weights_bytes)}, permuted in {format_us(1e3 * self.permute_ms)}"),
            ("time", time),
        )
        if self.scheme_loss is not None:
            rows = (*rows, ("loss", f"{self.scheme_loss:.2e} against fp32, of {winner.computes} itself"))
        if self.causes:
            rows = (*rows, ("likely cause", ", or ".join(self.causes)))
        for name, value in rows:
            table.add_row(name, value)
        target.print(table)
        for one in selection.decisions[1:]:
            if one.accepted:
                target.print(f"not chosen: {one.backend} ({one.experts}){of_wheel(one)}: fits, priority {one.priority}")
        print_rejected(target, "not chosen", selection, all_reasons)
        # Selecting the backend has already logged the request's notices.
        print_notices(target, [notice for notice in selection.notices if notice not in selection.request.notices])
        target.print(verdict)


def run_layer(flags: ProblemFlags, checkpoint: Path | None, layer: int | None, seed: int) -> RunResult:
    """Builds a layer, runs the selected kernel on this machine and compares it with the reference.

    Takes the options' values by name. The result has no measurements if nothing fits.

    Raises:
        MoeregError: Anything that the user can fix.
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
        built = build_layer(found, seed, device)
        plain = None if found.checkpoint is not None else functools.partial(_unquantized, problem, seed, device)
        hidden_states = random_hidden_states(problem, num_tokens, seed, device)
        selection = dataclasses.replace(selection, notices=(*selection.notices, *built.notices))
        result = RunResult(subject, selection, num_tokens)
        try:
            return _measure(result, built, plain, hidden_states)
        except BackendError as error:
            # With -v the backend's authors see the traceback.
            logging.getLogger("moereg").info("the layer did not run", exc_info=error.__cause__)
            return dataclasses.replace(result, failure=str(error))


def _unquantized(problem: MoEProblem, seed: int, device: torch.device) -> ExpertWeights | None:
    """The unquantized originals of random weights, if they are not too large."""
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
    layer: RoutedWeights | CheckpointLayer,
    plain: Callable[[], ExpertWeights | None] | None,
    hidden_states: torch.Tensor,
) -> RunResult:
    selection, weights, problem = result.selection, layer.weights, result.selection.problem
    # Before the backend sees any of the layer.
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
    causes: tuple[str, ...] = ()
    if row.relative_error is not None and not row.relative_error <= row.tolerance:
        # This second call may fail although the first did not; the verdict stands.
        with phase("looking for the cause"), contextlib.suppress(Exception):
            out = comparison.output(winner, result.num_tokens)
            causes = diagnose(problem, weights, *calls[0], out, reference, computes=winner.computes)
    return dataclasses.replace(
        result,
        causes=causes,
        tolerance=row.tolerance,
        relative_error=row.relative_error,
        scheme_loss=loss,
        time_us=row.timing.median_us if row.timing else None,
        permute_ms=comparison.permute_ms[winner],
        weights_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values()),
    )


_TIE: Final = 1.03
"""Times closer than this are equal, as processes differ by as much."""

_GPU_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
_CPU_TOKENS: Final = (1, 4, 16, 64, 256)


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """The result of a bench; without rows if nothing fitted and nothing ran.

    Attributes:
        subject: The model's name to show.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        ceilings: The device's roofline ceilings; None if nothing ran.
        rows: Measurements by number of tokens, candidates in the selection's order.
    """

    subject: str
    selection: Selection
    routing: str
    measured_on: dict[str, Any]
    ceilings: Ceilings | None = None
    rows: tuple[Measurement, ...] = ()

    @property
    def passed(self) -> bool | None:
        """Whether everything measured is right; None if nothing ran."""
        return all(row.passed for row in self.rows) if self.rows else None

    @property
    def skipped(self) -> tuple[Decision, ...]:
        """The nearest candidate of each backend that does not fit."""
        return tuple(decision for decision in nearest_by_backend(self.selection.decisions) if not decision.accepted)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending."""
        return tuple(dict.fromkeys(row.num_tokens for row in self.rows))

    def fastest_first(self, num_tokens: int) -> list[Measurement]:
        """The rows of one number of tokens, wrong ones last."""
        rows = [row for row in self.rows if row.num_tokens == num_tokens]
        return sorted(rows, key=lambda row: (row.timing is None, row.time_us if row.timing else 0.0))

    def labels(self) -> dict[Decision, str]:
        """Names of measured candidates: the backend, with the class if a backend has several."""
        candidates = list(dict.fromkeys(row.decision for row in self.rows))
        names = [decision.backend for decision in candidates]
        return {
            decision: f"{decision.backend} ({decision.experts})"
            if names.count(decision.backend) > 1
            else decision.backend
            for decision in candidates
        }

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg bench --json` prints."""
        ceilings = dict.fromkeys(field.name for field in dataclasses.fields(Ceilings))
        return {
            "schema": SCHEMA,
            "problem": self.selection.problem.to_dict(),
            "platform": str(self.selection.platform),
            **{name: self.measured_on[name] for name in ("device", "versions", "commit", "date")},
            "routing": self.routing,
            "ceilings": dataclasses.asdict(self.ceilings) if self.ceilings else ceilings,
            "rows": [_row(row) for row in self.rows],
            "skipped": [
                {"backend": decision.backend, "reasons": decision.to_dict()["reasons"]} for decision in self.skipped
            ],
            "notices": list(self.selection.notices),
        }

    def faster(self) -> dict[Decision, list[int]]:
        """Fastest candidates of other backends than the chosen one, and at how many tokens each beats it."""
        chosen = {row.num_tokens: row for row in self.rows if row.decision is self.selection.winner}
        found: dict[Decision, list[int]] = {}
        for num_tokens, default in chosen.items():
            first = self.fastest_first(num_tokens)[0]
            is_other = first.decision.backend != default.decision.backend
            if is_other and default.time_us > _TIE * first.time_us:  # False for NaN.
                found.setdefault(first.decision, []).append(num_tokens)
        return found

    def show(self, all_reasons: bool = False) -> None:
        """Prints the result, fastest first at each number of tokens, or the reasons if nothing fitted.

        The last lines say what is wrong, or what a layer gets and how it gets something faster.
        """
        selection, winner, ceilings = self.selection, self.selection.winner, self.ceilings
        if winner is None or ceilings is None:
            show_selection(selection, self.subject, all_reasons)
            return
        target = console(sys.stdout)
        target.print(f"{self.subject}: {selection.problem}")
        versions = versions_of(self.measured_on)
        threads = f", threads: {torch.get_num_threads()}" if selection.platform.kind == "cpu" else ""
        target.print(f"on {machine(selection.platform)}{threads}, {versions}, {self.measured_on['date']}")
        target.print(
            f"ceilings: {ceilings.matmul_tflops:.3g} TFLOP/s, "
            f"{ceilings.read_gbps:,.0f} GB/s ({ceilings.read_by}); {self.routing} routing"
        )
        # Only if it is informative, since the table fills a terminal's width.
        with_origin = any(row.decision.origin != BUILTIN for row in self.rows)
        origin = ("origin",) if with_origin else ()
        # 80 columns have no room for figures derived from the time.
        rates, share = (("TFLOP/s", "GB/s"), "% of roofline") if target.width >= WIDE else ((), "roofline")
        table = new_table("T", "", "backend", *origin, "time", "p10 to p90", *rates, share, "error")
        labels = self.labels()
        for num_tokens in self.token_counts:
            rows = self.fastest_first(num_tokens)
            for place, row in enumerate(rows):
                mark = Text("fastest" if row is rows[0] else "", style="bold green")
                measured = _measured(row, bool(rates))
                first = f"{num_tokens:,}" if place == 0 else ""
                table.add_row(
                    first,
                    mark if row.timing else "",
                    labels[row.decision],
                    *([row.decision.provider] if with_origin else []),
                    *measured,
                    _error(row),
                    end_section=row is rows[-1],
                )
        target.print(table)
        for row in self.rows:
            if row.failure:
                target.print(f"{labels[row.decision]} failed at {row.num_tokens} tokens: {row.failure}")
            if row.damage:
                label = f"{labels[row.decision]} of {row.decision.provider}"
                target.print(f"{label} is WRONG at {row.num_tokens} tokens: {row.damage}")
        print_rejected(target, "not compared", selection, all_reasons)
        print_notices(target, selection.notices)
        for decision, token_counts in self.faster().items():
            # An emulation goes after every kernel, whatever is preferred.
            word = "prefer" if decision.tier == winner.tier else "require"
            target.print(
                f"faster at T={','.join(map(str, token_counts))}: {labels[decision]}{of_wheel(decision)}; "
                f"MOEREG_{word.upper()}={decision.backend} or {word}={decision.backend!r} gives it to layers"
            )
        target.print(f"a layer gets {labels[winner]}{of_wheel(winner)}: {source_of(selection)}", style="bold")
        if bad := dict.fromkeys(labels[row.decision] for row in self.rows if not row.passed):
            target.print(Text(f"not right: {', '.join(bad)}", style="bold red"))


def _row(row: Measurement) -> dict[str, Any]:
    return {
        "backend": row.decision.backend,
        "experts": row.decision.experts,
        "tokens": row.num_tokens,
        "relative_error": row.relative_error,
        "tolerance": row.tolerance,
        "passed": row.passed,
        "failure": row.failure or None,
        "damage": row.damage or None,
        "time_us": row.time_us,
        "p10_us": row.timing.p10_us if row.timing else math.nan,
        "p90_us": row.timing.p90_us if row.timing else math.nan,
        "tflops": row.tflops,
        "gbps": row.gbps,
        "roofline_us": row.roofline_us,
        "share": row.share,
        "origin": row.decision.origin,
        "origin_version": row.decision.origin_version,
    }


def _measured(row: Measurement, with_rates: bool) -> tuple[str | Text, ...]:
    if row.timing is None:
        return Text("WRONG", style="bold red"), "", *(["", ""] if with_rates else []), ""
    return (
        format_us(row.time_us),
        format_us_range(row.timing.p10_us, row.timing.p90_us),
        *([_rate(row.tflops), _rate(row.gbps)] if with_rates else []),
        f"{row.share:.1%}",
    )


def _error(row: Measurement) -> str | Text:
    if row.failure:
        return Text("failed", style="bold red")
    if row.damage:
        return Text("wrote to read-only tensors", style="bold red")
    if row.passed:
        return f"{row.relative_error:.1e}"
    return Text(f"{row.relative_error:.1e} > {row.tolerance:.1e}", style="bold red")


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def parse_counts(text: str, option: str = "--tokens 1,16,64") -> tuple[int, ...]:
    """Parses an option's numbers, ascending.

    Raises:
        UsageError: The text has another form.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        name, _, example = option.partition(" ")
        raise UsageError(f"{name} takes numbers of at least 1 such as {example}, got {text!r}")
    return tuple(sorted({int(word) for word in words}))


def check_routing(routing: str) -> None:
    """Checks the name given to `--routing`.

    Raises:
        UnknownNameError: The name is unknown.
    """
    if routing not in ROUTINGS:
        raise UnknownNameError(unknown_name_message("routing", routing, ROUTINGS))


def bench_layer(
    flags: ProblemFlags,
    checkpoint: Path | None,
    layer: int | None,
    token_counts: Sequence[int] | None,
    routing: str,
    rounds: int,
    seed: int,
) -> BenchResult:
    """Makes one layer for every backend that fits, checks each against the reference and times it.

    Takes the options' values by name; `token_counts` ascend. The result has no rows if nothing fits.

    Raises:
        MoeregError: Anything that the user can fix.
    """
    platform = platform_at_hand("bench", flags.platform)
    if token_counts is None:
        token_counts = _CPU_TOKENS if platform.device_type == "cpu" else _GPU_TOKENS
    subject = find_subject(dataclasses.replace(flags, tokens=max(token_counts)), checkpoint, layer)
    problem = subject.problem
    selection = subject.noted(explain_backends(problem, platform, **flags.request()))
    cells = [decision.cell for decision in selection.decisions if decision.accepted and decision.cell is not None]
    distributions = {"torch", *(Requirement(text).name for cell in cells for text in cell.requires)}
    result = BenchResult(subject.name or "random weights", selection, routing, provenance(platform, distributions))
    if selection.winner is None:
        return result
    device = layer_device(selection)
    for num_tokens in token_counts:
        # Each backend has its own inputs and outputs.
        check_run_fits(problem, num_tokens, device, len(cells), (1 + len(cells)) * num_calls(num_tokens))
    with phase("measuring ceilings"):
        ceilings = measure_ceilings(problem.torch_dtype, device)

    points = [Point(routing, num_tokens) for num_tokens in token_counts]
    session = LayerSession(selection, lambda: build_layer(subject, seed, device).weights, device, seed, points, phase)
    rows: list[Measurement] = []
    for point in points:
        with phase(f"comparing {len(cells)} at {point.tokens} tokens"):
            rows += session.measure(point, rounds, ceilings=ceilings)
    return dataclasses.replace(result, ceilings=ceilings, rows=tuple(rows))
