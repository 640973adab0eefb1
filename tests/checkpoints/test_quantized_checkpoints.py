"""Quantized checkpoints against the libraries that define their formats.

tests/checkpoints has a small checkpoint of each format, what the library restores from it, and the script that wrote
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moereg.checkpoints import CheckpointLayer, _load, load_experts, read_problem
from moereg.checkpoints._quantization import METHODS
from moereg.errors import CheckpointError, TooLargeError
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.weights.permuted import ExpertWeights
from tests.support.quantized_checkpoints import (
    BLOCK,
    CHECKPOINTS,
    DOWN_1,
    Change,
    changed,
    config_of,
    module_of,
    with_group,
    with_settings,
)

SCHEMES: Final = {
    "awq": "int4_w4a16_g32_zp",
    "ct_fp8_block": "fp8_block128",
    "ct_fp8_channel": "fp8_channel_token",
    "ct_fp8_tensor_dynamic": "fp8_tensor_dynamic",
    "ct_fp8_tensor_static": "fp8_tensor_static",
    "ct_fp8_tensor_token": "fp8_channel_token",
    "ct_int4": "int4_w4a16_g32",
    "ct_int4_asymmetric": "int4_w4a16_g32_zp",
    "ct_int4_channel": "int4_w4a16_gall",
    "ct_int8": "int8_w8a8",
    "ct_int8_w8a16": "int8_w8a16",
    "ct_mxfp4_w4a16": "mxfp4_w4a16",
    "ct_mxfp8": "mxfp8",
    "ct_nvfp4": "nvfp4",
    "ct_nvfp4_w4a16": "nvfp4_w4a16",
    "ct_w4afp8": "int4_w4a8_g128_token",
    "ct_w4afp8_unpacked": "int4_w4a8_g128_token",
    "fp8_block128": "fp8_block128",
    "gptq": "int4_w4a16_g32",
    "gptq_asymmetric": "int4_w4a16_g32_zp",
    "gptq_channel": "int4_w4a16_gall",
    "gptq_v2": "int4_w4a16_g32_zp",
    "modelopt_fp8": "fp8_tensor_static",
    "modelopt_nvfp4": "nvfp4",
    "modelopt_nvfp4_w4a16": "nvfp4_w4a16",
    "mxfp4": "mxfp4_w4a16",
}


def _restored_by_the_library(name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Matrices by module, of which only every so many rows are kept."""
    with safe_open(CHECKPOINTS / name / "expected.safetensors", framework="pt") as file:
        row_step = int(file.metadata()["row_step"])
    return load_file(CHECKPOINTS / name / "expected.safetensors"), row_step


def _matrix(layer: CheckpointLayer, restored: tuple[torch.Tensor, torch.Tensor], module: str) -> torch.Tensor:
    """The rows that a module was loaded as, in the checkpoint's order."""
    w13, w2 = restored
    if module.endswith("experts.gate_up_proj"):
        return torch.stack(w13.chunk(2, dim=1), dim=2).flatten(1, 2)
    if module.endswith("experts.down_proj"):
        return w2
    expert, projection = module.split(".")[-2:]
    matrices = dict(zip(("gate_proj", "up_proj"), w13[int(expert)].chunk(2), strict=True))
    return matrices.get(projection, w2[int(expert)])


def test_every_checkpoint_and_method_is_tested() -> None:
    assert {path.parent.name for path in CHECKPOINTS.glob("*/config.json")} == set(SCHEMES)
    methods = {config_of(CHECKPOINTS / name)["quantization_config"]["quant_method"] for name in SCHEMES}
    # test_published_formats.py has these.
    assert methods == {*METHODS} - {"auto-round", "quark"}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_format_stands_for_what_its_library_says(name: str) -> None:
    layer = load_experts(CHECKPOINTS / name, 0)
    assert layer.problem.quant.name == SCHEMES[name]
    assert read_problem(CHECKPOINTS / name, 0) == layer.problem
    layer.weights.check_against(layer.problem)
    restored = dequantize_weights(layer.weights, torch.float32)
    expected, row_step = _restored_by_the_library(name)
    assert expected
    assert layer.problem.quant.weight is not None
    # Three factors may be multiplied in another order, with one more rounding each; two leave no choice.
    rtol = 2**-22 if layer.problem.quant.weight.global_scale else 0
    for module, rows in expected.items():
        found = _matrix(layer, restored, module)[..., ::row_step, :]
        torch.testing.assert_close(
            found.to(rows.dtype), rows, rtol=rtol, atol=0, msg=lambda text, module=module: f"{module}: {text}"
        )


