"""A selection's plan as experts: a call's number of tokens says which of them serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from moereg.experts import Experts
from moereg.layer import backend_calls
from moereg.prepare_finalize import Prepared
from moereg.runtime.workspace import WORKSPACES
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import PermutedWeights


@dataclasses.dataclass(frozen=True, eq=False)
class RangeExperts:
    """The experts of one range of a plan.

    Attributes:
        most: Most tokens of a call; None for the open range.
        selection: The layer's selection as if this range's candidate had won for every call; errors name that one.
    """

    most: int | None
    selection: Selection
    experts: Experts


class RangedExperts:
    """Runs the experts of a plan, with scratch memory that all layers share, and counts their calls.

    Attributes:
        ranges: Ascending, the open one last.
        serving: Those that serve calls: only the last one if `knows_counts` is False.
        rows_dtype: What any of them returns fits: ranks may run experts of different ranges, and their results meet.
        num_calls: Calls by the bits of their number of tokens less one.
    """

    def __init__(
        self, ranges: tuple[RangeExperts, ...], problem: MoEProblem, device: torch.device, knows_counts: bool = True
    ) -> None:
        """`knows_counts`: whether the rows that arrive say how many tokens a call has."""
        self.ranges = ranges
        self.rows_dtype = max((each.experts.rows_dtype for each in ranges), key=lambda dtype: dtype.itemsize)
        self.num_calls = [0] * 64
        self.serving = ranges if knows_counts else ranges[-1:]
        self._problem = problem
        self._device = device
        self._sizes: dict[int, _CallSizes] = {}

    def range_of(self, num_tokens: int) -> RangeExperts:
        """The range that serves calls of so many tokens, or over a group of so many that arrived."""
        return next(each for each in self.serving if each.most is None or num_tokens <= each.most)

    def count(self, num_tokens: int) -> None:
        """Counts a call with at least one token."""
        self.num_calls[(num_tokens - 1).bit_length()] += 1

    def run(self, prepared: Prepared, weights: PermutedWeights, out: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the experts and returns their rows in their output form; without rows it runs nothing.

        Args:
            prepared, weights: What they read.
            out: [T,H] for reduced output, new if None; other forms use scratch memory.
        """
        num_tokens = prepared.num_tokens
        if num_tokens == 0:
            return torch.empty((0, self._problem.hidden_size), dtype=self.rows_dtype, device=self._device)
        self.count(num_tokens)
        sizes = self._sizes.get(num_tokens) or self._find_sizes(num_tokens)
        experts, is_sent = sizes.range.experts, out is None
        workspace13, workspace2, *rows = self.scratch(sizes.range, sizes.scratch)
        if rows:
            out = rows[0].view(experts.rows_dtype)
        elif out is None:
            out = torch.empty((num_tokens, self._problem.hidden_size), dtype=experts.rows_dtype, device=self._device)
        names = {"workspace13": workspace13, "workspace2": workspace2}
        try:
            experts.apply(out=out, inputs=prepared.inputs, weights=weights, **names)
        except BaseException as error:
            backend_calls.raise_named(sizes.range.selection, "apply", error)
        return out.to(self.rows_dtype) if is_sent else out

    def scratch(self, served: RangeExperts, shapes: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
        """Tensors of these shapes in the problem's dtype, for one call. A lack of memory names the backend."""
        try:
            return WORKSPACES.take(shapes, self._problem.torch_dtype, self._device)
        except Exception as error:
            named = backend_calls.lacking_workspaces(served.selection, shapes, error)
            if named is error:
                raise
            raise named from error

    def _find_sizes(self, num_tokens: int) -> _CallSizes:
        """Finds and remembers what serves calls with a number of tokens."""
        sizes = self._sizes_of(self.range_of(num_tokens), num_tokens)
        if not _may_be_captured(self._device):
            # Engines measure a model's memory by one call with the most tokens, and fewer may need more.
            for each in self.serving:
                if each.most is not None and each.most < num_tokens:
                    self.scratch(each, self._sizes_of(each, each.most).scratch)
        self._sizes[num_tokens] = sizes
        return sizes

    def _sizes_of(self, served: RangeExperts, num_tokens: int) -> _CallSizes:
        problem, experts = self._problem, served.experts
        shapes = backend_calls.workspace_shapes(served.selection, experts, num_tokens)
        if experts.output_form == "reduced":
            return _CallSizes(served, shapes)
        is_batched = experts.output_form == "per_expert"
        rows = (problem.num_local_experts, num_tokens) if is_batched else (num_tokens, problem.top_k)
        # All scratch has the problem's dtype.
        width = problem.hidden_size * experts.rows_dtype.itemsize // problem.torch_dtype.itemsize
        return _CallSizes(served, (*shapes, (*rows, width)))


class Reads(NamedTuple):
    """Operands of a call besides its inputs; adapters only in calls that train."""

    weights: PermutedWeights
    expert_map: torch.Tensor | None
    adapters: ExpertAdapters | None = None


class _CallSizes(NamedTuple):
    """The range that serves a number of tokens, and what a call needs.

    Attributes:
        scratch: Shapes of both workspaces and, unless the output is finished rows, of room for it.
    """

    range: RangeExperts
    scratch: tuple[tuple[int, ...], ...]


def _may_be_captured(device: torch.device) -> bool:
    """Whether a graph is or may be being captured; only `torch.cuda` can tell."""
    return device.type not in ("cpu", "meta") and (device.type != "cuda" or torch.cuda.is_current_stream_capturing())


def only_candidate(selection: Selection, decision: Decision | None) -> Selection:
    """The selection as if this candidate of its plan had won for every call."""
    if not selection.ranges or decision is None:
        return selection
    others = (one for one in selection.decisions if one is not decision)
    return dataclasses.replace(selection, decisions=(decision, *others), ranges=())


def make_ranges(selection: Selection) -> tuple[RangeExperts, ...]:
    """Makes the experts of a plan, one instance for each candidate, whichever ranges it has."""
    made: dict[int, tuple[Selection, Experts]] = {}
    for _, decision in selection.plan:
        if id(decision) not in made:
            own = only_candidate(selection, decision)
            made[id(decision)] = own, backend_calls.make_experts(own, decision)
    return tuple(RangeExperts(most, *made[id(decision)]) for most, decision in selection.plan)


def counts_by_range(ranges: Sequence[int | None], counts: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Splits ascending numbers of tokens by the ranges that serve them; `ranges` has the most tokens of each.

    Yields:
        (place of the range, its numbers), for ranges that have any.
    """
    start = 0
    for place, most in enumerate(ranges):
        inside = tuple(count for count in counts[start:] if most is None or count <= most)
        start += len(inside)
        if inside:
            yield place, inside
