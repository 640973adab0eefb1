"""Integers: int8 in two's complement; uint8 and uint4 with an offset of half their range, as zero points need it."""

from __future__ import annotations

import functools
from typing import Final

import torch

from moereg.quantize.element import Element
from moereg.quantize.nibbles import lookup_nibbles, pack_nibbles

__all__ = ["INTEGERS", "offset"]


def offset(bits: int) -> int:
    """The offset that stores a signed integer as unsigned: 8 for uint4, 128 for uint8."""
    return 1 << (bits - 1)


def _round(values: torch.Tensor, bits: int) -> torch.Tensor:
    limit = offset(bits)
    return torch.round(values.nan_to_num(nan=0.0).clamp(-limit, limit - 1))


def _encode_int8(values: torch.Tensor) -> torch.Tensor:
    return _round(values, 8).to(torch.int8)


def _encode_uint8(values: torch.Tensor) -> torch.Tensor:
    return (_round(values, 8) + offset(8)).to(torch.uint8)


def _encode_uint4(values: torch.Tensor) -> torch.Tensor:
    return pack_nibbles((_round(values, 4) + offset(4)).to(torch.uint8))


def _decode_byte(codes: torch.Tensor, columns: int, shift: int) -> torch.Tensor:
    return codes.float() - shift if shift else codes.float()


def _decode_uint4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    values = torch.arange(16, dtype=torch.float32, device=packed.device) - offset(4)
    return lookup_nibbles(packed, values, columns)


INTEGERS: Final = {
    "int8": Element(127.5, 127.0, -128.0, None, _encode_int8, functools.partial(_decode_byte, shift=0)),
    "uint8": Element(127.5, 127.0, -128.0, None, _encode_uint8, functools.partial(_decode_byte, shift=offset(8))),
    "uint4": Element(7.5, 7.0, -8.0, None, _encode_uint4, _decode_uint4),
}
"""Elements by dtype name. Codes are encoded from and decoded to signed integers; the caller subtracts zero points."""
