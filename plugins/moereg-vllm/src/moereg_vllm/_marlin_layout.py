"""The order in which Marlin's kernels read scales, zero points and biases; plain torch on any device.

A scale's place follows from the threads of a tensor core instruction: 64 neighboring columns are dealt out in 8 hands
of 8, or 32 of them in 4 hands of pairs where one group spans the whole reduced dimension.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = [
    "group_scales",
    "group_zero_points",
    "marlin_bias",
    "marlin_e4m3_scales",
    "marlin_e8m0_scales",
    "marlin_scales",
    "marlin_zero_points",
    "packed_rows",
]

_GROUPED: Final = [first + 8 * hand for first in range(8) for hand in range(8)]
_SINGLE: Final = [2 * first + place for first in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)]
_PAIRS: Final = [0, 2, 1, 3]
_NIBBLES: Final = [0, 2, 4, 6, 1, 3, 5, 7]


def _dealt(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Values [..., n] in runs of `len(order)`, each run in that order."""
    return values.reshape(-1, len(order))[:, order].reshape(values.shape).contiguous()


def packed_rows(weight: torch.Tensor) -> torch.Tensor:
    """The codes of one expert as Marlin's repacking takes them.

    Args:
        weight: [N, K / codes of a byte], any 1-byte dtype; int8 codes become unsigned, offset by 128.

    Returns:
        [K / codes of a word, N] int32; the first code of a column in the lowest bits.
    """
    if weight.dtype == torch.int8:
        weight = weight.view(torch.uint8) ^ 0x80
    weight = weight.contiguous()
    # Four bytes make a word only where they begin at one.
    weight = weight.clone() if weight.storage_offset() % 4 else weight
    return weight.view(torch.int32).T.contiguous()


def group_scales(scale: torch.Tensor, rows: int, group_rows: int | None = None) -> torch.Tensor:
    """Canonical scales of one expert as one row for each group along the reduced dimension.

    Args:
        scale: [N, G]; [N / group_rows, G] where rows share them; [] or [2] for one of a matrix or of gate and up.
        rows: N.
        group_rows: Rows that share a scale, the last of them maybe fewer.

    Returns:
        [G,N].
    """
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
        group_rows = rows // scale.shape[0]
    if group_rows is not None and group_rows > 1:
        scale = scale.repeat_interleave(group_rows, dim=0)[:rows]
    return scale.T.contiguous()


def marlin_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [G,N] of any dtype in Marlin's order; N is a multiple of 64."""
    return _dealt(scale, _GROUPED if scale.shape[0] > 1 else _SINGLE)


def marlin_e8m0_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [G,N] float8_e8m0fnu in Marlin's order."""
    return _dealt(marlin_scales(scale.view(torch.uint8)), _PAIRS).view(torch.float8_e8m0fnu)


def marlin_e4m3_scales(scale: torch.Tensor, raise_range: bool) -> tuple[torch.Tensor, float]:
    """Scales [G,N] float8_e4m3fn as 5 bits of exponent and 3 of mantissa, without a sign, in Marlin's order.

    A scale of 2^-6 is the least that stays; less becomes 0.

    Args:
        scale: Not negative.
        raise_range: Whether scales are multiplied by the power of two that brings the largest near 448, which keeps
            small ones.

    Returns:
        [G,N] in bytes of float8_e4m3fn, and the power of two.
    """
    ordered = _dealt(marlin_scales(scale.to(torch.float16)), _PAIRS).float()
    largest = float(ordered.max())
    factor = 1.0
    if raise_range and 0 < largest < 448:
        factor = float(torch.tensor(448 / largest).log2().floor().exp2())
    shifted = ordered * (factor * 2**7)
    shifted[shifted < 2] = 0
    # A float16 of at least 2 has its highest exponent bit set; without the sign, the upper byte says the rest.
    codes = (shifted.to(torch.float16).view(torch.int16).to(torch.int32) << 1 >> 8) & 0xFF
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), factor


def group_zero_points(zero_point: torch.Tensor, groups: int) -> torch.Tensor:
    """Canonical zero points of one expert as one row for each group.

    Args:
        zero_point: [N, ceil(G/2)] uint8, two of a row to a byte, the first in the low bits.
        groups: G.

    Returns:
        [G,N] uint8.
    """
    codes = torch.stack((zero_point & 0xF, zero_point >> 4), dim=-1).flatten(1)
    return codes[:, :groups].T.contiguous()


def marlin_zero_points(zero_point: torch.Tensor) -> torch.Tensor:
    """Zero points [G,N] uint8 in Marlin's order, eight to a word: [G, N/8] int32."""
    groups, rows = zero_point.shape
    nibbles = _dealt(_dealt(zero_point, _GROUPED), _NIBBLES).view(groups, rows // 8, 4, 2)
    packed = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return packed.contiguous().view(torch.int32).view(groups, rows // 8)


def marlin_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias [..., N] in Marlin's order."""
    return _dealt(bias, _SINGLE)
