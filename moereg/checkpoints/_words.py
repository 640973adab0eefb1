"""Integer codes that checkpoints pack into int32 words, and the schemes of 4-bit codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.errors import CheckpointError, shown
from moereg.quantize import pack_nibbles, unpack_nibbles
from moereg.routing.config_entries import is_one_of
from moereg.spec.quant_schemes import WHOLE, QuantScheme, get_scheme

__all__ = ["canonical_zero_points", "int4_scheme", "word_bytes"]

_GROUP_SIZES: Final = {32: "g32", 64: "g64", 128: "g128", WHOLE: "gall"}


def int4_scheme(method: str, config: Mapping[str, Any], is_symmetric: bool) -> QuantScheme:
    """The scheme of 4-bit weights with 16-bit activations that a config names.

    Args:
        method: For errors.
        config: With `bits` and `group_size`.
        is_symmetric: Whether there are no zero points.

    Raises:
        CheckpointError: No scheme has these numbers of bits and columns.
    """
    for key, known in (("bits", (4,)), ("group_size", tuple(_GROUP_SIZES))):
        if not is_one_of(config.get(key), known):
            raise CheckpointError(
                f"{key} of quant method {method} must be {' or '.join(map(str, known))}, got {shown(config.get(key))}; "
                "use another release of the model"
            )
    return get_scheme(f"int4_w4a16_{_GROUP_SIZES[config['group_size']]}{'' if is_symmetric else '_zp'}")


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """The bytes of words, lowest first.

    Bytes of 4-bit codes are canonical this way: two codes each, the low nibble first along the last dimension.

    Args:
        words: [..., W] int32.

    Returns:
        [..., 4W] uint8, a view where the words are contiguous.
    """
    return words.contiguous().view(torch.uint8)


def canonical_zero_points(words: torch.Tensor, rows: int) -> torch.Tensor:
    """Packs zero points along the groups of a projection, where the words pack them along its rows.

    Args:
        words: [G, ceil(N/8)] int32.
        rows: N.

    Returns:
        [N, ceil(G/2)] uint8.
    """
    return pack_nibbles(unpack_nibbles(word_bytes(words), rows).mT)
