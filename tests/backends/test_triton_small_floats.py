"""Rows rounded to small floats with scales of groups, as codes of nvfp4 and as the 16-bit numbers of two schemes.

Interpreted, or on a CUDA device. No device with instructions for such codes has run these yet; Triton's interpreter
restores both sides. `test_triton_quantized` has what all formats of activations share.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moereg.backends._triton import emulated
from moereg.backends.triton_moe import TritonEmulatedExperts, TritonQuantizedExperts
from moereg.kernels.quantized.emulate import requantize_rows
from moereg.kernels.quantized.operands import Quantizer
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.kernels.rows.plan import RoutePlan, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.numerics.reference import relative_error
from moereg.quantize import (
    Quantized,
    dequantize_activations,
    quantize_activations,
    quantize_dequantize_activations,
)
from moereg.spec.quant_schemes import get_scheme
from moereg.testing.inputs import make_weights
from tests.backends.test_triton_layers import SM100, check
from tests.backends.test_triton_quantized import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    MULTIPLIES_NVFP4,
    SM90,
    assert_same,
    bits,
    make_problem,
    make_rows,
    one_route_a_row,
    random,
    row_format,
    select,
)
from tests.kernels.triton_cases import make_batched_plan as make_batches

needs_scaled_products = pytest.mark.skipif(not MULTIPLIES_NVFP4, reason="requires triton>=3.8")
NVFP4 = get_scheme("nvfp4")
IDS = torch.tensor([[3, 1], [0, -1], [4, 2], [1, 3], [0, 3]], dtype=torch.int32, device=DEVICE)
STATIC = torch.tensor([0.001, 0.002, 0.004, 0.008], device=DEVICE)
# Rows of four experts with room for three.
COUNTS = [3, 0, 2, 1]


def sorted_plan(ids: torch.Tensor) -> RoutePlan:
    workspace = ids.new_empty(route_workspace_numel(*ids.shape, 4, 16))
    return sort_routes(ids, None, 4, 4, 16, workspace)


class Codes:
    """Rows of `x` as codes of nvfp4: of each, of each route, sorted, or of each expert."""

    scheme = "nvfp4"

    def __init__(self, x: torch.Tensor, static: torch.Tensor | None = None, rows: str = "each") -> None:
        self.columns = x.shape[1]
        self.out = make_rows(row_format(NVFP4), IDS.numel() if rows == "routes" else len(x), self.columns)
        quantizer = Quantizer(row_format(NVFP4), static)
        if rows == "batched":
            quantize_batched_rows(self.out, x, quantizer, make_batches(COUNTS, 3, 16))
        elif rows == "routes":
            quantize_rows(self.out, x, quantizer, RouteIds(IDS, None, 4, 4))
        else:
            quantize_rows(self.out, x, quantizer, sorted_plan(IDS) if rows == "sorted" else one_route_a_row(len(x)))

    def check(self, rows: slice, x: torch.Tensor, static: torch.Tensor | None = None) -> None:
        """The rows are those of `x`, rounded."""
        assert_same(select(self.out, rows), quantize_activations(x, NVFP4, static), self.columns)

    def check_untouched(self, rows: slice) -> None:
        assert (self.out.q[rows] == 77).all(), "a row that is not in use was written to"


class Numbers:
    """Rows of `x` as the numbers of codes, in 16 bits, and their factors; sorted ones in place."""

    scheme = "nvfp4"

    def __init__(self, x: torch.Tensor, static: torch.Tensor | None = None, rows: str = "each") -> None:
        problem = make_problem(get_scheme(self.scheme), 130, 200)
        self.grid = emulated.Standard(TritonEmulatedExperts(problem, SM90)).grid()
        self.before = x.clone() if rows == "sorted" else torch.full_like(x, 77.0)
        if rows == "routes":
            self.before = self.before.repeat_interleave(2, 0)
        self.out, named = self.before.clone(), {}
        if rows == "routes":
            named = {"route_expert": sorted_plan(IDS).route_expert}
        elif rows == "sorted":
            named = {"plan": sorted_plan(IDS)}
        elif rows == "batched":
            named = {"expert_num_tokens": torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)}
        self.factors = torch.full((len(self.out),), math.nan, device=DEVICE) if self.grid.global_scale else None
        source = self.out if rows == "sorted" else x
        requantize_rows(self.out, source, self.grid, factors=self.factors, static_scale=static, **named)

    def check(self, rows: slice, x: torch.Tensor, static: torch.Tensor | None = None) -> None:
        """The rows are those of `x`, rounded."""
        values, scale_2 = self.expected(x, static)
        found = self.out[rows]
        if scale_2 is not None:
            assert torch.equal(bits(self.factors[rows]), bits(scale_2))
            # The scale alone makes the rest of such a row NaN.
            values, found = values[~scale_2.isnan()], found[~scale_2.isnan()]
        assert torch.equal(bits(found.float()), bits(values)), "not what the codes stand for"
        assert torch.equal(bits(values.to(x.dtype).float()), bits(values)), "what codes stand for has to fit 16 bits"

    def expected(self, x: torch.Tensor, static: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The numbers of the codes without the global scale, in fp32, and that scale of each row."""
        quantized = quantize_activations(x, self.scheme, static)
        if quantized.scale_2 is None:
            return quantize_dequantize_activations(x, self.scheme), None
        # A scale of 1 changes no number, which leaves codes times group scales.
        stripped = dataclasses.replace(quantized, scale_2=torch.ones((), device=x.device))
        values = dequantize_activations(stripped, self.scheme, x.shape[1])
        return values, quantized.scale_2.expand(len(x), 1).squeeze(1).contiguous()

    def check_untouched(self, rows: slice) -> None:
        assert torch.equal(self.out[rows], self.before[rows]), "a row that is not in use was written to"


