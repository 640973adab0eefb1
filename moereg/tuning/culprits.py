"""Names the backend that was running when an exception was raised, even outside the backend's own code."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Final

import torch

from moereg.errors import BackendError, described
from moereg.layer.backend_calls import named
from moereg.selection.result import Decision, Selection
from moereg.tuning.timing import wait_for

__all__ = ["Culprits"]

Errors = MutableMapping[Decision, Exception]


class Culprits:
    """Names the candidates that were running when something was raised.

    A GPU reports an invalid access only when someone waits for it; from then on it reports nothing else.

    Attributes:
        stopped: Why nothing more can be measured; None while it can.
    """

    def __init__(self, selection: Selection, device: torch.device, watch: Callable[[Decision, str], object]) -> None:
        """Knows which candidates may be named.

        Args:
            selection: The selection that has the candidates.
            device: Where they run.
            watch: Is told which candidate runs next, and in which of its methods.
        """
        self.stopped: BackendError | None = None
        self._selection: Final = selection
        self._device: Final = device
        self._watch: Final = watch

    @contextlib.contextmanager
    def naming(self, errors: Errors, decision: Decision, step: str) -> Iterator[None]:
        """Keeps an exception from inside under a candidate's name, if none is kept yet.

        Args:
            errors: Where it is kept.
            decision: The candidate that runs inside.
            step: The method of its that runs inside.
        """
        self._watch(decision, step)
        try:
            yield
        except Exception as error:
            found = named(dataclasses.replace(self._selection, decisions=(decision,), source="required"), step, error)
            assert isinstance(found, Exception)
            # Frames hold the weights and workspaces that the candidate ran on.
            for raised in (error, error.__cause__):
                traceback.clear_frames(raised.__traceback__ if raised else None)
            errors.setdefault(decision, found)
            self.stop_if_lost(errors, [decision], step, error)

    def stop_if_lost(self, errors: Errors, decisions: Sequence[Decision], step: str, error: Exception) -> None:
        """Says that one of the backends that ran took the device down, where it answers no more."""
        if decisions and self._is_lost():
            self._stop(errors, decisions, f"took the device down in {step}: {described(error)}")

    def not_restored(self, errors: Errors, decisions: Sequence[Decision], error: Exception) -> None:
        """Names the backends that wrote to weights that could not be restored, after which no other can be judged."""
        self._stop(errors, decisions, f"wrote to the layer's weights, which could not be made anew: {described(error)}")

    def skip(self, errors: Errors, decisions: Sequence[Decision]) -> None:
        """Says of candidates that nothing was measured, and why."""
        assert self.stopped is not None
        for decision in decisions:
            name, origin = self.stopped.backend, self.stopped.origin
            errors.setdefault(decision, BackendError(f"not measured, since {self.stopped}", name, origin))

    def _stop(self, errors: Errors, decisions: Sequence[Decision], deed: str) -> None:
        who = " or ".join(f"backend {decision.backend!r} of {decision.origin}" for decision in decisions)
        first = decisions[0]
        cure = f"do without it (--deny {first.backend})" if len(decisions) == 1 else "run them one by one (--require)"
        found = BackendError(f"{who} {deed}; {cure}", first.backend, first.origin)
        self.stopped = self.stopped or found
        for decision in decisions:
            errors.setdefault(decision, found)

    def _is_lost(self) -> bool:
        try:
            wait_for(self._device)
        except Exception:
            return True
        return False
