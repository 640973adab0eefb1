"""`quant_method: compressed-tensors`, as llm-compressor writes it: each module's scheme and tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from moereg.checkpoints._files import ONE_EXPORT
from moereg.checkpoints._formats import (
    FLOATS,
    OTHERWISE,
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    activation_tensors,
    plain_tensors,
)
from moereg.checkpoints._patterns import Patterns
from moereg.errors import CheckpointError, shown
from moereg.quantize import pack_nibbles
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
from moereg.weights.words import repacked_zero_points, word_bytes

_NO_ACTIVATIONS: Final = "16-bit"
_ORDERS: Final = ("group", "dynamic", True)
_NO_ORDERS: Final = ("weight", "static", False, None)
_STRATEGIES: Final = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", None)
# By weights and activations, in the spelling of `_describe`.
_SCHEMES: Final = {
    ("float8 tensor", "float8 static tensor"): "fp8_tensor_static",
    ("float8 tensor", "float8 dynamic tensor"): "fp8_tensor_dynamic",
    # A per-tensor scale equals the same scale for each row.
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
    ("float4 group 32", "float8 dynamic group 32"): "mxfp4_mxfp8",
}
# Schemes that read the same weights, where moereg has none with these activations.
_SCHEMES_IN_16_BITS: Final = {
    ("float4 group 32", "float4 dynamic group 32"): "mxfp4_w4a16",
    ("float4 group 32", "float8 static tensor"): "mxfp4_w4a16",
    ("float4 group 32", "float8 dynamic token"): "mxfp4_w4a16",
}


def compressed_tensors_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `config_groups` name modules by class, by name or, after `re:`, by a regular expression that matches from the start;
    the most specific one counts. `ignore` excludes modules from all of them.
    A setting that is unknown is a CheckpointError, also of the returned function.
    Source: quantization/quant_config.py and utils/match.py of compressed-tensors 0.20.0.
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
            raise CheckpointError(f"moereg does not read {key}, got {shown(found)}; {OTHERWISE}")
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
    """How specifically targets name a module: 3 by name, 2 by expression, 1 by class, 0 not at all."""
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
    layout = read_name(group, "format") or default or ""
    scheme, note = scheme_of("compressed-tensors", group)
    assert scheme.weight is not None
    stored_as = (scheme.weight.dtype, scheme.weight.scale_dtype)
    if (layout, *stored_as) not in _LAYOUTS:
        known = [key[0] for key in _LAYOUTS if key[1:] == stored_as]
        raise CheckpointError(
            f"the compressed-tensors format of {scheme.name} must be {' or '.join(known)}, got {shown(layout)}; take "
            "the file from the model's publisher"
        )
    tensors = functools.partial(_LAYOUTS[(layout, *stored_as)], scheme)
    return StorageFormat(f"compressed-tensors {layout} {scheme.name}", scheme, tensors, note)


def scheme_of(method: str, group: Mapping[str, Any]) -> tuple[QuantScheme, str | None]:
    """The scheme of a group's `weights` and `input_activations`, and a note if activations keep 16 bits instead."""
    weights, activations = _describe(group, "weights"), _describe(group, "input_activations")
    name = _SCHEMES.get((weights, activations)) or _SCHEMES_IN_16_BITS.get((weights, activations))
    if name is None:
        pairs = (*_SCHEMES, *_SCHEMES_IN_16_BITS)
        with_these = [theirs for ours, theirs in pairs if ours == weights]
        known = dict.fromkeys(with_these or [ours for ours, _ in pairs])
        raise CheckpointError(
            f"{method} {'activations' if with_these else 'weights'} must be of a kind that moereg knows, got {weights} "
            f"weights with {activations} activations (known{' with them' if with_these else ''}: {', '.join(known)}); "
            f"{OTHERWISE}"
        )
    return get_scheme(name), None if (weights, activations) in _SCHEMES else in_16_bits(activations)


def in_16_bits(activations: str) -> str:
    """A note that activations are not quantized as the file says."""
    return f"its file says {activations} activations; they stay in 16 bits, since moereg has no such scheme"


def _describe(group: Mapping[str, Any], side: str) -> str:
    """Describes a format, such as `int4 group 128` or `float8 dynamic token`."""
    arguments = read_object(group, side)
    if not arguments:
        return _NO_ACTIVATIONS
    words = [] if read_flag(arguments, "symmetric", default=True) else ["asymmetric"]
    if read_choice(arguments, "actorder", (*_ORDERS, *_NO_ORDERS), None) in _ORDERS:
        # Groups of non-contiguous columns. They differ between gate and up, which therefore cannot share w13.
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


