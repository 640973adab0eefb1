"""Rows that are codes already are copied to where products read them, bit for bit; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._triton.quantized import row_format
from moereg.kernels.quantized.operands import QuantizedRows
from moereg.kernels.quantized.rows_sorted import copy_coded_rows
from moereg.quantize import quantize_activations
from moereg.spec.quant_schemes import get_scheme
from tests.kernels.test_triton_quantize_sorted import DEVICE, raw, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel_token", "mxfp8", "int8_w8a8"])
@pytest.mark.parametrize("columns", [384, 1288, 64])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_codes_and_scales_arrive_as_they_are(name: str, columns: int, is_sorted: bool) -> None:
    scheme, num_tokens, top_k = get_scheme(name), 7, 3 if is_sorted else 1
    assert scheme.activation is not None
    fmt = row_format(scheme.activation)
    made = quantize_activations(tokens(num_tokens, columns, torch.bfloat16), scheme, None)
    groups = made.scale.reshape(num_tokens, -1).view(fmt.scale_dtype)
    rows = QuantizedRows(made.q, groups, fmt.group)
    num_rows, depth = num_tokens * top_k, -(-columns // 128) * 128
    q = torch.full((num_rows, depth), 77, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)
    shape = (fmt.num_groups(depth), num_rows)
    scale = torch.full(shape, 77.0, device=DEVICE).to(fmt.scale_dtype).T
    out = QuantizedRows(q, scale if is_sorted else scale.contiguous(), fmt.group)
    route_row = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).int()
    if is_sorted:
        # Rows of no local expert stay untouched.
        route_row[route_row >= num_rows - 3] = -1
        copy_coded_rows(out, rows, route_row.to(DEVICE))
    else:
        route_row = torch.arange(num_rows)
        copy_coded_rows(out, rows)
    for route, row in enumerate(route_row.tolist()):
        if row >= 0:
            token = route // top_k
            assert torch.equal(raw(out.q[row, :columns]), raw(rows.q[token]))
            assert not raw(out.q[row, columns:]).any()
            assert torch.equal(out.scale[row, : groups.shape[1]], groups[token])
            # One: what fills the row up stays zero, and no NaN.
            assert (out.scale[row, groups.shape[1] :] == (127 if fmt.e8m0 else 1)).all()
    if is_sorted:
        assert (raw(out.q[-3:]) == 77).all()
        assert (out.scale[-3:] == 77).all()
