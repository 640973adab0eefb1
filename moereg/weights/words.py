"""4-bit codes in int32 words, eight to a word: layouts of GPTQ, AWQ and compressed-tensors in checkpoints and engines.

Every function takes any leading dimensions.
"""

from __future__ import annotations

from typing import Final

import torch

from moereg.weights.elements import pack_nibbles, unpack_nibbles

# Row of each nibble in an AWQ word of eight neighboring rows, lowest nibble first.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """The bytes [..., 4W] uint8 of words [..., W] int32, lowest first.

    Bytes of 4-bit codes are canonical this way: two codes each, the low nibble first along the last dimension.
    """
    return words.contiguous().view(torch.uint8)


def repacked_zero_points(words: torch.Tensor, rows: int) -> torch.Tensor:
    """Repacks zero points from words along rows, [..., G, ceil(N/8)], to bytes along groups, [..., N, ceil(G/2)]."""
    return pack_nibbles(unpack_nibbles(word_bytes(words), rows).mT)


def gptq_codes(words: torch.Tensor) -> torch.Tensor:
    """Canonical codes [..., N, K/2] uint8 of GPTQ's words [..., K/8, N] int32, each of eight neighboring columns."""
    pairs: torch.Tensor = word_bytes(words).unflatten(-1, (-1, 4))  # [..., K/8, N, 4]: a byte has two columns.
    return pairs.movedim(-2, -3).flatten(-2)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Canonical codes [..., N, K/2] uint8 of AWQ's words [..., K, N/8] int32, each of eight neighboring rows."""
    # Nibbles of two neighboring columns make one byte: [..., K/2, N/8, 4] each for a word's even and odd nibbles.
    columns = word_bytes(words).unflatten(-1, (-1, 4))
    even, odd = columns[..., 0::2, :, :], columns[..., 1::2, :, :]
    return _in_order(even & 15 | odd << 4, even >> 4 | odd & 240).mT


def awq_zero_points(words: torch.Tensor) -> torch.Tensor:
    """Canonical zero points [..., N, ceil(G/2)] uint8 of AWQ's words [..., G, N/8] int32."""
    pairs = word_bytes(words).unflatten(-1, (-1, 4))
    return pack_nibbles(_in_order(pairs & 15, pairs >> 4).mT)


def _in_order(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Merges words' even and odd nibbles, [..., N/8, 4] each, in row order, [..., N]."""
    values = torch.stack((even, odd), dim=-1).flatten(-2)
    return values[..., torch.tensor(_AWQ_ORDER, device=even.device).argsort()].flatten(-2)
