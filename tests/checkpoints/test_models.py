"""Checkpoints against the transformers modules that they were saved from: bits, names, layers that have experts."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moereg.checkpoints import load_experts, moe_layers
from moereg.errors import CheckpointError
from moereg.numerics.reference import reference_experts, relative_error
from tests.checkpoints.families_run import run_block
from tests.checkpoints.small_checkpoint import CONFIG, write_checkpoint
from tests.checkpoints.tiny_families import FAMILIES

PROJECTIONS = tuple(f"mlp.experts.7.{projection}_proj.weight" for projection in ("gate", "up", "down"))
FUSED = ("experts.gate_up_proj", "experts.down_proj")
_ENDS = ("", "_bias")
PUBLISHED = {
    "mixtral": [
        f"block_sparse_moe.{name}.weight" for name in ("gate", *(f"experts.7.w{index}" for index in (1, 2, 3)))
    ],
    **{name: ["mlp.gate.weight", *PROJECTIONS] for name in ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")},
    "deepseek_v3": ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", *PROJECTIONS],
    "gpt_oss": [
        "mlp.router.weight",
        "mlp.router.bias",
        *(f"mlp.{name}{end}" for name in FUSED for end in ("", "_bias")),
    ],
    "llama4_text": ["feed_forward.router.weight", *(f"feed_forward.{name}" for name in FUSED)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_are_what_is_saved(name: str, tmp_path: Path) -> None:
    """Guards the comparisons of families: transformers has to write the published names, or they were not tested."""
    family = FAMILIES[name]
    family.make().save_pretrained(tmp_path, max_shard_size="20KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f"model.layers.{family.layer}.{suffix}" for suffix in PUBLISHED[name]} <= set(files)
    assert len(set(files.values())) > 2, "needs several shards"


def saved(name: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A family's model, which was saved with the names that transformers uses while it runs."""
    model = FAMILIES[name].make().to(dtype)
    model.config.save_pretrained(path)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    return model


def test_the_comparison_sees_swapped_halves_and_dropped_biases(tmp_path: Path) -> None:
    family = FAMILIES["gpt_oss"]
    expected = run_block(family, saved("gpt_oss", tmp_path))
    layer = load_experts(tmp_path, family.layer)
    call = expected.hidden_states, expected.topk_weights, expected.topk_ids
    swapped = torch.cat(layer.weights.w13.chunk(2, dim=1)[::-1], dim=1)
    for wrong in ({"w13": swapped}, {"w13_bias": torch.zeros_like(layer.weights.w13_bias)}):
        weights = dataclasses.replace(layer.weights, **wrong)
        assert relative_error(reference_experts(layer.problem, weights, *call), expected.out) > 0.02


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"model_type": "llama4_text", "moe_layers": [0, 2, 9]}, (0, 2)),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, (1,)),
        ({"model_type": "step3p5", "num_hidden_layers": 5}, (3, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
        ({"model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1}, (1,)),
    ],
)
def test_moe_layers_that_models_made_by_transformers_do_not_show(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_checkpoint(tmp_path, config={**CONFIG, **changes})
    assert moe_layers(tmp_path) == expected


def test_16_bit_weights_arrive_bit_for_bit_and_convert_where_asked(tmp_path: Path) -> None:
    own = FAMILIES["qwen3_moe"].block(saved("qwen3_moe", tmp_path, torch.bfloat16)).experts
    layer, wide = load_experts(tmp_path, 3, dtype="bfloat16"), load_experts(tmp_path, 3, dtype="float32")
    assert layer.problem.dtype == "bfloat16"
    assert torch.equal(layer.weights.w13, own.gate_up_proj)
    assert torch.equal(layer.weights.w2, own.down_proj)
    assert (wide.problem.dtype, wide.router_weight.dtype) == ("float32", torch.float32)
    assert torch.equal(wide.weights.w13, own.gate_up_proj.float())
    assert wide.num_bytes == 2 * layer.num_bytes


def changed_tensor(path: Path, name: str, change: Any) -> torch.Tensor:
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path / "model.safetensors")
    return tensors[name]


def test_correction_bias_keeps_32_bits(tmp_path: Path) -> None:
    # Published DeepSeek-V3 files hold it in fp32 beside bf16 weights.
    saved("deepseek_v3", tmp_path, torch.bfloat16)
    bias = changed_tensor(
        tmp_path, "model.layers.3.mlp.gate.e_score_correction_bias", lambda bias: torch.rand(len(bias))
    )
    layer = load_experts(tmp_path, 3)
    assert layer.router_weight.dtype == torch.bfloat16
    assert torch.equal(layer.correction_bias, bias)


def test_fused_tensors_are_read_expert_by_expert(tmp_path: Path, reads: list[tuple[str, int | None]]) -> None:
    saved("gpt_oss", tmp_path)
    whole = load_experts(tmp_path, 3)
    assert all(row is not None for name, row in reads if ".experts." in name)
    reads.clear()
    rank = load_experts(tmp_path, 3, num_local_experts=4, ep_rank=1)
    assert {row for _, row in reads} == {4, 5, 6, 7, None}
    for name, tensor in rank.weights.tensors().items():
        assert torch.equal(tensor, whole.weights.tensors()[name][4:])


def test_fused_tensors_of_other_sizes(tmp_path: Path) -> None:
    saved("gpt_oss", tmp_path)
    name = "model.layers.3.mlp.experts.gate_up_proj"
    changed_tensor(tmp_path, name, lambda tensor: tensor.mT)
    with pytest.raises(CheckpointError, match=re.escape(f"{name} must be [8, 48, 32]") + r".*got \[8, 32, 48\]"):
        load_experts(tmp_path, 3)
