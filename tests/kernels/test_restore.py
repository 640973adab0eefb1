"""The kernel that restores quantized matrices to 16 bits, against torch's code: the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.errors import ArgumentError
from moereg.kernels.restore import RestoreConfig, restore_matrices
from moereg.quantize import Quantized, dequantize_matrices, dequantize_rows, quantize_weights
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.weights.permuted import ExpertWeights
from moereg.weights.quantize_weights import plain_scales, restore_in_triton, stored_matrices
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
    return stored_matrices(weights.tensors(), "w13", halves)


def check(matrices: Quantized, fmt: QuantFormat, rows: int, columns: int, dtype: torch.dtype) -> None:
    found = Guarded(len(matrices.q), rows, columns, dtype=dtype)
    assert restore_in_triton(matrices, fmt, found.tensor)
    found.check()
    for expert, one in enumerate(found.tensor):
        expected = dequantize_rows(plain_scales(matrices.of(expert)), fmt, columns, slice(None), dtype)
        is_nan = expected.isnan()
        assert torch.equal(one.isnan(), is_nan)
        number = {2: torch.int16, 4: torch.int32}[dtype.itemsize]  # Zeros have their sign.
        assert torch.equal(one.view(number)[~is_nan], expected.view(number)[~is_nan])


@pytest.mark.parametrize("fmt", FORMATS, ids=FORMATS.values())
@given(st.integers(1, 3), st.integers(3, 70), st.integers(1, 150), st.booleans(), st.sampled_from([BF16, FP16, FP32]))
@settings(max_examples=6, deadline=None)
def test_bits_are_those_of_torch(
    fmt: QuantFormat, num_experts: int, rows: int, columns: int, gated: bool, dtype: torch.dtype
) -> None:
    halves = 2 if gated else 1
    check(stored(fmt, num_experts, halves * rows, columns, halves, rows), fmt, halves * rows, columns, dtype)


OTHERS = (
    QuantFormat("float8_e4m3fn", (128, 128)),
    QuantFormat("uint4", (1, 12), symmetric=False),
    QuantFormat("uint8", (5, 7), symmetric=False),
    QuantFormat("int8", (WHOLE, 20), scale_dtype="bfloat16"),
    QuantFormat("float4_e2m1fn", (3, WHOLE)),
)


@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_groups_of_any_size_begin_anew_in_each_half(fmt: QuantFormat) -> None:
    check(stored(fmt, 2, 2 * 140, 136, 2), fmt, 2 * 140, 136, BF16)


@pytest.mark.parametrize("fmt", FORMATS, ids=FORMATS.values())
def test_any_bytes_are_read_as_torch_reads_them(fmt: QuantFormat) -> None:
    """Every code and every scale of 8 bits, NaN too, in tiles with rows and columns to spare."""
    matrices = stored(fmt, 2, 26, 264, 2)

    def drawn(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.element_size() > 1:
            return tensor
        some = torch.arange(tensor.numel(), device=DEVICE).view(tensor.shape) * 37 % 256
        return some.to(torch.uint8).view(tensor.dtype)

    parts = {name: drawn(getattr(matrices, name)) for name in ("q", "scale", "zero_point")}
    check(dataclasses.replace(matrices, **parts), fmt, 26, 264, FP32)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [RestoreConfig(elements=64, columns=64), RestoreConfig(elements=8192, columns=2048)])
def test_any_tile_writes_every_number_once(config: RestoreConfig) -> None:
    fmt = QUANT_SCHEMES["int4_w4a16_g32_zp"].weight
    assert fmt is not None
    matrices, found = stored(fmt, 2, 6, 200, 1), Guarded(2, 6, 200, dtype=BF16)
    restore_matrices(
        *(found.tensor, matrices.q, matrices.scale),
        element="uint4",
        bits=4,
        group=(1, 32),
        zero_point=matrices.zero_point,
        config=config,
    )
    found.check()
    expected = torch.empty(2, 6, 200, dtype=BF16, device=DEVICE)
    dequantize_matrices(matrices, fmt, expected)
    assert torch.equal(found.tensor, expected)


def test_rows_of_a_size_have_tiles_that_they_fill() -> None:
    config = RestoreConfig()
    assert [config.tile(size) for size in (2048, 768, 2880, 1408, 72)] == [
        *((2, 1024), (8, 256), (2, 1024), (4, 512)),
        (32, 64),
    ]


def test_what_no_kernel_decodes_is_left_to_torch() -> None:
    fmt = QuantFormat("float8_e5m2", (1, WHOLE))
    matrices = stored(fmt, 2, 8, 24, 1)
    out = torch.full((2, 8, 24), torch.nan, dtype=BF16, device=DEVICE)
    assert not restore_in_triton(matrices, fmt, out)
    assert out.isnan().all()
    dequantize_matrices(matrices, fmt, out)
    assert torch.equal(out[1], dequantize_rows(matrices.of(1), fmt, 24, slice(None), BF16))


@pytest.mark.parametrize("strided", ["q", "scale", "out"])
def test_transposed_views_are_left_to_torch(strided: str) -> None:
    fmt = QUANT_SCHEMES["int4_w4a16_g32"].weight
    assert fmt is not None
    matrices = stored(fmt, 2, 8, 64, 1)
    out, expected = torch.empty(2, 2, 8, 64, device=DEVICE)
    dequantize_matrices(matrices, fmt, expected)
    if strided == "out":
        out = out.mT.contiguous().mT
    else:
        matrices = dataclasses.replace(matrices, **{strided: getattr(matrices, strided).mT.contiguous().mT})
    assert not restore_in_triton(matrices, fmt, out)
    dequantize_matrices(matrices, fmt, out)
    assert torch.equal(out, expected)


def test_other_matrices_are_refused() -> None:
    fmt = QUANT_SCHEMES["nf4"].weight
    assert fmt is not None
    matrices, out = stored(fmt, 2, 8, 32, 1), torch.empty(2, 8, 20, device=DEVICE)
    with pytest.raises(
        ArgumentError, match=r"^codes of matrices \[2, 8, .* must be \[2, 8, .*; pass one matrix of every"
    ):
        dequantize_matrices(matrices, fmt, out)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_block128", "nvfp4_w4a16", "int4_w4a16_g128_zp", "nf4", "nf4_dq"])
def test_a_layer_is_restored_on_a_gpu_without_other_memory(name: str) -> None:
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    matrices, out = stored(fmt, 8, 1536, 2048, 2), torch.empty(8, 1536, 2048, dtype=BF16, device=DEVICE)
    dequantize_matrices(matrices, fmt, out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dequantize_matrices(matrices, fmt, out)
    assert torch.cuda.max_memory_allocated() == before
    check(matrices, fmt, 1536, 2048, BF16)
