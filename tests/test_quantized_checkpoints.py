"""Quantised checkpoints against what the libraries that define their formats make of them.

tests/checkpoints has a small checkpoint of each format, what the library restores from it, and the script that wrote
them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moereg.checkpoints import CheckpointLayer, load_experts, read_problem
from moereg.checkpoints._quantisation import METHODS
from moereg.cli import main
from moereg.errors import CheckpointError
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.reference import reference_experts, relative_error
from moereg.testing.tolerances import tolerance
from moereg.weights import ExpertWeights

CHECKPOINTS: Final = Path(__file__).parent / "checkpoints"
BLOCK: Final = "model.layers.0.mlp"
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
    "fp8_block128": "fp8_block128",
    "gptq": "int4_w4a16_g32",
    "gptq_asymmetric": "int4_w4a16_g32_zp",
    "gptq_channel": "int4_w4a16_gall",
    "gptq_v2": "int4_w4a16_g32_zp",
    "mxfp4": "mxfp4_w4a16",
}


def _restored_by_the_library(name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Matrices by module, of which only every so many rows are kept."""
    with safe_open(CHECKPOINTS / name / "expected.safetensors", framework="pt") as file:
        row_step = int(file.metadata()["row_step"])
    return load_file(CHECKPOINTS / name / "expected.safetensors"), row_step


def _matrix(layer: CheckpointLayer, restored: tuple[torch.Tensor, torch.Tensor], module: str) -> torch.Tensor:
    """What a module's rows were loaded as, in the order that the checkpoint has them in."""
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
    methods = {_config(CHECKPOINTS / name)["quantization_config"]["quant_method"] for name in SCHEMES}
    assert methods == set(METHODS)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_format_stands_for_what_its_library_says(name: str) -> None:
    layer = load_experts(CHECKPOINTS / name, 0)
    assert layer.problem.quant.name == SCHEMES[name]
    assert read_problem(CHECKPOINTS / name, 0) == layer.problem
    layer.weights.check_against(layer.problem)
    restored = dequantize_weights(layer.weights, torch.float32)
    expected, row_step = _restored_by_the_library(name)
    assert expected
    for module, rows in expected.items():
        found = _matrix(layer, restored, module)[..., ::row_step, :]
        assert torch.equal(found.to(rows.dtype), rows), module


# On a CPU, quantised activations are emulated.
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
        # Nothing but the weights is quantised, so plain maths on the restored weights is the truth as well.
        plain = dataclasses.replace(layer.problem, quant="unquantized", dtype="float32")
        w13, w2 = dequantize_weights(layer.weights, torch.float32)
        weights = ExpertWeights(w13=w13, w2=w2, w13_bias=layer.weights.w13_bias, w2_bias=layer.weights.w2_bias)
        assert relative_error(out, reference_experts(plain, weights, *call)) <= bound


