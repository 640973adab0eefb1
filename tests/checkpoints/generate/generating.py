"""Shared by the scripts that write the small checkpoints. Needs torch and safetensors, not moereg."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file

__all__ = ["ROOT", "Model", "save"]

ROOT: Final = Path(__file__).parents[1] / "stored"
_BLOCK: Final = "model.layers.0.mlp"


class Model:
    """The experts of a one-layer Qwen3-MoE with numbers that tell every row, column, expert and projection apart.

    Attributes:
        config: config.json without its quantization_config.
        tensors: Everything that is not quantized, by name.
        matrices: fp32 [N,K] of the experts' projections, by module name.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_experts * hidden_size + intermediate_size)
        self.config: dict[str, Any] = {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 1,
            "hidden_size": hidden_size,
            "moe_intermediate_size": intermediate_size,
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "dtype": str(dtype).removeprefix("torch."),
        }
        router = torch.randn(num_experts, hidden_size, generator=generator)
        self.tensors = {f"{_BLOCK}.gate.weight": router.to(dtype)}
        self.matrices: dict[str, torch.Tensor] = {}
        sizes = {
            "gate_proj": (intermediate_size, hidden_size, 0.10),
            "up_proj": (intermediate_size, hidden_size, 0.25),
            "down_proj": (hidden_size, intermediate_size, 0.15),
        }
        for expert in range(num_experts):
            for name, (rows, columns, deviation) in sizes.items():
                # Rows and columns of different size, so that scales of groups differ; and not centered on 0.
                spread = torch.linspace(0.5, 1.5, rows).unsqueeze(1) * torch.linspace(1.5, 0.5, columns)
                matrix = torch.randn(rows, columns, generator=generator) * deviation * spread + 0.02
                self.matrices[f"{_BLOCK}.experts.{expert}.{name}"] = matrix.to(dtype).float()


def save(
    directory: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dequantized: dict[str, torch.Tensor],
    library: str,
    row_step: int = 1,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes config.json, model.safetensors and expected.safetensors.

    Args:
        directory: Name below this one.
        config: Whole.
        tensors: By name.
        dequantized: What the library makes of each module, [N,K] in its dtype.
        library: Name and version, kept as metadata.
        row_step: Of the dequantized rows only every so many are kept.
        files: More text files, by name.
    """
    path = ROOT / directory
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name, text in files.items():
        (path / name).write_text(text)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    kept = {name: matrix[..., ::row_step, :].contiguous() for name, matrix in dequantized.items()}
    save_file(kept, path / "expected.safetensors", {"library": library, "row_step": str(row_step)})
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    print(f"{directory}: {num_bytes} bytes by {library}")
    assert num_bytes < 200_000, "small files only"
