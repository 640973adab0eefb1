"""A checkpoint written by hand, for what needs no model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "moe_intermediate_size": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "hidden_act": "silu",
}


EXPERTS = "model.layers.1.mlp.experts"
ROUTER = "model.layers.1.mlp.gate.weight"


def small_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (5, 8)}
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (4, 8)
        for expert in range(4):
            shapes[f"{block}.experts.{expert}.gate_proj.weight"] = (6, 8)
            shapes[f"{block}.experts.{expert}.up_proj.weight"] = (6, 8)
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def shard_of(name: str) -> str:
    """Layer 1 has a file for the router and one for each pair of experts; the rest is in another."""
    if name.startswith(EXPERTS):
        return f"experts{int(name.removeprefix(EXPERTS + '.')[0]) // 2}.safetensors"
    return "router.safetensors" if name == ROUTER else "rest.safetensors"


def write_checkpoint(
    path: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    shard_of: Callable[[str], str] | None = None,
) -> None:
    """Into one file, or into those that a function names for each tensor."""
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = small_tensors() if tensors is None else tensors
    if shard_of is None:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {name: shard_of(name) for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def error_pattern(expected: str, path: Path) -> str:
    """A pattern of an error about a checkpoint: words in their order, with anything where they have three dots."""
    return ".*".join(map(re.escape, expected.replace("{path}", str(path)).split(" ... ")))
