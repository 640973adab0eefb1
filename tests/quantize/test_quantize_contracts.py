"""Formats that well-kept libraries define, bit for bit: torchao, compressed-tensors and transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moereg.quantize import (
    activation_scale,
    dequantize_weights,
    quantize_activations,
    quantize_weights,
    unpack_nibbles,
)
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat
from moereg.weights.formats import element_of
from moereg.weights.permuted import ExpertWeights
from tests.quantize.quantized_values import bits

ROWS, COLUMNS = 128, 256


pytestmark = pytest.mark.usefixtures("one_thread")


def matrix(seed: int = 0) -> torch.Tensor:
    """[ROWS, COLUMNS] fp32 of bf16 values, each row of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    return (x * torch.exp(torch.randn(ROWS, 1, generator=generator))).bfloat16().float()


def as_weights(w2: torch.Tensor) -> ExpertWeights:
    return ExpertWeights(w13=torch.ones(1, 2 * COLUMNS, ROWS), w2=w2.unsqueeze(0))


def ours(name: str, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    """Codes and scales of w2 as expert 0 has them."""
    stored = quantize_weights(as_weights(w2), name)
    assert stored.w2_scale is not None
    return stored.w2[0], stored.w2_scale[0], stored


def assert_same_but_for_ties(
    expected: torch.Tensor, quotient: torch.Tensor, encode: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A library that multiplies by the inverse of a scale may decide an exact tie otherwise than one that divides."""
    differs = encode(quotient) != expected
    assert differs.float().mean() < 1e-3
    below, above = encode(quotient * (1 - 2.0**-22)), encode(quotient * (1 + 2.0**-22))
    assert (below != above)[differs].all()
    assert ((expected == below) | (expected == above)).all()


# --- torchao ---


def test_torchao_mxfp8() -> None:
    codes, scale, _ = ours("mxfp8", matrix())
    expected_scale, expected = to_mx(matrix(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(bits(scale), bits(expected_scale))
    assert torch.equal(bits(codes), bits(expected))
    found = quantize_activations(matrix(), "mxfp4_mxfp8")
    assert torch.equal(bits(found.q), bits(expected))
    assert torch.equal(bits(found.scale), bits(expected_scale))


def test_torchao_nvfp4() -> None:
    codes, scale, stored = ours("nvfp4", matrix())
    scale_2 = per_tensor_amax_to_scale(matrix().abs().max())
    assert stored.w2_scale_2 is not None
    assert torch.equal(stored.w2_scale_2[0], scale_2)
    expected_scale, expected = nvfp4_quantize(matrix(), per_tensor_scale=scale_2)
    # torchao keeps scales at e4m3's normal values; ours also use subnormal ones, which do not occur here.
    assert scale.float().min() >= torch.finfo(torch.float8_e4m3fn).smallest_normal
    assert torch.equal(bits(scale), bits(expected_scale))
    quotient = matrix() / (scale.float() * scale_2).repeat_interleave(16, 1)
    element = element_of(QuantFormat("float4_e2m1fn", (1, 16)))
    assert_same_but_for_ties(unpack_uint4(expected), quotient, lambda x: unpack_nibbles(element.encode(x), COLUMNS))
    activations = quantize_activations(matrix(), "nvfp4", scale_2)
    assert torch.equal(bits(activations.scale), bits(scale))
    assert torch.equal(activations.q, codes)


# --- compressed-tensors ---


def extrema(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(ROWS // block[0], block[0], COLUMNS // block[1], block[1])
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def group_of(name: str) -> tuple[int, int]:
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    return (ROWS if fmt.group[0] == WHOLE else fmt.group[0], COLUMNS if fmt.group[1] == WHOLE else fmt.group[1])


ARGUMENTS = {
    "fp8_tensor_dynamic": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8_channel_token": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8_block128": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int8_w8a8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8_w8a16": {"num_bits": 8, "type": "int", "strategy": "channel"},
    **{
        f"int4_w4a16_g{group}{suffix}": {
            "num_bits": 4,
            "type": "int",
            "symmetric": not suffix,
            **({"strategy": "channel"} if group == "all" else {"strategy": "group", "group_size": int(group)}),
        }
        for group in ("32", "64", "128", "all")
        for suffix in ("", "_zp")
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_compressed_tensors_weights(name: str) -> None:
    arguments = QuantizationArgs(**ARGUMENTS[name])
    low, high = extrema(matrix(), group_of(name))
    expected_scale, expected_zero = calculate_qparams(low, high, arguments)
    expected = quantize(matrix(), expected_scale, expected_zero, arguments)
    codes, scale, stored = ours(name, matrix())
    assert torch.equal(scale.reshape(-1), expected_scale.reshape(-1))
    if name.startswith("int4"):
        # Signed there, with an offset of 8 here.
        assert torch.equal(unpack_nibbles(codes, COLUMNS).float() - 8, expected)
        assert torch.equal(codes.view(torch.int32), pack_to_int32(expected.to(torch.int8), 4))
    else:
        assert torch.equal(codes.float(), expected)
    if not arguments.symmetric:
        assert stored.w2_zero_point is not None
        zero_point = unpack_nibbles(stored.w2_zero_point[0], scale.shape[-1])
        assert torch.equal(zero_point.to(torch.int16) - 8, expected_zero.to(torch.int16))
    restored = dequantize(expected, expected_scale, expected_zero, arguments)
    assert torch.equal(dequantize_weights(stored, torch.float32)[1][0], restored)


def test_compressed_tensors_nvfp4() -> None:
    # Its global scale is the inverse of ours; a largest magnitude of 2688 * 2^-k makes both exact.
    x = matrix()
    x[0, 0] = 2688.0 / 32
    inverse = generate_gparam(x.min(), x.max())
    assert inverse.item() == 32
    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    low, high = extrema(x, (1, 16))
    expected_scale, _ = calculate_qparams(low, high, arguments, global_scale=inverse)
    expected = quantize(x, expected_scale, None, arguments, global_scale=inverse)
    codes, scale, stored = ours("nvfp4", x)
    assert stored.w2_scale_2 is not None
    assert stored.w2_scale_2.item() == 1 / 32
    assert torch.equal(scale.float(), expected_scale)
    assert torch.equal(codes, pack_fp4_to_uint8(expected))
    restored = dequantize(expected, expected_scale, None, arguments, global_scale=inverse)
    assert torch.equal(dequantize_weights(stored, torch.float32)[1][0], restored)


# --- transformers ---


def test_transformers_reads_our_mxfp4() -> None:
    """As gpt-oss checkpoints hold it: blocks [E, N, groups, 16] and biased exponents; the result is transposed."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, ROWS, COLUMNS // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, ROWS, COLUMNS // 32), dtype=torch.uint8, generator=generator)
    stored = ExpertWeights(
        w13=torch.zeros(2, 2 * COLUMNS, ROWS // 2, dtype=torch.uint8),
        w13_scale=torch.ones(2, 2 * COLUMNS, ROWS // 32).to(torch.float8_e8m0fnu),
        w2=blocks.flatten(-2),
        w2_scale=scales.view(torch.float8_e8m0fnu),
        quant="mxfp4_w4a16",
    )
    for dtype in (torch.bfloat16, torch.float32):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(dequantize_weights(stored, dtype)[1], expected.transpose(1, 2))


def test_static_scales_are_the_calibration_of_the_field() -> None:
    amax = torch.tensor(5.0)
    assert activation_scale(amax, "fp8_tensor_static") == amax / 448
    assert activation_scale(amax, "nvfp4") == per_tensor_amax_to_scale(amax)
