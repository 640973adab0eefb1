"""Writes mxfp4 as gpt-oss is published. The codes are random; transformers 5.23.0 says which numbers they are.

Run as `python -m tests.checkpoints.generate.mxfp4`.
"""

from __future__ import annotations

from typing import Final

import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints.generate.generating import save

EXPERTS: Final = 4
HIDDEN: Final = 64
INTERMEDIATE: Final = 96


def main() -> None:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "swiglu_limit": 1.5,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    generator = torch.Generator().manual_seed(0)
    block = "model.layers.0.mlp"
    tensors = {
        f"{block}.router.weight": torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16(),
        f"{block}.router.bias": torch.randn(EXPERTS, generator=generator).bfloat16(),
    }
    dequantized = {}
    for name, rows, columns in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        module = f"{block}.experts.{name}"
        blocks = torch.randint(256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 127, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{module}_blocks"] = blocks
        tensors[f"{module}_scales"] = scales
        tensors[f"{module}_bias"] = (torch.randn(EXPERTS, rows, generator=generator) * 0.2).bfloat16()
        dequantized[module] = convert_moe_packed_tensors(blocks, scales).mT
    save("mxfp4", config, tensors, dequantized, f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
