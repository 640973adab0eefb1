"""Checkpoints against the transformers modules that they were saved from.

In the comparison of experts, routing comes from the model's own router module: it cannot share a mistake with ours.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moereg.checkpoints import load_experts, moe_layers
from moereg.errors import CheckpointError
from moereg.reference import reference_experts, relative_error
from tests.checkpoints.saved_models import CASES, HIDDEN_SIZE, Case, Save, Saved
from tests.checkpoints.small_checkpoint import CONFIG, write_checkpoint


def _hidden_states(dtype: torch.dtype = torch.float32, num_tokens: int = 33) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def _own_routing(saved: Saved, case: Case, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    router_out = getattr(saved.block(case), case.router)(hidden_states)
    if case.block == "feed_forward":
        # Llama 4 gives dense scores that are zero where an expert is not chosen.
        return router_out[0].topk(saved.model.config.num_experts_per_tok, dim=-1)
    return router_out[1], router_out[2]


@torch.no_grad()
def _own_experts(saved: Saved, case: Case, hidden_states: torch.Tensor) -> torch.Tensor:
    block = saved.block(case)
    if case.block == "feed_forward":
        # Only the block sorts inputs as its experts expect them, so the shared expert is subtracted.
        return block(hidden_states)[0] - block.shared_expert(hidden_states)
    topk_weights, topk_ids = _own_routing(saved, case, hidden_states)
    return block.experts(hidden_states, topk_ids, topk_weights)


def _dense(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(len(topk_ids), num_experts).scatter_(1, topk_ids.long(), topk_weights.float())


@pytest.mark.parametrize("layout", ["released", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_the_saved_module_computes(save: Save, name: str, layout: str) -> None:
    case, saved = CASES[name], save(name, torch.float32)
    layer = load_experts(getattr(saved, layout), case.layer)
    assert (layer.problem.activation, layer.problem.dtype, layer.model_type) == (case.activation, "float32", name)
    layer.weights.check_against(layer.problem)
    hidden_states = _hidden_states()
    out = reference_experts(layer.problem, layer.weights, hidden_states, *_own_routing(saved, case, hidden_states))
    assert relative_error(out, _own_experts(saved, case, hidden_states)) < 2e-6


def test_the_comparison_sees_swapped_halves_and_dropped_biases(save: Save) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    layer = load_experts(saved.released, case.layer)
    hidden_states = _hidden_states()
    routing = _own_routing(saved, case, hidden_states)
    expected = _own_experts(saved, case, hidden_states)
    swapped = torch.cat(layer.weights.w13.chunk(2, dim=1)[::-1], dim=1)
    unbiased = torch.zeros_like(layer.weights.w13_bias)
    for wrong in ({"w13": swapped}, {"w13_bias": unbiased}):
        weights = dataclasses.replace(layer.weights, **wrong)
        assert relative_error(reference_experts(layer.problem, weights, hidden_states, *routing), expected) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_route_equals_the_models_own_router(save: Save, name: str, dtype: torch.dtype) -> None:
    case, saved = CASES[name], save(name, dtype)
    layer = load_experts(saved.released, case.layer)
    hidden_states = _hidden_states(dtype)
    topk_weights, topk_ids = layer.route(hidden_states)
    assert (topk_weights.dtype, topk_ids.dtype) == (torch.float32, torch.int32)
    out = _dense(topk_weights, topk_ids, layer.problem.num_experts)
    expected = _dense(*_own_routing(saved, case, hidden_states), layer.problem.num_experts)
    assert torch.equal(out != 0, expected != 0)
    # transformers rounds the weights of some models to the dtype of their logits.
    tolerance = 1e-6 if dtype == torch.float32 or layer.router.fp32_logits else 2**-7
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_published_names_are_what_is_read(save: Save, name: str) -> None:
    # Guards the comparison above: transformers has to have written the published names, or they were not tested.
    saved, case = save(name, torch.float32), CASES[name]
    files = json.loads((saved.released / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f"model.layers.{case.layer}.{suffix}" for suffix in case.released_names} <= set(files)
    assert len(set(files.values())) > 2, "needs several shards"
    fused = load_file(saved.fused / "model.safetensors")
    assert f"model.layers.{case.layer}.{case.block}.experts.gate_up_proj" in fused


@pytest.mark.parametrize("name", CASES)
def test_moe_layers_are_the_models(save: Save, name: str) -> None:
    case, saved = CASES[name], save(name, torch.float32)
    blocks = [getattr(layer, case.block) for layer in saved.model.model.layers]
    assert moe_layers(saved.released) == tuple(index for index, block in enumerate(blocks) if hasattr(block, "experts"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"model_type": "llama4_text", "moe_layers": [0, 2, 9]}, (0, 2)),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, (1,)),
        ({"model_type": "step3p5", "num_hidden_layers": 5}, (3, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
    ],
)
def test_moe_layers_that_models_made_by_transformers_do_not_show(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_checkpoint(tmp_path, config={**CONFIG, **changes})
    assert moe_layers(tmp_path) == expected


def test_16_bit_weights_arrive_bit_for_bit_and_convert_where_asked(save: Save) -> None:
    case, saved = CASES["qwen3_moe"], save("qwen3_moe", torch.bfloat16)
    layer = load_experts(saved.released, case.layer)
    own = saved.block(case).experts
    assert layer.problem.dtype == "bfloat16"
    assert torch.equal(layer.weights.w13, own.gate_up_proj)
    assert torch.equal(layer.weights.w2, own.down_proj)
    wide = load_experts(saved.released, case.layer, dtype="float32")
    assert (wide.problem.dtype, wide.router_weight.dtype) == ("float32", torch.float32)
    assert torch.equal(wide.weights.w13, own.gate_up_proj.float())
    assert wide.num_bytes == 2 * layer.num_bytes


def test_correction_bias_keeps_32_bits(tmp_path: Path, save: Save) -> None:
    # Published DeepSeek-V3 files hold it in fp32 beside bf16 weights.
    case, saved = CASES["deepseek_v3"], save("deepseek_v3", torch.bfloat16)
    tensors = load_file(saved.fused / "model.safetensors")
    name = f"model.layers.{case.layer}.mlp.gate.e_score_correction_bias"
    tensors[name] = torch.rand(8)
    write_checkpoint(tmp_path, json.loads((saved.fused / "config.json").read_text()), tensors)
    layer = load_experts(tmp_path, case.layer)
    assert layer.router_weight.dtype == torch.bfloat16
    assert torch.equal(layer.correction_bias, tensors[name])


def test_fused_tensors_are_read_expert_by_expert(save: Save, reads: list[tuple[str, int | None]]) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    whole = load_experts(saved.released, case.layer)
    assert all(row is not None for name, row in reads if ".experts." in name)
    reads.clear()
    rank = load_experts(saved.released, case.layer, num_local_experts=4, ep_rank=1)
    assert {row for _, row in reads} == {4, 5, 6, 7, None}
    for name, tensor in rank.weights.tensors().items():
        assert torch.equal(tensor, whole.weights.tensors()[name][4:])


def test_fused_tensors_of_other_sizes(tmp_path: Path, save: Save) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    tensors = load_file(saved.fused / "model.safetensors")
    name = f"model.layers.{case.layer}.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT.contiguous()
    write_checkpoint(tmp_path, json.loads((saved.fused / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"{name} must be [8, 32, 48]") + r".*got \[8, 48, 32\]"):
        load_experts(tmp_path, case.layer)
