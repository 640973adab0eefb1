"""Each planted fault is caught by the tolerance in every scheme that can have it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES, QuantScheme
from moereg.quantize import dequantize_weights, quantize_weights, unpack_nibbles
from moereg.reference import reference_experts, relative_error
from moereg.testing import faults
from moereg.testing.faults import FAULTS, plant_faults
from moereg.testing.tolerances import tolerance
from tests import conformance

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def expected_faults(scheme: QuantScheme) -> set[str]:
    """What can go wrong, from the scheme's fields."""
    both = {"experts rotated", "bias dropped"}
    fmt = scheme.weight
    if fmt is not None:
        both |= {"scale off by one group"}
        both |= {"global scale dropped"} if fmt.global_scale else set()
        both |= {"zero point dropped"} if not fmt.symmetric else set()
        both |= {"nibbles swapped"} if fmt.bits == 4 else set()
    return {f"{name} in {matrix}" for name in both for matrix in ("w13", "w2")} | {"gate and up swapped in w13"}


@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_every_fault_is_caught(name: str) -> None:
    scheme = QUANT_SCHEMES[name]
    problem = MoEProblem(num_experts=6, hidden_size=128, intermediate_size=64, top_k=2, quant=name, has_bias=True)
    weights = conformance.make_weights(problem, CPU)
    inputs = conformance.make_inputs(problem, 17, "uniform", CPU)
    call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    truth = reference_experts(problem, weights, *call)
    bound = tolerance(scheme, problem.dtype, truth.numel())
    before = {field: tensor.clone() for field, tensor in weights.tensors().items()}
    planted = dict(plant_faults(weights))
    assert set(planted) == expected_faults(scheme)
    for fault, spoiled in planted.items():
        error = relative_error(reference_experts(problem, spoiled, *call), truth)
        assert error > (10 if scheme.activation is None else 1.5) * bound, fault
    for field, tensor in weights.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), before[field].view(torch.uint8)), f"{field} was written to"


def test_faults_are_what_they_say() -> None:
    problem = MoEProblem(
        num_experts=3, hidden_size=64, intermediate_size=32, top_k=2, quant="int4_w4a16_g32_zp", has_bias=True
    )
    weights = conformance.make_weights(problem, CPU)
    w13, _ = dequantize_weights(weights, torch.float32)

    swapped = faults.gate_up_swapped(weights)
    assert swapped is not None
    assert torch.equal(dequantize_weights(swapped, torch.float32)[0], torch.cat((w13[:, 32:], w13[:, :32]), dim=1))
    assert swapped.w13_bias is not None
    assert weights.w13_bias is not None
    assert torch.equal(swapped.w13_bias[:, :32], weights.w13_bias[:, 32:])

    shifted = faults.scale_off_by_one_group(weights)
    assert shifted is not None
    assert shifted.w13_scale is not None
    assert weights.w13_scale is not None
    assert torch.equal(shifted.w13_scale, weights.w13_scale.flip(-1))

    dropped = faults.zero_point_dropped(weights)
    assert dropped is not None
    assert dropped.w13_zero_point is not None
    assert (unpack_nibbles(dropped.w13_zero_point, 2) == 8).all()

    nibbles = faults.nibbles_swapped(weights, "w2")
    assert nibbles is not None
    pairs = unpack_nibbles(weights.w2, 32).unflatten(-1, (16, 2))
    assert torch.equal(unpack_nibbles(nibbles.w2, 32), pairs.flip(-1).flatten(-2))
    assert torch.equal(nibbles.w13, weights.w13)


def test_scales_of_whole_matrices_move_to_the_next_expert() -> None:
    problem = MoEProblem(num_experts=3, hidden_size=64, intermediate_size=32, top_k=2, quant="fp8_tensor_dynamic")
    plain = conformance.make_plain_weights(problem, CPU)
    weights = quantize_weights(plain, problem.quant, separate_halves=True)
    shifted = faults.scale_off_by_one_group(weights, "w2")
    assert shifted is not None
    assert shifted.w2_scale is not None
    assert weights.w2_scale is not None
    assert torch.equal(shifted.w2_scale, weights.w2_scale.roll(1))
    halves = faults.scale_off_by_one_group(weights, "w13")
    assert halves is not None
    assert halves.w13_scale is not None
    assert weights.w13_scale is not None
    assert torch.equal(halves.w13_scale, weights.w13_scale.flip(1))


def test_faults_that_weights_cannot_have() -> None:
    problem = MoEProblem(num_experts=1, hidden_size=8, intermediate_size=4, top_k=1, activation="relu2")
    weights = conformance.make_weights(problem, CPU)
    assert not list(plant_faults(weights))
    one = dataclasses.replace(problem, quant=QUANT_SCHEMES["fp8_block128"])
    names = {name for name, _ in plant_faults(conformance.make_weights(one, CPU))}
    assert not names, "one group and one expert leave nothing to mix up"
    assert set(FAULTS) >= {"gate and up swapped", "nibbles swapped"}
