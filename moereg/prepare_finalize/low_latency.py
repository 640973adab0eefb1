"""`low_latency`: every rank has fixed room for each expert at each other rank, so nothing is counted on the host."""

from __future__ import annotations

import dataclasses

import torch

from moereg.expert_placement import PlacementTables, token_turns
from moereg.experts import ExpertInputs
from moereg.prepare_finalize.base import Prepared, weighted_sum
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.facts import MovementFacts
from moereg.prepare_finalize.group import Group
from moereg.prepare_finalize.moving import GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import Wire, as_bytes, join_columns, split_columns
from moereg.problem import DTYPES, MoEProblem

__all__ = ["LowLatency"]


@dataclasses.dataclass(frozen=True)
class _Placed(Moved):
    """The result of prepare.

    Attributes:
        topk_weights: [T,K] fp32, of this rank's own tokens.
        home_row: [T,K] int64, where the result of each route comes back to, -1 where it goes nowhere.
        sent_row: [rows of all rooms] int64, the row among the experts' rows of each result that is sent.
    """

    topk_weights: torch.Tensor = None  # type: ignore[assignment]  # behind fields with defaults
    home_row: torch.Tensor = None  # type: ignore[assignment]
    sent_row: torch.Tensor = None  # type: ignore[assignment]


# Over NCCL it ships its room, used or not: num_experts * max_num_tokens rows a rank. So it stands behind `all_gather`,
# which ships max_num_tokens rows for each rank, unless the experts are few.
@register_prepare_finalize("low_latency", priority=30, formats=("batched",), platforms=("*",), predicted=True)
class LowLatency(GroupPrepareFinalize):
    """Batched format: each rank has room for `max_num_tokens` tokens at each expert of the group.

    Counts travel in front of the tokens and stay on the device; one exchange there, one back. Weights are applied at
    home, in fp32 and in the order of a token's routes.
    """

    facts = MovementFacts(
        transports=frozenset({"cuda:nccl", "cpu:gloo"}),
        dtypes=frozenset(DTYPES),
        graph_capture=True,
        deterministic=True,
        router_weight_on_input=True,
        max_num_tokens=True,
    )

    def __init__(
        self, problem: MoEProblem, experts_problem: MoEProblem, group: Group, tables: PlacementTables, wire: Wire
    ) -> None:
        super().__init__(problem, experts_problem, group, tables, wire)
        assert problem.max_num_tokens is not None
        self._room = problem.max_num_tokens
        # Rooms are as many on each rank, whoever holds fewer experts.
        self._most_experts = max(map(len, tables.placement.experts_of_rank))

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        size, (num_tokens, top_k), device = self.group.size, topk_ids.shape, topk_ids.device
        room, num_rooms = self._room, size * self._most_experts
        ranks = self.tables.ranks_of(topk_ids, token_turns(num_tokens, self.group.rank, device)).long()
        experts = topk_ids.clamp(0, self.problem.num_experts - 1).long()
        local = self.tables.expert_maps[ranks.clamp(min=0), experts].long()
        # The room of each route, in order of ranks and their experts; one more for routes that go nowhere.
        rooms = torch.where(ranks >= 0, ranks * self._most_experts + local, num_rooms).flatten()
        filled, order = torch.sort(rooms, stable=True)
        first = torch.searchsorted(filled, torch.arange(num_rooms + 1, device=device))
        place = torch.arange(len(filled), device=device) - first[filled]
        # A token names an expert once, so a room cannot overflow; one that names it twice may lose a route.
        kept = (filled < num_rooms) & (place < room)
        columns = [part[order // top_k] for part in self.wire.encode(hidden_states)]
        widths = list(self.wire.widths)
        if self.problem.apply_router_weight_on_input:
            columns.append(as_bytes(topk_weights.flatten()[order].unsqueeze(1)))
            widths.append(4)
        # To each rank: some rows with the counts of its rooms, then the rooms. One row more takes what goes nowhere.
        width, head_bytes = sum(widths), 4 * self._most_experts
        head = -(-head_bytes // width)
        share = head + self._most_experts * room
        sent = hidden_states.new_empty((size * share + 1, width), dtype=torch.uint8)
        row = filled * room + place + (filled // self._most_experts + 1) * head
        sent[torch.where(kept, row, size * share)] = join_columns(tuple(columns))
        counts = (first[1:] - first[:-1]).clamp(max=room).to(torch.int32)
        sent[:-1].view(size, -1)[:, :head_bytes] = as_bytes(counts.view(size, -1))
        arrived = torch.empty_like(sent[:-1])
        self.group.all_to_all(arrived, sent[:-1], "tokens")
        num_local = self.problem.num_local_experts
        here = split_columns(arrived.view(size, -1)[:, :head_bytes], (head_bytes,))[0].view(torch.int32)
        here = here[:, :num_local].long()  # [ranks,E]
        # Rows of an expert stand together, in order of ranks: which rank's is each, and its place in that rank's room.
        end = here.cumsum(0)  # [ranks,E]
        places = torch.arange(size * room, device=device)
        of_expert = end.t().contiguous()
        source = torch.searchsorted(of_expert, places.expand(num_local, -1).contiguous(), right=True)
        source = source.clamp(max=size - 1)  # [E, ranks * room]
        within = (places - (end - here).t().gather(1, source)).clamp(0, room - 1)
        expert = torch.arange(num_local, device=device).unsqueeze(1)
        rows = arrived[(source * share + head + expert * room + within).flatten()]
        parts = list(split_columns(rows, tuple(widths)))
        weights = parts.pop().view(torch.float32) if self.problem.apply_router_weight_on_input else None
        hidden = self.wire.decode(tuple(parts)).hidden_states
        if weights is not None:
            hidden = (hidden * weights).to(hidden.dtype)
        inputs = ExpertInputs(
            hidden_states=hidden.view(num_local, size * room, -1),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_num_tokens=end[-1].to(torch.int32),
            expert_map=expert_map,
        )
        # The other way round: where each row of a rank's rooms lies. Rows that hold no token read any.
        all_rooms = torch.arange(self._most_experts, device=device).clamp(max=num_local - 1)
        begin = (end - here)[:, all_rooms].unsqueeze(2)  # [ranks, rooms, 1]
        lies = (begin + torch.arange(room, device=device)).clamp(max=size * room - 1)
        home_row = torch.empty_like(row)
        home_row[order] = torch.where(kept, filled * room + place, -1)
        return _Placed(
            inputs,
            size * room,
            topk_weights=topk_weights,
            home_row=home_row.view(num_tokens, top_k),
            sent_row=(lies + (all_rooms * (size * room)).unsqueeze(1)).flatten(),
        )

    def finalize(
        self,
        out: torch.Tensor,
        expert_out: torch.Tensor,
        prepared: Prepared,
        problem: MoEProblem,
    ) -> None:
        assert isinstance(prepared, _Placed)
        results = expert_out.flatten(0, 1)[prepared.sent_row]
        home = torch.empty_like(results)
        self.group.all_to_all(home, results, "results")
        row = prepared.home_row
        on_input = self.problem.apply_router_weight_on_input
        weighted_sum(out, home[row.clamp(min=0)], prepared.topk_weights, row >= 0, on_input)
