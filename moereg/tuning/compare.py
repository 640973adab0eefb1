"""Compares every candidate that fits a problem, on the same weights and inputs: first numbers, then time."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch

from moereg.layer import MoEKernel, make_kernel
from moereg.reference import reference_experts, relative_error
from moereg.selection import Decision, Selection
from moereg.tuning.inputs import Call, num_calls, random_call
from moereg.tuning.roofline import Ceilings, roofline_us, work_of
from moereg.tuning.timing import ROUNDS, Run, Timing, kernel_runs, time_runs
from moereg.weights import ExpertWeights

__all__ = ["Comparison", "Measurement", "Tolerance", "output_error"]

Tolerance = Callable[[str, str, int], float]
"""The bound of a scheme, for a dtype and a number of elements of the output: `moereg.testing.tolerances.tolerance`."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one candidate did at one number of tokens.

    Attributes:
        decision: The candidate.
        num_tokens: T.
        relative_error: Against the reference; NaN where the output holds one or there is none.
        tolerance: Its bound.
        failure: What it raised; empty where it ran.
        timing: None where the numbers are wrong.
        flops, num_bytes: Of one call, the mean over the calls.
        roofline_us: What the device could reach.
    """

    decision: Decision
    num_tokens: int
    relative_error: float
    tolerance: float
    failure: str
    timing: Timing | None
    flops: float
    num_bytes: float
    roofline_us: float

    @property
    def passed(self) -> bool:
        """Whether it ran and its error is within the tolerance."""
        return not self.failure and self.relative_error <= self.tolerance  # False for NaN.

    @property
    def time_us(self) -> float:
        """Median; NaN where it was not timed, and so are the rates."""
        return self.timing.median_us if self.timing else math.nan

    @property
    def tflops(self) -> float:
        """Rate of its multiplications."""
        return self.flops / self.time_us / 1e6

    @property
    def gbps(self) -> float:
        """Rate at which it moved what has to be moved."""
        return self.num_bytes / self.time_us / 1e3

    @property
    def share(self) -> float:
        """Of the roofline: 1 is as fast as the device can be."""
        return self.roofline_us / self.time_us


class Comparison:
    """The accepted candidates of a selection, all built on the same weights and kept, so that they run in turns.

    A candidate that raises has failed and takes no other down.
    """

    def __init__(
        self,
        selection: Selection,
        weights: ExpertWeights,
        tolerance: Tolerance,
        advance: Callable[[int, int], object] | None = None,
    ) -> None:
        """Permutes the weights for every accepted candidate.

        Args:
            selection: Of the machine at hand.
            weights: Canonical; kept for the reference.
            tolerance: The bounds.
            advance: Told of each candidate as (done, in all).
        """
        self.problem: Final = selection.problem
        self._weights: Final = weights
        self._tolerance: Final = tolerance
        self._candidates: Final = [decision for decision in selection.decisions if decision.accepted]
        self._kernels: Final[dict[Decision, MoEKernel]] = {}
        self._failures: Final[dict[Decision, str]] = {}
        for number, decision in enumerate(self._candidates, start=1):
            chosen = dataclasses.replace(selection, decisions=(decision,), source="required")
            try:
                self._kernels[decision] = make_kernel(self.problem, weights, chosen)
            except Exception as error:
                self._failures[decision] = _failure(error)
            if advance is not None:
                advance(number, len(self._candidates))

    @torch.no_grad()
    def measure(
        self, num_tokens: int, ceilings: Ceilings, routing: str = "uniform", rounds: int = ROUNDS, seed: int = 0
    ) -> list[Measurement]:
        """Compares the candidates with the reference, and times those that are right in turns.

        Args:
            num_tokens: T, at least 1.
            ceilings: Of this device.
            routing: One of `ROUTINGS`.
            rounds: Samples of each.
            seed: Of tokens and routes.

        Returns:
            One measurement a candidate, in the selection's order.
        """
        device = self._weights.w13.device
        generator = torch.Generator(device).manual_seed(seed)
        calls = [random_call(self.problem, num_tokens, routing, generator) for _ in range(num_calls(num_tokens))]
        failures = dict(self._failures)
        errors = self._errors(calls[0], failures)
        bounds = {
            decision: self._tolerance(decision.computes, self.problem.dtype, calls[0].hidden_states.numel())
            for decision in self._candidates
        }
        right = [decision for decision, error in errors.items() if error <= bounds[decision]]
        timings = self._times(right, calls, rounds, failures)
        works = [work_of(self.problem, call) for call in calls]
        best_us = roofline_us(works, ceilings)
        return [
            Measurement(
                decision=decision,
                num_tokens=num_tokens,
                relative_error=errors.get(decision, math.nan),
                tolerance=bounds[decision],
                failure=failures.get(decision, ""),
                timing=timings.get(decision),
                flops=statistics.fmean(work.flops for work in works),
                num_bytes=statistics.fmean(work.num_bytes for work in works),
                roofline_us=best_us,
            )
            for decision in self._candidates
        ]

    def workspace_bytes(self, decision: Decision, num_tokens: int) -> int:
        """Of a candidate's two workspaces for a call.

        Raises:
            KeyError: The candidate could not be built.
        """
        shapes = self._kernels[decision].experts.workspace_shapes(self.problem, num_tokens)
        return sum(math.prod(shape) for shape in shapes) * self.problem.torch_dtype.itemsize

    def _errors(self, call: Call, failures: dict[Decision, str]) -> dict[Decision, float]:
        # One of each scheme that is computed: a cell may compute on the same weights with 16-bit activations.
        references = {
            scheme: reference_experts(self.problem, self._weights, *call, computes=scheme)
            for scheme in dict.fromkeys(decision.computes for decision in self._kernels)
        }
        errors = {}
        for decision, kernel in self._kernels.items():
            try:
                errors[decision] = output_error(kernel, call, references[decision.computes])
            except Exception as error:
                failures[decision] = _failure(error)
        return errors

    def _times(
        self, right: Sequence[Decision], calls: Sequence[Call], rounds: int, failures: dict[Decision, str]
    ) -> dict[Decision, Timing]:
        outs = [torch.empty_like(call.hidden_states) for call in calls]
        runs: dict[Decision, list[Run]] = {}
        for decision in right:
            try:
                runs[decision] = kernel_runs(self._kernels[decision], calls, outs)
            except Exception as error:  # For one, a kernel that cannot be captured although it says so.
                failures[decision] = _failure(error)
        return time_runs(runs, self._weights.w13.device, rounds)


def output_error(kernel: MoEKernel, call: Call, reference: torch.Tensor) -> float:
    """Relative error of a call whose output was filled with NaN before; NaN where some of it is left."""
    if call.hidden_states.is_cuda:
        # What is timed later is a call that is not the first of its size, which may take another way.
        kernel(*call)
    out = torch.full_like(call.hidden_states, math.nan)
    kernel(*call, out=out)
    return relative_error(out, reference)


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
