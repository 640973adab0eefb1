"""Faults of a quantized checkpoint: each breaks a good one; the error is one line that names the rule and the value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open

from moereg.checkpoints import load_experts
from moereg.errors import CheckpointError
from moereg.routing.config_entries import MOST_EXPERTS, MOST_LAYERS
from tests.checkpoints.cures import CURES
from tests.checkpoints.small_checkpoint import error_pattern
from tests.checkpoints.test_quantized_checkpoints import SCHEMES
from tests.support.quantized_checkpoints import (
    BLOCK,
    CHECKPOINTS,
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

FP8: Final = torch.float8_e4m3fn
MXFP4_DOWN: Final = f"{BLOCK}.experts.down_proj"
SETTINGS: Final = "{path}/config.json: "


def _with_config(**changes: Any) -> Change:
    return lambda config, tensors: config.update(changes)


def _unsaid(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["quantization_config"]


def _as_dbrx(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ffn = {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1}
    config.update(model_type="dbrx", n_layers=1, hidden_size=32, ffn_config=ffn)
    root = "transformer.blocks.0.ffn"
    names = [f"{root}.experts.mlp.{name}_{part}" for name in ("w1", "v1", "w2") for part in ("blocks", "scales")]
    tensors.clear()
    tensors.update({name: torch.ones(2 * 32, 32, dtype=torch.uint8) for name in names})
    tensors[f"{root}.router.layer.weight"] = torch.ones(2, 32)


# The checkpoint, the change, and words of the error in their order, with anything between them.
# fmt: off
BROKEN: Final[tuple[tuple[str, Change, str], ...]] = (
    ("fp8_block128", with_settings(weight_block_size=[1, 32]),
        "weight_scale_inv must be [128, 4] ... fp8 in blocks of 1 x 32 experts, got [1, 1]"),
    ("fp8_block128", with_settings(weight_block_size=[64, 64]),
        SETTINGS + "weight_block_size must be in [[128, 128], [1, 32], None], got [64, 64]; use a release"),
    ("fp8_block128", with_settings(weight_block_size=[128, 128.0]), ", None], got [128, 128.0]"),
    ("fp8_block128", with_settings(activation_scheme="static"),
        SETTINGS + "activation_scheme of quant method fp8 must be dynamic where ... 128 x 128, got 'static'"),
    ("fp8_block128", with_settings(activation_scheme=...), "activation_scheme must be in ... got none"),
    ("fp8_block128", with_settings(expert_dtype="fp6"), "expert_dtype must be in ['fp8', 'fp4'], got 'fp6'"),
    ("fp8_block128", with_tensor(f"{DOWN_1}.weight_scale_inv", None),
        f"'{DOWN_1}.weight_scale_inv' is missing from {{path}}/model.safetensors"),
    ("fp8_block128", with_tensor(f"{DOWN_1}.weight_scale_inv", torch.ones(2, 1)),
        "weight_scale_inv must be [1, 1] ... fp8 in blocks ... got [2, 1] in {path}/model.safetensors"),
    ("fp8_block128", with_tensor(f"{DOWN_1}.weight", torch.zeros(128, 128).bfloat16()),
        f"{DOWN_1}.weight must be F8_E4M3 ... got BF16 in {{path}}/model.safetensors"),
    ("fp8_block128", with_tensor(f"{DOWN_1}.weight", torch.zeros(128, 128).to(torch.float8_e5m2)), "F8_E4M3 ... got "),
    ("fp8_block128", with_settings(modules_to_not_convert=[f"{BLOCK}.experts.1"]),
        f"{SETTINGS}... stored in one format ... fp8 in blocks ... unquantized for {module_of(1, 'gate')}"),
    ("fp8_block128", _unsaid, f"{GATE_0}.weight must be BF16 or F16 or F32 ... unquantized ... got F8_E4M3"),
    ("fp8_block128", with_settings(modules_to_not_convert="lm_head"), "must be a list of module names, got 'lm_head'"),
    ("fp8_block128", with_settings(ignored_layers=0), "ignored_layers must be a list of module names, got 0"),
    ("fp8_block128", with_settings(modules_to_not_convert=["a("]), "regular expressions, got 'a('"),
    ("fp8_block128", _with_config(num_experts=MOST_EXPERTS + 1),
        f"num_experts of model type 'qwen3_moe' must be at most {MOST_EXPERTS}"),
    ("fp8_block128", _with_config(num_hidden_layers=10**9), f"must be at most {MOST_LAYERS}, got 1000000000"),
    ("fp8_block128", _with_config(hidden_size=2**40), "must be at most 1048576"),
    ("fp8_block128", _with_config(moe_intermediate_size=10**4000), "at most 1048576, got <an integer of 13288 bits>"),
    ("fp8_block128", _with_config(mlp_only_layers=list(range(MOST_LAYERS + 1))), "a list of layer indices below 5000"),
    ("fp8_block128", _with_config(mlp_only_layers=[-1]), "must be a list of layer indices"),
    ("fp8_block128", _with_config(num_experts_per_tok=True), "must be a whole number of at least 1, got True"),
    ("fp8_block128", _with_config(hidden_act={"name": "silu"}), "unknown hidden_act {'name': 'silu'}"),
    # A text that is not a number of an expert.
    ("fp8_block128", with_tensor(f"{BLOCK}.experts.{'9' * 5000}.gate_proj.weight", torch.ones(1)), "tensor such as '"),
    ("fp8_block128", with_tensor(f"{BLOCK}.experts.\u0663.gate_proj.weight", torch.ones(1)), "no tensor such as '"),
    ("ct_int4", with_group("", input_activations={"type": "float", "num_bits": 8, "strategy": "token"}),
        SETTINGS + "... int4 group 32 weights with float8 static token activations (known with them: 16-bit)"),
    ("ct_int4", with_group("weights", group_size=16), "got int4 group 16 weights with 16-bit"),
    ("ct_int4", with_group("weights", group_size="32"), "group_size must be a whole number of at least 1, got '32'"),
    ("ct_int4", with_group("weights", group_size=64), "multiple of the group size, got 96 columns in groups of 64"),
    ("ct_int4", with_group("weights", actorder="group"), "got activation-ordered int4 group 32 weights"),
    ("ct_int4", with_group("weights", symmetric="true"), "symmetric must be true or false, got 'true'"),
    ("ct_int4", with_group("weights", symmetric=False), f"'{GATE_0}.weight_zero_point' is missing"),
    ("ct_int4", with_group("weights", type="in", num_bits="t4"), "type must be in ['float', 'int'], got 'in'"),
    ("ct_int4", with_group("weights", num_bits=4.0), "num_bits must be a whole number of at least 1, got 4.0"),
    ("ct_int4", with_group("weights", strategy="block", block_structure=128), "got int4 block 128 weights"),
    ("ct_int4", with_group("", format="marlin-24"),
        "compressed-tensors format of int4_w4a16_g32 must be pack-quantized or int-quantized, got 'marlin-24'"),
    ("ct_int4", with_group("", format=["pack-quantized"]), "format must be a name, got ['pack-quantized']"),
    ("ct_int4", with_group("", input_activations="none"), "input_activations must be an object, got 'none'"),
    ("ct_int4", with_settings(config_groups=...), "needs config_groups ... got None"),
    ("ct_int4", with_tensor(f"{DOWN_1}.weight_shape", torch.tensor([96, 64])),
        f"{DOWN_1}.weight_shape of '{{path}}': it must be [64, 96] ... got [96, 64]"),
    ("ct_int4", with_tensor(f"{DOWN_1}.weight_packed", torch.zeros(64, 11).int()), "must be [64, 12] ... got "),
    ("ct_int4", with_tensor(f"{DOWN_1}.weight_packed", torch.zeros(64, 12).long()), "must be I32 ... got "),
    ("ct_int4_asymmetric", with_group("weights", symmetric=True),
        "pack-quantized int4_w4a16_g32 experts have no tensor such as ... weight_zero_point"),
    ("ct_int4_asymmetric", with_tensor(f"{DOWN_1}.weight_zero_point", torch.zeros(64, 3).char()), "must be [8, 3]"),
    ("ct_w4afp8", with_group("input_activations", strategy="group", group_size=128),
        "int4 group 128 weights with float8 dynamic group 128 activations (known with them: 16-bit, float8 static "),
    ("ct_w4afp8", with_group("input_activations", strategy="tensor", dynamic=False), "input_scale' is missing"),
    ("ct_w4afp8_unpacked", with_number(f"{DOWN_1}.weight", 8), "must be from -8 to 7, got -8 to 8; take the"),
    ("ct_int8", with_group("input_activations", dynamic="yes"), "must be in [True, False, 'local'], got 'yes'"),
    ("ct_int8", with_settings(sparsity_config={"format": "sparse-24-bitmask"}), "not read sparsity_config ... sparse"),
    ("ct_int8", with_settings(sparsity_config="dense"), "sparsity_config must be an object, got 'dense'"),
    ("ct_int8", with_settings(transform_config={"config_groups": {"R1": {}}}), "does not read transform_config ... R1"),
    ("ct_int8", with_settings(config_groups=[{}]), "config_groups must be an object of objects, got [{}]"),
    ("ct_int8", with_settings(format=["int-quantized"]), "format must be a name, got ['int-quantized']"),
    ("ct_int8", with_settings(ignore=["re:("]), "regular expressions, got 're:('"),
    ("ct_int8", with_settings(ignore=[DOWN_1]),
        f"stored in one format ... compressed-tensors int-quantized int8_w8a8 ... unquantized for {DOWN_1}"),
    ("ct_int8", with_tensor(f"{DOWN_1}.weight", torch.zeros(64, 96).bfloat16()),
        f"{DOWN_1}.weight must be I8 ... int-quantized int8_w8a8 ... got BF16"),
    ("ct_int8", with_tensor(f"{DOWN_1}.weight_scale", torch.ones(64, 1).int()), "must be BF16 or F16 or F32 ... got "),
    ("ct_int8_w8a16", with_tensor(f"{DOWN_1}.weight_packed", torch.zeros(64, 23).int()), "must be [64, 24] ... got "),
    ("ct_fp8_tensor_static", with_tensor(f"{DOWN_1}.input_scale", None), f"'{DOWN_1}.input_scale' is missing"),
    ("ct_fp8_tensor_static", with_group("input_activations", dynamic=True),
        "float-quantized fp8_tensor_dynamic experts have no tensor such as ... input_scale"),
    ("ct_nvfp4", with_tensor(f"{DOWN_1}.weight_packed", torch.zeros(64, 47).byte()), "must be [64, 48] ... got "),
    # Its inverse is 0, which is a scale.
    ("ct_nvfp4", with_number(f"{DOWN_1}.weight_global_scale", float("inf")), "since they divide, got inf"),
    ("gptq", with_tensor(f"{DOWN_1}.g_idx", (torch.arange(96) % 3).int()),
        f"{DOWN_1}.g_idx of '{{path}}' ... 32 neighboring columns, got column 1 in group 1 ... (desc_act) are"),
    ("gptq", with_settings(bits=8), SETTINGS + "bits of quant method gptq must be 4, got 8"),
    ("gptq", with_settings(bits=4.0), "bits of quant method gptq must be 4, got 4.0"),
    ("gptq", with_settings(group_size=16), "must be 32 or 64 or 128 or -1, got 16"),
    ("gptq", with_settings(group_size=64), "got 96 columns in groups of 64"),
    ("gptq", with_settings(sym="false"), "sym must be true or false, got 'false'"),
    ("gptq", with_settings(sym=0), "sym must be true or false, got 0"),
    ("gptq", with_settings(desc_act="false"), "desc_act must be true or false, got 'false'"),
    ("gptq", with_settings(checkpoint_format="marlin"),
        "checkpoint_format of quant method gptq must be gptq or gptq_v2, got 'marlin'"),
    ("gptq", with_settings(checkpoint_format=["gptq"]), "checkpoint_format must be a name, got ['gptq']"),
    ("gptq", with_settings(checkpoint_format="gptq_v2"),
        f"{GATE_0}.qzeros of ... zero points must be 8 where the config says sym and gptq_v2, got 7"),
    ("gptq", with_tensor(f"{DOWN_1}.bias", torch.full((64,), 0.5).half()), "have no bias, got one of up to 0.5"),
    ("gptq", with_settings(dynamic={f"-:{DOWN_1}": {}}), f"gptq int4_w4a16_g32 ... unquantized for {DOWN_1}"),
    ("gptq", with_settings(dynamic=["x"]), "dynamic must be an object of objects, got ['x']"),
    ("gptq", with_settings(dynamic={"+:(": {}}), "regular expressions, got '+:('"),
    ("gptq", with_tensor(f"{DOWN_1}.qweight", torch.zeros(11, 64).int()), "must be [12, 64] ... got "),
    ("gptq", with_tensor(f"{DOWN_1}.scales", torch.ones(2, 64).half()), "must be [3, 64] ... got "),
    ("gptq_channel", with_tensor(f"{DOWN_1}.g_idx", None), f"'{DOWN_1}.g_idx' is missing"),
    ("gptq_channel", with_settings(group_size=32), "scales must be [2, 96] ... int4_w4a16_g32 ... got [1, 96]"),
    ("gptq_asymmetric", with_settings(sym=True), "zero points must be 8 ... correct sym"),
    ("gptq_asymmetric", with_tensor(f"{DOWN_1}.qzeros", torch.zeros(3, 7).int()), "must be [3, 8] ... got "),
    ("awq", with_settings(bits=3), SETTINGS + "bits of quant method awq must be 4, got 3"),
    ("awq", with_settings(group_size=32.0), "group_size of quant method awq must be 32 or 64 or 128 or -1, got 32.0"),
    ("awq", with_settings(version="gemv"), "version of quant method awq must be 'gemm', got 'gemv'"),
    ("awq", with_settings(zero_point=False), "zero_point of quant method awq must be True, got False"),
    ("awq", with_settings(zero_point=1), "zero_point of quant method awq must be True, got 1"),
    ("awq", _with_config(moe_intermediate_size=100), "rows of ... must be a multiple of 8 ... got 100 and 64"),
    ("awq", with_settings(quant_method="gptq", sym=False),
        f"{GATE_0}.qweight must be [8, 96] ... gptq int4_w4a16_g32_zp ... got [64, 12]"),
    ("awq", with_tensor(f"{DOWN_1}.qzeros", None), f"'{DOWN_1}.qzeros' is missing"),
    ("awq", with_tensor(f"{DOWN_1}.qweight", torch.zeros(96, 7).int()), "must be [96, 8] ... got "),
    ("modelopt_nvfp4", with_settings(quant_algo="MIXED"), SETTINGS + "quant_algo 'MIXED' is unknown (read: ... NVFP4"),
    ("modelopt_nvfp4", with_settings(quant_algo=["NVFP4"]), "quant_algo must be a name, got ['NVFP4']"),
    ("modelopt_nvfp4", with_settings(group_size=16.0), "group_size of quant_algo NVFP4 must be 16, got 16.0"),
    ("modelopt_nvfp4", with_settings(quant_algo="FP8"), "weight must be [96, 64] ... modelopt FP8 ... got [96, 32]"),
    ("modelopt_nvfp4", with_tensor(f"{DOWN_1}.weight_scale_2", None), f"'{DOWN_1}.weight_scale_2' is missing"),
    ("modelopt_nvfp4", with_tensor(f"{DOWN_1}.pre_quant_scale", torch.ones(96)),
        f"modelopt NVFP4 experts have no tensor such as '{DOWN_1}.pre_quant_scale'"),
    ("modelopt_nvfp4", with_tensor(f"{DOWN_1}.weight_scale", torch.zeros(64, 5).to(FP8)), "must be [64, 6] ... got "),
    ("mxfp4", with_tensor(f"{MXFP4_DOWN}_scales", None), f"'{MXFP4_DOWN}_scales' is missing"),
    ("mxfp4", with_tensor(f"{MXFP4_DOWN}_blocks", torch.zeros(4, 64, 6, 8).byte()),
        "down_proj_blocks must be [4, 64, 48] or [4, 64, 3, 16] ... mxfp4 experts ... got [4, 64, 6, 8]"),
    ("mxfp4", _with_config(intermediate_size=80),
        SETTINGS + "... down_proj must be a multiple of the group size, got 80 columns in groups of 32"),
    ("mxfp4", with_tensor(MXFP4_DOWN, torch.zeros(4, 96, 64).bfloat16()),
        f"{MXFP4_DOWN} must be [4, 64, 48] or [4, 64, 3, 16] ... mxfp4 experts, got [4, 96, 64]"),
    ("fp8_block128", with_settings(quant_method="mxfp4"), f"{GATE_0}.weight must be [128, 64] or ... got [128, 128]"),
    ("mxfp4", with_settings(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
        SETTINGS + "fused experts of model type 'gpt_oss' have alternating ... stored as fp8 in blocks of"),
    ("mxfp4", _as_dbrx, SETTINGS + "fused experts of model type 'dbrx' are stored flat, so they cannot be"),
)
# fmt: on


def _broken(path: Path, row: int) -> tuple[Path, str]:
    """The checkpoint of a row, and a pattern of its error."""
    name, change, expected = BROKEN[row]
    changed(path, name, change)
    return path, error_pattern(expected, path)


@pytest.mark.parametrize("row", range(len(BROKEN)))
def test_a_broken_checkpoint_is_one_clear_error(tmp_path: Path, row: int) -> None:
    path, pattern = _broken(tmp_path, row)
    with pytest.raises(CheckpointError, match=pattern) as error:
        load_experts(path, 0)
    assert "\n" not in str(error.value)
    assert any(cure in str(error.value) for cure in CURES)
    assert len(str(error.value)) < 1500


def _scales() -> list[tuple[str, str, float]]:
    """A stored scale of each role in each checkpoint, of a gate and of a down, and a number that it cannot be."""
    found = []
    for name in SCHEMES:
        with safe_open(CHECKPOINTS / name / "model.safetensors", framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118
                if "scale" in tensor and tensor.startswith((GATE_0, DOWN_1, MXFP4_DOWN)):
                    # Zero is no scale of activations. The larger of gate and up counts, and would hide another.
                    value = (
                        -1.0
                        if tensor.startswith(GATE_0)
                        else 0.0
                        if "fp8" in name and "input" in tensor
                        else float("nan")
                    )
                    is_code = file.get_slice(tensor).get_dtype() == "U8"
                    found.append((name, tensor, 255.0 if is_code else value))
    return found


@pytest.mark.parametrize(("name", "tensor", "value"), _scales())
def test_numbers_are_checked_whatever_the_device(
    tmp_path: Path, name: str, tensor: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where ExpertWeights does not look at values.
    monkeypatch.setattr("moereg.weights.expert_weights.checks_values", lambda device: False)
    path = changed(tmp_path, name, with_number(tensor, value))
    expected = f"{tensor} of {str(path)!r}: " + ("global scales" if "global" in tensor else "")
    with pytest.raises(CheckpointError, match=re.escape(expected) + ".* must be finite and (not negative|positive)"):
        load_experts(path, 0)
