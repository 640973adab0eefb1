"""Tensors as Humming reads them, restored by its definition and compared with what moereg restores."""

from __future__ import annotations

import itertools

import imitation
import pytest
import torch
from moereg_humming import formats
from moereg_humming.backend import SCHEMES

from moereg.author import (
    ExpertWeights,
    MoEProblem,
    QuantScheme,
    dequantize_weights,
    pad_intermediate,
    quantize_weights,
)

SIZES = ((24, 40), (136, 264))


def make_weights(problem: MoEProblem, separate_halves: bool = False) -> ExpertWeights:
    """Quantized weights whose gate and up differ in scale."""
    generator = torch.Generator().manual_seed(1)
    rows = problem.activation.num_halves * problem.intermediate_size
    w13 = torch.randn(problem.num_experts, rows, problem.hidden_size, generator=generator) * 0.1
    w13[:, : rows // 2] *= 3
    w2 = torch.randn(problem.num_experts, problem.hidden_size, problem.intermediate_size, generator=generator) * 0.02
    return quantize_weights(ExpertWeights(w13=w13, w2=w2), problem.quant, separate_halves=separate_halves)


def restored_matrices(weights: ExpertWeights, problem: MoEProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 by Humming's definition, without padding."""
    found, restored = weights.tensors(), []
    for matrix, columns in (("w13", problem.hidden_size), ("w2", problem.intermediate_size)):
        fmt = formats.matrix_format(problem.quant.weight, problem.torch_dtype, found[matrix].shape[1], columns)
        scale = found[f"{matrix}_scale"]
        scales, tensor_scale = formats.scales(scale, found.get(f"{matrix}_scale_2"), fmt, problem.torch_dtype)
        tensors = {"weight": formats.codes(found[matrix], fmt), "weight_scale": scales}
        if tensor_scale is not None:
            tensors["weight_scale_2"] = tensor_scale
        if fmt.has_zero_point:
            tensors["zero_point"] = formats.zero_points(found[f"{matrix}_zero_point"], fmt, scale.shape[2])
        words_per_row = fmt.padded_columns * problem.quant.weight.bits // 32
        assert list(tensors["weight"].shape) == [problem.num_experts, fmt.padded_rows, words_per_row]
        config = {
            "b_dtype": fmt.element,
            "has_zero_point": fmt.has_zero_point,
            "weight_scale_type": fmt.scale_type,
            "weight_scale_group_size_n": fmt.group[0],
            "weight_scale_2_type": "tensor" if fmt.has_tensor_scale else "none",
        }
        restored.append(imitation.restored(config, tensors)[:, : fmt.rows, : fmt.columns])
    factors = formats.half_factors(weights)
    if factors is not None:
        restored[0] = (restored[0].unflatten(1, (2, -1)) * factors[:, :, None, None]).flatten(1, 2)
    return restored[0], restored[1]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: getattr(scheme, "name", scheme))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensors_restore_to_the_same_weights(scheme: str | QuantScheme, dtype: str) -> None:
    for (intermediate_size, hidden_size), activation in itertools.product(SIZES, ("silu", "relu2")):
        problem = MoEProblem(
            num_experts=3,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=2,
            quant=scheme,
            dtype=dtype,
            activation=activation,
        )
        weights = make_weights(problem)
        problem = formats.whole_blocks(problem)
        weights = pad_intermediate(weights, problem.intermediate_size)
        expected = dequantize_weights(weights, torch.float32)
        for values, target in zip(restored_matrices(weights, problem), expected, strict=True):
            # fp32 scales are rounded to 16 bits once, and all others are exact.
            bound = {"bfloat16": 2**-8, "float16": 2**-11}[dtype] if "float32" in str(problem.quant.weight) else 1e-6
            assert (values - target).norm() <= bound * target.norm(), problem


@pytest.mark.parametrize("scheme", ["nvfp4_w4a16", SCHEMES[-4]], ids=["nvfp4", "fp8_tensor"])
def test_gate_and_up_may_have_scales_of_their_own(scheme: str | QuantScheme) -> None:
    problem = MoEProblem(num_experts=2, hidden_size=64, intermediate_size=32, top_k=1, quant=scheme)
    weights = make_weights(problem, separate_halves=True)
    assert formats.half_factors(weights) is not None
    expected = dequantize_weights(weights, torch.float32)
    for values, target in zip(restored_matrices(weights, problem), expected, strict=True):
        assert (values - target).norm() <= 1e-6 * target.norm()


def test_scales_of_float16_keep_their_magnitude() -> None:
    problem = MoEProblem(
        num_experts=2, hidden_size=64, intermediate_size=32, top_k=1, quant="int8_w8a16", dtype="float16"
    )
    weights = make_weights(problem)
    tiny = weights.w2_scale * 1e-9
    fmt = formats.matrix_format(problem.quant.weight, torch.float16, 64, 32)
    scales, tensor_scale = formats.scales(tiny, None, fmt, torch.float16)
    assert tensor_scale is not None
    assert (scales.float() * tensor_scale[:, None, None] - 0)[:, :64].sub(tiny).norm() <= 2**-11 * tiny.norm()
