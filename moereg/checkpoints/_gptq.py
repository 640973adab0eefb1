"""`quant_method: gptq`, what AutoGPTQ and GPTQModel write: 4-bit integers packed along the reduced dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from moereg.checkpoints._formats import FLOATS, FormatOf, Projection, StorageFormat, StoredTensor, check_divides
from moereg.checkpoints._patterns import Match, Patterns
from moereg.checkpoints._words import canonical_zero_points, int4_scheme, word_bytes
from moereg.errors import CheckpointError, shown
from moereg.quantize import unpack_nibbles
from moereg.routing.config_entries import read_flag, read_name, read_objects
from moereg.spec.quant_schemes import WHOLE, QuantScheme, TensorRole

__all__ = ["gptq_formats"]

_VERSIONS: Final = ("gptq", "gptq_v2")
_ONE_IN_EACH_NIBBLE: Final = 0x11111111
_NO_ZERO_POINT: Final = 8


def gptq_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `qweight` [K/8, N] int32: eight neighboring columns of a row to a word, the first in the lowest bits, unsigned.
    `qzeros` [G, ceil(N/8)] int32: zero points, packed along N. Version 1 (`gptq`, the default) subtracts one from each
    before it packs them, version 2 (`gptq_v2`) does not. `scales` [G, N]. `g_idx` [K]: the group of each column. A
    weight is (code - zero point) * scale.

    `dynamic` has settings for modules by regular expressions, which match from the start. Modules that match one after
    `-:` are left unquantized.

    Source: nn_modules/qlinear/__init__.py (`pack_original`), utils/model.py (`convert_gptq_v1_to_v2_format_module`) and
    quantization/config.py of GPTQModel 7.6.0; qlinear_cuda_old.py of AutoGPTQ.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: A setting is not known; the function that is returned raises it too.
    """
    patterns = Patterns("dynamic")
    rules: list[tuple[Match, Callable[[], StorageFormat | None]]] = []
    for pattern, changes in read_objects(config, "dynamic").items():
        sign, expression = (pattern[0], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("+", pattern)
        # Parsed when a module first matches: a rule for other modules may hold settings that moereg does not know.
        rule = functools.cache(functools.partial(_format, {**config, **changes})) if sign == "+" else lambda: None
        rules.append((patterns.expression(pattern, expression), rule))
    default = functools.cache(functools.partial(_format, config))
    return lambda module: next((rule for matches, rule in rules if matches(module)), default)()


def _format(config: Mapping[str, Any]) -> StorageFormat:
    version = read_name(config, "checkpoint_format") or read_name(config, "format") or _VERSIONS[0]
    if version not in _VERSIONS:
        raise CheckpointError(
            f"checkpoint_format of quant method gptq must be {' or '.join(_VERSIONS)}, got {shown(version)}; save it "
            "in one of these with GPTQModel"
        )
    scheme = int4_scheme("gptq", config, is_symmetric=read_flag(config, "sym", default=True))
    is_ordered = read_flag(config, "desc_act")
    tensors = functools.partial(_tensors, scheme, version, is_ordered)
    return StorageFormat(f"{version} {scheme.name}{' desc_act' * is_ordered}", scheme, tensors)


def _tensors(scheme: QuantScheme, version: str, is_ordered: bool, projection: Projection) -> Sequence[StoredTensor]:
    assert scheme.weight is not None
    size = projection.columns if scheme.weight.group[1] == WHOLE else scheme.weight.group[1]
    check_divides(projection, size)
    check_divides(projection, 8)
    num_groups = projection.columns // size
    zeros = functools.partial(
        _zero_points if not scheme.weight.symmetric else _check_zero_points, rows=projection.rows, version=version
    )
    role: TensorRole | None = None if scheme.weight.symmetric else "zero_point"
    order = functools.partial(_check_order, group_size=size)
    return (
        StoredTensor(".qweight", ((projection.columns // 8, projection.rows),), ("I32",), "weight", _codes),
        StoredTensor(".scales", ((num_groups, projection.rows),), FLOATS, "scale", _transposed),
        StoredTensor(".qzeros", ((num_groups, -(-projection.rows // 8)),), ("I32",), role, zeros),
        StoredTensor(".g_idx", ((projection.columns,),), ("I32", "I64"), None, order, required=is_ordered),
        # AutoGPTQ wrote zeros for modules without a bias.
        StoredTensor(".bias", ((projection.rows,),), FLOATS, None, _check_no_bias, required=False),
    )


def _codes(stored: torch.Tensor) -> torch.Tensor:
    # A byte holds two neighboring columns.
    pairs: torch.Tensor = word_bytes(stored).unflatten(1, (-1, 4))  # [K/8, N, 4]
    return pairs.movedim(1, 0).flatten(1)  # [N, K/2]


def _transposed(stored: torch.Tensor) -> torch.Tensor:
    return stored.mT


def _zero_points(stored: torch.Tensor, rows: int, version: str) -> torch.Tensor:
    return canonical_zero_points(stored + _ONE_IN_EACH_NIBBLE if version == _VERSIONS[0] else stored, rows)


def _check_zero_points(stored: torch.Tensor, rows: int, version: str) -> torch.Tensor:
    words = stored + _ONE_IN_EACH_NIBBLE if version == _VERSIONS[0] else stored
    codes = unpack_nibbles(word_bytes(words), rows)
    if (codes != _NO_ZERO_POINT).any():
        found = int(codes[codes != _NO_ZERO_POINT][0])
        raise CheckpointError(
            f"zero points must be {_NO_ZERO_POINT} where the config says sym and {version}, got {found}; correct "
            "sym or checkpoint_format in the config"
        )
    return stored


def _check_order(stored: torch.Tensor, group_size: int) -> torch.Tensor:
    expected = torch.arange(len(stored), dtype=stored.dtype, device=stored.device) // group_size
    if not torch.equal(stored, expected):
        column = int(torch.nonzero(stored != expected)[0])
        raise CheckpointError(
            f"groups must be of {group_size} neighboring columns, got column {column} in group {int(stored[column])}; "
            "columns that are ordered by activation are not read: quantize with desc_act false"
        )
    return stored


def _check_no_bias(stored: torch.Tensor) -> torch.Tensor:
    if stored.any():
        raise CheckpointError(
            f"experts of this model have no bias, got one of up to {float(stored.abs().max()):.3g}; use the "
            "config.json that belongs to these tensors"
        )
    return stored
