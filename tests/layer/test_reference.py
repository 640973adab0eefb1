"""The reference itself, against sums written as loops over single numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moereg.numerics.reference import (
    ROUNDS_INTERMEDIATE,
    calibrate_activation_scales,
    reference_experts,
    relative_error,
    scheme_loss,
)
from moereg.numerics.tolerances import tolerance
from moereg.quantize import (
    activation_scale,
    dequantize_weights,
    quantize_dequantize_activations,
    quantize_weights,
    spans_tokens,
)
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = [name for name, scheme in QUANT_SCHEMES.items() if scheme.activation is not None]


def small(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 4, "hidden_size": 6, "intermediate_size": 5, "top_k": 2, "dtype": "float32"}
    return MoEProblem(**{**facts, **changes})


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"has_bias": True},
    "not gated": {"activation": "relu2", "has_bias": True},
    "weight on input": {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": True},
}


@pytest.mark.parametrize("bad", [-1, -(2**31), 4, 2**31 - 1, 2**40])
def test_ids_out_of_range_add_nothing(bad: int) -> None:
    problem = small()
    weights = make_weights(problem, CPU)
    x, topk_weights = torch.randn(2, 6), torch.rand(2, 2)
    found = reference_experts(problem, weights, x, topk_weights, torch.tensor([[bad, 2], [bad, bad]]))
    expected = reference_experts(small(top_k=1), weights, x[:1], topk_weights[:1, 1:], torch.tensor([[2]]))
    torch.testing.assert_close(found[:1], expected)
    assert not found[1].any()


def test_expert_map_renames_experts() -> None:
    problem = small(num_local_experts=2, placement="map")
    weights = make_weights(problem, CPU)
    x, topk_weights = torch.randn(3, 6), torch.rand(3, 2)
    expert_map = torch.tensor([1, -1, -1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [1, 2], [3, 9]])
    found = reference_experts(problem, weights, x, topk_weights, ids, expert_map, torch.float64)
    local = dataclasses.replace(problem, num_experts=2, placement="contiguous")
    renamed = torch.tensor([[1, 0], [-1, -1], [0, -1]])
    assert torch.equal(found, reference_experts(local, weights, x, topk_weights, renamed, dtype=torch.float64))
    assert found[::2].any(dim=1).all()
    assert not found[1].any()


def test_no_tokens() -> None:
    problem = small()
    empty = torch.zeros(0, 2)
    out = reference_experts(problem, make_weights(problem, CPU), torch.zeros(0, 6), empty, empty.int())
    assert out.shape == (0, 6)


def quantized_case(
    name: str | QuantScheme, num_tokens: int = 6, **changes: Any
) -> tuple[MoEProblem, ExpertWeights, Inputs]:
    facts = {"num_experts": 4, "hidden_size": 70, "intermediate_size": 40, "top_k": 2, "quant": name}
    problem = MoEProblem(**{**facts, **changes})
    return problem, make_weights(problem, CPU), make_inputs(problem, num_tokens, "uniform", CPU)


def slow(problem: MoEProblem, weights: ExpertWeights, inputs: Inputs) -> torch.Tensor:
    """Route by route and matrix by matrix in fp64, on restored weights."""
    scheme, local = problem.quant, inputs.topk_ids.tolist()
    w13, w2 = dequantize_weights(weights, torch.float64)

    def activated(gemm1: torch.Tensor) -> torch.Tensor:
        if not problem.activation.gated:
            return gemm1.clamp(min=0) ** 2
        gate, up = gemm1.chunk(2)
        return gate / (1 + (-gate).exp()) * up

    def weighted_input(token: int, slot: int) -> torch.Tensor:
        x = inputs.hidden_states[token].double()
        if problem.apply_router_weight_on_input:
            x = x * inputs.topk_weights[token, slot]
            if scheme.activation is not None:
                x = x.to(problem.torch_dtype).double()
        return x

    def scale_of(name: str, expert: int, whole_call: torch.Tensor | None) -> torch.Tensor | None:
        static = weights.tensors().get(f"{name}_scale")
        return whole_call if static is None else static.expand(problem.num_experts)[expert]

    def rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return quantize_dequantize_activations(x[None], scheme, scale, torch.float64)[0]

    def whole_call(rows: list[torch.Tensor]) -> torch.Tensor | None:
        return activation_scale(torch.stack(rows).abs().max(), scheme) if spans_tokens(scheme) else None

    routes = [
        (token, slot, expert)
        for token, experts in enumerate(local)
        for slot, expert in enumerate(experts)
        if 0 <= expert < problem.num_experts
    ]
    scale13 = whole_call([weighted_input(token, slot) for token, slot, _ in routes])
    middles = []
    for token, slot, expert in routes:
        gemm1 = w13[expert] @ rounded(weighted_input(token, slot), scale_of("a13", expert, scale13))
        if weights.w13_bias is not None:
            gemm1 = gemm1 + weights.w13_bias[expert].double()
        middle = activated(gemm1)
        middles.append(middle if scheme.activation is None else middle.to(problem.torch_dtype).double())
    scale2 = whole_call(middles)
    out = torch.zeros(len(local), problem.hidden_size, dtype=torch.float64)
    for (token, slot, expert), middle in zip(routes, middles, strict=True):
        gemm2 = w2[expert] @ rounded(middle, scale_of("a2", expert, scale2))
        if weights.w2_bias is not None:
            gemm2 = gemm2 + weights.w2_bias[expert].double()
        weight = 1.0 if problem.apply_router_weight_on_input else float(inputs.topk_weights[token, slot])
        out[token] += weight * gemm2
    return out


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_every_scheme_matches_slow_loops(name: str, changes: dict[str, Any]) -> None:
    problem, weights, inputs = quantized_case(name, **changes)
    found = reference_experts(problem, weights, *inputs.call, dtype=torch.float64)
    assert relative_error(found, slow(problem, weights, inputs)) < 1e-12
    assert found.dtype == torch.float64
    single = reference_experts(problem, weights, *inputs.call)
    assert single.dtype == torch.float32
    assert relative_error(single, found) < tolerance(problem.quant, problem.dtype, found.numel())


@pytest.mark.parametrize(("name", "computes"), [("nvfp4", "nvfp4_w4a16"), ("mxfp4_mxfp8", "mxfp4_w4a16")])
def test_follows_what_the_cell_computes(name: str, computes: str) -> None:
    problem, weights, inputs = quantized_case(name)
    plain = {field: tensor for field, tensor in weights.tensors().items() if not field.startswith("a")}
    expected = reference_experts(
        dataclasses.replace(problem, quant=QUANT_SCHEMES[computes]),
        ExpertWeights(**plain, quant=computes),
        *inputs.call,
    )
    found = reference_experts(problem, weights, *inputs.call, computes=computes)
    assert torch.equal(found, expected)
    assert relative_error(found, reference_experts(problem, weights, *inputs.call)) > 0.01


def test_what_cannot_be_computed() -> None:
    problem, weights, inputs = quantized_case("nvfp4_w4a16")
    text = r"^computes must have the weights of nvfp4_w4a16 and its activations or 16-bit ones, got nvfp4$"
    with pytest.raises(ValueError, match=text):
        reference_experts(problem, weights, *inputs.call, computes="nvfp4")
    other = dataclasses.replace(problem, quant=QUANT_SCHEMES["mxfp8"])
    with pytest.raises(ValueError, match=r"^the weights are nvfp4_w4a16 but the problem says mxfp8; make both name"):
        reference_experts(other, weights, *inputs.call)


@pytest.mark.parametrize("name", ROUNDING)
def test_the_intermediate_is_rounded_before_it_is_quantized(name: str) -> None:
    problem, weights, inputs = quantized_case(name, num_tokens=63)
    rounded = reference_experts(problem, weights, *inputs.call)
    assert ROUNDS_INTERMEDIATE
    assert torch.equal(reference_experts(problem, weights, *inputs.call, rounds_intermediate=True), rounded)
    error = relative_error(reference_experts(problem, weights, *inputs.call, rounds_intermediate=False), rounded)
    assert 1e-4 < error < tolerance(name, problem.dtype, rounded.numel())


@pytest.mark.parametrize("name", ROUNDING)
def test_an_intermediate_beyond_float16_stays_a_number(name: str) -> None:
    problem = small(dtype="float16", quant=name, hidden_size=128, intermediate_size=128)
    inputs = make_inputs(problem, 3, "uniform", CPU)
    weights = make_weights(problem, CPU)
    inputs.hidden_states[:] *= 1000
    inputs.topk_weights[:] *= 1e-3
    found = reference_experts(problem, weights, *inputs.call)
    wide = dataclasses.replace(problem, dtype="float32")
    assert relative_error(found, reference_experts(wide, weights, *inputs.call)) < tolerance(name, "float16", 3 * 128)


@pytest.mark.parametrize("name", ROUNDING)
def test_tokens_that_go_nowhere_change_no_scale(name: str) -> None:
    """Padding may hold anything, also where one scale is for all tokens."""
    problem, weights, inputs = quantized_case(name)
    before = reference_experts(problem, weights, *inputs.call)
    x = torch.cat((inputs.hidden_states, torch.full_like(inputs.hidden_states[:1], 1e30)))
    ids = torch.cat((inputs.topk_ids, torch.tensor([[-1, 4]], dtype=torch.int32)))
    after = reference_experts(problem, weights, x, torch.cat((inputs.topk_weights, torch.ones(1, 2))), ids)
    assert torch.equal(after[:-1], before)
    assert not after[-1].any()


@pytest.mark.parametrize("name", ["fp8_tensor_static", "nvfp4"])
def test_static_scales_may_be_one_number(name: str) -> None:
    problem, weights, inputs = quantized_case(name)
    one = dataclasses.replace(weights, a13_scale=torch.tensor(0.01), a2_scale=torch.tensor(0.005))
    each = dataclasses.replace(weights, a13_scale=torch.full((4,), 0.01), a2_scale=torch.full((4,), 0.005))
    found = reference_experts(problem, one, *inputs.call)
    assert torch.equal(found, reference_experts(problem, each, *inputs.call))
    assert relative_error(found, reference_experts(problem, weights, *inputs.call)) > 1e-3


def test_calibration() -> None:
    problem, _, inputs = quantized_case("unquantized")
    weights = make_weights(problem, CPU)
    ids = inputs.topk_ids.clamp(max=2)
    call = (inputs.hidden_states, inputs.topk_weights, ids)
    a13, a2 = calibrate_activation_scales(problem, weights, *call, "fp8_tensor_static")
    tokens = [(ids == expert).any(1) for expert in range(4)]
    expected = [inputs.hidden_states[rows].float().abs().max() / 448 for rows in tokens[:3]]
    # Nothing went to the last expert: it gets the largest of the others.
    assert a13.tolist() == [*map(float, expected), float(max(expected))]
    assert a2.shape == (4,)
    assert a2[3] == a2[:3].max()
    static = quantize_weights(weights, "fp8_tensor_static", a13_scale=a13, a2_scale=a2)
    quantized = dataclasses.replace(problem, quant=QUANT_SCHEMES["fp8_tensor_static"])
    assert scheme_loss(quantized, static, weights, *call) < 0.1


def test_a_scheme_that_a_plugin_makes_up() -> None:
    scheme = QuantScheme("int4_w4a8_g32", QuantFormat("uint4", (1, 32)), QuantFormat("float8_e4m3fn", (1, WHOLE)))
    problem, weights, inputs = quantized_case(scheme)
    found = reference_experts(problem, weights, *inputs.call, dtype=torch.float64)
    assert relative_error(found, slow(problem, weights, inputs)) < 1e-12
    assert relative_error(reference_experts(problem, weights, *inputs.call, computes="int4_w4a16_g32"), found) > 0.01


def test_relative_error() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0
    assert relative_error(one * 1.25, one) == pytest.approx(0.25)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), one))
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(one, torch.zeros(2)) == 5.0
    assert relative_error(torch.zeros(2), one) == 1.0
