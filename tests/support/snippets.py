"""Blocks of the documents, and a small checkpoint and small models for what they show."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from moereg.spec.model_shapes import MODEL_SHAPES, MoEShape
from tests.checkpoints.small_checkpoint import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

_BLOCK: Final = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it stands.
        line: Its first line, counted from 1.
        language: What follows the fence.
        text: Its lines without their common indentation.
    """

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match[2], textwrap.dedent(match[4])))
    return found


def small_models() -> Mapping[str, MoEShape]:
    """The known models with few and small experts: a command that names one runs in a second."""
    return {
        name: dataclasses.replace(
            shape, num_experts=8, hidden_size=256, intermediate_size=128, top_k=min(shape.top_k, 2)
        )
        for name, shape in MODEL_SHAPES.items()
    }


def write_layers(
    path: Path, first: int = 0, end: int = 4, num_experts: int = 8, hidden_size: int = 256, intermediate_size: int = 128
) -> None:
    """Writes experts and routers of a Qwen3-MoE, in bf16; layers before the first are dense. The folder is made."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(first, end):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = torch.randn(num_experts, hidden_size, generator=generator)
        for expert in range(num_experts):
            for name in ("gate", "up", "down"):
                shape = (hidden_size, intermediate_size) if name == "down" else (intermediate_size, hidden_size)
                tensors[f"{block}.experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=generator) / 16
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": end,
        "mlp_only_layers": [*range(first)],
        "hidden_size": hidden_size,
        "moe_intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        # Of the rest, which transformers makes up.
        "vocab_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    path.mkdir(parents=True)
    write_checkpoint(path, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
