"""`all_to_all`: tokens go to the ranks of their experts, once per rank, and results come back per route."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from typing_extensions import Self

from moereg.errors import ArgumentError
from moereg.prepare_finalize.base import Prepared, sum_routes
from moereg.prepare_finalize.batched import calls_kernels
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.exchange import (
    STAMP,
    RowLayout,
    first_rows,
    pack_tokens,
    place_routes,
    rounded_rows,
    row_layout,
    split_rows,
    unpack_tokens,
)
from moereg.prepare_finalize.group import GroupFacts
from moereg.prepare_finalize.moving import OVER_TORCH, GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import Received
from moereg.spec.problem import MoEProblem

CODE = ("prepare_finalize/", "kernels/rows/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Routed(Moved):
    """The result of prepare.

    Attributes:
        topk_weights: [T,K] fp32, of this rank's own tokens.
        home_row: [T,K] int32, the row in which each route's result comes back, -1 where it goes nowhere.
        rows_sent: Results that come back from each rank.
        rows_received: Results that go to each rank.
    """

    topk_weights: torch.Tensor
    home_row: torch.Tensor
    rows_sent: list[int]
    rows_received: list[int]


# The fastest at prefill on many hosts, by docs/scale.md; at decode the host's wait costs too much. Predicted.
@register_prepare_finalize("all_to_all", priority=50, formats=("standard", "batched"), platforms=("*",), predicted=True)
class AllToAll(GroupPrepareFinalize):
    """Exchanges counts, which the host waits for, then tokens with their routes, then one result per route.

    Counts carry the number of the layer that a rank calls, so that ranks that disagree raise before a token leaves.

    Triton kernels write and read the rows that travel in four launches, torch in some 50, with the same bits. The
    experts see every route as a token of its own with one expert and weight 1. Weights are applied on the home rank, in
    fp32 and in the order of a token's routes, so the result does not depend on where experts are.

    Attributes:
        sums: Whether a rank sums its experts' results for a token, so that one row comes back.
    """

    facts = OVER_TORCH
    sums: ClassVar[bool] = False
    _ones: torch.Tensor | None = None

    @classmethod
    def experts_problem_of(cls, problem: MoEProblem, group: GroupFacts, activation_format: str) -> MoEProblem:
        seen = super().experts_problem_of(problem, group, activation_format)
        if cls.sums:
            return seen
        most = seen.max_num_tokens
        routes = None if most is None else most * min(problem.top_k, problem.num_local_experts)
        return dataclasses.replace(seen, top_k=1, max_num_tokens=routes)

    def copied(self) -> Self:
        other = super().copied()
        vars(other).pop("_stamp", None)
        return other

    @functools.cached_property
    def _stamp(self) -> torch.Tensor:
        """[1] int64, added to counts, so that each rank sees which layer the others call."""
        with torch.inference_mode(False):
            return torch.full((1,), self.layer_number * STAMP, device=self.group.device)

    @property
    def in_triton(self) -> bool:
        """Whether Triton kernels write and read the rows that travel: as the wire says, or if the device runs them."""
        return calls_kernels(self.wire.in_triton, self.group.device.type)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "a CUDA graph can only capture what waits for nothing on the host, got all_to_all, which waits for "
                "counts; say graph_capture=True in the problem, so that a dispatcher which can be captured is chosen"
            )
        with torch.cuda.device_of(hidden_states):
            device, top_k = hidden_states.device, topk_ids.shape[1]
            weights_out = topk_weights if self._weights_travel else None
            layout = row_layout(top_k, weights_out is not None, self.wire.widths)
            # Outgoing and incoming counts in one tensor: the host reads both at once.
            counts = torch.empty((2, self.group.size, 2), dtype=torch.int64, device=device)
            leaving, arriving = counts.unbind()
            placed: tuple[torch.Tensor, torch.Tensor]
            if self.in_triton:
                from moereg.kernels.rows.all_to_all import place_routes as place_in_triton  # Loads Triton.

                holders = self.tables.num_holders, self.tables.holders, self.tables.rank
                placed = place_in_triton(topk_ids, *holders, leaving, self._stamp)
            else:
                placed = place_routes(topk_ids, self.tables)
                leaving.copy_(placed.counts)[:, :1] += self._stamp
            self.group.all_to_all(arriving, leaving, "counts of tokens")
            read = _reading(counts)
            # Tokens are packed while the device counts and the host waits for it.
            columns = self.wire.encode(hidden_states)
            if self.in_triton:
                from moereg.kernels.rows.all_to_all import pack_tokens as pack_in_triton

                sent, home_row = pack_in_triton(placed, topk_ids, weights_out, columns, layout.words, self.sums)
            else:
                sent, home_row = pack_tokens(placed, topk_ids, weights_out, columns, layout, self.sums)
            # The only wait for the device.
            out, back = read()
            # Before a token leaves.
            self.group.check_called([pair[0] // STAMP for pair in back])
            tokens_out, routes_out = [pair[0] % STAMP for pair in out], [pair[1] for pair in out]
            tokens_in, routes_in = [pair[0] % STAMP for pair in back], [pair[1] for pair in back]
            # Few distinct sizes, so that recorded launches are found, those of these kernels and of the experts.
            num_rows = sum(tokens_in)
            if self.in_triton:
                num_rows = rounded_rows(num_rows, problem.max_num_tokens if self.sums else None)
            rows = sent.new_empty((num_rows, layout.row_bytes))
            arrived, leaves = first_rows(rows, sum(tokens_in)), first_rows(sent, sum(tokens_out))
            self.group.all_to_all(arrived, leaves, "tokens", tokens_in, tokens_out)
            received, weights, ids = self._received(rows, arriving, sum(routes_in), layout, problem)
            return _Routed(
                **vars(self.laid_out(received, weights, ids, expert_map)),
                topk_weights=topk_weights,
                home_row=home_row,
                rows_sent=tokens_out if self.sums else routes_out,
                rows_received=tokens_in if self.sums else routes_in,
            )

    @property
    def _weights_travel(self) -> bool:
        """Whether experts apply routing weights, instead of the rank that a token came from.

        float16 rows do not come back unweighted: they may exceed its range even if the weighted ones do not.
        """
        return self.sums or self.problem.apply_router_weight_on_input or self.problem.dtype == "float16"

    def _received(
        self, rows: torch.Tensor, arriving: torch.Tensor, num_routes: int, layout: RowLayout, problem: MoEProblem
    ) -> tuple[Received, torch.Tensor, torch.Tensor]:
        """The experts' tokens, their weights and their ids: one for each route, or all of a token where it `sums`."""
        if not self.in_triton:
            parts, ids, weights = (split_rows if self.sums else unpack_tokens)(rows, layout)
        else:
            from moereg.kernels.rows import all_to_all as kernels  # Loads Triton, which may not be there.

            if self.sums:
                parts, ids, weights = kernels.split_rows(rows, arriving, layout.top_k, layout.words)
            else:
                num_rows = rounded_rows(num_routes, problem.max_num_tokens)
                parts, ids, weights = kernels.unpack_tokens(
                    rows, arriving, num_rows, layout.top_k, layout.has_weights, layout.words
                )
        return self.wire.decode(parts), self._ones_of(len(ids)) if weights is None else weights, ids

    def _ones_of(self, count: int) -> torch.Tensor:
        """[count,1] fp32 ones, which nobody writes into."""
        if self._ones is None or len(self._ones) < count:
            with torch.inference_mode(False):
                self._ones = torch.ones((count, 1), device=self.group.device)
        return first_rows(self._ones, count)

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert isinstance(prepared, _Routed)
        # The results of padding rows come last and are dropped.
        results = first_rows(self.reduced(expert_out, prepared), sum(prepared.rows_received))
        row = prepared.home_row
        # One size for all calls with as many tokens, whether or not all routes go somewhere.
        most = row.shape[0] * min(row.shape[1], self.group.size) if self.sums else row.numel()
        home = results.new_empty((most, results.shape[1]))
        back = first_rows(home, sum(prepared.rows_sent))
        self.group.all_to_all(back, results, "results", prepared.rows_sent, prepared.rows_received)
        weights = None if self._weights_travel else prepared.topk_weights
        sum_routes(out, home.unsqueeze(0), row, weights, self.in_triton)


# One row back per rank instead of per route: the fastest at prefill from 8 ranks on, by docs/scale.md. Not measured.
@register_prepare_finalize(
    "all_to_all_sums", priority=55, formats=("standard", "batched"), platforms=("*",), opt_in=True, predicted=True
)
class AllToAllSums(AllToAll):
    """As `all_to_all`, with one row back from each rank that a token went to.

    Tokens travel with their weights, and a rank's experts see them with all routes that go there. They sum these in the
    layer's dtype, and the home rank sums the ranks' results in fp32. So the result depends on where experts are, by the
    rounding of one sum per rank, as with `all_gather`: it has to be requested by name.
    """

    sums: ClassVar[bool] = True


def _reading(counts: torch.Tensor) -> Callable[[], list[list[list[int]]]]:
    """Starts copying numbers to the host; the returned function waits for them."""
    if counts.device.type != "cuda":
        return counts.tolist
    # Torch keeps pinned memory for copies that nothing waits for.
    copied, done = counts.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record(torch.cuda.current_stream(counts.device))

    def read() -> list[list[list[int]]]:
        done.synchronize()
        found: list[list[list[int]]] = copied.tolist()
        return found

    return read
