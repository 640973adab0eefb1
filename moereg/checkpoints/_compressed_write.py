"""Writes what `_compressed_tensors` reads: the config, and a projection's tensors from canonical weights.

The reader's list of stored tensors says what to write, and its conversion checks each written tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from moereg.checkpoints._compressed_tensors import compressed_tensors_formats
from moereg.checkpoints._formats import Projection, StorageFormat, StoredTensor
from moereg.errors import CheckpointError
from moereg.quantize import pack_nibbles, quantize_weights, unpack_nibbles
from moereg.spec.quant_schemes import TENSOR_ROLES, WHOLE, QuantFormat, QuantScheme, TensorRole, tensor_name
from moereg.weights.permuted import ExpertWeights


def quantization_config(scheme: QuantScheme, targets: Sequence[str]) -> dict[str, Any]:
    """Makes `quantization_config` for a checkpoint in which only the experts are quantized, with that scheme.

    Source: QuantizationConfig.to_dict of compressed-tensors 0.20.0.

    Args:
        scheme: A scheme with quantized weights.
        targets: Names of the modules, or `re:` and an expression for them.

    Raises:
        CheckpointError: compressed-tensors has no such weights and activations.
    """
    assert scheme.weight is not None
    layout = _layout(scheme)
    group = {
        "targets": list(targets),
        "weights": _arguments(scheme.weight, is_activation=False),
        "input_activations": None if scheme.activation is None else _arguments(scheme.activation, is_activation=True),
        "output_activations": None,
        "format": layout,
    }
    config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": [],
    }
    storage_of(config, scheme)
    return config


def storage_of(config: Mapping[str, Any], scheme: QuantScheme) -> StorageFormat:
    """The format in which the reader understands a config of `quantization_config`; the writer follows it.

    Raises:
        CheckpointError: The reader finds another scheme in it, or none.
    """
    group = next(iter(config["config_groups"].values()))
    try:
        # Replaces the targets by a fixed name, since their expressions may not match it.
        found = compressed_tensors_formats({**config, "config_groups": {"0": {**group, "targets": ["any"]}}})("any")
        if found is None or found.scheme != scheme:
            raise CheckpointError("read as another scheme")
    except CheckpointError as error:
        raise CheckpointError(
            f"a checkpoint is written in compressed-tensors' layout, which has none for {scheme.description}; write a "
            "scheme with the same weights and 16-bit activations, or another one"
        ) from error
    return found


def _layout(scheme: QuantScheme) -> str:
    fmt = scheme.weight
    assert fmt is not None
    if fmt.dtype == "float4_e2m1fn":
        return "nvfp4-pack-quantized" if fmt.global_scale else "mxfp4-pack-quantized"
    if fmt.dtype.startswith("float8"):
        return "mxfp8-quantized" if fmt.scale_dtype == "float8_e8m0fnu" else "float-quantized"
    # vLLM reads 4-bit integers packed, even with quantized activations.
    return "pack-quantized" if scheme.activation is None or fmt.bits == 4 else "int-quantized"


def _arguments(fmt: QuantFormat, is_activation: bool) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs of a format."""
    rows, columns = fmt.group
    values: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "float" if fmt.dtype.startswith("float") else "int",
        "symmetric": fmt.symmetric,
        "group_size": None,
        "dynamic": is_activation and not fmt.static,
    }
    if fmt.group == (WHOLE, WHOLE):
        values["strategy"] = "tensor"
    elif columns == WHOLE:
        values["strategy"] = "token" if is_activation else "channel"
    elif rows != 1:
        values |= {"strategy": "block", "block_structure": [rows, columns]}
    else:
        values |= {"strategy": "tensor_group" if fmt.global_scale else "group", "group_size": columns}
    if is_activation and fmt.global_scale:
        values["dynamic"] = "local"
    if fmt.scale_dtype != "float32":
        values["scale_dtype"] = "torch.uint8" if fmt.scale_dtype == "float8_e8m0fnu" else f"torch.{fmt.scale_dtype}"
    return values


