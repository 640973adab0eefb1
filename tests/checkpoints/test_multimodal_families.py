"""Language models inside of multimodal ones, whose publishers name and transpose tensors in their own ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.checkpoints import load_experts, moe_layers
from moereg.numerics.reference import relative_error
from tests.checkpoints.families_run import by_expert, run_block
from tests.checkpoints.small_checkpoint import CONFIG, small_tensors, write_checkpoint
from tests.checkpoints.tiny_families import FAMILIES, MODELS, SIZES, has_entry

# The family of the language model, and the class around it.
WHOLE = {
    "aria_text": "AriaForConditionalGeneration",
    "deepseek_ocr2_text": "DeepseekOcr2ForConditionalGeneration",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "minimax_m3_vl_text": "MiniMaxM3SparseForConditionalGeneration",
    "mistral_large4_text": "MistralLarge4ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "step3p5": "Step3p7ForConditionalGeneration",
}
OTHER_PARTS: dict[str, Any] = {
    **SIZES,
    "depth": 1,
    "num_layers": 1,
    "layers": 1,
    "width": SIZES["hidden_size"],
    "heads": 4,
    "num_heads": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "projection_dim": 16,
}
"""Sizes of what is not the language model."""


def _small_config(kind: Any, text_config: Any) -> Any:
    default = kind()
    parts = {}
    for name in kind.sub_configs or {}:
        part = getattr(default, name, None)
        if name == "text_config":
            parts[name] = text_config
        elif part is not None:
            parts[name] = _small_config(type(part), None)
    sizes = {name: value for name, value in OTHER_PARTS.items() if has_entry(default, name)}
    # Some parts list what each of their layers is, and others take no size but their own.
    for left_out in ((), ("num_hidden_layers",), tuple(sizes)):
        try:
            return kind(**{name: value for name, value in sizes.items() if name not in left_out}, **parts)
        except (ValueError, TypeError) as error:
            failure = error
    raise failure


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_language_model_of_a_saved_multimodal_one(name: str, tmp_path: Path) -> None:
    if not (MODELS / FAMILIES[name].module).is_dir():
        pytest.skip(f"this version of transformers has no {FAMILIES[name].module}, which came later")
    family = dataclasses.replace(FAMILIES[name], model=WHOLE[name])
    model = family.make_of(_small_config(family.model_class.config_class, FAMILIES[name].config()))
    expected = run_block(family, model)
    model.save_pretrained(tmp_path)
    layer = load_experts(tmp_path, family.layer)
    assert layer.model_type == name
    assert family.layer in moe_layers(tmp_path)
    own_ids, own_weights = by_expert(expected.topk_weights, expected.topk_ids)
    ids, weights = by_expert(*layer.route(expected.hidden_states))
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(weights, own_weights, rtol=1e-6, atol=1e-7)
    out = layer.make_kernel()(expected.hidden_states, *layer.route(expected.hidden_states))
    assert relative_error(out, expected.out) < 1e-6


def test_the_thinker_of_an_omni_model_is_its_language_model(tmp_path: Path) -> None:
    text = {**CONFIG, "model_type": "qwen3_omni_moe_text"}
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": text},
        "talker_config": {"text_config": {**text, "num_experts": 2}},
    }
    tensors = {f"thinker.{name}": tensor for name, tensor in small_tensors().items()}
    write_checkpoint(tmp_path, config, tensors)
    layer = load_experts(tmp_path, 1)
    assert layer.problem.num_experts == CONFIG["num_experts"]
    assert torch.equal(layer.router_weight, tensors["thinker.model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
@pytest.mark.parametrize("prefix", ["language_model.backbone.layers.", "llm.model.layers."])
def test_nemotron_h_inside_of_another_model(tmp_path: Path, prefix: str, key: str) -> None:
    text = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*",
        "hidden_size": 8,
        "moe_intermediate_size": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    block = f"{prefix}1.mixer"
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (4, 8), f"{block}.gate.e_score_correction_bias": (4,)}
    for expert in range(4):
        shapes[f"{block}.experts.{expert}.up_proj.weight"] = (6, 8)
        shapes[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_checkpoint(tmp_path, {"model_type": "nemotron_h_omni", key: text}, tensors)
    layer = load_experts(tmp_path, 1)
    assert moe_layers(tmp_path) == (1,)
    assert torch.equal(layer.router_weight, tensors[f"{block}.gate.weight"])
    assert torch.equal(layer.weights.w2[3], tensors[f"{block}.experts.3.down_proj.weight"])
