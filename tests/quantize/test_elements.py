"""Element types, packed codes, groups and their scales."""

from __future__ import annotations

import hashlib
import math
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.quantize import pack_nibbles, unpack_nibbles
from moereg.spec.quant_schemes import WHOLE, QuantFormat
from moereg.weights.elements import code_values
from moereg.weights.formats import element_of
from moereg.weights.groups import choose_scale, expand_groups, global_scale, group_extrema
from tests.quantize.quantized_values import INF, NAN, bits

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 2.0**-126
few = settings(max_examples=40, deadline=None)


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
    text = (
        "no element type 'float8_e8m0fnu' to quantize to or from (known: float4_e2m1fn, nf4, int8, uint8, uint4, the "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        element_of(QuantFormat("float8_e8m0fnu", (1, 32)))
    with pytest.raises(ValueError, match=r"^zero points need an unsigned element type such as uint4, got int8$"):
        element_of(QuantFormat("int8", (1, 32), symmetric=False))


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


def test_values_of_codes_are_those_of_bitsandbytes() -> None:
    """The digest of its tables for nf4 and for the scales' codes, of 0.50.2."""
    values = code_values(torch.device("cpu"))
    assert values.dtype == torch.float32
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "811b8d517ef9a1e4"
