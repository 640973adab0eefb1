"""The storage format of a layer's experts, according to config.json or hf_quant_config.json.

One function per `quant_method` reads its config; compressed-tensors has its own module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from moereg.checkpoints._compressed_tensors import compressed_tensors_formats
from moereg.checkpoints._files import CheckpointFiles
from moereg.checkpoints._formats import (
    FLOATS,
    FP8_BLOCK,
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    block_tensors,
    exponents,
    one_number,
    transposed,
)
from moereg.checkpoints._patterns import Match, Patterns
from moereg.errors import CheckpointError, shown, unknown_name_message
from moereg.quantize import unpack_nibbles
from moereg.routing.config_entries import is_one_of, read_flag, read_name, read_names, read_objects
from moereg.spec.quant_schemes import WHOLE, QuantScheme, get_scheme
from moereg.weights.words import awq_codes, awq_zero_points, gptq_codes, repacked_zero_points, word_bytes

Config = Mapping[str, Any]


def quantized_format(files: CheckpointFiles, modules: Sequence[str]) -> StorageFormat | None:
    """The common format of the experts' projections, by their names in the checkpoint; None if not quantized.

    A CheckpointError if the method or one of its settings is unknown, or the modules' formats differ.
    """
    if files.quantization is None:
        return None
    config, file = files.quantization
    try:
        method = config.get("quant_method")
        if not isinstance(method, str):
            raise CheckpointError(
                f"a quantized checkpoint must name its quant_method, got {shown(method)}; take the file from the "
                f"model's publisher (known: {', '.join(METHODS)})"
            )
        if method not in METHODS:
            raise CheckpointError(
                f"{unknown_name_message('quant method', method, METHODS)}; use the model's bfloat16 release, or "
                "dequantize it with transformers and save_pretrained"
            )
        format_of = METHODS[method](config)
        formats = {module: format_of(module) for module in modules}
    except CheckpointError as error:
        raise CheckpointError(f"{files.path / file}: {error}") from error
    first_module, first = next(iter(formats.items()))
    for module, found in formats.items():
        if found != first:
            names = ["unquantized" if some is None else some.name for some in (first, found)]
            raise CheckpointError(
                f"{files.path / file}: the experts of a layer must all be stored in one format, got {names[0]} for "
                f"{first_module} and {names[1]} for {module}; quantize all experts of a layer alike"
            )
    return first


def _fp8_formats(config: Config) -> FormatOf:
    """e4m3 in blocks of 128 x 128, as DeepSeek-V3 and Qwen3 publish it.

    `weight` [N,K] e4m3 and `weight_scale_inv` [ceil(N/128), ceil(K/128)]: a weight is its code times its block's scale,
    despite the "inv". Scales are fp32 (DeepSeek), bf16 (Qwen) or e8m0. Activations are quantized in groups of 128 at
    run time.
    Source: README_WEIGHTS.md and inference/kernel.py of deepseek-ai/DeepSeek-V3; transformers' finegrained_fp8.
    """
    expected: dict[str, Sequence[Any]] = {
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic",),
        "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    }
    for key, values in expected.items():
        if not is_one_of(config.get(key), values):
            raise CheckpointError(
                f"{key} of quant method fp8 must be {values[0]!r}, got {shown(config.get(key))}; use a release with "
                "blocks of 128 x 128 and dynamic activations, such as those of DeepSeek-V3 and Qwen3"
            )
    tensors = functools.partial(block_tensors, scale_name="weight_scale_inv")
    storage = StorageFormat("fp8 in blocks of 128 x 128", get_scheme("fp8_block128"), tensors)
    return _all_but(config, ("modules_to_not_convert", "ignored_layers"), storage)


def _mxfp4_formats(config: Config) -> FormatOf:
    """mxfp4 as gpt-oss is published.

    All experts are in one tensor: `gate_up_proj_blocks` and `down_proj_blocks` [E, N, K/32, 16] uint8, two e2m1 codes
    per byte, low nibble the even column; `*_scales` [E, N, K/32] uint8, exponents with bias 127, which are e8m0 codes.
    Unlike the unquantized parameter it is not transposed; gate and up rows alternate in both.
    Source: gpt_oss/torch/weights.py of openai/gpt-oss; `convert_moe_packed_tensors` of transformers.
    """

    def tensors(projection: Projection) -> Sequence[StoredTensor]:
        groups = (projection.rows, projection.num_groups(32))
        return (
            StoredTensor("_blocks", ((*groups, 16),), ("U8",), "weight", lambda stored: stored.flatten(-2)),
            StoredTensor("_scales", (groups,), ("U8", "F8_E8M0"), "scale", exponents),
        )

    storage = StorageFormat("mxfp4", get_scheme("mxfp4_w4a16"), tensors, is_fused=True)
    return _all_but(config, ("modules_to_not_convert",), storage)


def _all_but(config: Config, keys: Sequence[str], storage: StorageFormat) -> FormatOf:
    """The format of all modules except those that the entries list, by whole components of their names."""
    is_ignored = Patterns(keys[0]).components([name for key in keys for name in read_names(config, key)])
    return lambda module: None if is_ignored(module) else storage


def _modelopt_formats(config: Config) -> FormatOf:
    """nvfp4, and fp8 with per-tensor scales, as NVIDIA's ModelOpt exports them.

    `quant_algo` names one format for all modules except those in `exclude_modules` (hf_quant_config.json) or `ignore`
    (config.json), which list names, or prefixes of names with a star.
    Source: export/quant_utils.py and export/convert_hf_config.py of nvidia-modelopt 0.47.0.
    """
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"{unknown_name_message('quant_algo', algorithm, _ALGORITHMS)}; use another release of the model"
        )
    scheme, tensors = _ALGORITHMS[algorithm]
    if "NVFP4" in algorithm and not is_one_of(config.get("group_size", 16), (16,)):
        raise CheckpointError(
            f"group_size of quant_algo {algorithm} must be 16, got {shown(config['group_size'])}; use another release "
            "of the model"
        )
    patterns = [name for key in ("exclude_modules", "ignore") for name in read_names(config, key)]
    is_excluded = Patterns("exclude_modules").wildcards(patterns)
    storage = StorageFormat(f"modelopt {algorithm}", get_scheme(scheme), tensors)
    return lambda module: None if is_excluded(module) else storage


_NUMBER: Final = ((), (1,))
_INPUT_SCALE: Final = StoredTensor(".input_scale", _NUMBER, ("F32",), "activation_scale", one_number)


def _nvfp4(projection: Projection, has_activations: bool = True) -> Sequence[StoredTensor]:
    """`weight` [N,K/2] uint8, low nibble the even column, `weight_scale` [N,K/16] e4m3, `weight_scale_2` [] fp32.

    A weight is code * weight_scale * weight_scale_2. `input_scale` [] fp32 is the global activation scale,
    amax / (6 * 448).
    Source: quantization/qtensor/nvfp4_tensor.py of nvidia-modelopt 0.47.0.
    """
    groups = (projection.rows, projection.num_groups(16))
    return (
        StoredTensor(".weight", ((projection.rows, projection.columns // 2),), ("U8",), "weight"),
        StoredTensor(".weight_scale", (groups,), ("F8_E4M3",), "scale"),
        StoredTensor(".weight_scale_2", _NUMBER, ("F32",), "scale_2", one_number),
        *((_INPUT_SCALE,) if has_activations else ()),
    )


def _fp8_with_static_scales(projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] e4m3, `weight_scale` and `input_scale` [] fp32, both multipliers."""
    return (
        StoredTensor(".weight", (projection.shape,), ("F8_E4M3",), "weight"),
        StoredTensor(".weight_scale", _NUMBER, ("F32",), "scale", one_number),
        _INPUT_SCALE,
    )


