"""The tensors that compressed-tensors stores for a projection, by format and element type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from moereg.checkpoints._formats import FLOATS, Projection, StoredTensor, as_is, check_divides, one_number
from moereg.checkpoints._fp8 import block_tensors
from moereg.checkpoints._words import canonical_zero_points, word_bytes
from moereg.errors import CheckpointError
from moereg.quantize import pack_nibbles
from moereg.spec.quant_schemes import WHOLE, QuantScheme

__all__ = ["LAYOUTS"]

_NUMBER: Final = ((1,), ())


def _naive(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] e4m3 or int8 and `weight_scale`: [1], [N,1], or one for each block.

    A static scale of the activations is `input_scale`.
    Source: compressors/naive_quantized/base.py of compressed-tensors 0.20.0.
    """
    fmt = scheme.weight
    assert fmt is not None
    if WHOLE not in fmt.group:
        return block_tensors(projection, "weight_scale")
    dtype = "I8" if fmt.dtype == "int8" else "F8_E4M3"
    shapes, convert = (_NUMBER, one_number) if is_tensor else (((projection.rows, 1),), as_is)
    tensors = [
        StoredTensor(".weight", ((projection.rows, projection.columns),), (dtype,), "weight", as_is),
        StoredTensor(".weight_scale", shapes, FLOATS, "scale", convert),
    ]
    return [*tensors, *_input_scale(scheme)]


def _input_scale(scheme: QuantScheme) -> Sequence[StoredTensor]:
    """`input_scale` [1] where activations have a static scale."""
    if scheme.activation is None or not scheme.activation.static:
        return ()
    return (StoredTensor(".input_scale", _NUMBER, FLOATS, "activation_scale", one_number),)


