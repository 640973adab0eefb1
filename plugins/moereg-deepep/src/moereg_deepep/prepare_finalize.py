"""Registers `deepep`: DeepSeek's DeepEP moves the tokens, by its published interface.

It has not run on DeepEP yet, so it is opt-in.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Final

import torch

from moereg.author import (
    DispatcherFacts,
    ExpertInputs,
    Group,
    GroupFacts,
    GroupPrepareFinalize,
    MoEProblem,
    Moved,
    PlacementTables,
    PlainWire,
    Platform,
    Prepared,
    Received,
    Wire,
    as_bytes,
    register_prepare_finalize,
    token_turns,
)

__all__ = ["DeepEP", "DeepEPLowLatency"]

moereg_api = "1"

_GROUP_SIZES: Final = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Those that `Buffer.get_dispatch_config` and `get_combine_config` have a configuration for."""

_GROUP_COLUMNS: Final = 128
"""Columns that share a scale in the fp8 that DeepEP moves."""

_BUFFERS: Final[dict[tuple[Any, ...], Any]] = {}
"""One for all layers of a group and a size: its memory is registered with the network once, and never freed."""

_LOCK: Final = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Dispatched(Moved):
    """The result of prepare.

    Attributes:
        handle: DeepEP's, for the way back.
        physical: [T,K] int64, place among the experts of all ranks of each route, -1 where it goes nowhere.
        topk_weights: [T,K] fp32, of this rank's own tokens.
    """

    handle: Any = None
    physical: torch.Tensor = None  # type: ignore[assignment]  # behind fields with defaults
    topk_weights: torch.Tensor = None  # type: ignore[assignment]


class _OnDeepEP(GroupPrepareFinalize):
    """Shared by both modes. DeepEP counts experts by ranks, as many on each, so routes are renumbered so."""

    def __init__(
        self, problem: MoEProblem, experts_problem: MoEProblem, group: Group, tables: PlacementTables, wire: Wire
    ) -> None:
        scales = 4 * (problem.hidden_size // _GROUP_COLUMNS)
        self._in_fp8 = (
            problem.hidden_size % _GROUP_COLUMNS == 0
            and wire.name == "float8_e4m3fn with float32 scales"
            and wire.widths[1:] == (scales,)
        )
        super().__init__(problem, experts_problem, group, tables, wire if self._in_fp8 else PlainWire(problem))
        self._most_experts = max(map(len, tables.placement.experts_of_rank))
        self._num_physical = self._most_experts * group.size

    def _physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        turns = token_turns(topk_ids.shape[0], self.group.rank, topk_ids.device)
        ranks = self.tables.ranks_of(topk_ids, turns).long()
        experts = topk_ids.clamp(0, self.problem.num_experts - 1).long()
        local = self.tables.expert_maps[ranks.clamp(min=0), experts].long()
        return torch.where(ranks >= 0, ranks * self._most_experts + local, -1)

    def _buffer(self, *size: Any, **settings: Any) -> Any:
        """The group's buffer; made by all ranks in their first call, since making one is a collective."""
        import deep_ep

        key = (self.group.process_group, size, tuple(settings.items()))
        with _LOCK:
            if key not in _BUFFERS:
                _BUFFERS[key] = deep_ep.Buffer(self.group.process_group, *size, **settings)
            return _BUFFERS[key]


# Its kernels saturate NVLink and the network, by https://github.com/deepseek-ai/DeepEP#performance; not measured here.
@register_prepare_finalize(
    "deepep",
    priority=80,
    formats=("standard",),
    platforms=("cuda:sm90+",),
    requires=("deep_ep>=1.1",),
    opt_in=True,
    predicted=True,
)
class DeepEP(_OnDeepEP):
    """The mode for many tokens: each token once to each rank that has experts for it, and a sum a rank back."""

    facts = DispatcherFacts(
        transports=frozenset({"cuda:nccl"}), dtypes=frozenset({"bfloat16"}), router_weight_on_input=True
    )

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, group: GroupFacts, platform: Platform) -> list[str]:
        if group.size in _GROUP_SIZES:
            return []
        return [f"requires a number of ranks in ({', '.join(map(str, _GROUP_SIZES))}), got {group.size}"]

    def _open(self) -> Any:
        import deep_ep

        row_bytes = self.problem.hidden_size * 2
        configs = [
            deep_ep.Buffer.get_dispatch_config(self.group.size),
            deep_ep.Buffer.get_combine_config(self.group.size),
        ]
        nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, self.group.size) for config in configs)
        network = max(config.get_rdma_buffer_size_hint(row_bytes, self.group.size) for config in configs)
        return self._buffer(nvlink, network)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        buffer = self._open()
        physical = self._physical(topk_ids)
        by_rank, by_host, by_expert, is_in_rank, _ = buffer.get_dispatch_layout(physical, self._num_physical)
        sent: Any = hidden_states
        if self._in_fp8:
            codes, scales = self.wire.encode(hidden_states)
            sent = codes.view(torch.float8_e4m3fn), scales.view(torch.float32)
        tokens, ids, weights, _, handle, _ = buffer.dispatch(
            sent,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=by_expert,
            topk_idx=physical,
            topk_weights=topk_weights,
        )
        received = self.wire.decode(tuple(map(as_bytes, tokens))) if self._in_fp8 else Received(tokens)
        # DeepEP numbers this rank's experts from 0; the experts are called with those of the layer.
        own = self.tables.expert_maps[self.group.rank]
        of_layer = torch.argsort(torch.where(own < 0, len(own), own))
        here = torch.where(ids >= 0, of_layer[ids.clamp(min=0)], -1).to(torch.int32)
        laid_out = self.laid_out(received, weights, here, expert_map)
        return _Dispatched(
            laid_out.inputs, laid_out.num_tokens, laid_out.row_of_route, laid_out.local, handle, physical, topk_weights
        )

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert isinstance(prepared, _Dispatched)
        combined, _, _ = self._open().combine(self.reduced(expert_out, prepared), prepared.handle)
        out.copy_(combined)


