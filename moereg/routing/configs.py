"""Readers of Hugging Face's `config.json`, one per kind of router: the keywords of a model type's `RouterSpec`.

An absent entry has the default of its own model type, as in transformers' config class. A setting of unknown meaning is
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from moereg.arguments import check_mapping
from moereg.errors import UnknownModelError, shown
from moereg.routing.config_entries import MOST_EXPERTS, read_choice, read_count, read_flag, read_number, read_object

_Keywords = dict[str, Any]
_Reader = Callable[[Mapping[str, Any]], _Keywords]

_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")

# Publishers' names of the function from logits to scores.
_SCORING: Final = (
    "scoring_func",
    "score_func",
    "score_function",
    "moe_router_activation_func",
    "moe_router_activation",
)
# Publishers' names of the flag that divides the chosen weights by their sum.
_RENORMALIZE: Final = ("norm_topk_prob", "moe_renormalize", "route_norm")
_GROUPS: Final = ("n_group", "num_expert_group", "num_expert_groups", "topk_group", "num_limited_groups")
_SCALINGS: Final = (
    "routed_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_scaling_factor",
    "router_scaling_factor",
    "route_scale",
)
_RARE: Final = ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping", "zero_expert_num")
"""Settings that one model family has."""
# Settings of some routers, with the values that change nothing for model types that do not read them: some publishers
# write them for routers without such a setting.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(_GROUPS, (1, 0, False)),
    **dict.fromkeys(_SCALINGS, (1.0, 1, False)),
    "moe_apply_router_weight_on_input": (False,),
    "moe_router_logit_softcapping": (0.0, 0),
    "zero_expert_num": (0,),
}


def read_router(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `RouterSpec` that a parsed `config.json` gives; errors as in `RouterSpec.from_config`."""
    config = language_config(check_mapping("config", config))
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise UnknownModelError(unknown_model_message(model_type))
    return _READERS[model_type](config)


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the language model; multimodal models nest it."""
    for key in ("thinker_config", "llm_config", "text_config"):
        nested = config.get(key)
        config = nested if isinstance(nested, dict) else config
    return config


def _require_choice(config: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any) -> Any:
    """Reads an optional entry and refuses values whose meaning is not defined for the model type; see `read_choice`."""
    cure = "take it out of the config if the model ignores it, or build the RouterSpec by hand if it really routes so"
    return read_choice(config, name, choices, default, cure=cure)


def _require_scoring(config: Mapping[str, Any], *choices: str) -> None:
    """Refuses other functions from logits to scores, by every name that publishers have for the entry."""
    for name in _SCORING:
        _require_choice(config, name, choices, choices[0])


def _require_nothing_else(
    config: Mapping[str, Any],
    *,
    scoring: str | None = None,
    method: str = "greedy",
    renormalizes: bool | None = None,
    reads: Collection[str] = (),
) -> None:
    """Refuses settings of other model types' routers, except values that say what this one does anyway.

    `scoring` and `method` are publishers' names of the scores and the selection; the reader handles itself which entry
    it `reads`, and what is None.
    """
    if scoring is not None:
        _require_scoring(config, scoring)
        _require_choice(config, "expert_selection_fn", (scoring,), scoring)
    _require_choice(config, "topk_method", (method,), method)
    if renormalizes is not None:
        for name in _RENORMALIZE:
            _require_choice(config, name, (renormalizes,), renormalizes)
    _require_neutral(config, *(name for name in _NEUTRAL if name not in reads))


def _require_neutral(config: Mapping[str, Any], *names: str) -> None:
    """Refuses settings of `_NEUTRAL` whose values change something."""
    for name in names:
        _require_choice(config, name, _NEUTRAL[name], _NEUTRAL[name][0])


def _read_sizes(config: Mapping[str, Any]) -> _Keywords:
    return {"num_experts": _read_experts(config, _NUM_EXPERTS), "top_k": _read_experts(config, _TOP_K)}


def _read_experts(config: Mapping[str, Any], names: Sequence[str]) -> int:
    # An error about an absent entry names only the usual spelling.
    found = [name for name in names if config.get(name) is not None]
    return read_count(_alike(config, names), *(found or names[:1]), maximum=MOST_EXPERTS)


def _alike(config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Replaces a list that gives every layer the same count by that count, as for Hunyuan's configs."""
    alike = {
        name: value[0]
        for name in names
        if isinstance(value := config.get(name), list) and value and all(item == value[0] for item in value)
    }
    return {**config, **alike}