class PowerNumbers(Numbers):
    scheme = "mxfp4_mxfp8"


# Each dtype that the cells have.
FORMS: list[Any] = [
    *(pytest.param(Codes, dtype, marks=needs_scaled_products) for dtype in (BF16, FP16, FP32)),
    *((Numbers, dtype) for dtype in (BF16, FP16)),
    (PowerNumbers, BF16),
]
each_form = pytest.mark.parametrize(("kind", "dtype"), FORMS)
each_nvfp4 = pytest.mark.parametrize("kind", [pytest.param(Codes, marks=needs_scaled_products), Numbers])


def check_each(kind: Any, x: torch.Tensor, static: torch.Tensor | None = None) -> Any:
    found = kind(x, static)
    found.check(slice(None), x, None if static is None else static.reshape(()))
    return found


@pytest.mark.few
@each_form
@pytest.mark.parametrize("columns", [16, 130, 1100, 2880])
def test_random_rows(kind: Any, dtype: torch.dtype, columns: int) -> None:
    x = random(9, columns) * torch.logspace(-4, 3, 9, device=DEVICE).unsqueeze(1)
    # Groups of one row that differ by more than a group's scale can.
    x[3] *= torch.logspace(-6, 2, columns, device=DEVICE)
    check_each(kind, x.to(dtype))


@each_form
def test_odd_numbers(kind: Any, dtype: torch.dtype) -> None:
    x = random(11, 96).to(dtype)
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x[0] = 0.0
    x[1, :32] = 0.0
    x[2] = -0.0
    x[3, 5] = math.nan
    x[4, 70] = -math.inf
    x[5] = (random(96) * tiny).to(dtype)
    x[6] = (torch.arange(96, device=DEVICE) * tiny * torch.finfo(dtype).eps).to(dtype)
    x[7] = largest / 2
    x[8, 0] = largest / 4
    x[9] = torch.linspace(-6, 6, 96).to(dtype)
    # A group that holds less than the smallest scale of its row can hold.
    x[10, 16:32] *= 2.0**-14
    check_each(kind, x)


@each_form
def test_ties_go_to_even_codes(kind: Any, dtype: torch.dtype) -> None:
    fmt = get_scheme(kind.scheme).activation
    values = torch.arange(0, 97, device=DEVICE) / 16 if fmt.bits == 4 else torch.arange(0, 449, device=DEVICE) / 32
    # Every group's largest magnitude is the largest code, so that its scale is 1.
    largest = 6.0 if fmt.bits == 4 else 448.0
    groups = torch.nn.functional.pad(values, (0, -len(values) % (fmt.group[1] - 1))).view(-1, fmt.group[1] - 1)
    x = torch.nn.functional.pad(groups, (0, 1), value=largest).reshape(1, -1)
    one = torch.ones(1, device=DEVICE) if fmt.global_scale else None
    found = check_each(kind, torch.cat([x, -x]).to(dtype), one)
    assert kind is not Codes or set((found.out.q & 15).flatten().tolist()) == set(range(16))


@each_nvfp4
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("columns", [130, 2880])
@pytest.mark.parametrize("static", [1e-6, 0.0007, 0.02, 5.0, 1e30, 1e-38])
def test_static_global_scales(kind: Any, static: float, columns: int, dtype: torch.dtype) -> None:
    """Too small scales saturate, too large ones leave the smallest group scale."""
    x = random(5, columns).to(dtype)
    x[1, 3], x[2, 5], x[3] = math.inf, math.nan, 0.0
    check_each(kind, x, torch.tensor([static], device=DEVICE))


SCALES = (STATIC, STATIC[:1], None)


