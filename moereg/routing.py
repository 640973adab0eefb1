"""Top-k routing as models do it: from router logits to the weights and ids that a kernel takes.

Pure torch, no host synchronization, T = 0 included. Every function returns fp32 weights and int32 ids, both [T,K],
with the best choice first. Models that round the weights to the dtype of their logits differ by that rounding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moereg.arguments import (
    check_count,
    check_flag,
    check_instance,
    check_mapping,
    check_number,
    check_one_of,
)
from moereg.config_entries import MOST_EXPERTS, read_choice, read_count, read_flag, read_number, read_object
from moereg.errors import ArgumentError, UnknownModelError, shown, unknown_name_message

__all__ = [
    "RouterSpec",
    "grouped_sigmoid_topk",
    "grouped_softmax_topk",
    "llama4_topk",
    "softmax_topk",
    "topk_softmax",
]

# DeepSeek-V3 guards its renormalization against sigmoids that all underflow; the value is part of the model.
_DEEPSEEK_V3_EPSILON: Final = 1e-20


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
    _check_groups(num_experts, top_k, num_groups, topk_groups)
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

    A group's score is its best expert's. One group is what DeepSeek-V2 calls `greedy`, more are `group_limited_greedy`.

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
    _check_groups(num_experts, top_k, num_groups, topk_groups)
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
    _check_top_k(num_experts, top_k)
    return num_experts


def _check_top_k(num_experts: int, top_k: int) -> None:
    check_count("top_k", top_k, minimum=0)
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k must be in 1..num_experts, got top_k={top_k} with {num_experts} experts; lower top_k, or check "
            "that num_experts is the global count"
        )


def _check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    check_count("num_groups", num_groups, minimum=0)
    check_count("topk_groups", topk_groups, minimum=0)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"num_experts must be divisible by num_groups, got {num_experts} experts in {num_groups} groups; "
            "use the model's n_group, or 1 for no groups"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"topk_groups must be in 1..num_groups, got topk_groups={topk_groups} of {num_groups}; "
            "use the model's topk_group"
        )
    reachable = topk_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k must not exceed the experts of the chosen groups, got top_k={top_k} with {reachable} experts in "
            f"{topk_groups} of {num_groups} groups; raise topk_groups or lower top_k"
        )


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


@dataclasses.dataclass(frozen=True)
class _RouterKind:
    """A routing function, and which options of a `RouterSpec` it takes by the same name."""

    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    options: tuple[str, ...] = ()
    takes_correction_bias: bool = False
    apply_router_weight_on_input: bool = False


_ROUTER_KINDS: Final[Mapping[str, _RouterKind]] = {
    "softmax_topk": _RouterKind(softmax_topk, ("renormalize",)),
    "topk_softmax": _RouterKind(topk_softmax),
    "grouped_sigmoid_topk": _RouterKind(
        grouped_sigmoid_topk,
        ("num_groups", "topk_groups", "renormalize", "scaling_factor"),
        takes_correction_bias=True,
    ),
    "grouped_softmax_topk": _RouterKind(grouped_softmax_topk, ("num_groups", "topk_groups", "scaling_factor")),
    "llama4_topk": _RouterKind(llama4_topk, apply_router_weight_on_input=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How one model routes.

    Attributes:
        kind: Name of a routing function of this module.
        num_experts: Global number of routed experts.
        top_k: Experts for each token.
        renormalize: Whether the chosen weights are divided by their sum.
        num_groups: Groups of experts; 1 means no groups.
        topk_groups: Groups that a token may choose from.
        scaling_factor: Folded into the weights.
        has_correction_bias: Whether `route` needs a bias [E] for the choice.
        fp32_logits: Whether the model computes its logits in fp32 even where hidden states and router weight are
            16-bit. The caller computes the logits, so it is the caller who does that: rounded ones choose otherwise.

    Raises:
        UnknownNameError: `kind` is not known.
        ValueError: Sizes do not fit together, or an option is set that the kind would ignore.
    """

    kind: str
    num_experts: int
    top_k: int
    renormalize: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0
    has_correction_bias: bool = False
    fp32_logits: bool = False

    def __post_init__(self) -> None:
        check_one_of("router kind", self.kind, tuple(_ROUTER_KINDS))
        check_count("num_experts", self.num_experts)
        for name in ("renormalize", "has_correction_bias", "fp32_logits"):
            check_flag(name, getattr(self, name))
        check_number("scaling_factor", self.scaling_factor)
        _check_top_k(self.num_experts, self.top_k)
        _check_groups(self.num_experts, self.top_k, self.num_groups, self.topk_groups)
        kind = _ROUTER_KINDS[self.kind]
        # An option that is silently ignored would be wrong numbers.
        for field in dataclasses.fields(self):
            if (
                field.name in ("renormalize", "num_groups", "topk_groups", "scaling_factor")
                and field.name not in kind.options
                and getattr(self, field.name) != field.default
            ):
                raise ValueError(
                    f"router kind {self.kind!r} does not use {field.name}, got {getattr(self, field.name)}; "
                    "leave it out"
                )
        if self.has_correction_bias and not kind.takes_correction_bias:
            raise ValueError(f"router kind {self.kind!r} takes no correction bias; leave has_correction_bias out")

    @property
    def apply_router_weight_on_input(self) -> bool:
        """Whether the weight multiplies the expert's input instead of its output."""
        return _ROUTER_KINDS[self.kind].apply_router_weight_on_input

    def route(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts.

        Args:
            router_logits: [T,E], any floating dtype.
            correction_bias: [E]; given exactly where `has_correction_bias`.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32.

        Raises:
            ValueError: The logits are not [T,E] for this spec's E, or the bias is missing or not expected.
        """
        check_instance("router_logits", router_logits, torch.Tensor, "pass scores of the router, [num_tokens, E]")
        if router_logits.dim() == 2 and router_logits.shape[1] != self.num_experts:
            raise ValueError(
                f"router_logits must have num_experts={self.num_experts} columns, got {router_logits.shape[1]}; "
                "pass the logits of all experts, not of one rank's"
            )
        if (correction_bias is not None) != self.has_correction_bias:
            expected, found = ("[E]", "None") if self.has_correction_bias else ("None", "a tensor")
            raise ValueError(
                f"correction_bias must be {expected} where has_correction_bias={self.has_correction_bias}, "
                f"got {found}; pass this layer's e_score_correction_bias exactly where the model has one"
            )
        kind = _ROUTER_KINDS[self.kind]
        options: dict[str, Any] = {name: getattr(self, name) for name in kind.options}
        if kind.takes_correction_bias:
            options["correction_bias"] = correction_bias
        return kind.route(router_logits, self.top_k, **options)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RouterSpec:
        """Reads a Hugging Face `config.json`.

        Args:
            config: The parsed file; its `model_type` decides how the rest is read.

        Returns:
            The spec of the model's Mixture-of-Experts layers.

        Raises:
            UnknownModelError: The model type is missing or not known.
            CheckpointError: A size is missing, or the file asks for a routing that the model type does not define.
            ValueError: The sizes do not fit together.
        """
        model_type = check_mapping("config", config).get("model_type")
        if not isinstance(model_type, str) or model_type not in _CONFIG_READERS:
            raise UnknownModelError(unknown_name_message("model type", model_type, _CONFIG_READERS))
        return _CONFIG_READERS[model_type](config)


def _read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": read_count(config, "num_experts", "num_local_experts", "n_routed_experts", maximum=MOST_EXPERTS),
        "top_k": read_count(config, "num_experts_per_tok", maximum=MOST_EXPERTS),
    }


def _read_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_groups": read_count(config, "n_group", maximum=MOST_EXPERTS),
        "topk_groups": read_count(config, "topk_group", maximum=MOST_EXPERTS),
    }


def _require_choice(config: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any) -> Any:
    """Reads an optional entry and refuses values whose meaning is not defined for the model type."""
    return read_choice(
        config, name, choices, default, cure="build the RouterSpec by hand if the model really routes so"
    )


def _mixtral_router(config: Mapping[str, Any]) -> RouterSpec:
    return RouterSpec(kind="softmax_topk", renormalize=True, **_read_sizes(config))


def _norm_topk_prob_router(config: Mapping[str, Any]) -> RouterSpec:
    # Absent means false, as in transformers' configs of these three families.
    return RouterSpec(kind="softmax_topk", renormalize=read_flag(config, "norm_topk_prob"), **_read_sizes(config))


def _gpt_oss_router(config: Mapping[str, Any]) -> RouterSpec:
    return RouterSpec(kind="topk_softmax", **_read_sizes(config))


def _deepseek_v2_router(config: Mapping[str, Any]) -> RouterSpec:
    _require_choice(config, "scoring_func", ("softmax",), "softmax")
    # Published files all say false; implementations disagree on what true would mean together with the scaling factor.
    _require_choice(config, "norm_topk_prob", (False,), False)
    method = _require_choice(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # Files with greedy may carry group counts that the model never reads.
    is_grouped = method == "group_limited_greedy"
    return RouterSpec(
        kind="grouped_softmax_topk",
        scaling_factor=read_number(config, "routed_scaling_factor"),
        fp32_logits=True,
        **(_read_groups(config) if is_grouped else {}),
        **_read_sizes(config),
    )


def _deepseek_v3_router(config: Mapping[str, Any]) -> RouterSpec:
    _require_choice(config, "scoring_func", ("sigmoid",), "sigmoid")
    _require_choice(config, "topk_method", ("noaux_tc",), "noaux_tc")
    return RouterSpec(
        kind="grouped_sigmoid_topk",
        renormalize=_require_choice(config, "norm_topk_prob", (True, False), True),
        scaling_factor=read_number(config, "routed_scaling_factor"),
        has_correction_bias=True,
        fp32_logits=True,
        **_read_groups(config),
        **_read_sizes(config),
    )


def _llama4_text_router(config: Mapping[str, Any]) -> RouterSpec:
    return RouterSpec(kind="llama4_topk", **_read_sizes(config))


def _llama4_router(config: Mapping[str, Any]) -> RouterSpec:
    return _llama4_text_router(read_object(config, "text_config"))


_CONFIG_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], RouterSpec]]] = {
    "deepseek_v2": _deepseek_v2_router,
    "deepseek_v3": _deepseek_v3_router,
    "gpt_oss": _gpt_oss_router,
    "llama4": _llama4_router,
    "llama4_text": _llama4_text_router,
    "mixtral": _mixtral_router,
    "olmoe": _norm_topk_prob_router,
    "qwen2_moe": _norm_topk_prob_router,
    "qwen3_moe": _norm_topk_prob_router,
}
