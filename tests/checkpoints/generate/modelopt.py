"""Writes the modelopt_* directories with nvidia-modelopt 0.47.0: calibration, Hugging Face export and dequantizer.

Exported tensors other than the experts and the router are left out. Run as `python -m
tests.checkpoints.generate.modelopt` where that library is, with transformers 5.23.0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import from_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.checkpoints.generate.generating import ROOT, Model, save

# Directory to the library's name of the recipe.
CHECKPOINTS: Final = {
    "modelopt_fp8": "FP8_DEFAULT_CFG",
    "modelopt_nvfp4": "NVFP4_DEFAULT_CFG",
    "modelopt_nvfp4_w4a16": "W4A16_NVFP4_CFG",
}


def _transformer(model: Model) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        **model.config, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, intermediate_size=64
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    torch.manual_seed(0)
    transformer = Qwen3MoeForCausalLM(config).bfloat16().eval()
    block = transformer.model.layers[0].mlp
    for expert in range(config.num_experts):
        gate, up, down = (
            model.matrices[f"model.layers.0.mlp.experts.{expert}.{name}_proj"] for name in ("gate", "up", "down")
        )
        block.experts.gate_up_proj.data[expert] = torch.cat((gate, up))
        block.experts.down_proj.data[expert] = down
    block.gate.weight.data.copy_(model.tensors["model.layers.0.mlp.gate.weight"])
    return transformer


def _dequantized(tensors: dict[str, torch.Tensor], module: str, matrix: torch.Tensor) -> torch.Tensor:
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if weight.dtype != torch.uint8:
        return from_quantized_weight(weight, scale, "fp8", torch.float32)
    packed = NVFP4QTensor(matrix.shape, torch.float32, weight)
    return packed.dequantize(scale=scale, double_scale=tensors[f"{module}.weight_scale_2"], block_sizes={-1: 16})


def main() -> None:
    for directory, recipe in CHECKPOINTS.items():
        model = Model()
        transformer = _transformer(model)
        mtq.quantize(transformer, getattr(mtq, recipe), lambda whole: whole(torch.arange(64).view(2, 32)))
        with tempfile.TemporaryDirectory() as path:
            export_hf_checkpoint(transformer, export_dir=path)
            exported = load_file(Path(path) / "model.safetensors")
            config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
            hf_quant_config = (Path(path) / "hf_quant_config.json").read_text()
        tensors = {name: tensor for name, tensor in exported.items() if ".mlp." in name}
        dequantized = {module: _dequantized(tensors, module, matrix) for module, matrix in model.matrices.items()}
        whole = {**model.config, "quantization_config": config["quantization_config"]}
        save(directory, whole, tensors, dequantized, f"nvidia-modelopt {modelopt.__version__}")
        (ROOT / directory / "hf_quant_config.json").write_text(hf_quant_config)


if __name__ == "__main__":
    main()
