"""4-bit activations with two scales as codes, and layers that multiply them: interpreted, or on a CUDA device.

`test_triton_quantized` has what all formats of activations share. No device with instructions for such codes has run
these yet; Triton's interpreter restores both sides.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl

from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.kernels.quantized.operands import Quantizer
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.kernels.quantized.rows_batched import quantize_batched_rows
from moereg.numerics.reference import relative_error
from moereg.quantize import Quantized, dequantize_activations, quantize_activations
from moereg.spec.quant_schemes import get_scheme
from moereg.testing.inputs import make_weights
from tests.backends.test_triton_batched import make_plan as make_batches
from tests.backends.test_triton_emulated import (
    IDS,
    STATIC,
    sorted_plan,
)
from tests.backends.test_triton_layers import SM100, check
from tests.backends.test_triton_quantized import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    MULTIPLIES_NVFP4,
    assert_same,
    make_problem,
    make_rows,
    quantize,
    random,
    row_format,
    select,
)

pytestmark = pytest.mark.skipif(not MULTIPLIES_NVFP4, reason="requires triton>=3.8")

NVFP4 = get_scheme("nvfp4")


def assert_quantized(x: torch.Tensor, static: torch.Tensor | None = None) -> None:
    expected = quantize_activations(x, NVFP4, None if static is None else static.reshape(()))
    assert_same(quantize(x, NVFP4, static_scale=static), expected, x.shape[1])


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


def test_scaled_products_are_those_of_a_device() -> None:
    """All layers below rely on this in the interpreter: see `patch_interpreter`."""
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


@pytest.mark.few
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("columns", [16, 130, 1100, 2880])
def test_random_rows(columns: int, dtype: torch.dtype, seed: int) -> None:
    x = random(9, columns, seed=seed) * torch.logspace(-4, 3, 9, device=DEVICE).unsqueeze(1)
    # Groups of one row that differ by more than a group's scale can.
    x[3] *= torch.logspace(-6, 2, columns, device=DEVICE)
    assert_quantized(x.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_odd_numbers(dtype: torch.dtype) -> None:
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
    assert_quantized(x)


def test_ties_go_to_even_codes() -> None:
    values = torch.arange(0, 97, device=DEVICE) / 16
    # Every group's largest magnitude is 6, so that its scale is 1.
    groups = torch.nn.functional.pad(values, (0, -len(values) % 15)).view(-1, 15)
    x = torch.nn.functional.pad(groups, (0, 1), value=6.0).reshape(1, -1)
    one = torch.ones(1, device=DEVICE)
    x = torch.cat([x, -x]).to(BF16)
    assert_quantized(x, one)
    assert set((quantize(x, NVFP4, static_scale=one).q & 15).flatten().tolist()) == set(range(16))


@pytest.mark.parametrize("columns", [130, 2880])
@pytest.mark.parametrize("static", [1e-6, 0.0007, 0.02, 5.0, 1e30, 1e-38])
def test_static_global_scales(static: float, columns: int) -> None:
    """Too small scales saturate, too large ones leave the smallest group scale."""
    x = random(5, columns).to(BF16)
    x[1, 3], x[2, 5], x[3] = math.inf, math.nan, 0.0
    assert_quantized(x, torch.tensor([static], device=DEVICE))


def test_rows_of_routes_have_their_experts_scales() -> None:
    x = random(5, 130).to(BF16)
    out = make_rows(row_format(NVFP4), 10, 130)
    quantize_rows(out, x, Quantizer(row_format(NVFP4), STATIC), RouteIds(IDS, None, 4, 4))
    for route, expert in enumerate(IDS.flatten().tolist()):
        own = select(out, slice(route, route + 1))
        if expert not in range(4):
            assert (own.q == 77).all(), "a row without an expert was written to"
            continue
        assert_same(own, quantize_activations(x[route // 2, None], NVFP4, STATIC[expert]), 130)


@pytest.mark.parametrize("columns", [48, 2000])
@pytest.mark.parametrize("scale", [STATIC, STATIC[:1], None])
def test_sorted_rows(scale: torch.Tensor | None, columns: int) -> None:
    x, plan = random(10, columns).to(BF16), sorted_plan(IDS)
    out = make_rows(row_format(NVFP4), 10, columns)
    quantize_rows(out, x, Quantizer(row_format(NVFP4), scale), plan)
    num_rows = int(plan.expert_offsets[-1])
    assert num_rows == 8
    assert (out.q[num_rows:] == 77).all(), "rows that are not in use were written to"
    for row in range(num_rows):
        expert = int(plan.route_expert[plan.sorted_routes[row]])
        own = None if scale is None else scale.expand(4)[expert]
        assert_same(select(out, slice(row, row + 1)), quantize_activations(x[row, None], NVFP4, own), columns)


@pytest.mark.parametrize("scale", [STATIC, STATIC[:1], None])
def test_batched_rows(scale: torch.Tensor | None) -> None:
    counts = [3, 0, 2, 1]
    x, out = random(12, 1100).to(BF16), make_rows(row_format(NVFP4), 12, 1100)
    for row in range(12):
        if row % 3 >= counts[row // 3]:
            x[row] = math.nan
    quantize_batched_rows(out, x, Quantizer(row_format(NVFP4), scale), make_batches(counts, 3, 16))
    for row in range(12):
        found, expert = select(out, slice(row, row + 1)), row // 3
        if row % 3 >= counts[expert]:
            assert (found.q == 77).all(), "a row that is not valid was written to"
            continue
        own = None if scale is None else scale.expand(4)[expert]
        assert_same(found, quantize_activations(x[row, None], NVFP4, own), 1100)


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
