"""Writes the ct_* directories with compressed-tensors 0.20.0: its presets, compressors and decompressors.

Run as `python -m tests.checkpoints.generate.compressed_tensors`. Also quantizes whole checkpoints for engines.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from tests.checkpoints.generate.generating import Model, save_packed

# Directory to preset, format, and what differs from the preset.
CHECKPOINTS: Final[dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    "ct_fp8_channel": ("FP8_DYNAMIC", "float-quantized", {}, {}),
    "ct_fp8_block": ("FP8_BLOCK", "float-quantized", {}, {}),
    "ct_fp8_tensor_static": ("FP8", "float-quantized", {}, {}),
    "ct_fp8_tensor_dynamic": ("FP8", "float-quantized", {}, {"dynamic": True, "observer": None}),
    "ct_fp8_tensor_token": ("FP8_DYNAMIC", "float-quantized", {"strategy": "tensor"}, {}),
    "ct_int8": ("INT8", "int-quantized", {}, {}),
    "ct_int8_w8a16": ("W8A16", "pack-quantized", {"strategy": "channel", "group_size": None}, {}),
    "ct_int4": ("W4A16", "pack-quantized", {"group_size": 32}, {}),
    "ct_int4_asymmetric": ("W4A16_ASYM", "pack-quantized", {"group_size": 32}, {}),
    "ct_int4_channel": ("W4A16", "pack-quantized", {"strategy": "channel", "group_size": None}, {}),
    "ct_w4afp8": ("W4AFP8", "pack-quantized", {}, {}),
    "ct_w4afp8_unpacked": ("W4AFP8", "int-quantized", {}, {}),
    "ct_nvfp4": ("NVFP4", "nvfp4-pack-quantized", {}, {}),
    "ct_nvfp4_w4a16": ("NVFP4A16", "nvfp4-pack-quantized", {}, {}),
    "ct_mxfp4_w4a16": ("MXFP4A16", "mxfp4-pack-quantized", {}, {}),
    "ct_mxfp8": ("MXFP8", "mxfp8-quantized", {}, {}),
}

# Of `quantized_copy`, by the scheme's name in moereg.
SCHEMES: Final = {
    "fp8_block128": CHECKPOINTS["ct_fp8_block"],
    "fp8_channel_token": CHECKPOINTS["ct_fp8_channel"],
    "fp8_tensor_dynamic": CHECKPOINTS["ct_fp8_tensor_dynamic"],
    "fp8_tensor_static": CHECKPOINTS["ct_fp8_tensor_static"],
    "int4_w4a16_g32_zp": CHECKPOINTS["ct_int4_asymmetric"],
    # vLLM on a CPU refuses groups of 32.
    "int4_w4a16_g64": ("W4A16", "pack-quantized", {"group_size": 64}, {}),
    "int4_w4a16_gall": CHECKPOINTS["ct_int4_channel"],
    "int8_w8a8": CHECKPOINTS["ct_int8"],
    "mxfp4_w4a16": CHECKPOINTS["ct_mxfp4_w4a16"],
    "mxfp8": CHECKPOINTS["ct_mxfp8"],
    "nvfp4_w4a16": CHECKPOINTS["ct_nvfp4_w4a16"],
}


def _scheme(made: tuple[str, str, dict[str, Any], dict[str, Any]], target: str) -> QuantizationScheme:
    preset, layout, weights, activations = made
    known = preset_name_to_scheme(preset, [target]).model_dump()
    known["format"] = layout
    known["weights"].update(weights)
    if activations:
        known["input_activations"].update(activations)
    return QuantizationScheme(**known)


def _compressed(scheme: QuantizationScheme, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module: scales by compressed-tensors from minima and maxima, activations' made up."""
    arguments = scheme.weights
    rows, columns = matrix.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(map(min, arguments.block_structure or (), matrix.shape)),
        "group": (1, arguments.group_size),
        "tensor_group": (1, arguments.group_size),
    }[arguments.strategy]
    blocks = matrix.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    if arguments.strategy == "tensor":
        low, high = low.reshape(1), high.reshape(1)
    tensors = {"weight": matrix.bfloat16()}
    global_scale = None
    if arguments.strategy == "tensor_group":
        global_scale = generate_gparam(matrix.amin().reshape(1), matrix.amax().reshape(1))
        tensors["weight_global_scale"] = global_scale
    scale, zero_point = calculate_qparams(low, high, arguments, global_scale)
    tensors["weight_scale"] = scale if global_scale is not None else scale.bfloat16()
    tensors["weight_zero_point"] = zero_point
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    found = compressor.compress(tensors, scheme)
    if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
        found["input_scale"] = matrix.abs().amax().reshape(1) / 20
    if scheme.input_activations is not None and scheme.input_activations.dynamic == "local":
        found["input_global_scale"] = 448 * 6 / matrix.abs().amax().reshape(1) / 8
    return found, compressor.decompress(found, scheme)["weight"]


def _settings(scheme: QuantizationScheme, ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint."""
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=scheme.format, ignore=ignore, quantization_status="compressed"
    )
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settings


def quantized_copy(source: Path, out: Path, quant: str) -> Path:
    """Quantizes the routed experts of a checkpoint in bf16, and copies everything else.

    Args:
        source: A directory with config.json and model.safetensors, which has a tensor for each projection of an expert.
        out: A directory to make.
        quant: A scheme of `SCHEMES`.
    """
    scheme = _scheme(SCHEMES[quant], r"re:.*\.experts\.\d+\.\w+_proj$")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        found, _ = _compressed(scheme, tensor.float())
        tensors |= {f"{name.removesuffix('weight')}{suffix}": value.contiguous() for suffix, value in found.items()}
    for name in tensors:
        if name.endswith("up_proj.input_scale"):  # Gate and up have the same input, and vLLM insists on one scale.
            tensors[name] = tensors[name.replace("up_proj", "gate_proj")].clone()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": _settings(scheme, [])}))
    return out


def main() -> None:
    for directory in CHECKPOINTS:
        has_wide_groups = "block" in directory or "w4afp8" in directory
        model = Model(128, 128) if has_wide_groups else Model()
        scheme = _scheme(CHECKPOINTS[directory], "Linear")
        settings = _settings(scheme, ["lm_head", "model.layers.0.mlp.gate"])
        library = f"compressed-tensors {compressed_tensors.__version__}"
        save_packed(directory, model, settings, functools.partial(_compressed, scheme), library)


if __name__ == "__main__":
    main()
