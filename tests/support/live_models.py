"""Calls of live models, and how close their logits are."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from moereg.layer import MoEKernel

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


def kernel_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kernels do from now on, in order: `infer`, `forward`, or `backward` with the gradients that it computed."""
    found: list[str] = []
    infer, save, differentiate = MoEKernel.__call__, MoEKernel.run_saving, MoEKernel.run_backward

    def backward(self: MoEKernel, gradients: Any, *arguments: Any) -> None:
        found.append(f"backward {' '.join(sorted(gradients))}")
        differentiate(self, gradients, *arguments)

    monkeypatch.setattr(MoEKernel, "__call__", lambda self, *args: found.append("infer") or infer(self, *args))
    monkeypatch.setattr(MoEKernel, "run_saving", lambda self, *args: found.append("forward") or save(self, *args))
    monkeypatch.setattr(MoEKernel, "run_backward", backward)
    return found