def _read_groups(config: Mapping[str, Any], groups: tuple[int, int] | None) -> _Keywords:
    """Reads the number of groups and how many of them a token may choose from; `groups` are defaults, None for none."""
    num_groups, topk_groups = (None, None) if groups is None else groups
    return {
        "num_groups": read_count(config, "n_group", "num_expert_group", default=num_groups, maximum=MOST_EXPERTS),
        "topk_groups": read_count(config, "topk_group", default=topk_groups, maximum=MOST_EXPERTS),
    }


def _softmax_topk(renormalize: bool | None = None, default: bool = False, **fields: Any) -> _Reader:
    """Reader for softmax over all experts, then the best.

    If `renormalize` is None, `norm_topk_prob` decides, whose value if absent is the default.
    """

    def read(config: Mapping[str, Any]) -> _Keywords:
        if renormalize is None:
            normalizes = read_flag(config, "norm_topk_prob", default)
        else:
            # Some publishers write what the model does anyway; the contrary would be another model.
            normalizes = _require_choice(config, "norm_topk_prob", (renormalize,), renormalize)
        _require_nothing_else(config, scoring="softmax", renormalizes=normalizes)
        return dict(kind="softmax_topk", renormalize=normalizes, **fields, **_read_sizes(config))

    return read


def _sigmoid_topk(
    *,
    scaling: str = "routed_scaling_factor",
    scaling_factor: float = 1.0,
    renormalize: bool = True,
    reads_renormalize: bool = True,
    groups: tuple[int, int] | None = (1, 1),
    epsilon: float = 1e-20,
    fp32_logits: bool = True,
    scorings: tuple[str, ...] = ("sigmoid",),
) -> _Reader:
    """Reader for sigmoid scores, chosen with a bias, as DeepSeek-V3 introduced them.

    The entry `scaling` of the scaling factor and those of the flag and of groups have these defaults; `groups` is None
    if the model type has none. Unless it `reads_renormalize`, the contrary of `renormalize` is refused. `scorings` are
    accepted names of the scores.
    """

    def read(config: Mapping[str, Any]) -> _Keywords:
        _require_scoring(config, *scorings)
        _require_choice(config, "topk_method", ("noaux_tc",), "noaux_tc")
        choices = (True, False) if reads_renormalize else (renormalize,)
        normalizes = renormalize
        for name in _RENORMALIZE:
            normalizes = _require_choice(config, name, choices, normalizes)
        if groups is None:
            for name in _GROUPS:
                _require_choice(config, name, (1, 0), 1)
        _require_neutral(config, *_RARE)
        factor = read_number(config, scaling, default=scaling_factor)
        for name in _SCALINGS:
            if name != scaling:
                _require_choice(config, name, (*_NEUTRAL[name], factor), 1.0)
        return dict(
            kind="grouped_sigmoid_topk",
            renormalize=normalizes,
            scaling_factor=factor,
            epsilon=epsilon,
            has_correction_bias=True,
            fp32_logits=fp32_logits,
            **({} if groups is None else _read_groups(config, groups)),
            **_read_sizes(config),
        )

    return read


def _router(
    kind: str, *, scoring: str, method: str = "greedy", renormalizes: bool | None = None, **fields: Any
) -> _Reader:
    """Reader for a router that has no other settings; fields are a function of the config if the file decides."""

    def read(config: Mapping[str, Any]) -> _Keywords:
        _require_nothing_else(config, scoring=scoring, method=method, renormalizes=renormalizes)
        said = {name: value(config) if callable(value) else value for name, value in fields.items()}
        return dict(kind=kind, **said, **_read_sizes(config))

    return read


