# mypy: disable-error-code="no-untyped-def"
"""A module `deep_ep` that computes over gloo what DeepEP documents, with the parameters that it publishes.

Read from deepseek-ai/DeepEP, deep_ep/buffer.py: names, order and defaults of parameters, what they hold, and what is
returned. Its streams and events do nothing here.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from moereg.quantize import quantize_activations


class Config:
    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=12,
        allow_nvlink_for_low_latency_mode=True,
    ):  # fmt: skip
        assert isinstance(group, dist.ProcessGroup)
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        assert num_rdma_bytes > 0 if low_latency_mode else num_nvl_bytes > 0
        self._gather("opened")

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert topk_idx.dtype == torch.int64
        assert num_experts % self.size == 0
        share = num_experts // self.size
        owner = torch.where(topk_idx >= 0, topk_idx // share, -1)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.size)], dim=1)
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)]).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, config=None,
        previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        parts = x if isinstance(x, tuple) else (x,)
        if isinstance(x, tuple):
            assert parts[0].dtype == torch.float8_e4m3fn
            assert parts[1].shape == (len(parts[0]), parts[0].shape[1] // 128)
            assert parts[1].dtype == torch.float32
        else:
            assert x.dtype == torch.bfloat16
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert topk_weights.dtype == torch.float32
        share = len(num_tokens_per_expert) // self.size
        found = self._gather((*(part.view(torch.uint8) for part in parts), topk_idx, topk_weights, is_token_in_rank))
        kept = [each[-1][:, self.rank] for each in found]
        received = [
            torch.cat([each[place][mine] for each, mine in zip(found, kept, strict=True)]).view(part.dtype)
            for place, part in enumerate(parts)
        ]
        ids = torch.cat([each[-3][mine] for each, mine in zip(found, kept, strict=True)]) - self.rank * share
        ids = torch.where((ids >= 0) & (ids < share), ids, -1)
        weights = torch.cat([each[-2][mine] for each, mine in zip(found, kept, strict=True)])
        weights = torch.where(ids >= 0, weights, 0.0)
        counts = [int((ids == expert).sum()) for expert in range(share)]
        tokens = tuple(received) if isinstance(x, tuple) else received[0]
        return tokens, ids, weights, counts, (kept, is_token_in_rank), None

    def combine(
        self, x, handle, topk_weights=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert x.dtype == torch.bfloat16
        kept, mine = handle
        counts = [int(each.sum()) for each in kept]
        found = self._gather(x.split(counts))
        out = torch.zeros(len(mine), x.shape[1])
        for rank, parts in enumerate(found):
            out[mine[:, rank]] += parts[self.rank].float()
        return out.bfloat16(), None, None

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=True, async_finish=False,
        return_recv_hook=False,
    ):  # fmt: skip
        assert self.low_latency_mode
        assert self.num_qps_per_rank == num_experts // self.size
        assert x.dtype == torch.bfloat16
        assert topk_idx.dtype == torch.int64
        assert len(x) <= num_max_dispatch_tokens_per_rank
        share, room = num_experts // self.size, num_max_dispatch_tokens_per_rank * self.size
        rows = torch.full((share, room, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        counts, sources = torch.zeros(share, dtype=torch.int32), {}
        for rank, (tokens, ids) in enumerate(self._gather((x, topk_idx))):
            for token, slot in torch.nonzero((ids // share == self.rank) & (ids >= 0)).tolist():
                expert = int(ids[token, slot]) % share
                place = int(counts[expert])
                rows[expert, place] = tokens[token]
                sources[rank, token, slot] = expert, place
                counts[expert] += 1
        handle = sources, num_experts
        if not use_fp8:
            return rows, counts, handle, None, None
        coded = quantize_activations(rows.nan_to_num(), "fp8_block128")
        by_columns = coded.scale.reshape(share, room, -1).transpose(1, 2).contiguous().transpose(1, 2)
        return (coded.q, by_columns), counts, handle, None, None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, zero_copy=False, async_finish=False, return_recv_hook=False, out=None
    ):
        sources, num_experts = handle
        assert x.dtype == torch.bfloat16
        assert x.shape[0] == num_experts // self.size
        total = torch.zeros(len(topk_idx), x.shape[2])
        results = {key: x[place] for key, place in sources.items()}
        for found in self._gather(results):
            for (rank, token, slot), row in found.items():
                if rank == self.rank:
                    total[token] += row.float() * topk_weights[token, slot]
        return total.bfloat16(), None, None


def module() -> types.ModuleType:
    """The module to put into `sys.modules`."""
    found = types.ModuleType("deep_ep")
    found.Buffer, found.Config = Buffer, Config  # type: ignore[attr-defined]
    return found
