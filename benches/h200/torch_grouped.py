"""A layer by torch's grouped matmuls alone: a peer of the H200 table that any machine with torch can run again.

Its time beside the table's says how this GPU, at this hour, compares with the one that the peers were measured on:
power limits all long rows, and GPUs of one kind differ by several per cent under that limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moereg.tuning.inputs import Call
from moereg.weights import ExpertWeights

_grouped_mm: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


def torch_grouped(weights: ExpertWeights, call: Call) -> torch.Tensor:
    """Sorts routes by expert, gathers, multiplies, SwiGLU, multiplies, and sums by token; no host synchronization.

    Args:
        weights: Unquantized, silu, no bias.
        call: Inputs, with ids that are all in [0, E).

    Returns:
        [T,H] in the dtype of the hidden states.
    """
    hidden_states, topk_weights, topk_ids = call
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.flatten().long()
    order = ids.argsort()
    counts = torch.zeros(len(weights.w13), dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = _grouped_mm(hidden_states[order // top_k], weights.w13.transpose(1, 2), offs=ends).chunk(2, dim=1)
    rows = _grouped_mm(F.silu(gate) * up, weights.w2.transpose(1, 2), offs=ends)
    rows = rows * topk_weights.flatten()[order, None].to(rows.dtype)
    by_route = torch.empty_like(rows)
    by_route[order] = rows
    return by_route.view(num_tokens, top_k, -1).sum(1)
