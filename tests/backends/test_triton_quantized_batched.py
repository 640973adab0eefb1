"""8-bit weights and activations in the batched format: interpreted on a CPU, compiled where there is a CUDA device.

The layer is compared with `moereg.numerics.reference`: a row of the batched format is a token with one choice.
"""

from __future__ import annotations

import math

import pytest
import torch

from moereg.kernels.quantized.operands import QuantizedRows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.rows.block_map import BlockMap
from moereg.quantize import quantize_activations
from moereg.spec.quant_schemes import QuantScheme, get_scheme
from tests.backends.test_triton_batched import make_plan
from tests.backends.test_triton_layers import rows_that_count
from tests.backends.test_triton_quantized import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    NAMED,
    OTHERS,
    assert_same,
    bits,
    interesting_rows,
    make_rows,
    quantizer,
    random,
    row_format,
    select,
)

each_scheme = pytest.mark.parametrize("scheme", [*map(get_scheme, NAMED), *OTHERS], ids=lambda scheme: scheme.name)


def quantize(
    x: torch.Tensor, scheme: QuantScheme, plan: BlockMap, static_scale: torch.Tensor | None = None
) -> QuantizedRows:
    """By the kernel, the rows of the plan."""
    fmt = row_format(scheme)
    out = make_rows(fmt, len(x), x.shape[1])
    quantize_batched_rows(out, x, quantizer(fmt, static_scale), plan)
    return out


# Rows of three experts with room for 20: more than a tile, none, and one. 12 of the rows that count are interesting.
COUNTS, MAX_TOKENS = [18, 0, 1], 20


@pytest.mark.few
@each_scheme
@pytest.mark.parametrize(("columns", "dtype"), [(384, BF16), (130, FP16), (1500, FP32)])
@pytest.mark.parametrize("other", [math.nan, pytest.param(1e4, marks=pytest.mark.slow)])  # NaN shows what 1e4 does.
def test_codes_and_scales_are_those_of_quantize(
    scheme: QuantScheme, columns: int, dtype: torch.dtype, other: float
) -> None:
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = torch.full((len(valid), columns), other, dtype=dtype, device=DEVICE)
    x[valid] = torch.cat([interesting_rows(columns, dtype), random(7, columns).to(dtype)])
    static = None
    if row_format(scheme).static:
        static = torch.tensor([0.03, 0.04, 0.05], device=DEVICE)
    found = quantize(x, scheme, make_plan(COUNTS, MAX_TOKENS, 16), static_scale=static)
    in_use = select(found, valid)
    if static is None:
        assert_same(in_use, quantize_activations(x[valid], scheme), columns)
    else:
        own = static.repeat_interleave(torch.tensor(COUNTS, device=DEVICE))
        expected = quantize_activations(x[valid], scheme, own.unsqueeze(1))
        assert torch.equal(bits(in_use.q[:, :columns]), bits(expected.q))
        assert torch.equal(in_use.scale[:, 0], own)
    assert (found.q[~valid].view(torch.uint8) == 77).all(), "rows that do not count were written to"
    assert (found.scale[~valid].float() == (77 if scheme.name == "mxfp8" else 0.5)).all()


def test_more_rows_than_programs_are_all_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.kernels.quantized.rows_batched._ROW_PROGRAMS", 3)
    valid = rows_that_count(COUNTS, MAX_TOKENS).flatten()
    x = random(len(valid), 130)
    x[~valid] = math.nan
    scheme = get_scheme("fp8_channel_token")
    found = quantize(x, scheme, make_plan(COUNTS, MAX_TOKENS, 16))
    in_use = select(found, valid)
    assert_same(in_use, quantize_activations(x[valid], scheme), 130)
    assert (found.q[~valid].view(torch.uint8) == 77).all()


def test_one_static_scale_is_for_the_rows_of_all_experts() -> None:
    scheme = get_scheme("fp8_tensor_static")
    x = random(3 * MAX_TOKENS, 130)
    static = torch.tensor([0.03], device=DEVICE)
    found = quantize(x, scheme, make_plan([MAX_TOKENS] * 3, MAX_TOKENS, 16), static_scale=static)
    assert_same(found, quantize_activations(x, scheme, static[0]), 130)
