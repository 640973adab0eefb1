"""`quant_method: compressed-tensors`, as llm-compressor writes it: each module's scheme and tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from moereg.checkpoints._formats import (
    FLOATS,
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    block_tensors,
    exponents,
    one_number,
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
from moereg.spec.quant_schemes import WHOLE, QuantFormat, QuantScheme, get_scheme
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
    weights, activations = _describe(group, "weights"), _describe(group, "input_activations")
    if (weights, activations) not in _SCHEMES:
        known = [f"{pair[0]} with {pair[1]} activations" for pair in _SCHEMES]
        raise CheckpointError(
            f"compressed-tensors weights and activations must be one of the kinds that moereg knows, got {weights} "
            f"weights with {activations} activations; use another release of the model (known: {', '.join(known)})"
        )
    scheme = get_scheme(_SCHEMES[weights, activations])
    assert scheme.weight is not None
    stored_as = (scheme.weight.dtype, scheme.weight.scale_dtype)
    if (layout, *stored_as) not in _LAYOUTS:
        known = [key[0] for key in _LAYOUTS if key[1:] == stored_as]
        raise CheckpointError(
            f"the compressed-tensors format of {scheme.name} must be {' or '.join(known)}, got {shown(layout)}; take "
            "the file from the model's publisher"
        )
    is_tensor = group["weights"].get("strategy") == "tensor"
    tensors = functools.partial(_tensors, _LAYOUTS[(layout, *stored_as)], scheme, is_tensor)
    return StorageFormat(f"compressed-tensors {layout} {scheme.name}", scheme, tensors)


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


# Lists the tensors of a projection's weights.
_Layout = Callable[[QuantFormat, bool, Projection], Sequence[StoredTensor]]
_NUMBER: Final = ((1,), ())


def _tensors(layout: _Layout, scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """The tensors of a layout, one of `_LAYOUTS`, and `input_scale` [1] if activations have a static scale.

    `is_tensor` says whether the whole projection has one scale.
    """
    assert scheme.weight is not None
    tensors = layout(scheme.weight, is_tensor, projection)
    if scheme.activation is None:
        return tensors
    if scheme.activation.static:
        return (*tensors, StoredTensor(".input_scale", _NUMBER, FLOATS, "activation_scale", one_number))
    if scheme.activation.global_scale:
        return (*tensors, StoredTensor(".input_global_scale", _NUMBER, FLOATS, "activation_scale", _inverse))
    return tensors


def _naive(fmt: QuantFormat, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] e4m3 or int8 and `weight_scale`: [1], [N,1], or one per block.

    Source: compressors/naive_quantized/base.py of compressed-tensors 0.20.0.
    """
    if WHOLE not in fmt.group:
        return block_tensors(projection, "weight_scale")
    dtype = "I8" if fmt.dtype == "int8" else "F8_E4M3"
    rows = StoredTensor(".weight_scale", ((projection.rows, 1),), FLOATS, "scale")
    number = StoredTensor(".weight_scale", _NUMBER, FLOATS, "scale", one_number)
    return StoredTensor(".weight", (projection.shape,), (dtype,), "weight"), number if is_tensor else rows