_ALGORITHMS: Final[Mapping[str, tuple[str, Callable[[Projection], Sequence[StoredTensor]]]]] = MappingProxyType(
    {
        "FP8": ("fp8_tensor_static", _fp8_with_static_scales),
        "NVFP4": ("nvfp4", _nvfp4),
        "W4A16_NVFP4": ("nvfp4_w4a16", functools.partial(_nvfp4, has_activations=False)),
    }
)

_GROUP_SIZES: Final = {32: "g32", 64: "g64", 128: "g128", WHOLE: "gall"}


def _int4_scheme(method: str, config: Config, is_symmetric: bool) -> QuantScheme:
    for key, known in (("bits", (4,)), ("group_size", tuple(_GROUP_SIZES))):
        if not is_one_of(config.get(key), known):
            raise CheckpointError(
                f"{key} of quant method {method} must be {' or '.join(map(str, known))}, got {shown(config.get(key))}; "
                "use another release of the model"
            )
    return get_scheme(f"int4_w4a16_{_GROUP_SIZES[config['group_size']]}{'' if is_symmetric else '_zp'}")


def _awq_formats(config: Config) -> FormatOf:
    """4-bit integers packed along the rows, as AutoAWQ writes them.

    `qweight` [K, N/8] int32: unsigned, eight neighboring rows of a column per word, in AWQ's order.
    `qzeros` [G, N/8] int32: zero points in the same order, without an offset. `scales` [G, N]. A weight is
    (code - zero point) * scale.
    Source: modules/linear/gemm.py and utils/packing_utils.py of AutoAWQ 0.2.9.
    """
    for key, expected in (("version", "gemm"), ("zero_point", True)):
        found = config.get(key, expected)
        if not is_one_of(found.lower() if isinstance(found, str) else found, (expected,)):
            raise CheckpointError(
                f"{key} of quant method awq must be {expected!r}, got {shown(found)}; save it so with AutoAWQ, or use "
                "another release"
            )
    scheme = _int4_scheme("awq", config, is_symmetric=False)
    storage = StorageFormat(f"awq {scheme.name}", scheme, functools.partial(_awq_tensors, scheme))
    return _all_but(config, ("modules_to_not_convert",), storage)


