"""Sizes of the Mixture-of-Experts layers of real models, each with where it was read.

Sizes are the whole model's, before tensor or expert parallelism, and of the routed experts only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.errors import UnknownModelError, unknown_name_message

__all__ = ["MODEL_SHAPES", "MoEShape", "get_shape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEShape:
    """One model's Mixture-of-Experts layer.

    Attributes:
        name: Lower case, as `--model` and `get_shape` take it.
        num_experts: Routed experts, E.
        hidden_size: H.
        intermediate_size: I, of one routed expert.
        top_k: Routed experts for each token, K.
        activation: Name of the `Activation` with its standard scalars.
        has_bias: Whether the experts' two matrices have biases.
        apply_router_weight_on_input: Whether the router weight multiplies the expert's input.
        num_moe_layers: Layers of the model that hold such experts, or None where the shape is no whole model.
        released_quant: Quant scheme of the experts in the model's own release; its name has no other.
        source: Where the numbers were read.
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
        """The keywords of `MoEProblem` that a shape decides; the rest (dtype, quant, placement) is the caller's."""
        return {
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "top_k": self.top_k,
            "activation": self.activation,
            "has_bias": self.has_bias,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
        }


def get_shape(name: str) -> MoEShape:
    """Looks a model up.

    Args:
        name: A key of `MODEL_SHAPES` or a former one, in any case.

    Returns:
        The shape.

    Raises:
        UnknownModelError: No such model; the message lists the known ones and the nearest.
    """
    known = _FORMER_NAMES.get(name.lower(), name.lower()) if isinstance(name, str) else None
    shape = MODEL_SHAPES.get(known) if known else None
    if shape is None:
        raise UnknownModelError(unknown_name_message("model", name, MODEL_SHAPES))
    return shape


def _config_copy(model: str) -> str:
    return f"config.json of {model}, copied in github.com/ai-dynamo/aiconfigurator at 095f58a (model_configs)"


def _config_default(config_class: str, model: str) -> str:
    return f"defaults of transformers 5.23 {config_class}, which stand for {model}"