# The mode for decoding: no wait for the host, and only rows that are there travel. Not measured here.
@register_prepare_finalize(
    "deepep",
    priority=70,
    formats=("batched",),
    platforms=("cuda:sm90+",),
    requires=("deep_ep>=1.1",),
    opt_in=True,
    predicted=True,
)
class DeepEPLowLatency(_OnDeepEP):
    """The mode for few tokens: rows by expert with counts on the device; weights are applied at home."""

    facts = DispatcherFacts(
        transports=frozenset({"cuda:nccl"}),
        dtypes=frozenset({"bfloat16"}),
        graph_capture=True,
        max_num_tokens=True,
        # As its kernels are compiled.
        max_top_k=9,
        hidden_sizes=frozenset({2048, 2560, 4096, 5120, 6144, 7168, 8192}),
    )

    def _open(self) -> Any:
        import deep_ep

        sizes = self._room, self.problem.hidden_size, self.group.size, self._num_physical
        network = deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes)
        return self._buffer(0, network, low_latency_mode=True, num_qps_per_rank=self._most_experts)

    @property
    def _room(self) -> int:
        most = self.problem.max_num_tokens
        assert most is not None
        return most

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        physical, num_local = self._physical(topk_ids), self.problem.num_local_experts
        rows, counts, handle, _, _ = self._open().low_latency_dispatch(
            hidden_states, physical, self._room, self._num_physical, use_fp8=self._in_fp8
        )
        if self._in_fp8:
            # Its scales lie by columns.
            codes, scales = (part[:num_local].flatten(0, 1) for part in rows)
            rows = self.wire.decode((as_bytes(codes), as_bytes(scales))).hidden_states.view(
                num_local, -1, codes.shape[1]
            )
        inputs = ExpertInputs(
            hidden_states=rows[:num_local],
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_num_tokens=counts[:num_local].to(torch.int32),
            expert_map=expert_map,
        )
        return _Dispatched(
            inputs, self._room * self.group.size, handle=handle, physical=physical, topk_weights=topk_weights
        )

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert isinstance(prepared, _Dispatched)
        missing = self._most_experts - expert_out.shape[0]
        if missing:
            expert_out = torch.nn.functional.pad(expert_out, (0, 0, 0, 0, 0, missing))
        combined, _, _ = self._open().low_latency_combine(
            expert_out, prepared.physical, prepared.topk_weights, prepared.handle
        )
        out.copy_(combined)
