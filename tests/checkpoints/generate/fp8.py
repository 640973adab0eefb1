"""Writes fp8_block128 with transformers 5.23.0's quantizer for `quant_method: fp8` (DeepSeek-V3, Qwen3).

Run as `python -m tests.checkpoints.generate.fp8`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from tests.checkpoints.generate.generating import Model, save_packed

CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


def _packed(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    settings = SimpleNamespace(scale_fmt="float", weight_block_size=[128, 128])
    quantizer = SimpleNamespace(quantization_config=settings)
    found = Fp8Quantize(quantizer)._quantize_one("module.weight", matrix)
    found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    return found, Fp8Dequantize(quantizer)._dequantize_one(found["weight"], found["weight_scale_inv"])


if __name__ == "__main__":
    save_packed("fp8_block128", Model(128, 128), CONFIG, _packed, f"transformers {transformers.__version__}")
