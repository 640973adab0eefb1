"""Checks of canonical tensors: shapes and dtypes against the scheme's rows, and values where that is cheap.

Each raises a ValueError that names the tensor, the rule and the cure.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from moereg.errors import ArgumentError
from moereg.spec.quant_schemes import TENSOR_ROLES, WHOLE, QuantFormat, QuantScheme, TensorRow

DEBUG_VARIABLE: Final = "MOEREG_DEBUG"


def checks_values(device: torch.device) -> bool:
    """Whether values of tensors on a device are checked: on a GPU that waits, so there only with MOEREG_DEBUG=1."""
    return device.type == "cpu" or (device.type != "meta" and os.environ.get(DEBUG_VARIABLE) == "1")


def check_row(row: TensorRow, tensor: torch.Tensor | None, scheme: QuantScheme) -> None:
    """Checks a tensor against its row."""
    if tensor is None:
        if row.required:
            raise ArgumentError(f"scheme {scheme.name} needs {row.name} of shape {_shapes(row)}, got none")
        return
    if tuple(tensor.shape) not in row.shapes:
        raise ArgumentError(
            f"{row.name} must have shape {_shapes(row)} in scheme {scheme.name}, got {list(tensor.shape)}"
            f"{_shape_cure(row, scheme.weight)}"
        )
    if row.dtype is not None and tensor.dtype != row.dtype:
        raise ArgumentError(
            f"{row.name} must be {row.dtype} in scheme {scheme.name}, got {tensor.dtype}; {_dtype_cure(row, tensor)}"
        )
    if row.dtype is None and tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"{row.name} must be bfloat16, float16 or float32 in scheme {scheme.name}, got {tensor.dtype}; "
            "pass quant=... if the weights are quantized"
        )


def _shape_cure(row: TensorRow, fmt: QuantFormat | None) -> str:
    """Describes what a tensor of a quantized scheme must hold, as the end of an error."""
    if fmt is None:
        return ""
    if row.role == "zero_point":
        return "; pass one for each group, two 4-bit ones to a byte along a row's groups"
    if row.role != "scale":
        return ""
    if fmt.group == (WHOLE, WHOLE):
        return "; pass one for each expert, or of w13 one for gate and one for up"
    rows, columns = ("all" if extent == WHOLE else str(extent) for extent in fmt.group)
    return f"; pass one for each group of {rows} rows x {columns} columns, in order, not swizzled and not padded"


def _dtype_cure(row: TensorRow, tensor: torch.Tensor) -> str:
    assert row.dtype is not None
    if row.role == "weight" and tensor.dtype.itemsize > 1:
        return "quantize with moereg.quantize.quantize_weights, or leave quant out"
    if tensor.dtype in (torch.uint8, torch.int8) and row.dtype.itemsize == 1:
        return f"view its bytes as {row.dtype} if they are that"
    return "convert it"


_LARGEST_FINITE_CODE: Final = {"torch.float8_e4m3fn": 0x7E, "torch.float8_e8m0fnu": 0xFE}
"""Largest code of 8-bit floats by dtype; all codes up to it are finite and not negative."""


def check_scale(name: str, scale: torch.Tensor, cure: str | None = None) -> None:
    """Checks that scales, or a part of them, are finite and not negative; activation scales must be positive."""
    # One max over the codes clears them all without an fp32 copy.
    largest = _LARGEST_FINITE_CODE.get(str(scale.dtype))
    if largest is not None and int(scale.view(torch.uint8).max()) <= largest:
        return
    values = scale.detach().float()
    is_activation = TENSOR_ROLES[name] == "activation_scale"
    bad = ~(values.isfinite() & (values > 0 if is_activation else values >= 0))
    if not bad.any():
        return
    place = torch.nonzero(bad)[0].tolist()
    rule, usual_cure = "finite and not negative", "look at the checkpoint and at how its bytes were read"
    if is_activation:
        rule, usual_cure = "finite and positive", "calibrate again, or leave it out where the scheme can do without"
    found = f"{float(values[tuple(place)])}{f' at {place}' if place else ''}"
    raise ArgumentError(f"{name} must be {rule}, got {found}; {cure or usual_cure}")


def check_zero_points(name: str, packed: torch.Tensor, num_groups: int) -> None:
    """Checks 4-bit zero points: all nibbles are in range, so only a spare one that is not 0 can be detected."""
    if num_groups % 2 == 0:
        return
    spare = packed[..., -1] >> 4
    if spare.any():
        place = torch.nonzero(spare)[0].tolist()
        raise ArgumentError(
            f"{name} must have 0 in the last nibble of a row of {num_groups} groups, got {int(spare[tuple(place)])} "
            f"at {place}; pack them along the groups with moereg.quantize.pack_nibbles"
        )


def _shapes(row: TensorRow) -> str:
    return " or ".join(str(list(shape)) for shape in row.shapes)
