"""Quantized weights, against slow loops."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.numerics.reference import relative_error
from moereg.quantize import (
    dequantize_rows,
    dequantize_weights,
    expert_matrix,
    quantize_weights,
    row_blocks,
)
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.weights import quantize_weights as quantize_module
from moereg.weights.permuted import ExpertWeights
from tests.cli.command import printed
from tests.quantize.quantized_values import INF, NAN, same, slow_dequantized

pytestmark = pytest.mark.usefixtures("one_thread")

QUANTIZED = [name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None]


def make_weights(
    num_experts: int = 2, hidden_size: int = 200, intermediate_size: int = 72, halves: int = 2, seed: int = 0
) -> ExpertWeights:
    """Random weights whose magnitude differs from row to row and along a row, so that scales differ too."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        x = torch.randn(num_experts, rows, columns, generator=generator)
        x *= torch.exp(torch.randn(num_experts, rows, 1, generator=generator))
        return (x * torch.exp(torch.randn(num_experts, 1, columns, generator=generator))).bfloat16()

    return ExpertWeights(w13=random(halves * intermediate_size, hidden_size), w2=random(hidden_size, intermediate_size))


def quantized(weights: ExpertWeights, name: str, **options: bool) -> ExpertWeights:
    fmt = QUANT_SCHEMES[name].activation
    is_static = fmt is not None and fmt.static
    scales = {"a13_scale": torch.tensor(0.01), "a2_scale": torch.ones(weights.num_experts)} if is_static else {}
    return quantize_weights(weights, name, **scales, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sizes", [(200, 72), (33, 7), (128, 64)], ids=str)
def test_weights_are_what_slow_loops_give(name: str, sizes: tuple[int, int]) -> None:
    weights = make_weights(hidden_size=sizes[0], intermediate_size=sizes[1])
    found = dequantize_weights(quantized(weights, name), torch.float64)
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    for matrices, restored in zip((weights.w13, weights.w2), found, strict=True):
        for expert in range(weights.num_experts):
            parts = matrices[expert].float().chunk(2 if matrices is weights.w13 and fmt.group[0] > 1 else 1)
            expected = np.concatenate([slow_dequantized(part.numpy(), fmt) for part in parts])
            np.testing.assert_allclose(restored[expert].numpy(), expected, rtol=1e-14)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.booleans())
