"""Small models of transformers, one for each model type, saved as checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moereg.activations import ACTIVATIONS, Activation

HIDDEN_SIZE = 32
BASE = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}


DENSE = {"moe_intermediate_size": 16, "intermediate_size": 24}
DEEPSEEK = {
    **DENSE,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model, a layer of it that has experts, and the names that the published checkpoint gives its tensors."""

    config: type
    model: type
    options: dict[str, Any]
    layer: int
    released_names: tuple[str, ...]
    block: str = "mlp"
    router: str = "gate"
    activation: Activation = ACTIVATIONS["silu"]


PROJECTIONS = tuple(f"mlp.experts.7.{projection}_proj.weight" for projection in ("gate", "up", "down"))
FUSED = ("experts.gate_up_proj", "experts.down_proj")
CASES = {
    "mixtral": Case(
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 16, "num_local_experts": 8},
        layer=3,
        released_names=(
            "block_sparse_moe.gate.weight",
            *(f"block_sparse_moe.experts.7.w{index}.weight" for index in (1, 2, 3)),
        ),
    ),
    "qwen2_moe": Case(
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**DENSE, "num_experts": 8, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
        layer=1,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "qwen3_moe": Case(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**DENSE, "num_experts": 8, "mlp_only_layers": [0, 2], "norm_topk_prob": True},
        layer=3,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "olmoe": Case(
        OlmoeConfig,
        OlmoeForCausalLM,
        {"intermediate_size": 16, "num_experts": 8, "hidden_act": "gelu_pytorch_tanh"},
        layer=0,
        released_names=("mlp.gate.weight", *PROJECTIONS),
        activation=ACTIVATIONS["gelu_tanh"],
    ),
    "deepseek_v2": Case(
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
        layer=2,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "deepseek_v3": Case(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DEEPSEEK,
        layer=3,
        released_names=("mlp.gate.weight", "mlp.gate.e_score_correction_bias", *PROJECTIONS),
    ),
    "gpt_oss": Case(
        GptOssConfig,
        GptOssForCausalLM,
        # A limit that the activations reach, so that ignoring it shows.
        {"intermediate_size": 24, "num_local_experts": 8, "swiglu_limit": 1.5},
        layer=2,
        released_names=(
            "mlp.router.weight",
            "mlp.router.bias",
            *(f"mlp.{name}{suffix}" for name in FUSED for suffix in ("", "_bias")),
        ),
        router="router",
        activation=dataclasses.replace(ACTIVATIONS["swigluoai"], limit=1.5),
    ),
    "llama4_text": Case(
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "intermediate_size": 16,
            "intermediate_size_mlp": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        layer=1,
        released_names=("feed_forward.router.weight", *(f"feed_forward.{name}" for name in FUSED)),
        block="feed_forward",
        router="router",
    ),
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model and the directories that it was saved to: as released, and as transformers names its parameters."""

    model: Any
    released: Path
    fused: Path

    def block(self, case: Case) -> Any:
        return getattr(self.model.model.layers[case.layer], case.block)


Save = Callable[[str, torch.dtype], Saved]


def save_model(case: Case, dtype: torch.dtype, path: Path) -> Saved:
    generator = torch.Generator().manual_seed(0)
    model = case.model(case.config(**{**BASE, **case.options}))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Own initialization leaves biases at zero and weights too small for the activation to matter.
        if f".{case.block}." in name:
            tensor.data = torch.randn(tensor.shape, generator=generator) * (0.1 if name.endswith("bias") else 0.4)
    if isinstance(model, GptOssForCausalLM):
        # transformers 5.17 has the clamp as a constant of the module and does not read it from the config.
        for layer in model.model.layers:
            layer.mlp.experts.limit = case.activation.limit
    model = model.to(dtype).eval()
    model.set_experts_implementation("eager")
    model.save_pretrained(path / "released", max_shard_size="20KB")
    model.config.save_pretrained(path / "fused")
    save_file(dict(model.model.state_dict(prefix="model.")), path / "fused" / "model.safetensors")
    return Saved(model, path / "released", path / "fused")
