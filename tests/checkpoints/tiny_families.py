"""A tiny model of every family of transformers with routed experts, and the classes that make it one."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.tiny_models import has_entry

MODELS = Path(transformers.__file__).parent / "models"
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    **{name: value for value, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id"))},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    "num_experts_per_tok": 3,
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window"), 8),
}
"""Given to every config that has them."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny model of a family.

    Attributes:
        module: Module of transformers below `models`, twice the same name.
        model: Its class; its config class is the class's.
        options: Of the config, beside `SIZES`.
        layer: A layer with experts.
        config_name: Its config's class, if it is not the model class's own: `module.Class`.
        is_whole: Whether router or experts read more than the block's input, so that the whole model is run.
        scaling: What the block multiplies the experts' sum by; our routing weights hold it.
    """

    module: str
    model: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layer: int = 3
    config_name: str = ""
    is_whole: bool = False
    scaling: Callable[[Any], float] = lambda config: 1.0

    @functools.cached_property
    def model_class(self) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}"), self.model)

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has it."""
        return all((MODELS / name.partition(".")[0]).is_dir() for name in (self.module, self.config_name or "."))

    @property
    def config_class(self) -> Any:
        return (
            getattr(transformers, self.config_name.partition(".")[2])
            if self.config_name
            else self.model_class.config_class
        )

    def config(self) -> Any:
        kind = self.config_class
        default = kind()
        sizes = {name: value for name, value in SIZES.items() if name not in self.options and has_entry(default, name)}
        return kind(**sizes, **self.options)

    def make(self) -> Any:
        """The model in fp32, with weights large enough that activations and biases matter."""
        return self.make_of(self.config())

    def make_of(self, config: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        model = self.model_class(config).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if ".layers." in f".{name}" or ".blocks." in name or "embed_tokens" in name:
                    std = 0.1 if name.endswith("bias") else 0.4
                    if tensor.is_floating_point() and tensor.numel():
                        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
                    if name.endswith("tid2eid"):
                        lists = [torch.randperm(8, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
                        tensor.copy_(torch.stack(lists))
        return model

    def block(self, model: Any) -> Any:
        layer = find_layers(model)[self.layer]
        if hasattr(layer, "experts"):  # Gemma.
            return layer
        names = ("mlp", "feed_forward", "block_sparse_moe", "mixer", "ffn")
        return next(block for name in names if hasattr(block := getattr(layer, name, None), "experts"))


def find_layers(model: Any) -> Any:
    for name in ("transformer.blocks", "model.language_model.layers", "model.layers", "layers"):
        found = model
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    raise LookupError(type(model).__name__)


_TYPES = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
_SCALED: Callable[[Any], float] = lambda config: float(config.routed_scaling_factor)  # noqa: E731

# fmt: off
FAMILIES: dict[str, Family] = {
    "afmoe": Family("afmoe", "AfmoeForCausalLM", {"route_scale": 1.7}),
    "aria_text": Family("aria", "AriaTextForCausalLM", {"moe_num_experts": 8, "moe_topk": 3}),
    "axk1": Family("axk1", "AXK1ForCausalLM"),
    "axk2": Family("axk2", "AXK2ForCausalLM", {**_TYPES, "n_group": None, "topk_group": None}),
    "bailing_hybrid": Family("bailing_hybrid", "BailingHybridForCausalLM"),
    "beam": Family("beam", "BeamForCausalLM", scaling=_SCALED),
    "cohere2_moe": Family("cohere2_moe", "Cohere2MoeForCausalLM", {"num_shared_experts": 1}),
    "cohere2_moe-sigmoid": Family("cohere2_moe", "Cohere2MoeForCausalLM", {"expert_selection_fn": "sigmoid"}),
    "dbrx": Family("dbrx", "DbrxForCausalLM", {
        "d_model": 48, "n_heads": 4, "n_layers": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3}}),
    "deepseek_ocr2_text": Family("deepseek_ocr2", "DeepseekOcr2TextModel", _TYPES),
    "deepseek_v2": Family("deepseek_v2", "DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3ForCausalLM"),
    "deepseek_v32": Family("deepseek_v32", "DeepseekV32ForCausalLM"),
    "deepseek_v4": Family("deepseek_v4", "DeepseekV4ForCausalLM", {"swiglu_limit": 1.5}),
    "deepseek_v4-hash": Family("deepseek_v4", "DeepseekV4ForCausalLM", layer=1, is_whole=True),
    "diffusion_gemma_text": Family("diffusion_gemma", "DiffusionGemmaEncoderTextModel",
        {"top_k_experts": 3}, is_whole=True),
    "dots1": Family("dots1", "Dots1ForCausalLM", {"n_shared_experts": 1}),
    "dots3_note_text": Family("dots3_note", "Dots3NoteForCausalLM", {"num_key_value_heads": 4, "use_dsa": False}),
    "ernie4_5_moe": Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 8, "moe_k": 3}),
    "exaone_moe": Family("exaone_moe", "ExaoneMoeForCausalLM"),
    "flex_olmo": Family("flex_olmo", "FlexOlmoForCausalLM"),
    "flint": Family("flint", "FlintForCausalLM"),
    "gemma4_text": Family("gemma4", "Gemma4ForCausalLM",
        {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "top_k_experts": 3}, is_whole=True),
    "glm4_moe": Family("glm4_moe", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _TYPES),
    "glm4v_moe_text": Family("glm4v_moe", "Glm4vMoeTextModel"),
    "glm5_next_text": Family("glm5_next", "Glm5NextTextModel",
        {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "swiglu_limit": 1.5}),
    "glm_moe_dsa": Family("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM"),
    "granitemoe": Family("granitemoe", "GraniteMoeForCausalLM"),
    "granitemoe_swa": Family("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": Family("granitemoehybrid", "GraniteMoeHybridForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 24}),
    "granitemoeshared": Family("granitemoeshared", "GraniteMoeSharedForCausalLM", {"shared_intermediate_size": 16}),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {"moe_topk": [3, 3, 3, 3]}),
    "hy_v3": Family("hy_v3", "HYV3ForCausalLM", {**_TYPES, "router_scaling_factor": 1.3}),
    "hy_v4": Family("hy_v4", "HYV4ForCausalLM", {"swiglu_limit": 1.5}),
    "hy_v4_vl_text": Family("hy_v4_vl", "HYV4VLTextModel",
        {"swiglu_limit": 1.5, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}),
    "inkling2_text": Family("inkling2", "Inkling2ForCausalLM",
        {"mlp_gate_softcap": 0.75, "mlp_up_softcap": 1.5, "route_scale": 1.7}),
    "jamba": Family("jamba", "JambaForCausalLM"),
    "kimi_linear": Family("kimi_linear", "KimiLinearForCausalLM"),
    "kolibri1": Family("kolibri1", "Kolibri1ForCausalLM"),
    "laguna": Family("laguna", "LagunaForCausalLM",
        {"moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 1.3},
        scaling=lambda config: float(config.moe_routed_scaling_factor)),
    "lara_mini": Family("lara_mini", "LaraMiniForCausalLM"),
    "lfm2_moe": Family("lfm2_moe", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe-unbiased": Family("lfm2_moe", "Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention"] * 2, "use_expert_bias": False, "norm_topk_prob": False}),
    "llama4_text": Family("llama4", "Llama4ForCausalLM", {"intermediate_size_mlp": 16, "num_experts_per_tok": 1}),
    "mellum": Family("mellum", "MellumForCausalLM", _TYPES),
    "mimo_v2_flash": Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", _TYPES),
    "minimax": Family("minimax", "MiniMaxForCausalLM"),
    "minimax_m2": Family("minimax_m2", "MiniMaxM2ForCausalLM"),
    "minimax_m3_vl_text": Family("minimax_m3_vl", "MiniMaxM3VLForCausalLM",
        {"dense_intermediate_size": 16, "shared_intermediate_size": 16, "swiglu_limit": 1.5, **_TYPES},
        scaling=_SCALED),
    "mistral4": Family("mistral4", "Mistral4ForCausalLM"),
    "mistral_large4_text": Family("mistral_large4", "MistralLarge4TextModel"),
    "mixtral": Family("mixtral", "MixtralForCausalLM"),
    "nemotron_h": Family("nemotron_h", "NemotronHForCausalLM", {"moe_shared_expert_intermediate_size": 16}, layer=1),
    "nemotron_h-latent": Family("nemotron_h", "NemotronHForCausalLM",
        {"moe_shared_expert_intermediate_size": 16, "moe_latent_size": 24}, layer=1, is_whole=True),
    "olmoe": Family("olmoe", "OlmoeForCausalLM"),
    "openai_privacy_filter": Family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification",
        scaling=lambda config: float(config.num_experts_per_tok)),
    "phimoe": Family("phimoe", "PhimoeForCausalLM", {"num_experts_per_tok": 2, "router_jitter_noise": 0.2}),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", {"decoder_sparse_step": 2}),
    "qwen3_5_moe_text": Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3_next": Family("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_omni_moe_text": Family("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel", {"decoder_sparse_step": 2}),
    "qwen3_vl_moe_text": Family("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    "qwen4_exp_text": Family("qwen4_exp", "Qwen4ExpForCausalLM", {"layer_types": ["linear_attention"] * 4}),
    "sarvam_mla": Family("deepseek_v3", "DeepseekV3ForCausalLM", config_name="sarvam_mla.SarvamMLAConfig"),
    "sarvam_moe": Family("glm4_moe", "Glm4MoeForCausalLM", config_name="sarvam_moe.SarvamMoEConfig"),
    "solar_open": Family("solar_open", "SolarOpenForCausalLM"),
    "step3p5": Family("step3p7", "Step3p7TextModel",
        {"share_expert_dim": 16, "moe_router_scaling_factor": 1.3, "swiglu_limits": [0.0, 0.0, 7.0, 0.0], **_TYPES},
        scaling=lambda config: float(config.moe_router_scaling_factor)),
    "unlimited_ocr_text": Family("unlimited_ocr", "UnlimitedOcrTextModel", _TYPES),
}
# fmt: on
"""By model type, and what follows a dash: a variant of it."""


def routed_model_types() -> dict[str, str]:
    """Modules of transformers, by name below `models`, with a class of routed experts, and that class.

    A class has routed experts if the experts interface decorates it, or its name says so.
    """
    found: dict[str, str] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for match in _OF_EXPERTS.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(path.parent.name, match["decorated"] or match["named"])
    return found


_OF_EXPERTS = re.compile(
    r"^@use_experts_implementation[^\n]*\nclass (?P<decorated>\w+)"
    r"|^class (?P<named>\w+(?:Experts|MoE|Moe|SparseMLP|SparseMoeBlock))\b",
    re.MULTILINE,
)