def quantize_as_stored(
    weights: ExpertWeights,
    scheme: QuantScheme,
    dtype: torch.dtype,
    a13_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
) -> ExpertWeights:
    """Like `quantize_weights`, with scales that survive storing, so that measurements hold for the written checkpoint.

    The dtype is the checkpoint's; other arguments and errors are those of `quantize_weights`.
    """
    assert scheme.weight is not None
    stored = dataclasses.replace(scheme, weight=_with_stored_scales(scheme, dtype))
    tensors = quantize_weights(weights, stored, a13_scale=a13_scale, a2_scale=a2_scale).tensors()
    for name, tensor in tensors.items():
        role = TENSOR_ROLES[name]
        if role == "scale" and scheme.weight.scale_dtype == "float32":
            tensors[name] = tensor.float()
        # The stored inverse is rounded. Inverting twice reaches a number that survives further round trips.
        if scheme.weight.global_scale and role in ("scale_2", "activation_scale"):
            tensors[name] = 1 / (1 / tensor)
    return ExpertWeights(**tensors, quant=scheme)


def _with_stored_scales(scheme: QuantScheme, dtype: torch.dtype) -> QuantFormat:
    """The weights' format with the scales that a checkpoint of that dtype stores.

    Packed integers' scales have the model's dtype, since readers multiply in it or round to it. 8-bit weights' scales
    stay fp32, since readers keep them so.
    """
    fmt = scheme.weight
    assert fmt is not None
    if _layout(scheme) == "pack-quantized" and dtype.itemsize == 2:
        return dataclasses.replace(fmt, scale_dtype=str(dtype).removeprefix("torch."))
    return fmt


def projection_rows(
    weights: ExpertWeights, expert: int, matrix: str, half: int | None
) -> dict[TensorRole, torch.Tensor]:
    """Views of one projection's canonical tensors, by role; half 0 is gate, 1 up, None the whole matrix."""
    found: dict[TensorRole, torch.Tensor] = {}
    for role in get_args(TensorRole):
        tensor = weights.tensors().get(tensor_name(matrix, role))
        if tensor is None or role == "bias":
            continue
        one = tensor[expert] if tensor.dim() else tensor
        # A per-tensor scale is that of both halves; gate and up have the same input and input scale.
        if half is not None and one.dim():
            one = one.chunk(2)[half]
        found[role] = one.reshape(()) if one.numel() == 1 and role in ("scale_2", "activation_scale") else one
    return found


def stored_tensors(
    storage: StorageFormat, projection: Projection, canonical: Mapping[TensorRole, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors to store for a projection, by their names in the checkpoint.

    Args:
        storage: The result of `storage_of`.
        projection: Its name and sizes.
        canonical: The result of `projection_rows` for weights from `quantize_as_stored`, calibrated if activations
            have scales.
        dtype: The checkpoint's dtype.

    Returns:
        Contiguous tensors on the CPU, no two of which share memory.
    """
    fmt = storage.scheme.weight
    assert fmt is not None
    found = {}
    for tensor in storage.tensors(projection):
        if tensor.role is None:
            stored = torch.tensor(projection.shape)
        else:
            value = canonical[tensor.role].cpu()
            stored = _stored(tensor, value, fmt, projection).contiguous()
            if tensor.role == "scale" and stored.is_floating_point() and stored.dtype.itemsize > 1:
                stored = stored.to(getattr(torch, _with_stored_scales(storage.scheme, dtype).scale_dtype))
            restored = tensor.convert(stored).to(value.dtype)
            assert _same_bits(restored, value), f"{projection.module}{tensor.suffix} is read differently"
        assert tuple(stored.shape) in tensor.shapes, f"{projection.module}{tensor.suffix} has shape {stored.shape}"
        found[f"{projection.module}{tensor.suffix}"] = stored
    return found


def _stored(tensor: StoredTensor, value: torch.Tensor, fmt: QuantFormat, projection: Projection) -> torch.Tensor:
    if tensor.role == "weight" and "I32" in tensor.dtypes:
        return _words(value if fmt.bits == 4 else value.contiguous().view(torch.uint8) ^ 128)
    if tensor.role == "zero_point":
        codes = unpack_nibbles(value, projection.num_groups(fmt.group[1]))
        return _words(pack_nibbles(codes.mT.contiguous())).mT
    if tensor.role == "scale_2" or tensor.suffix == ".input_global_scale":
        return (1 / value).reshape(1)
    if value.dtype == torch.float8_e8m0fnu:
        return value.contiguous().view(torch.uint8)
    stored = value.reshape(tensor.shapes[0])
    # Cloned: gate and up may share a number, but a file's tensors must not share memory.
    return stored.clone() if stored.numel() == 1 else stored


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Packs bytes [R,B] uint8 into words [R,ceil(B/4)] int32, lowest first; unused bytes are 0."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.numel() != expected.numel() or found.dtype != expected.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, expected)))