def _deepseek_v2_router(config: Mapping[str, Any]) -> _Keywords:
    _require_scoring(config, "softmax")
    _require_neutral(config, *_RARE)
    # Published files all say false; implementations disagree on what true would mean together with the scaling factor.
    _require_choice(config, "norm_topk_prob", (False,), False)
    method = _require_choice(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # Files with greedy may carry group counts that the model never reads.
    is_grouped = method == "group_limited_greedy"
    return dict(
        kind="grouped_softmax_topk",
        scaling_factor=read_number(config, "routed_scaling_factor", default=1.0),
        fp32_logits=True,
        **(_read_groups(config, None) if is_grouped else {}),
        **_read_sizes(config),
    )


def _mistral_router(config: Mapping[str, Any]) -> _Keywords:
    # Mistral Large 4 always normalizes, with a router in fp32, and its config class has no flag for it.
    _require_scoring(config, "softmax")
    _require_neutral(config, *_RARE)
    is_large = config.get("model_type") == "mistral_large4_text"
    choices = (True,) if is_large else (True, False)
    return dict(
        kind="grouped_softmax_topk",
        renormalize=_require_choice(config, "norm_topk_prob", choices, True),
        scored_experts=2,
        scaling_factor=read_number(config, "routed_scaling_factor", default=1.0),
        rounds_scores=not is_large,
        fp32_logits=is_large,
        **_read_groups(config, (1, 1)),
        **_read_sizes(config),
    )


def _cohere2_router(config: Mapping[str, Any]) -> _Keywords:
    scoring = _require_choice(config, "expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    _require_nothing_else(config, scoring=scoring)
    if scoring == "softmax":
        return dict(kind="topk_softmax", **_read_sizes(config))
    return dict(kind="topk_sigmoid", renormalize=read_flag(config, "norm_topk_prob", True), **_read_sizes(config))


def _laguna_router(config: Mapping[str, Any]) -> _Keywords:
    _require_choice(config, "moe_apply_router_weight_on_input", (False,), False)
    read = _MINIMAX(scaling="moe_routed_scaling_factor")
    cap = "moe_router_logit_softcapping"
    return dict(read({**config, cap: None}), logit_softcap=max(read_number(config, cap, default=0.0), 0.0))


def _lfm2_router(config: Mapping[str, Any]) -> _Keywords:
    read = _sigmoid_topk(groups=None, epsilon=1e-6, fp32_logits=False)
    return dict(read(config), has_correction_bias=read_flag(config, "use_expert_bias", True), rounds_scores=True)


def _deepseek_v4_router(config: Mapping[str, Any]) -> _Keywords:
    _require_choice(config, "norm_topk_prob", (True,), True)
    if _require_choice(config, "scoring_func", ("sqrtsoftplus", "sigmoid"), "sqrtsoftplus") == "sigmoid":
        read = _sigmoid_topk(scaling_factor=1.5, reads_renormalize=False, groups=None, fp32_logits=False)
        return dict(read(config), rounds_scores=True)
    _require_nothing_else(config, scoring="sqrtsoftplus", method="noaux_tc", reads=("routed_scaling_factor",))
    return dict(
        kind="sqrtsoftplus_topk",
        scaling_factor=read_number(config, "routed_scaling_factor", default=1.5),
        rounds_scores=True,
        has_correction_bias=True,
        **_read_sizes(config),
    )


def _dbrx_router(config: Mapping[str, Any]) -> _Keywords:
    ffn = {"model_type": "dbrx", **read_object(config, "ffn_config")}
    for entries in (config, ffn):
        _require_nothing_else(entries, scoring="softmax")
    # The norm that weights are divided by: weights are positive, so the 1-norm is their sum.
    norm = ffn.get("moe_normalize_expert_weights", 1.0)
    if norm is not None:
        _require_choice(ffn, "moe_normalize_expert_weights", (1.0, 1), 1.0)
    return dict(kind="softmax_topk", renormalize=norm is not None, rounds_scores=True, **_read_sizes(ffn))


_MINIMAX: Final = functools.partial(_sigmoid_topk, reads_renormalize=False, groups=None, epsilon=0.0, fp32_logits=False)

_READERS_OF: Final[Mapping[str, _Reader]] = {
    "flex_olmo olmoe qwen2_moe qwen3_moe": _softmax_topk(),
    "mellum qwen3_next qwen3_omni_moe_text qwen4_exp_text": _softmax_topk(default=True),
    "minimax mixtral qwen3_5_moe_text qwen3_vl_moe_text": _softmax_topk(True),
    "jamba": _softmax_topk(False),
    "lara_mini": _softmax_topk(default=True, fp32_logits=True),
    "hunyuan_v1_moe": _softmax_topk(True, fp32_logits=True),
    "diffusion_gemma_text gemma4_text": _softmax_topk(True, fp32_logits=True, has_expert_scale=True),
    "dbrx": _dbrx_router,
    "aria_text gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared": _router(
        "topk_softmax", scoring="softmax", renormalizes=True
    ),
    "openai_privacy_filter": _router("topk_softmax", scoring="softmax", renormalizes=True, fp32_logits=True),
    "cohere2_moe": _cohere2_router,
    "deepseek_ocr2_text deepseek_v2 unlimited_ocr_text": _deepseek_v2_router,
    "mistral4 mistral_large4_text": _mistral_router,
    # Kimi-K2 is DeepSeek-V3 under its publisher's own name.
    "axk1 bailing_hybrid beam deepseek_v3 deepseek_v32 kimi_k2": _sigmoid_topk(scaling_factor=2.5, groups=(8, 4)),
    # With groups, experts of other groups would score 0 and beat negative biased scores; no released model has groups.
    "axk2": _sigmoid_topk(scaling_factor=2.5, groups=None),
    "deepseek_v4": _deepseek_v4_router,
    "dots3_note dots3_note_text glm4_moe glm4v_moe_text mimo_v2_flash nemotron_h solar_open": _sigmoid_topk(),
    # Published files say noaux_tc where others say how scores are made.
    "dots1": _sigmoid_topk(renormalize=False, scorings=("sigmoid", "noaux_tc")),
    "glm4_moe_lite": _sigmoid_topk(scaling_factor=1.8),
    "kimi_linear": _sigmoid_topk(scaling_factor=2.446),
    "exaone_moe glm5_next glm5_next_text glm_moe_dsa sarvam_mla sarvam_moe": _sigmoid_topk(scaling_factor=2.5),
    "hy_v3": _sigmoid_topk(scaling="router_scaling_factor", scaling_factor=2.826, reads_renormalize=False, groups=None),
    "hy_v4 hy_v4_vl_text": _sigmoid_topk(scaling_factor=2.827),
    "afmoe": _sigmoid_topk(scaling="route_scale", reads_renormalize=False, groups=None, fp32_logits=False),
    "minimax_m2": _MINIMAX(),
    "minimax_m3_vl_text": _MINIMAX(scaling_factor=2.0),
    "step3p5": _MINIMAX(scaling="moe_router_scaling_factor"),
    "laguna": _laguna_router,
    "inkling2_text": _sigmoid_topk(scaling="route_scale", scaling_factor=8.0, reads_renormalize=False, groups=None),
    "lfm2_moe": _lfm2_router,
    "llama4_text": _router("llama4_topk", scoring="sigmoid", renormalizes=False),
    "flint": _router(
        "topk_sigmoid",
        scoring="sigmoid",
        renormalize=lambda config: read_flag(config, "norm_topk_prob", True),
        fp32_logits=True,
    ),
    "kolibri1": _router(
        "topk_sigmoid",
        scoring="sigmoid",
        method="noaux_tc",
        renormalize=lambda config: read_flag(config, "norm_topk_prob"),
        has_correction_bias=True,
        fp32_logits=True,
    ),
    "ernie4_5_moe": _router(
        "biased_softmax_topk",
        scoring="softmax",
        method="noaux_tc",
        renormalizes=True,
        smallest_sum=lambda config: read_number(config, "moe_norm_min", default=1e-12),
        has_correction_bias=True,
        fp32_logits=True,
    ),
    "phimoe": _router(
        "sparsemixer",
        scoring="softmax",
        renormalizes=False,
        jitter=lambda config: read_number(config, "router_jitter_noise", default=0.01),
    ),
}
"""By the model types that route alike: those of a row have one reader."""

_READERS: Final = {model_type: reader for names, reader in _READERS_OF.items() for model_type in names.split()}

ROUTED_MODEL_TYPES: Final = tuple(sorted(_READERS))
"""Model types whose configs are read."""


BY_HAND: Final = (
    "give moereg.make_kernel your own moereg.ExpertWeights, and its kernel the model's routing "
    "(docs/checkpoints.md shows how)"
)

_REFUSED: Final = {
    "doge": "its experts are single rows that a product of keys retrieves, not matrices",
    "ernie4_5_vl_moe ernie4_5_vl_moe_text": (
        "each layer has two sets of experts, for text and for images, and the kind of a token decides"
    ),
    "inkling_mm_model inkling_text": "its routing weights are normalized together with those of its shared experts",
    "inkling2_loop inkling2_loop_text": "the transformers that moereg is tested with has no such model to compare with",
    "jetmoe": "a bias is added to the sum of its experts, and its attention has experts too",
    "longcat_flash": "its router also chooses experts without weights, which return their input",
    "muse_spark muse_spark_text": "its experts are between two projections, and each ends with a norm",
    "nllb-moe switch_transformers": "its experts take a limited number of tokens and drop the rest",
    "zaya": "its router is an MLP that also reads the router's state of the layer before",
}
REFUSED_MODEL_TYPES: Final = {name: reason for names, reason in _REFUSED.items() for name in names.split()}
"""Model types with routed experts that are refused, each with its reason."""


def unknown_model_message(model_type: object) -> str:
    """The error message, one line, for a model type that is not read.

    No other model type is suggested: two that store their experts alike may route or compute otherwise, and reading
    one as the other gives wrong numbers without an error.
    """
    if isinstance(model_type, str) and model_type in REFUSED_MODEL_TYPES:
        return f"model type {model_type!r} is not read: {REFUSED_MODEL_TYPES[model_type]}; {BY_HAND}"
    return (
        f"unknown model type {shown(model_type)}; do not put another type's name into config.json, since it would be "
        f"read with that type's routing and activation: {BY_HAND}"
    )
