"""Model shapes: lookup, sizes against transformers' defaults and against the models' parameter counts."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)

from moereg.errors import MoeregError, UnknownModelError
from moereg.spec.model_shapes import MODEL_SHAPES, MoEShape, get_shape

# Billions of parameters in the model's own name or model card, all of its layers included.
PUBLISHED_PARAMETERS = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-coder-480b-a35b": 480,
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-35b-a3b": 35,
    "qwen3.5-397b-a17b": 397,
    "olmoe-1b-7b": 6.9,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "glm-4.5-air": 106,
    "glm-4.5": 355,
    "glm-5": 744,
    "llama-4-scout": 109,
    "llama-4-maverick": 400,
    "minimax-m2": 230,
    "nemotron-3-nano": 31.6,
    "phi-3.5-moe": 41.9,
    "granite-3.0-1b-a400m": 1.33,
    "granite-3.1-3b-a800m": 3.3,
    "jamba-v0.1": 51.6,
    "dbrx": 132,
}

# Config classes whose defaults are a released model: intermediate size attribute, number of experts attribute.
CONFIG_DEFAULTS = [
    ("mixtral-8x7b", MixtralConfig, "intermediate_size", "num_local_experts"),
    ("qwen1.5-moe-a2.7b", Qwen2MoeConfig, "moe_intermediate_size", "num_experts"),
    ("qwen3-next-80b-a3b", Qwen3NextConfig, "moe_intermediate_size", "num_experts"),
    ("deepseek-v3", DeepseekV3Config, "moe_intermediate_size", "n_routed_experts"),
    ("gpt-oss-120b", GptOssConfig, "intermediate_size", "num_local_experts"),
    ("glm-4.5-air", Glm4MoeConfig, "moe_intermediate_size", "n_routed_experts"),
    ("llama-4-scout", Llama4TextConfig, "intermediate_size", "num_local_experts"),
    ("minimax-m2", MiniMaxM2Config, "intermediate_size", "num_local_experts"),
    ("phi-3.5-moe", PhimoeConfig, "intermediate_size", "num_local_experts"),
    ("jamba-v0.1", JambaConfig, "intermediate_size", "num_experts"),
]


def test_names_are_unique_and_every_real_model_has_a_parameter_count() -> None:
    assert set(PUBLISHED_PARAMETERS) == {name for name, shape in MODEL_SHAPES.items() if shape.num_moe_layers}


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_routed_experts_make_up_most_of_the_published_size(name: str) -> None:
    shape = MODEL_SHAPES[name]
    matrices = 2 if shape.activation == "relu2" else 3
    assert shape.num_moe_layers is not None
    elements = matrices * shape.num_experts * shape.hidden_size * shape.intermediate_size * shape.num_moe_layers
    assert 0.84 < elements / (PUBLISHED_PARAMETERS[name] * 1e9) < 1.0


@pytest.mark.parametrize(("name", "config_class", "intermediate", "experts"), CONFIG_DEFAULTS)
def test_equal_to_transformers_defaults(name: str, config_class: type, intermediate: str, experts: str) -> None:
    config, shape = config_class(), get_shape(name)
    assert (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k) == (
        config.hidden_size,
        getattr(config, intermediate),
        getattr(config, experts),
        config.num_experts_per_tok,
    )
    assert shape.num_moe_layers is not None
    assert shape.num_moe_layers <= config.num_hidden_layers


def test_lookup_ignores_case_and_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    assert get_shape("Qwen3-30B-A3B") is MODEL_SHAPES["qwen3-30b-a3b"]
    with pytest.raises(UnknownModelError, match=r"'qwen3-30b'.*did you mean 'qwen3-30b-a3b'.*mixtral-8x7b") as caught:
        get_shape("qwen3-30b")
    assert isinstance(caught.value, MoeregError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-oss-20b", {"num_experts": 32, "activation": "swigluoai", "has_bias": True}),
        ("llama-4-scout", {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": False}),
        ("nemotron-3-nano", {"hidden_size": 2688, "intermediate_size": 1856, "top_k": 6, "activation": "relu2"}),
    ],
)
def test_problem_keywords(name: str, expected: dict[str, object]) -> None:
    keywords = get_shape(name).problem_keywords()
    assert expected.items() <= keywords.items()
    facts = {field.name for field in dataclasses.fields(MoEShape)} - {
        "name",
        "num_moe_layers",
        "released_quant",
        "source",
    }
    assert set(keywords) == facts
