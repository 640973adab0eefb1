"""Inputs and outputs that belong to one candidate, so that others are not harmed by what it writes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from moereg.tuning.inputs import Call
from moereg.tuning.timing import Run
from moereg.tuning.watched import same_bytes

__all__ = ["OwnCalls"]


@dataclasses.dataclass(frozen=True)
class OwnCalls:
    """One candidate's own inputs and outputs, and its runs on them.

    Attributes:
        pristine: The calls that were copied.
        calls: Copies of them.
        outs: [T,H], one per call.
        runs: What is timed; empty until it is known to be right.
    """

    pristine: Sequence[Call]
    calls: list[Call]
    outs: list[torch.Tensor]
    runs: list[Run] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, calls: Sequence[Call]) -> OwnCalls:
        """Copies of calls, with outputs full of NaN."""
        own = [Call(*(tensor.clone() for tensor in call)) for call in calls]
        return cls(calls, own, [torch.full_like(call.hidden_states, math.nan) for call in calls])

    def written(self) -> tuple[str, ...]:
        """Names of the inputs that differ from their originals, or whose writes torch counted."""
        names: dict[str, None] = {}
        for own, call in zip(self.calls, self.pristine, strict=True):
            for name, tensor, pristine in zip(Call._fields, own, call, strict=True):
                if (not tensor.is_inference() and tensor._version) or not same_bytes(tensor, pristine):
                    names[name] = None
        return tuple(names)
