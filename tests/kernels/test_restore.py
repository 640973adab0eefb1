"""The kernel that restores quantized matrices to 16 bits, against torch's code: the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.quantize import Quantized, dequantize_matrices, dequantize_rows, quantize_weights
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.weights.permuted import ExpertWeights
from moereg.weights.quantize_weights import _stored_matrix, plain_scales, restore_in_triton
from tests.kernels.triton_cases import BF16, DEVICE, FP16, FP32, Guarded, on_gpu

FORMATS = {scheme.weight: name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None}


def stored(fmt: QuantFormat, num_experts: int, rows: int, columns: int, halves: int, seed: int = 0) -> Quantized:
    """Random weights in a format, whose scales differ, with scales of their own for both halves where it can."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(num_experts, rows, columns, generator=generator, device=DEVICE)
    x *= torch.exp(torch.randn(num_experts, rows, 1, generator=generator, device=DEVICE))
    x *= torch.exp(torch.randn(num_experts, 1, columns, generator=generator, device=DEVICE))
    w2 = torch.randn(num_experts, columns, rows // halves, device=DEVICE)
    scheme = QuantScheme("tested", fmt)
    weights = quantize_weights(ExpertWeights(w13=x, w2=w2), scheme, separate_halves=True)
    return _stored_matrix(weights.tensors(), "w13", slice(None), halves)


def check(matrices: Quantized, fmt: QuantFormat, rows: int, columns: int, dtype: torch.dtype) -> None:
    found = Guarded(len(matrices.q), rows, columns, dtype=dtype)
    assert restore_in_triton(matrices, fmt, found.tensor)
    found.check()
    parts = (matrices.q, matrices.scale, matrices.scale_2, matrices.zero_point)
    for expert, one in enumerate(found.tensor):
        of_expert = [None if part is None else part[expert] for part in parts]
        matrix = plain_scales(Quantized(*of_expert, matrices.halves))  # type: ignore[arg-type]
        expected = dequantize_rows(matrix, fmt, columns, slice(None), dtype)
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
        number = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        is_nan = expected.isnan()
        assert torch.equal(one.view(number)[~is_nan], expected.view(number)[~is_nan])  # Zeros have their sign.


@pytest.mark.parametrize("fmt", FORMATS, ids=FORMATS.values())
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 150), st.booleans(), st.sampled_from([BF16, FP16, FP32]))
@settings(max_examples=6, deadline=None)
def test_bits_are_those_of_torch(
    fmt: QuantFormat, num_experts: int, rows: int, columns: int, gated: bool, dtype: torch.dtype
) -> None:
    halves = 2 if gated else 1
    check(stored(fmt, num_experts, halves * rows, columns, halves, rows), fmt, halves * rows, columns, dtype)
