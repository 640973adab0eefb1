"""Shared by the scripts that write the small checkpoints. Needs torch and safetensors, not moereg."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

ROOT: Final = Path(__file__).parents[1] / "stored"
_BLOCK: Final = "model.layers.0.mlp"


class Model:
    """Two experts of a one-layer Qwen3-MoE with numbers that tell every row, column, expert and projection apart.

    Attributes:
        config: config.json without its quantization_config.
        tensors: Everything that is not quantized, by name.
        matrices: fp32 [N,K] of the experts' projections, by module name.
    """

    def __init__(self, hidden_size: int = 64, intermediate_size: int = 96, dtype: torch.dtype = torch.bfloat16) -> None:
        num_experts = 2
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


Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def save_packed(directory: str, model: Model, quantization: dict[str, Any], pack: Pack, library: str) -> None:
    """Writes a model whose experts a library packs.

    Args:
        directory: As `save` takes it.
        model: Unquantized.
        quantization: `quantization_config`.
        pack: Makes the tensors of a module and what the library restores from them, out of its matrix.
        library: As `save` takes it.
    """
    tensors, dequantized = dict(model.tensors), {}
    for module, matrix in model.matrices.items():
        found, dequantized[module] = pack(matrix)
        tensors.update({f"{module}.{name}": tensor for name, tensor in found.items()})
    save(directory, {**model.config, "quantization_config": quantization}, tensors, dequantized, library)


def save(
    directory: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dequantized: dict[str, torch.Tensor],
    library: str,
) -> None:
    """Writes config.json, model.safetensors and expected.safetensors.

    Args:
        directory: Name below `ROOT`.
        config: Whole.
        tensors: By name.
        dequantized: What the library makes of each module, [N,K] in its dtype; a third of the rows are kept, of large
            matrices an eighth.
        library: Name and version, kept as metadata.
    """
    path = ROOT / directory
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    row_step = 8 if config["hidden_size"] == 128 else 3
    kept = {name: matrix[..., ::row_step, :].contiguous() for name, matrix in dequantized.items()}
    save_file(kept, path / "expected.safetensors", {"library": library, "row_step": str(row_step)})
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    print(f"{directory}: {num_bytes} bytes by {library}")
    assert num_bytes < 200_000, "small files only"
