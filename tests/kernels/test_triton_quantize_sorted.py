"""Codes of sorted rows equal those of `moereg.quantize` bit for bit; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moereg.kernels.quantized.operands import QuantizedRows, RowFormat
from moereg.kernels.quantized.rows_sorted import quantize_to_sorted_rows
from moereg.quant import QUANT_SCHEMES
from moereg.quantize import quantize_activations
from moereg.testing.interpreter import patch_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = {
    "fp8_block128": RowFormat(torch.float8_e4m3fn, -448.0, 448.0, group=128),
    "fp8_channel_token": RowFormat(torch.float8_e4m3fn, -448.0, 448.0),
    "int8_w8a8": RowFormat(torch.int8, -128.0, 127.0),
}


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


def tokens(num_tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every magnitude, zeros among them."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(num_tokens, columns, generator=generator) * torch.logspace(-6, 3, num_tokens, base=4).unsqueeze(1)
    x[num_tokens // 2] = 0
    return x.to(DEVICE, dtype)


def untouched(fmt: RowFormat, rows: int, columns: int, by_group: bool) -> QuantizedRows:
    """Codes of 77 and scales of 0.5."""
    padded = -(-columns // 128) * 128
    q = torch.full((rows, padded), 77, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)
    groups = fmt.num_groups(padded)
    scale = (
        torch.full((groups, rows), 0.5, device=DEVICE).T if by_group else torch.full((rows, groups), 0.5, device=DEVICE)
    )
    return QuantizedRows(q, scale, fmt.group)


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize(("columns", "dtype"), [(384, torch.bfloat16), (1288, torch.float16), (64, torch.bfloat16)])
def test_tokens_go_to_the_rows_of_their_routes(scheme: str, columns: int, dtype: torch.dtype) -> None:
    fmt, top_k, num_tokens = FORMATS[scheme], 3, 7
    x = tokens(num_tokens, columns, dtype)
    expected = quantize_activations(x, QUANT_SCHEMES[scheme], None)
    routes = num_tokens * top_k
    route_row = torch.randperm(routes, generator=torch.Generator().manual_seed(0)).int()
    # Three of these rows belong to no local expert, so the last three rows stay untouched.
    route_row[route_row >= routes - 3] = -1
    out = untouched(fmt, routes, columns, by_group=fmt.group > 0)
    quantize_to_sorted_rows(out, x, fmt, route_row.to(DEVICE))
    for route, row in enumerate(route_row.tolist()):
        if row >= 0:
            token = route // top_k
            assert torch.equal(raw(out.q[row, :columns]), raw(expected.q[token]))
            groups = expected.scale.shape[1]
            assert torch.equal(out.scale[row, :groups], expected.scale[token].float())
            assert not raw(out.q[row, columns:]).any()
    assert (raw(out.q[-3:]) == 77).all()
    assert (out.scale[-3:] == 0.5).all()


def test_weights_of_routes_multiply_tokens_first() -> None:
    x = tokens(5, 256, torch.bfloat16)
    weights = torch.linspace(0.3, 1.7, 5, device=DEVICE)
    weighted = (x.float() * weights.unsqueeze(1)).bfloat16()
    expected = quantize_activations(weighted, QUANT_SCHEMES["fp8_block128"], None)
    out = untouched(FORMATS["fp8_block128"], 5, 256, by_group=True)
    order = torch.arange(5, dtype=torch.int32, device=DEVICE)
    quantize_to_sorted_rows(
        out, x, FORMATS["fp8_block128"], order, topk_weights=weights, apply_router_weight_on_input=True
    )
    assert torch.equal(raw(out.q), raw(expected.q))
    assert torch.equal(out.scale, expected.scale)
