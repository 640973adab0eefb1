"""Measures the rows of a board in one process: numbers first, then time in turns, a row after the other."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import gc
import json
import math
import pathlib
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from benches.board.layers import BoardLayer, Point
from benches.board.rows import EIGHT_BITS, ceiling_name, class_name, compiled_ahead, lacks_a_library
from benches.board.store import Board, Row
from moereg.bench.compare import Comparison, Measurement
from moereg.bench.inputs import random_weights
from moereg.bench.roofline import Ceilings, expert_bytes, measure_ceilings
from moereg.bench.session import LayerSession, row_values, timed_cell, tuning_candidates
from moereg.bench.timing import ROUNDS, SECONDS
from moereg.evidence.provenance import clocks
from moereg.platforms import Platform, torch_device
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.runtime.workspace import WORKSPACES
from moereg.selection.loader import load_backends
from moereg.selection.result import Decision, Selection, nearest_by_backend
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

__all__ = ["COMPILED_AHEAD", "Limits", "Lost", "Marker", "Wanted", "layer_weights", "measure_board"]

# Of the free memory, for the canonical weights and one permuted copy a candidate; the rest is for calls and references.
_WEIGHTS_FRACTION: Final = 0.75
COMPILED_AHEAD: Final = ("triton",)


class Lost(Exception):
    """A candidate took the device down, and is on the board's list of those; another process may go on."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is measured.

    Attributes:
        seconds: After which no row is begun.
        rounds: Samples of each candidate in a row, at most.
        each_seconds: After which a candidate takes no further sample in a row, once it has three.
    """

    seconds: float = math.inf
    rounds: int = ROUNDS
    each_seconds: float = SECONDS


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Backends that take part.

    Attributes:
        only: Patterns of backends; all where empty.
        deny: Patterns of backends that do not.
        opt_in: Whether cells take part that a request would have to name.
    """

    only: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    opt_in: bool = True

    def __contains__(self, backend: str) -> bool:
        is_asked = not self.only or any(fnmatch.fnmatchcase(backend, pattern) for pattern in self.only)
        return is_asked and not any(fnmatch.fnmatchcase(backend, pattern) for pattern in self.deny)


