"""The weights that a kernel's calls read, what writes other numbers into them, and the lock that keeps both apart."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from moereg.arguments import check_flag, check_instance
from moereg.errors import ArgumentError, LayoutMismatchError
from moereg.layer import backend_calls
from moereg.layer.in_place import is_aligned
from moereg.layer.one_expert import OneExpert
from moereg.layer.ranges import RangeExperts
from moereg.runtime.torch_state import plain_torch
from moereg.spec.problem import MoEProblem
from moereg.weights.expert_weights import check_expert
from moereg.weights.permuted import CANONICAL, ExpertWeights, PermutedWeights
from moereg.weights.versions import CopiedFrom

_POLL_SECONDS: Final = 1e-4


class InTurn:
    """A readers-writer lock for one kernel: threads may call it together, but write its weights alone.

    It only orders the host. A GPU does the work later, stream by stream.
    """

    def __init__(self) -> None:
        self._calls: dict[int, None] = {}
        self._writer: int | None = None
        self._lock = threading.RLock()

    def begin(self, me: int) -> None:
        """Begins a call of a thread, waiting for another one's writer. Even if it is interrupted, `end` must follow."""
        # Register first, then look for a writer; a writer does both in the opposite order.
        self._calls[me] = None
        while self._writer is not None and self._writer != me:
            del self._calls[me]
            with self._lock:
                self._calls[me] = None

    def end(self, me: int) -> None:
        """Ends this thread's call."""
        self._calls.pop(me, None)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits for running calls; while held, other threads neither call nor write."""
        me = threading.get_ident()
        with self._lock:
            outer, self._writer = self._writer, me
            try:
                while any(each != me for each in tuple(self._calls)):
                    time.sleep(_POLL_SECONDS)
                yield
            finally:
                self._writer = outer


class HeldWeights:
    """The weights of one kernel: permuted ones, or its owner's tensors as they are at each call.

    Attributes:
        permuted: Those of its own; without memory while calls read their owner's.
        borrowed: Names of permuted tensors that share the caller's memory, which only the caller writes unless a method
            is told `write_shared=True`.
        copied: Warns if an optimizer trains weights of which this is a copy; None if there are none.
        is_followed: Whether their owner reloads them, so that nothing warns.
        in_turn: Keeps calls and writes apart.
    """

    copied: CopiedFrom | None = None
    is_followed: bool = False

    def __init__(
        self,
        problem: MoEProblem,
        ranges: tuple[RangeExperts, ...],
        permuted: PermutedWeights,
        borrowed: frozenset[str] = frozenset(),
    ) -> None:
        """Checks that every range reads a layout of the open range's experts."""
        last = ranges[-1].experts
        for reader in (each.experts for each in ranges):
            layouts = reader.layouts if reader is last else {*reader.shared_layouts} & {*last.shared_layouts}
            if permuted.layout not in layouts:
                raise LayoutMismatchError(
                    f"{type(reader).__name__} reads layouts {', '.join(reader.layouts)}, got {permuted.layout!r} of "
                    f"{type(last).__name__}; permute the weights with the same class"
                )
        self.borrowed = borrowed
        self.in_turn = InTurn()
        self._problem = problem
        self._ranges = ranges
        self.permuted = permuted
        self._source: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}

    @property
    def is_borrowed(self) -> bool:
        """Whether calls read their owner's tensors."""
        return self._source is not None

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether calls can read these tensors, wherever they are, as those that the kernel was made for."""
        return len(tensors) == len(self._kinds) and all(
            type(one).__name__ != "DTensor"
            and (one.shape, one.dtype, one.device) == self._kinds.get(name)
            and one.is_contiguous()
            and is_aligned(one)
            for name, one in tensors.items()
        )

    @property
    def now(self) -> PermutedWeights:
        """The tensors that calls read."""
        if self._source is None:
            return self.permuted
        return PermutedWeights.in_place(self._source(), self.permuted.reader)

    @property
    def trained(self) -> Mapping[str, torch.Tensor]:
        """The canonical tensors that training calls read in place, by name, detached where they are not trained."""
        if self._source is None or not self._problem.gradients:
            return {}
        held = self._source()
        # A backward pass reads what its forward pass read, and torch notices if it was written in between.
        return held if "weights" in self._problem.gradients else {name: one.detach() for name, one in held.items()}

    @property
    def reads_in_place(self) -> bool:
        """Whether the classes always read canonical weights where their owner keeps them, and nothing else."""
        return self._is_canonical and all(each.experts.reads_in_place() for each in self._ranges)

    @property
    def _is_canonical(self) -> bool:
        is_whole = len(self.borrowed) == len(self.permuted.per_expert) and not self.permuted.shared
        return is_whole and self.permuted.layout == CANONICAL

    def read_from(self, source: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Lets each call read its owner's tensors, and keeps none: nothing can be stale, and nothing is held.

        `source` returns canonical tensors by name, which it has checked, and must not hold them itself.
        """
        if not self._is_canonical:
            fault = "copied weights that are read in place in"
            raise backend_calls.backend_error(self._ranges[-1].selection, "permute_weights", fault, "other memory")
        if not self.is_borrowed:
            held = {name: self.permuted[name] for name in self.permuted.per_expert}
            self._kinds = {name: (one.shape, one.dtype, one.device) for name, one in held.items()}
            empty = {name: torch.empty_like(one, device="meta") for name, one in held.items()}
            self.permuted = PermutedWeights(CANONICAL, empty, reader=self.permuted.reader)
        self._source = source

    def watch(self, name: str, weights: ExpertWeights) -> None:
        """Warns, in the name of a kernel, if an optimizer trains weights that were just copied."""
        copied = [] if self.is_followed else self.now.copied_from(weights)
        if self.copied is not None:
            self.copied.tensors(copied)
        elif copied:
            self.copied = CopiedFrom(name, copied)

    def leave_to_owner(self) -> None:
        """Warns of no optimizer: the owner reloads what it trains."""
        self.copied, self.is_followed = None, True

    def reload(self, weights: ExpertWeights, write_shared: bool) -> None:
        """Implements `MoEKernel.reload`."""
        check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(w13=..., w2=...)")
        check_flag("write_shared", write_shared)
        weights.check_against(self._problem)
        with self.in_turn.exclusive():
            held, open_range = self.now, self._ranges[-1]
            new = backend_calls.permute(open_range.selection, open_range.experts, weights)
            if not write_shared:
                self._check_own(held.elsewhere(self.borrowed, new))
            # Inference mode may write both kinds of tensors; outside it, tensors made inside may not be written.
            with plain_torch(), torch.inference_mode():
                held.copy_from(new)

    def update_expert(self, expert: int, weights: ExpertWeights, write_shared: bool) -> None:
        """Implements `MoEKernel.update_expert`."""
        check_expert(expert, self._problem.num_local_experts)
        check_flag("write_shared", write_shared)
        held, reader = self.now, self.permuted.reader
        if not isinstance(reader, OneExpert):
            raise ArgumentError("update_expert needs a kernel that make_kernel made; reload the whole layer")
        row = reader.rows_for(held, weights)
        self.check_writable(write_shared)
        with self.in_turn.exclusive(), plain_torch(), torch.inference_mode():
            held.write_expert(expert, row)

    def check_writable(self, write_shared: bool) -> None:
        """Checks that all tensors are the kernel's own, unless it may write its owner's."""
        check_flag("write_shared", write_shared)
        self._check_own(frozenset() if write_shared else self.borrowed)

    def _check_own(self, names: frozenset[str]) -> None:
        if names:
            raise ArgumentError(
                f"this kernel reads {', '.join(sorted(names))} where its owner keeps them, got other numbers; write "
                "them into those tensors, say write_shared=True to have the kernel write there, or make it with "
                "own_weights=True"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldWeights:
        if self._source is None:
            # If the caller's tensors are copied along, shared memory stays shared between the copies.
            made = HeldWeights(self._problem, self._ranges, copy.deepcopy(self.permuted, memo), self.borrowed)
            made.is_followed = self.is_followed
            return made
        # Parameters are copied into memory of their own, which calls without gradients read too.
        tensors = copy.deepcopy(dict(self._source()), memo)
        permuted = dataclasses.replace(self.permuted, per_expert={name: one.detach() for name, one in tensors.items()})
        made = HeldWeights(self._problem, self._ranges, permuted, self.borrowed)
        made.read_from(lambda: tensors)
        return made

    def __repr__(self) -> str:
        return "weights in place" if self.is_borrowed else f"{self.permuted.num_bytes / 2**20:.0f} MiB"
