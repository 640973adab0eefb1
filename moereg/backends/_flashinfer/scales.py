"""Scales of checkpoints as kernels with fewer of them want them."""

from __future__ import annotations

import torch

from moereg.weights.permuted import ExpertWeights

__all__ = ["one_for_all", "one_scale"]


def one_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """[E] fp32 of [E], or of [E, 2] where gate and up of every expert agree.

    Raises:
        ValueError: They do not.
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
    """[1] fp32: the largest of the experts' static scales; or the experts' own, [1] or [E].

    Tokens are quantized before their experts are known. Codes of floats keep their relative precision under a scale
    that is larger than it need be.

    Args:
        weights: Of the layer.
        name: `a13_scale` or `a2_scale`.
        largest: Whether one number is needed.

    Raises:
        ValueError: The checkpoint has none.
    """
    scale = weights.tensors().get(name)
    if scale is None:
        raise ValueError(
            f"these kernels require static scales of activations, got weights without {name}; deny this backend for "
            "the layer"
        )
    return scale.max().reshape(1) if largest else scale.reshape(-1)
