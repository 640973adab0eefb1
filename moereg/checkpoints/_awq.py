"""`quant_method: awq`, what AutoAWQ writes: 4-bit integers packed along the rows in AWQ's order."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from moereg.checkpoints._formats import (
    FLOATS,
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    check_divides,
)
from moereg.checkpoints._patterns import Patterns
from moereg.checkpoints._words import int4_scheme, word_bytes
from moereg.errors import CheckpointError, shown
from moereg.quantize import pack_nibbles
from moereg.routing.config_entries import is_one_of, read_names
from moereg.spec.quant_schemes import WHOLE, QuantScheme

__all__ = ["awq_formats"]

# A word holds eight neighboring rows; these, from its lowest nibble up.
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `qweight` [K, N/8] int32: eight neighboring rows of a column to a word, unsigned, nibble i of row `_ORDER[i]`.
    `qzeros` [G, N/8] int32: zero points in the same order, without an offset. `scales` [G, N]. A weight is
    (code - zero point) * scale.
    Source: modules/linear/gemm.py and utils/packing_utils.py of AutoAWQ 0.2.9.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: A setting is not known.
    """
    for key, expected in (("version", "gemm"), ("zero_point", True)):
        found = config.get(key, expected)
        if not is_one_of(found.lower() if isinstance(found, str) else found, (expected,)):
            raise CheckpointError(
                f"{key} of quant method awq must be {expected!r}, got {shown(found)}; save it so with AutoAWQ, or use "
                "another release"
            )
    key = "modules_to_not_convert"
    is_ignored = Patterns(key).components(read_names(config, key))
    scheme = int4_scheme("awq", config, is_symmetric=False)
    storage = StorageFormat(f"awq {scheme.name}", scheme, functools.partial(_tensors, scheme))
    return lambda module: None if is_ignored(module) else storage


def _tensors(scheme: QuantScheme, projection: Projection) -> Sequence[StoredTensor]:
    assert scheme.weight is not None
    size = projection.columns if scheme.weight.group[1] == WHOLE else scheme.weight.group[1]
    check_divides(projection, size)
    if projection.rows % 8 or projection.columns % 2:
        raise CheckpointError(
            f"the rows of {projection.module} must be a multiple of 8 and its columns of 2 in quant method awq, got "
            f"{projection.rows} and {projection.columns}; use the config.json that belongs to these tensors"
        )
    num_groups = projection.columns // size
    return (
        StoredTensor(".qweight", ((projection.columns, projection.rows // 8),), ("I32",), "weight", _codes),
        StoredTensor(".scales", ((num_groups, projection.rows),), FLOATS, "scale", _transposed),
        StoredTensor(".qzeros", ((num_groups, projection.rows // 8),), ("I32",), "zero_point", _zero_points),
    )


def _codes(stored: torch.Tensor) -> torch.Tensor:
    # Nibbles of two neighboring columns become one byte: [K/2, N/8, 4] for a word's even nibbles and for its odd ones.
    columns = word_bytes(stored).unflatten(1, (-1, 4))
    even, odd = columns[0::2], columns[1::2]
    low, high = even & 15 | odd << 4, even >> 4 | odd & 240
    return _in_order(low, high).mT


def _zero_points(stored: torch.Tensor) -> torch.Tensor:
    pairs = word_bytes(stored).unflatten(1, (-1, 4))
    return pack_nibbles(_in_order(pairs & 15, pairs >> 4).mT)


def _in_order(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Puts the even and odd nibbles of words, [..., N/8, 4] each, in the order of rows, [..., N]."""
    values = torch.stack((even, odd), dim=-1).flatten(-2)
    return values[..., torch.tensor(_ORDER, device=even.device).argsort()].flatten(-2)


def _transposed(stored: torch.Tensor) -> torch.Tensor:
    return stored.mT