# On a CPU, quantized activations are emulated.
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_format_runs_on_a_cpu(name: str) -> None:
    layer = load_experts(CHECKPOINTS / name, 0)
    hidden_states = torch.randn(33, layer.problem.hidden_size, generator=torch.Generator().manual_seed(1))
    call = (hidden_states.to(layer.problem.torch_dtype), *layer.route(hidden_states.to(layer.problem.torch_dtype)))
    kernel = layer.make_kernel()
    out = kernel(*call)
    computes = kernel.experts.computes
    bound = tolerance(computes, layer.problem.dtype, out.numel())
    assert relative_error(out, reference_experts(layer.problem, layer.weights, *call, computes=computes)) <= bound
    if computes.activation is None:
        # Nothing but the weights is quantized, so plain maths on the restored weights is the truth as well.
        plain = dataclasses.replace(layer.problem, quant="unquantized", dtype="float32")
        w13, w2 = dequantize_weights(layer.weights, torch.float32)
        weights = ExpertWeights(w13=w13, w2=w2, w13_bias=layer.weights.w13_bias, w2_bias=layer.weights.w2_bias)
        assert relative_error(out, reference_experts(plain, weights, *call)) <= bound


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rank_reads_its_part(name: str) -> None:
    whole = load_experts(CHECKPOINTS / name, 0)
    count = whole.problem.num_experts // 2
    rank = load_experts(CHECKPOINTS / name, 0, num_local_experts=count, ep_rank=1)
    for field, tensor in rank.weights.tensors().items():
        assert _same(tensor, whole.weights.tensors()[field][count:]), field


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def test_w4afp8_with_a_static_scale(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with_group("input_activations", strategy="tensor", dynamic=False)(config, tensors)
        for expert, projection in itertools.product(range(2), ("gate", "up", "down")):
            scale = 0.01 * (1 + expert) * (1 if projection == "gate" else 2)
            tensors[f"{module_of(expert, projection)}.input_scale"] = torch.tensor([scale])

    layers = [load_experts(changed(tmp_path / name, name, change), 0) for name in ("ct_w4afp8", "ct_w4afp8_unpacked")]
    for layer in layers:
        assert layer.problem.quant.name == "int4_w4a8_g128"
        for scale in (layer.weights.a13_scale, layer.weights.a2_scale):
            torch.testing.assert_close(scale, torch.tensor([0.02, 0.04]))
    one, other = (layer.weights.tensors() for layer in layers)
    assert all(_same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_refused_as_too_large_is_the_stored_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_experts(CHECKPOINTS / name, 0).weights
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors().values())
    one_bytes = num_bytes // weights.num_experts
    needed = one_bytes * (weights.num_experts + 1)
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: needed)
    load_experts(CHECKPOINTS / name, 0, max_memory_fraction=1.0)
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: needed - 1)
    with pytest.raises(TooLargeError, match=f"in {SCHEMES[name]}, and one more while reading"):
        load_experts(CHECKPOINTS / name, 0, max_memory_fraction=1.0)


# Variants of formats: each changes a copy of a good checkpoint.


@pytest.mark.parametrize("intermediate_size", [256, 192, 320, 64, 100])
def test_fp8_scales_of_several_blocks_and_types(tmp_path: Path, intermediate_size: int) -> None:
    # Rows and columns span blocks, the last one short; scales as DeepSeek, as Qwen and as transformers' ue8m0 has them.
    num_experts, hidden_size = 2, 200
    w13 = torch.randn(num_experts, 2 * intermediate_size, hidden_size)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size) * torch.linspace(0.1, 3, intermediate_size)
    weights = quantize_weights(ExpertWeights(w13=w13, w2=w2), "fp8_block128")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        scales = {name: weights.tensors()[name].to(dtype) for name in ("w13_scale", "w2_scale")}

        def change(config: dict[str, Any], tensors: dict[str, torch.Tensor], scales: Any = scales) -> None:
            config.update(hidden_size=hidden_size, moe_intermediate_size=intermediate_size)
            tensors[f"{BLOCK}.gate.weight"] = torch.randn(num_experts, hidden_size).bfloat16()
            for expert in range(num_experts):
                for index, projection in enumerate(("gate", "up")):
                    module = module_of(expert, projection)
                    tensors[f"{module}.weight"] = weights.w13[expert].chunk(2)[index].clone()
                    tensors[f"{module}.weight_scale_inv"] = scales["w13_scale"][expert].chunk(2)[index].clone()
                tensors[f"{module_of(expert, 'down')}.weight"] = weights.w2[expert].clone()
                tensors[f"{module_of(expert, 'down')}.weight_scale_inv"] = scales["w2_scale"][expert].clone()

        found = load_experts(changed(tmp_path / str(dtype), "fp8_block128", change), 0).weights
        assert _same(found.w13, weights.w13)
        assert _same(found.w2, weights.w2)
        assert torch.equal(found.w13_scale, scales["w13_scale"].float())
        assert torch.equal(found.w2_scale, scales["w2_scale"].float())


