"""Calls of live models, and how close their logits are."""

from __future__ import annotations

from typing import Any, Final

import torch

PROMPT: Final = torch.tensor([[3, 9, 27, 5, 15], [4, 16, 11, 44, 23]])


def logits_of(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(prompt).logits
    return found


def eager(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    """Logits of transformers' own experts, to which it switches the model."""
    model.set_experts_implementation("eager")
    return logits_of(model, prompt)


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-6) -> bool:
    """Whether they differ by at most that part of the largest."""
    return bool((found - expected).abs().max() <= bound * expected.abs().max())
