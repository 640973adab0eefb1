"""Products of 4-bit codes with two scales: interpreted, or on a CUDA device.

No device that multiplies such codes has run these: Triton's interpreter has, which restores both sides.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moereg.quant import get_scheme
from moereg.quantize import Quantized, dequantize_activations
from moereg.reference import relative_error
from moereg.testing.interpreter import patch_interpreter
from tests import conformance

DEVICE = conformance.test_device()
NVFP4 = get_scheme("nvfp4")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE.type == "cpu":
        patch_interpreter()


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
    """What all layers below rest on where kernels are interpreted: see `patch_interpreter`."""
    codes = torch.randint(0, 256, (48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # Every positive number of the type, 0 and subnormal ones included.
    scales = (torch.arange(48 * 8, dtype=torch.uint8, device=DEVICE) % 127).view(48, 8).view(torch.float8_e4m3fn)
    one = torch.ones(48, 1, device=DEVICE)
    x = dequantize_activations(Quantized(codes, scales, one), NVFP4, 128, torch.float64)
    product = torch.empty(16, 32, device=DEVICE)
    _scaled_product_kernel[(1,)](product, codes[:16], scales[:16], codes[16:], scales[16:])
    assert relative_error(product, x[:16] @ x[16:].T) < 1e-6
    scales.view(torch.uint8)[3, 5] = 127
    _scaled_product_kernel[(1,)](product, codes[:16], scales[:16], codes[16:], scales[16:])
    assert product.isnan().any(1).nonzero().tolist() == [[3]]
