"""Reduces a checkpoint's scales for kernels that take fewer."""

from __future__ import annotations

import torch

from moereg.weights.permuted import ExpertWeights

__all__ = ["one_for_all", "one_scale"]


def one_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Reduces fp32 [E], or [E, 2] with equal gate and up scales, to [E].

    Raises:
        ValueError: Gate and up scales differ.
    """
    if scale.dim() == 1:
        return scale
    if not torch.equal(scale[:, 0], scale[:, -1]):
        raise ValueError(
            f"these kernels require one scale for gate and up of an expert, got {name} {list(scale.shape)} where they "
            "differ; deny this backend for the layer"
        )
    return scale[:, 0].contiguous()


def one_for_all(weights: ExpertWeights, name: str, largest: bool = True) -> torch.Tensor:
    """The largest of the experts' static scales, [1] fp32, or the scales themselves, [1] or [E].

    Tokens are quantized before their experts are known. Floats keep their relative precision under a larger scale than
    necessary.

    Args:
        weights: The layer's weights.
        name: `a13_scale` or `a2_scale`.
        largest: Whether to reduce to one number.

    Raises:
        ValueError: The checkpoint has no such scale.
    """
    scale = weights.tensors().get(name)
    if scale is None:
        raise ValueError(
            f"these kernels require static scales of activations, got weights without {name}; deny this backend for "
            "the layer"
        )
    return scale.max().reshape(1) if largest else scale.reshape(-1)
