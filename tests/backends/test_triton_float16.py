"""float16 layers of the Triton classes in which rows leave the range of float16 before they are weighted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from moereg.dispatch import select_backend
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import calibrate_activation_scales, reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.quantize import quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_plain_weights
from tests.kernels.triton_cases import DEVICE, SM90, on_gpu

LARGEST = 65504.0

SCHEMES = (
    *("unquantized", "int4_w4a16_g128", "int8_w8a16", "mxfp4_w4a16", "nvfp4_w4a16", "nvfp4", "mxfp8", "int8_w8a8"),
    *("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic"),
)

pytestmark = pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")


def check(scheme: str, activation_format: str, routing_scale: float, size: int, tokens: tuple[int, ...]) -> None:
    """Compares calls whose routing weights bring rows of up to millions, or of some 1e-5, back to about 1."""
    problem = MoEProblem(
        num_experts=4,
        hidden_size=2 * size,
        intermediate_size=size,
        top_k=2,
        dtype="float16",
        quant=scheme,
        exact_activations=True,
        activation_format=activation_format,
    )
    device = torch.device(DEVICE)
    plain = make_plain_weights(problem, device)
    input_scale, w2_scale = (10.0, 0.1 / routing_scale) if routing_scale < 1 else (0.03, 1e-2)
    w2 = (plain.w2.float() * w2_scale).clamp(-6e4, 6e4).half()
    weights = dataclasses.replace(plain, w2=w2)
    if problem.quant.weight:
        scales: dict[str, torch.Tensor] = {}
        if problem.quant.activation is not None and problem.quant.activation.static:
            sample = make_inputs(problem, 64, "uniform", device, seed=77)
            call = (sample.hidden_states * input_scale, sample.topk_weights, sample.topk_ids)
            unquantized = dataclasses.replace(problem, quant=weights.scheme)
            given = calibrate_activation_scales(unquantized, weights, *call, problem.quant)
            scales = dict(zip(("a13_scale", "a2_scale"), given, strict=True))
        weights = quantize_weights(weights, scheme, **scales)
    selection = select_backend(problem, SM90 if DEVICE == "cpu" else None, require="triton")
    kernel = make_kernel(problem, weights, selection)
    for num_tokens in tokens:
        inputs = make_inputs(problem, num_tokens, "uniform", device)
        x, ids, factors = inputs.hidden_states * input_scale, inputs.topk_ids, inputs.topk_weights * routing_scale
        if num_tokens > 1:
            # Weights of routes that no expert takes may be anything.
            ids[1::3, 0], factors[1::3, 0] = -1, math.nan
        truth = reference_experts(problem, weights, x, factors, ids, computes=selection.winner.scheme)
        assert truth.half().isfinite().all()
        assert truth.abs().amax() > 1e-3, "the output has few digits in float16"
        assert routing_scale > 1 or truth.abs().amax() / routing_scale > LARGEST
        out = kernel(x, factors, ids, out=torch.full_like(x, math.nan))
        assert relative_error(out, truth) < tolerance(selection.winner.scheme, "float16", truth.numel()), num_tokens


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("scheme", ["unquantized", "int8_w8a16", "nvfp4", "int8_w8a8", "fp8_tensor_static"])
def test_every_class(scheme: str, activation_format: str) -> None:
    check(scheme, activation_format, 1e-6, 32, (17,))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_of_every_scheme(scheme: str, activation_format: str) -> None:
    """One token, few without and with a sort, and so many an expert that Hopper has schedules of its own."""
    for routing_scale in (1e-8, 1e-6, 1e5):
        check(scheme, activation_format, routing_scale, 128, (1, 12, 40, 600))
