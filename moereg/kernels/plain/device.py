"""MoE experts for any device in plain torch: grouped, dense or batched matmuls on canonical weights.

Nothing here reads a device tensor on the host, so all of it can be captured in a graph.

T tokens, H hidden size, I intermediate size, E local experts, K top-k.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from moereg.kernels.plain.cpu import mixes_rows
from moereg.kernels.plain.mlp import ActivationFn

# Bounds the temporaries of a call; weights are read again for each chunk of tokens.
DEVICE_CHUNK_BYTES: Final = 256 << 20


def local_expert_ids(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of every route, [T,K] int64; -1 where the id is out of range or not mapped. No synchronization."""
    num_experts = num_local_experts if expert_map is None else expert_map.shape[0]
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    local = torch.where(known, topk_ids, 0).long()
    if expert_map is not None:
        local = expert_map.index_select(0, local.reshape(-1)).view_as(local).long()
    return torch.where(known & (local >= 0) & (local < num_local_experts), local, -1)


def grouped_experts(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: ActivationFn,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Runs the experts with torch's grouped matmul on routes sorted on the device; no synchronization.

    Args:
        out: [T,H]; overwritten; aliases no input.
        hidden_states: [T,H]; row size a multiple of 16 bytes, as the grouped matmul requires.
        topk_weights: [T,K] fp32; routing weights.
        topk_ids: [T,K] int32; global experts; out of range or unmapped ones add nothing.
        w13: [E,2I,H] or [E,I,H]; canonical, row size a multiple of 16 bytes.
        w2: [E,H,I]; likewise.
        activation: Function between the matmuls; called in fp32.
        w13_bias: [E,2I] or [E,I], or None.
        w2_bias: [E,H] or None.
        expert_map: [num_experts] int32 or None; local expert or -1.
        apply_router_weight_on_input: Scale an expert's input instead of its output; requires K = 1.
    """
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    num_experts, w13_rows = w13.shape[:2]
    chunk = device_chunk_tokens(num_tokens, top_k, hidden_size, w13_rows)
    for first in range(0, num_tokens, chunk):
        tokens = slice(first, first + chunk)
        x, weights = hidden_states[tokens], topk_weights[tokens]
        local = local_expert_ids(topk_ids[tokens], num_experts, expert_map).reshape(-1)
        # Routes without an expert sort last, past the last offset, where the grouped matmul neither reads nor writes.
        keys, order = torch.sort(torch.where(local < 0, num_experts, local), stable=True)
        offsets = torch.searchsorted(keys, torch.arange(num_experts, device=keys.device), right=True, out_int32=True)
        row_expert = keys.clamp(max=num_experts - 1)
        x = x.index_select(0, order // top_k)
        scales = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        if apply_router_weight_on_input:
            x = (x * scales).to(hidden_states.dtype)
        gemm1 = F.grouped_mm(x, w13.transpose(1, 2), offs=offsets).float()
        if w13_bias is not None:
            gemm1 += w13_bias.index_select(0, row_expert)
        result = F.grouped_mm(activation(gemm1).to(x.dtype), w2.transpose(1, 2), offs=offsets).float()
        if w2_bias is not None:
            result += w2_bias.index_select(0, row_expert)
        if not apply_router_weight_on_input:
            result *= scales
        # Rows past the last offset were never written: masked out, since 0 * NaN is NaN.
        result = torch.where((keys < num_experts).unsqueeze(1), result, 0.0)
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out[tokens].copy_(result.index_select(0, position).view(-1, top_k, hidden_size).sum(1))


def dense_experts(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: ActivationFn,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Runs every expert on every token and keeps the routed rows: E/K times the work, exact, any device and dtype.

    It does not synchronize and uses only matmuls and element-wise operations. Arguments as for `grouped_experts`,
    without the alignment. Besides the temporaries of a chunk of tokens it holds [T,H] fp32. Each call converts float16
    weights to fp32, one expert at a time: it reads them, writes twice their bytes and reads these for each chunk.
    """
    num_tokens, hidden_size = hidden_states.shape
    num_experts, w13_rows = w13.shape[:2]
    wide = _matmul_dtype(hidden_states.dtype)
    chunk = device_chunk_tokens(num_tokens, 1, hidden_size, w13_rows)
    local = local_expert_ids(topk_ids, num_experts, expert_map)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=out.device)
    for expert in range(num_experts):
        # Outside the loop over chunks, since converting may cost as much as multiplying a few tokens.
        w13_wide, w2_wide = w13[expert].to(wide), w2[expert].to(wide)
        for first in range(0, num_tokens, chunk):
            tokens = slice(first, first + chunk)
            routed = local[tokens] == expert
            scale = torch.where(routed, topk_weights[tokens], 0.0).sum(1, keepdim=True)
            x = hidden_states[tokens]
            if apply_router_weight_on_input:
                x = x * scale
            gemm1 = F.linear(x.to(wide), w13_wide).float()
            if w13_bias is not None:
                gemm1 += w13_bias[expert]
            result = F.linear(activation(gemm1).to(wide), w2_wide).float()
            if w2_bias is not None:
                result += w2_bias[expert]
            if not apply_router_weight_on_input:
                result *= scale
            total[tokens] += torch.where(routed.any(1, keepdim=True), result, 0.0)
    out.copy_(total)


