"""float16 layers whose gates leave the range of float16, while the reference's results do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.kernels.plain import mlp as torch_mlp
from moereg.layer import make_kernel
from moereg.problem import MoEProblem
from moereg.quantize import quantize_weights
from moereg.reference import reference_experts, relative_error
from moereg.testing.inputs import make_inputs, make_plain_weights
from moereg.tolerances import tolerance
from moereg.weights import ExpertWeights

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
    problem = MoEProblem(
        num_experts=3,
        hidden_size=64,
        intermediate_size=I,
        top_k=2,
        dtype="float16",
        activation=activation,
        quant=quant,
        activation_format=activation_format,
    )
    weights = extreme_weights(problem)
    weights = weights if quant == "unquantized" else quantize_weights(weights, quant)
    selection = select_backend(problem, "cpu")
    decisions = [decision for decision in selection.decisions if decision.accepted]
    for decision in decisions:
        kernel = make_kernel(problem, weights, dataclasses.replace(selection, decisions=(decision,)))
        # With few rows an expert a CPU multiplies in float16, with more in fp32 where that is faster.
        for num_tokens in (1, 40):
            inputs = make_inputs(problem, num_tokens, "uniform", CPU)
            x = inputs.hidden_states * (3000 if problem.activation.gated else 100)
            call = (x, inputs.topk_weights, inputs.topk_ids)
            truth = reference_experts(problem, weights, *call)
            assert truth.isfinite().all()
            assert relative_error(kernel(*call), truth) < tolerance(quant, "float16"), (decision.experts, num_tokens)


class Half:
    """Halves rows; a number over 4 counts as one that left the range."""

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return torch.where(x > 4, torch.inf, x / 2)


def test_rows_are_repeated_one_by_one() -> None:
    mlp = torch_mlp.RepeatingMlp(Half(), lambda x, expert: x * 100)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]], dtype=torch.float16)
    assert mlp(x, 0).tolist() == [[0.5, 1.0], [300.0, 500.0], [2.0, 2.0]]
    assert mlp(x[:1], 0).dtype == torch.float16


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_packed_weights_are_read_back(activation: str) -> None:
    problem = MoEProblem(
        num_experts=2,
        hidden_size=37,
        intermediate_size=I,
        top_k=1,
        dtype="float32",
        activation=activation,
        has_bias=True,
    )
    weights = make_plain_weights(problem, CPU)
    assert weights.w13_bias is not None
    biases = (weights.w13_bias, weights.w2_bias)
    plain = torch_mlp.PlainMlp(weights.w13, weights.w2, problem.activation, *biases)
    down = torch_mlp.pack_experts(weights.w2)
    x = make_inputs(problem, 5, "uniform", CPU).hidden_states
    for parts in ((weights.w13,), weights.w13.chunk(2, dim=1)):
        packed = tuple(map(torch_mlp.pack_experts, parts))
        mlp = torch_mlp.UnpackingMlp(packed, down, problem.activation, *biases)
        for expert in range(2):
            assert torch.equal(mlp(x, expert), plain(x, expert))
