"""The result of a comparison for one candidate."""

from __future__ import annotations

import dataclasses
import math

from moereg.selection.result import Decision
from moereg.tuning.timing import Timing

__all__ = ["Measurement"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How one candidate did at one number of tokens.

    Attributes:
        decision: The candidate.
        num_tokens: T.
        relative_error: Against the reference; NaN where the output holds one or there is none. Error of the first call,
            or of the first after timing that exceeds the bound.
        tolerance: Its bound.
        failure: The exception's text; empty if it ran.
        timing: None if the numbers are wrong.
        flops, num_bytes: Mean of the calls.
        roofline_us: Time that the device could reach; NaN if unknown.
        damage: What it wrote to without permission; empty if nothing.
        error: The exception itself.
        first_ms: Time until the output of the first call was there and compared: compiling and tuning included.
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
    damage: str = ""
    error: Exception | None = dataclasses.field(default=None, compare=False, repr=False)
    first_ms: float = math.nan

    @property
    def passed(self) -> bool:
        """Whether it ran, wrote nothing but its output, and its error is within the tolerance."""
        return not self.failure and not self.damage and self.relative_error <= self.tolerance  # False for NaN.

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
        """Rate at which the necessary bytes were moved."""
        return self.num_bytes / self.time_us / 1e3

    @property
    def share(self) -> float:
        """Share of the roofline: 1 is as fast as the device can be."""
        return self.roofline_us / self.time_us
