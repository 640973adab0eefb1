"""Packing, scales and rounding of every scheme against slow loops over single groups, and what odd numbers become."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.quant import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.quantize import (
    activation_scale,
    dequantize_activations,
    dequantize_rows,
    dequantize_weights,
    expert_matrix,
    pack_nibbles,
    quantize_activations,
    quantize_dequantize_activations,
    quantize_weights,
    row_blocks,
    spans_tokens,
    unpack_nibbles,
)
from moereg.quantize import weights as quantize_module
from moereg.quantize.formats import element_of
from moereg.quantize.groups import expand_groups, group_extrema
from moereg.quantize.scales import choose_scale, global_scale
from moereg.reference import relative_error
from moereg.weights import ExpertWeights

QUANTIZED = [name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None]
ROUNDING = [name for name, scheme in QUANT_SCHEMES.items() if scheme.activation is not None]
INF, NAN = math.inf, math.nan
TINY = 2.0**-126
few = settings(max_examples=40, deadline=None)


pytestmark = pytest.mark.usefixtures("one_thread")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as integers, since torch compares no 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def make_weights(
    num_experts: int = 2, hidden_size: int = 200, intermediate_size: int = 72, halves: int = 2, seed: int = 0
) -> ExpertWeights:
    """Random weights whose magnitude differs from row to row and along a row, so that scales differ too."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        x = torch.randn(num_experts, rows, columns, generator=generator)
        x *= torch.exp(torch.randn(num_experts, rows, 1, generator=generator))
        return (x * torch.exp(torch.randn(num_experts, 1, columns, generator=generator))).bfloat16()

    return ExpertWeights(w13=random(halves * intermediate_size, hidden_size), w2=random(hidden_size, intermediate_size))


def quantized(weights: ExpertWeights, name: str, **options: bool) -> ExpertWeights:
    fmt = QUANT_SCHEMES[name].activation
    is_static = fmt is not None and fmt.static
    scales = {"a13_scale": torch.tensor(0.01), "a2_scale": torch.ones(weights.num_experts)} if is_static else {}
    return quantize_weights(weights, name, **scales, **options)  # type: ignore[arg-type]


# --- nibbles ---