def _packed_integers(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight_packed` [N, ceil(K/8)] int32 (8 bits: K/4), `weight_scale` [N,G], `weight_shape`, N and K; `input_scale`.

    Codes are signed integers plus 8 (128), packed along K from the lowest bits on; the unused bits of a row's last word
    are 0. `weight_zero_point` [ceil(N/8), G] int32 has the same offset and is packed along N.
    Source: compressors/pack_quantized of compressed-tensors 0.20.0.
    """
    fmt = scheme.weight
    assert fmt is not None
    size = projection.columns if fmt.group[1] == WHOLE else fmt.group[1]
    check_divides(projection, size)
    num_groups = projection.columns // size
    shape = (projection.rows, -(-projection.columns * fmt.bits // 32))
    codes = functools.partial(_int4_codes if fmt.bits == 4 else _int8_codes, columns=projection.columns)
    tensors = [
        StoredTensor(".weight_packed", (shape,), ("I32",), "weight", codes),
        StoredTensor(".weight_scale", ((projection.rows, num_groups),), FLOATS, "scale", as_is),
        StoredTensor(".weight_shape", ((2,),), ("I64", "I32"), None, functools.partial(_check_shape, projection)),
    ]
    if not fmt.symmetric:
        convert = functools.partial(_zero_points, rows=projection.rows)
        shape = (-(-projection.rows // 8), num_groups)
        tensors.append(StoredTensor(".weight_zero_point", (shape,), ("I32",), "zero_point", convert))
    return [*tensors, *_input_scale(scheme)]


def _unpacked_int4(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] int8 from -8 to 7, `weight_scale` and `weight_zero_point` [N,G], the latter alike; `input_scale`.

    compressed-tensors 0.20.0 stores integers with quantized activations like this, unless it is told another format.
    Source: compressors/format.py and compressors/naive_quantized/base.py of compressed-tensors 0.20.0.
    """
    fmt = scheme.weight
    assert fmt is not None
    size = projection.columns if fmt.group[1] == WHOLE else fmt.group[1]
    check_divides(projection, size)
    shape = (projection.rows, projection.columns)
    groups = ((projection.rows, projection.columns // size),)
    tensors = [
        StoredTensor(".weight", (shape,), ("I8",), "weight", _packed_codes),
        StoredTensor(".weight_scale", groups, FLOATS, "scale", as_is),
    ]
    if not fmt.symmetric:
        tensors.append(StoredTensor(".weight_zero_point", groups, ("I8",), "zero_point", _packed_codes))
    return [*tensors, *_input_scale(scheme)]


def _nvfp4(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight_packed` [N,K/2] uint8, low nibble the even column, `weight_scale` [N,K/16] e4m3 and two global scales.

    Quantizing multiplies by `weight_global_scale` and `input_global_scale` [1] fp32, so restoring divides by them.
    Source: compressors/nvfp4 and quantization/lifecycle/forward.py of compressed-tensors 0.20.0.
    """
    check_divides(projection, 16)
    tensors = [
        StoredTensor(".weight_packed", ((projection.rows, projection.columns // 2),), ("U8",), "weight", as_is),
        StoredTensor(".weight_scale", ((projection.rows, projection.columns // 16),), ("F8_E4M3",), "scale", as_is),
        StoredTensor(".weight_global_scale", _NUMBER, FLOATS, "scale_2", _inverse),
    ]
    if scheme.activation is not None:
        tensors.append(StoredTensor(".input_global_scale", _NUMBER, FLOATS, "activation_scale", _inverse))
    return tensors


def _float4(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """mxfp4: `weight_packed` [N,K/2] uint8, low nibble the even column, `weight_scale` [N,K/32] uint8, codes of e8m0.

    Source: compressors/mxfp4 and mx_utils.py of compressed-tensors 0.20.0.
    """
    packed = StoredTensor(".weight_packed", ((projection.rows, projection.columns // 2),), ("U8",), "weight", as_is)
    return packed, _exponents(projection)


def _mxfp8(scheme: QuantScheme, is_tensor: bool, projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] e4m3 and `weight_scale` [N,K/32] uint8, codes of e8m0.

    Source: compressors/mxfp8 and mx_utils.py of compressed-tensors 0.20.0.
    """
    weight = StoredTensor(".weight", ((projection.rows, projection.columns),), ("F8_E4M3",), "weight", as_is)
    return weight, _exponents(projection)


def _exponents(projection: Projection) -> StoredTensor:
    check_divides(projection, 32)
    shape = (projection.rows, projection.columns // 32)
    return StoredTensor(".weight_scale", (shape,), ("U8", "F8_E8M0"), "scale", _e8m0_scales)


def _e8m0_scales(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float8_e8m0fnu)


def _inverse(stored: torch.Tensor) -> torch.Tensor:
    number = one_number(stored).float()
    if not (number.isfinite() and number > 0):
        raise CheckpointError(
            f"global scales of compressed-tensors must be finite and positive, since they divide, got {float(number)}; "
            "calibrate again"
        )
    return 1 / number


def _int4_codes(stored: torch.Tensor, columns: int) -> torch.Tensor:
    return word_bytes(stored)[:, : -(-columns // 2)]


def _packed_codes(stored: torch.Tensor) -> torch.Tensor:
    low, high = (int(extreme) for extreme in stored.aminmax())
    if low < -8 or high > 7:
        raise CheckpointError(
            f"4-bit integers must be from -8 to 7, got {low} to {high}; take the file from the model's publisher"
        )
    return pack_nibbles((stored + 8).view(torch.uint8))


def _int8_codes(stored: torch.Tensor, columns: int) -> torch.Tensor:
    return (word_bytes(stored)[:, :columns] ^ 128).view(torch.int8)


def _zero_points(stored: torch.Tensor, rows: int) -> torch.Tensor:
    return canonical_zero_points(stored.mT, rows)


def _check_shape(projection: Projection, stored: torch.Tensor) -> torch.Tensor:
    if stored.tolist() != [projection.rows, projection.columns]:
        raise CheckpointError(
            f"it must be {[projection.rows, projection.columns]} where config.json has these sizes, got "
            f"{stored.tolist()}; use the config.json that belongs to these tensors"
        )
    return stored


_Layout = Callable[[QuantScheme, bool, Projection], Sequence[StoredTensor]]

LAYOUTS: Final[Mapping[tuple[str, str, str], _Layout]] = MappingProxyType(
    {
        ("float-quantized", "float8_e4m3fn", "float32"): _naive,
        ("naive-quantized", "float8_e4m3fn", "float32"): _naive,
        ("int-quantized", "int8", "float32"): _naive,
        ("naive-quantized", "int8", "float32"): _naive,
        ("pack-quantized", "int8", "float32"): _packed_integers,
        ("pack-quantized", "uint4", "float32"): _packed_integers,
        ("int-quantized", "uint4", "float32"): _unpacked_int4,
        ("nvfp4-pack-quantized", "float4_e2m1fn", "float8_e4m3fn"): _nvfp4,
        ("mxfp4-pack-quantized", "float4_e2m1fn", "float8_e8m0fnu"): _float4,
        ("mxfp8-quantized", "float8_e4m3fn", "float8_e8m0fnu"): _mxfp8,
    }
)
"""By the config's `format`, the element type and the type of the group scales.

Arguments: the scheme, whether one scale is for the whole projection, and the projection.
"""
