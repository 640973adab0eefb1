"""One layer by AITER's `fused_moe`. Making one imports AITER, which asks the GPU and loads its compiled core."""

from __future__ import annotations

import logging
from typing import Final

import torch

from moereg.author import ExpertInputs, MoEProblem, PermutedWeights, QuantScheme, local_expert_ids
from moereg_aiter.package import has_built_kernels, jit_folder

__all__ = ["AiterLayer"]

_LOG: Final = logging.getLogger("moereg")


class AiterLayer:
    """One layer of experts, 16 or 8 bits; it holds no tensors."""

    def __init__(self, problem: MoEProblem, computes: QuantScheme) -> None:
        """Imports AITER, and says so if the first call will compile."""
        from aiter import ActivationType, QuantType
        from aiter.fused_moe import fused_moe

        self._problem = problem
        self._silu = ActivationType.Silu
        methods = {
            "fp8_tensor_static": QuantType.per_Tensor,
            "fp8_channel_token": QuantType.per_Token,
            "fp8_block128": QuantType.per_128x128,
        }
        self._method = methods.get(computes.name, QuantType.No)
        self._fused_moe = fused_moe
        if not has_built_kernels():
            _LOG.warning(
                "aiter compiles the kernels of a layer at its first call, several minutes for each kind, and keeps "
                "them in %s; to avoid that, build its wheel with PREBUILD_KERNELS=1",
                jit_folder(),
            )

    def run(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """Runs the layer; see `Experts.apply`. AITER's result is copied to `out`: `fused_moe` takes no output."""
        w13, w2 = weights["w13"], weights["w2"]
        for matrix in (w13, w2):
            # How `fused_moe` is told the order. Views and copies of a tensor lose its attributes.
            matrix.is_shuffled = True  # type: ignore[attr-defined]
        num_experts, num_local_experts = self._problem.num_experts, self._problem.num_local_experts
        routes = inputs.topk_ids, inputs.topk_weights
        if inputs.expert_map is not None:
            routes = _local_routes(inputs, num_local_experts)
        if num_local_experts == num_experts:
            mask, (topk_ids, topk_weights) = None, _routes_of_all(*routes, num_experts)
        else:
            mask = _expert_mask(num_local_experts, num_experts, inputs.topk_ids.device)
            topk_ids, topk_weights = _with_masked_slot(*routes, num_experts)
        found = self._fused_moe(
            inputs.hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            expert_mask=mask,
            activation=self._silu,
            quant_type=self._method,
            w1_scale=weights.get("w13_scale"),
            w2_scale=weights.get("w2_scale"),
            a1_scale=weights.get("a13_scale"),
            a2_scale=weights.get("a2_scale"),
            dtype=out.dtype,
        )
        out.copy_(found)


def _routes_of_all(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes where every expert is here: [T,K], where one to nowhere goes to another expert with the weight 0.

    No mask says that a route is nobody's: some of AITER's kernels read ids and no mask. The other expert is one that
    the token has not chosen, since AITER's sort keeps one route of a token to an expert and drops the rest.
    """
    is_route = (topk_ids >= 0) & (topk_ids < num_experts)
    # As many of the first K experts are free as routes go nowhere, or more.
    is_free = (topk_ids[:, :, None] != torch.arange(topk_ids.shape[1], device=topk_ids.device)).all(1)
    # The n-th route to nowhere goes to the n-th free one: as many stand before it as have fewer than n up to there.
    free = (is_free.cumsum(1)[:, None, :] < (~is_route).cumsum(1)[:, :, None]).sum(2)
    return torch.where(is_route, topk_ids, free).to(torch.int32), torch.where(is_route, topk_weights, 0)


def _local_routes(inputs: ExpertInputs, num_local_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes to local experts, others -1; two of a token to the same one, as a map may have it, become one.

    AITER's sort would drop one of the two. The expert's output is the same for both, so their weights are added.
    """
    assert inputs.expert_map is not None
    local = local_expert_ids(inputs.topk_ids, num_local_experts, inputs.expert_map)
    is_same = local[:, :, None] == local[:, None, :]
    total = (is_same * inputs.topk_weights[:, None, :]).sum(2)
    is_repeated = is_same.tril(-1).any(2)
    return torch.where(is_repeated, -1, local), total


def _expert_mask(num_local_experts: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """[num_experts + 1] int32: 1 for each local expert, which ids count from 0; those behind are nobody's.

    AITER counts local experts in the order of the mask.
    """
    return (torch.arange(num_experts + 1, device=device) < num_local_experts).to(torch.int32)


def _with_masked_slot(
    local: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes as AITER wants them beside a mask: [T,K+1], where the last slot is masked, and so is a route to nowhere.

    With a mask, it looks its tuned configurations up for one slot less.
    """
    ids = torch.where(local >= 0, local, num_experts).to(torch.int32)
    pad = torch.nn.functional.pad
    return pad(ids, (0, 1), value=num_experts), pad(topk_weights, (0, 1))
