"""Groups of elements that share a scale, the last possibly partial, and how a group's scale is chosen."""

from __future__ import annotations

from typing import Final

import torch

from moereg.spec.quant_schemes import WHOLE

_E8M0_BIAS: Final = 127
_E8M0_NAN: Final = 255
_WIDE_RANGE: Final = 2.0**100


def group_extrema(x: torch.Tensor, group: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and maximum of 0 and each group of x [..., R, K].

    Both are [..., ceil(R/group rows), ceil(K/group columns)], and NaN if the group has a NaN.
    """
    rows, columns = x.shape[-2:]
    extent_rows, extent_columns = (
        max(size, 1) if extent == WHOLE else extent for size, extent in zip((rows, columns), group, strict=True)
    )
    num_rows, num_columns = (
        1 if extent == WHOLE else -(-size // extent) for size, extent in zip((rows, columns), group, strict=True)
    )
    missing = (num_columns * extent_columns - columns, num_rows * extent_rows - rows)
    if any(missing):
        # Padding zeros do not change the minimum and maximum, which are clamped to 0 below.
        x = torch.nn.functional.pad(x, (0, missing[0], 0, missing[1]))
    blocks = x.unflatten(-1, (num_columns, extent_columns)).unflatten(-3, (num_rows, extent_rows))
    low, high = blocks.amin((-3, -1)), blocks.amax((-3, -1))
    return low.clamp(max=0), high.clamp(min=0)


def expand_groups(values: torch.Tensor, group: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Repeats one value per group [..., ceil(R/group rows), ceil(K/group columns)] for each of its elements.

    Values may also be one per row. The result is broadcastable to [..., R, K].
    """
    for dim, size, extent in ((-2, rows, group[0]), (-1, columns, group[1])):
        if extent != WHOLE and values.shape[dim] not in (1, size):
            values = values.repeat_interleave(extent, dim).narrow(dim, 0, size)
    return values


def choose_scale(
    amax: torch.Tensor, max_value: float, dtype: torch.dtype, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """The scale that maps `amax` to `max_value`, on top of a global scale if there is one.

    - Floats of 16 or 32 bits: amax / max_value, at least the smallest normal fp32.
    - 8-bit floats (nvfp4's float8_e4m3fn): the same rounded to nearest, within the type's positive finite values.
    - float8_e8m0fnu: the smallest power of two that is at least amax / max_value, so that nothing saturates. The
      hardware's conversion (`cvt.rp.satfinite.ue8m0x2`), the MoE kernels of FlashInfer, DeepGEMM and Triton, and
      torchao's mode RCEIL do the same. OCP MX 1.0 takes the floor of amax's exponent instead, torchao's default, which
      saturates the top of every other binade. Checkpoints include scales, so reading one does not depend on this.

    A group of zeros has scale 1. A group with an infinity or NaN has scale NaN, so all of it reads as NaN.

    Args:
        amax: fp32, largest magnitude of each group; NaN if the group has a NaN.
        max_value: The element type's largest code.
        dtype: Dtype of the scale.
        scale_2: fp32, broadcastable to amax; divides the scale before it is rounded.

    Returns:
        Same shape, in `dtype`.
    """
    # Divide by a tensor, since on CUDA torch divides by a number as a product with its rounded reciprocal.
    scale = amax / amax.new_full((), max_value)
    if scale_2 is not None:
        scale = scale / scale_2
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(amax, scale)
    info = torch.finfo(dtype)
    if dtype.itemsize == 1:
        # Rounding may give 0, which would lose a nonzero group, so the smallest subnormal is the minimum.
        scale = scale.clamp(info.smallest_normal * info.eps, info.max)
    else:
        scale = scale.clamp(min=max(info.smallest_normal, torch.finfo(torch.float32).smallest_normal))
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan).to(dtype)


def _power_of_two(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    # frexp's mantissa is in [0.5, 1); 0.5 means that the number is already a power of two.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    code = exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    code = torch.where(scale == 0, torch.where(amax == 0, _E8M0_BIAS, 0), code)
    code = torch.where(amax.isfinite(), code, _E8M0_NAN)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def global_scale(amax: torch.Tensor, max_value: float, scale_dtype: torch.dtype) -> torch.Tensor:
    """The second scale, with which the group scales fill their type's range.

    It is amax / (max_value * largest group scale), 2688 for nvfp4, or amax / max_value if group scales have 8 exponent
    bits, whose range needs no filling; 1 if amax is 0, NaN if it is not finite.
    """
    limit = torch.finfo(scale_dtype).max
    return choose_scale(amax, max_value * (limit if limit < _WIDE_RANGE else 1.0), torch.float32)
