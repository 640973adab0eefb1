"""Weights, tokens and routes are such that faults exceed the bounds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moereg.numerics.tolerances import tolerance
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import ROUTINGS, make_expert_map, make_inputs, make_plain_weights, make_weights

CPU = torch.device("cpu")
PROBLEM = MoEProblem(num_experts=6, hidden_size=64, intermediate_size=48, top_k=2)


def test_routings_are_what_their_names_say() -> None:
    ids = {routing: make_inputs(PROBLEM, 60, routing, CPU).topk_ids for routing in ROUTINGS}
    counts = {routing: ids[routing].clamp(-1, 6).add(1).flatten().bincount(minlength=8) for routing in ROUTINGS}
    assert counts["uniform"][1:7].min() > 10
    assert counts["skewed"][1] > 3 * counts["skewed"][6]
    assert (ids["one_expert"].sort(1).values == torch.tensor([4, 5])).all()
    assert [counts["unmapped"][place] > 0 for place in (0, 7)] == [True, True]
    assert (ids["nowhere"] == 6).all()
    beside = (ids["unmapped"] != ids["uniform"]).nonzero().tolist()
    assert beside == [[0, 0], [30, 0], [59, 1]]
    assert [int(ids["unmapped"][row, slot]) for row, slot in beside] == [-1, 2**31 - 1, 6]
    assert all((one.sort(1).values.diff(dim=1) > 0).all() for name, one in ids.items() if name != "nowhere")
    assert all(one.dtype == torch.int32 for one in ids.values())


def test_inputs_and_weights_differ_by_seed_and_in_magnitude() -> None:
    one, same, other = (make_inputs(PROBLEM, 5, "uniform", CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(one.hidden_states, same.hidden_states)
    assert not torch.equal(one.hidden_states, other.hidden_states)
    assert one.topk_weights.min() > 0.09
    assert one.topk_weights.std() > 0.1
    copied = one.clone()
    copied.topk_ids.zero_()
    assert one.topk_ids.any()
    weights, others = (make_weights(PROBLEM, CPU, seed) for seed in (0, 1))
    assert not torch.equal(weights.w13, others.w13)
    assert weights.w13_bias is None
    w13, w2 = weights.w13.float(), weights.w2.float()
    gate, up = (half.std().item() for half in w13.chunk(2, dim=1))
    assert gate / up == pytest.approx(1.3 / 0.6, rel=0.1)
    assert w13[-1].std() / w13[0].std() == pytest.approx(2, rel=0.1)
    assert w2.std().item() * math.sqrt(48) == pytest.approx(1, rel=0.1)


def test_quantized_weights_differ_by_row_and_group_and_biases_with_the_bound() -> None:
    problem = dataclasses.replace(PROBLEM, quant="int8_w8a8", has_bias=True)
    plain, varied = (make_plain_weights(each, CPU) for each in (dataclasses.replace(PROBLEM, has_bias=True), problem))
    for dim, groups in ((2, 1), (1, 4)):
        spreads = []
        for weights in (plain, varied):
            w13 = weights.w13[:, :48].float()
            parts = w13.unflatten(2, (groups, -1)) if dim == 1 else w13
            magnitude = parts.pow(2).mean(dim=(1, 3) if dim == 1 else 2).log()
            spreads.append(magnitude.std(dim=1).mean().item())
        assert spreads[1] > 1.5 * spreads[0]
    assert varied.w2_bias.float().std() / plain.w2_bias.float().std() == pytest.approx(2, rel=0.15)


def test_static_activation_scales_are_of_other_tokens() -> None:
    weights = make_weights(dataclasses.replace(PROBLEM, quant="fp8_tensor_static"), CPU)
    sample = make_inputs(PROBLEM, 64, "uniform", CPU, seed=77).hidden_states
    assert weights.a13_scale.max().item() == pytest.approx(sample.abs().max().item() / 448, rel=0.02)
    assert make_weights(dataclasses.replace(PROBLEM, quant="fp8_tensor_dynamic"), CPU).a13_scale is None


def test_an_expert_map_has_local_experts_apart_and_in_reverse() -> None:
    mapped = dataclasses.replace(PROBLEM, num_local_experts=2, placement="map")
    found = make_expert_map(mapped, CPU)
    assert found.tolist() == [1, -1, 0, -1, -1, -1]
    assert found.dtype == torch.int32
    assert make_expert_map(PROBLEM, CPU) is None


def test_one_flip_may_be_all_of_the_error_of_a_small_layer_and_no_bound_is_above_a_half() -> None:
    many = tolerance("int8_w8a8", "float32")
    for sizes in ({"num_elements": 400}, {"num_elements": 900, "num_intermediate": 400}):
        found = tolerance("int8_w8a8", "float32", **sizes)
        assert found - many == pytest.approx(8 / 127 / 20, rel=1e-3)
    found = tolerance("fp8_channel_token", "bfloat16", 10_000) - tolerance("fp8_channel_token", "bfloat16")
    assert found == pytest.approx(8 / 8 / 100)
    assert tolerance("nvfp4", "bfloat16", 4) == tolerance("unquantized", "float32", 1, num_intermediate=1) == 0.5
    assert tolerance("unquantized", "bfloat16", 0) == 0.5
