"""torch's grouped matmul of 8-bit floats with per-row scales on both sides: CUTLASS inside PyTorch.

Nothing here reads a device tensor on the host. T tokens, K experts per token, N = T * K routes, H hidden size,
I intermediate size, E local experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moereg.backends._loaded import Call, Implementation
from moereg.kernels.plain.device import device_chunk_tokens, local_expert_ids
from moereg.quantize import quantize_activations
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class _Rows(NamedTuple):
    """A chunk's routes sorted by expert; routes without a local expert come last.

    Attributes:
        order: [N] int64; each row's route.
        offsets: [E] int32; where each expert's rows end.
        expert: [N] int64; each row's expert, arbitrary if it has none.
        counts: [N] bool; whether the row has an expert.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    expert: torch.Tensor
    counts: torch.Tensor


class ScaledGrouped(Implementation):
    """Standard format: torch gathers and quantizes rows, in chunks that bound its temporaries."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Keeps the 8-bit weights, copied only if not 16-byte aligned, and expands scales to one per row."""
        problem = self.problem
        tensors = {name: aligned(tensor) for name, tensor in weights.tensors().items()}
        for name, rows in (("w13", weights.w13.shape[1]), ("w2", problem.hidden_size)):
            tensors[f"{name}_scale"] = row_scales(tensors[f"{name}_scale"], rows)
        for name in ("a13_scale", "a2_scale"):
            if name in tensors:
                tensors[name] = tensors[name].expand(problem.num_local_experts).contiguous()
        return PermutedWeights(self.layouts[0], tensors)

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: torch's allocator provides temporaries, also during graph capture."""
        return (0,), (0,)

    def run(self, call: Call) -> None:
        num_tokens, top_k = call.inputs.topk_ids.shape
        w13_rows, hidden_size = call.weights["w13"].shape[1:]
        chunk = device_chunk_tokens(num_tokens, top_k, hidden_size, w13_rows)
        for first in range(0, num_tokens, chunk):
            self._run(call, slice(first, first + chunk))

    def _run(self, call: Call, tokens: slice) -> None:
        problem, inputs, weights = self.problem, call.inputs, call.weights
        hidden_states, topk_weights = inputs.hidden_states[tokens], inputs.topk_weights[tokens]
        num_tokens, top_k = topk_weights.shape
        rows = self._rows(call, tokens)
        x = hidden_states.index_select(0, rows.order // top_k)
        scales = topk_weights.reshape(-1).index_select(0, rows.order).unsqueeze(1)
        if problem.apply_router_weight_on_input:
            x = (x * scales).to(hidden_states.dtype)
        gemm1 = self._matmul(x, rows, weights, "w13", "a13_scale")
        result = self._matmul(problem.activation(gemm1).to(x.dtype), rows, weights, "w2", "a2_scale")
        if not problem.apply_router_weight_on_input:
            result *= scales
        # Rows past the last offset were never written. Multiplying by 0 would keep a NaN, so select.
        result = torch.where(rows.counts.unsqueeze(1), result, 0.0)
        places = torch.arange(len(rows.order), device=rows.order.device)
        place = torch.empty_like(rows.order).scatter_(0, rows.order, places)
        call.out[tokens].copy_(result.index_select(0, place).view(num_tokens, top_k, -1).sum(1))

    def _rows(self, call: Call, tokens: slice) -> _Rows:
        num_experts = self.problem.num_local_experts
        local = local_expert_ids(call.inputs.topk_ids[tokens], num_experts, call.inputs.expert_map).reshape(-1)
        keys, order = torch.sort(torch.where(local < 0, num_experts, local), stable=True)
        experts = torch.arange(num_experts, device=keys.device)
        offsets = torch.searchsorted(keys, experts, right=True, out_int32=True)
        return _Rows(order, offsets, keys.clamp(max=num_experts - 1), keys < num_experts)

    def _matmul(
        self, x: torch.Tensor, rows: _Rows, weights: PermutedWeights, matrix: str, static_scale: str
    ) -> torch.Tensor:
        """Quantizes rows [N,K], multiplies them with their experts' matrices and adds biases; [N, rows] fp32."""
        static = weights.get(static_scale)
        scale = None if static is None else static.index_select(0, rows.expert).unsqueeze(1)
        found = quantize_activations(x, self.computes, scale)
        product: torch.Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
            found.q,
            weights[matrix].transpose(1, 2),
            scale_a=found.scale.reshape(-1),
            scale_recipe_a=F.ScalingType.RowWise,
            scale_b=weights[f"{matrix}_scale"],
            scale_recipe_b=F.ScalingType.RowWise,
            offs=rows.offsets,
            output_dtype=x.dtype,
            # Hopper's tensor cores accumulate 8-bit products in about 14 bits; this accumulates in fp32.
            use_fast_accum=False,
        )
        result = product.float()
        bias = weights.get(f"{matrix}_bias")
        if bias is not None:
            result += bias.index_select(0, rows.expert)
        return result


def row_scales(scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One scale per row, [E, rows] fp32 in its own storage, of [E, rows, 1], [E], or [E, 2] for w13's halves."""
    flat = scale.flatten(1) if scale.dim() > 1 else scale.unsqueeze(1)
    return flat.repeat_interleave(num_rows // flat.shape[1], dim=1).contiguous()