@each_nvfp4
@pytest.mark.parametrize(
    ("rows", "columns", "scale"),
    [
        ("routes", 130, STATIC),
        *(("sorted", columns, scale) for columns in (48, 2000) for scale in SCALES),
        *(("batched", 1100, scale) for scale in SCALES),
    ],
)
def test_rows_have_their_experts_scales(kind: Any, rows: str, columns: int, scale: torch.Tensor | None) -> None:
    x, ids, plan = random(12, columns).to(BF16), IDS.flatten(), sorted_plan(IDS)
    # Of each row that is rounded its expert, and -1 of those that are left alone.
    experts = {
        "routes": torch.where(ids < 4, ids, -1).tolist(),
        "sorted": [int(plan.route_expert[route]) for route in plan.sorted_routes[:8]] + [-1, -1],
        "batched": [row // 3 if row % 3 < COUNTS[row // 3] else -1 for row in range(12)],
    }[rows]
    x = x[: 5 if rows == "routes" else len(experts)]
    if rows == "batched":
        x[torch.tensor(experts) < 0] = math.nan
    found = kind(x, scale, rows)
    for row, expert in enumerate(experts):
        own = slice(row, row + 1)
        if expert < 0:
            found.check_untouched(own)
        else:
            source = x[row // 2 if rows == "routes" else row, None]
            found.check(own, source, None if scale is None else scale.expand(4)[expert])


def test_repeated_factors_and_routing_weights_that_are_rounded_in_first() -> None:
    x, weights = random(12, 48).to(BF16), torch.rand(12, device=DEVICE) + 0.1
    found, repeated = Numbers(x), torch.full((36,), math.nan, device=DEVICE)
    requantize_rows(found.out, x, found.grid, factors=repeated)
    assert torch.equal(repeated.view(12, 3), found.factors[:, None].expand(12, 3))
    weighted = PowerNumbers(x)
    requantize_rows(weighted.out, x, weighted.grid, topk_weights=weights)
    weighted.check(slice(None), (x.float() * weights.unsqueeze(1)).to(BF16))


@triton.jit
def _scaled_product_kernel(product, a, a_scale, b, b_scale):
    rows, columns = tl.arange(0, 16), tl.arange(0, 32)
    codes = tl.arange(0, 64)
    groups = tl.arange(0, 8)[None, :]
    left = tl.load(a + rows[:, None] * 64 + codes[None, :])
    right = tl.load(b + columns[None, :] * 64 + codes[:, None])
    left_scale = tl.load(a_scale + rows[:, None] * 8 + groups)
    right_scale = tl.load(b_scale + columns[:, None] * 8 + groups)
    total = tl.zeros([16, 32], dtype=tl.float32)
    total = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e2m1", total)
    tl.store(product + rows[:, None] * 32 + columns[None, :], total)


@needs_scaled_products
def test_scaled_products_are_those_of_a_device() -> None:
    """Layers of codes rely on this in the interpreter: see `patch_interpreter`."""
    codes = torch.randint(0, 256, (48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # Every positive number of the type, with 0 and the subnormal ones.
    scales = (torch.arange(48 * 8, dtype=torch.uint8, device=DEVICE) % 127).view(48, 8).view(torch.float8_e4m3fn)
    one = torch.ones(48, 1, device=DEVICE)
    x = dequantize_activations(Quantized(codes, scales, one), NVFP4, 128, torch.float64)
    product = torch.empty(16, 32, device=DEVICE)
    _scaled_product_kernel[(1,)](product, codes[:16], scales[:16], codes[16:], scales[16:])
    assert relative_error(product, x[:16] @ x[16:].T) < 1e-6
    scales.view(torch.uint8)[3, 5] = 127
    _scaled_product_kernel[(1,)](product, codes[:16], scales[:16], codes[16:], scales[16:])
    assert product.isnan().any(1).nonzero().tolist() == [[3]]


@needs_scaled_products
@pytest.mark.parametrize("per_half", [False, True])
def test_global_scales_of_weights_become_one_a_half(per_half: bool) -> None:
    problem = make_problem(NVFP4, 130, 200)
    weights = make_weights(problem, DEVICE)
    scale = torch.rand((4, 2) if per_half else (4,), device=DEVICE) / 1000
    weights = dataclasses.replace(weights, w13_scale_2=scale)
    permuted = TritonQuantizedExperts(problem, SM100).permute_weights(weights, problem)
    assert torch.equal(permuted["w13_scale_2"], scale.view(4, -1).expand(4, 2))
    assert permuted["w2_scale_2"].shape == (4, 1)
    assert permuted["w13"].shape == (4, 400, 128)
    assert permuted["w13_scale"].shape == (4, 400, 16)
    assert (permuted["w13_scale"][:, :, 9:].view(torch.uint8) == 0).all()
    check(problem, SM100, 9, weights=weights)
