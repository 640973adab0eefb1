"""Shared by several tests of quantizing: bits to compare, and slow loops over groups."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import torch

from moereg.spec.quant_schemes import WHOLE, QuantFormat
from moereg.weights.elements import code_values

INF, NAN = math.inf, math.nan


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as integers, since torch compares no 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


NUMPY_TYPES = {"float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0), "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, 6.0)}


# fmt: off
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])
# fmt: on


def slow_nested(scales: np.ndarray) -> np.ndarray:
    """Scales of a matrix, each rounded to the nearest of 256 values, one block of 256 after the other, in fp32."""
    values = code_values(torch.device("cpu"))[16:].numpy()
    flat = scales.astype(np.float32).ravel()
    mean = torch.from_numpy(flat).mean().numpy()  # numpy adds in another order.
    found = np.empty_like(flat)
    for first in range(0, flat.size, 256):
        distances = flat[first : first + 256] - mean
        largest = max(abs(distances).max(), np.float32(1e-38))
        nearest = abs((distances / largest)[:, None] - values).argmin(1)
        found[first : first + 256] = values[nearest] * largest + mean
    return found.astype(np.float64).reshape(scales.shape)


def slow_dequantized(matrix: np.ndarray, fmt: QuantFormat) -> np.ndarray:
    """The result of quantizing and restoring, one group after the other, with numpy and ml_dtypes."""
    found = np.zeros_like(matrix, dtype=np.float64)
    f32 = np.float32
    rows = matrix.shape[0] if fmt.group[0] == WHOLE else fmt.group[0]
    columns = matrix.shape[1] if fmt.group[1] == WHOLE else fmt.group[1]
    is_float = fmt.dtype in NUMPY_TYPES
    steps = {"int8": 255, "uint4": 15}.get(fmt.dtype, 0)
    limit = NUMPY_TYPES[fmt.dtype][1] if is_float else 1 if fmt.dtype == "nf4" else steps / 2
    scales = np.zeros((-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)))
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
            if fmt.dtype == "nf4":
                codes = NF4[abs(scaled[..., None] - NF4).argmin(-1)]
            elif is_float:
                codes = scaled.clip(-limit, limit).astype(NUMPY_TYPES[fmt.dtype][0]).astype(np.float64)
            else:
                codes = np.rint(scaled.clip(-(steps + 1) // 2, steps // 2)).astype(np.float64)
            scales[top // rows, left // columns] = scale
            restored = (codes - float(zero)) * (1 if fmt.nested else float(scale) * float(scale_2))
            found[top : top + rows, left : left + columns] = restored
    return found * slow_nested(scales).repeat(columns, 1)[:, : matrix.shape[1]] if fmt.nested else found