def test_the_dtype_is_the_configs_or_the_routers(tmp_path: Path) -> None:
    assert read_problem(CHECKPOINTS / "fp8_block128", 0).dtype == "bfloat16"

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config["dtype"]
        tensors[f"{BLOCK}.gate.weight"] = tensors[f"{BLOCK}.gate.weight"].half()

    path = changed(tmp_path, "fp8_block128", change)
    assert load_experts(path, 0).router_weight.dtype == torch.float16
    assert load_experts(path, 0, dtype="float32").problem.dtype == "float32"


def test_experts_that_are_listed_as_not_converted_are_unquantized(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"]["modules_to_not_convert"] += [f"{BLOCK}.experts"]
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            del tensors[name]
            tensors[name.removesuffix("_scale_inv")] = tensors[name.removesuffix("_scale_inv")].bfloat16()

    layer = load_experts(changed(tmp_path, "fp8_block128", change), 0)
    assert (layer.problem.quant.name, layer.weights.w13.dtype) == ("unquantized", torch.bfloat16)


@pytest.mark.parametrize("other", ["Linear", r"re:.*self_attn.*"])
def test_compressed_tensors_picks_the_most_exact_target(tmp_path: Path, other: str) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["experts"] = {**groups["group_0"], "targets": [r"re:.*\.experts\.\d+\..*"]}
        groups["group_0"] = {"targets": [other], "weights": {"type": "int", "num_bits": 3, "strategy": "tensor"}}

    assert load_experts(changed(tmp_path, "ct_int4", change), 0).problem.quant.name == "int4_w4a16_g32"


@pytest.mark.parametrize("is_nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_config_of_the_quantization_stands_in_any_of_four_places(tmp_path: Path, key: str, is_nested: bool) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        quantization = config.pop("quantization_config")
        inner = dict(config)
        config.clear()
        config |= {"model_type": "qwen3_vl_moe", "text_config": inner}
        (inner if is_nested else config)[key] = quantization

    found = load_experts(changed(tmp_path, "fp8_block128", change), 0)
    whole = load_experts(CHECKPOINTS / "fp8_block128", 0)
    assert found.problem == whole.problem
    assert torch.equal(found.weights.w13.view(torch.uint8), whole.weights.w13.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shapes_of_packed_weights_are_integers_of_either_size(tmp_path: Path, dtype: torch.dtype) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        shapes = [name for name in tensors if name.endswith("weight_shape")]
        assert shapes
        tensors.update({name: tensors[name].to(dtype) for name in shapes})

    found, whole = load_experts(changed(tmp_path, "ct_int4", change), 0), load_experts(CHECKPOINTS / "ct_int4", 0)
    assert torch.equal(found.weights.w13, whole.weights.w13)


@pytest.mark.parametrize(
    "settings",
    [
        with_settings(ignore=[r"re:.*\.experts\..*"]),
        with_settings(ignore=[module_of(expert, name) for expert in range(2) for name in ("gate", "up", "down")]),
        with_group("", targets=[r"re:.*self_attn.*"]),
    ],
    ids=["expression", "names", "no_target"],
)
def test_ignored_experts_are_unquantized(tmp_path: Path, settings: Change) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        settings(config, tensors)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            weight = name.removesuffix("_scale")
            tensors[weight] = (tensors[weight].float() * tensors.pop(name).float()).bfloat16()

    layer = load_experts(changed(tmp_path, "ct_fp8_channel", change), 0)
    assert layer.problem.quant.name == "unquantized"
    expected, row_step = _restored_by_the_library("ct_fp8_channel")
    for module, rows in expected.items():
        assert torch.equal(_matrix(layer, (layer.weights.w13, layer.weights.w2), module)[::row_step], rows)


def test_gate_and_up_share_the_larger_static_scale(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for expert, (gate, up) in enumerate(((0.5, 0.25), (0.125, 2.0))):
            tensors[f"{module_of(expert, 'gate')}.input_scale"] = torch.tensor([gate])
            # Some writers leave out the dimension.
            tensors[f"{module_of(expert, 'up')}.input_scale"] = torch.tensor(up)

    layer = load_experts(changed(tmp_path, "ct_fp8_tensor_static", change), 0)
    assert layer.weights.a13_scale.tolist() == [0.5, 2.0]
    stored = [load_file(CHECKPOINTS / "ct_fp8_tensor_static" / "model.safetensors")]
    down = [float(stored[0][f"{module_of(expert, 'down')}.input_scale"]) for expert in range(2)]
    assert layer.weights.a2_scale.tolist() == down


def test_nvfp4_scales_are_inverted(tmp_path: Path) -> None:
    weights = load_experts(CHECKPOINTS / "ct_nvfp4", 0).weights
    stored = load_file(CHECKPOINTS / "ct_nvfp4" / "model.safetensors")
    for expert in range(2):
        down, gate = (1 / stored[f"{module_of(expert, name)}.input_global_scale"] for name in ("down", "gate"))
        up = 1 / stored[f"{module_of(expert, 'up')}.input_global_scale"]
        assert weights.a2_scale[expert] == down
        assert weights.a13_scale[expert] == max(gate, up)


def test_gptq_rules_for_single_modules(tmp_path: Path) -> None:
    rules = {r"+:.*\.experts\..*": {"sym": False, "checkpoint_format": "gptq_v2"}, r".*": {"bits": 8}}
    layer = load_experts(changed(tmp_path, "gptq_v2", with_settings(sym=True, checkpoint_format="x", dynamic=rules)), 0)
    assert _same(layer.weights.w2_zero_point, load_experts(CHECKPOINTS / "gptq_v2", 0).weights.w2_zero_point)


def test_gptq_zero_point_0_is_stored_with_a_borrow(tmp_path: Path) -> None:
    # Version 1 subtracts from words: a nibble of 0 becomes 15 and takes one from the next.
    words = torch.tensor([[0x76543210, 0x0FEDCBA9], [0x10000008, 0x00000000]], dtype=torch.int32)

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN_1}.qzeros"][:2, :2] = words - 0x11111111

    found = load_experts(changed(tmp_path, "gptq_asymmetric", change), 0).weights.w2_zero_point[1]
    assert (found[:16, 0] & 15).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0]
    assert (found[:16, 0] >> 4).tolist() == [8, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_gptq_biases_of_zero_are_none_and_its_order_may_be_left_out(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN_1}.bias"] = torch.zeros(64).half()
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    found = load_experts(changed(tmp_path, "gptq", change), 0).weights
    assert found.w2_bias is None
    assert _same(found.w13, load_experts(CHECKPOINTS / "gptq", 0).weights.w13)


@pytest.fixture
def only_hf_quant_config(tmp_path: Path) -> Path:
    """A ModelOpt export whose config.json says nothing of quantization."""
    path = tmp_path / "copy"
    shutil.copytree(CHECKPOINTS / "modelopt_nvfp4", path)
    config = config_of(path)
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_hf_quant_config_is_read_where_config_says_nothing(only_hf_quant_config: Path) -> None:
    found, expected = (load_experts(path, 0) for path in (only_hf_quant_config, CHECKPOINTS / "modelopt_nvfp4"))
    assert found.problem == expected.problem
    for name, tensor in expected.weights.tensors().items():
        assert _same(found.weights.tensors()[name], tensor), name


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' has vectors that multiply activations"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size of quant_algo NVFP4 must be 16, got 32"),
        (None, "must hold an object named quantization, got None"),
    ],
)
def test_a_broken_hf_quant_config_is_named(only_hf_quant_config: Path, quantization: Any, expected: str) -> None:
    (only_hf_quant_config / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(CheckpointError, match=rf"hf_quant_config\.json.*{re.escape(expected)}"):
        load_experts(only_hf_quant_config, 0)


# By either key, and beside names in the other one.
@pytest.mark.parametrize("keys", [("ignore", ""), ("exclude_modules", ""), ("ignore", "exclude_modules")], ids="-".join)
@pytest.mark.parametrize("pattern", ["model.layers.0.mlp*", f"{BLOCK}.experts", "*"])
def test_modelopt_leaves_out_modules_by_name_or_beginning(tmp_path: Path, pattern: str, keys: tuple[str, str]) -> None:
    settings = {keys[1]: ["lm_head"], keys[0]: ["lm_head", pattern]}
    path = changed(tmp_path, "modelopt_nvfp4", with_settings(**{"ignore": [], **settings}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight must be .* and unquantized experts"):
        load_experts(path, 0)
    assert read_problem(
        changed(tmp_path, "modelopt_nvfp4", with_settings(ignore=[f"{BLOCK}.expert"])), 0
    ).quant.activation
