"""How the scale of a group follows from its largest magnitude."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["choose_scale", "global_scale"]

_E8M0_BIAS: Final = 127
_E8M0_NAN: Final = 255
_WIDE_RANGE: Final = 2.0**100


def choose_scale(
    amax: torch.Tensor, max_value: float, dtype: torch.dtype, scale_2: torch.Tensor | None = None
) -> torch.Tensor:
    """The scale that maps `amax` to `max_value`, on top of a global scale where there is one.

    - Floats of 16 or 32 bits: amax / max_value, at least the smallest normal fp32.
    - 8-bit floats (nvfp4's float8_e4m3fn): the same rounded to nearest, within the type's positive finite values.
    - float8_e8m0fnu: the smallest power of two that is at least amax / max_value, so that nothing saturates. The
      hardware's conversion (`cvt.rp.satfinite.ue8m0x2`), the MoE kernels of FlashInfer, DeepGEMM and Triton, and
      torchao's mode RCEIL do the same. OCP MX 1.0 takes the floor of amax's exponent instead, torchao's default, which
      saturates the top of every other binade. A checkpoint brings its scales, so reading one does not depend on this.

    A group of zeros has scale 1. A group that holds an infinity or NaN has scale NaN, so all of it reads as NaN.

    Args:
        amax: fp32, largest magnitude of each group; NaN where the group holds one.
        max_value: The element type's.
        dtype: Of the scale.
        scale_2: fp32, broadcastable to amax; divides the scale before it is rounded.

    Returns:
        Same shape, in `dtype`.
    """
    # Divide by a tensor on amax's device: to divide by a number on CUDA, torch multiplies by its rounded reciprocal.
    scale = amax / amax.new_full((), max_value)
    if scale_2 is not None:
        scale = scale / scale_2
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(amax, scale)
    info = torch.finfo(dtype)
    if dtype.itemsize == 1:
        # Rounding may give 0, which would lose a group that is not zero, so the smallest subnormal is the floor.
        scale = scale.clamp(info.smallest_normal * info.eps, info.max)
    else:
        scale = scale.clamp(min=max(info.smallest_normal, torch.finfo(torch.float32).smallest_normal))
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan).to(dtype)


def _power_of_two(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    # frexp's mantissa is in [0.5, 1); a mantissa of 0.5 means that the number is a power of two already.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    code = exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    code = torch.where(scale == 0, torch.where(amax == 0, _E8M0_BIAS, 0), code)
    code = torch.where(amax.isfinite(), code, _E8M0_NAN)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def global_scale(amax: torch.Tensor, max_value: float, scale_dtype: torch.dtype) -> torch.Tensor:
    """The second scale: with it the group scales fill the range of their own type.

    Args:
        amax: fp32, largest magnitude of all that shares it.
        max_value: The element type's.
        scale_dtype: Of the group scales.

    Returns:
        fp32, amax / (max_value * largest group scale), 2688 for nvfp4, or amax / max_value where group scales have a
        range of 8 bits of exponent, which needs no filling; 1 where amax is 0, NaN where it is not finite.
    """
    limit = torch.finfo(scale_dtype).max
    return choose_scale(amax, max_value * (limit if limit < _WIDE_RANGE else 1.0), torch.float32)
