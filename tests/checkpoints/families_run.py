"""What a family's own block does with hidden states: which experts it asks, and what they answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints.tiny_families import Family


@dataclasses.dataclass(frozen=True)
class Routed:
    """What the model's own block gave its experts, and what they made of it, scaled as the block scales it."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor


@torch.no_grad()
def run_block(family: Family, model: Any, dtype: torch.dtype = torch.float32) -> Routed:
    """Runs the block and listens to its experts, so that the routing is the model's own."""
    block, num_tokens = family.block(model), 33
    text = model.config.get_text_config()
    size = getattr(text, "hidden_size", None) or text.d_model
    hidden_states = torch.randn(1, num_tokens, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    heard: dict[str, Any] = {}

    def listen(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: torch.Tensor) -> None:
        heard.update(args=(*args, *keywords.values()), out=out)

    handle = block.experts.register_forward_hook(listen, with_kwargs=True)
    block(hidden_states)
    handle.remove()
    scaling = family.scaling(text)
    flat = hidden_states[0]
    if len(heard["args"]) == 1:  # Llama 4 hands over inputs that are weighted already, of all experts.
        scores, _ = block.router(flat)
        topk_weights, topk_ids = scores.topk(text.num_experts_per_tok, dim=-1)
        out = heard["out"].view(block.num_experts, num_tokens, -1).sum(dim=0)
        return Routed(flat, topk_ids, topk_weights, out)
    if len(heard["args"]) == 2:
        pytest.skip(f"transformers {transformers.__version__} routes inside of {type(block.experts).__name__}")
    _, topk_ids, topk_weights = heard["args"]
    return Routed(flat, topk_ids, topk_weights * scaling, heard["out"].view(num_tokens, -1) * scaling)


def by_expert(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = topk_ids.long().argsort(dim=-1)
    return topk_ids.long().gather(-1, order), topk_weights.float().gather(-1, order)
