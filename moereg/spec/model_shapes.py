"""Sizes of real models' Mixture-of-Experts layers, with sources.

Sizes are those of the routed experts, before tensor or expert parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.errors import UnknownModelError, unknown_name_message


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEShape:
    """One model's Mixture-of-Experts layer.

    Attributes:
        name: Lower-case name for `--model` and `get_shape`.
        num_experts: Routed experts, E.
        hidden_size: H.
        intermediate_size: I, of one routed expert.
        top_k: Routed experts per token, K.
        activation: Name of the `Activation` with its standard scalars.
        has_bias: Whether the experts' two matrices have biases.
        apply_router_weight_on_input: Whether the router weight multiplies the expert's input.
        num_moe_layers: The model's layers with such experts, or None if the shape is not a whole model's.
        released_quant: Quant scheme of the experts in the release of that name.
        source: Source of the numbers.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: str = "silu"
    has_bias: bool = False
    apply_router_weight_on_input: bool = False
    num_moe_layers: int | None
    released_quant: str = "unquantized"
    source: str

    def problem_keywords(self) -> dict[str, Any]:
        """Fields of `MoEProblem` that a shape decides; the rest (dtype, quant, placement) is up to the caller."""
        others = ("name", "num_moe_layers", "released_quant", "source")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in others}


def get_shape(name: str) -> MoEShape:
    """The shape of a model, by a key of `MODEL_SHAPES` in any case.

    Raises:
        UnknownModelError: No such model; the message lists the known ones and the nearest.
    """
    shape = MODEL_SHAPES.get(name.lower()) if isinstance(name, str) else None
    if shape is None:
        raise UnknownModelError(unknown_name_message("model", name, MODEL_SHAPES))
    return shape


def _config_copy(model: str) -> str:
    return f"config.json of {model}, copied in github.com/ai-dynamo/aiconfigurator at 095f58a (model_configs)"


def _config_default(config_class: str, model: str) -> str:
    return f"defaults of transformers 5.23 {config_class}, which stand for {model}"


# By name: E, H, I, K, and layers with such experts. Unusual properties are in the table below.
_SIZES: Final[Mapping[str, tuple[int, int, int, int, int | None]]] = {
    "mixtral-8x7b": (8, 4096, 14336, 2, 32),
    "mixtral-8x22b": (8, 6144, 16384, 2, 56),
    "qwen1.5-moe-a2.7b": (60, 2048, 1408, 4, 24),
    "qwen2-57b-a14b": (64, 3584, 2560, 8, 28),
    "qwen3-30b-a3b": (128, 2048, 768, 8, 48),
    "qwen3-235b-a22b": (128, 4096, 1536, 8, 94),
    "qwen3-coder-480b-a35b": (160, 6144, 2560, 8, 62),
    "qwen3-next-80b-a3b": (512, 2048, 512, 10, 48),
    "qwen3.5-35b-a3b": (256, 2048, 512, 8, 40),
    "qwen3.5-397b-a17b": (512, 4096, 1024, 10, 60),
    # transformers' OlmoeConfig has a default of 2048, unlike the released models.
    "olmoe-1b-7b": (64, 2048, 1024, 8, 16),
    "deepseek-v2-lite": (64, 2048, 1408, 6, 26),
    "deepseek-v2": (160, 5120, 1536, 6, 59),
    "deepseek-v3": (256, 7168, 2048, 8, 58),
    "kimi-k2": (384, 7168, 2048, 8, 60),
    "gpt-oss-20b": (32, 2880, 2880, 4, 24),
    "gpt-oss-120b": (128, 2880, 2880, 4, 36),
    "glm-4.5-air": (128, 4096, 1408, 8, 45),
    "glm-4.5": (160, 5120, 1536, 8, 89),
    "glm-5": (256, 6144, 2048, 8, 75),
    "llama-4-scout": (16, 5120, 8192, 1, 48),
    "llama-4-maverick": (128, 5120, 8192, 1, 24),
    "minimax-m2": (256, 3072, 1536, 8, 62),
    "nemotron-3-nano": (128, 2688, 1856, 6, 23),
    "phi-3.5-moe": (16, 4096, 6400, 2, 32),
    "granite-3.0-1b-a400m": (32, 1024, 512, 8, 24),
    "granite-3.1-3b-a800m": (40, 1536, 512, 8, 32),
    "jamba-v0.1": (16, 4096, 14336, 2, 16),
    # Copies with 3584 took it from a class default, which would make a 42B model.
    "dbrx": (16, 6144, 10752, 4, 40),
    "sonic-120b": (256, 4096, 512, 16, None),
}

_DIFFERENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek-v3": {"released_quant": "fp8_block128"},
    "kimi-k2": {"released_quant": "fp8_block128"},
    "gpt-oss-20b": {"activation": "swigluoai", "has_bias": True, "released_quant": "mxfp4_w4a16"},
    "gpt-oss-120b": {"activation": "swigluoai", "has_bias": True, "released_quant": "mxfp4_w4a16"},
    "llama-4-scout": {"apply_router_weight_on_input": True},
    "llama-4-maverick": {"apply_router_weight_on_input": True},
    "minimax-m2": {"released_quant": "fp8_block128"},
    "nemotron-3-nano": {"activation": "relu2"},
}

_SOURCES: Final[Mapping[str, str]] = {
    "mixtral-8x7b": _config_copy("mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": _config_copy("mistralai/Mixtral-8x22B-v0.1"),
    "qwen1.5-moe-a2.7b": _config_default("Qwen2MoeConfig", "Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2-57b-a14b": "config.json quoted in github.com/NVIDIA/TensorRT-LLM at cb4c622, "
    "tests/unittest/_torch/modeling/test_modeling_qwen_moe.py",
    "qwen3-30b-a3b": _config_copy("Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": _config_copy("Qwen/Qwen3-235B-A22B"),
    "qwen3-coder-480b-a35b": _config_copy("Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    "qwen3-next-80b-a3b": _config_default("Qwen3NextConfig", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3.5-35b-a3b": _config_copy("Qwen/Qwen3.5-35B-A3B"),
    "qwen3.5-397b-a17b": _config_copy("Qwen/Qwen3.5-397B-A17B"),
    "olmoe-1b-7b": "config.json of allenai/OLMoE-1B-7B-0924 as quoted in public code; 6.4e9 routed parameters "
    "fit the 7B",
    "deepseek-v2-lite": "github.com/AMD-AGI/Primus at fd1eeab, primus/configs/models/megatron/deepseek_v2_lite.yaml; "
    "top_k from config.json of deepseek-ai/DeepSeek-V2-Lite-Chat as quoted in public code",
    "deepseek-v2": "github.com/AMD-AGI/Primus at fd1eeab, primus/configs/models/megatron/deepseek_v2.yaml; top_k from "
    "config.json of deepseek-ai/DeepSeek-V2 as quoted in public code",
    "deepseek-v3": _config_copy("deepseek-ai/DeepSeek-V3"),
    "kimi-k2": _config_copy("moonshotai/Kimi-K2-Instruct"),
    "gpt-oss-20b": _config_copy("openai/gpt-oss-20b") + "; activation and biases from transformers 5.23 GptOssExperts",
    "gpt-oss-120b": _config_copy("openai/gpt-oss-120b")
    + "; activation and biases from transformers 5.23 GptOssExperts",
    "glm-4.5-air": _config_default("Glm4MoeConfig", "zai-org/GLM-4.5-Air"),
    "glm-4.5": "github.com/zyzshishui/slime at ffec534, scripts/models/glm4.5-355B-A32B.sh",
    "glm-5": _config_copy("zai-org/GLM-5"),
    "llama-4-scout": _config_copy("meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "llama-4-maverick": _config_copy("meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    "minimax-m2": _config_default("MiniMaxM2Config", "MiniMaxAI/MiniMax-M2") + "; equal to the config.json of M2.5",
    "nemotron-3-nano": _config_copy("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "phi-3.5-moe": _config_default("PhimoeConfig", "microsoft/Phi-3.5-MoE-instruct"),
    "granite-3.0-1b-a400m": "config.json of ibm-granite/granite-3.0-1b-a400m-instruct as quoted in public code; "
    "1.2e9 routed parameters fit the 1.3B",
    "granite-3.1-3b-a800m": "config.json of ibm-granite/granite-3.1-3b-a800m-instruct as quoted in public code; "
    "3.0e9 routed parameters fit the 3.3B",
    "jamba-v0.1": _config_default("JambaConfig", "ai21labs/Jamba-v0.1"),
    "dbrx": "config.json of databricks/dbrx-instruct as quoted in public code; 127e9 routed parameters fit the 132B",
    "sonic-120b": "synthetic: the 120B row of figure 14 in the SonicMoE paper, arXiv 2512.14080",
}

MODEL_SHAPES: Final[Mapping[str, MoEShape]] = MappingProxyType(
    {
        name: MoEShape(
            name=name,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            num_moe_layers=num_moe_layers,
            source=_SOURCES[name],
            **_DIFFERENT.get(name, {}),
        )
        for name, (num_experts, hidden_size, intermediate_size, top_k, num_moe_layers) in _SIZES.items()
    }
)
"""All shapes by name."""
