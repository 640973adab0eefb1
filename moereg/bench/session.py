"""One session on one layer in this process: every cell that could run it, numbers first, then time beside the default.

The default is what priority alone would choose. Every time is a ratio to the default's on the same inputs in the same
round, so that what slows the machine slows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from moereg.bench.compare import Comparison, Measurement, Phase, Watch
from moereg.bench.inputs import Call, random_calls
from moereg.bench.points import Point
from moereg.bench.roofline import Ceilings, settled_us
from moereg.bench.timing import ROUNDS, SECONDS
from moereg.evidence.on_machine import QUARANTINE, cell_key
from moereg.evidence.pack import TimedCell
from moereg.evidence.provenance import clocks
from moereg.evidence.significance import paired
from moereg.platforms import Platform
from moereg.selection.decide import candidate_of, decide, rank
from moereg.selection.loader import load_backends, missing_backend
from moereg.selection.request import Request
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

SCREEN_ROUNDS: Final = 5
"""Samples that tell which cells are far behind."""

BEHIND: Final = 1.3
"""A cell this many times slower than the fastest, at every number of tokens, is not measured further."""

LARGEST_DRIFT: Final = 0.1
"""A session is refused if the clock of its device changed by more."""

_SETTLING_SIZE: Final = 4096

Key = tuple[str, ...]
"""A candidate on this machine: backend, class, rule, scheme and narrowed facts."""


def tuning_candidates(
    problem: MoEProblem, platform: Platform, require: Any = None, prefer: Any = None, deny: Any = None
) -> Selection:
    """The candidates for a layer by priority alone, whatever was measured before; the winner is the default.

    A wish lets cells take part that are opt-in, and changes no order: they are not what a layer gets without one.
    """
    cells = load_backends().cells
    request = Request.resolve(
        problem.quant.name, require, prefer, deny, environ=os.environ, cells=cells, missing=missing_backend
    )
    asked = decide(problem, platform, request, cells, quarantine=QUARANTINE.read())
    fitting = rank((one for one in asked.decisions if one.accepted), Request())
    ordered = sorted(fitting, key=lambda one: one.cell is not None and one.cell.opt_in)
    rejected = (one for one in asked.decisions if not one.accepted)
    return dataclasses.replace(asked, decisions=(*ordered, *rejected))


def candidates_to_time(selection: Selection) -> dict[Key, Decision]:
    """The candidates to measure: every accepted kernel, or emulations if there is none; the default first."""
    fitting = [one for one in selection.decisions if one.accepted]
    return {key_of(one, selection.platform): one for one in fitting if one.tier == fitting[0].tier}


def key_of(decision: Decision, platform: Platform) -> Key:
    """The key of an accepted candidate."""
    return cell_key(*candidate_of(decision, platform))


def timed_cell(decision: Decision, platform: Platform) -> TimedCell:
    """An accepted candidate as it is measured here now."""
    return TimedCell.of(*candidate_of(decision, platform), platform)


def row_values(one: Measurement, default: Measurement | None) -> dict[str, Any] | None:
    """A measurement as values of a pack's row, but for its place; None if it or the default has too few samples."""
    own, base = one.timing, None if default is None else default.timing
    if own is None or base is None or min(len(own.samples_us), len(base.samples_us)) < 2:
        return None
    ratio, width = (0.0, 0.0) if one is default else paired(base.samples_us, own.samples_us)
    return {
        "log_ratio": ratio,
        "half_width": width,
        "median_us": own.median_us,
        "p10_us": own.p10_us,
        "p90_us": own.p90_us,
        "rounds": min(len(base.samples_us), len(own.samples_us)),
        "error": one.relative_error / one.tolerance,
        "graph": one.graph,
    }


class LayerSession:
    """Candidates of one layer on the same weights, measured point by point by its `comparison`."""

    def __init__(
        self,
        selection: Selection,
        make_weights: Callable[[], ExpertWeights],
        device: torch.device,
        seed: int,
        points: Iterable[Point] = (),
        phase: Phase = lambda description: contextlib.nullcontext(lambda done, total: None),
        watch: Watch = lambda decision, step: None,
    ) -> None:
        """Makes weights and inputs, and permutes the weights; other arguments as in `Comparison`.

        Inputs of `points` are made before any candidate's code runs, others when they are needed.
        """
        self.selection: Final = selection
        self._device: Final = device
        self._seed: Final = seed
        self._points: Final = tuple(points)
        inputs = {point: self._calls(point) for point in self._points}
        self.comparison: Final = Comparison(selection, make_weights, inputs, phase, watch)

    def _calls(self, point: Point) -> list[Call]:
        return random_calls(self.selection.problem, point.tokens, point.routing, self._seed, self._device)

    def measure(
        self, point: Point, rounds: int = ROUNDS, seconds: float = SECONDS, ceilings: Ceilings | None = None
    ) -> list[Measurement]:
        """Compares the candidates with the reference, then times the right ones in turns; as `Comparison.measure`."""
        if point in self._points:
            return self.comparison.measure(point, ceilings, rounds, seconds)
        self.comparison.add(point, self._calls(point)[:rounds])
        try:
            return self.comparison.measure(point, ceilings, rounds, seconds)
        finally:
            self.comparison.remove(point)

    def clocks(self) -> dict[str, int]:
        """The GPU's clocks under load; empty for another device."""
        if self._device.type != "cuda":
            return {}
        x = torch.randn(_SETTLING_SIZE, _SETTLING_SIZE, device=self._device, dtype=torch.bfloat16)
        settled_us(functools.partial(torch.mm, x, x), self._device)
        return clocks(self.selection.platform).get("clocks", {})


def drifted(before: dict[str, int], after: dict[str, int]) -> str:
    """How far the device's clock moved between the start and the end of a session; empty if it is near enough."""
    start, end = before.get("sm_mhz"), after.get("sm_mhz")
    if not start or not end or abs(end - start) <= LARGEST_DRIFT * start:
        return ""
    return f"the clock of the device went from {start} to {end} MHz, more than {LARGEST_DRIFT:.0%}"
