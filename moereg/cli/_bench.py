"""`moereg run` and `moereg bench`: build, check and time a random layer or a checkpoint's on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from packaging.requirements import Requirement
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moereg.arguments import check_one_of
from moereg.bench.compare import Comparison, Measurement
from moereg.bench.inputs import ROUTINGS, Call, num_calls, random_weights
from moereg.bench.points import Point
from moereg.bench.roofline import Ceilings, expert_bytes, measure_ceilings
from moereg.bench.session import LayerSession
from moereg.cli._options import ProblemFlags, Subject, UsageError, find_subject
from moereg.cli._output import Result, code_of_verdict, picked
from moereg.cli._progress import phase
from moereg.cli._show import (
    bad,
    format_us,
    format_us_range,
    good,
    is_wide,
    machine,
    new_table,
    print_notices,
    print_rejected,
    say,
    show_selection,
    source_of,
    versions_of,
)
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import BackendError, EmulationWarning, TooLargeError, UnsupportedProblemError
from moereg.evidence.provenance import provenance
from moereg.layer.backend_calls import device_types
from moereg.numerics.reference import LayerCall
from moereg.platforms import Platform, current_platform, probe_cpu, torch_device
from moereg.routing import softmax_topk
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.runtime.progress import Advance
from moereg.selection.loader import load_backends
from moereg.selection.result import SCHEMA, Decision, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.testing.diagnosis import diagnose
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
    sample_routes: Router
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
    from moereg.checkpoints import load_experts

    local = problem.num_local_experts if problem.is_expert_parallel else None
    with phase("loading weights") as advance:
        return load_experts(path, layer, problem.dtype, device, num_local_experts=local, progress=advance)


def build_layer(subject: Subject, seed: int, device: torch.device) -> RoutedWeights | CheckpointLayer:
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
    """This machine as a platform; `--platform` must name this machine or its CPU."""
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

    So many kernels, and inputs with their outputs, exist at the same time.
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


def run_layer(flags: ProblemFlags, seed: int) -> Result:
    """Builds a layer, runs the selected kernel on this machine and compares it with the reference."""
    num_tokens = DEFAULT_TOKENS if flags.tokens is None else flags.tokens
    subject = find_subject(dataclasses.replace(flags, tokens=num_tokens))
    problem = subject.problem
    platform = platform_at_hand("run", flags.platform)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # The result names the tier.
            selection = subject.noted(select_backend(problem, platform, **flags.request()))
    except UnsupportedProblemError as error:
        selection = subject.noted(error.selection)
    name, winner = subject.name or "random weights", selection.winner
    if winner is None:
        return result_of_run(name, selection, num_tokens, all_reasons=flags.verbose)
    device = layer_device(selection)
    check_run_fits(problem, num_tokens, device, num_calls=_NUM_CALLS)
    with torch.no_grad():
        built = build_layer(subject, seed, device)
        selection = dataclasses.replace(selection, notices=(*selection.notices, *built.notices))
        # Before the backend sees any of the layer.
        hidden_states = random_hidden_states(problem, num_tokens, seed, device)
        calls = [Call(rows, *built.sample_routes(rows)) for rows in (hidden_states, hidden_states.flip(1))]
        assert len(calls) == _NUM_CALLS
        alone = dataclasses.replace(selection, decisions=(winner,))
        comparison = Comparison(alone, lambda: built.weights, {num_tokens: calls}, phase)
        with phase("running"):
            (row,) = comparison.measure(num_tokens, None)
        if isinstance(row.error, BackendError):
            # With -v the backend's authors see the traceback.
            logging.getLogger("moereg").info("the layer did not run", exc_info=row.error.__cause__)
        elif row.error is not None:
            raise row.error
        causes: tuple[str, ...] = ()
        if not (row.passed or row.failure or row.damage):
            # This second call may fail although the first did not; the verdict stands.
            with phase("looking for the cause"), contextlib.suppress(Exception):
                out, reference = comparison.output(winner, num_tokens), comparison.reference(winner, num_tokens)
                call = LayerCall.of(problem, built.weights, *calls[0], computes=winner.computes)
                causes = diagnose(call, out, reference)
    permute_ms, weights_bytes = comparison.permute_ms.get(winner), built.weights.num_bytes
    return result_of_run(name, selection, num_tokens, row, permute_ms, weights_bytes, causes, flags.verbose)


def result_of_run(
    subject: str,
    selection: Selection,
    num_tokens: int,
    row: Measurement | None = None,
    permute_ms: float | None = None,
    weights_bytes: int = 0,
    causes: Sequence[str] = (),
    all_reasons: bool = False,
) -> Result:
    """The result of a run, without a row if nothing fits; `causes` are usual mistakes that explain wrong numbers."""
    winner, passed = selection.winner, None if row is None else row.passed
    compared = None if row is None or row.failure or row.damage else row
    values = {
        "schema": SCHEMA,
        "backend": selection.backend,
        "platform": str(selection.platform),
        "problem": selection.problem.to_dict(),
        "tokens": num_tokens,
        "relative_error": compared and compared.relative_error,
        "tolerance": compared and compared.tolerance,
        "passed": passed,
        "causes": list(causes),
        "failure": (row and row.failure) or None,
        "damage": (row and row.damage) or None,
        "time_us": compared and compared.time_us,
        "p10_us": compared and compared.timing and compared.timing.p10_us,
        "p90_us": compared and compared.timing and compared.timing.p90_us,
        "permute_ms": compared and permute_ms,
        "selection": selection.to_dict(),
    }

    def show() -> None:
        if winner is None or compared is None or permute_ms is None:
            show_selection(selection, subject, all_reasons)
            if winner is not None and row is not None:
                damage = f"WRONG: {winner.label}: {row.damage}"
                say(bad(f"FAILED: {row.failure}" if row.failure else damage))
            return
        verdict = good("right") if passed else bad("WRONG")
        verdict.append(f": error {compared.relative_error:.2e}, {'' if passed else 'not '}within the tolerance ")
        verdict.append(f"{compared.tolerance:.1e} of the reference")
        tier = "" if winner.tier == "kernel" else f", {winner.tier}: right numbers, not the speed of the scheme"
        time = f"{format_us(compared.time_us)} a call of {num_tokens} tokens"
        if compared.timing:
            time += f" (p10 to p90: {format_us_range(compared.timing.p10_us, compared.timing.p90_us)})"
        rows = {
            "layer": f"{subject}: {selection.problem}",
            "platform": machine(selection.platform),
            "backend": f"{winner.label}, {source_of(selection)}{tier}",
            "computed as": winner.computes,
            "weights": f"{format_bytes(weights_bytes)}, permuted in {format_us(1e3 * permute_ms)}",
            "time": time if compared.timing else "none, since the numbers are wrong",
        }
        if causes:
            rows["likely cause"] = ", or ".join(causes)
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        for cells in rows.items():
            table.add_row(*cells)
        say(table)
        for one in selection.decisions[1:]:
            if one.accepted:
                say(f"not chosen: {one.label}: fits, priority {one.priority}")
        print_rejected("not chosen", selection, all_reasons)
        # Selecting the backend has already logged the request's notices.
        print_notices(notice for notice in selection.notices if notice not in selection.request.notices)
        say(verdict)

    return Result(values, show, code_of_verdict(passed))


_TIE: Final = 1.03
"""Times closer than this are equal, as processes differ by as much."""

_GPU_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
_CPU_TOKENS: Final = (1, 4, 16, 64, 256)


def parse_counts(text: str, example: str = "1,16,64") -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--tokens takes numbers of at least 1 such as {example}, got {text!r}")
    return tuple(sorted({int(word) for word in words}))


def check_routing(routing: str) -> None:
    check_one_of("routing", routing, tuple(ROUTINGS))


def bench_layer(
    flags: ProblemFlags, token_counts: Sequence[int] | None, routing: str, rounds: int, seed: int
) -> Result:
    """Makes one layer for every backend that fits, checks each against the reference and times it.

    `token_counts` ascend. The result has no rows if nothing fits.
    """
    platform = platform_at_hand("bench", flags.platform)
    if token_counts is None:
        token_counts = _CPU_TOKENS if platform.device_type == "cpu" else _GPU_TOKENS
    subject = find_subject(dataclasses.replace(flags, tokens=max(token_counts)))
    problem = subject.problem
    selection = subject.noted(explain_backends(problem, platform, **flags.request()))
    cells = [decision.cell for decision in selection.decisions if decision.accepted and decision.cell is not None]
    distributions = {"torch", *(Requirement(text).name for cell in cells for text in cell.requires)}
    where = provenance(platform, distributions)
    result = functools.partial(
        result_of_bench, subject.name or "random weights", selection, routing, where, all_reasons=flags.verbose
    )
    if selection.winner is None:
        return result()
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
    return result(ceilings, rows)


def result_of_bench(
    subject: str,
    selection: Selection,
    routing: str,
    measured_on: Mapping[str, Any],
    ceilings: Ceilings | None = None,
    rows: Sequence[Measurement] = (),
    all_reasons: bool = False,
) -> Result:
    """The result of a bench, whose rows are by number of tokens, candidates in the selection's order.

    `measured_on` has `device`, `versions`, `commit` and `date`; `ceilings` is None if nothing ran.
    """
    known = dict.fromkeys(field.name for field in dataclasses.fields(Ceilings))
    values = {
        "schema": SCHEMA,
        "problem": selection.problem.to_dict(),
        "platform": str(selection.platform),
        **{name: measured_on[name] for name in ("device", "versions", "commit", "date")},
        "routing": routing,
        "ceilings": dataclasses.asdict(ceilings) if ceilings else known,
        "rows": [_row(row) for row in rows],
        "skipped": [
            {"backend": decision.backend, "reasons": decision.to_dict()["reasons"]}
            for decision in nearest_by_backend(selection.decisions)
            if not decision.accepted
        ],
        "notices": list(selection.notices),
    }
    passed = all(row.passed for row in rows) if rows else None

    def show() -> None:
        if ceilings is None:
            return show_selection(selection, subject, all_reasons)
        versions = versions_of(measured_on)
        threads = f", threads: {torch.get_num_threads()}" if selection.platform.kind == "cpu" else ""
        say(
            f"{subject}: {selection.problem}",
            f"on {machine(selection.platform)}{threads}, {versions}, {measured_on['date']}",
            f"ceilings: {ceilings.matmul_tflops:.3g} TFLOP/s, "
            f"{ceilings.read_gbps:,.0f} GB/s ({ceilings.read_by}); {routing} routing",
        )
        _show_rows(selection, rows, all_reasons)

    return Result(values, show, code_of_verdict(passed))


def _row(row: Measurement) -> dict[str, Any]:
    decision, timing = row.decision, row.timing
    return {
        **picked(decision, "backend", "experts"),
        "tokens": row.num_tokens,
        **picked(row, "relative_error", "tolerance", "passed"),
        "failure": row.failure or None,
        "damage": row.damage or None,
        "time_us": row.time_us,
        "p10_us": timing.p10_us if timing else math.nan,
        "p90_us": timing.p90_us if timing else math.nan,
        **picked(row, "tflops", "gbps", "roofline_us", "share"),
        **picked(decision, "origin", "origin_version"),
    }


def _show_rows(selection: Selection, rows: Sequence[Measurement], all_reasons: bool) -> None:
    """Prints measurements, fastest first at each number of tokens.

    The last lines say what is wrong, or what a layer gets and how it gets something faster.
    """
    winner = selection.chosen
    # 80 columns have no room for figures derived from the time.
    rates, share = ((">TFLOP/s", ">GB/s"), ">% of roofline") if is_wide() else ((), ">roofline")
    table: list[Sequence[str | Text] | None] = []
    faster: dict[Decision, list[int]] = {}
    for num_tokens in dict.fromkeys(row.num_tokens for row in rows):
        ordered = [row for row in rows if row.num_tokens == num_tokens]
        ordered.sort(key=lambda row: (row.timing is None, row.time_us if row.timing else 0.0))
        for row in ordered:
            is_first = row is ordered[0]
            cells = (
                f"{num_tokens:,}" if is_first else "",
                good("fastest") if is_first and row.timing else "",
                row.decision.label,
                *_times(row, bool(rates)),
                _error(row),
            )
            table.append(cells)
        table.append(None)
        first, default = ordered[0], next((row for row in ordered if row.decision is winner), None)
        is_other = default is not None and first.decision.backend != winner.backend
        if is_other and default is not None and default.time_us > _TIE * first.time_us:  # False for NaN.
            faster.setdefault(first.decision, []).append(num_tokens)
    say(new_table(">T", "", "backend", ">time", ">p10 to p90", *rates, share, ">error", rows=table))
    for row in rows:
        if row.failure:
            say(f"{row.decision.label} failed at {row.num_tokens} tokens: {row.failure}")
        if row.damage:
            say(f"{row.decision.label} is WRONG at {row.num_tokens} tokens: {row.damage}")
    print_rejected("not compared", selection, all_reasons)
    print_notices(selection.notices)
    for decision, token_counts in faster.items():
        # An emulation goes after every kernel, whatever is preferred.
        word = "prefer" if decision.tier == winner.tier else "require"
        say(
            f"faster at T={','.join(map(str, token_counts))}: {decision.label}; "
            f"MOEREG_{word.upper()}={decision.backend} or {word}={decision.backend!r} gives it to layers"
        )
    say(Text(f"a layer gets {winner.label}: {source_of(selection)}", style="bold"))
    if wrong := dict.fromkeys(row.decision.label for row in rows if not row.passed):
        say(bad(f"not right: {', '.join(wrong)}"))


def _times(row: Measurement, with_rates: bool) -> tuple[str | Text, ...]:
    if row.timing is None:
        return bad("WRONG"), "", *(["", ""] if with_rates else []), ""
    return (
        format_us(row.time_us),
        format_us_range(row.timing.p10_us, row.timing.p90_us),
        *([_rate(row.tflops), _rate(row.gbps)] if with_rates else []),
        f"{row.share:.1%}",
    )


def _error(row: Measurement) -> str | Text:
    if row.failure:
        return bad("failed")
    if row.damage:
        return bad("wrote to read-only tensors")
    error = f"{row.relative_error:.1e}"
    return error if row.passed else bad(f"{error} > {row.tolerance:.1e}")


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
