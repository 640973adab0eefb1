"""`low_latency_symmetric`: routes travel over torch's symmetric memory, with counts on the device and no padding.

`torch.ops.symm_mem.all_to_all_vdev_2d` moves the rows, by NVSHMEM, from kernels that read how many there are. What
arrives lies by bins, at most 16 a rank, and then by the rank that sent it; more experts share bins, and a row says its
expert.

On two H200s, with torch 2.11, it ran and gave WRONG numbers (errors of 0.23 and 0.38), so it stays opt-in. What is
known, from torch's source (nvshmem_extension.cu, from 2.9 on; pytorch/pytorch#192300 is about both):

- Block 0 of `allToAllV_2d` writes where rows arrived over where they come from, in one line of `out_splits_offsets`,
  and nothing keeps the other blocks from reading that line later: they then copy other rows of the right rank. The
  imitation in tests/groups does the same if told to, and then this way is as wrong as on the GPUs. All that the caller
  could do about it is to keep block 0 busy for longer than it takes the others to start, which is no cure.
- The kernel also writes 128 bytes past an array in shared memory; what lies there depends on the compiler.

Until torch orders these, rows have to be fetched by a kernel of moereg's own, or not over this operator.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import threading
from typing import Any, Final

import torch

from moereg.errors import ArgumentError, GroupError, described
from moereg.expert_placement import PlacementTables, token_turns
from moereg.platforms import Platform
from moereg.prepare_finalize.base import Prepared, weighted_sum
from moereg.prepare_finalize.cells import register_prepare_finalize
from moereg.prepare_finalize.facts import MovementFacts
from moereg.prepare_finalize.group import Group, GroupFacts
from moereg.prepare_finalize.moving import GroupPrepareFinalize, Moved
from moereg.prepare_finalize.wire import Wire, as_bytes, join_columns
from moereg.problem import DTYPES, MoEProblem

__all__ = ["LowLatencySymmetric"]

_MOST_RANKS: Final = 32
_MOST_BINS: Final = 16
"""Of torch's exchange: ranks, and parts of what goes to one rank, each of which has a block of threads of its own."""

_ROW_ALIGNMENT: Final = 16
"""Bytes of the widest copy."""

_MODULE: Final = "torch.distributed._symmetric_memory"


def _has_nvshmem(platform: Platform) -> str | None:
    """Whether torch finds NVSHMEM, for `moereg info` and `explain`."""
    if importlib.util.find_spec("torch.distributed") is None or not torch.distributed.is_available():
        return "requires a torch with torch.distributed"
    if importlib.import_module(_MODULE).is_nvshmem_available():
        return None
    return "requires a torch that finds NVSHMEM (nvidia-nvshmem)"


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Symmetric memory of one direction: every rank has the same tensors, in which the others read.

    Attributes:
        sent: [rows sent, columns].
        arrived: [rows received, columns].
        splits: [bins of all ranks] int64, rows for each, in order of ranks.
        found: [2, bins of all ranks] int64, in order of bins and then of ranks: rows from each, and where they begin.
    """

    sent: torch.Tensor
    arrived: torch.Tensor
    splits: torch.Tensor
    found: torch.Tensor

    def run(self, group_name: str) -> None:
        """Moves the rows; waits for all ranks to have come, on the device."""
        torch.ops.symm_mem.all_to_all_vdev_2d(self.sent, self.arrived, self.splits, self.found, group_name, 1)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a call needs: tokens go there and results come home in memory of their own."""

    there: _Exchange
    home: _Exchange


class _Turns:
    """Two memories in turns: a rank may read in the last one still, until another exchange has begun on all ranks."""

    def __init__(self, memories: tuple[_Memory, _Memory]) -> None:
        self._memories, self._next = memories, 0

    def take(self) -> _Memory:
        memory = self._memories[self._next]
        self._next = 1 - self._next
        return memory


_MEMORIES: Final[dict[tuple[Any, ...], _Turns]] = {}
"""One for all layers of a group and of sizes: it is registered with all ranks once, and never freed."""

_LOCK: Final = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Sent(Moved):
    """The result of prepare.

    Attributes:
        topk_weights: [T,K] fp32, of this rank's own tokens.
        places: [T,K] int64, of each route among those sent, in order of ranks and bins; -1 where it goes nowhere.
        bin_of_place: [T * K] int64, the bin of all ranks' that each place is in, one past the last for none.
        memory: In which this call travels.
    """

    topk_weights: torch.Tensor = None  # type: ignore[assignment]  # behind fields with defaults
    places: torch.Tensor = None  # type: ignore[assignment]
    bin_of_place: torch.Tensor = None  # type: ignore[assignment]
    memory: _Memory = None  # type: ignore[assignment]


