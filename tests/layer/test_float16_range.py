"""float16 layers in which numbers on the way leave the range of float16, while the reference's results do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.kernels.plain import mlp as torch_mlp
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.quantize import quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_plain_weights
from moereg.weights.permuted import ExpertWeights

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
I = 32  # noqa: E741


def extreme_weights(problem: MoEProblem) -> ExpertWeights:
    """Gates of up to a million of either sign with ups that make little of them, or squares that w2 makes small."""
    plain = make_plain_weights(problem, CPU)
    w13 = plain.w13.clone()
    if problem.activation.gated:
        w13[:, :I] *= 12
        w13[:, I:] *= 1e-4
    return dataclasses.replace(plain, w13=w13, w2=plain.w2 * 1e-3)


@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2"])
@pytest.mark.parametrize("quant", ["unquantized", "int8_w8a16", "int4_w4a16_g32"])
def test_every_class_on_a_cpu(quant: str, activation: str, activation_format: str) -> None:
    problem = small_problem(activation=activation, quant=quant, activation_format=activation_format)
    check_every_class(problem, extreme_weights(problem), 3000 if problem.activation.gated else 100)


def check_every_class(
    problem: MoEProblem, plain: ExpertWeights, input_scale: float, routing_scale: float = 1.0
) -> None:
    """Compares every class that takes the problem on a CPU with the reference.

    Args:
        problem: A float16 layer.
        plain: Its weights before they are quantized.
        input_scale, routing_scale: Factors of tokens and routing weights.
    """
    weights = quantize_weights(plain, problem.quant.name) if problem.quant.weight else plain
    selection = select_backend(problem, "cpu")
    for decision in selection.decisions:
        if not decision.accepted:
            continue
        kernel = make_kernel(problem, weights, dataclasses.replace(selection, decisions=(decision,)))
        # One token takes a path of its own. With few rows an expert a CPU multiplies in float16, with more in fp32
        # where that is faster.
        for num_tokens in (1, 3, 40):
            inputs = make_inputs(problem, num_tokens, "uniform", CPU)
            call = (inputs.hidden_states * input_scale, inputs.topk_weights * routing_scale, inputs.topk_ids)
            truth = reference_experts(problem, weights, *call, computes=decision.computes)
            assert truth.half().isfinite().all()
            assert truth.abs().amax() > 1e-3, "the output has few digits in float16"
            assert relative_error(kernel(*call), truth) < tolerance(decision.computes, "float16", truth.numel()), (
                decision.experts,
                num_tokens,
            )


SCHEMES = ("unquantized", "int8_w8a16", "int4_w4a16_g32", "int8_w8a8", "fp8_channel_token", "mxfp4_w4a16")


@pytest.mark.few
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("routing_scale", [1e-8, 1e-6, 1e5])
@pytest.mark.parametrize("multiplies", [False, True], ids=["any CPU", "float16 products"])
def test_routing_weights_of_any_size(
    multiplies: bool, routing_scale: float, quant: str, activation_format: str, cpu_features: Callable[..., None]
) -> None:
    """Unweighted results are up to millions or some 1e-5, of which float16 holds nothing or few digits."""
    if multiplies:
        cpu_features(fp16=True, onednn=False)
    problem = small_problem(quant=quant, activation_format=activation_format)
    plain = make_plain_weights(problem, CPU)
    # float16 has no weights beyond 65,504 to make up for the smallest routing weights.
    weights = dataclasses.replace(plain, w2=(plain.w2.float() * min(0.1 / routing_scale, 3e5)).clamp(-6e4, 6e4).half())
    check_every_class(problem, weights, 10.0, routing_scale)


@pytest.mark.few
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("routing_scale", [1e-6, 1e5])
def test_routing_weights_of_any_size_on_the_input(routing_scale: float, quant: str) -> None:
    problem = small_problem(quant=quant, top_k=1, activation="relu2", apply_router_weight_on_input=True)
    plain = make_plain_weights(problem, CPU)
    # The reference rounds tokens that are quantized, after they were scaled: these have to fit.
    input_scale = 0.1 if problem.quant.activation and routing_scale > 1 else 1.0
    w13 = (plain.w13.float() * min(1 / routing_scale, 2e4)).half()
    check_every_class(problem, dataclasses.replace(plain, w13=w13, w2=plain.w2 * 100), input_scale, routing_scale)


def small_problem(**changes: Any) -> MoEProblem:
    sizes = {"num_experts": 3, "hidden_size": 64, "intermediate_size": I, "top_k": 2, "dtype": "float16"}
    return MoEProblem(**{**sizes, **changes})


class Half:
    """Halves rows; a number over 4 counts as one that left the range."""

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return torch.where(x > 4, torch.inf, x / 2)


def test_rows_are_repeated_one_by_one() -> None:
    mlp = torch_mlp.RepeatingMlp(Half(), lambda x, expert: x * 100)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]], dtype=torch.float16)
    assert mlp(x, 0).tolist() == [[0.5, 1.0], [300.0, 500.0], [2.0, 2.0]]
    assert mlp(x[:1], 0).dtype == torch.float16
    # Tokens that routing weights scaled come in fp32: one beyond the range of float16, one with few digits there.
    scaled = torch.tensor([[1.0, 2.0], [1.0, 1e5], [1e-3, 1e-6], [0.0, 0.0]])
    assert mlp(scaled, 0).tolist() == [[0.5, 1.0], [100.0, 1e7], (scaled[2] * 100).tolist(), [0.0, 0.0]]
    assert torch_mlp.RepeatingMlp(Half(), mlp.wide, only_wide=True)(x[:1], 0).tolist() == [[100.0, 200.0]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_packed_weights_are_read_back(activation: str) -> None:
    problem = small_problem(hidden_size=37, dtype="float32", activation=activation, has_bias=True)
    weights = make_plain_weights(problem, CPU)
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    biases = (weights.w13_bias, weights.w2_bias)
    down = torch_mlp.pack_experts(weights.w2)
    # Wider than the weights, as fp32 is where float16 lacks the range.
    x = make_inputs(problem, 5, "uniform", CPU).hidden_states.double()
    gate, up = map(torch_mlp.pack_experts, weights.w13.chunk(2, dim=1))
    fused = torch_mlp.PackedFusedMlp(gate, up, down, ("none", ""), problem.activation, *biases)
    for expert in range(2):
        gemm1 = x @ weights.w13[expert].double().t() + weights.w13_bias[expert]
        expected = problem.activation(gemm1) @ weights.w2[expert].double().t() + weights.w2_bias[expert]
        torch.testing.assert_close(fused.unpacked(x, expert), expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weights_multiply_rows_of_a_wider_dtype(has_bias: bool) -> None:
    """As float16 weights do rows in fp32, on CPUs that pack them."""
    problem = small_problem(hidden_size=37, dtype="float32", has_bias=has_bias)
    weights = make_plain_weights(problem, CPU)
    biases = (weights.w13_bias, weights.w2_bias)
    plain = torch_mlp.PlainMlp(weights.w13, weights.w2, problem.activation, *biases)
    w13, w2 = map(torch_mlp.pack_experts, (weights.w13, weights.w2))
    x = make_inputs(problem, 5, "uniform", CPU).hidden_states.double()
    found = torch_mlp.PlainMlp(w13, w2, problem.activation, *biases)(x, 1)
    assert found.dtype == torch.float64
    assert torch.equal(found, plain(x, 1))