def test_blocks_of_any_size_keep_gate_and_up_apart(hidden: int, intermediate: int, gated: bool) -> None:
    halves = 2 if gated else 1
    w13, w2 = torch.randn(2, halves * intermediate, hidden), torch.randn(2, hidden, intermediate)
    w13[:, :intermediate] *= 16  # A block with rows of both would have another scale.
    found = quantized(ExpertWeights(w13=w13, w2=w2), "fp8_block128")
    assert found.w13_scale is not None
    assert found.w13_scale.shape == (2, halves * math.ceil(intermediate / 128), math.ceil(hidden / 128))
    fmt = found.scheme.weight
    assert fmt is not None
    parts = dequantize_weights(found, torch.float64)[0].chunk(halves, dim=1)
    for restored, given_half in zip(parts, w13.chunk(halves, dim=1), strict=True):
        for one, matrix in zip(restored, given_half, strict=True):
            np.testing.assert_allclose(one.numpy(), slow_dequantized(matrix.numpy(), fmt), rtol=1e-14)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_restored_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    weights = quantized(make_weights(hidden_size=33, intermediate_size=7), name)
    exact, rounded = dequantize_weights(weights, torch.float64), dequantize_weights(weights, dtype)
    for truth, found in zip(exact, rounded, strict=True):
        assert found.dtype == dtype
        assert found.shape == truth.shape
        assert relative_error(found, truth) < torch.finfo(dtype).eps


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(hidden_size=300, intermediate_size=136)
    whole = quantized(weights, name)
    restored = dequantize_weights(whole, torch.float32)
    monkeypatch.setattr(quantize_module, "BLOCK_BYTES", 4 * 136 * 70)
    fmt = QUANT_SCHEMES[name].weight
    assert fmt is not None
    assert len(list(row_blocks(300, 136, fmt))) == (3 if fmt.group[0] == 128 else 5)
    blocks = quantized(weights, name)
    for field, tensor in whole.tensors().items():
        assert same(blocks.tensors()[field], tensor), field
    for one, other in zip(dequantize_weights(blocks, torch.float32), restored, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_of_one_expert(name: str) -> None:
    weights = quantized(make_weights(hidden_size=130, intermediate_size=150), name)
    fmt = weights.scheme.weight
    assert fmt is not None
    w13, _ = dequantize_weights(weights, torch.float32)
    matrix = expert_matrix(weights.tensors(), "w13", 1, weights.num_halves)
    for rows in (slice(0, 300), slice(128, 256), slice(256, None), slice(149, 151)):
        assert torch.equal(dequantize_rows(matrix, fmt, 130, rows, torch.float32), w13[1, rows])


@pytest.mark.parametrize("name", QUANTIZED)
def test_halves_may_have_scales_of_their_own(name: str) -> None:
    """As if gate and up were two layers; without a scale that spans all rows nothing changes."""
    weights = make_weights()
    separate = quantized(weights, name, separate_halves=True)
    fmt = separate.scheme.weight
    assert fmt is not None
    spans_all = fmt.group == (WHOLE, WHOLE) or fmt.global_scale
    field = "w13_scale_2" if fmt.global_scale else "w13_scale"
    assert (separate.tensors()[field].shape == (2, 2)) == spans_all
    w13, w2 = dequantize_weights(separate, torch.float32)
    together = dequantize_weights(quantized(weights, name), torch.float32)
    assert torch.equal(w2, together[1])
    if not spans_all:
        assert torch.equal(w13, together[0])
        return
    for half, rows in enumerate((slice(0, 72), slice(72, 144))):
        alone = ExpertWeights(w13=weights.w13[:, rows], w2=weights.w2)
        assert torch.equal(dequantize_weights(quantized(alone, name), torch.float32)[0], w13[:, rows]), half


@pytest.mark.parametrize("name", QUANTIZED)
def test_not_gated_and_biases(name: str) -> None:
    weights = make_weights(halves=1)
    biases = {"w13_bias": torch.randn(2, 72), "w2_bias": torch.randn(2, 200)}
    with_bias = quantized(dataclasses.replace(weights, **biases), name)
    assert with_bias.num_halves == 1
    assert with_bias.w13_bias is biases["w13_bias"]
    assert with_bias.w2_bias is biases["w2_bias"]
    assert relative_error(dequantize_weights(with_bias)[0], weights.w13) < 0.3


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str) -> None:
    """A whole expert, whole rows and single groups of zeros."""
    weights = make_weights(hidden_size=256, intermediate_size=64)
    weights.w13[0] = 0
    weights.w13[1, 5] = 0
    weights.w13[1, :, 32:64] = 0
    stored = quantized(weights, name)
    scale = stored.w13_scale
    assert scale is not None
    w13, _ = dequantize_weights(stored, torch.float32)
    assert not w13[0].any()
    assert not w13[1, 5].any()
    assert not w13[1, :, 32:64].any()
    found = expert_matrix(stored.tensors(), "w13", 0, 2).scale if stored.scheme.weight.nested else scale[0].float()
    assert (found == (0 if stored.scheme.weight.nested else 1)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_smallest_numbers_round_towards_zero_and_never_to_nan(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tiny = torch.randn(1, 64, 64, generator=generator) * 1e-39
    stored = quantized(ExpertWeights(w13=torch.cat((tiny, tiny), dim=1), w2=tiny), name)
    w13, _ = dequantize_weights(stored, torch.float64)
    assert w13.isfinite().all()
    assert w13.abs().max() <= 2 * tiny.abs().max()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weights = make_weights()
    weights.w2[1, 7, 3] = bad
    text = "weights must be finite to be quantized, got infinity or NaN in w2 of expert 1; look at the checkpoint"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        quantized(weights, name)


def test_wrong_schemes_are_refused() -> None:
    weights = make_weights()
    with pytest.raises(ValueError, match=r"^quantize_weights needs a scheme with quantized weights, got unquantized$"):
        quantize_weights(weights, "unquantized")
    text = r"^quantize_weights needs unquantized weights, got mxfp8; dequantize them first$"
    with pytest.raises(ValueError, match=text):
        quantize_weights(quantized(weights, "mxfp8"), "nvfp4")
    with pytest.raises(ValueError, match=r"^scheme fp8_tensor_static has static activation scales; pass a13_scale="):
        quantize_weights(weights, "fp8_tensor_static")
    with pytest.raises(ValueError, match=r"^scheme int8_w8a16 has no tensor 'a2_scale'"):
        quantize_weights(weights, "int8_w8a16", a2_scale=torch.tensor(1.0))


def test_schemes_that_a_plugin_makes_up() -> None:
    """Every field is read, none of it through a name."""
    weights = make_weights(hidden_size=256, intermediate_size=64)
    formats = {
        "coarse blocks": QuantFormat("float8_e5m2", (32, 64), scale_dtype="bfloat16"),
        "whole columns": QuantFormat("uint4", (WHOLE, 64)),
        "mxint4": QuantFormat("uint4", (1, 32), scale_dtype="float8_e8m0fnu"),
        "bytes with zero points": QuantFormat("uint8", (1, 128), symmetric=False),
        "zero points of columns": QuantFormat("uint4", (WHOLE, 1), symmetric=False),
        "zero points below a global scale": QuantFormat(
            "uint8", (1, 128), scale_dtype="float8_e4m3fn", global_scale=True, symmetric=False
        ),
        "a global scale above fp32 ones": QuantFormat("uint4", (1, 64), global_scale=True),
    }
    for name, fmt in formats.items():
        scheme = QuantScheme(name, fmt)
        restored, _ = dequantize_weights(quantize_weights(weights, scheme), torch.float32)
        step = {"float8_e5m2": 0.06, "uint4": 0.5, "uint8": 0.03}[fmt.dtype]
        assert relative_error(restored, weights.w13) < step, name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_little_more_than_input_and_output() -> None:
    """Measured by the kernel in a separate process: 100 MB of bf16, to nvfp4 and back."""
    script = """
        import torch
        from pathlib import Path
        from moereg.quantize import dequantize_weights, quantize_weights
        from moereg.weights.permuted import ExpertWeights

        def status(name):
            text = Path("/proc/self/status").read_text()
            return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) * 1024

        def layer(experts, size):
            w13, w2 = torch.ones(experts, 2 * size, size), torch.ones(experts, size, size)
            return ExpertWeights(w13=w13.bfloat16(), w2=w2.bfloat16())

        torch.set_num_threads(1)
        dequantize_weights(quantize_weights(layer(1, 512), "nvfp4"))
        weights = layer(4, 2048)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        stored = quantize_weights(weights, "nvfp4")
        codes = sum(tensor.nbytes for tensor in stored.tensors().values())
        print((status("VmHWM") - before - codes) >> 20)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        w13, w2 = dequantize_weights(stored)
        print((status("VmHWM") - before - w13.nbytes - w2.nbytes) >> 20)
    """
    extra_mib = [int(line) for line in printed("-c", textwrap.dedent(script)).split()]
    # The fp32 of all weights is 192 MiB here, and of one expert's 48 MiB.
    assert max(extra_mib) < 100, extra_mib