# A row for each route and nothing else: the fastest at decode on many ranks, by docs/scale.md, once it is right.
@register_prepare_finalize(
    "low_latency_symmetric",
    priority=65,
    formats=("standard",),
    platforms=("cuda:sm90+",),
    requires=("torch>=2.11",),
    probes=(_has_nvshmem,),
    opt_in=True,
    predicted=True,
)
class LowLatencySymmetric(GroupPrepareFinalize):
    """Each route travels as a row with its expert, and comes back as a row; the host counts nothing.

    The experts see room for all routes of all ranks as tokens with one expert and weight 1, of which those that did not
    come have none. Weights are applied at home, in fp32 and in the order of a token's routes.
    """

    facts = MovementFacts(
        transports=frozenset({"cuda:nccl"}),
        dtypes=frozenset(DTYPES),
        graph_capture=True,
        deterministic=True,
        router_weight_on_input=True,
        max_num_tokens=True,
        max_group_size=_MOST_RANKS,
    )

    def __init__(
        self, problem: MoEProblem, experts_problem: MoEProblem, group: Group, tables: PlacementTables, wire: Wire
    ) -> None:
        super().__init__(problem, experts_problem, group, tables, wire)
        assert problem.max_num_tokens is not None
        self._most_routes = problem.max_num_tokens * problem.top_k
        self._most_experts = max(map(len, tables.placement.experts_of_rank))
        self._bins = min(_MOST_BINS, self._most_experts)

    @classmethod
    def experts_problem_of(cls, problem: MoEProblem, group: GroupFacts, activation_format: str) -> MoEProblem:
        seen = super().experts_problem_of(problem, group, activation_format)
        most = seen.max_num_tokens
        return dataclasses.replace(seen, top_k=1, max_num_tokens=None if most is None else most * problem.top_k)

    def _memory(self, width: int) -> _Memory:
        """The memory of the next call; all ranks make it in their first one, since making it is a collective."""
        problem, rows = self.problem, self._most_routes
        key = (self.group.process_group, rows, width, problem.hidden_size, problem.dtype, self._bins)
        with _LOCK:
            if key not in _MEMORIES:
                _refuse_capture(self.group.device)
                _MEMORIES[key] = _Turns((self._made(width), self._made(width)))
            return _MEMORIES[key].take()

    def _made(self, width: int) -> _Memory:
        problem, size = self.problem, self.group.size
        module: Any = importlib.import_module(_MODULE)
        device, num_bins = self.group.device, size * self._bins

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            # Of no mode: calls of every mode write into it.
            with torch.inference_mode(False):
                tensor: torch.Tensor = module.empty(*shape, dtype=dtype, device=device)
                module.rendezvous(tensor, self.group.process_group)
                # Rows that no call wrote are read, if only to be left out.
                return tensor.zero_()

        def exchange(sent: int, arrived: int, columns: int, dtype: torch.dtype) -> _Exchange:
            # A bin that gets nothing takes a row all the same.
            return _Exchange(
                empty(sent, columns, dtype=dtype),
                empty(arrived + num_bins, columns, dtype=dtype),
                empty(num_bins, dtype=torch.int64),
                empty(2, num_bins, dtype=torch.int64),
            )

        try:
            if module.get_backend(device) != "NVSHMEM":
                module.set_backend("NVSHMEM")
            there = exchange(self._most_routes, self._most_routes * size, width, torch.uint8)
            home = exchange(self._most_routes * size, self._most_routes, problem.hidden_size, problem.torch_dtype)
            if device.type == "cuda":
                # Other ranks write into this memory from their first exchange on, which must find it zeroed.
                torch.cuda.current_stream(device).synchronize()
            self.group.gather_objects(None, "that symmetric memory is ready")
        except RuntimeError as error:
            raise GroupError(
                f"low_latency_symmetric needs symmetric memory of NVSHMEM on all ranks, got {described(error)}; set "
                "TORCH_SYMMMEM=NVSHMEM before the first symmetric memory is made, or choose another way"
            ) from error
        return _Memory(there, home)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        (num_tokens, top_k), device = topk_ids.shape, topk_ids.device
        on_input, num_bins = self.problem.apply_router_weight_on_input, self.group.size * self._bins
        ranks = self.tables.ranks_of(topk_ids, token_turns(num_tokens, self.group.rank, device)).long()
        experts = topk_ids.clamp(0, self.problem.num_experts - 1).long()
        local = self.tables.expert_maps[ranks.clamp(min=0), experts].long()
        bins = ranks * self._bins + local * self._bins // self._most_experts
        bin_of_place, order = torch.sort(torch.where(ranks >= 0, bins, num_bins).flatten(), stable=True)
        columns = [part[order // top_k] for part in self.wire.encode(hidden_states)]
        widths = [*self.wire.widths, 4]
        columns.append(as_bytes(topk_ids.flatten()[order].unsqueeze(1)))
        if on_input:
            columns.append(as_bytes(topk_weights.flatten()[order].unsqueeze(1)))
            widths.append(4)
        width = -(-sum(widths) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        memory = self._memory(width)
        there = memory.there
        there.sent[: len(order), : sum(widths)] = join_columns(tuple(columns))
        there.splits.copy_(_count(bin_of_place, num_bins))
        there.run(self.group.process_group.group_name)
        # What came, one row behind the other, without the rows of empty bins.
        most = self._most_routes * self.group.size
        splits, begins = there.found[0], there.found[1]
        ends = splits.cumsum(0)
        row = torch.arange(most, device=device)
        owner = torch.searchsorted(ends, row, right=True).clamp(max=num_bins - 1)
        came = row < ends[-1]
        source = torch.where(came, begins[owner] + row - (ends - splits)[owner], 0)
        parts = [part[source] for part in there.arrived[:, : sum(widths)].split(widths, dim=1)]
        weights = parts.pop().view(torch.float32) if on_input else torch.ones((most, 1), device=device)
        ids = torch.where(came.unsqueeze(1), parts.pop().view(torch.int32), -1)
        laid_out = self.laid_out(self.wire.decode(tuple(parts)), weights, ids, expert_map)
        places = torch.empty_like(order)
        places[order] = torch.where(bin_of_place < num_bins, torch.arange(len(order), device=device), -1)
        return _Sent(
            laid_out.inputs,
            laid_out.num_tokens,
            laid_out.row_of_route,
            laid_out.local,
            topk_weights=topk_weights,
            places=places.view(num_tokens, top_k),
            bin_of_place=bin_of_place,
            memory=memory,
        )

    def finalize(
        self,
        out: torch.Tensor,
        expert_out: torch.Tensor,
        prepared: Prepared,
        problem: MoEProblem,
    ) -> None:
        assert isinstance(prepared, _Sent)
        size, bins = self.group.size, self._bins
        there, home = prepared.memory.there, prepared.memory.home
        results = self.reduced(expert_out, prepared).to(home.sent.dtype)
        # They lie by bins and then by ranks, and leave by ranks and then by bins.
        splits = there.found[0].view(bins, size)
        begins = (there.found[0].cumsum(0) - there.found[0]).view(bins, size)
        home.splits.copy_(splits.t().flatten())
        ends = home.splits.cumsum(0)
        row = torch.arange(len(results), device=results.device)
        owner = torch.searchsorted(ends, row, right=True).clamp(max=size * bins - 1)
        source = begins.t().flatten()[owner] + row - (ends - home.splits)[owner]
        torch.index_select(results, 0, source.clamp(0, len(results) - 1), out=home.sent)
        home.run(self.group.process_group.group_name)
        # Each rank sends back what it got of each bin: they come by bins and then by ranks.
        first = torch.searchsorted(prepared.bin_of_place, torch.arange(size * bins, device=out.device))
        where = home.found[1].view(bins, size).t().flatten() - first
        place = prepared.places
        bin_of_route = prepared.bin_of_place[place.clamp(min=0).flatten()].clamp(max=size * bins - 1)
        back = where[bin_of_route].view_as(place) + place
        has_row = place >= 0
        rows = home.arrived[torch.where(has_row, back, 0)]
        weighted_sum(out, rows, prepared.topk_weights, has_row, self.problem.apply_router_weight_on_input)


def _count(bin_of_place: torch.Tensor, num_bins: int) -> torch.Tensor:
    """[num_bins] int64: places in each bin, of sorted ones."""
    edges = torch.searchsorted(bin_of_place, torch.arange(num_bins + 1, device=bin_of_place.device))
    return edges[1:] - edges[:-1]


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "a first call makes symmetric memory with all ranks, got one that a CUDA graph captures; call the kernel "
            "once before"
        )
