"""8-bit floats: torch's own types, saturating instead of overflowing."""

from __future__ import annotations

import functools
import math

import torch

from moereg.quantize.element import Element

__all__ = ["float8_element"]


def float8_element(dtype: torch.dtype) -> Element:
    """An 8-bit float type of torch, such as `torch.float8_e4m3fn` (largest value 448)."""
    limit = torch.finfo(dtype).max
    return Element(
        half_range=limit,
        max_value=limit,
        min_value=-limit,
        mantissa_bits=-int(math.log2(torch.finfo(dtype).eps)),
        encode=functools.partial(_encode, dtype=dtype),
        decode=_decode,
    )


def _encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    # Clamped first, since not every version of torch saturates. NaN passes.
    return values.clamp(-limit, limit).to(dtype)


def _decode(codes: torch.Tensor, columns: int) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.float()
    # torch converts number by number on a CPU; a table takes a quarter of the time.
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(codes.dtype).float()
    return values.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)