_SHAPES: Final = (
    MoEShape(
        name="mixtral-8x7b",
        num_experts=8,
        hidden_size=4096,
        intermediate_size=14336,
        top_k=2,
        num_moe_layers=32,
        source=_config_copy("mistralai/Mixtral-8x7B-v0.1"),
    ),
    MoEShape(
        name="mixtral-8x22b",
        num_experts=8,
        hidden_size=6144,
        intermediate_size=16384,
        top_k=2,
        num_moe_layers=56,
        source=_config_copy("mistralai/Mixtral-8x22B-v0.1"),
    ),
    MoEShape(
        name="qwen1.5-moe-a2.7b",
        num_experts=60,
        hidden_size=2048,
        intermediate_size=1408,
        top_k=4,
        num_moe_layers=24,
        source=_config_default("Qwen2MoeConfig", "Qwen/Qwen1.5-MoE-A2.7B"),
    ),
    MoEShape(
        name="qwen2-57b-a14b",
        num_experts=64,
        hidden_size=3584,
        intermediate_size=2560,
        top_k=8,
        num_moe_layers=28,
        source="config.json quoted in github.com/NVIDIA/TensorRT-LLM at cb4c622, "
        "tests/unittest/_torch/modeling/test_modeling_qwen_moe.py",
    ),
    MoEShape(
        name="qwen3-30b-a3b",
        num_experts=128,
        hidden_size=2048,
        intermediate_size=768,
        top_k=8,
        num_moe_layers=48,
        source=_config_copy("Qwen/Qwen3-30B-A3B"),
    ),
    MoEShape(
        name="qwen3-235b-a22b",
        num_experts=128,
        hidden_size=4096,
        intermediate_size=1536,
        top_k=8,
        num_moe_layers=94,
        source=_config_copy("Qwen/Qwen3-235B-A22B"),
    ),
    MoEShape(
        name="qwen3-coder-480b-a35b",
        num_experts=160,
        hidden_size=6144,
        intermediate_size=2560,
        top_k=8,
        num_moe_layers=62,
        source=_config_copy("Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    ),
    MoEShape(
        name="qwen3-next-80b-a3b",
        num_experts=512,
        hidden_size=2048,
        intermediate_size=512,
        top_k=10,
        num_moe_layers=48,
        source=_config_default("Qwen3NextConfig", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    ),
    MoEShape(
        name="qwen3.5-35b-a3b",
        num_experts=256,
        hidden_size=2048,
        intermediate_size=512,
        top_k=8,
        num_moe_layers=40,
        source=_config_copy("Qwen/Qwen3.5-35B-A3B"),
    ),
    MoEShape(
        name="qwen3.5-397b-a17b",
        num_experts=512,
        hidden_size=4096,
        intermediate_size=1024,
        top_k=10,
        num_moe_layers=60,
        source=_config_copy("Qwen/Qwen3.5-397B-A17B"),
    ),
    MoEShape(
        name="olmoe-1b-7b",
        num_experts=64,
        hidden_size=2048,
        intermediate_size=1024,
        top_k=8,
        num_moe_layers=16,
        # The class default of transformers' OlmoeConfig says 2048; the released models do not.
        source="config.json of allenai/OLMoE-1B-7B-0924 as quoted in public code; 6.4e9 routed parameters fit the 7B",
    ),
    MoEShape(
        name="deepseek-v2-lite",
        num_experts=64,
        hidden_size=2048,
        intermediate_size=1408,
        top_k=6,
        num_moe_layers=26,
        source="github.com/AMD-AGI/Primus at fd1eeab, primus/configs/models/megatron/deepseek_v2_lite.yaml; top_k from "
        "config.json of deepseek-ai/DeepSeek-V2-Lite-Chat as quoted in public code",
    ),
    MoEShape(
        name="deepseek-v2",
        num_experts=160,
        hidden_size=5120,
        intermediate_size=1536,
        top_k=6,
        num_moe_layers=59,
        source="github.com/AMD-AGI/Primus at fd1eeab, primus/configs/models/megatron/deepseek_v2.yaml; top_k from "
        "config.json of deepseek-ai/DeepSeek-V2 as quoted in public code",
    ),
    MoEShape(
        name="deepseek-v3",
        num_experts=256,
        hidden_size=7168,
        intermediate_size=2048,
        top_k=8,
        num_moe_layers=58,
        released_quant="fp8_block128",
        source=_config_copy("deepseek-ai/DeepSeek-V3"),
    ),
    MoEShape(
        name="kimi-k2",
        num_experts=384,
        hidden_size=7168,
        intermediate_size=2048,
        top_k=8,
        num_moe_layers=60,
        released_quant="fp8_block128",
        source=_config_copy("moonshotai/Kimi-K2-Instruct"),
    ),
    MoEShape(
        name="gpt-oss-20b",
        num_experts=32,
        hidden_size=2880,
        intermediate_size=2880,
        top_k=4,
        activation="swigluoai",
        has_bias=True,
        num_moe_layers=24,
        released_quant="mxfp4_w4a16",
        source=_config_copy("openai/gpt-oss-20b") + "; activation and biases from transformers 5.23 GptOssExperts",
    ),
    MoEShape(
        name="gpt-oss-120b",
        num_experts=128,
        hidden_size=2880,
        intermediate_size=2880,
        top_k=4,
        activation="swigluoai",
        has_bias=True,
        num_moe_layers=36,
        released_quant="mxfp4_w4a16",
        source=_config_copy("openai/gpt-oss-120b") + "; activation and biases from transformers 5.23 GptOssExperts",
    ),
    MoEShape(
        name="glm-4.5-air",
        num_experts=128,
        hidden_size=4096,
        intermediate_size=1408,
        top_k=8,
        num_moe_layers=45,
        source=_config_default("Glm4MoeConfig", "zai-org/GLM-4.5-Air"),
    ),
    MoEShape(
        name="glm-4.5",
        num_experts=160,
        hidden_size=5120,
        intermediate_size=1536,
        top_k=8,
        num_moe_layers=89,
        source="github.com/zyzshishui/slime at ffec534, scripts/models/glm4.5-355B-A32B.sh",
    ),
    MoEShape(
        name="glm-5",
        num_experts=256,
        hidden_size=6144,
        intermediate_size=2048,
        top_k=8,
        num_moe_layers=75,
        source=_config_copy("zai-org/GLM-5"),
    ),
    MoEShape(
        name="llama-4-scout",
        num_experts=16,
        hidden_size=5120,
        intermediate_size=8192,
        top_k=1,
        apply_router_weight_on_input=True,
        num_moe_layers=48,
        source=_config_copy("meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    ),
    MoEShape(
        name="llama-4-maverick",
        num_experts=128,
        hidden_size=5120,
        intermediate_size=8192,
        top_k=1,
        apply_router_weight_on_input=True,
        num_moe_layers=24,
        source=_config_copy("meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    ),
    MoEShape(
        name="minimax-m2",
        num_experts=256,
        hidden_size=3072,
        intermediate_size=1536,
        top_k=8,
        num_moe_layers=62,
        released_quant="fp8_block128",
        source=_config_default("MiniMaxM2Config", "MiniMaxAI/MiniMax-M2") + "; equal to the config.json of M2.5",
    ),
    MoEShape(
        name="nemotron-3-nano",
        num_experts=128,
        hidden_size=2688,
        intermediate_size=1856,
        top_k=6,
        activation="relu2",
        num_moe_layers=23,
        source=_config_copy("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ),
    MoEShape(
        name="phi-3.5-moe",
        num_experts=16,
        hidden_size=4096,
        intermediate_size=6400,
        top_k=2,
        num_moe_layers=32,
        source=_config_default("PhimoeConfig", "microsoft/Phi-3.5-MoE-instruct"),
    ),
    MoEShape(
        name="granite-3.0-1b-a400m",
        num_experts=32,
        hidden_size=1024,
        intermediate_size=512,
        top_k=8,
        num_moe_layers=24,
        source="config.json of ibm-granite/granite-3.0-1b-a400m-instruct as quoted in public code; 1.2e9 routed "
        "parameters fit the 1.3B",
    ),
    MoEShape(
        name="granite-3.1-3b-a800m",
        num_experts=40,
        hidden_size=1536,
        intermediate_size=512,
        top_k=8,
        num_moe_layers=32,
        source="config.json of ibm-granite/granite-3.1-3b-a800m-instruct as quoted in public code; 3.0e9 routed "
        "parameters fit the 3.3B",
    ),
    MoEShape(
        name="jamba-v0.1",
        num_experts=16,
        hidden_size=4096,
        intermediate_size=14336,
        top_k=2,
        num_moe_layers=16,
        source=_config_default("JambaConfig", "ai21labs/Jamba-v0.1"),
    ),
    MoEShape(
        name="dbrx",
        num_experts=16,
        hidden_size=6144,
        intermediate_size=10752,
        top_k=4,
        num_moe_layers=40,
        # Copies that say 3584 took it from a class default; that would be a 42B model.
        source="config.json of databricks/dbrx-instruct as quoted in public code; 127e9 routed parameters fit the 132B",
    ),
    MoEShape(
        name="sonic-120b",
        num_experts=256,
        hidden_size=4096,
        intermediate_size=512,
        top_k=16,
        num_moe_layers=None,
        source="synthetic: the 120B row of figure 14 in the SonicMoE paper, arXiv 2512.14080",
    ),
)

# Still taken where a name is given. "sonic-30b" had the sizes of the 120B row.
_FORMER_NAMES: Final = {"sonic-30b": "sonic-120b"}

MODEL_SHAPES: Final[Mapping[str, MoEShape]] = MappingProxyType({shape.name: shape for shape in _SHAPES})
"""All shapes by name."""
