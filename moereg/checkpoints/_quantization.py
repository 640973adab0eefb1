"""The storage format of a layer's experts, according to config.json or hf_quant_config.json.

One function per `quant_method` reads its config; compressed-tensors has its own module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from moereg.checkpoints._compressed_tensors import compressed_tensors_formats, in_16_bits, scheme_of
from moereg.checkpoints._files import ONE_EXPORT, CheckpointFiles
from moereg.checkpoints._formats import (
    FLOATS,
    OTHERWISE,
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    plain_tensors,
    transposed,
)
from moereg.checkpoints._models import LAYERS
from moereg.checkpoints._patterns import Match, Patterns
from moereg.errors import CheckpointError, shown
from moereg.quantize import unpack_nibbles
from moereg.routing import BY_HAND
from moereg.routing.config_entries import (
    is_one_of,
    read_choice,
    read_flag,
    read_name,
    read_names,
    read_object,
    read_objects,
)
from moereg.spec.quant_schemes import WHOLE, QuantScheme, get_scheme
from moereg.weights.words import awq_codes, awq_zero_points, gptq_codes, repacked_zero_points, word_bytes

Config = Mapping[str, Any]


def quantized_format(files: CheckpointFiles, modules: Sequence[str]) -> StorageFormat | None:
    """The common format of modules, by their names in the checkpoint; None if they are not quantized.

    A CheckpointError if the method or one of its settings is unknown, or the modules' formats differ.
    """
    if files.quantization is None:
        return None
    config, file = files.quantization
    try:
        # vLLM reads files of ModelOpt without it.
        method = config.get("quant_method", "modelopt" if {"quant_algo", "quantization"} & {*config} else None)
        if not isinstance(method, str):
            raise CheckpointError(
                f"a quantized checkpoint must name its quant_method, got {shown(method)}; take the file from the "
                f"model's publisher (known: {', '.join(METHODS)})"
            )
        # vLLM has `modelopt_fp4` and others, AutoRound once wrote `intel/auto-round`.
        family = "modelopt" if method.startswith("modelopt") else method.removeprefix("intel/")
        if family not in METHODS:
            raise CheckpointError(f"quant method {shown(method)} is not read (read: {', '.join(METHODS)}); {OTHERWISE}")
        format_of = METHODS[family](config)
        formats = {module: format_of(module) for module in modules}
    except CheckpointError as error:
        raise CheckpointError(f"{files.path / file}: {error}") from error
    first_module, first = next(iter(formats.items()))
    for module, found in formats.items():
        if found != first:
            names = ["unquantized" if some is None else some.name for some in (first, found)]
            ranks = "read a rank's experts that are stored alike (num_local_experts, ep_rank), or "
            is_one_expert = module.rpartition(".")[0] == first_module.rpartition(".")[0]
            raise CheckpointError(
                f"{files.path / file}: the experts of a layer must all be stored in one format, got {names[0]} for "
                f"{first_module} and {names[1]} for {module}; {'' if is_one_expert else ranks}dequantize the others "
                f"and {BY_HAND}"
            )
    return first


def _plain_format(name: str, scheme_name: str, note: str | None = None) -> StorageFormat:
    scheme = get_scheme(scheme_name)
    return StorageFormat(name, scheme, functools.partial(plain_tensors, scheme), note)


def _fp8_formats(config: Config) -> FormatOf:
    """e4m3 in blocks of 128 x 128 as DeepSeek-V3 and Qwen3 publish it, in rows of 32, or with a scale per matrix.

    With `expert_dtype: fp4` (DeepSeek-V4) experts are mxfp4 in int8, and activations are quantized as in mxfp8.
    Blocks have dynamic activations. transformers' `activation_scale` is the static one.
    Source: README_WEIGHTS.md and inference/kernel.py of deepseek-ai/DeepSeek-V3; integrations/finegrained_fp8.py and
    models/deepseek_v4/configuration_deepseek_v4.py of transformers 5.23.
    """
    read_choice(config, "fmt", ("e4m3", "float8_e4m3fn", None), None)
    activations = read_choice(config, "activation_scheme", ("dynamic", "static"), None)
    block = read_choice(config, "weight_block_size", ([128, 128], [1, 32], None), None, OTHERWISE)
    kind = f"in blocks of {block[0]} x {block[1]}" if block else "per matrix"
    scheme = {"[128, 128]": "fp8_block128", "[1, 32]": "mxfp8"}.get(str(block), f"fp8_tensor_{activations}")
    if read_choice(config, "expert_dtype", ("fp8", "fp4"), "fp8") == "fp4":
        kind, scheme = "with fp4 experts", "mxfp4_mxfp8"
    elif block and activations == "static":
        raise CheckpointError(
            f"activation_scheme of quant method fp8 must be dynamic where weights are {kind}, got 'static'; {OTHERWISE}"
        )
    return _all_but(config, ("modules_to_not_convert", "ignored_layers"), _plain_format(f"fp8 {kind}", scheme))


def _mxfp4_formats(config: Config) -> FormatOf:
    """mxfp4 as gpt-oss is published, fused in blocks of 32 columns, or per expert as in other families."""
    return _all_but(config, ("modules_to_not_convert",), _plain_format("mxfp4", "mxfp4_w4a16"))


def _all_but(config: Config, keys: Sequence[str], storage: StorageFormat) -> FormatOf:
    """The format of all modules except those that the entries list, by whole components of their names."""
    is_ignored = Patterns(keys[0]).components([name for key in keys for name in read_names(config, key)])
    return lambda module: None if is_ignored(module) else storage


# Schemes of ModelOpt's algorithms.
_ALGORITHMS: Final = {
    "FP8": "fp8_tensor_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel_token",
    "FP8_PB_WO": "fp8_block128",
    "FP8_BLOCK_SCALES": "fp8_block128",
    "MXFP4": "mxfp4_w4a16",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4_w4a16",
    "W4A8_MXFP4_FP8": "mxfp4_w4a16",
    "W4A8_NVFP4_FP8": "nvfp4_w4a16",
    "W8A16": "int8_w8a16",
}
_PREFIX: Final = re.compile(f"^(?:{'|'.join(map(re.escape, LAYERS))})")
_NOTES: Final = {
    "FP8_PB_WO": "its file says 16-bit activations, which exact_activations=True keeps",
    "MXFP4": in_16_bits("mxfp4"),
    **dict.fromkeys(("W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8"), in_16_bits("fp8")),
}


def _modelopt_formats(config: Config) -> FormatOf:
    """Formats of NVIDIA's ModelOpt, whose tensors are plain.

    `quant_algo` names one algorithm for all modules except those in `exclude_modules` (hf_quant_config.json) or
    `ignore` (config.json), which list names, or prefixes of names with a star. With MIXED_PRECISION,
    `quantized_layers` has an algorithm for each quantized module, by its name or that of a module around it.
    Names may have the prefix of another class of the same model.
    Source: export/quant_utils.py and export/convert_hf_config.py of nvidia-modelopt 0.47.0.
    """
    config = {**config, **read_object(config, "quantization")}
    patterns = [name for key in ("exclude_modules", "ignore") for name in read_names(config, key)]
    is_excluded = Patterns("exclude_modules").wildcards(patterns)
    parse = functools.cache(lambda algorithm, group_size: _modelopt_format(algorithm, group_size, config))
    if str(config.get("quant_algo")).upper() != "MIXED_PRECISION":
        storage = parse(read_name(config, "quant_algo"), shown(config.get("group_size")))
        return lambda module: None if is_excluded(module) else storage
    layers = read_objects(config, "quantized_layers")
    if not layers:
        raise CheckpointError(
            "quantized_layers must say what MIXED_PRECISION mixes, got none; take hf_quant_config.json from the "
            "model's publisher, which has them"
        )
    settings = {_PREFIX.sub("layers.", name): layer for name, layer in layers.items()}

    def format_of(module: str) -> StorageFormat | None:
        name = _PREFIX.sub("layers.", module)
        # Fused experts in the file and single ones in the map, or the other way round.
        first = name.replace(".experts.", ".experts.0.")
        fused = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        both = re.sub("(gate|up)_proj$", "gate_up_proj", fused)
        parts = name.split(".")
        around = (".".join(parts[:stop]) for stop in range(len(parts) - 1, 0, -1))
        names = (name, fused, both, first, first.replace(".gate_up_proj", ".gate_proj"), *around)
        found = next((settings[name] for name in names if name in settings), None)
        if found is None or is_excluded(module):
            return None
        return parse(read_name(found, "quant_algo"), shown(found.get("group_size")))

    return format_of


def _modelopt_format(name: str | None, group_size: str, config: Config) -> StorageFormat:
    algorithm = (name or "").upper()
    if algorithm not in _ALGORITHMS:
        is_scaled = algorithm.endswith(("_AWQ", "_SVD", "_SQ_PER_CHANNEL"))
        reason = "has vectors that multiply activations (pre_quant_scale)" if is_scaled else "is unknown"
        raise CheckpointError(
            f"quant_algo {shown(name)} {reason} (read: {', '.join(_ALGORITHMS)}, MIXED_PRECISION); {OTHERWISE}"
        )
    groups = [group for group in read_objects(config, "config_groups").values() if "weights" in group]
    if algorithm == "NVFP4" and groups and not any(group.get("input_activations") for group in groups):
        algorithm = "W4A16_NVFP4"
    storage = _plain_format(f"modelopt {algorithm}", _ALGORITHMS[algorithm], _NOTES.get(algorithm))
    fmt = storage.scheme.weight
    assert fmt is not None
    if group_size not in ("None", "0", str(fmt.group[1])):
        raise CheckpointError(
            f"group_size of quant_algo {algorithm} must be {fmt.group[1]}, got {group_size}; {OTHERWISE}"
        )
    return storage


_QUARK_TYPES: Final = {"fp8_e4m3": ("float", 8), "fp8_e4m3fn": ("float", 8), "fp4": ("float", 4), "int8": ("int", 8)}
_QUARK_SCHEMES: Final = ("per_tensor", "per_channel", "per_token", "per_group", "per_block")


def _quark_formats(config: Config) -> FormatOf:
    """Plain formats of AMD's Quark: `global_quant_config`, and others by name or wildcard in `layer_quant_config`.

    Source: torch/export of amd-quark 0.13; quantizer_quark.py of transformers 5.23, which nests all in `quant_config`.
    """
    config = {**config, **read_object(config, "quant_config")}
    algorithms = config.get("algo_config")
    _check_no_rotation(algorithms if re.search("rotation|svdquant", str(algorithms)) else None)
    patterns = Patterns("exclude and layer_quant_config")
    is_excluded = patterns.wildcards(read_names(config, "exclude"))
    layers = read_objects(config, "layer_quant_config")
    rules = [(patterns.wildcards([name]), layer) for name, layer in layers.items()]
    default = read_object(config, "global_quant_config")

    def format_of(module: str) -> StorageFormat | None:
        found = next((layer for matches, layer in rules if matches(module)), default)
        return None if is_excluded(module) or not found.get("weight") else _quark_format(found)

    return format_of


def _check_no_rotation(found: object) -> None:
    if found:
        raise CheckpointError(f"moereg does not rotate activations, got {shown(found)}; {OTHERWISE}")


def _arguments(kind: str, bits: Any, strategy: str, size: Any, dynamic: bool | str) -> dict[str, Any]:
    """As compressed-tensors has them."""
    sizes = {"group_size": size, "block_structure": size}
    return {"type": kind, "num_bits": bits, "strategy": strategy, "dynamic": dynamic, **sizes}


def _quark_format(layer: Config) -> StorageFormat:
    """The format of a layer's settings, in compressed-tensors' words."""
    group: dict[str, Any] = {}
    for side, ours in (("weight", "weights"), ("input_tensors", "input_activations")):
        if not layer.get(side):
            continue
        spec = read_object(layer, side)
        kind, bits = _QUARK_TYPES[read_choice(spec, "dtype", tuple(_QUARK_TYPES), None, OTHERWISE)]
        strategy = read_choice(spec, "qscheme", _QUARK_SCHEMES, "per_group").removeprefix("per_")
        if strategy == "group" and bits == 4:
            read_choice(spec, "scale_format", ("e8m0",), "e8m0", OTHERWISE)
        if side == "input_tensors" and strategy == "channel":
            strategy = "token"
        size = spec.get("block_size") if strategy == "block" else spec.get("group_size")
        group[ours] = _arguments(kind, bits, strategy, size, read_flag(spec, "is_dynamic"))
        group[ours]["symmetric"] = read_flag(spec, "symmetric", default=True)
    scheme, note = scheme_of("quark", group)
    return _plain_format(f"quark {scheme.name}", scheme.name, note)


# Where AutoRound packs like GPTQ, its version there; else None.
_PACKINGS: Final = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto"), "gptq"),
    **dict.fromkeys(("auto_round:gptqmodel", "auto_round"), "gptq_v2"),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), None),
}
_ROUND_FLOATS: Final = ("mx_fp", "nv_fp", "fp")


def _auto_round_formats(config: Config) -> FormatOf:
    """AutoRound's: integers packed as AutoGPTQ or AutoAWQ do, or plain floats.

    `extra_config` has settings of single modules, by name or by an expression that is found anywhere in it; with `bits`
    of 16 a module is unquantized.
    Source: export/export_to_autoround and inference/convert_model.py of auto-round 0.16.1.
    """
    _check_no_rotation(config.get("rotation_config") or config.get("spinquant_config"))
    patterns = Patterns("extra_config")
    layers = read_objects(config, "extra_config")
    expressions = {text: some for text, some in layers.items() if some and not text.replace(".", "_").isidentifier()}
    rules = [(patterns.expression(text, text, is_anywhere=True), some) for text, some in expressions.items()]
    is_ignored = patterns.components(read_names(config, "modules_to_not_convert"))

    def format_of(module: str) -> StorageFormat | None:
        changes = layers.get(module) or next((some for matches, some in rules if matches(module)), {})
        settings = {**config, **changes}
        return None if is_ignored(module) or settings.get("bits") in (16, 32) else _auto_round_format(settings)

    return format_of


def _auto_round_format(config: Config) -> StorageFormat:
    packing = read_name(config, "packing_format") or "auto_round:auto_gptq"
    data_type = read_name(config, "data_type") or "int"
    if data_type == "int" and packing in _PACKINGS:
        version = {"checkpoint_format": _PACKINGS[packing], "desc_act": False}
        return _awq_format(config) if _PACKINGS[packing] is None else _gptq_format({**config, **version})
    if not data_type.startswith(_ROUND_FLOATS):
        raise CheckpointError(
            f"packing_format of auto-round must be in {list(_PACKINGS)} where data_type is int, or data_type one of "
            f"{', '.join(_ROUND_FLOATS)}, got {shown(packing)} and {shown(data_type)}; {OTHERWISE}"
        )
    group: dict[str, Any] = {}
    is_nv = data_type.startswith("nv_fp")
    for side, prefix, whole_row in (("weights", "", "channel"), ("input_activations", "act_", "token")):
        bits, size = config.get(f"{prefix}bits"), config.get(f"{prefix}group_size")
        if prefix and bits in (None, 16, 32):
            continue
        strategies = {"-1": whole_row, "0": "tensor", "[128, 128]": "block"}
        strategy = strategies.get(str(size), "tensor_group" if is_nv else "group")
        is_dynamic = "local" if is_nv else read_flag(config, "act_dynamic", default=True)
        group[side] = _arguments("float", bits, strategy, size, is_dynamic)
    scheme, note = scheme_of("auto-round", group)
    tensors = functools.partial(plain_tensors, scheme, scales_divide=True)
    return StorageFormat(f"auto-round {scheme.name}", scheme, tensors, note)


_GROUP_SIZES: Final = {32: "g32", 64: "g64", 128: "g128", WHOLE: "gall"}


def _int4_scheme(method: str, config: Config, is_symmetric: bool) -> QuantScheme:
    for key, known in (("bits", (4,)), ("group_size", tuple(_GROUP_SIZES))):
        if not is_one_of(config.get(key), known):
            raise CheckpointError(
                f"{key} of quant method {method} must be {' or '.join(map(str, known))}, got {shown(config.get(key))}; "
                f"{OTHERWISE}"
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
            raise CheckpointError(f"{key} of quant method awq must be {expected!r}, got {shown(found)}; {OTHERWISE}")
    return _all_but(config, ("modules_to_not_convert",), _awq_format(config))


def _awq_format(config: Config) -> StorageFormat:
    scheme = _int4_scheme("awq", config, is_symmetric=False)
    return StorageFormat(f"awq {scheme.name}", scheme, functools.partial(_awq_tensors, scheme))


def _awq_tensors(scheme: QuantScheme, projection: Projection) -> Sequence[StoredTensor]:
    assert scheme.weight is not None
    num_groups = projection.num_groups(scheme.weight.group[1])
    if projection.rows % 8 or projection.columns % 2:
        raise CheckpointError(
            f"the rows of {projection.module} must be a multiple of 8 and its columns of 2 in quant method awq, got "
            f"{projection.rows} and {projection.columns}; {ONE_EXPORT}"
        )
    return (
        StoredTensor(("qweight",), ((projection.columns, projection.rows // 8),), ("I32",), "weight", awq_codes),
        StoredTensor(("scales",), ((num_groups, projection.rows),), FLOATS, "scale", transposed),
        StoredTensor(("qzeros",), ((num_groups, projection.rows // 8),), ("I32",), "zero_point", awq_zero_points),
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
            f"checkpoint_format of quant method gptq must be {' or '.join(_VERSIONS)}, got {shown(version)}; "
            f"{OTHERWISE}"
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
        StoredTensor(("qweight",), ((projection.num_groups(8), rows),), ("I32",), "weight", gptq_codes),
        StoredTensor(("scales",), ((num_groups, rows),), FLOATS, "scale", transposed),
        StoredTensor(
            ("qzeros",), ((num_groups, -(-rows // 8)),), ("I32",), None if fmt.symmetric else "zero_point", zeros
        ),
        StoredTensor(("g_idx",), ((columns,),), ("I32", "I64"), None, order, required=is_ordered),
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
            f"columns that are ordered by activation (desc_act) are not read; {OTHERWISE}"
        )
    return stored


METHODS: Final[Mapping[str, Callable[[Config], FormatOf]]] = MappingProxyType(
    {
        "auto-round": _auto_round_formats,
        "awq": _awq_formats,
        "compressed-tensors": compressed_tensors_formats,
        "fp8": _fp8_formats,
        "gptq": _gptq_formats,
        "modelopt": _modelopt_formats,
        "mxfp4": _mxfp4_formats,
        "quark": _quark_formats,
    }
)
"""Readers by `quant_method`: each makes modules' formats from the config, or raises CheckpointError if unknown."""
