"""One session on one layer in this process: every cell that could run it, numbers first, then time beside the default.

The default is what priority alone would choose. Every time is a ratio to the default's on the same inputs in the same
round, so that what slows the machine slows both.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from moereg.errors import is_lack_of_memory
from moereg.evidence.on_machine import cell_key
from moereg.evidence.provenance import clocks
from moereg.evidence.quarantine import QUARANTINE
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.plugins.loader import load_backends, missing_backend
from moereg.selection.decide import decide, rank
from moereg.selection.request import Request
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.tuning.compare import Comparison, Measurement, Watch
from moereg.tuning.inputs import random_calls
from moereg.tuning.points import Point
from moereg.tuning.roofline import settled_us
from moereg.tuning.timing import ROUNDS, SECONDS
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


@dataclasses.dataclass(frozen=True)
class Entrants:
    """The candidates for one layer.

    Attributes:
        selection: Every candidate, in the order of priority; those that are measured are accepted.
        default: What priority alone would choose, without what a request prefers; None if nothing fits.
    """

    selection: Selection
    default: Decision | None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those that are measured: every accepted kernel, or emulations if there is none; the default first."""
        fitting = [one for one in self.selection.decisions if one.accepted and one is not self.default]
        if self.default is None:
            return ()
        return (self.default, *(one for one in fitting if one.tier == self.default.tier))

    def only(self, keys: Iterable[Key]) -> Entrants:
        """Some of them, the first as the default."""
        by_key = {key_of(one, self.selection.platform): one for one in self.decisions}
        kept = tuple(by_key[key] for key in keys if key in by_key)
        return Entrants(dataclasses.replace(self.selection, decisions=kept, source="priority"), next(iter(kept), None))


def entrants(
    problem: MoEProblem, platform: Platform, require: Any = None, prefer: Any = None, deny: Any = None
) -> Entrants:
    """The candidates for a layer, whatever was measured before. A wish lets cells take part that are opt-in."""
    cells = load_backends().cells
    request = Request.resolve(
        problem.quant.name, require, prefer, deny, environ=os.environ, cells=cells, missing=missing_backend
    )
    asked = decide(problem, platform, request, cells, quarantine=QUARANTINE.read())
    fitting = rank((one for one in asked.decisions if one.accepted), Request())
    # What takes part only because of a wish is not what a layer gets without one.
    ordered = sorted(fitting, key=lambda one: one.cell is not None and one.cell.opt_in)
    rejected = (one for one in asked.decisions if not one.accepted)
    return Entrants(dataclasses.replace(asked, decisions=(*ordered, *rejected)), next(iter(ordered), None))


def key_of(decision: Decision, platform: Platform) -> Key:
    """The key of an accepted candidate."""
    assert decision.cell is not None and decision.scheme is not None
    rule = decision.cell.rule_for(platform)
    assert rule is not None
    return cell_key(decision.cell, decision.scheme, rule)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A candidate that is not measured further.

    Attributes:
        decision: The candidate.
        reason: What went wrong.
        is_broken: Whether it is the backend's fault, so that it is quarantined; not for a lack of memory.
    """

    decision: Decision
    reason: str
    is_broken: bool


class LayerSession:
    """One layer's candidates on the same weights, measured point by point."""

    def __init__(
        self,
        found: Entrants,
        make_weights: Callable[[], ExpertWeights],
        device: torch.device,
        seed: int,
        watch: Watch,
    ) -> None:
        """Makes the weights, and permutes them for every candidate.

        Args:
            found: The candidates.
            make_weights: As of `Comparison`.
            device: The device to measure on.
            seed: Of the inputs.
            watch: As of `Comparison`.
        """
        assert found.default is not None
        self._default: Final = found.default
        self._platform: Final = found.selection.platform
        self._problem: Final = found.selection.problem
        self._device: Final = device
        self._seed: Final = seed
        chosen = dataclasses.replace(found.selection, decisions=found.decisions)
        self._comparison: Final = Comparison(chosen, make_weights, {}, layer_tolerance, watch=watch)

    @property
    def stopped(self) -> str:
        """Why nothing more can be measured in this process; empty while it can."""
        return str(self._comparison.stopped or "")

    def permuted_bytes(self, decision: Decision) -> int:
        """Bytes of a candidate's weights in its own layout."""
        return self._comparison.permuted_bytes(decision)

    def screen(self, counts: Sequence[int]) -> tuple[list[Decision], list[Failure]]:
        """Times each candidate a few times at each number of tokens.

        Returns:
            Candidates that are far behind everywhere, and those that failed. Neither is measured further.
        """
        near: set[Decision] = {self._default}
        seen: dict[Decision, None] = {}
        failures: list[Failure] = []
        for tokens in counts:
            rows, failed = self._measure(Point("uniform", tokens), SCREEN_ROUNDS)
            failures += failed
            best_us = min((row.time_us for row in rows), default=0.0)
            seen |= dict.fromkeys(row.decision for row in rows)
            near |= {row.decision for row in rows if row.time_us <= BEHIND * best_us}
            if self.stopped:
                return [], failures
        lost = {failure.decision for failure in failures}
        behind = [decision for decision in seen if decision not in near and decision not in lost]
        for decision in behind:
            self._comparison.leave_out(decision)
        return behind, failures

    def measure(self, point: Point) -> tuple[list[Measurement], list[Failure]]:
        """Compares the candidates left with the reference, then times the right ones in turns.

        Returns:
            Those that were timed, and those that failed, which are not measured further.
        """
        return self._measure(point, ROUNDS)

    def _measure(self, point: Point, rounds: int) -> tuple[list[Measurement], list[Failure]]:
        calls = random_calls(self._problem, point.tokens, point.routing, self._seed, self._device)[:rounds]
        self._comparison.add(point, calls)
        rows = self._comparison.measure(point, None, rounds, SECONDS)
        self._comparison.remove(point)
        failures = [failure for failure in map(_failure_of, rows) if failure is not None]
        for failure in failures:
            self._comparison.leave_out(failure.decision)
        return [row for row in rows if row.timing is not None], failures

    def clocks(self) -> dict[str, int]:
        """The GPU's clocks under load; empty for another device."""
        if self._device.type != "cuda":
            return {}
        x = torch.randn(_SETTLING_SIZE, _SETTLING_SIZE, device=self._device, dtype=torch.bfloat16)
        settled_us(functools.partial(torch.mm, x, x), self._device)
        return clocks(self._platform).get("clocks", {})


def _failure_of(row: Measurement) -> Failure | None:
    if row.timing is not None or not row.is_culprit:
        return None
    error = row.error
    causes = [one for one in (error, error.__cause__ if error is not None else None) if one is not None]
    reason = row.failure or row.damage
    if not reason:
        reason = f"wrong numbers at {row.num_tokens} tokens: error {row.relative_error:.2e} > {row.tolerance:.1e}"
    return Failure(row.decision, reason, not any(map(is_lack_of_memory, causes)))


def drifted(before: dict[str, int], after: dict[str, int]) -> str:
    """How far the device's clock moved between the start and the end of a session; empty if it is near enough."""
    start, end = before.get("sm_mhz"), after.get("sm_mhz")
    if not start or not end or abs(end - start) <= LARGEST_DRIFT * start:
        return ""
    return f"the clock of the device went from {start} to {end} MHz, more than {LARGEST_DRIFT:.0%}"