@pytest.mark.parametrize("name", SCHEMES)
def test_moereg_run_takes_a_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "--checkpoint", str(CHECKPOINTS / name), "--tokens", "17", "--json", "--platform", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["passed"], found["backend"]) == (0, True, "torch")
    assert found["problem"]["quant"] == SCHEMES[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rank_reads_its_part(name: str) -> None:
    whole = load_experts(CHECKPOINTS / name, 0)
    count = whole.problem.num_experts // 2
    rank = load_experts(CHECKPOINTS / name, 0, num_local_experts=count, ep_rank=1)
    for field, tensor in rank.weights.tensors().items():
        assert _same(tensor, whole.weights.tensors()[field][count:]), field


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


# Variants of formats, and what can be wrong with them. Each changes a copy of a good checkpoint.

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def _changed(path: Path, name: str, change: Change) -> Path:
    """A copy of a checkpoint whose config and tensors were changed in place."""
    config, tensors = _config(CHECKPOINTS / name), load_file(CHECKPOINTS / name / "model.safetensors")
    change(config, tensors)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def _module(expert: int, projection: str) -> str:
    return f"{BLOCK}.experts.{expert}.{projection}_proj"


def _settings(**changes: Any) -> Change:
    """Changes of quantization_config; a value of ... removes the entry."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"].update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            del config["quantization_config"][key]

    return change


def _tensor(name: str, value: torch.Tensor | None) -> Change:
    """Puts a tensor in, or takes it out."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


def _only_some_experts_named(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["quantization_config"]["modules_to_not_convert"] = [f"{BLOCK}.experts.1"]


def test_fp8_scales_of_several_blocks_and_types(tmp_path: Path) -> None:
    # Rows and columns span blocks, the last one short; scales as DeepSeek, as Qwen and as transformers' ue8m0 has them.
    num_experts, hidden_size, intermediate_size = 2, 200, 256
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
                    module = _module(expert, projection)
                    tensors[f"{module}.weight"] = weights.w13[expert].chunk(2)[index].clone()
                    tensors[f"{module}.weight_scale_inv"] = scales["w13_scale"][expert].chunk(2)[index].clone()
                tensors[f"{_module(expert, 'down')}.weight"] = weights.w2[expert].clone()
                tensors[f"{_module(expert, 'down')}.weight_scale_inv"] = scales["w2_scale"][expert].clone()

        found = load_experts(_changed(tmp_path / str(dtype), "fp8_block128", change), 0).weights
        assert _same(found.w13, weights.w13)
        assert _same(found.w2, weights.w2)
        assert torch.equal(found.w13_scale, scales["w13_scale"].float())
        assert torch.equal(found.w2_scale, scales["w2_scale"].float())


def test_the_dtype_is_the_configs_or_the_routers(tmp_path: Path) -> None:
    assert read_problem(CHECKPOINTS / "fp8_block128", 0).dtype == "bfloat16"

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config["dtype"]
        tensors[f"{BLOCK}.gate.weight"] = tensors[f"{BLOCK}.gate.weight"].half()

    path = _changed(tmp_path, "fp8_block128", change)
    assert load_experts(path, 0).router_weight.dtype == torch.float16
    assert load_experts(path, 0, dtype="float32").problem.dtype == "float32"


def test_experts_that_are_listed_as_not_converted_are_unquantised(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"]["modules_to_not_convert"] += [f"{BLOCK}.experts"]
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            del tensors[name]
            tensors[name.removesuffix("_scale_inv")] = tensors[name.removesuffix("_scale_inv")].bfloat16()

    layer = load_experts(_changed(tmp_path, "fp8_block128", change), 0)
    assert (layer.problem.quant.name, layer.weights.w13.dtype) == ("unquantized", torch.bfloat16)


def _group(part: str, **changes: Any) -> Change:
    """Changes of compressed-tensors' only group: of its `weights`, its `input_activations`, or itself."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        (group[part] if part else group).update(changes)

    return change


def test_compressed_tensors_picks_the_most_exact_target(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["experts"] = {**groups["group_0"], "targets": [r"re:.*\.experts\.\d+\..*"]}
        groups["group_0"] = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 3, "strategy": "tensor"}}

    assert load_experts(_changed(tmp_path, "ct_int4", change), 0).problem.quant.name == "int4_w4a16_g32"


@pytest.mark.parametrize(
    "settings",
    [
        _settings(ignore=[r"re:.*\.experts\..*"]),
        _settings(ignore=[_module(expert, name) for expert in range(2) for name in ("gate", "up", "down")]),
        _group("", targets=[r"re:.*self_attn.*"]),
    ],
    ids=["expression", "names", "no_target"],
)
def test_ignored_experts_are_unquantised(tmp_path: Path, settings: Change) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        settings(config, tensors)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            weight = name.removesuffix("_scale")
            tensors[weight] = (tensors[weight].float() * tensors.pop(name).float()).bfloat16()

    layer = load_experts(_changed(tmp_path, "ct_fp8_channel", change), 0)
    assert layer.problem.quant.name == "unquantized"
    expected, row_step = _restored_by_the_library("ct_fp8_channel")
    for module, rows in expected.items():
        assert torch.equal(_matrix(layer, (layer.weights.w13, layer.weights.w2), module)[::row_step], rows)


def test_gate_and_up_share_the_larger_static_scale(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for expert, (gate, up) in enumerate(((0.5, 0.25), (0.125, 2.0))):
            tensors[f"{_module(expert, 'gate')}.input_scale"] = torch.tensor([gate])
            # Some writers leave out the dimension.
            tensors[f"{_module(expert, 'up')}.input_scale"] = torch.tensor(up)

    layer = load_experts(_changed(tmp_path, "ct_fp8_tensor_static", change), 0)
    assert layer.weights.a13_scale.tolist() == [0.5, 2.0]
    stored = [load_file(CHECKPOINTS / "ct_fp8_tensor_static" / "model.safetensors")]
    down = [float(stored[0][f"{_module(expert, 'down')}.input_scale"]) for expert in range(2)]
    assert layer.weights.a2_scale.tolist() == down


def test_nvfp4_scales_are_inverted(tmp_path: Path) -> None:
    weights = load_experts(CHECKPOINTS / "ct_nvfp4", 0).weights
    stored = load_file(CHECKPOINTS / "ct_nvfp4" / "model.safetensors")
    for expert in range(2):
        down, gate = (1 / stored[f"{_module(expert, name)}.input_global_scale"] for name in ("down", "gate"))
        up = 1 / stored[f"{_module(expert, 'up')}.input_global_scale"]
        assert weights.a2_scale[expert] == down
        assert weights.a13_scale[expert] == max(gate, up)


def test_gptq_rules_for_single_modules(tmp_path: Path) -> None:
    rules = {r"+:.*\.experts\..*": {"sym": False, "checkpoint_format": "gptq_v2"}, r".*": {"bits": 8}}
    layer = load_experts(_changed(tmp_path, "gptq_v2", _settings(sym=True, checkpoint_format="x", dynamic=rules)), 0)
    assert _same(layer.weights.w2_zero_point, load_experts(CHECKPOINTS / "gptq_v2", 0).weights.w2_zero_point)


def test_gptq_versions_differ_in_their_zero_points_only() -> None:
    first, second = (load_experts(CHECKPOINTS / name, 0).weights for name in ("gptq_asymmetric", "gptq_v2"))
    for name, tensor in first.tensors().items():
        assert _same(tensor, second.tensors()[name]), name
    stored = [load_file(CHECKPOINTS / name / "model.safetensors") for name in ("gptq_asymmetric", "gptq_v2")]
    assert not torch.equal(*(tensors[f"{DOWN_1}.qzeros"] for tensors in stored))


def test_gptq_zero_point_0_is_stored_with_a_borrow(tmp_path: Path) -> None:
    # Version 1 subtracts from words: a nibble of 0 becomes 15 and takes one from the next.
    words = torch.tensor([[0x76543210, 0x0FEDCBA9], [0x10000008, 0x00000000]], dtype=torch.int32)

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN_1}.qzeros"][:2, :2] = words - 0x11111111

    found = load_experts(_changed(tmp_path, "gptq_asymmetric", change), 0).weights.w2_zero_point[1]
    assert (found[:16, 0] & 15).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0]
    assert (found[:16, 0] >> 4).tolist() == [8, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_gptq_biases_of_zero_are_none(tmp_path: Path) -> None:
    layer = load_experts(_changed(tmp_path, "gptq", _tensor(f"{DOWN_1}.bias", torch.zeros(64).half())), 0)
    assert layer.weights.w2_bias is None


def test_gptq_order_may_be_left_out_where_there_is_none(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    path = _changed(tmp_path, "gptq", change)
    assert _same(load_experts(path, 0).weights.w13, load_experts(CHECKPOINTS / "gptq", 0).weights.w13)


GATE_0, DOWN_1 = _module(0, "gate"), _module(1, "down")
BROKEN: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "fp8_other_blocks": (
        "fp8_block128",
        _settings(weight_block_size=[1, 32]),
        ("{path}/config.json", "weight_block_size of quant method fp8 must be [128, 128], got [1, 32]"),
    ),
    "fp8_per_tensor": (
        "fp8_block128",
        _settings(weight_block_size=...),
        ("{path}/config.json", "weight_block_size", "got None", "128 x 128"),
    ),
    "fp8_static": ("fp8_block128", _settings(activation_scheme="static"), ("'dynamic', got 'static'",)),
    "fp8_missing_scale": (
        "fp8_block128",
        _tensor(f"{DOWN_1}.weight_scale_inv", None),
        (f"'{DOWN_1}.weight_scale_inv' is missing from {{path}}/model.safetensors",),
    ),
    "fp8_scale_of_another_shape": (
        "fp8_block128",
        _tensor(f"{DOWN_1}.weight_scale_inv", torch.ones(2, 1)),
        (f"{DOWN_1}.weight_scale_inv must be [1, 1]", "fp8 in blocks", "got [2, 1] in {path}/model.safetensors"),
    ),
    "fp8_one_expert_in_16_bits": (
        "fp8_block128",
        _tensor(f"{DOWN_1}.weight", torch.zeros(128, 128, dtype=torch.bfloat16)),
        (f"{DOWN_1}.weight must be F8_E4M3", "got BF16 in {path}/model.safetensors"),
    ),
    "fp8_one_expert_listed": (
        "fp8_block128",
        _only_some_experts_named,
        ("{path}/config.json", "stored in one format", "fp8 in blocks", f"unquantised for {_module(1, 'gate')}"),
    ),
    "fp8_unlisted_but_said": (
        "fp8_block128",
        _settings(modules_to_not_convert=["model.layers.0"]),
        (f"{GATE_0}.weight must be BF16 or F16 or F32", "unquantised", "got F8_E4M3"),
    ),
    "fp8_unsaid": (
        "fp8_block128",
        lambda config, tensors: config.pop("quantization_config"),
        (f"{GATE_0}.weight must be BF16 or F16 or F32", "unquantised", "got F8_E4M3"),
    ),
    "fp8_nan_scale": (
        "fp8_block128",
        _tensor(f"{DOWN_1}.weight_scale_inv", torch.full((1, 1), torch.nan)),
        ("layer 0 of '{path}'", "w2_scale must be finite", "got nan at [1, 0, 0]"),
    ),
    "fp8_bad_list": (
        "fp8_block128",
        _settings(modules_to_not_convert="lm_head"),
        ("modules_to_not_convert must be a list of module names, got 'lm_head'",),
    ),
    "fp8_bad_pattern": ("fp8_block128", _settings(modules_to_not_convert=["a("]), ("regular expressions, got 'a('",)),
    "ct_unknown_activations": (
        "ct_int4",
        _group("", input_activations={"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}),
        ("{path}/config.json", "got int4 group 32 weights with float8 dynamic token activations", "known: float8"),
    ),
    "ct_unknown_group_size": ("ct_int4", _group("weights", group_size=16), ("got int4 group 16 weights with 16-bit",)),
    "ct_permuted_columns": (
        "ct_int4",
        _group("weights", actorder="group"),
        ("got activation-ordered int4 group 32 weights",),
    ),
    "ct_other_format": (
        "ct_int4",
        _group("", format="marlin-24"),
        ("compressed-tensors format of int4_w4a16_g32 must be pack-quantized, got 'marlin-24'",),
    ),
    "ct_another_group_size": (
        "ct_int4",
        _group("weights", group_size=64),
        ("multiple of the group size, got 96 columns in groups of 64",),
    ),
    "ct_no_groups": ("ct_int4", _settings(config_groups=...), ("needs config_groups", "got None")),
    "ct_sparse": (
        "ct_int8",
        _settings(sparsity_config={"format": "sparse-24-bitmask"}),
        ("does not read sparsity_config", "sparse-24-bitmask"),
    ),
    "ct_rotated": (
        "ct_int8",
        _settings(transform_config={"config_groups": {"R1": {}}}),
        ("does not read transform_config", "R1"),
    ),
    "ct_bad_expression": ("ct_int8", _settings(ignore=["re:("]), ("regular expressions, got 're:('",)),
    "ct_one_projection_ignored": (
        "ct_int8",
        _settings(ignore=[DOWN_1]),
        ("stored in one format", "compressed-tensors int-quantized int8_w8a8", f"unquantised for {DOWN_1}"),
    ),
    "ct_one_expert_in_16_bits": (
        "ct_int8",
        _tensor(f"{DOWN_1}.weight", torch.zeros(64, 96, dtype=torch.bfloat16)),
        (f"{DOWN_1}.weight must be I8", "int-quantized int8_w8a8", "got BF16"),
    ),
    "ct_missing_zero_point": (
        "ct_int4",
        _group("weights", symmetric=False),
        (f"'{GATE_0}.weight_zero_point' is missing",),
    ),
    "ct_zero_point_unsaid": (
        "ct_int4_asymmetric",
        _group("weights", symmetric=True),
        ("pack-quantized int4_w4a16_g32 experts have no tensor such as", "weight_zero_point"),
    ),
    "ct_shape_of_something_else": (
        "ct_int4",
        _tensor(f"{DOWN_1}.weight_shape", torch.tensor([96, 64])),
        (f"{DOWN_1}.weight_shape of '{{path}}': it must be [64, 96]", "got [96, 64]"),
    ),
    "ct_missing_static_scale": (
        "ct_fp8_tensor_static",
        _tensor(f"{DOWN_1}.input_scale", None),
        (f"'{DOWN_1}.input_scale' is missing",),
    ),
    "ct_static_scale_unsaid": (
        "ct_fp8_tensor_static",
        _group("input_activations", dynamic=True),
        ("float-quantized fp8_tensor_dynamic experts have no tensor such as", "input_scale"),
    ),
    "ct_zero_global_scale": (
        "ct_nvfp4",
        _tensor(f"{DOWN_1}.weight_global_scale", torch.zeros(1)),
        ("w2_scale_2 must be finite", "got inf at [1]"),
    ),
    "gptq_permuted_columns": (
        "gptq",
        _tensor(f"{DOWN_1}.g_idx", (torch.arange(96) % 3).int()),
        (f"{DOWN_1}.g_idx of '{{path}}'", "32 neighbouring columns, got column 1 in group 1", "desc_act false"),
    ),
    "gptq_missing_order": (
        "gptq_channel",
        _tensor(f"{DOWN_1}.g_idx", None),
        (f"'{DOWN_1}.g_idx' is missing",),
    ),
    "gptq_8_bits": ("gptq", _settings(bits=8), ("{path}/config.json", "bits of quant method gptq must be 4, got 8")),
    "gptq_group_size": ("gptq", _settings(group_size=16), ("must be 32 or 64 or 128 or -1, got 16",)),
    "gptq_another_group_size": ("gptq", _settings(group_size=64), ("got 96 columns in groups of 64",)),
    "gptq_smaller_group_size": (
        "gptq_channel",
        _settings(group_size=32),
        (f"{GATE_0}.scales must be [2, 96]", "int4_w4a16_g32", "got [1, 96]"),
    ),
    "gptq_other_version": (
        "gptq",
        _settings(checkpoint_format="marlin"),
        ("checkpoint_format of quant method gptq must be gptq or gptq_v2, got 'marlin'",),
    ),
    "gptq_wrong_version": (
        "gptq",
        _settings(checkpoint_format="gptq_v2"),
        (f"{GATE_0}.qzeros of", "zero points must be 8 where the config says sym and gptq_v2, got 7"),
    ),
    "gptq_not_symmetric": ("gptq_asymmetric", _settings(sym=True), ("zero points must be 8", "correct sym")),
    "gptq_bias": (
        "gptq",
        _tensor(f"{DOWN_1}.bias", torch.full((64,), 0.5).half()),
        (f"{DOWN_1}.bias of", "have no bias, got one of up to 0.5"),
    ),
    "gptq_one_projection_left_out": (
        "gptq",
        _settings(dynamic={f"-:{DOWN_1}": {}}),
        ("stored in one format", "gptq int4_w4a16_g32", f"unquantised for {DOWN_1}"),
    ),
    "gptq_rules_not_object": ("gptq", _settings(dynamic=["x"]), ("dynamic must be an object of objects, got ['x']",)),
    "gptq_bad_expression": ("gptq", _settings(dynamic={"+:(": {}}), ("regular expressions, got '+:('",)),
    "awq_3_bits": ("awq", _settings(bits=3), ("{path}/config.json", "bits of quant method awq must be 4, got 3")),
    "awq_other_packing": (
        "awq",
        _settings(version="gemv"),
        ("version of quant method awq must be 'gemm', got 'gemv'",),
    ),
    "awq_symmetric": ("awq", _settings(zero_point=False), ("zero_point of quant method awq must be True, got False",)),
    "awq_rows": (
        "awq",
        lambda config, tensors: config.update(moe_intermediate_size=100),
        ("rows of", "must be a multiple of 8", "got 100 and 64"),
    ),
    "awq_said_to_be_gptq": (
        "awq",
        _settings(quant_method="gptq", sym=False),
        (f"{GATE_0}.qweight must be [8, 96]", "gptq int4_w4a16_g32_zp", "got [64, 12]"),
    ),
    "awq_missing_zero_points": ("awq", _tensor(f"{DOWN_1}.qzeros", None), (f"'{DOWN_1}.qzeros' is missing",)),
    "mxfp4_missing_scales": (
        "mxfp4",
        _tensor(f"{BLOCK}.experts.down_proj_scales", None),
        (f"'{BLOCK}.experts.down_proj_scales' is missing",),
    ),
    "mxfp4_blocks_of_another_size": (
        "mxfp4",
        _tensor(f"{BLOCK}.experts.down_proj_blocks", torch.zeros(4, 64, 6, 8, dtype=torch.uint8)),
        ("down_proj_blocks must be [4, 64, 3, 16]", "mxfp4 experts", "got [4, 64, 6, 8]"),
    ),
    "mxfp4_groups_do_not_divide": (
        "mxfp4",
        lambda config, tensors: config.update(intermediate_size=80),
        ("{path}/config.json", "down_proj must be a multiple of the group size, got 80 columns in groups of 32"),
    ),
    "mxfp4_both": (
        "mxfp4",
        _tensor(f"{BLOCK}.experts.down_proj", torch.zeros(4, 96, 64, dtype=torch.bfloat16)),
        ("mxfp4 experts have no tensor such as", f"{BLOCK}.experts.down_proj'"),
    ),
    "mxfp4_of_separate_experts": (
        "fp8_block128",
        _settings(quant_method="mxfp4"),
        (f"'{BLOCK}.experts.gate_up_proj_blocks' is missing",),
    ),
    "fp8_of_fused_experts": (
        "mxfp4",
        _settings(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
        ("{path}/config.json", "model type 'gpt_oss' are read fused, which fp8 in blocks of 128 x 128 is not"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_clear_error(tmp_path: Path, name: str) -> None:
    checkpoint, change, expected = BROKEN[name]
    path = _changed(tmp_path, checkpoint, change)
    with pytest.raises(CheckpointError) as error:
        load_experts(path, 0)
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part.replace("{path}", str(path)) in message


def test_fp8_halves_that_share_a_block(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["moe_intermediate_size"] = 64

    expected = f"rows of {GATE_0} must be a multiple of 128, or one block of w13 would hold gate and up"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load_experts(_changed(tmp_path, "fp8_block128", change), 0)


def test_hf_quant_config_is_read_where_config_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(CHECKPOINTS / "fp8_block128", path)
    config = _config(path)
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json.*"):
        load_experts(path, 0)
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json must hold an object named quantization"):
        load_experts(path, 0)
