"""Tiny random models of every transformers class that has routed experts."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
import torch

_SIZES: Final = {
    64: "vocab_size vocab_size_per_layer_input max_position_embeddings",
    48: "intermediate_size",
    32: "hidden_size",
    16: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size kv_lora_rank q_lora_rank",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers num_experts_per_tok moe_topk moe_k top_k_experts",
    1: "n_group topk_group num_expert_group bos_token_id",
    0: "first_k_dense_replace num_dense_layers pad_token_id",
    None: "eos_token_id",
}
SIZES: Final[dict[str, Any]] = {name: size for size, names in _SIZES.items() for name in names.split()}
"""What a config is set to where it has the field."""

_HYBRID: Final = {"layer_types": ["linear_attention", "full_attention"]}

SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": _HYBRID,
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    "glm5_next_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "index_topk": 32,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "glm4v_moe_text": {
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": _HYBRID,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "mimo_v2_flash": {"layer_types": ["full_attention", "full_attention"]},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen4_exp_text": {
        **_HYBRID,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
        "ple_embed_dim": 32,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60},
    "step3p5": {"sliding_window": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""By model type: what a family wants beside the sizes."""

WITHOUT_INTERFACE: Final = ("dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7")
"""Families with routed experts whose classes transformers' experts interface does not reach."""


@functools.cache
def families() -> tuple[str, ...]:
    """Folders of the installed transformers whose models have routed experts, found in its source."""
    import transformers.models

    found = set(WITHOUT_INTERFACE)
    for info in pkgutil.iter_modules(transformers.models.__path__):
        if info.ispkg and any("@use_experts_implementation" in source for _, source in _modules(info.name)):
            found.add(info.name)
    return tuple(sorted(found))


@functools.cache
def experts_classes() -> dict[str, type[torch.nn.Module]]:
    """Classes behind transformers' experts interface, by `family.Class`."""
    found = {}
    for family in families():
        for module, source in _modules(family):
            for name in re.findall(r"^@use_experts_implementation\b.*\nclass (\w+)", source, re.MULTILINE):
                found[f"{family}.{name}"] = getattr(importlib.import_module(module), name)
    return found


def _modules(family: str) -> Iterator[tuple[str, str]]:
    """Names and sources of the modules with a family's models."""
    import transformers.models

    folder = next(iter(transformers.models.__path__))
    for path in sorted(Path(folder, family).glob("modeling_*.py")):
        yield f"transformers.models.{family}.{path.stem}", path.read_text()


def needs(family: str) -> None:
    """Skips where the installed transformers does not have a family, or not behind its interface."""
    known = family in WITHOUT_INTERFACE or any(name.startswith(f"{family}.") for name in experts_classes())
    if not known:
        pytest.skip(f"transformers {version('transformers')} has no {family} behind its experts interface")


def tiny_config(model_type: str) -> Any:
    """A config of a model type with tiny sizes, sub-configs included."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _config(CONFIG_MAPPING[model_type])


def _config(kind: Any) -> Any:
    default = kind()
    special = SPECIAL.get(kind.model_type, {})
    values = {name: value for name, value in SIZES.items() if has_entry(default, name)}
    if "sparse" in (getattr(default, "mlp_layer_types", None) or ()):
        values["mlp_layer_types"] = ["sparse"] * SIZES["num_hidden_layers"]
    for name in kind.sub_configs or {}:
        if name not in special and (part := getattr(default, name, None)) is not None:
            values[name] = _config(type(part))
    return kind(**values | copy.deepcopy(special))


def has_entry(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # A value of each layer, which a config has and does not give as one.
        return True


@functools.cache
def model_type(family: str) -> tuple[str, str]:
    """The model type of a family that is made, and the auto class that makes it; a text model where there is one."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    of_family = [name for name in CONFIG_MAPPING_NAMES if CONFIG_MAPPING[name].__module__.split(".")[2] == family]
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        known = [name for name in of_family if CONFIG_MAPPING[name] in getattr(transformers, auto)._model_mapping]
        if known:
            return min(known, key=lambda name: (not name.endswith("text"), name)), auto
    raise LookupError(f"no model of transformers for {family}")


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **others: Any) -> Any:
    """A random model of a family, ready to infer, with weights large enough that experts matter."""
    import transformers

    name, auto = model_type(family)
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_config(tiny_config(name), dtype=dtype, **others)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "expert" in parameter_name and parameter.is_floating_point():
                parameter.normal_(std=0.2)
            # As `from_pretrained` does, without which some routers do not run.
            if any(part in parameter_name for part in model._keep_in_fp32_modules_strict or ()):
                parameter.data = parameter.float()
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # Of routing by token id; zeros name one expert twice.
                table.copy_(torch.arange(table.numel()).reshape(table.shape) % SIZES["num_experts"])
    return model.eval()
