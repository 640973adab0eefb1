"""Writes fp8_block128 with transformers 5.23.0's quantizer for `quant_method: fp8` (DeepSeek-V3, Qwen3).

Run as `python -m tests.checkpoints.generate.fp8`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from tests.checkpoints.generate.generating import Model, save


def main() -> None:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }
    settings = SimpleNamespace(scale_fmt="float", weight_block_size=[128, 128])
    quantizer = SimpleNamespace(quantization_config=settings)
    model = Model(num_experts=2, hidden_size=128, intermediate_size=128, dtype=torch.bfloat16)
    tensors, dequantized = dict(model.tensors), {}
    for module, matrix in model.matrices.items():
        found = Fp8Quantize(quantizer)._quantize_one(f"{module}.weight", matrix)
        tensors.update(found)
        dequantized[module] = Fp8Dequantize(quantizer)._dequantize_one(
            found[f"{module}.weight"], found[f"{module}.weight_scale_inv"]
        )
    save(
        "fp8_block128",
        {**model.config, "quantization_config": config},
        tensors,
        dequantized,
        f"transformers {transformers.__version__}",
        row_step=8,
    )


if __name__ == "__main__":
    main()
