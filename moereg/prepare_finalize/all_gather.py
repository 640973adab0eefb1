"""`all_gather`: every rank sees all tokens and runs its own experts; sums return by a reduce-scatter."""

from __future__ import annotations

import dataclasses

import torch

from moereg.prepare_finalize.base import Prepared
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.expert_placement import token_turns
from moereg.prepare_finalize.moving import OVER_TORCH, GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import as_bytes
from moereg.spec.problem import MoEProblem

CODE = ("prepare_finalize/", "kernels/rows/")


# The fastest on up to 16 ranks, or within a fifth of it, by docs/scale.md: with few ranks a token goes to most of them
# anyway, and a graph can capture the call. Predicted, except for two ranks.
@register_prepare_finalize(
    "all_gather", priority=60, formats=("standard", "batched"), platforms=("*",), predicted=True, max_group_size=16
)
@register_prepare_finalize("all_gather", priority=40, formats=("standard", "batched"), platforms=("*",), predicted=True)
class AllGather(GroupPrepareFinalize):
    """Gathers tokens padded to the problem's `max_num_tokens`; nothing waits for the host.

    A call with that many tokens copies none of them: the experts read what the exchange wrote.

    Each rank's experts sum a token's routes, and the home rank gets the sum over ranks: in the layer's dtype by the
    backend of torch.distributed or, if the problem is `deterministic`, in fp32 in rank order, for the same traffic.
    """

    facts = dataclasses.replace(OVER_TORCH, graph_capture=True, max_num_tokens=True)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        most = self.problem.max_num_tokens
        assert most is not None
        in_triton = self.wire.calls_kernels(hidden_states)
        if hidden_states.shape[0] < most:
            tokens = hidden_states, topk_weights, topk_ids
            hidden_states, topk_weights, topk_ids = _padded(*tokens, most, in_triton)
        # Each column travels by itself, from where it is to where it is read: nothing is joined, split or copied.
        sent = (*self.wire.encode(hidden_states), as_bytes(topk_weights), as_bytes(topk_ids))
        rows = tuple(part.new_empty((most * self.group.size, part.shape[1])) for part in sent)
        self.group.all_gather_columns(rows, sent, "tokens")
        *columns, weight_bytes, id_bytes = rows
        received = self.wire.decode(tuple(columns))
        weights, ids = weight_bytes.view(torch.float32), id_bytes.view(torch.int32)
        if self.problem.placement == "map":
            # One of the ranks that hold an expert takes the route; all of them compute the same choice.
            ids = self._own_routes(ids, most, in_triton)
        return self.laid_out(received, weights, ids, expert_map)

    def _own_routes(self, ids: torch.Tensor, most: int, in_triton: bool) -> torch.Tensor:
        if not in_triton:
            turns = torch.cat([token_turns(most, rank, ids.device) for rank in range(self.group.size)])
            return torch.where(self.tables.ranks_of(ids, turns) == self.group.rank, ids, -1)
        from moereg.kernels.rows.all_gather import keep_own_routes  # Loads Triton, which may not be there.

        with torch.cuda.device_of(ids):
            keep_own_routes(ids, self.tables.num_holders, self.tables.holders, self.group.rank)
        return ids

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        sums = self.reduced(expert_out, prepared)
        most = sums.shape[0] // self.group.size
        if not self.problem.deterministic:
            fits = len(out) == most and out.dtype == sums.dtype
            mine = out if fits else sums.new_empty((most, sums.shape[1]))
            self.group.reduce_scatter(mine, sums, "results")
            if mine is not out:
                out.copy_(mine[: len(out)])
            return
        parts = torch.empty_like(sums)
        self.group.all_to_all(as_bytes(parts), as_bytes(sums), "results")
        if self.wire.calls_kernels(out) and out.stride(1) == 1:
            from moereg.kernels.rows.all_gather import sum_of_ranks

            with torch.cuda.device_of(out):
                sum_of_ranks(out, parts.view(self.group.size, most, -1))
            return
        by_rank = parts.view(self.group.size, most, -1)[:, : len(out)].float()
        total = by_rank[0]
        for part in by_rank[1:]:
            total = total + part
        out.copy_(total)


def _padded(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, most: int, in_triton: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads with zero tokens and ids of -1, whose rows add nothing."""
    if not in_triton:
        behind = (0, 0, 0, most - len(hidden_states))
        pad = torch.nn.functional.pad
        return pad(hidden_states, behind), pad(topk_weights, behind), pad(topk_ids, behind, value=-1)
    from moereg.kernels.rows.all_gather import pad_tokens

    with torch.cuda.device_of(hidden_states):
        return pad_tokens(hidden_states, topk_weights, topk_ids, most)
