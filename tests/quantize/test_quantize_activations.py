"""Quantized activations, against slow loops."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moereg.numerics.reference import relative_error
from moereg.quantize import (
    activation_scale,
    dequantize_activations,
    quantize_activations,
    quantize_dequantize_activations,
    spans_tokens,
)
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.weights.formats import element_of
from tests.quantize.quantized_values import INF, NAN, same, slow_dequantized

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = [name for name, scheme in QUANT_SCHEMES.items() if scheme.activation is not None]


def make_tokens(num_tokens: int = 5, hidden_size: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, hidden_size, generator=generator)
    return (x * torch.exp(torch.randn(num_tokens, 1, generator=generator))).bfloat16()


STATIC = torch.tensor(0.02)


def static_scale(name: str) -> torch.Tensor | None:
    fmt = QUANT_SCHEMES[name].activation
    return STATIC if fmt is not None and fmt.static else None


SHAPES = {
    "fp8_tensor_static": ((5, 200), (), None),
    "fp8_tensor_dynamic": ((5, 200), (), None),
    "fp8_channel_token": ((5, 200), (5, 1), None),
    "fp8_block128": ((5, 200), (5, 2), None),
    "mxfp8": ((5, 200), (5, 7), None),
    "nvfp4": ((5, 100), (5, 13), (5, 1)),
    "mxfp4_mxfp8": ((5, 200), (5, 7), None),
    "int8_w8a8": ((5, 200), (5, 1), None),
    "int4_w4a8_g128": ((5, 200), (), None),
    "int4_w4a8_g128_token": ((5, 200), (5, 1), None),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_activation_shapes_and_dtypes(name: str) -> None:
    found = quantize_activations(make_tokens(), name, static_scale(name))
    fmt = QUANT_SCHEMES[name].activation
    assert fmt is not None
    scale_2 = None if found.scale_2 is None else tuple(found.scale_2.shape)
    assert (tuple(found.q.shape), tuple(found.scale.shape), scale_2) == SHAPES[name]
    assert found.q.dtype == fmt.storage_dtype
    assert found.scale.dtype == getattr(torch, fmt.scale_dtype)
    batched = quantize_activations(make_tokens().expand(3, 5, 200), name, static_scale(name))
    assert same(batched.q[2], found.q)


@pytest.mark.parametrize("name", ROUNDING)
def test_activations_are_what_slow_loops_give(name: str) -> None:
    x = make_tokens()
    found = quantize_dequantize_activations(x, name, static_scale(name), torch.float64)
    fmt = QUANT_SCHEMES[name].activation
    assert fmt is not None
    matrix = x.float().numpy()
    if fmt.static:
        codes = (matrix / np.float32(STATIC)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        expected = codes.astype(np.float64) * float(STATIC)
    elif fmt.dtype == "int8":
        # Activations use [-127, 127], so that the largest is a whole number of steps.
        scale = abs(matrix).max(1, keepdims=True) / np.float32(127)
        expected = np.rint(matrix / scale).astype(np.float64) * scale
    elif fmt.global_scale:
        expected = np.concatenate([slow_dequantized(row[None], fmt) for row in matrix])
    else:
        expected = slow_dequantized(matrix, fmt)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("name", ROUNDING)
def test_tokens_are_rounded_alone(name: str) -> None:
    """But where one dynamic scale spans them, which `spans_tokens` says."""
    x = make_tokens()
    together = quantize_dequantize_activations(x, name, static_scale(name))
    alone = torch.cat([quantize_dequantize_activations(row[None], name, static_scale(name)) for row in x])
    assert torch.equal(together, alone) != spans_tokens(name)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_tokens_that_are_not_finite(name: str, bad: float) -> None:
    x = make_tokens()
    x[2, 40] = bad
    fmt = QUANT_SCHEMES[name].activation
    assert fmt is not None
    found = quantize_dequantize_activations(x, name, static_scale(name))
    if fmt.static:
        expected = bad if math.isnan(bad) else math.copysign(448 * STATIC.item(), bad)
        assert found[2, 40].item() == pytest.approx(expected, nan_ok=True)
        assert found.isnan().sum() == math.isnan(bad)
        return
    columns = 200 if fmt.group[1] == WHOLE or fmt.global_scale else fmt.group[1]
    left = 40 // columns * columns
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[2, left : left + columns] = True
    if spans_tokens(name):
        hit[:] = True
    assert torch.equal(found.isnan(), hit)
    codes = quantize_activations(x, name)
    assert element_of(fmt).decode(codes.q, 200)[~hit].isfinite().all()


@pytest.mark.parametrize("name", ROUNDING)
def test_zero_tokens(name: str) -> None:
    x = make_tokens()
    x[1] = 0
    found = quantize_dequantize_activations(x, name, static_scale(name))
    assert not found[1].any()
    assert quantize_dequantize_activations(x[:0], name, static_scale(name)).shape == (0, 200)


@pytest.mark.parametrize("name", ROUNDING)
def test_smallest_tokens(name: str) -> None:
    x = make_tokens() * 1e-40
    assert x.any()
    found = quantize_dequantize_activations(x, name, static_scale(name), torch.float64)
    assert found.isfinite().all()
    assert found.abs().max() <= 2 * x.abs().max()


def test_given_scales_are_used() -> None:
    x = make_tokens()
    amax = x.float().abs().amax()
    given_scale = activation_scale(amax, "fp8_tensor_dynamic")
    assert given_scale == amax / 448
    one = quantize_activations(x, "fp8_tensor_dynamic", given_scale)
    assert same(one.q, quantize_activations(x, "fp8_tensor_dynamic").q)
    scale_2 = activation_scale(amax, "nvfp4")
    assert scale_2 == amax / 2688
    found = quantize_activations(x, "nvfp4", scale_2)
    assert found.scale_2 is scale_2
    rows = torch.full((5, 1), scale_2.item())
    assert same(quantize_activations(x, "nvfp4", rows).q, found.q)
    assert relative_error(dequantize_activations(found, "nvfp4", 200), x) < 0.12


def test_a_global_scale_below_the_data_saturates() -> None:
    found = quantize_dequantize_activations(torch.full((1, 16), 100.0), "nvfp4", torch.tensor(1 / 2688))
    assert found.amax() == pytest.approx(1.0)


def test_schemes_that_leave_activations_alone() -> None:
    x = make_tokens()
    assert torch.equal(quantize_dequantize_activations(x, "nvfp4_w4a16"), x.float())
    text = r"^scheme nvfp4_w4a16 leaves activations at 16 bits; there is nothing to quantize$"
    with pytest.raises(ValueError, match=text):
        quantize_activations(x, "nvfp4_w4a16")
    with pytest.raises(ValueError, match=r"^scheme fp8_tensor_static has static activation scales; pass scale=\.\.\.$"):
        quantize_activations(x, "fp8_tensor_static")
    with pytest.raises(ValueError, match=r"^scheme mxfp8 computes one activation scale a group; leave scale out$"):
        quantize_activations(x, "mxfp8", torch.tensor(1.0))


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (QuantFormat("float8_e4m3fn", (2, 32)), "activations have symmetric groups within one token, or one for all"),
        (QuantFormat("float8_e4m3fn", (WHOLE, 32)), "activations have symmetric groups within one token"),
        (QuantFormat("uint4", (1, 32), symmetric=False), "activations have symmetric groups within one token"),
        (QuantFormat("int8", (1, WHOLE), static=True), "a static activation scale is one for all tokens"),
    ],
)
def test_activation_formats_that_make_no_sense(fmt: QuantFormat, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        quantize_activations(make_tokens(), QuantScheme("odd", None, fmt), torch.tensor(1.0))
