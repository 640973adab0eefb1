"""`quant_method: compressed-tensors`, what llm-compressor writes: the scheme and the layout of each module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from moereg.checkpoints._compressed_layouts import LAYOUTS
from moereg.checkpoints._formats import FormatOf, StorageFormat
from moereg.checkpoints._patterns import Patterns
from moereg.errors import CheckpointError, shown
from moereg.routing.config_entries import (
    is_one_of,
    read_choice,
    read_count,
    read_flag,
    read_name,
    read_names,
    read_object,
    read_objects,
)
from moereg.spec.quant_schemes import QuantScheme, get_scheme

__all__ = ["compressed_tensors_formats"]

_NO_ACTIVATIONS: Final = "16-bit"
_ORDERS: Final = ("group", "dynamic", True)
_NO_ORDERS: Final = ("weight", "static", False, None)
_STRATEGIES: Final = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", None)
# By weights and activations, as `_describe` spells them.
_SCHEMES: Final = {
    ("float8 tensor", "float8 static tensor"): "fp8_tensor_static",
    ("float8 tensor", "float8 dynamic tensor"): "fp8_tensor_dynamic",
    # One scale for the matrix equals the same scale for each of its rows.
    ("float8 tensor", "float8 dynamic token"): "fp8_channel_token",
    ("float8 channel", "float8 dynamic token"): "fp8_channel_token",
    ("float8 block 128x128", "float8 dynamic group 128"): "fp8_block128",
    ("float8 group 32", "float8 dynamic group 32"): "mxfp8",
    ("int8 tensor", "int8 dynamic token"): "int8_w8a8",
    ("int8 channel", "int8 dynamic token"): "int8_w8a8",
    ("int8 channel", _NO_ACTIVATIONS): "int8_w8a16",
    ("int4 group 32", _NO_ACTIVATIONS): "int4_w4a16_g32",
    ("int4 group 64", _NO_ACTIVATIONS): "int4_w4a16_g64",
    ("int4 group 128", _NO_ACTIVATIONS): "int4_w4a16_g128",
    ("int4 group 128", "float8 static tensor"): "int4_w4a8_g128",
    ("int4 group 128", "float8 dynamic token"): "int4_w4a8_g128_token",
    ("int4 channel", _NO_ACTIVATIONS): "int4_w4a16_gall",
    ("asymmetric int4 group 32", _NO_ACTIVATIONS): "int4_w4a16_g32_zp",
    ("asymmetric int4 group 64", _NO_ACTIVATIONS): "int4_w4a16_g64_zp",
    ("asymmetric int4 group 128", _NO_ACTIVATIONS): "int4_w4a16_g128_zp",
    ("asymmetric int4 channel", _NO_ACTIVATIONS): "int4_w4a16_gall_zp",
    ("float4 tensor_group 16", "float4 local tensor_group 16"): "nvfp4",
    ("float4 tensor_group 16", _NO_ACTIVATIONS): "nvfp4_w4a16",
    ("float4 group 32", _NO_ACTIVATIONS): "mxfp4_w4a16",
}


def compressed_tensors_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `config_groups` name modules by class, by name or, after `re:`, by a regular expression that matches from the start;
    the most exact one counts. `ignore` takes modules out of all of them.
    Source: quantization/quant_config.py and utils/match.py of compressed-tensors 0.20.0.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: A setting is not known; the function that is returned raises it too.
    """
    if config.get("config_groups") is None:
        raise CheckpointError(
            "compressed-tensors needs config_groups, an object of objects, got None; take the file from the model's "
            "publisher"
        )
    groups = read_objects(config, "config_groups")
    sparsity = read_object(config, "sparsity_config")
    for key, found in (
        ("sparsity_config", sparsity if sparsity.get("format", "dense") != "dense" else None),
        ("transform_config", config.get("transform_config")),
    ):
        if found:
            raise CheckpointError(f"moereg does not read {key}, got {shown(found)}; use a release without it")
    patterns = Patterns("targets and ignore")
    is_ignored = _matcher(patterns, read_names(config, "ignore"))
    choices = [(_matcher(patterns, read_names(group, "targets")), group) for group in groups.values()]
    parse = functools.cache(lambda index: _format(choices[index][1], read_name(config, "format")))

    def format_of(module: str) -> StorageFormat | None:
        if is_ignored(module):
            return None
        found = [specificity(module) for specificity, _ in choices]
        return parse(found.index(max(found))) if any(found) else None

    return format_of


