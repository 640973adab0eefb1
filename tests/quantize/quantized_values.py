"""Shared by several tests of quantizing: bits to compare, and slow loops over groups."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import torch

from moereg.spec.quant_schemes import WHOLE, QuantFormat

INF, NAN = math.inf, math.nan


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as integers, since torch compares no 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


NUMPY_TYPES = {"float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0), "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, 6.0)}


def slow_dequantized(matrix: np.ndarray, fmt: QuantFormat) -> np.ndarray:
    """The result of quantizing and restoring, one group after the other, with numpy and ml_dtypes."""
    found = np.zeros_like(matrix, dtype=np.float64)
    f32 = np.float32
    rows = matrix.shape[0] if fmt.group[0] == WHOLE else fmt.group[0]
    columns = matrix.shape[1] if fmt.group[1] == WHOLE else fmt.group[1]
    is_float = fmt.dtype in NUMPY_TYPES
    steps = {"int8": 255, "uint4": 15}.get(fmt.dtype, 0)
    limit = NUMPY_TYPES[fmt.dtype][1] if is_float else steps / 2
    scale_2 = f32(f32(abs(matrix).max()) / f32(limit * 448)) if fmt.global_scale else f32(1)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            group = matrix[top : top + rows, left : left + columns]
            zero = f32(0)
            if fmt.symmetric:
                scale = f32(f32(abs(group).max()) / f32(limit))
            else:
                low, high = min(group.min(), f32(0)), max(group.max(), f32(0))
                scale = f32((high - low) / f32(steps))
                zero = f32(np.rint(np.clip(-(steps + 1) // 2 - low / scale, -(steps + 1) // 2, steps // 2)))
            if fmt.scale_dtype == "float8_e8m0fnu":
                scale = f32(2.0 ** math.ceil(math.log2(scale)))
            elif fmt.scale_dtype == "float8_e4m3fn":
                scale = f32(f32(scale / scale_2).astype(ml_dtypes.float8_e4m3fn))
            scaled = group / (scale * scale_2) + zero
            if is_float:
                codes = scaled.clip(-limit, limit).astype(NUMPY_TYPES[fmt.dtype][0]).astype(np.float64)
            else:
                codes = np.rint(scaled.clip(-(steps + 1) // 2, steps // 2)).astype(np.float64)
            restored = (codes - float(zero)) * float(scale) * float(scale_2)
            found[top : top + rows, left : left + columns] = restored
    return found