def _awq_tensors(scheme: QuantScheme, projection: Projection) -> Sequence[StoredTensor]:
    assert scheme.weight is not None
    num_groups = projection.num_groups(scheme.weight.group[1])
    if projection.rows % 8 or projection.columns % 2:
        raise CheckpointError(
            f"the rows of {projection.module} must be a multiple of 8 and its columns of 2 in quant method awq, got "
            f"{projection.rows} and {projection.columns}; use the config.json that belongs to these tensors"
        )
    return (
        StoredTensor(".qweight", ((projection.columns, projection.rows // 8),), ("I32",), "weight", awq_codes),
        StoredTensor(".scales", ((num_groups, projection.rows),), FLOATS, "scale", transposed),
        StoredTensor(".qzeros", ((num_groups, projection.rows // 8),), ("I32",), "zero_point", awq_zero_points),
    )


_VERSIONS: Final = ("gptq", "gptq_v2")
_ONE_IN_EACH_NIBBLE: Final = 0x11111111
_NO_ZERO_POINT: Final = 8


def _gptq_formats(config: Config) -> FormatOf:
    """4-bit integers packed along the reduced dimension, as AutoGPTQ and GPTQModel write them.

    `qweight` [K/8, N] int32: unsigned, eight neighboring columns of a row per word, the first in the lowest bits.
    `qzeros` [G, ceil(N/8)] int32: zero points, packed along N. Version 1 (`gptq`, the default) subtracts one from each
    before packing, version 2 (`gptq_v2`) does not. `scales` [G, N]. `g_idx` [K]: each column's group. A weight is
    (code - zero point) * scale.

    `dynamic` has settings for modules by regular expressions, which match from the start. Modules that match one after
    `-:` stay unquantized.

    Source: nn_modules/qlinear/__init__.py (`pack_original`), utils/model.py (`convert_gptq_v1_to_v2_format_module`) and
    quantization/config.py of GPTQModel 7.6.0; qlinear_cuda_old.py of AutoGPTQ.
    """
    patterns = Patterns("dynamic")
    rules: list[tuple[Match, Callable[[], StorageFormat | None]]] = []
    for pattern, changes in read_objects(config, "dynamic").items():
        sign, expression = (pattern[0], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("+", pattern)
        # Parsed at a module's first match, since rules for other modules may have settings unknown to moereg.
        rule = functools.cache(functools.partial(_gptq_format, {**config, **changes})) if sign == "+" else lambda: None
        rules.append((patterns.expression(pattern, expression), rule))
    default = functools.cache(functools.partial(_gptq_format, config))
    return lambda module: next((rule for matches, rule in rules if matches(module)), default)()


def _gptq_format(config: Config) -> StorageFormat:
    version = read_name(config, "checkpoint_format") or read_name(config, "format") or _VERSIONS[0]
    if version not in _VERSIONS:
        raise CheckpointError(
            f"checkpoint_format of quant method gptq must be {' or '.join(_VERSIONS)}, got {shown(version)}; save it "
            "in one of these with GPTQModel"
        )
    scheme = _int4_scheme("gptq", config, is_symmetric=read_flag(config, "sym", default=True))
    is_ordered = read_flag(config, "desc_act")
    tensors = functools.partial(_gptq_tensors, scheme, version, is_ordered)
    return StorageFormat(f"{version} {scheme.name}{' desc_act' * is_ordered}", scheme, tensors)


def _gptq_tensors(
    scheme: QuantScheme, version: str, is_ordered: bool, projection: Projection
) -> Sequence[StoredTensor]:
    fmt = scheme.weight
    assert fmt is not None
    rows, columns, num_groups = *projection.shape, projection.num_groups(fmt.group[1])
    zeros = functools.partial(_gptq_zero_points, rows=rows, version=version, is_symmetric=fmt.symmetric)
    order = functools.partial(_check_order, group_size=columns // num_groups)
    return (
        StoredTensor(".qweight", ((projection.num_groups(8), rows),), ("I32",), "weight", gptq_codes),
        StoredTensor(".scales", ((num_groups, rows),), FLOATS, "scale", transposed),
        StoredTensor(
            ".qzeros", ((num_groups, -(-rows // 8)),), ("I32",), None if fmt.symmetric else "zero_point", zeros
        ),
        StoredTensor(".g_idx", ((columns,),), ("I32", "I64"), None, order, required=is_ordered),
        # AutoGPTQ wrote zeros for modules without a bias.
        StoredTensor(".bias", ((rows,),), FLOATS, None, _check_no_bias, required=False),
    )


def _gptq_zero_points(stored: torch.Tensor, rows: int, version: str, is_symmetric: bool) -> torch.Tensor:
    words = stored + _ONE_IN_EACH_NIBBLE if version == _VERSIONS[0] else stored
    if not is_symmetric:
        return repacked_zero_points(words, rows)
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


METHODS: Final[Mapping[str, Callable[[Config], FormatOf]]] = MappingProxyType(
    {
        "awq": _awq_formats,
        "compressed-tensors": compressed_tensors_formats,
        "fp8": _fp8_formats,
        "gptq": _gptq_formats,
        "modelopt": _modelopt_formats,
        "mxfp4": _mxfp4_formats,
    }
)
"""Readers by `quant_method`: each makes modules' formats from the config, or raises CheckpointError if unknown."""
