"""Element types of quantized tensors: encoding and decoding of stored codes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Final

import torch

from moereg.runtime.graph_pools import outside_pools


@dataclasses.dataclass(frozen=True)
class Element:
    """One element type: its range, encoding and decoding.

    Attributes:
        half_range: The number that the largest magnitude of a group of weights is mapped to. For integers half of all
            steps, 127.5 or 7.5, so that half a step is clipped at the positive end.
        max_value: Largest code of both signs: 448, 6, 127, 7, 1. The largest magnitude of activations is mapped to it.
        min_value: Smallest code; below -max_value for integers.
        mantissa_bits: A float's mantissa bits without the leading one; None for integers and nf4.
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


NF4_VALUES: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, by code. Source: QLoRA, https://arxiv.org/abs/2305.14314."""


@functools.cache
def _nested_values() -> tuple[float, ...]:
    """Values of the 8-bit codes of quantized scales, which fp32 can represent: bitsandbytes' dynamic map.

    0, 1, and of both signs 2^n middles of equal parts of [10^(n-7), 10^(n-6)], for n from 0 to 6.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (decade - 6) * ((edges[1:] + edges[:-1]) / 2)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return tuple(sorted(values))


_TABLES: Final[dict[torch.device, torch.Tensor]] = {}


def code_values(device: torch.device) -> torch.Tensor:
    """Values by code in fp32, [16 + 256]: nf4's, then those of quantized scales. A GPU's are copied to it once."""
    table = _TABLES.get(device)
    if table is None:
        values = (*NF4_VALUES, *_nested_values())
        # Tensors made in inference mode could not be read outside it by later calls.
        with torch.inference_mode(False):
            table = outside_pools(lambda: torch.tensor(values, dtype=torch.float32, device=device), device)
        # A fake tensor serves this call alone.
        if device.type == "cuda" and type(table) is torch.Tensor:
            _TABLES[device] = table
    return table


def _encode_nf4(values: torch.Tensor) -> torch.Tensor:
    table = code_values(values.device)[:16]
    # The nearest value; of two equally near ones the smaller, as bitsandbytes has it.
    codes = torch.bucketize(values.nan_to_num(nan=0.0), (table[1:] + table[:-1]) / 2, out_int32=True)
    return pack_nibbles(codes.to(torch.uint8))


def _decode_nf4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    return _lookup_nibbles(packed, code_values(packed.device)[:16], columns)


NF4: Final = Element(1.0, 1.0, -1.0, None, _encode_nf4, _decode_nf4)


def encode_scales(scales: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the scales of an expert's matrix, `block` of them at a time.

    Args:
        scales: fp32 [..., G].
        block: Scales that share a scale of their own.

    Returns:
        Codes uint8 like `scales`, and fp32 [1 + ceil(count / block)]: the offset, which is the scales' mean, then the
        largest distance from it in each block.
    """
    offset = scales.mean()
    distances = torch.nn.functional.pad((scales - offset).flatten(), (0, -scales.numel() % block)).view(-1, block)
    largest = distances.abs().amax(1)
    table = code_values(scales.device)[16:]
    nearest = torch.bucketize(distances / largest.clamp(min=1e-38).unsqueeze(1), (table[1:] + table[:-1]) / 2)
    codes = nearest.flatten()[: scales.numel()].to(torch.uint8).view(scales.shape)
    return codes, torch.cat((offset.reshape(1), largest))


def decode_scales(codes: torch.Tensor, scale_2: torch.Tensor, block: int) -> torch.Tensor:
    """Inverse of `encode_scales` for matrices [..., R, G] of several experts, or one; returns fp32 of that shape."""
    flat = codes.flatten(-2)
    values = code_values(codes.device)[16:].index_select(0, flat.reshape(-1).int()).view(flat.shape)
    largest = scale_2[..., 1:].repeat_interleave(block, -1)[..., : flat.shape[-1]]
    # Two roundings, as bitsandbytes has them.
    return (values * largest + scale_2[..., :1]).view(codes.shape)