@given(st.lists(st.integers(0, 15), min_size=1, max_size=40), st.integers(1, 3))
@few
def test_nibbles_come_back(codes: list[int], rows: int) -> None:
    given_codes = torch.tensor([codes] * rows, dtype=torch.uint8)
    packed = pack_nibbles(given_codes)
    assert packed.shape == (rows, -(-len(codes) // 2))
    assert torch.equal(unpack_nibbles(packed, len(codes)), given_codes)
    # Low nibble first; the nibble after an odd last code is 0.
    expected = [low | high << 4 for low, high in zip(codes[::2], [*codes[1::2], 0], strict=False)]
    assert packed[0].tolist() == expected


# --- element types ---


GRID = torch.cat((torch.arange(-1200, 1201) / 2.0, torch.arange(-512, 513) / 64.0, torch.arange(-64, 65) * 2.0**-11))


@pytest.mark.parametrize(
    ("name", "numpy_dtype", "limit"),
    [
        ("float4_e2m1fn", ml_dtypes.float4_e2m1fn, 6),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, 448),
        ("float8_e5m2", ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_floats_round_to_nearest_even_and_saturate(name: str, numpy_dtype: type, limit: int) -> None:
    element = element_of(QuantFormat(name, (1, WHOLE)))
    expected = GRID.numpy().clip(-limit, limit).astype(numpy_dtype).astype(np.float32)
    found = element.decode(element.encode(GRID), len(GRID))
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(np.signbit(found.numpy()), np.signbit(expected))
    assert element.decode(element.encode(torch.tensor([INF, -INF])), 2).tolist() == [limit, -limit]


def test_every_code_is_read_as_ml_dtypes_reads_it() -> None:
    for name, numpy_dtype, count in (
        ("float4_e2m1fn", ml_dtypes.float4_e2m1fn, 16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, 256),
    ):
        fmt = QuantFormat(name, (1, WHOLE))
        element = element_of(fmt)
        codes = torch.arange(count, dtype=torch.uint8)
        expected = codes.numpy().view(numpy_dtype).astype(np.float32)
        stored = pack_nibbles(codes) if fmt.bits == 4 else codes.view(fmt.storage_dtype)
        found = element.decode(stored, count)
        np.testing.assert_array_equal(found.numpy(), expected)
        finite = found.isfinite()
        assert torch.equal(bits(element.encode(found[finite])), bits(stored)[finite if fmt.bits == 8 else ...])


@pytest.mark.parametrize(("name", "bits_", "shift"), [("int8", 8, 0), ("uint8", 8, 128), ("uint4", 4, 8)])
def test_integers_round_half_to_even_and_saturate(name: str, bits_: int, shift: int) -> None:
    element = element_of(QuantFormat(name, (1, WHOLE)))
    limit = 2 ** (bits_ - 1)
    expected = np.clip(np.rint(GRID.numpy()), -limit, limit - 1)
    codes = element.encode(GRID)
    np.testing.assert_array_equal(element.decode(codes, len(GRID)).numpy(), expected)
    stored = unpack_nibbles(codes, len(GRID)) if name == "uint4" else codes
    np.testing.assert_array_equal(stored.numpy().astype(np.int64) - shift, expected)


def test_nan_has_a_code_or_becomes_zero() -> None:
    values = torch.tensor([NAN, 1.0])
    for name, expected in (("float8_e4m3fn", NAN), ("float4_e2m1fn", 0.0), ("int8", 0.0), ("uint4", 0.0)):
        element = element_of(QuantFormat(name, (1, WHOLE)))
        found = element.decode(element.encode(values), 2).tolist()
        assert found == pytest.approx([expected, 1.0], nan_ok=True), name


def test_unknown_elements() -> None:
    text = "no element type 'float8_e8m0fnu' to quantize to or from (known: float4_e2m1fn, int8, uint8, uint4, the "
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        element_of(QuantFormat("float8_e8m0fnu", (1, 32)))
    with pytest.raises(ValueError, match=r"^zero points need an unsigned element type such as uint4, got int8$"):
        element_of(QuantFormat("int8", (1, 32), symmetric=False))


# --- scales ---


@given(st.floats(2.0**-149, 2.0**127, width=32))
@settings(max_examples=300, deadline=None)
def test_e8m0_scale_is_the_smallest_that_saturates_nothing(amax: float) -> None:
    for limit in (6.0, 448.0):
        scale = choose_scale(torch.tensor([amax]), limit, torch.float8_e8m0fnu).double().item()
        quotient = float(np.float32(amax) / np.float32(limit))
        assert scale >= quotient
        assert scale == 2.0**-127 or scale / 2 < quotient
        assert scale == 2.0 ** round(math.log2(scale))


@pytest.mark.parametrize("mantissa", [1.0, 1.0 + 2**-23, 1.5, 2.0 - 2**-23])
def test_e8m0_scale_at_powers_of_two(mantissa: float) -> None:
    amax = torch.tensor([6.0 * mantissa * 2.0**k for k in range(-100, 100, 7)], dtype=torch.float64)
    codes = choose_scale(amax.float(), 6.0, torch.float8_e8m0fnu).view(torch.uint8).tolist()
    # 6 times a mantissa is rounded to fp32, and the last one to twice the next power of two or just below.
    assert codes == [127 + k + (mantissa != 1.0) for k in range(-100, 100, 7)]


SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
def test_special_groups(dtype: torch.dtype) -> None:
    scale = choose_scale(torch.tensor([0.0, INF, NAN]), 6.0, dtype).float().tolist()
    assert scale == pytest.approx([1.0, NAN, NAN], nan_ok=True)


def test_smallest_scales() -> None:
    amax = torch.tensor([1e-45, 1e-40, TINY])
    assert choose_scale(amax, 448.0, torch.float32).tolist() == [TINY] * 3
    assert choose_scale(amax, 448.0, torch.float8_e8m0fnu).view(torch.uint8).tolist() == [0] * 3
    # 2^-9 is e4m3's smallest subnormal; 448 its largest.
    assert choose_scale(torch.tensor([1e-9, 6e6]), 6.0, torch.float8_e4m3fn).float().tolist() == [2.0**-9, 448.0]


def test_global_scale() -> None:
    found = global_scale(torch.tensor([2688.0, 1.0, 0.0, 1e-40, NAN]), 6.0, torch.float8_e4m3fn)
    assert found.tolist() == pytest.approx([1.0, 1 / 2688, 1.0, TINY, NAN], nan_ok=True)


# --- groups ---


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 3, WHOLE]), st.sampled_from([1, 2, 4, WHOLE]))
@few
def test_groups(rows: int, columns: int, extent_rows: int, extent_columns: int) -> None:
    group = (extent_rows, extent_columns)
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(rows * 10 + columns))
    low, high = group_extrema(x, group)
    size_rows = rows if extent_rows == WHOLE else extent_rows
    size_columns = columns if extent_columns == WHOLE else extent_columns
    spread = expand_groups(high, group, rows, columns).expand(2, rows, columns)
    assert high.shape == (2, -(-rows // size_rows), -(-columns // size_columns))
    for row in range(rows):
        for column in range(columns):
            top, left = row // size_rows * size_rows, column // size_columns * size_columns
            block = x[1, top : top + size_rows, left : left + size_columns]
            assert spread[1, row, column] == block.max().clamp(min=0)
            assert low[1, row // size_rows, column // size_columns] == block.min().clamp(max=0)


# --- weights ---


NUMPY_TYPES = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, 6.0),
}


def slow_dequantized(matrix: np.ndarray, fmt: QuantFormat) -> np.ndarray:
    """What quantizing and restoring gives, one group after the other, with numpy and ml_dtypes."""
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


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sizes", [(200, 72), (33, 7), (128, 64)], ids=str)
def test_weights_are_what_slow_loops_give(name: str, sizes: tuple[int, int]) -> None:
    weights = make_weights(hidden_size=sizes[0], intermediate_size=sizes[1])
    found = dequantize_weights(quantized(weights, name), torch.float64)
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    for matrices, restored in zip((weights.w13, weights.w2), found, strict=True):
        for expert in range(weights.num_experts):
            expected = slow_dequantized(matrices[expert].float().numpy(), fmt)
            np.testing.assert_allclose(restored[expert].numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_restored_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    weights = quantized(make_weights(hidden_size=33, intermediate_size=7), name)
    exact, rounded = dequantize_weights(weights, torch.float64), dequantize_weights(weights, dtype)
    for truth, found in zip(exact, rounded, strict=True):
        assert found.dtype == dtype
        assert found.shape == truth.shape
        assert relative_error(found, truth) < torch.finfo(dtype).eps


def test_unquantized_weights_restore_to_themselves() -> None:
    weights = make_weights()
    w13, w2 = dequantize_weights(weights)
    assert torch.equal(w13, weights.w13)
    assert torch.equal(w2, weights.w2)
    assert w13.data_ptr() != weights.w13.data_ptr()


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(hidden_size=300, intermediate_size=136)
    whole = quantized(weights, name)
    restored = dequantize_weights(whole, torch.float32)
    monkeypatch.setattr(quantize_module, "BLOCK_BYTES", 4 * 136 * 70)
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    assert len(list(row_blocks(300, 136, fmt))) == (3 if fmt.group[0] == 128 else 5)
    blocks = quantized(weights, name)
    for field, tensor in whole.tensors().items():
        assert same(blocks.tensors()[field], tensor), field
    for one, other in zip(dequantize_weights(blocks, torch.float32), restored, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_of_one_expert(name: str) -> None:
    weights = quantized(make_weights(hidden_size=130, intermediate_size=150), name)
    fmt = weights.scheme.weight
    assert fmt is not None
    w13, _ = dequantize_weights(weights, torch.float32)
    matrix = expert_matrix(weights.tensors(), "w13", 1)
    for rows in (slice(0, 300), slice(128, 256), slice(256, None), slice(128, 129)):
        assert torch.equal(dequantize_rows(matrix, fmt, 130, rows, torch.float32), w13[1, rows])


@pytest.mark.parametrize("name", QUANTIZED)
def test_halves_may_have_scales_of_their_own(name: str) -> None:
    """As if gate and up were two layers; where no scale spans all rows nothing changes."""
    weights = make_weights()
    separate = quantized(weights, name, separate_halves=True)
    fmt = separate.scheme.weight
    assert fmt is not None
    spans_all = fmt.group == (WHOLE, WHOLE) or fmt.global_scale
    field = "w13_scale_2" if fmt.global_scale else "w13_scale"
    assert (separate.tensors()[field].shape == (2, 2)) == spans_all
    w13, w2 = dequantize_weights(separate, torch.float32)
    together = dequantize_weights(quantized(weights, name), torch.float32)
    assert torch.equal(w2, together[1])
    if not spans_all:
        assert torch.equal(w13, together[0])
        return
    for half, rows in enumerate((slice(0, 72), slice(72, 144))):
        alone = ExpertWeights(w13=weights.w13[:, rows], w2=weights.w2)
        assert torch.equal(dequantize_weights(quantized(alone, name), torch.float32)[0], w13[:, rows]), half


@pytest.mark.parametrize("name", QUANTIZED)
def test_not_gated_and_biases(name: str) -> None:
    weights = make_weights(halves=1)
    biases = {"w13_bias": torch.randn(2, 72), "w2_bias": torch.randn(2, 200)}
    with_bias = quantized(dataclasses.replace(weights, **biases), name)
    assert with_bias.num_halves == 1
    assert with_bias.w13_bias is biases["w13_bias"]
    assert with_bias.w2_bias is biases["w2_bias"]
    assert relative_error(dequantize_weights(with_bias)[0], weights.w13) < 0.3


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str) -> None:
    """A whole expert, whole rows and single groups of zeros."""
    weights = make_weights(hidden_size=256, intermediate_size=64)
    weights.w13[0] = 0
    weights.w13[1, 5] = 0
    weights.w13[1, :, 32:64] = 0
    stored = quantized(weights, name)
    scale = stored.w13_scale
    assert scale is not None
    w13, _ = dequantize_weights(stored, torch.float32)
    assert not w13[0].any()
    assert not w13[1, 5].any()
    assert not w13[1, :, 32:64].any()
    assert (scale[0].float() == 1).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_smallest_numbers_round_towards_zero_and_never_to_nan(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tiny = torch.randn(1, 64, 64, generator=generator) * 1e-39
    stored = quantized(ExpertWeights(w13=torch.cat((tiny, tiny), dim=1), w2=tiny), name)
    w13, _ = dequantize_weights(stored, torch.float64)
    assert w13.isfinite().all()
    assert w13.abs().max() <= 2 * tiny.abs().max()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weights = make_weights()
    weights.w2[1, 7, 3] = bad
    text = "weights must be finite to be quantized, got infinity or NaN in w2 of expert 1; look at the checkpoint"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        quantized(weights, name)


def test_wrong_schemes_are_refused() -> None:
    weights = make_weights()
    with pytest.raises(ValueError, match=r"^quantize_weights needs a scheme with quantized weights, got unquantized$"):
        quantize_weights(weights, "unquantized")
    text = r"^quantize_weights needs unquantized weights, got mxfp8; dequantize them first$"
    with pytest.raises(ValueError, match=text):
        quantize_weights(quantized(weights, "mxfp8"), "nvfp4")
    with pytest.raises(ValueError, match=r"^scheme fp8_tensor_static has static activation scales; pass a13_scale="):
        quantize_weights(weights, "fp8_tensor_static")
    with pytest.raises(ValueError, match=r"^scheme int8_w8a16 has no tensor 'a2_scale'"):
        quantize_weights(weights, "int8_w8a16", a2_scale=torch.tensor(1.0))


def test_schemes_that_a_plugin_makes_up() -> None:
    """Every field is read, none of it through a name."""
    weights = make_weights(hidden_size=256, intermediate_size=64)
    formats = {
        "coarse blocks": QuantFormat("float8_e5m2", (32, 64), scale_dtype="bfloat16"),
        "whole columns": QuantFormat("uint4", (WHOLE, 64)),
        "mxint4": QuantFormat("uint4", (1, 32), scale_dtype="float8_e8m0fnu"),
        "bytes with zero points": QuantFormat("uint8", (1, 128), symmetric=False),
        "zero points of columns": QuantFormat("uint4", (WHOLE, 1), symmetric=False),
        "zero points below a global scale": QuantFormat(
            "uint8", (1, 128), scale_dtype="float8_e4m3fn", global_scale=True, symmetric=False
        ),
        "a global scale above fp32 ones": QuantFormat("uint4", (1, 64), global_scale=True),
    }
    for name, fmt in formats.items():
        scheme = QuantScheme(name, fmt)
        restored, _ = dequantize_weights(quantize_weights(weights, scheme), torch.float32)
        step = {"float8_e5m2": 0.06, "uint4": 0.5, "uint8": 0.03}[fmt.dtype]
        assert relative_error(restored, weights.w13) < step, name


# --- activations ---


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
}


def test_every_activation_format_is_in_the_table() -> None:
    assert set(SHAPES) == set(ROUNDING)


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


# --- memory ---


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_little_more_than_input_and_output() -> None:
    """Measured by the kernel in a process of its own: 100 MB of bf16, to nvfp4 and back."""
    script = """
        import torch
        from pathlib import Path
        from moereg.quantize import dequantize_weights, quantize_weights
        from moereg.weights import ExpertWeights

        def status(name):
            text = Path("/proc/self/status").read_text()
            return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) * 1024

        def layer(experts, size):
            w13, w2 = torch.ones(experts, 2 * size, size), torch.ones(experts, size, size)
            return ExpertWeights(w13=w13.bfloat16(), w2=w2.bfloat16())

        torch.set_num_threads(1)
        dequantize_weights(quantize_weights(layer(1, 512), "nvfp4"))
        weights = layer(4, 2048)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        stored = quantize_weights(weights, "nvfp4")
        codes = sum(tensor.nbytes for tensor in stored.tensors().values())
        print((status("VmHWM") - before - codes) >> 20)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        w13, w2 = dequantize_weights(stored)
        print((status("VmHWM") - before - w13.nbytes - w2.nbytes) >> 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    extra_mib = [int(line) for line in done.stdout.split()]
    # The fp32 of all weights is 192 MiB here, and of one expert's 48 MiB.
    assert max(extra_mib) < 100, extra_mib
