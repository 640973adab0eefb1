"""Weights where TMA and vector loads can read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from moereg.author import ExpertWeights

__all__ = ["ALIGNMENT", "aligned_tensors"]

ALIGNMENT: Final = 16
"""Bytes at a multiple of which a tensor has to begin for TMA descriptors and for loads of four words."""


def aligned_tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The canonical tensors by name; a copy of each that begins at another address, such as one in a checkpoint."""
    return {
        name: tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor for name, tensor in weights.tensors().items()
    }
