"""How one model routes, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moereg.arguments import check_count, check_flag, check_instance, check_number, check_one_of
from moereg.errors import ArgumentError
from moereg.routing import topk
from moereg.routing.configs import read_router


@dataclasses.dataclass(frozen=True)
class _RouterKind:
    """A routing function, and the options of a `RouterSpec` that it takes by the same name.

    Its `scored_experts`, if any, stand for those of the spec.
    """

    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    options: tuple[str, ...] = ()
    takes_correction_bias: bool = False
    apply_router_weight_on_input: bool = False
    scored_experts: int | None = None


_ROUTER_KINDS: Final[Mapping[str, _RouterKind]] = {
    "softmax_topk": _RouterKind(topk.softmax_topk, ("renormalize", "rounds_scores")),
    "topk_softmax": _RouterKind(topk.topk_softmax),
    "topk_sigmoid": _RouterKind(topk.topk_sigmoid, ("renormalize",), takes_correction_bias=True),
    "biased_softmax_topk": _RouterKind(topk.biased_softmax_topk, ("smallest_sum",), takes_correction_bias=True),
    "sqrtsoftplus_topk": _RouterKind(
        topk.sqrtsoftplus_topk, ("scaling_factor", "rounds_scores"), takes_correction_bias=True
    ),
    "sparsemixer": _RouterKind(topk.sparsemixer, ("jitter",)),
    "grouped_sigmoid_topk": _RouterKind(
        topk.grouped_sigmoid_topk,
        ("num_groups", "topk_groups", "renormalize", "scaling_factor", "epsilon", "logit_softcap", "rounds_scores"),
        takes_correction_bias=True,
        scored_experts=2,
    ),
    "grouped_softmax_topk": _RouterKind(
        topk.grouped_softmax_topk,
        ("num_groups", "topk_groups", "scaling_factor", "renormalize", "scored_experts", "rounds_scores"),
    ),
    "llama4_topk": _RouterKind(topk.llama4_topk, apply_router_weight_on_input=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How one model routes.

    Attributes:
        kind: Name of a routing function of `moereg.routing`.
        num_experts: Global number of routed experts.
        top_k: Experts for each token.
        renormalize: Whether the chosen weights are divided by their sum.
        num_groups: Groups of experts; 1 means no groups.
        topk_groups: Groups that a token may choose from.
        scaling_factor: Factor folded into the weights.
        epsilon: Added to the sum that sigmoid weights are divided by.
        logit_softcap: Cap of the logits of sigmoid scores; 0 for none.
        scored_experts: Best experts of a group whose softmax weights add up to the group's score.
        smallest_sum: Smallest sum that Ernie's weights are divided by.
        rounds_scores: Whether scores are computed in the logits' dtype, not in fp32; rounding may change the choice.
        jitter: Half of the distance within which `sparsemixer` counts logits as near.
        has_correction_bias: Whether `route` needs a bias [E] for the choice.
        has_expert_scale: Whether `route` needs a factor [E] of each expert's weight (Gemma 4).
        fp32_logits: Whether the model computes its logits in fp32 even where hidden states and router weight are
            16-bit. The caller computes the logits and therefore rounds them; rounded logits may choose other experts.
            A checkpoint's router weight then keeps 32 bits.

    Raises:
        UnknownNameError: `kind` is not known.
        ArgumentError: Sizes do not fit together, or an option is set that the kind would ignore.
    """

    kind: str
    num_experts: int
    top_k: int
    renormalize: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0
    epsilon: float = 1e-20
    logit_softcap: float = 0.0
    scored_experts: int = 1
    smallest_sum: float = 0.0
    jitter: float = 0.0
    rounds_scores: bool = False
    has_correction_bias: bool = False
    has_expert_scale: bool = False
    fp32_logits: bool = False

    def __post_init__(self) -> None:
        check_one_of("router kind", self.kind, tuple(_ROUTER_KINDS))
        check_count("num_experts", self.num_experts)
        for name in ("renormalize", "rounds_scores", "has_correction_bias", "has_expert_scale", "fp32_logits"):
            check_flag(name, getattr(self, name))
        for name in ("scaling_factor", "epsilon", "logit_softcap", "smallest_sum", "jitter"):
            check_number(name, getattr(self, name))
        check_count("scored_experts", self.scored_experts)
        topk.check_top_k(self.num_experts, self.top_k)
        kind = _ROUTER_KINDS[self.kind]
        scored_experts = kind.scored_experts or self.scored_experts
        topk.check_groups(self.num_experts, self.top_k, self.num_groups, self.topk_groups, scored_experts)
        # An option that is silently ignored would be wrong numbers.
        others = {name for each in _ROUTER_KINDS.values() for name in each.options} - {*kind.options}
        for field in dataclasses.fields(self):
            if field.name in others and getattr(self, field.name) != field.default:
                raise ArgumentError(
                    f"router kind {self.kind!r} does not use {field.name}, got {getattr(self, field.name)}; "
                    "leave it out"
                )
        if self.kind == "sparsemixer":
            topk.check_two_experts(self.top_k)
        if self.has_correction_bias and not kind.takes_correction_bias:
            raise ArgumentError(f"router kind {self.kind!r} takes no correction bias; leave has_correction_bias out")

    @property
    def apply_router_weight_on_input(self) -> bool:
        """Whether the weight multiplies the expert's input instead of its output."""
        return _ROUTER_KINDS[self.kind].apply_router_weight_on_input

    def route(
        self,
        router_logits: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
        expert_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts.

        Args:
            router_logits: [T,E], any floating dtype.
            correction_bias: [E]; given exactly where `has_correction_bias`.
            expert_scale: [E]; given exactly where `has_expert_scale`.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32.

        Raises:
            ArgumentError: The logits are not [T,E] for this spec's E, or bias or scale is missing or not expected.
        """
        check_instance("router_logits", router_logits, torch.Tensor, "pass scores of the router, [num_tokens, E]")
        if router_logits.dim() == 2 and router_logits.shape[1] != self.num_experts:
            raise ArgumentError(
                f"router_logits must have num_experts={self.num_experts} columns, got {router_logits.shape[1]}; "
                "pass the logits of all experts, not of one rank's"
            )
        for name, tensor in (("correction_bias", correction_bias), ("expert_scale", expert_scale)):
            if (tensor is not None) != (is_needed := getattr(self, f"has_{name}")):
                expected, found = ("[E]", "None") if is_needed else ("None", "a tensor")
                raise ArgumentError(
                    f"{name} must be {expected} where has_{name}={is_needed}, got {found}; pass this layer's "
                    "exactly where the model has one"
                )
        kind = _ROUTER_KINDS[self.kind]
        options: dict[str, Any] = {name: getattr(self, name) for name in kind.options}
        if kind.takes_correction_bias:
            options["correction_bias"] = correction_bias
        topk_weights, topk_ids = kind.route(router_logits, self.top_k, **options)
        return topk_weights if expert_scale is None else topk_weights * expert_scale.float()[topk_ids], topk_ids

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RouterSpec:
        """Reads a parsed Hugging Face `config.json`, whose `model_type` decides how the rest is read.

        Raises:
            UnknownModelError: The model type is missing or not known.
            CheckpointError: A size is missing, or the file asks for a routing that the model type does not define.
            ArgumentError: The sizes do not fit together.
        """
        return cls(**read_router(config))