def batched_experts(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: ActivationFn,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> None:
    """Runs the experts in the batched format with two batched matmuls over all rows; no synchronization.

    Each call converts float16 weights to fp32, as in `dense_experts`, and then multiplies one expert at a time. Other
    arguments as for `grouped_experts`, without the alignment.

    Args:
        out: [E,max_T,H]; overwritten; rows past an expert's count become 0.
        hidden_states: [E,max_T,H]; rows past an expert's count may hold anything.
        expert_num_tokens: [E] int32; valid rows of each expert.
    """
    num_experts, max_tokens, hidden_size = hidden_states.shape
    wide = _matmul_dtype(hidden_states.dtype)
    if wide != hidden_states.dtype and num_experts > 1:
        # One expert at a time, so that only its weights are converted at once.
        for expert in range(num_experts):
            own = slice(expert, expert + 1)
            biases = [None if bias is None else bias[own] for bias in (w13_bias, w2_bias)]
            batched_experts(
                out[own], hidden_states[own], expert_num_tokens[own], w13[own], w2[own], activation, *biases
            )
        return
    w13, w2 = w13.to(wide), w2.to(wide)
    chunk = device_chunk_tokens(max_tokens, num_experts, hidden_size, w13.shape[1])
    for first in range(0, max_tokens, chunk):
        x = hidden_states[:, first : first + chunk].to(wide)
        row = torch.arange(first, first + x.shape[1], device=out.device)
        valid = (row < expert_num_tokens.unsqueeze(1)).unsqueeze(2)
        if x.device.type == "cpu" and mixes_rows(x.dtype, hidden_size, w2.shape[2]):
            x = x.where(valid, 0.0)
        gemm1 = torch.bmm(x, w13.transpose(1, 2)).float()
        if w13_bias is not None:
            gemm1 += w13_bias.unsqueeze(1)
        result = torch.bmm(activation(gemm1).to(wide), w2.transpose(1, 2))
        if w2_bias is not None:
            result = result.float() + w2_bias.unsqueeze(1)
        out[:, first : first + chunk].copy_(torch.where(valid, result, 0.0))


def _matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of matmuls: fp32 for float16 on any device, since a gate may leave float16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def device_chunk_tokens(num_tokens: int, rows_per_token: int, hidden_size: int, w13_rows: int) -> int:
    """Tokens that the device functions take at a time, so that their temporaries stay near `DEVICE_CHUNK_BYTES`.

    Args:
        num_tokens: T, or max_T in the batched format.
        rows_per_token: K where sorted, 1 where dense, E where batched.
        w13_rows: 2I, or I where not gated.
    """
    # fp32 copies of the first matmul's output (itself, its activation, one spare) and of the second's dominate.
    row_bytes = 4 * (3 * w13_rows + 3 * hidden_size)
    return max(1, min(num_tokens, DEVICE_CHUNK_BYTES // (rows_per_token * row_bytes)))
