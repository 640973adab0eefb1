"""Element types of quantized tensors: encoding and decoding of stored codes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Final

import torch


@dataclasses.dataclass(frozen=True)
class Element:
    """One element type: its range, encoding and decoding.

    Attributes:
        half_range: The number that the largest magnitude of a group of weights is mapped to. For integers half of all
            steps, 127.5 or 7.5, so that half a step is clipped at the positive end.
        max_value: Largest code of both signs: 448, 6, 127, 7. The largest magnitude of activations is mapped to it.
        min_value: Smallest code; below -max_value for integers.
        mantissa_bits: A float's mantissa bits without the leading one; None for integers.
        encode: Maps fp32 [..., K], already divided by the scale, to the stored tensor [..., K], or [..., ceil(K/2)]
            for two codes per byte. Rounds to nearest, ties to even, and saturates. NaN stays NaN if there is a code for
            it, otherwise it becomes 0.
        decode: Maps a stored tensor and K to fp32 [..., K].
    """

    half_range: float
    max_value: float
    min_value: float
    mantissa_bits: int | None
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int], torch.Tensor]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Packs two codes per byte, low nibble first along the last (reduced) dimension.

    Args:
        codes: [..., K] uint8, each below 16.

    Returns:
        [..., ceil(K/2)] uint8, byte j = codes[2j] | codes[2j+1] << 4; if K is odd, the last high nibble is 0.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Inverse of `pack_nibbles`.

    Args:
        packed: [..., ceil(columns/2)] uint8.
        columns: K.

    Returns:
        [..., K] uint8.
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :columns]


def _lookup_nibbles(packed: torch.Tensor, values: torch.Tensor, columns: int) -> torch.Tensor:
    """Decodes packed codes [..., ceil(K/2)] to fp32 [..., K], given each code's value, [16] fp32 on the same device."""
    # Looking up both values of a byte at once, as 8 bytes, takes a third of the time of unpacking first.
    low, high = values.expand(16, 16), values.unsqueeze(1).expand(16, 16)
    pairs = torch.stack((low, high), dim=-1).view(256, 2).view(torch.int64).view(256)
    found = pairs.index_select(0, packed.reshape(-1).int()).view(packed.shape)
    return found.view(torch.float32)[..., :columns]


def _encode_integer(values: torch.Tensor, limit: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.round(values.nan_to_num(nan=0.0).clamp(-limit, limit - 1)) + offset).to(dtype)


def _decode_byte(codes: torch.Tensor, columns: int, offset: int) -> torch.Tensor:
    return codes.float() - offset if offset else codes.float()


def _byte(dtype: torch.dtype, offset: int) -> Element:
    encode = functools.partial(_encode_integer, limit=128, offset=offset, dtype=dtype)
    return Element(127.5, 127.0, -128.0, None, encode, functools.partial(_decode_byte, offset=offset))


def _encode_uint4(values: torch.Tensor) -> torch.Tensor:
    return pack_nibbles(_encode_integer(values, 8, 8, torch.uint8))


def _decode_uint4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    return _lookup_nibbles(packed, torch.arange(16, dtype=torch.float32, device=packed.device) - 8, columns)


INTEGERS: Final = {
    "int8": _byte(torch.int8, 0),
    "uint8": _byte(torch.uint8, 128),
    "uint4": Element(7.5, 7.0, -8.0, None, _encode_uint4, _decode_uint4),
}
"""Elements by dtype name: int8 in two's complement, unsigned ones with an offset of half their range, as zero points
require. Codes are encoded from and decoded to signed integers; the caller subtracts zero points."""


def float8_element(dtype: torch.dtype) -> Element:
    """The element of an 8-bit torch float, such as `torch.float8_e4m3fn` (largest value 448), saturating."""
    limit = torch.finfo(dtype).max
    return Element(
        half_range=limit,
        max_value=limit,
        min_value=-limit,
        mantissa_bits=-int(math.log2(torch.finfo(dtype).eps)),
        encode=functools.partial(_encode_float8, dtype=dtype),
        decode=_decode_float8,
    )


def _encode_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    # Clamped first, since not every torch version saturates. NaN passes.
    return values.clamp(-limit, limit).to(dtype)


def _decode_float8(codes: torch.Tensor, columns: int) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.float()
    # On a CPU torch converts elements one by one; a table takes a quarter of the time.
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(codes.dtype).float()
    return values.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


def _encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.nan_to_num(nan=0.0).abs().clamp(max=6.0)
    # Steps are 0.5 below 2, 1 below 4 and 2 above; ties go to the even code, whose mantissa is 0.
    fine = torch.round(magnitude * 2)
    middle = torch.round(magnitude) + 2
    coarse = torch.round(magnitude / 2) + 4
    codes = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).to(torch.uint8)
    # Keeps the sign of zero, as in IEEE 754.
    return pack_nibbles(torch.where(values.signbit(), codes | 8, codes))


def _decode_e2m1(packed: torch.Tensor, columns: int) -> torch.Tensor:
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6. Made on the device, since a copy from the host would wait for it.
    codes = torch.arange(8, dtype=torch.float32, device=packed.device)
    magnitudes = torch.maximum(codes / 2, torch.maximum(codes - 2, codes * 2 - 8))
    return _lookup_nibbles(packed, torch.cat((magnitudes, -magnitudes)), columns)


E2M1: Final = Element(6.0, 6.0, -6.0, 1, _encode_e2m1, _decode_e2m1)
"""float4_e2m1fn without infinity or NaN. Bit 3 is the sign, bits 2 and 1 the exponent, bit 0 the mantissa."""
