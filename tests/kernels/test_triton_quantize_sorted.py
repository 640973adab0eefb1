"""Codes of sorted rows, made or copied, equal those of `moereg.quantize` bit for bit; interpreted without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._triton.quantized import row_format
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.rows import RouteIds, find_amax, quantize_rows
from moereg.kernels.quantized.rows_sorted import copy_coded_rows, quantize_to_sorted_rows
from moereg.kernels.sizes import AMAX_PROGRAMS
from moereg.quantize import quantize_activations
from moereg.spec.quant_schemes import QUANT_SCHEMES

STATIC = QUANT_SCHEMES["fp8_tensor_static"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Quotients that no device minds.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

FORMATS = {
    "fp8_block128": RowFormat(torch.float8_e4m3fn, -448.0, 448.0, group=128),
    "fp8_channel_token": RowFormat(torch.float8_e4m3fn, -448.0, 448.0),
    "int8_w8a8": RowFormat(torch.int8, -128.0, 127.0),
}


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
    shape = fmt.num_groups(padded), rows
    scale = torch.full(shape if by_group else shape[::-1], 0.5, device=DEVICE).to(fmt.scale_dtype)
    return QuantizedRows(q, scale.T if by_group else scale, fmt.group)


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize(("columns", "dtype"), [(384, torch.bfloat16), (1288, torch.float16), (64, torch.bfloat16)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_tokens_go_to_the_rows_of_their_routes(
    scheme: str, columns: int, dtype: torch.dtype, is_weighted: bool
) -> None:
    """After they were multiplied by routing weights, if there are any, and rounded."""
    fmt, top_k, num_tokens = FORMATS[scheme], 3, 7
    x = tokens(num_tokens, columns, dtype)
    weights = torch.linspace(0.3, 1.7, num_tokens, device=DEVICE)
    weighted = (x.float() * weights.unsqueeze(1)).to(dtype) if is_weighted else x
    expected = quantize_activations(weighted, QUANT_SCHEMES[scheme], None)
    routes = num_tokens * top_k
    route_row = torch.randperm(routes, generator=torch.Generator().manual_seed(0)).int()
    # Three of these rows belong to no local expert, so the last three rows stay untouched.
    route_row[route_row >= routes - 3] = -1
    out = untouched(fmt, routes, columns, by_group=fmt.group > 0)
    topk_weights = weights if is_weighted else None
    quantize_to_sorted_rows(out, x, Quantizer(fmt), route_row.to(DEVICE), topk_weights=topk_weights)
    for route, row in enumerate(route_row.tolist()):
        if row >= 0:
            token = route // top_k
            assert torch.equal(raw(out.q[row, :columns]), raw(expected.q[token]))
            groups = expected.scale.shape[1]
            assert torch.equal(out.scale[row, :groups], expected.scale[token].float())
            assert not raw(out.q[row, columns:]).any()
    assert (raw(out.q[-3:]) == 77).all()
    assert (out.scale[-3:] == 0.5).all()


GIVEN = RowFormat(torch.float8_e4m3fn, -448.0, 448.0, static=True)


@pytest.mark.parametrize(
    "scales", [[0.03], [1e-3, 0.03, 2.0, 40.0], [1e-40, 1e20, 1e-38, 1e38]], ids=["one", "by expert", "extreme"]
)
def test_given_scales_are_of_all_experts_or_of_the_one_that_a_route_goes_to(scales: list[float]) -> None:
    top_k, num_tokens, columns = 3, 7, 200
    x = tokens(num_tokens, columns, torch.bfloat16)
    x[1, :4] = torch.tensor([3e38, -3e38, math.inf, math.nan])  # Quotients that overflow are as large as codes can be.
    x[:, 4:6] = torch.tensor([2e-38, -1e-38])  # The smallest scale's reciprocal is infinite, these quotients are not.
    generator = torch.Generator().manual_seed(1)
    experts = torch.randint(-1, 4, (num_tokens * top_k,), generator=generator)
    order = torch.randperm(num_tokens * top_k, generator=generator).int()
    route_row = torch.where(experts >= 0, order, -1)
    static = torch.tensor(scales, device=DEVICE)
    out = untouched(GIVEN, num_tokens * top_k, columns, by_group=False)
    quantize_to_sorted_rows(
        out, x, Quantizer(GIVEN, static), route_row.to(DEVICE), route_expert=experts.int().to(DEVICE)
    )
    for route, (row, expert) in enumerate(zip(route_row.tolist(), experts.tolist(), strict=True)):
        if row >= 0:
            scale = static[expert if len(scales) > 1 else 0]
            expected = quantize_activations(x[route // top_k : route // top_k + 1], STATIC, scale)
            assert torch.equal(raw(out.q[row, :columns]), raw(expected.q[0]))
            assert not raw(out.q[row, columns:]).any()
            assert out.scale[row, 0] == scale
    unused = sorted(set(range(num_tokens * top_k)) - set(route_row.tolist()))
    assert (raw(out.q[unused]) == 77).all()
    assert (out.scale[unused] == 0.5).all()


@pytest.mark.parametrize("fmt", [GIVEN, RowFormat(torch.int8, -128.0, 127.0, static=True)], ids=["fp8", "int8"])
@pytest.mark.parametrize("scale", [1 / 3, 7.0, 1e-25, 3e-17, 1e17, 3e18, 1e36, -0.03, 0.0, math.inf, math.nan])
def test_codes_by_given_scales_are_those_of_a_division(fmt: RowFormat, scale: float) -> None:
    # Every code, what lies halfway between two, what is next to that, and what is beyond all.
    halves = torch.arange(-2000, 2001) / 4
    x = (halves * scale).to(torch.bfloat16)
    near = [torch.nextafter(x, torch.tensor(end, dtype=torch.bfloat16)) for end in (-math.inf, math.inf)]
    rows = torch.stack((x, *near)).nan_to_num(0.0, math.inf, -math.inf).to(DEVICE)
    static = torch.tensor([scale], device=DEVICE)
    found, expected = (untouched(fmt, 3, rows.shape[1], by_group=False) for _ in range(2))
    order = torch.arange(3, dtype=torch.int32, device=DEVICE)
    quantize_to_sorted_rows(found, rows, Quantizer(fmt, static), order)
    quantize_rows(expected, rows, Quantizer(fmt, static), RouteIds(order[:, None], None, 3, 3))
    same = raw(found.q) == raw(expected.q)
    if fmt.dtype != torch.int8:
        numbers = [one.q.float() for one in (found, expected)]
        # One NaN for all, and one zero.
        same |= (numbers[0] == 0) & (numbers[1] == 0) | numbers[0].isnan() & numbers[1].isnan()
    assert same.all()


def test_one_dynamic_scale_is_that_of_the_tokens_that_have_a_local_expert() -> None:
    scheme = QUANT_SCHEMES["fp8_tensor_dynamic"]
    fmt = RowFormat(torch.float8_e4m3fn, -448.0, 448.0, spans_rows=True)
    x = tokens(6, 384, torch.bfloat16)
    x[5] = math.inf  # Goes to no local expert.
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 1], [0, 3], [3, 3]], dtype=torch.int32, device=DEVICE)
    route_row = torch.tensor([0, 3, 4, 6, 7, 1, -1, 5, 2, -1, -1, -1], dtype=torch.int32, device=DEVICE)
    amax = torch.full((AMAX_PROGRAMS,), 77, dtype=torch.int32, device=DEVICE)
    find_amax(amax, x, RouteIds(ids, None, 4, 3), 6)
    out = untouched(fmt, 12, 384, by_group=False)
    quantize_to_sorted_rows(out, x, Quantizer(fmt, amax=amax), route_row)
    expected = quantize_activations(x[:5], scheme, None)
    for route, row in enumerate(route_row.tolist()):
        if row >= 0:
            assert torch.equal(raw(out.q[row]), raw(expected.q[route // 2]))
            assert out.scale[row, 0] == expected.scale.flatten()[0]
    assert (raw(out.q[8:]) == 77).all()


def test_a_token_without_a_local_expert_is_not_told_by_the_next_ones_choices() -> None:
    x = tokens(2, 384, torch.bfloat16)
    x[0] = math.inf
    # Of three choices, which are read four at a time.
    ids = torch.tensor([[3, 3, 3], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    amax = torch.full((AMAX_PROGRAMS,), 77, dtype=torch.int32, device=DEVICE)
    find_amax(amax, x, RouteIds(ids, None, 4, 3), 2)
    assert amax.view(torch.float32).max() == x[1].abs().max()


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel_token", "mxfp8", "int8_w8a8"])
@pytest.mark.parametrize("columns", [384, 1288, 64])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_codes_and_scales_arrive_as_they_are(name: str, columns: int, is_sorted: bool) -> None:
    scheme, num_tokens, top_k = QUANT_SCHEMES[name], 7, 3 if is_sorted else 1
    assert scheme.activation is not None
    fmt = row_format(scheme.activation)
    made = quantize_activations(tokens(num_tokens, columns, torch.bfloat16), scheme, None)
    groups = made.scale.reshape(num_tokens, -1).view(fmt.scale_dtype)
    rows = QuantizedRows(made.q, groups, fmt.group)
    num_rows = num_tokens * top_k
    out = untouched(fmt, num_rows, columns, by_group=is_sorted)
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
        assert (out.scale[-3:] == untouched(fmt, 1, columns, True).scale).all()
