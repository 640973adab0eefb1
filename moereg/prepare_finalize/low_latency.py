"""`low_latency`: every rank has fixed slots for each expert at each other rank, so nothing is counted on the host."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from moereg.experts import ExpertInputs
from moereg.prepare_finalize.base import Prepared, sum_routes
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.expert_placement import PlacementTables, token_turns
from moereg.prepare_finalize.group import Group
from moereg.prepare_finalize.moving import OVER_TORCH, GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import Wire, as_bytes, as_stored
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import ALIGNMENT, round_up

CODE = ("prepare_finalize/", "kernels/rows/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed(Moved):
    """The result of prepare; its inputs have the routes of this rank's own tokens.

    Attributes:
        home_row: [T,K] int64 or int32, the row in which each route's result comes back, -1 where it goes nowhere.
        counts: [ranks,E] int32, rows that came from each rank for each expert.
    """

    home_row: torch.Tensor
    counts: torch.Tensor


class _Rooms(NamedTuple):
    """Views of one byte buffer: what travels to or from each rank.

    Attributes:
        counts: [ranks, rooms a rank] int32, filled rows.
        columns: [ranks, rooms a rank * room, width] each, as the wire has them.
        weights: [ranks, rooms a rank * room] fp32, or None.
    """

    counts: torch.Tensor
    columns: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None


# Over NCCL it sends its slots, used or not: num_experts * max_num_tokens rows a rank. So it ranks behind `all_gather`,
# which sends max_num_tokens rows for each rank, unless the experts are few.
@register_prepare_finalize("low_latency", priority=30, formats=("batched",), platforms=("*",), predicted=True)
class LowLatency(GroupPrepareFinalize):
    """Batched format: each rank has slots for `max_num_tokens` tokens at each expert of the group.

    Counts travel ahead of the tokens and stay on the device; one exchange out, one back. Weights are applied on the
    home rank, in fp32 and in the order of a token's routes.
    """

    facts = dataclasses.replace(OVER_TORCH, graph_capture=True, max_num_tokens=True)

    def __init__(
        self, problem: MoEProblem, experts_problem: MoEProblem, group: Group, tables: PlacementTables, wire: Wire
    ) -> None:
        super().__init__(problem, experts_problem, group, tables, wire)
        assert problem.max_num_tokens is not None
        self._room = problem.max_num_tokens
        # All ranks have as many rooms, even those with fewer experts.
        self._most_experts = max(map(len, tables.placement.experts_of_rank))

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        sent = hidden_states.new_empty((self.group.size, self._layout()[1]), dtype=torch.uint8)
        rooms = self._rooms(sent)
        in_triton = self.wire.calls_kernels(hidden_states)
        fill = self._fill_in_triton if in_triton else self._fill
        home_row = fill(rooms, hidden_states, topk_weights, topk_ids)
        arrived = torch.empty_like(sent)
        self.group.all_to_all(arrived, sent, "tokens")
        empty = self._empty_in_triton if in_triton else self._empty
        hidden, num_rows, counts = empty(self._rooms(arrived))
        inputs = ExpertInputs(hidden, topk_weights, topk_ids, num_rows, expert_map)
        return _Placed(inputs, self.group.size * self._room, home_row=home_row, counts=counts)

    def _layout(self) -> tuple[list[tuple[slice, tuple[int, ...], torch.dtype]], int]:
        """Layout of the bytes for each rank: counts of its rooms, then their rows, column by column; and its size."""
        rows, wire = self._most_experts * self._room, self.wire
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [((self._most_experts,), torch.int32)]
        kinds += [((rows, width // kind.itemsize), kind) for width, kind in zip(wire.widths, wire.dtypes, strict=True)]
        if self.problem.apply_router_weight_on_input:
            kinds.append(((rows,), torch.float32))
        pieces, share = [], 0
        for shape, kind in kinds:
            end = share + math.prod(shape) * kind.itemsize
            pieces.append((slice(share, end), shape, kind))
            # Kernels read 16 bytes at once.
            share = round_up(end, ALIGNMENT)
        return pieces, share

    def _rooms(self, buffer: torch.Tensor) -> _Rooms:
        views = [buffer[:, where].view(kind).unflatten(1, shape) for where, shape, kind in self._layout()[0]]
        weights = views.pop() if self.problem.apply_router_weight_on_input else None
        return _Rooms(views[0], tuple(views[1:]), weights)

    def _fill(
        self, rooms: _Rooms, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Writes tokens and counts to the rooms of their routes; [T,K] each route's row in all rooms, or -1."""
        size, (num_tokens, top_k), device = self.group.size, topk_ids.shape, topk_ids.device
        room, num_rooms = self._room, size * self._most_experts
        ranks = self.tables.ranks_of(topk_ids, token_turns(num_tokens, self.group.rank, device)).long()
        experts = topk_ids.clamp(0, self.problem.num_experts - 1).long()
        local = self.tables.expert_maps[ranks.clamp(min=0), experts].long()
        # The room of each route, in order of ranks and their experts; an extra one for routes that go nowhere.
        places = torch.where(ranks >= 0, ranks * self._most_experts + local, num_rooms).flatten()
        filled, order = torch.sort(places, stable=True)
        first = torch.searchsorted(filled, torch.arange(num_rooms + 1, device=device))
        place = torch.arange(len(filled), device=device) - first[filled]
        # A token names an expert once, so a room cannot overflow; one that names it twice may lose a route.
        kept = (filled < num_rooms) & (place < room)
        row = torch.where(kept, filled * room + place, -1)
        rooms.counts.copy_((first[1:] - first[:-1]).clamp(max=room).view(size, -1))
        columns = [part[order // top_k] for part in self.wire.encode(hidden_states)]
        targets = [column.view(torch.uint8) for column in rooms.columns]
        if rooms.weights is not None:
            columns.append(as_bytes(topk_weights.flatten()[order].unsqueeze(1)))
            targets.append(rooms.weights.unsqueeze(2).view(torch.uint8))
        for target, column in zip(targets, columns, strict=True):
            # One extra row takes what goes nowhere.
            rows = column.new_empty((num_rooms * room + 1, column.shape[1]))
            rows[row] = column
            target.copy_(rows[:-1].view(target.shape))
        home_row = torch.empty_like(row)
        home_row[order] = row
        return home_row.view(num_tokens, top_k)

    def _fill_in_triton(
        self, rooms: _Rooms, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        from moereg.kernels.rows.low_latency import place_routes, spread_tokens
        from moereg.kernels.rows.replicas import Holders  # Loads Triton, which may not be there.

        tables = self.tables
        holders = Holders(tables.num_holders, tables.holders, tables.expert_maps, self.group.rank)
        topk_ids = topk_ids.contiguous()
        home_row = torch.empty_like(topk_ids)
        with torch.cuda.device_of(topk_ids):
            place_routes(rooms.counts, home_row, topk_ids, holders, self._room)
            if rooms.weights is None:
                self.wire.spread(rooms.columns, hidden_states, home_row)
            else:
                spread_tokens(rooms.columns[0], hidden_states, home_row, rooms.weights, topk_weights)
        return home_row

    def _empty(self, rooms: _Rooms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [E, ranks * room, H] of the experts, their counts [E], and counts by source rank [ranks,E]."""
        room, device = self._room, rooms.counts.device
        counts = rooms.counts[:, : self.problem.num_local_experts].contiguous()
        end = counts.cumsum(0)  # [ranks,E]
        # Source rank of each row of an expert, [E, ranks * room], and its slot there: they stand in order of ranks.
        row = torch.arange(len(end) * room, device=device)
        source = torch.searchsorted(end.t().contiguous(), row.expand(end.shape[1], -1).contiguous(), right=True)
        source = source.clamp(max=len(end) - 1)
        within = (row - (end - counts).t().gather(1, source)).clamp(0, room - 1)
        expert = torch.arange(len(source), device=device).unsqueeze(1)
        place = (expert * room + within).flatten()
        parts = [column.view(torch.uint8)[source.flatten(), place] for column in rooms.columns]
        hidden = self.wire.decode(tuple(parts)).hidden_states
        if rooms.weights is not None:
            hidden = (hidden * rooms.weights[source.flatten(), place].unsqueeze(1)).to(hidden.dtype)
        return hidden.view(*source.shape, -1), end[-1].to(torch.int32), counts

    def _empty_in_triton(self, rooms: _Rooms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from moereg.kernels.rows.low_latency import FilledRooms, empty_rooms

        size, num_local, tokens = self.group.size, self.problem.num_local_experts, rooms.columns[0]
        hidden = torch.empty(
            (num_local, size * self._room, self.problem.hidden_size),
            dtype=self.problem.torch_dtype,
            device=tokens.device,
        )
        num_rows, counts = rooms.counts.new_empty(num_local), rooms.counts.new_empty((size, num_local))
        scales = as_stored(rooms.columns[1]) if len(rooms.columns) > 1 else None
        filled = FilledRooms(tokens, rooms.counts, scales, self.wire.group, rooms.weights, self._room)
        with torch.cuda.device_of(tokens):
            empty_rooms(hidden, num_rows, counts, filled)
        return hidden, num_rows, counts

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert isinstance(prepared, _Placed)
        rows = self._most_experts * self._room
        results = expert_out.new_empty((self.group.size, rows, expert_out.shape[-1]))
        in_triton = self.wire.calls_kernels(expert_out) and out.stride(1) == 1
        if in_triton:
            from moereg.kernels.rows.low_latency import fill_rooms

            with torch.cuda.device_of(expert_out):
                fill_rooms(results, expert_out.contiguous(), prepared.counts)
        else:
            self._send_back(results, expert_out, prepared.counts)
        home = torch.empty_like(results)
        self.group.all_to_all(home, results, "results")
        weights = None if self.problem.apply_router_weight_on_input else prepared.inputs.topk_weights
        sum_routes(out, home, prepared.home_row, weights, in_triton)

    def _send_back(self, results: torch.Tensor, expert_out: torch.Tensor, counts: torch.Tensor) -> None:
        """Writes the experts' rows to the rooms that their tokens came from."""
        room, (num_local, max_rows) = self._room, expert_out.shape[:2]
        begin = (counts.cumsum(0) - counts).unsqueeze(2)  # [ranks,E,1]
        # Rows without a token read any row.
        lies = (begin + torch.arange(room, device=counts.device)).clamp(max=max_rows - 1)
        lies += torch.arange(num_local, device=counts.device).unsqueeze(1) * max_rows
        results[:, : num_local * room] = expert_out.flatten(0, 1)[lies.flatten(1)]
