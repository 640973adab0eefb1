"""The top-k functions of published models.

Shared arguments: `router_logits` [T,E] of any floating dtype, computed upon in fp32 unless `rounds_scores` keeps their
own; `top_k`, the experts for each token; `renormalize`, whether the chosen weights are divided by their sum;
`correction_bias` [E] or None, added to the scores for the choice alone.

All return topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending by the score that chose, which is the biased one
where there is a bias, and raise ArgumentError where logits, `top_k`, groups and bias do not fit together.

Sources are functions of transformers 5.23 unless they say otherwise.
"""

from __future__ import annotations

from typing import Final

import torch

from moereg.arguments import check_count, check_flag, check_instance, check_number
from moereg.errors import ArgumentError, shown

_DEEPSEEK_V3_EPSILON: Final = 1e-20
"""Guards DeepSeek-V3's renormalization against sigmoids that all underflow; the value is part of the model."""


def softmax_topk(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, rounds_scores: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best `top_k` (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE; DBRX rounds).

    Returns topk_weights [T,K] fp32 and topk_ids [T,K] int32, descending; arguments and errors are as in this module.

    Source: `MixtralTopKRouter`, `Qwen3MoeTopKRouter` and their copies.
    """
    _check_logits(router_logits, top_k)
    check_flag("renormalize", renormalize)
    scores = torch.softmax(_exact(router_logits, rounds_scores), dim=-1)
    return _weighted(*torch.topk(scores, top_k, dim=-1), renormalize)


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `top_k` logits, bias included, then a softmax over those alone (gpt-oss).

    Source: `GptOssTopKRouter`.
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
    epsilon: float = _DEEPSEEK_V3_EPSILON,
    logit_softcap: float = 0.0,
    rounds_scores: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores, chosen with a load-balancing bias inside the best groups (DeepSeek-V3, Kimi-K2, GLM, MiniMax).

    A group's score is the sum of its two best biased scores. The weights are the unbiased scores, and need not descend.

    Args:
        num_groups: Equal groups of neighboring experts; 1 means no groups.
        topk_groups: Groups that a token may choose from.
        scaling_factor: `routed_scaling_factor`, folded into the weights.
        epsilon: Added to the sum: 1e-20 in DeepSeek-V3, 1e-6 in LFM2, 0 in MiniMax-M2.
        logit_softcap: Logits x are taken as `cap * tanh(x / cap)` (Laguna); 0 for no cap.
        router_logits, top_k, correction_bias, renormalize, rounds_scores: As in the module; LFM2 rounds.

    Source: `DeepseekV3TopkRouter`; DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2.
    """
    num_experts = _check_logits(router_logits, top_k)
    check_groups(num_experts, top_k, num_groups, topk_groups, scored_experts=2)
    check_flag("renormalize", renormalize)
    for name, number in (("scaling_factor", scaling_factor), ("epsilon", epsilon), ("logit_softcap", logit_softcap)):
        check_number(name, number)
    logits = _exact(router_logits, rounds_scores)
    if logit_softcap:
        logits = torch.tanh(logits / logit_softcap) * logit_softcap
    scores = torch.sigmoid(logits)
    choice_scores = _in_best_groups(_biased(scores, correction_bias), num_groups, topk_groups, scored_experts=2)
    return _weighted(*_best(scores, choice_scores, top_k), renormalize, epsilon, scaling_factor)


def grouped_softmax_topk(
    router_logits: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
    renormalize: bool = False,
    scored_experts: int = 1,
    rounds_scores: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best `top_k` inside the best groups (DeepSeek-V2, Mistral 4, which rounds).

    `greedy` of DeepSeek-V2 has one group, `group_limited_greedy` more. Further arguments are as in
    `grouped_sigmoid_topk`; `scored_experts` is how many of a group's best scores add up to the group's: 1 in
    DeepSeek-V2, 2 in Mistral 4.

    Source: `DeepseekV2TopkRouter`, `Mistral4TopkRouter`; DeepSeek-V2 report, arXiv 2405.04434, section 2.2.2.
    """
    num_experts = _check_logits(router_logits, top_k)
    check_count("scored_experts", scored_experts)
    check_groups(num_experts, top_k, num_groups, topk_groups, scored_experts)
    check_number("scaling_factor", scaling_factor)
    check_flag("renormalize", renormalize)
    scores = torch.softmax(_exact(router_logits, rounds_scores), dim=-1)
    scores = _in_best_groups(scores, num_groups, topk_groups, scored_experts)
    return _weighted(*torch.topk(scores, top_k, dim=-1), renormalize, _DEEPSEEK_V3_EPSILON, scaling_factor)


def llama4_topk(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `top_k` logits, 1 in the published models, each through its own sigmoid (Llama 4).

    Llama 4 multiplies the expert's input, not its output, by this weight: run it with
    `apply_router_weight_on_input=True`.

    Source: `Llama4Router` and `Llama4TextMoe`.
    """
    _check_logits(router_logits, top_k)
    topk_logits, topk_ids = torch.topk(router_logits.float(), top_k, dim=-1)
    return torch.sigmoid(topk_logits), topk_ids.to(torch.int32)


def topk_sigmoid(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `top_k` logits, then a sigmoid of each (Cohere2-MoE, Flint, and with a bias Kolibri).

    Source: `Cohere2MoeTopKRouter`, `FlintTopKRouter`, `Kolibri1TopKRouter`.
    """
    _check_logits(router_logits, top_k)
    check_flag("renormalize", renormalize)
    logits = router_logits.float()
    topk_logits, topk_ids = _best(logits, _biased(logits, correction_bias), top_k)
    return _weighted(torch.sigmoid(topk_logits), topk_ids, renormalize)


def biased_softmax_topk(
    router_logits: torch.Tensor, top_k: int, correction_bias: torch.Tensor | None, smallest_sum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, chosen with a load-balancing bias, then renormalized (Ernie 4.5).

    The chosen weights are divided by their sum, or by `smallest_sum` (`moe_norm_min`) where the sum is smaller.

    Source: `Ernie4_5_MoeTopKRouter`.
    """
    _check_logits(router_logits, top_k)
    check_number("smallest_sum", smallest_sum)
    scores = torch.softmax(router_logits.float(), dim=-1)
    topk_weights, topk_ids = _best(scores, _biased(scores, correction_bias), top_k)
    topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True).clamp(min=smallest_sum)
    return topk_weights, topk_ids.to(torch.int32)


def sqrtsoftplus_topk(
    router_logits: torch.Tensor,
    top_k: int,
    correction_bias: torch.Tensor | None,
    scaling_factor: float,
    rounds_scores: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores sqrt(softplus(x)), chosen with a load-balancing bias, renormalized and scaled (DeepSeek-V4).

    transformers rounds scores.

    Source: `DeepseekV4TopKRouter`.
    """
    _check_logits(router_logits, top_k)
    check_number("scaling_factor", scaling_factor)
    scores = torch.nn.functional.softplus(_exact(router_logits, rounds_scores)).sqrt()
    best = _best(scores, _biased(scores, correction_bias), top_k)
    return _weighted(*best, renormalize=True, epsilon=_DEEPSEEK_V3_EPSILON, scaling_factor=scaling_factor)


def sparsemixer(router_logits: torch.Tensor, top_k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The best logit and then the second best, each with a softmax over the logits near it (Phi-3.5-MoE).

    Near means less than `2 * jitter` (`router_jitter_noise`) below the best, relative to the larger of the two
    magnitudes. `top_k` is 2, and the weights need not sum to 1. Training, which samples instead, is not computed.

    Source: `sparsemixer` of Phimoe; SparseMixer, arXiv 2409.12136.
    """
    _check_logits(router_logits, top_k)
    check_number("jitter", jitter)
    check_two_experts(top_k)
    logits = router_logits.float()
    left = logits
    chosen = []
    for _ in range(top_k):
        best, topk_id = left.max(dim=-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        weight = torch.softmax(left.masked_fill(is_far, -torch.inf), dim=-1).gather(-1, topk_id)
        chosen.append((weight, topk_id))
        left = left.scatter(-1, topk_id, -torch.inf)
    weights, ids = zip(*chosen, strict=True)
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1).to(torch.int32)


def _exact(router_logits: torch.Tensor, rounds_scores: bool) -> torch.Tensor:
    check_flag("rounds_scores", rounds_scores)
    return router_logits if rounds_scores else router_logits.float()


def _biased(scores: torch.Tensor, correction_bias: torch.Tensor | None) -> torch.Tensor:
    if correction_bias is None:
        return scores
    num_experts = scores.shape[-1]
    cure = "pass this layer's e_score_correction_bias, or None"
    check_instance("correction_bias", correction_bias, torch.Tensor, cure)
    if correction_bias.layout is not torch.strided or correction_bias.is_complex():
        raise ArgumentError(f"correction_bias must be dense and real, got {shown(correction_bias)}; {cure}")
    if correction_bias.device != scores.device:
        raise ArgumentError(
            f"correction_bias must be on the logits' device {scores.device}, got {correction_bias.device}; move it"
        )
    if correction_bias.shape != (num_experts,):
        raise ArgumentError(
            f"correction_bias must be [{num_experts}] like the logits' experts, got "
            f"{list(correction_bias.shape)}; pass this layer's e_score_correction_bias"
        )
    return scores + correction_bias.float()


def _check_logits(router_logits: torch.Tensor, top_k: int) -> int:
    check_instance("router_logits", router_logits, torch.Tensor, "pass scores of the router, [num_tokens, E]")
    if router_logits.layout is not torch.strided:
        raise ArgumentError(f"router_logits must be dense, got layout {router_logits.layout}; call .to_dense()")
    if router_logits.dim() != 2:
        raise ArgumentError(
            f"router_logits must be [num_tokens, num_experts], got {list(router_logits.shape)}; "
            "flatten the batch and sequence dimensions first"
        )
    if not router_logits.is_floating_point():
        raise ArgumentError(f"router_logits must be floating point, got {router_logits.dtype}; pass scores, not ids")
    num_experts = router_logits.shape[1]
    check_top_k(num_experts, top_k)
    return num_experts


def _in_best_groups(scores: torch.Tensor, num_groups: int, topk_groups: int, scored_experts: int) -> torch.Tensor:
    """The scores [T,E] with -inf outside each token's best groups, by the sum of a group's `scored_experts` best."""
    if topk_groups == num_groups:
        return scores
    # No size is left to infer, because zero tokens leave it undefined.
    grouped = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
    group_scores = grouped.topk(scored_experts, dim=-1).values.sum(dim=-1)
    best_groups = torch.topk(group_scores, topk_groups, dim=-1, sorted=False).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
    return grouped.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(scores: torch.Tensor, choice_scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    topk_ids = torch.topk(choice_scores, top_k, dim=-1).indices
    return scores.gather(-1, topk_ids), topk_ids


def _weighted(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    renormalize: bool,
    epsilon: float = 0.0,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in fp32, divided by their sum + epsilon where they are renormalized, and scaled; ids in int32."""
    topk_weights = topk_weights.float()
    if renormalize:
        total = topk_weights.sum(dim=-1, keepdim=True)
        topk_weights = topk_weights / (total + epsilon if epsilon else total)
    return topk_weights if scaling_factor == 1.0 else topk_weights * scaling_factor, topk_ids.to(torch.int32)


def check_top_k(num_experts: int, top_k: int) -> None:
    """Checks that a token can take that many experts."""
    check_count("top_k", top_k, minimum=0)
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(
            f"top_k must be in 1..num_experts, got top_k={top_k} with {num_experts} experts; lower top_k, or check "
            "that num_experts is the global count"
        )


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int, scored_experts: int) -> None:
    """Checks that experts divide into groups, and that there are enough to choose from and to make a group's score."""
    check_count("num_groups", num_groups, minimum=0)
    check_count("topk_groups", topk_groups, minimum=0)
    if num_groups < 1 or num_experts % num_groups:
        raise ArgumentError(
            f"num_experts must be divisible by num_groups, got {num_experts} experts in {num_groups} groups; "
            "use the model's n_group, or 1 for no groups"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ArgumentError(
            f"topk_groups must be in 1..num_groups, got topk_groups={topk_groups} of {num_groups}; "
            "use the model's topk_group"
        )
    reachable = topk_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise ArgumentError(
            f"top_k must not exceed the experts of the chosen groups, got top_k={top_k} with {reachable} experts in "
            f"{topk_groups} of {num_groups} groups; raise topk_groups or lower top_k"
        )
    if num_groups > 1 and num_experts // num_groups < scored_experts:
        count = "two best experts" if scored_experts == 2 else f"{scored_experts} best experts"
        raise ArgumentError(
            f"a group's score is the sum of its {count}, got {num_experts} experts in {num_groups} groups; "
            f"use num_groups <= num_experts / {scored_experts}, or 1 for no groups"
        )


def check_two_experts(top_k: int) -> None:
    """Checks that `top_k` is 2, as `sparsemixer` requires."""
    if top_k != 2:
        raise ArgumentError(f"sparsemixer chooses two experts, got top_k={top_k}; use top_k=2")
