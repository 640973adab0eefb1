"""The interface of an element type of quantized tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

__all__ = ["Element"]


@dataclasses.dataclass(frozen=True)
class Element:
    """One element type: its range, and how real numbers become stored codes and back.

    Attributes:
        half_range: The number that the largest magnitude of a group of weights is mapped to. For integers half of all
            steps, 127.5 or 7.5, so that one half step is clipped at the positive end.
        max_value: Largest code of both signs: 448, 6, 127, 7. What the largest magnitude of activations is mapped to.
        min_value: Smallest code; below -max_value for integers.
        mantissa_bits: Of floats, without the leading one; None for integers.
        encode: fp32 [..., K], already divided by the scale, to the stored tensor [..., K] or, for two codes to a byte,
            [..., ceil(K/2)]. Rounds to nearest, ties to even, and saturates. NaN stays NaN where there is a code for it
            and becomes 0 elsewhere.
        decode: Stored tensor and K to fp32 [..., K].
    """

    half_range: float
    max_value: float
    min_value: float
    mantissa_bits: int | None
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int], torch.Tensor]
