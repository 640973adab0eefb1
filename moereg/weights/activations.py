"""Quantizes activations: with one static or dynamic scale, one per token, or one per group of a token."""

from __future__ import annotations

import torch

from moereg.errors import ArgumentError
from moereg.spec.quant_schemes import WHOLE, QuantFormat, QuantScheme, get_scheme
from moereg.weights.formats import Quantized, element_of, restore, total_scale
from moereg.weights.groups import choose_scale, global_scale, group_extrema


def activation_scale(amax: torch.Tensor, scheme: QuantScheme | str) -> torch.Tensor:
    """The scale of a whole tensor of activations, from its largest magnitude.

    For per-tensor schemes that is amax / largest code (448 for float8_e4m3fn); for schemes with a global scale above
    group scales it is amax / (largest code * largest group scale), 2688 for nvfp4. A calibration stores the results as
    `a13_scale` and `a2_scale`.

    Args:
        amax: Any shape; for a dynamic scale, over the rows that are routed to a local expert.
        scheme: A scheme with quantized activations.

    Returns:
        fp32, shape of `amax`.
    """
    fmt = _format(get_scheme(scheme))
    scale_dtype: torch.dtype = getattr(torch, fmt.scale_dtype)
    if fmt.global_scale:
        return global_scale(amax.float(), element_of(fmt).max_value, scale_dtype)
    return choose_scale(amax.float(), element_of(fmt).max_value, scale_dtype)


def quantize_activations(x: torch.Tensor, scheme: QuantScheme | str, scale: torch.Tensor | None = None) -> Quantized:
    """Rounds activations to a scheme's activation format. No host synchronization.

    Uses the scales of `choose_scale` (`moereg/weights/groups.py`), which map the largest magnitude to the largest
    code; int8 uses [-127, 127]. A token, or group, with an infinity or NaN gets scale NaN, so all of it reads as NaN.
    With a static scale infinities saturate and NaN stays NaN, or becomes 0 in integers, which have no code for it.

    Args:
        x: [..., T, K], any floating dtype.
        scheme: A scheme with quantized activations.
        scale: fp32 [], or [..., T, 1] if rows differ: the per-tensor scale, static or from `activation_scale`, or the
            global scale of a scheme with two levels. None computes it from x: one for all of x, or the global one per
            token.

    Returns:
        Codes and scales; `scale_2` is [] or [..., T, 1] if the format has one.

    Raises:
        ArgumentError: The scheme does not quantize activations, its activation format cannot be encoded, it needs a
            static scale, or it does not have the given scale.
    """
    scheme = get_scheme(scheme)
    fmt = _format(scheme)
    element = element_of(fmt)
    values = x.float()
    rows, columns = values.shape[-2:]
    scale_dtype: torch.dtype = getattr(torch, fmt.scale_dtype)
    scale_2 = None
    if fmt.static and scale is None:
        raise ArgumentError(f"scheme {scheme.name} has static activation scales; pass scale=...")
    if scale is not None and not fmt.global_scale and fmt.group != (WHOLE, WHOLE):
        raise ArgumentError(f"scheme {scheme.name} computes one activation scale a group; leave scale out")
    if fmt.global_scale:
        if scale is None:
            low, high = group_extrema(values, (1, WHOLE))
            scale = activation_scale(torch.maximum(-low, high), scheme)
        scale_2, scale = scale, None
    if scale is None:
        low, high = group_extrema(values, fmt.group)
        amax = torch.maximum(-low, high)
        if fmt.group == (WHOLE, WHOLE):
            amax = amax.amax()
        scale = choose_scale(amax, element.max_value, scale_dtype, scale_2)
    return Quantized(element.encode(values / total_scale(scale, scale_2, fmt, rows, columns)), scale, scale_2)


def dequantize_activations(
    quantized: Quantized, scheme: QuantScheme | str, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantizes activations.

    Args:
        quantized: The result of `quantize_activations`.
        scheme: The same scheme.
        columns: K.
        dtype: fp32 or fp64.

    Returns:
        [..., T, K] in `dtype`.
    """
    fmt = _format(get_scheme(scheme))
    return restore(quantized, fmt, quantized.q.shape[-2], columns, dtype)


def quantize_dequantize_activations(
    x: torch.Tensor,
    scheme: QuantScheme | str,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Rounds activations to a scheme's format and back; returns x itself if the scheme leaves them at 16 bits.

    Args:
        x, scheme, scale: As in `quantize_activations`, for any scheme.
        dtype: fp32 or fp64.

    Returns:
        [..., T, K] in `dtype`.
    """
    if get_scheme(scheme).activation is None:
        return x.to(dtype)
    return dequantize_activations(quantize_activations(x, scheme, scale), scheme, x.shape[-1], dtype)


def _format(scheme: QuantScheme) -> QuantFormat:
    fmt = scheme.activation
    if fmt is None:
        raise ArgumentError(f"scheme {scheme.name} leaves activations at 16 bits; there is nothing to quantize")
    spans_all = fmt.group == (WHOLE, WHOLE)
    if fmt.group[0] not in (1, WHOLE) or (fmt.group[0] == WHOLE and not spans_all) or not fmt.symmetric:
        raise ArgumentError(
            f"activations have symmetric groups within one token, or one for all, got groups of {fmt.group}"
            f"{'' if fmt.symmetric else ' with zero points'} in scheme {scheme.name}"
        )
    if fmt.static and not (spans_all and not fmt.global_scale):
        raise ArgumentError(
            f"a static activation scale is one for all tokens, got groups of {fmt.group} in {scheme.name}"
        )
    return fmt