def _packed_integers(scheme: QuantScheme, projection: Projection) -> Sequence[StoredTensor]:
    """`weight_packed` [N, ceil(K/8)] int32 (8 bits: K/4), `weight_scale` [N,G], `weight_shape`, N and K.

    Codes are signed integers plus 8 (128), packed along K, lowest bits first; unused bits of a row's last word are 0.
    `weight_zero_point` [ceil(N/8), G] int32 has the same offset and is packed along N.
    Source: compressors/pack_quantized of compressed-tensors 0.20.0.
    """
    fmt = scheme.weight
    assert fmt is not None
    rows, columns, num_groups = *projection.shape, projection.num_groups(fmt.group[1])
    shape = (rows, -(-columns * fmt.bits // 32))

    def codes(stored: torch.Tensor) -> torch.Tensor:
        words = word_bytes(stored)
        return words[:, : -(-columns // 2)] if fmt.bits == 4 else (words[:, :columns] ^ 128).view(torch.int8)

    def zeros(stored: torch.Tensor) -> torch.Tensor:
        return repacked_zero_points(stored.mT, rows)

    check_shape = functools.partial(_check_shape, projection)
    zero_point = StoredTensor(("weight_zero_point",), ((-(-rows // 8), num_groups),), ("I32",), "zero_point", zeros)
    return (
        StoredTensor(("weight_packed",), (shape,), ("I32",), "weight", codes),
        StoredTensor(("weight_scale",), ((rows, num_groups),), FLOATS, "scale"),
        StoredTensor(("weight_shape",), ((2,),), ("I64", "I32"), None, check_shape, required=False),
        *(() if fmt.symmetric else (zero_point,)),
        *activation_tensors(scheme, projection),
    )


def _unpacked_int4(scheme: QuantScheme, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] int8 from -8 to 7, `weight_scale` and `weight_zero_point` [N,G], the latter in the same range.

    compressed-tensors 0.20.0 stores integers with quantized activations like this, unless told another format.
    Source: compressors/format.py and compressors/naive_quantized/base.py of compressed-tensors 0.20.0.
    """
    fmt = scheme.weight
    assert fmt is not None
    groups = ((projection.rows, projection.num_groups(fmt.group[1])),)
    zero_point = StoredTensor(("weight_zero_point",), groups, ("I8",), "zero_point", _packed_codes)
    return (
        StoredTensor(("weight",), (projection.shape,), ("I8",), "weight", _packed_codes),
        StoredTensor(("weight_scale",), groups, FLOATS, "scale"),
        *(() if fmt.symmetric else (zero_point,)),
        *activation_tensors(scheme, projection),
    )


def _packed_codes(stored: torch.Tensor) -> torch.Tensor:
    low, high = (int(extreme) for extreme in stored.aminmax())
    if low < -8 or high > 7:
        raise CheckpointError(
            f"4-bit integers must be from -8 to 7, got {low} to {high}; take the file from the model's publisher"
        )
    return pack_nibbles((stored + 8).view(torch.uint8))


def _check_shape(projection: Projection, stored: torch.Tensor) -> torch.Tensor:
    if stored.tolist() != [projection.rows, projection.columns]:
        raise CheckpointError(
            f"it must be {[projection.rows, projection.columns]} where config.json has these sizes, got "
            f"{stored.tolist()}; {ONE_EXPORT}"
        )
    return stored


# Lists the tensors of a projection's weights in a scheme.
_Layout = Callable[[QuantScheme, Projection], Sequence[StoredTensor]]
_divided: Final = functools.partial(plain_tensors, scales_divide=True)

_LAYOUTS: Final[Mapping[tuple[str, str, str], _Layout]] = MappingProxyType(
    {
        ("float-quantized", "float8_e4m3fn", "float32"): plain_tensors,
        ("naive-quantized", "float8_e4m3fn", "float32"): plain_tensors,
        ("int-quantized", "int8", "float32"): plain_tensors,
        ("naive-quantized", "int8", "float32"): plain_tensors,
        ("pack-quantized", "int8", "float32"): _packed_integers,
        ("pack-quantized", "uint4", "float32"): _packed_integers,
        ("int-quantized", "uint4", "float32"): _unpacked_int4,
        ("nvfp4-pack-quantized", "float4_e2m1fn", "float8_e4m3fn"): _divided,
        ("mxfp4-pack-quantized", "float4_e2m1fn", "float8_e8m0fnu"): plain_tensors,
        ("mxfp8-quantized", "float8_e4m3fn", "float8_e8m0fnu"): plain_tensors,
    }
)
"""Layouts by the config's `format`, the element type and the group scales' type."""