def _matcher(patterns: Patterns, targets: Sequence[str]) -> Callable[[str], int]:
    """How exactly targets name a module: 3 by its name, 2 by an expression, 1 by its class, 0 not at all."""
    names = frozenset(targets)
    expressions = [
        patterns.expression(target, target.removeprefix("re:"))
        for target in dict.fromkeys(targets)
        if target.startswith("re:")
    ]

    def specificity(module: str) -> int:
        if module in names:
            return 3
        return 2 if any(matches(module) for matches in expressions) else int("Linear" in names)

    return specificity


def _format(group: Mapping[str, Any], default: str | None) -> StorageFormat:
    """The format of the modules of a group."""
    layout = read_name(group, "format") or default or ""
    scheme = _scheme(group)
    assert scheme.weight is not None
    stored_as = (scheme.weight.dtype, scheme.weight.scale_dtype)
    if (layout, *stored_as) not in LAYOUTS:
        known = [key[0] for key in LAYOUTS if key[1:] == stored_as]
        raise CheckpointError(
            f"the compressed-tensors format of {scheme.name} must be {' or '.join(known)}, got {shown(layout)}; take "
            "the file from the model's publisher"
        )
    is_tensor = group["weights"].get("strategy") == "tensor"
    tensors = functools.partial(LAYOUTS[(layout, *stored_as)], scheme, is_tensor)
    return StorageFormat(f"compressed-tensors {layout} {scheme.name}", scheme, tensors)


def _scheme(group: Mapping[str, Any]) -> QuantScheme:
    weights, activations = _describe(group, "weights"), _describe(group, "input_activations")
    if (weights, activations) not in _SCHEMES:
        known = ", ".join(f"{pair[0]} with {pair[1]} activations" for pair in _SCHEMES)
        raise CheckpointError(
            f"compressed-tensors weights and activations must be one of the kinds that moereg knows, got {weights} "
            f"weights with {activations} activations; use another release of the model (known: {known})"
        )
    return get_scheme(_SCHEMES[weights, activations])


def _describe(group: Mapping[str, Any], side: str) -> str:
    """`int4 group 128`, `float8 dynamic token`."""
    arguments = read_object(group, side)
    if not arguments:
        return _NO_ACTIVATIONS
    words = [] if read_flag(arguments, "symmetric", default=True) else ["asymmetric"]
    if read_choice(arguments, "actorder", (*_ORDERS, *_NO_ORDERS), None) in _ORDERS:
        # Groups whose columns are not neighbors. They differ between gate and up, which therefore cannot share w13.
        words.append("activation-ordered")
    kind = read_choice(arguments, "type", ("float", "int"), None)
    words.append(f"{kind}{read_count(arguments, 'num_bits', maximum=64)}")
    if side == "input_activations":
        dynamic = read_choice(arguments, "dynamic", (True, False, "local"), False)
        words.append(dynamic if isinstance(dynamic, str) else "dynamic" if dynamic else "static")
    strategy = read_choice(arguments, "strategy", _STRATEGIES, None)
    words.append(str(strategy))
    if strategy in ("group", "tensor_group"):
        words.append(str(read_count(arguments, "group_size")))
    elif strategy == "block":
        rows_and_columns = arguments.get("block_structure")
        words.append("128x128" if is_one_of(rows_and_columns, ([128, 128],)) else shown(rows_and_columns))
    return " ".join(words)
