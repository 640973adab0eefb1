"""The kernels' results in plain torch and fp32: plans of tiles, copies, both products and sums; all synchronize."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import SPREAD_HEAVY


def block_map_reference(
    counts: torch.Tensor,
    offsets: torch.Tensor,
    block_m: int,
    slack: int = 0,
    tall: int = 0,
    heavy_first: int = False,
) -> BlockMap:
    """The map in torch, with every tensor cut to the part in use; of each expert's rows and first row, [E] integers."""
    is_low = (counts <= block_m) | (tall == 0)
    heights = torch.where(is_low, block_m, tall)
    blocks = ((counts - slack + heights - 1) // heights).maximum((counts > 0).to(counts.dtype))
    order = is_low.int().argsort(stable=True)
    if heavy_first and heavy_first != SPREAD_HEAVY:
        order = ((counts <= block_m + slack).int() + (counts * 2 <= block_m).int()).argsort(stable=True)
    experts = order.repeat_interleave(blocks[order])
    ends = torch.zeros_like(blocks)
    ends[order] = blocks[order].cumsum(0).to(blocks.dtype)
    step = torch.arange(experts.numel(), device=counts.device) - (ends - blocks)[experts]
    if heavy_first == SPREAD_HEAVY:
        is_heavy = (counts > block_m + slack)[experts]
        number = torch.where(is_heavy, is_heavy.cumsum(0), (~is_heavy).cumsum(0)) - 1
        others = torch.where(is_heavy, (~is_heavy).sum(), is_heavy.sum())
        spread = (2 * (2 * number + 1) * others + is_heavy).argsort(stable=True)
        experts, step = experts[spread], step[spread]
    num_blocks, counters = blocks.sum().reshape(1).int(), counts.new_zeros(2, dtype=torch.int32)
    # A plan without tall tiles writes no number of them.
    num_tall = blocks[~is_low].sum().reshape(1).int()[: tall > 0]
    return BlockMap(
        block_expert=experts.int(),
        block_row=(offsets[experts] + step * heights[experts]).int(),
        block_end=(offsets + counts)[experts].int(),
        num_blocks=num_blocks,
        tile_counters=counters,
        num_tall=num_tall,
        counts=torch.cat([num_blocks, counters, num_tall]),
        block_m=block_m,
        slack=slack,
        tall=tall,
        heavy_first=heavy_first,
    )


def sort_routes_reference(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local_experts: int,
    block_m: int,
    slack: int = 0,
    tall: int = 0,
    heavy_first: int = False,
) -> RoutePlan:
    """The plan of `sort_routes` by a stable sort in torch, with every tensor cut to the part in use."""
    ids = topk_ids.flatten().long()
    known = (ids >= 0) & (ids < num_experts)
    local = ids if expert_map is None else expert_map.long()[ids.where(known, ids.new_zeros(()))]
    local = local.where(known & (local >= 0) & (local < num_local_experts), local.new_tensor(-1))
    counts = local[local >= 0].bincount(minlength=num_local_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    blocks = block_map_reference(counts, offsets[:-1], block_m, slack, tall, heavy_first)
    sorted_routes = local.argsort(stable=True)[(local < 0).sum() :]
    route_row = torch.full_like(local, -1)
    route_row[sorted_routes] = torch.arange(sorted_routes.numel(), device=ids.device)
    return RoutePlan(
        route_expert=local.int(),
        route_row=route_row.int(),
        sorted_routes=sorted_routes.int(),
        expert_offsets=offsets.int(),
        **{field.name: getattr(blocks, field.name) for field in dataclasses.fields(BlockMap)},
    )


def copy_rows_reference(hidden_states: torch.Tensor, route_row: torch.Tensor) -> torch.Tensor:
    """The result of `copy_rows`, [valid routes, H]."""
    top_k = route_row.numel() // hidden_states.shape[0]
    valid = route_row >= 0
    order = route_row[valid].argsort()
    return hidden_states.repeat_interleave(top_k, dim=0)[valid][order]


def softcap_reference(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """`cap * tanh(x / cap)` in torch, or x without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def activate_reference(x: torch.Tensor, constant: ActivationConstant) -> torch.Tensor:
    """The function of a gate, or of x where there is none, in torch."""
    activation, alpha = constant.name, constant.alpha
    if activation == "situ":
        return softcap_reference(x, constant.gate_softcap) * torch.sigmoid(x)
    if activation in ("silu", "swigluoai"):
        return x * torch.sigmoid(alpha * x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    assert activation == "relu2", activation
    return torch.relu(x).square()


def gate_up_reference(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    route_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of `gate_up_gemm`, expert by expert: [valid routes, I] fp32 in sorted order, not rounded."""
    offsets = plan.expert_offsets.tolist()
    num_columns = w13.shape[1]
    constant, limit = epilogue.activation, epilogue.activation.limit
    gated = constant.gated
    out = hidden_states.new_empty(offsets[-1], num_columns // (2 if gated else 1), dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = hidden_states[routes // top_k].float() @ w13[expert].float().T
        if route_factors is not None:
            x *= route_factors.flatten()[routes, None]
        if epilogue.bias is not None:
            x += epilogue.bias[expert].float()
        if gated:
            gate, up = x.chunk(2, dim=1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            up = softcap_reference(up, constant.up_softcap) + constant.beta
            out[row:end] = activate_reference(gate, constant) * up
        else:
            out[row:end] = activate_reference(x, constant)
    return out


def down_reference(
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: RoutePlan,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of `down_gemm`, expert by expert: [N, H] fp32 by route, not rounded; NaN where one is not valid."""
    offsets = plan.expert_offsets.tolist()
    out = intermediate.new_full((plan.route_expert.numel(), w2.shape[1]), math.nan, dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = intermediate[row:end, : w2.shape[2]].float() @ w2[expert].float().T
        if bias is not None:
            x += bias[expert].float()
        if topk_weights is not None:
            x *= topk_weights.flatten()[routes, None]
        out[routes] = x
    return out


def reduce_routes_reference(route_rows: torch.Tensor, route_expert: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The result of `reduce_routes`, [T, H] fp32, not rounded."""
    rows = torch.where((route_expert >= 0)[:, None], route_rows.float(), 0.0)
    return rows.view(num_tokens, -1, rows.shape[1]).sum(1)
