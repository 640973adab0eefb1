"""Faults of a quantized checkpoint: each breaks a good one; the error names the rule and the value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from moereg.checkpoints import load_experts
from moereg.cli import main
from moereg.errors import CheckpointError
from tests.checkpoints.test_quantized_checkpoints import SCHEMES
from tests.support.quantized_checkpoints import (
    BLOCK,
    DOWN_1,
    GATE_0,
    Change,
    changed,
    module_of,
    with_group,
    with_number,
    with_settings,
    with_tensor,
)

INF: Final = float("inf")
NAN: Final = float("nan")
FP8: Final = torch.float8_e4m3fn


def _only_some_experts_named(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["quantization_config"]["modules_to_not_convert"] = [f"{BLOCK}.experts.1"]


# fmt: off
BROKEN: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "fp8_other_blocks": ("fp8_block128", with_settings(weight_block_size=[1, 32]),
        ("{path}/config.json", "weight_block_size of quant method fp8 must be [128, 128], got [1, 32]")),
    "fp8_per_tensor": ("fp8_block128", with_settings(weight_block_size=...),
        ("{path}/config.json", "weight_block_size", "got None", "128 x 128")),
    "fp8_static": ("fp8_block128", with_settings(activation_scheme="static"), ("'dynamic', got 'static'",)),
    "fp8_missing_scale": ("fp8_block128", with_tensor(f"{DOWN_1}.weight_scale_inv", None),
        (f"'{DOWN_1}.weight_scale_inv' is missing from {{path}}/model.safetensors",)),
    "fp8_scale_of_another_shape": ("fp8_block128", with_tensor(f"{DOWN_1}.weight_scale_inv", torch.ones(2, 1)),
        (f"{DOWN_1}.weight_scale_inv must be [1, 1]", "fp8 in blocks", "got [2, 1] in {path}/model.safetensors")),
    "fp8_one_expert_in_16_bits": ("fp8_block128",
        with_tensor(f"{DOWN_1}.weight", torch.zeros(128, 128, dtype=torch.bfloat16)),
        (f"{DOWN_1}.weight must be F8_E4M3", "got BF16 in {path}/model.safetensors")),
    "fp8_one_expert_listed": ("fp8_block128", _only_some_experts_named,
        ("{path}/config.json", "stored in one format", "fp8 in blocks", f"unquantized for {module_of(1, 'gate')}")),
    "fp8_unlisted_but_said": ("fp8_block128", with_settings(modules_to_not_convert=["model.layers.0"]),
        (f"{GATE_0}.weight must be BF16 or F16 or F32", "unquantized", "got F8_E4M3")),
    "fp8_unsaid": ("fp8_block128", lambda config, tensors: config.pop("quantization_config"),
        (f"{GATE_0}.weight must be BF16 or F16 or F32", "unquantized", "got F8_E4M3")),
    "fp8_nan_scale": ("fp8_block128", with_tensor(f"{DOWN_1}.weight_scale_inv", torch.full((1, 1), torch.nan)),
        (f"{DOWN_1}.weight_scale_inv of '{{path}}': w2_scale must be finite and not negative, got nan at [0, 0]",)),
    "fp8_bad_list": ("fp8_block128", with_settings(modules_to_not_convert="lm_head"),
        ("modules_to_not_convert must be a list of module names, got 'lm_head'",)),
    "fp8_bad_pattern": ("fp8_block128", with_settings(modules_to_not_convert=["a("]),
        ("regular expressions, got 'a('",)),
    "ct_unknown_activations": ("ct_int4",
        with_group("", input_activations={"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}),
        ("{path}/config.json", "got int4 group 32 weights with float8 dynamic token activations", "known: float8")),
    "ct_unknown_group_size": ("ct_int4", with_group("weights", group_size=16),
        ("got int4 group 16 weights with 16-bit",)),
    "ct_w4afp8_of_groups": (
        "ct_w4afp8",
        with_group("input_activations", strategy="group", group_size=128),
        (
            "got int4 group 128 weights with float8 dynamic group 128 activations",
            "int4 group 128 with float8 dynamic to",
        ),
    ),
    "ct_w4afp8_without_its_scale": ("ct_w4afp8", with_group("input_activations", strategy="tensor", dynamic=False),
        ("gate_proj.input_scale' is missing",)),
    "ct_permuted_columns": ("ct_int4", with_group("weights", actorder="group"),
        ("got activation-ordered int4 group 32 weights",)),
    "ct_other_format": ("ct_int4", with_group("", format="marlin-24"),
        ("compressed-tensors format of int4_w4a16_g32 must be pack-quantized or int-quantized, got 'marlin-24'",)),
    "ct_another_group_size": ("ct_int4", with_group("weights", group_size=64),
        ("multiple of the group size, got 96 columns in groups of 64",)),
    "ct_no_groups": ("ct_int4", with_settings(config_groups=...), ("needs config_groups", "got None")),
    "ct_sparse": ("ct_int8", with_settings(sparsity_config={"format": "sparse-24-bitmask"}),
        ("does not read sparsity_config", "sparse-24-bitmask")),
    "ct_rotated": ("ct_int8", with_settings(transform_config={"config_groups": {"R1": {}}}),
        ("does not read transform_config", "R1")),
    "ct_bad_expression": ("ct_int8", with_settings(ignore=["re:("]), ("regular expressions, got 're:('",)),
    "ct_one_projection_ignored": ("ct_int8", with_settings(ignore=[DOWN_1]),
        ("stored in one format", "compressed-tensors int-quantized int8_w8a8", f"unquantized for {DOWN_1}")),
    "ct_one_expert_in_16_bits": ("ct_int8", with_tensor(f"{DOWN_1}.weight", torch.zeros(64, 96, dtype=torch.bfloat16)),
        (f"{DOWN_1}.weight must be I8", "int-quantized int8_w8a8", "got BF16")),
    "ct_missing_zero_point": ("ct_int4", with_group("weights", symmetric=False),
        (f"'{GATE_0}.weight_zero_point' is missing",)),
    "ct_zero_point_unsaid": ("ct_int4_asymmetric", with_group("weights", symmetric=True),
        ("pack-quantized int4_w4a16_g32 experts have no tensor such as", "weight_zero_point")),
    "ct_shape_of_something_else": ("ct_int4", with_tensor(f"{DOWN_1}.weight_shape", torch.tensor([96, 64])),
        (f"{DOWN_1}.weight_shape of '{{path}}': it must be [64, 96]", "got [96, 64]")),
    "ct_missing_static_scale": ("ct_fp8_tensor_static", with_tensor(f"{DOWN_1}.input_scale", None),
        (f"'{DOWN_1}.input_scale' is missing",)),
    "ct_static_scale_unsaid": ("ct_fp8_tensor_static", with_group("input_activations", dynamic=True),
        ("float-quantized fp8_tensor_dynamic experts have no tensor such as", "input_scale")),
    "ct_zero_global_scale": ("ct_nvfp4", with_tensor(f"{DOWN_1}.weight_global_scale", torch.zeros(1)),
        (f"{DOWN_1}.weight_global_scale of '{{path}}'", "must be finite and positive, since they divide, got 0.0")),
    "gptq_permuted_columns": ("gptq", with_tensor(f"{DOWN_1}.g_idx", (torch.arange(96) % 3).int()),
        (f"{DOWN_1}.g_idx of '{{path}}'", "32 neighboring columns, got column 1 in group 1", "desc_act false")),
    "gptq_missing_order": ("gptq_channel", with_tensor(f"{DOWN_1}.g_idx", None), (f"'{DOWN_1}.g_idx' is missing",)),
    "gptq_8_bits": ("gptq", with_settings(bits=8),
        ("{path}/config.json", "bits of quant method gptq must be 4, got 8")),
    "gptq_group_size": ("gptq", with_settings(group_size=16), ("must be 32 or 64 or 128 or -1, got 16",)),
    "gptq_another_group_size": ("gptq", with_settings(group_size=64), ("got 96 columns in groups of 64",)),
    "gptq_smaller_group_size": ("gptq_channel", with_settings(group_size=32),
        (f"{GATE_0}.scales must be [2, 96]", "int4_w4a16_g32", "got [1, 96]")),
    "gptq_other_version": ("gptq", with_settings(checkpoint_format="marlin"),
        ("checkpoint_format of quant method gptq must be gptq or gptq_v2, got 'marlin'",)),
    "gptq_wrong_version": ("gptq", with_settings(checkpoint_format="gptq_v2"),
        (f"{GATE_0}.qzeros of", "zero points must be 8 where the config says sym and gptq_v2, got 7")),
    "gptq_not_symmetric": ("gptq_asymmetric", with_settings(sym=True), ("zero points must be 8", "correct sym")),
    "gptq_bias": ("gptq", with_tensor(f"{DOWN_1}.bias", torch.full((64,), 0.5).half()),
        (f"{DOWN_1}.bias of", "have no bias, got one of up to 0.5")),
    "gptq_one_projection_left_out": ("gptq", with_settings(dynamic={f"-:{DOWN_1}": {}}),
        ("stored in one format", "gptq int4_w4a16_g32", f"unquantized for {DOWN_1}")),
    "gptq_rules_not_object": ("gptq", with_settings(dynamic=["x"]),
        ("dynamic must be an object of objects, got ['x']",)),
    "gptq_bad_expression": ("gptq", with_settings(dynamic={"+:(": {}}), ("regular expressions, got '+:('",)),
    "awq_3_bits": ("awq", with_settings(bits=3), ("{path}/config.json", "bits of quant method awq must be 4, got 3")),
    "awq_other_packing": ("awq", with_settings(version="gemv"),
        ("version of quant method awq must be 'gemm', got 'gemv'",)),
    "awq_symmetric": ("awq", with_settings(zero_point=False),
        ("zero_point of quant method awq must be True, got False",)),
    "awq_rows": ("awq", lambda config, tensors: config.update(moe_intermediate_size=100),
        ("rows of", "must be a multiple of 8", "got 100 and 64")),
    "awq_said_to_be_gptq": ("awq", with_settings(quant_method="gptq", sym=False),
        (f"{GATE_0}.qweight must be [8, 96]", "gptq int4_w4a16_g32_zp", "got [64, 12]")),
    "awq_missing_zero_points": ("awq", with_tensor(f"{DOWN_1}.qzeros", None), (f"'{DOWN_1}.qzeros' is missing",)),
    "modelopt_unknown": ("modelopt_nvfp4", with_settings(quant_algo="MIXED_PRECISION"),
        ("{path}/config.json", "unknown quant_algo 'MIXED_PRECISION'", "NVFP4")),
    "modelopt_said_to_be_fp8": ("modelopt_nvfp4", with_settings(quant_algo="FP8"),
        (f"{GATE_0}.weight must be [96, 64]", "modelopt FP8", "got [96, 32]")),
    "modelopt_missing_global_scale": ("modelopt_nvfp4", with_tensor(f"{DOWN_1}.weight_scale_2", None),
        (f"'{DOWN_1}.weight_scale_2' is missing",)),
    "modelopt_smoothed": ("modelopt_nvfp4", with_tensor(f"{DOWN_1}.pre_quant_scale", torch.ones(96)),
        ("modelopt NVFP4 experts have no tensor such as", f"'{DOWN_1}.pre_quant_scale'")),
    "mxfp4_missing_scales": ("mxfp4", with_tensor(f"{BLOCK}.experts.down_proj_scales", None),
        (f"'{BLOCK}.experts.down_proj_scales' is missing",)),
    "mxfp4_blocks_of_another_size": ("mxfp4",
        with_tensor(f"{BLOCK}.experts.down_proj_blocks", torch.zeros(4, 64, 6, 8, dtype=torch.uint8)),
        ("down_proj_blocks must be [4, 64, 3, 16]", "mxfp4 experts", "got [4, 64, 6, 8]")),
    "mxfp4_groups_do_not_divide": ("mxfp4", lambda config, tensors: config.update(intermediate_size=80),
        ("{path}/config.json", "down_proj must be a multiple of the group size, got 80 columns in groups of 32")),
    "mxfp4_both": ("mxfp4", with_tensor(f"{BLOCK}.experts.down_proj", torch.zeros(4, 96, 64, dtype=torch.bfloat16)),
        ("mxfp4 experts have no tensor such as", f"{BLOCK}.experts.down_proj'")),
    "mxfp4_of_separate_experts": ("fp8_block128", with_settings(quant_method="mxfp4"),
        (f"'{BLOCK}.experts.gate_up_proj_blocks' is missing",)),
    "fp8_of_fused_experts": ("mxfp4",
        with_settings(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
        ("{path}/config.json", "model type 'gpt_oss' are read fused, which fp8 in blocks of 128 x 128 is not")),
}
# fmt: on


# Numbers that no scale can have: checkpoint, tensor, number, and the error's words.
BAD_NUMBERS: dict[str, tuple[str, str, float, str]] = {
    "fp8_negative": ("fp8_block128", f"{DOWN_1}.weight_scale_inv", -1.0, "w2_scale must be finite and not negative"),
    "ct_fp8_channel_infinite": ("ct_fp8_channel", f"{GATE_0}.weight_scale", INF, "w13_scale must be finite"),
    "ct_fp8_tensor_negative": ("ct_fp8_tensor_dynamic", f"{DOWN_1}.weight_scale", -0.5, "w2_scale must be finite"),
    "ct_int8_infinite": ("ct_int8", f"{DOWN_1}.weight_scale", INF, "w2_scale must be finite"),
    "ct_int4_nan": ("ct_int4", f"{GATE_0}.weight_scale", NAN, "w13_scale must be finite"),
    "ct_w4afp8_negative": ("ct_w4afp8", f"{DOWN_1}.weight_scale", -1.0, "w2_scale must be finite and not negative"),
    "ct_w4afp8_beyond": ("ct_w4afp8_unpacked", f"{DOWN_1}.weight", 8, "must be from -8 to 7, got -8 to 8; take the"),
    "ct_static_zero": ("ct_fp8_tensor_static", f"{DOWN_1}.input_scale", 0.0, "a2_scale must be finite and positive"),
    # The larger scale of gate and up counts, which hides the other one.
    "ct_static_negative": ("ct_fp8_tensor_static", f"{GATE_0}.input_scale", -1.0, "a13_scale must be finite and pos"),
    "ct_nvfp4_negative": ("ct_nvfp4", f"{DOWN_1}.weight_scale", -1.0, "w2_scale must be finite and not negative"),
    "ct_nvfp4_input_zero": ("ct_nvfp4", f"{GATE_0}.input_global_scale", 0.0, "since they divide"),
    # Its inverse is 0, which is a scale.
    "ct_nvfp4_infinite": ("ct_nvfp4", f"{DOWN_1}.weight_global_scale", INF, "since they divide"),
    "ct_nvfp4_w4a16_negative": ("ct_nvfp4_w4a16", f"{GATE_0}.weight_global_scale", -2.0, "since they divide"),
    "ct_mxfp8_nan": ("ct_mxfp8", f"{DOWN_1}.weight_scale", 255, "w2_scale must be finite and not negative, got nan"),
    "ct_mxfp4_nan": ("ct_mxfp4_w4a16", f"{GATE_0}.weight_scale", 255, "w13_scale must be finite and not negative"),
    "modelopt_fp8_zero": ("modelopt_fp8", f"{DOWN_1}.input_scale", 0.0, "a2_scale must be finite and positive"),
    "modelopt_fp8_negative": ("modelopt_fp8", f"{GATE_0}.weight_scale", -1.0, "w13_scale must be finite"),
    "modelopt_nvfp4_input_nan": ("modelopt_nvfp4", f"{GATE_0}.input_scale", NAN, "a13_scale must be finite"),
    "modelopt_nvfp4_negative": ("modelopt_nvfp4", f"{DOWN_1}.weight_scale_2", -1.0, "w2_scale_2 must be finite"),
    "gptq_negative": ("gptq", f"{DOWN_1}.scales", -1.0, "w2_scale must be finite and not negative, got -1.0"),
    "awq_nan": ("awq", f"{GATE_0}.scales", NAN, "w13_scale must be finite and not negative, got nan"),
    "mxfp4_nan": ("mxfp4", f"{BLOCK}.experts.down_proj_scales", 255, "w2_scale must be finite and not negative"),
}
BROKEN |= {
    name: (checkpoint, with_number(tensor, value), (f"{tensor} of '{{path}}': ", text))
    for name, (checkpoint, tensor, value, text) in BAD_NUMBERS.items()
}

# Packed tensors that are not a whole number of words, bytes or groups, or hold other integers.
# fmt: off
BAD_PACKING: dict[str, tuple[str, str, torch.Tensor, str]] = {
    "gptq_words": ("gptq", f"{DOWN_1}.qweight", torch.zeros(11, 64).int(), "must be [12, 64]"),
    "gptq_groups": ("gptq", f"{DOWN_1}.scales", torch.ones(2, 64).half(), "must be [3, 64]"),
    "gptq_zero_points": ("gptq_asymmetric", f"{DOWN_1}.qzeros", torch.zeros(3, 7).int(), "must be [3, 8]"),
    "awq_words": ("awq", f"{DOWN_1}.qweight", torch.zeros(96, 7).int(), "must be [96, 8]"),
    "ct_int4_words": ("ct_int4", f"{DOWN_1}.weight_packed", torch.zeros(64, 11).int(), "must be [64, 12]"),
    "ct_int4_long_words": ("ct_int4", f"{DOWN_1}.weight_packed", torch.zeros(64, 12).long(), "must be I32"),
    "ct_int8_words": ("ct_int8_w8a16", f"{DOWN_1}.weight_packed", torch.zeros(64, 23).int(), "must be [64, 24]"),
    "ct_int8_integer_scale": ("ct_int8", f"{DOWN_1}.weight_scale", torch.ones(64, 1).int(), "must be BF16 or F16 or"),
    "ct_zero_point_unpacked": ("ct_int4_asymmetric", f"{DOWN_1}.weight_zero_point",
        torch.zeros(64, 3, dtype=torch.int8), "must be [8, 3]"),
    "ct_nvfp4_bytes": ("ct_nvfp4", f"{DOWN_1}.weight_packed", torch.zeros(64, 47).byte(), "must be [64, 48]"),
    "modelopt_groups": ("modelopt_nvfp4", f"{DOWN_1}.weight_scale", torch.zeros(64, 5).to(FP8), "must be [64, 6]"),
    "fp8_other_float": ("fp8_block128", f"{DOWN_1}.weight", torch.zeros(128, 128).to(torch.float8_e5m2), "F8_E4M3"),
}
# fmt: on
BROKEN |= {
    name: (checkpoint, with_tensor(tensor, value), (tensor, text, "got "))
    for name, (checkpoint, tensor, value, text) in BAD_PACKING.items()
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_clear_error(tmp_path: Path, name: str) -> None:
    checkpoint, change, expected = BROKEN[name]
    path = changed(tmp_path, checkpoint, change)
    with pytest.raises(CheckpointError) as error:
        load_experts(path, 0)
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part.replace("{path}", str(path)) in message


@pytest.mark.few(most=20)
@pytest.mark.parametrize("name", BROKEN)
def test_run_says_the_same_and_exits_2(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, change, expected = BROKEN[name]
    path = changed(tmp_path, checkpoint, change)
    assert main(["run", "--checkpoint", str(path), "--json", "--platform", "cpu", "--tokens", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for part in expected:
        assert part.replace("{path}", str(path)) in err


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_numbers_are_checked_whatever_the_device(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU, where ExpertWeights does not look at values.
    monkeypatch.setattr("moereg.weights.expert_weights.checks_values", lambda device: False)
    checkpoint, tensor, value, text = BAD_NUMBERS[name]
    with pytest.raises(CheckpointError, match=re.escape(text)):
        load_experts(changed(tmp_path, checkpoint, with_number(tensor, value)), 0)


def test_every_format_has_bad_numbers() -> None:
    stored = {checkpoint for checkpoint, *_ in BAD_NUMBERS.values()}
    assert {SCHEMES[name] for name in stored} == set(SCHEMES.values()) - {"int4_w4a16_gall", "int8_w8a16"}


def test_fp8_halves_that_share_a_block(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["moe_intermediate_size"] = 64

    expected = f"rows of {GATE_0} must be a multiple of 128, or one block of w13 would hold gate and up"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load_experts(changed(tmp_path, "fp8_block128", change), 0)
