"""Readers of Hugging Face's `config.json`, one per family of models: the keywords of its `RouterSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from moereg.arguments import check_mapping
from moereg.config_entries import MOST_EXPERTS, read_choice, read_count, read_flag, read_number, read_object
from moereg.errors import UnknownModelError, unknown_name_message

__all__ = ["read_router"]

_Keywords = dict[str, Any]


def read_router(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads how a model routes.

    Args:
        config: The parsed `config.json`; its `model_type` decides how the rest is read.

    Returns:
        Keywords of `RouterSpec`.

    Raises:
        UnknownModelError: The model type is missing or not known.
        CheckpointError: A size is missing, or the file asks for a routing that the model type does not define.
    """
    model_type = check_mapping("config", config).get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise UnknownModelError(unknown_name_message("model type", model_type, _READERS))
    return _READERS[model_type](config)


def _read_sizes(config: Mapping[str, Any]) -> _Keywords:
    return {
        "num_experts": read_count(config, "num_experts", "num_local_experts", "n_routed_experts", maximum=MOST_EXPERTS),
        "top_k": read_count(config, "num_experts_per_tok", maximum=MOST_EXPERTS),
    }


def _read_groups(config: Mapping[str, Any]) -> _Keywords:
    return {
        "num_groups": read_count(config, "n_group", maximum=MOST_EXPERTS),
        "topk_groups": read_count(config, "topk_group", maximum=MOST_EXPERTS),
    }


def _require_choice(config: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any) -> Any:
    """Reads an optional entry and refuses values whose meaning is not defined for the model type."""
    return read_choice(
        config, name, choices, default, cure="build the RouterSpec by hand if the model really routes so"
    )


def _mixtral_router(config: Mapping[str, Any]) -> _Keywords:
    return dict(kind="softmax_topk", renormalize=True, **_read_sizes(config))


def _norm_topk_prob_router(config: Mapping[str, Any]) -> _Keywords:
    # Absent means false, as in transformers' configs of these three families.
    return dict(kind="softmax_topk", renormalize=read_flag(config, "norm_topk_prob"), **_read_sizes(config))


def _gpt_oss_router(config: Mapping[str, Any]) -> _Keywords:
    return dict(kind="topk_softmax", **_read_sizes(config))


def _deepseek_v2_router(config: Mapping[str, Any]) -> _Keywords:
    _require_choice(config, "scoring_func", ("softmax",), "softmax")
    # Published files all say false; implementations disagree on what true would mean together with the scaling factor.
    _require_choice(config, "norm_topk_prob", (False,), False)
    method = _require_choice(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # Files with greedy may carry group counts that the model never reads.
    is_grouped = method == "group_limited_greedy"
    return dict(
        kind="grouped_softmax_topk",
        scaling_factor=read_number(config, "routed_scaling_factor"),
        fp32_logits=True,
        **(_read_groups(config) if is_grouped else {}),
        **_read_sizes(config),
    )


def _deepseek_v3_router(config: Mapping[str, Any]) -> _Keywords:
    _require_choice(config, "scoring_func", ("sigmoid",), "sigmoid")
    _require_choice(config, "topk_method", ("noaux_tc",), "noaux_tc")
    return dict(
        kind="grouped_sigmoid_topk",
        renormalize=_require_choice(config, "norm_topk_prob", (True, False), True),
        scaling_factor=read_number(config, "routed_scaling_factor"),
        has_correction_bias=True,
        fp32_logits=True,
        **_read_groups(config),
        **_read_sizes(config),
    )


def _llama4_text_router(config: Mapping[str, Any]) -> _Keywords:
    return dict(kind="llama4_topk", **_read_sizes(config))


def _llama4_router(config: Mapping[str, Any]) -> _Keywords:
    return _llama4_text_router(read_object(config, "text_config"))


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], _Keywords]]] = {
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
