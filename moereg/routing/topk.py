"""The top-k functions of published models."""

from __future__ import annotations

from typing import Final

import torch

from moereg.arguments import check_flag, check_instance, check_number
from moereg.errors import ArgumentError, shown
from moereg.routing.sizes import check_groups, check_top_k

__all__ = ["grouped_sigmoid_topk", "grouped_softmax_topk", "llama4_topk", "softmax_topk", "topk_softmax"]

_DEEPSEEK_V3_EPSILON: Final = 1e-20
"""Guards DeepSeek-V3's renormalization against sigmoids that all underflow; the value is part of the model."""


def softmax_topk(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best `top_k` (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE).

    Args:
        router_logits: [T,E], any floating dtype; the softmax is taken in fp32.
        top_k: Experts for each token.
        renormalize: Whether the chosen weights are divided by their sum (`norm_topk_prob`; Mixtral always does).

    Returns:
        topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending.

    Raises:
        ValueError: The logits are not [T,E] floating point, or `top_k` is not in 1..E.

    Source:
        transformers 5.23, `MixtralTopKRouter`, `Qwen3MoeTopKRouter` and their copies.
    """
    _check_logits(router_logits, top_k)
    check_flag("renormalize", renormalize)
    topk_weights, topk_ids = torch.topk(torch.softmax(router_logits.float(), dim=-1), top_k, dim=-1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights, topk_ids.to(torch.int32)


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `top_k` logits, then a softmax over those alone (gpt-oss).

    Args:
        router_logits: [T,E], any floating dtype, the router's bias already added.
        top_k: Experts for each token.

    Returns:
        topk_weights [T,K] fp32, each row summing to 1, and topk_ids [T,K] int32, descending.

    Raises:
        ValueError: The logits are not [T,E] floating point, or `top_k` is not in 1..E.

    Source:
        transformers 5.23, `GptOssTopKRouter`.
    """
    _check_logits(router_logits, top_k)
    topk_logits, topk_ids = torch.topk(router_logits.float(), top_k, dim=-1)
    return torch.softmax(topk_logits, dim=-1), topk_ids.to(torch.int32)


def grouped_sigmoid_topk(
    router_logits: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    correction_bias: torch.Tensor | None,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores, chosen with a load-balancing bias inside the best groups (DeepSeek-V3, Kimi-K2, GLM-4.5).

    A group's score is the sum of its two best biased scores. The bias only decides who is chosen: the weights are the
    unbiased scores.

    Args:
        router_logits: [T,E]; DeepSeek-V3 computes them in fp32.
        top_k: Experts for each token.
        num_groups: Equal groups of neighboring experts; 1 means no groups.
        topk_groups: Groups that a token may choose from.
        correction_bias: [E] (`e_score_correction_bias`), or None for no bias.
        renormalize: Whether the chosen weights are divided by their sum + 1e-20.
        scaling_factor: `routed_scaling_factor`, folded into the weights.

    Returns:
        topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending by biased score (so the weights need not descend).

    Raises:
        ValueError: Logits, `top_k`, groups or bias do not fit together.

    Source:
        transformers 5.23, `DeepseekV3TopkRouter`; DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2.
    """
    num_experts = _check_logits(router_logits, top_k)
    check_groups(num_experts, top_k, num_groups, topk_groups)
    check_flag("renormalize", renormalize)
    check_number("scaling_factor", scaling_factor)
    if num_groups > 1 and num_experts // num_groups < 2:
        raise ValueError(
            f"a group's score is the sum of its two best experts, got {num_experts} experts in {num_groups} groups; "
            "use num_groups <= num_experts / 2, or 1 for no groups"
        )
    scores = torch.sigmoid(router_logits.float())
    choice_scores = scores
    if correction_bias is not None:
        cure = "pass this layer's e_score_correction_bias, or None"
        check_instance("correction_bias", correction_bias, torch.Tensor, cure)
        if correction_bias.layout is not torch.strided or correction_bias.is_complex():
            raise ArgumentError(f"correction_bias must be dense and real, got {shown(correction_bias)}; {cure}")
        if correction_bias.device != router_logits.device:
            raise ArgumentError(
                f"correction_bias must be on the logits' device {router_logits.device}, got {correction_bias.device}; "
                "move it"
            )
        if correction_bias.shape != (num_experts,):
            raise ValueError(
                f"correction_bias must be [{num_experts}] like the logits' experts, got "
                f"{list(correction_bias.shape)}; pass this layer's e_score_correction_bias"
            )
        choice_scores = scores + correction_bias.float()
    if topk_groups < num_groups:
        group_scores = _group(choice_scores, num_groups).topk(2, dim=-1).values.sum(dim=-1)
        choice_scores = _mask_other_groups(choice_scores, group_scores, topk_groups)
    topk_ids = torch.topk(choice_scores, top_k, dim=-1).indices
    topk_weights = scores.gather(-1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + _DEEPSEEK_V3_EPSILON)
    return topk_weights * scaling_factor, topk_ids.to(torch.int32)


def grouped_softmax_topk(
    router_logits: torch.Tensor, top_k: int, num_groups: int, topk_groups: int, scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best `top_k` inside the best groups (DeepSeek-V2).

    A group's score is its best expert's. `greedy` of DeepSeek-V2 has one group, `group_limited_greedy` more.

    Args:
        router_logits: [T,E]; DeepSeek-V2 computes them in fp32.
        top_k: Experts for each token.
        num_groups: Equal groups of neighboring experts; 1 means no groups.
        topk_groups: Groups that a token may choose from.
        scaling_factor: `routed_scaling_factor`, folded into the weights.

    Returns:
        topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending.

    Raises:
        ValueError: Logits, `top_k` and groups do not fit together.

    Source:
        transformers 5.23, `DeepseekV2TopkRouter`; DeepSeek-V2 report, arXiv 2405.04434, section 2.2.2.
    """
    num_experts = _check_logits(router_logits, top_k)
    check_groups(num_experts, top_k, num_groups, topk_groups)
    check_number("scaling_factor", scaling_factor)
    scores = torch.softmax(router_logits.float(), dim=-1)
    if topk_groups < num_groups:
        group_scores = _group(scores, num_groups).amax(dim=-1)
        scores = _mask_other_groups(scores, group_scores, topk_groups)
    topk_weights, topk_ids = torch.topk(scores, top_k, dim=-1)
    return topk_weights * scaling_factor, topk_ids.to(torch.int32)


def llama4_topk(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `top_k` logits, each through its own sigmoid (Llama 4).

    Llama 4 multiplies the expert's input, not its output, by this weight: run it with
    `apply_router_weight_on_input=True`.

    Args:
        router_logits: [T,E], any floating dtype.
        top_k: Experts for each token; 1 in the published models.

    Returns:
        topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending.

    Raises:
        ValueError: The logits are not [T,E] floating point, or `top_k` is not in 1..E.

    Source:
        transformers 5.23, `Llama4Router` and `Llama4TextMoe`.
    """
    _check_logits(router_logits, top_k)
    topk_logits, topk_ids = torch.topk(router_logits.float(), top_k, dim=-1)
    return torch.sigmoid(topk_logits), topk_ids.to(torch.int32)


def _check_logits(router_logits: torch.Tensor, top_k: int) -> int:
    """Checks what every router needs and returns E."""
    check_instance("router_logits", router_logits, torch.Tensor, "pass scores of the router, [num_tokens, num_experts]")
    if router_logits.layout is not torch.strided:
        raise ArgumentError(f"router_logits must be dense, got layout {router_logits.layout}; call .to_dense()")
    if router_logits.dim() != 2:
        raise ValueError(
            f"router_logits must be [num_tokens, num_experts], got {list(router_logits.shape)}; "
            "flatten the batch and sequence dimensions first"
        )
    if not router_logits.is_floating_point():
        raise ValueError(f"router_logits must be floating point, got {router_logits.dtype}; pass scores, not ids")
    num_experts = router_logits.shape[1]
    check_top_k(num_experts, top_k)
    return num_experts


def _group(scores: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Views scores [T,E] as [T,G,E/G]; no size is left to infer, because zero tokens leave it undefined."""
    num_tokens, num_experts = scores.shape
    return scores.view(num_tokens, num_groups, num_experts // num_groups)


def _mask_other_groups(scores: torch.Tensor, group_scores: torch.Tensor, topk_groups: int) -> torch.Tensor:
    """Returns the scores [T,E] with -inf for experts outside each token's best groups by group_scores [T,G]."""
    best_groups = torch.topk(group_scores, topk_groups, dim=-1, sorted=False).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
    grouped_scores = _group(scores, group_scores.shape[-1])
    return grouped_scores.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(-2)