class Marker:
    """A file that says whose code runs, for whoever finds the process dead or stuck."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path: Final = path
        self._layer = ""
        self.last: Decision | None = None

    def begin(self, layer: str) -> None:
        """A layer begins, and none of its candidates runs yet."""
        self._layer, self.last = layer, None
        self._write("", "", "making the layer")

    def watch(self, decision: Decision, step: str) -> None:
        """A candidate's code runs next."""
        self.last = decision
        self._write(decision.backend, decision.experts, step)

    def _write(self, backend: str, experts: str, step: str) -> None:
        mark = {"layer": self._layer, "backend": backend, "experts": experts, "step": step}
        self._path.write_text(json.dumps(mark), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Entrants:
    """The candidates of a layer, and why others are none.

    Attributes:
        selection: Every candidate; those that take part are accepted.
        default: What `select_backend` would choose.
        skipped: Reasons of each backend that does not fit, and of each class that lacks a library where another class
            of its backend fits.
        excluded: Candidates that fit and do not take part, with the reason.
    """

    selection: Selection
    default: Decision | None
    skipped: dict[str, str]
    excluded: list[tuple[Decision, str]]


def _entrants(layer: BoardLayer, problem: MoEProblem, board: Board, wanted: Wanted, platform: Platform) -> _Entrants:
    opt_in = sorted({cell.name for cell in load_backends().cells if cell.opt_in}) if wanted.opt_in else []
    found = tuning_candidates(problem, platform, prefer=opt_in)
    fitting = [decision for decision in found.decisions if decision.accepted and decision.backend in wanted]
    refused = [one for one in found.decisions if not one.accepted and one.backend in wanted]
    texts = {one: "; ".join(reason.text for reason in one.reasons) for one in refused}
    skipped = {one.backend: texts[one] for one in nearest_by_backend(found.decisions) if one in texts}
    # Another class of a backend that takes part is missed only where it lacks something that can be installed.
    skipped |= {
        class_name(one.backend, one.experts): texts[one]
        for one in refused
        if one.backend not in skipped and {reason.code for reason in one.reasons} <= {"package", "probe"}
    }
    excluded: list[tuple[Decision, str]] = []
    taking: list[Decision] = []
    free_bytes = free_memory_bytes(torch_device(platform))
    layer_bytes = problem.num_local_experts * expert_bytes(problem)
    for decision in fitting:
        reason = board.reason_out(layer.name, decision.backend, decision.experts)
        if (
            reason is None
            and free_bytes is not None
            and (len(taking) + 2) * layer_bytes > _WEIGHTS_FRACTION * free_bytes
        ):
            reason = (
                f"left out: {len(taking)} copies of {format_bytes(layer_bytes)} are what fits beside the layer's own; "
                "measure it with --only"
            )
        if reason is None:
            taking.append(decision)
        else:
            excluded.append((decision, reason))
    selection = dataclasses.replace(found, decisions=tuple(taking))
    return _Entrants(selection, found.winner, skipped, excluded)


def measure_board(
    board: Board,
    layers: Sequence[BoardLayer],
    platform: Platform,
    wanted: Wanted,
    marker: Marker,
    limits: Limits,
) -> None:
    """Measures the rows that the board lacks, and writes it after each.

    A layer may take its share of the seconds that are left; what it leaves over is for later ones.

    Args:
        board: Where rows go.
        layers: In this order.
        platform: This machine, probed.
        wanted: Who takes part.
        marker: Says whose code runs.
        limits: How much is measured.

    Raises:
        Lost: A candidate took the device down.
    """
    start, before = time.monotonic(), board.document["seconds"]
    deadline = start + limits.seconds
    reasons: dict[str, str] = {}
    open_layers = [layer for layer in layers if board.missing(layer)]
    try:
        for number, layer in enumerate(open_layers):
            now = time.monotonic()
            if now >= deadline:
                break
            own = now + (deadline - now) / (len(open_layers) - number)
            marker.begin(layer.name)
            try:
                reason = _measure_layer(board, layer, platform, wanted, marker, own, limits)
            except Lost:
                raise
            except Exception as error:  # For example memory for the layer itself: others may be smaller.
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if reason:
                reasons[layer.name] = reason
                print(f"{layer.name}: left out: {reason}", flush=True)
            _release()
    finally:
        board.document["seconds"] = before + time.monotonic() - start
        board.document |= clocks(platform)
        board.leave_out(layers, reasons)


def _measure_layer(
    board: Board,
    layer: BoardLayer,
    platform: Platform,
    wanted: Wanted,
    marker: Marker,
    deadline: float,
    limits: Limits,
) -> str:
    """Measures a layer's missing rows until the deadline; returns why it could not be measured, or nothing."""
    points, problem, device = board.missing(layer), layer.problem(), torch_device(platform)
    taking_part = _entrants(layer, problem, board, wanted, platform)
    board.document["layers"][layer.name] = {
        "layer": layer.layer,
        "scheme": layer.scheme,
        "problem": problem.to_dict(),
        "default": taking_part.default and taking_part.default.backend,
        "skipped": taking_part.skipped,
    }
    if not taking_part.selection.decisions:
        return "nothing fits"
    names = ", ".join(decision.backend for decision in taking_part.selection.decisions)
    print(f"{layer.name}: {names}", flush=True)
    for name, reason in taking_part.skipped.items():
        if lacks_a_library(reason):
            print(f"{layer.name}: without {name}, which {reason}", flush=True)
    ceilings = _ceilings(problem, platform)
    name = ceiling_name(problem.quant, problem.dtype, platform.kind)
    board.document["ceilings"][name] = dataclasses.asdict(ceilings)
    if compiled_ahead(board.document):
        _precompile(problem, {point.tokens for point in points}, taking_part.selection)

    cells = {one: board.add_cell(timed_cell(one, platform)) for one in taking_part.selection.decisions}
    make_weights = functools.partial(layer_weights, problem, device)
    session = LayerSession(taking_part.selection, make_weights, device, 0, points, watch=marker.watch)
    comparison = session.comparison
    for point in points:
        if time.monotonic() >= deadline:
            return "no time was left"
        before = clocks(platform)
        found = session.measure(point, limits.rounds, limits.each_seconds, ceilings)
        _give_up_if_lost(board, layer, comparison, marker)
        row = _row(found, comparison, taking_part, compiled_ahead(board.document), cells)
        if before:
            row["clocks"] = [before["clocks"], clocks(platform)["clocks"]]
        board.add(layer, point, row)
        print(_line(layer, point, row), flush=True)
    return ""


def layer_weights(problem: MoEProblem, device: torch.device) -> ExpertWeights:
    """A layer's random weights. All experts have the largest static scale of the intermediate, as in engines."""
    weights = random_weights(problem, torch.Generator().manual_seed(0), device)
    if weights.a2_scale is None:
        return weights
    return dataclasses.replace(weights, a2_scale=weights.a2_scale.amax().repeat(len(weights.a2_scale)))


def _give_up_if_lost(board: Board, layer: BoardLayer, comparison: Comparison, marker: Marker) -> None:
    if comparison.stopped is None:
        return
    last = marker.last
    assert last is not None, "a candidate ran"
    board.put_out(layer.name, last.backend, last.experts, str(comparison.stopped))
    raise Lost(str(comparison.stopped))


def _row(
    found: Sequence[Measurement],
    comparison: Comparison,
    taking_part: _Entrants,
    ahead: Collection[str],
    cells: Mapping[Decision, int],
) -> Row:
    default = taking_part.default
    beside = next((one for one in found if one.decision == default), None)
    return {
        "roofline_us": found[0].roofline_us,
        "default": default and {"backend": default.backend, "experts": default.experts, "computes": default.computes},
        "results": [
            *(
                {**_identity(one.decision), **_result(one, beside, comparison, ahead), "cell": cells[one.decision]}
                for one in found
            ),
            *({**_identity(decision), "time_us": None, "failure": reason} for decision, reason in taking_part.excluded),
        ],
    }


def _identity(decision: Decision) -> dict[str, Any]:
    return {
        "backend": decision.backend,
        "experts": decision.experts,
        "computes": decision.computes,
        "origin": decision.origin,
        "tier": decision.tier,
        "priority": decision.priority,
    }


def _result(
    one: Measurement, default: Measurement | None, comparison: Comparison, ahead: Collection[str]
) -> dict[str, Any]:
    found = row_values(one, default) or {}
    return {
        **{name: found.get(name) for name in ("log_ratio", "half_width", "rounds", "graph")},
        "is_wrong": one.is_culprit and not one.lacks_memory,
        "time_us": one.time_us,
        "p10_us": one.timing.p10_us if one.timing else math.nan,
        "p90_us": one.timing.p90_us if one.timing else math.nan,
        "share": one.share,
        "relative_error": one.relative_error,
        "tolerance": one.tolerance,
        "permute_ms": comparison.permute_ms.get(one.decision, math.nan),
        "first_ms": math.nan if one.decision.backend in ahead else one.first_ms,
        "failure": one.reason or None,
    }


def _line(layer: BoardLayer, point: Point, row: Row) -> str:
    timed = sorted((one for one in row["results"] if one["failure"] is None), key=lambda one: one["time_us"])
    texts = [f"{_label(one, row)} {one['time_us']:,.1f}" for one in timed]
    texts += [f"{_label(one, row)} FAILED" for one in row["results"] if one["failure"] is not None]
    return f"{layer.name} {point.routing} T {point.tokens}: {', '.join(texts)}"


def _label(one: Row, row: Row) -> str:
    is_alone = sum(other["backend"] == one["backend"] for other in row["results"]) == 1
    return str(one["backend"] if is_alone else f"{one['backend']} ({one['experts']})")


def _ceilings(problem: MoEProblem, platform: Platform) -> Ceilings:
    return _measured_ceilings(ceiling_name(problem.quant, problem.dtype, platform.kind), platform)


@functools.cache
def _measured_ceilings(dtype: str, platform: Platform) -> Ceilings:
    if dtype not in EIGHT_BITS:
        return measure_ceilings(getattr(torch, dtype), torch_device(platform))
    from benches.h200 import quant

    # The same fastest reader for all, and the rate of products of such elements.
    found = quant.measure_ceilings([dtype])[f"{dtype}_tflops"]
    return dataclasses.replace(_measured_ceilings("bfloat16", platform), matmul_tflops=found)


def _precompile(problem: MoEProblem, tokens: Collection[int], selection: Selection) -> None:
    """Compiles Triton's kernels on all cores, which on one core outlast the board."""
    is_there = any(decision.backend in COMPILED_AHEAD for decision in selection.decisions)
    if not is_there or selection.platform.device_type != "cuda":
        return
    from benches.h200.precompile import precompile

    try:
        precompile((problem, num_tokens) for num_tokens in sorted(tokens))
    except Exception:  # The comparison finds out the same, and whose fault it is.
        traceback.print_exc(limit=-3, file=sys.stderr)


def _release() -> None:
    """Frees the memory of the last layer."""
    WORKSPACES.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def patterns(texts: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    """Names or patterns of backends, of one argument with commas or several."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