def _packed_integers(fmt: QuantFormat, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight_packed` [N, ceil(K/8)] int32 (8 bits: K/4), `weight_scale` [N,G], `weight_shape`, N and K.

    Codes are signed integers plus 8 (128), packed along K, lowest bits first; unused bits of a row's last word are 0.
    `weight_zero_point` [ceil(N/8), G] int32 has the same offset and is packed along N.
    Source: compressors/pack_quantized of compressed-tensors 0.20.0.
    """
    rows, columns, num_groups = *projection.shape, projection.num_groups(fmt.group[1])
    shape = (rows, -(-columns * fmt.bits // 32))

    def codes(stored: torch.Tensor) -> torch.Tensor:
        words = word_bytes(stored)
        return words[:, : -(-columns // 2)] if fmt.bits == 4 else (words[:, :columns] ^ 128).view(torch.int8)

    def zeros(stored: torch.Tensor) -> torch.Tensor:
        return repacked_zero_points(stored.mT, rows)

    zero_point = StoredTensor(".weight_zero_point", ((-(-rows // 8), num_groups),), ("I32",), "zero_point", zeros)
    return (
        StoredTensor(".weight_packed", (shape,), ("I32",), "weight", codes),
        StoredTensor(".weight_scale", ((rows, num_groups),), FLOATS, "scale"),
        StoredTensor(".weight_shape", ((2,),), ("I64", "I32"), None, functools.partial(_check_shape, projection)),
        *(() if fmt.symmetric else (zero_point,)),
    )


def _unpacked_int4(fmt: QuantFormat, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] int8 from -8 to 7, `weight_scale` and `weight_zero_point` [N,G], the latter in the same range.

    compressed-tensors 0.20.0 stores integers with quantized activations like this, unless told another format.
    Source: compressors/format.py and compressors/naive_quantized/base.py of compressed-tensors 0.20.0.
    """
    groups = ((projection.rows, projection.num_groups(fmt.group[1])),)
    zero_point = StoredTensor(".weight_zero_point", groups, ("I8",), "zero_point", _packed_codes)
    return (
        StoredTensor(".weight", (projection.shape,), ("I8",), "weight", _packed_codes),
        StoredTensor(".weight_scale", groups, FLOATS, "scale"),
        *(() if fmt.symmetric else (zero_point,)),
    )


def _nvfp4(fmt: QuantFormat, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight_packed` [N,K/2] uint8, low nibble the even column, `weight_scale` [N,K/16] e4m3 and two global scales.

    Quantizing multiplies by `weight_global_scale` and `input_global_scale` [1] fp32, so dequantizing divides by them.
    Source: compressors/nvfp4 and quantization/lifecycle/forward.py of compressed-tensors 0.20.0.
    """
    groups = (projection.rows, projection.num_groups(16))
    return (
        StoredTensor(".weight_packed", ((projection.rows, projection.columns // 2),), ("U8",), "weight"),
        StoredTensor(".weight_scale", (groups,), ("F8_E4M3",), "scale"),
        StoredTensor(".weight_global_scale", _NUMBER, FLOATS, "scale_2", _inverse),
    )


def _mx(fmt: QuantFormat, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """Codes, and `weight_scale` [N,K/32] uint8, codes of e8m0.

    mxfp4: `weight_packed` [N,K/2] uint8, low nibble the even column. mxfp8: `weight` [N,K] e4m3.
    Source: compressors/mxfp4, compressors/mxfp8 and mx_utils.py of compressed-tensors 0.20.0.
    """
    packed = StoredTensor(".weight_packed", ((projection.rows, projection.columns // 2),), ("U8",), "weight")
    weight = StoredTensor(".weight", (projection.shape,), ("F8_E4M3",), "weight")
    groups = (projection.rows, projection.num_groups(32))
    scale = StoredTensor(".weight_scale", (groups,), ("U8", "F8_E8M0"), "scale", exponents)
    return packed if fmt.bits == 4 else weight, scale


def _inverse(stored: torch.Tensor) -> torch.Tensor:
    number = one_number(stored).float()
    if not (number.isfinite() and number > 0):
        raise CheckpointError(
            f"global scales of compressed-tensors must be finite and positive, since they divide, got {float(number)}; "
            "calibrate again"
        )
    return 1 / number


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
            f"{stored.tolist()}; use the config.json that belongs to these tensors"
        )
    return stored


_LAYOUTS: Final[Mapping[tuple[str, str, str], _Layout]] = MappingProxyType(
    {
        ("float-quantized", "float8_e4m3fn", "float32"): _naive,
        ("naive-quantized", "float8_e4m3fn", "float32"): _naive,
        ("int-quantized", "int8", "float32"): _naive,
        ("naive-quantized", "int8", "float32"): _naive,
        ("pack-quantized", "int8", "float32"): _packed_integers,
        ("pack-quantized", "uint4", "float32"): _packed_integers,
        ("int-quantized", "uint4", "float32"): _unpacked_int4,
        ("nvfp4-pack-quantized", "float4_e2m1fn", "float8_e4m3fn"): _nvfp4,
        ("mxfp4-pack-quantized", "float4_e2m1fn", "float8_e8m0fnu"): _mx,
        ("mxfp8-quantized", "float8_e4m3fn", "float8_e8m0fnu"): _mx,
    }
)
"""Layouts by the config's `format`, the element type and the group scales' type."""
