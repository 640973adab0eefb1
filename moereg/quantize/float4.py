"""float4_e2m1fn: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no infinity, no NaN."""

from __future__ import annotations

from typing import Final

import torch

from moereg.quantize.element import Element
from moereg.quantize.nibbles import lookup_nibbles, pack_nibbles

__all__ = ["E2M1"]

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN: Final = 8
_MAX: Final = 6.0


def _encode(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.nan_to_num(nan=0.0).abs().clamp(max=_MAX)
    # Codes count steps of 0.5 below 2, of 1 below 4 and of 2 above; a tie goes to the even code, whose mantissa is 0.
    fine = torch.round(magnitude * 2)
    middle = torch.round(magnitude) + 2
    coarse = torch.round(magnitude / 2) + 4
    codes = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).to(torch.uint8)
    # The sign of zero is kept, as in IEEE 754.
    return pack_nibbles(torch.where(values.signbit(), codes | _SIGN, codes))


def _decode(packed: torch.Tensor, columns: int) -> torch.Tensor:
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float32, device=packed.device)
    return lookup_nibbles(packed, values, columns)


E2M1: Final = Element(half_range=_MAX, max_value=_MAX, min_value=-_MAX, mantissa_bits=1, encode=_encode, decode=_decode)
"""Bit 3 is the sign, bits 2 and 1 the exponent, bit 0 the mantissa."""
