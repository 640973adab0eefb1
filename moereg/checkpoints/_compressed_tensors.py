"""`quant_method: compressed-tensors`, what llm-compressor writes: which scheme and which layout a module has."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

from moereg.checkpoints._compressed_layouts import LAYOUTS
from moereg.checkpoints._formats import FormatOf, StorageFormat, read_names
from moereg.errors import CheckpointError
from moereg.quant import QuantScheme, get_scheme

__all__ = ["compressed_tensors_formats"]

_NO_ACTIVATIONS: Final = "16-bit"
# Weights and activations as `_describe` spells them.
_SCHEMES: Final = {
    ("float8 tensor", "float8 static tensor"): "fp8_tensor_static",
    ("float8 tensor", "float8 dynamic tensor"): "fp8_tensor_dynamic",
    # One scale a matrix is as well the same scale for each of its rows.
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

    `config_groups` name modules by class, name or, after `re:`, a regular expression that matches from the start; more
    exact ones come first. `ignore` takes modules out of all of them.
    Source: quantization/quant_config.py and utils/match.py of compressed-tensors 0.20.0.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: A setting is not known, from the function that is returned too.
    """
    groups = config.get("config_groups")
    if not (isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())):
        raise CheckpointError(
            f"compressed-tensors needs config_groups, an object of objects, got {groups!r}; take the file from the "
            "model's publisher"
        )
    sparsity = config.get("sparsity_config") or {}
    for key, found in (
        ("sparsity_config", sparsity if sparsity.get("format", "dense") != "dense" else None),
        ("transform_config", config.get("transform_config")),
    ):
        if found:
            raise CheckpointError(f"moereg does not read {key}, got {found!r}; use a release without it")
    ignored = read_names(config, "ignore")
    targets = [
        (target, group) for group in groups.values() for target in read_names({"targets": (), **group}, "targets")
    ]
    parse = functools.cache(lambda index: _format(targets[index][1], config.get("format")))

    def format_of(module: str) -> StorageFormat | None:
        if any(_specificity(name, module) for name in ignored):
            return None
        found = [_specificity(target, module) for target, _ in targets]
        return parse(found.index(max(found))) if any(found) else None

    return format_of


def _specificity(target: str, module: str) -> int:
    """How exactly a target names a module: 3 its name, 2 an expression, 1 its class, 0 not at all."""
    if target.startswith("re:"):
        try:
            return 2 if re.match(target.removeprefix("re:"), module) else 0
        except re.error as error:
            raise CheckpointError(
                f"targets and ignore must hold names or regular expressions, got {target!r} ({error}); correct it"
            ) from error
    return 3 if target == module else int(target == "Linear")


def _format(group: Mapping[str, Any], default: Any) -> StorageFormat:
    """The format of modules of a group."""
    layout = group.get("format") or default
    scheme = _scheme(group)
    assert scheme.weight is not None
    stored_as = (scheme.weight.dtype, scheme.weight.scale_dtype)
    if (layout, *stored_as) not in LAYOUTS:
        known = [key[0] for key in LAYOUTS if key[1:] == stored_as]
        raise CheckpointError(
            f"the compressed-tensors format of {scheme.name} must be {' or '.join(known)}, got {layout!r}; take the "
            "file from the model's publisher"
        )
    is_tensor = group["weights"].get("strategy") == "tensor"
    tensors = functools.partial(LAYOUTS[(layout, *stored_as)], scheme, is_tensor)
    return StorageFormat(f"compressed-tensors {layout} {scheme.name}", scheme, tensors)


def _scheme(group: Mapping[str, Any]) -> QuantScheme:
    weights, activations = _describe(group.get("weights")), _describe(group.get("input_activations"), True)
    if (weights, activations) not in _SCHEMES:
        known = ", ".join(f"{pair[0]} with {pair[1]} activations" for pair in _SCHEMES)
        raise CheckpointError(
            f"compressed-tensors weights and activations must be one of the kinds that moereg knows, got {weights} "
            f"weights with {activations} activations; use another release of the model (known: {known})"
        )
    return get_scheme(_SCHEMES[weights, activations])


def _describe(arguments: Any, is_activation: bool = False) -> str:
    """`int4 group 128`, `float8 dynamic token`."""
    if not isinstance(arguments, dict):
        return _NO_ACTIVATIONS
    words = [] if arguments.get("symmetric", True) else ["asymmetric"]
    if arguments.get("actorder") in ("group", "dynamic", True):
        # Groups of columns that are not neighbours, others in each matrix: gate and up could not share a w13.
        words.append("activation-ordered")
    words.append(f"{arguments.get('type')}{arguments.get('num_bits')}")
    if is_activation:
        dynamic = arguments.get("dynamic")
        words.append(str(dynamic) if isinstance(dynamic, str) else "dynamic" if dynamic else "static")
    words.append(str(arguments.get("strategy")))
    if arguments.get("strategy") in ("group", "tensor_group"):
        words.append(str(arguments.get("group_size")))
    elif arguments.get("strategy") == "block":
        words.append("x".join(map(str, arguments.get("block_structure") or ())))
    return " ".join(words)
