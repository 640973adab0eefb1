"""`all_to_all`: tokens go where their experts are, once a rank, and come back route by route."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moereg.errors import ArgumentError
from moereg.expert_placement import token_turns
from moereg.prepare_finalize.base import Prepared, weighted_sum
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.facts import MovementFacts
from moereg.prepare_finalize.group import GroupFacts
from moereg.prepare_finalize.moving import GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import as_bytes, join_columns, split_columns
from moereg.problem import DTYPES, MoEProblem

__all__ = ["AllToAll"]


@dataclasses.dataclass(frozen=True)
class _Routed(Moved):
    """The result of prepare.

    Attributes:
        topk_weights: [T,K] fp32, of this rank's own tokens.
        home_row: [T,K] int64, where the result of each route comes back to, -1 where it goes nowhere.
        rows_sent: Results that come back from each rank.
        rows_received: Results that go to each rank.
    """

    topk_weights: torch.Tensor = None  # type: ignore[assignment]  # behind fields with defaults
    home_row: torch.Tensor = None  # type: ignore[assignment]
    rows_sent: tuple[int, ...] = ()
    rows_received: tuple[int, ...] = ()


# The fastest at prefill from 8 ranks on, by docs/scale.md. Predicted, not measured.
@register_prepare_finalize("all_to_all", priority=50, formats=("standard", "batched"), platforms=("*",), predicted=True)
class AllToAll(GroupPrepareFinalize):
    """Exchanges counts, which the host waits for, then tokens with their routes, then a result for each route.

    The experts see every route as a token of its own with one expert and weight 1. Weights are applied at home, in
    fp32 and in the order of a token's routes, so the result does not depend on where experts are.
    """

    facts = MovementFacts(
        transports=frozenset({"cuda:nccl", "cpu:gloo"}),
        dtypes=frozenset(DTYPES),
        deterministic=True,
        router_weight_on_input=True,
    )

    @classmethod
    def experts_problem_of(cls, problem: MoEProblem, group: GroupFacts, activation_format: str) -> MoEProblem:
        seen = super().experts_problem_of(problem, group, activation_format)
        most = seen.max_num_tokens
        routes = None if most is None else most * min(problem.top_k, problem.num_local_experts)
        return dataclasses.replace(seen, top_k=1, max_num_tokens=routes)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        _refuse_capture(hidden_states.device)
        size, (num_tokens, top_k) = self.group.size, topk_ids.shape
        turns = token_turns(num_tokens, self.group.rank, topk_ids.device)
        ranks = self.tables.ranks_of(topk_ids, turns).long()
        ranks = torch.where(ranks < 0, size, ranks)
        # A token is sent to a rank once, whatever the number of its experts there.
        is_sent = torch.zeros((num_tokens, size + 1), dtype=torch.bool, device=topk_ids.device)
        is_sent.scatter_(1, ranks, True)
        is_sent = is_sent[:, :size].t()  # [ranks,T]
        counts = torch.stack([is_sent.sum(1), _count(ranks.flatten(), size)], dim=1)  # [ranks,2]
        arriving = torch.empty_like(counts)
        self.group.all_to_all(arriving, counts, "counts of tokens")
        # The only wait for the device.
        both = torch.cat([counts, arriving], dim=1).tolist()
        tokens_out, routes_out, tokens_in, routes_in = (list(column) for column in zip(*both, strict=True))
        # Pairs of a rank and a token, by rank and then by token.
        pair = torch.argsort(~is_sent.flatten(), stable=True)[: sum(tokens_out)]
        token = pair % max(num_tokens, 1)
        ids = torch.where(ranks[token] == (pair // max(num_tokens, 1)).unsqueeze(1), topk_ids[token], -1)
        columns = [part[token] for part in self.wire.encode(hidden_states)]
        widths = [*self.wire.widths, 4 * top_k]
        on_input = self.problem.apply_router_weight_on_input
        if on_input:
            columns.append(as_bytes(topk_weights[token]))
            widths.insert(-1, 4 * top_k)
        sent = join_columns((*columns, as_bytes(ids)))
        rows = sent.new_empty((sum(tokens_in), sum(widths)))
        self.group.all_to_all(rows, sent, "tokens", tokens_in, tokens_out)
        *parts, id_bytes = split_columns(rows, tuple(widths))
        here = id_bytes.view(torch.int32)  # [n,K]
        # Each route of a token that arrived becomes a token with one route, in the order in which they were counted.
        route = torch.argsort((here < 0).flatten(), stable=True)[: sum(routes_in)]
        if on_input:
            weights = parts.pop().view(torch.float32).flatten()[route]
        else:
            weights = torch.ones(len(route), dtype=torch.float32, device=rows.device)
        of_route = route // top_k
        received = self.wire.decode(tuple(part[of_route] for part in parts))
        laid_out = self.laid_out(received, weights.unsqueeze(1), here.flatten()[route].unsqueeze(1), expert_map)
        order = torch.argsort(ranks.flatten(), stable=True)
        home_row = torch.empty_like(order)
        home_row[order] = torch.arange(len(order), device=order.device)
        return _Routed(
            laid_out.inputs,
            laid_out.num_tokens,
            laid_out.row_of_route,
            laid_out.local,
            topk_weights=topk_weights,
            home_row=torch.where(ranks < size, home_row.view_as(ranks), -1),
            rows_sent=tuple(routes_out),
            rows_received=tuple(routes_in),
        )

    def finalize(
        self,
        out: torch.Tensor,
        expert_out: torch.Tensor,
        prepared: Prepared,
        problem: MoEProblem,
    ) -> None:
        assert isinstance(prepared, _Routed)
        results = self.reduced(expert_out, prepared)
        home = results.new_empty((sum(prepared.rows_sent), results.shape[1]))
        self.group.all_to_all(home, results, "results", list(prepared.rows_sent), list(prepared.rows_received))
        row = prepared.home_row
        if len(home) == 0:
            out.zero_()
            return
        on_input = self.problem.apply_router_weight_on_input
        weighted_sum(out, home[row.clamp(min=0)], prepared.topk_weights, row >= 0, on_input)


def _count(ranks: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: how often each rank occurs; `size` stands for none."""
    counts = torch.zeros(size + 1, dtype=torch.int64, device=ranks.device)
    return counts.scatter_add_(0, ranks, torch.ones_like(ranks))[:size]


def _refuse_capture(device: torch.device) -> None:
    capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    if device.type == "cuda" and capturing():
        raise ArgumentError(
            "a CUDA graph can only capture what waits for nothing on the host, got all_to_all, which waits for counts; "
            "say graph_capture=True in the problem, so that a way which can be captured is chosen"
        )
