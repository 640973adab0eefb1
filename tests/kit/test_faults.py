"""Each planted fault is caught by the tolerance in every scheme that can have it."""

from __future__ import annotations

import dataclasses
from typing import Final

import pytest
import torch

from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.quantize import dequantize_weights, quantize_weights, unpack_nibbles
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.testing import faults
from moereg.testing.faults import FAULTS, plant_faults
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


EVERYWHERE: Final = ("gate and up swapped", "experts rotated", "bias dropped")
SCALED: Final = ("scale off by one group",)
PACKED: Final = (*SCALED, "nibbles swapped")
# Possible faults in each scheme, besides `EVERYWHERE`. A scheme that is new has to be added here.
FAULTS_OF: Final[dict[str, tuple[str, ...]]] = {
    "unquantized": (),
    "fp8_tensor_static": SCALED,
    "fp8_tensor_dynamic": SCALED,
    "fp8_channel_token": SCALED,
    "fp8_block128": SCALED,
    "mxfp8": SCALED,
    "nvfp4": (*PACKED, "global scale dropped"),
    "nvfp4_w4a16": (*PACKED, "global scale dropped"),
    "mxfp4_w4a16": PACKED,
    "mxfp4_mxfp8": PACKED,
    "int8_w8a8": SCALED,
    "int8_w8a16": SCALED,
    "nf4": PACKED,
    "nf4_dq": (*PACKED, "global scale dropped"),
    "int4_w4a8_g128": PACKED,
    "int4_w4a8_g128_token": PACKED,
    **{f"int4_w4a16_g{group}": PACKED for group in (32, 64, 128, "all")},
    **{f"int4_w4a16_g{group}_zp": (*PACKED, "zero point dropped") for group in (32, 64, 128, "all")},
}
# Halves are in w13 only.
PLACES: Final = {name: ("w13",) if name == "gate and up swapped" else ("w13", "w2") for name in FAULTS}


def planted_in(scheme: str) -> set[str]:
    return {f"{name} in {matrix}" for name in (*EVERYWHERE, *FAULTS_OF[scheme]) for matrix in PLACES[name]}


def test_no_scheme_and_no_fault_is_left_out() -> None:
    assert set(FAULTS_OF) == set(QUANT_SCHEMES)
    assert {name for names in FAULTS_OF.values() for name in names} | set(EVERYWHERE) == set(FAULTS)


@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_every_fault_is_caught_in_the_reference(name: str) -> None:
    problem = MoEProblem(num_experts=6, hidden_size=128, intermediate_size=64, top_k=2, quant=name, has_bias=True)
    weights = make_weights(problem, CPU)
    call = make_inputs(problem, 17, "uniform", CPU).call
    truth = reference_experts(problem, weights, *call)
    bound = tolerance(problem.quant, problem.dtype, truth.numel())
    before = {field: tensor.clone() for field, tensor in weights.tensors().items()}
    planted = dict(plant_faults(weights))
    assert set(planted) == planted_in(name)
    for field, tensor in weights.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), before[field].view(torch.uint8)), f"{field} was written to"
    for fault, spoiled in planted.items():
        error = relative_error(reference_experts(problem, spoiled, *call), truth)
        assert error > (10 if problem.quant.activation is None else 1.5) * bound, fault


def test_faults_are_what_they_say() -> None:
    problem = MoEProblem(
        num_experts=3, hidden_size=64, intermediate_size=32, top_k=2, quant="int4_w4a16_g32_zp", has_bias=True
    )
    weights = make_weights(problem, CPU)
    w13, _ = dequantize_weights(weights, torch.float32)

    swapped = faults.gate_up_swapped(weights)
    assert torch.equal(dequantize_weights(swapped, torch.float32)[0], torch.cat((w13[:, 32:], w13[:, :32]), dim=1))
    assert torch.equal(swapped.w13_bias[:, :32], weights.w13_bias[:, 32:])

    shifted = faults.scale_off_by_one_group(weights)
    assert torch.equal(shifted.w13_scale, weights.w13_scale.flip(-1))

    dropped = faults.zero_point_dropped(weights)
    assert (unpack_nibbles(dropped.w13_zero_point, 2) == 8).all()

    nibbles = faults.nibbles_swapped(weights, "w2")
    pairs = unpack_nibbles(weights.w2, 32).unflatten(-1, (16, 2))
    assert torch.equal(unpack_nibbles(nibbles.w2, 32), pairs.flip(-1).flatten(-2))
    assert torch.equal(nibbles.w13, weights.w13)


def test_scales_of_whole_matrices_move_to_the_next_expert() -> None:
    problem = MoEProblem(num_experts=3, hidden_size=64, intermediate_size=32, top_k=2, quant="fp8_tensor_dynamic")
    plain = make_plain_weights(problem, CPU)
    weights = quantize_weights(plain, problem.quant, separate_halves=True)
    shifted = faults.scale_off_by_one_group(weights, "w2")
    assert torch.equal(shifted.w2_scale, weights.w2_scale.roll(1))
    halves = faults.scale_off_by_one_group(weights, "w13")
    assert torch.equal(halves.w13_scale, weights.w13_scale.flip(1))


def test_faults_that_weights_cannot_have() -> None:
    problem = MoEProblem(num_experts=1, hidden_size=8, intermediate_size=4, top_k=1, activation="relu2")
    weights = make_weights(problem, CPU)
    assert not list(plant_faults(weights))
    one = dataclasses.replace(problem, quant=QUANT_SCHEMES["fp8_block128"])
    assert not list(plant_faults(make_weights(one, CPU))), "one group and one expert leave nothing to mix up"
