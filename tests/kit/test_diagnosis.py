"""Wrong layers and the mistakes that the kit names: each usual one by its name, others by none."""

import dataclasses

import pytest
import torch

from moereg.numerics.reference import LayerCall, reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.quantize import dequantize_weights
from moereg.spec.activations import ACTIVATIONS
from moereg.spec.problem import MoEProblem
from moereg.testing.diagnosis import causes_in, diagnose, split_message, worded
from moereg.testing.inputs import make_inputs, make_weights

_CPU = torch.device("cpu")


def _problem(**changes):
    sizes = {"num_experts": 6, "num_local_experts": 6, "top_k": 2, "hidden_size": 136, "intermediate_size": 72}
    return MoEProblem(**{**sizes, **changes})


def _layer(
    problem, inputs, w13, w2, b13=None, b2=None, activation=None, rounded=lambda x: x, shift=0, scales_bias=True
):
    """A layer in plain torch, bf16 between the products as a kernel has it, from dense matrices."""
    x, weights = inputs.hidden_states, inputs.topk_weights
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, ids in enumerate(inputs.topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            expert = (expert + shift) % problem.num_experts
            gemm1 = w13[expert].float() @ rounded(x[token].float())
            hidden = (activation or problem.activation)(gemm1 if b13 is None else gemm1 + b13[expert].float())
            gemm2 = w2[expert].float() @ rounded(hidden.bfloat16().float())
            bias = 0 if b2 is None else b2[expert].float()
            out[token] += weights[token, slot] * (gemm2 + bias * scales_bias) + bias * (not scales_bias)
    return out.bfloat16()


def _setting(**changes):
    problem = _problem(**changes)
    weights, inputs = make_weights(problem, _CPU), make_inputs(problem, 9, "uniform", _CPU)
    return problem, weights, inputs, reference_experts(problem, weights, *inputs.call)


def _names(setting, out, expert_map=None):
    problem, weights, inputs, truth = setting
    return diagnose(LayerCall.of(problem, weights, *inputs.call, expert_map), out.to(torch.bfloat16), truth)


def _with_weights(inputs, weights):
    return dataclasses.replace(inputs, topk_weights=weights)


def _e4m3(x):
    return x.to(torch.float8_e4m3fn).float()


def _cut(count):
    return lambda x: torch.cat([x[:-count], torch.zeros(count)])


# A layer gone wrong, from the problem, the inputs and the dense matrices; the words that its diagnosis has to have.
_MISTAKES = {
    "gate and up swapped": lambda p, i, w13, w2: _layer(p, i, w13.roll(72, 1), w2),
    "read in turn": lambda p, i, w13, w2: _layer(p, i, torch.cat([w13[:, 0::2], w13[:, 1::2]], 1), w2),
    "w13 transposed": lambda p, i, w13, w2: _layer(p, i, w13.reshape(6, 136, 144).mT, w2),
    "w2 transposed": lambda p, i, w13, w2: _layer(p, i, w13, w2.reshape(6, 72, 136).mT),
    "routing weights omitted": lambda p, i, w13, w2: _layer(
        p, _with_weights(i, torch.ones_like(i.topk_weights)), w13, w2
    ),
    "applied twice": lambda p, i, w13, w2: _layer(p, _with_weights(i, i.topk_weights**2), w13, w2),
    "off by one": lambda p, i, w13, w2: _layer(p, i, w13, w2, shift=1),
    "w13 of the previous expert": lambda p, i, w13, w2: _layer(p, i, w13.roll(1, 0), w2),
    "w2 of the next expert": lambda p, i, w13, w2: _layer(p, i, w13, w2.roll(-1, 0)),
    "activation gelu": lambda p, i, w13, w2: _layer(p, i, w13, w2, activation=ACTIVATIONS["gelu"]),
    "the last 8 of 136 columns of hidden_states": lambda p, i, w13, w2: _layer(
        p, i, w13, w2, rounded=lambda x: _cut(8)(x) if len(x) == 136 else x
    ),
    "the last 8 of 72 columns of the intermediate": lambda p, i, w13, w2: _layer(
        p, i, w13, w2, rounded=lambda x: _cut(8)(x) if len(x) == 72 else x
    ),
    "activations rounded through 8 bits": lambda p, i, w13, w2: _layer(p, i, w13, w2, rounded=_e4m3),
    "weights rounded through 8 bits": lambda p, i, w13, w2: _layer(p, i, _e4m3(w13), _e4m3(w2)),
}


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_usual_mistake_is_named(name):
    setting = problem, weights, inputs, _ = _setting()
    found = _names(setting, _MISTAKES[name](problem, inputs, weights.w13, weights.w2))
    assert any(name in one for one in found), found
    assert len(found) == 1 or name == "activation gelu", found  # Its tanh form differs by less than bfloat16 shows.


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ({"b13": None}, "bias of w13 forgotten"),
        ({"b2": None}, "bias of w2 forgotten"),
        ({"b13": None, "b2": None}, "both biases forgotten"),
        ({"scales_bias": False}, "bias of w2 not scaled by the routing weight"),
        ({}, None),
    ],
)
def test_a_mistake_with_a_bias_is_named(mistake, name):
    setting = problem, weights, inputs, _ = _setting(has_bias=True, activation="swigluoai")
    biases = {"b13": weights.w13_bias, "b2": weights.w2_bias}
    found = _names(setting, _layer(problem, inputs, weights.w13, weights.w2, **{**biases, **mistake}))
    assert found == (() if name is None else (name,))


# Local experts of routes to 8 experts of which 4 are local, from the ids and the map, as a wrong kernel has them.
_MISPLACED = {
    "expert_map ignored": lambda ids, expert_map: torch.where(ids < 4, ids, -1),
    "modulo": lambda ids, expert_map: ids % 4,
    "read as a mask": lambda ids, expert_map: torch.where(expert_map[ids] < 0, -1, ids.div(2, rounding_mode="floor")),
    "with the last one's weights": lambda ids, expert_map: expert_map[ids] % 4,
    "with the first one's weights": lambda ids, expert_map: expert_map[ids].clamp(min=0),
    "experts off by one": lambda ids, expert_map: torch.where(expert_map[ids] < 0, -1, (expert_map[ids] + 1) % 4),
}


@pytest.mark.parametrize(
    ("placement", "name"),
    [("map", name) for name in _MISPLACED] + [("contiguous", name) for name in _MISPLACED if "mask" not in name],
)
def test_a_mistake_with_the_placement_of_experts_is_named(name, placement):
    problem, weights, inputs, _ = _setting(num_experts=8, num_local_experts=4, placement=placement)
    expert_map = torch.tensor([3, -1, 2, -1, 1, -1, 0, -1] if placement == "map" else [-1] * 4 + [0, 1, 2, 3])
    truth = reference_experts(problem, weights, *inputs.call, expert_map.int())
    wrong = dataclasses.replace(inputs, topk_ids=_MISPLACED[name](inputs.topk_ids.long(), expert_map))
    out = reference_experts(problem, weights, *wrong.call)
    (found,) = _names((problem, weights, inputs, truth), out, expert_map.int())
    assert name in found


@pytest.mark.parametrize("placement", ["map", "contiguous"])
def test_rows_that_an_ignored_map_leaves_unwritten_are_named(placement):
    problem, weights, inputs, _ = _setting(num_experts=8, num_local_experts=4, placement=placement)
    expert_map = torch.tensor([3, -1, 2, -1, 1, -1, 0, -1] if placement == "map" else [-1] * 4 + [0, 1, 2, 3])
    truth = reference_experts(problem, weights, *inputs.call, expert_map.int())
    ids = inputs.topk_ids.long()
    lost = ((expert_map[ids] >= 0) & (ids >= 4)).any(1)
    assert 0 < lost.sum() < len(lost)
    out = truth.masked_fill(lost[:, None], float("nan"))
    (found,) = _names((problem, weights, inputs, truth), out, expert_map.int())
    assert found == "expert_map ignored (topk_ids taken for local experts)"


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_zp", "mxfp4_w4a16", "int8_w8a16"])
def test_omitted_scales_are_named(scheme):
    setting = problem, weights, inputs, _ = _setting(quant=scheme, hidden_size=128, intermediate_size=64)
    w2_scale = torch.ones_like(weights.w2_scale.float()).to(weights.w2_scale.dtype)
    spoiled = dataclasses.replace(weights, w2_scale=w2_scale)
    assert _names(setting, _layer(problem, inputs, *dequantize_weights(spoiled))) == ("scales of w2 omitted",)
    assert not _names(setting, _layer(problem, inputs, *dequantize_weights(weights)))


def test_missing_rows_and_columns_are_counted():
    setting = _setting()
    truth = setting[-1]
    cut = truth.clone()
    cut[-2:] = float("nan")
    assert _names(setting, cut) == ("the last 2 of 9 rows of out are NaN, as if they were not written",)
    cut = truth.clone()
    cut[:, -8:] = 0
    assert _names(setting, cut) == ("the last 8 of 136 columns of out are wrong",)
    assert _names(setting, torch.full_like(truth, float("nan"))) == ("out is NaN, as if it was not written",)
    assert _names(setting, truth[:0]) == ()


def test_mistakes_with_the_routing_weights_of_one_expert_a_token_are_named():
    setting = problem, weights, inputs, _ = _setting(top_k=1)
    omitted = _with_weights(inputs, torch.ones_like(inputs.topk_weights))
    # Of a sum of 1, weights that are left out and normalized ones are equal: both are named.
    names = _names(setting, _layer(problem, omitted, weights.w13, weights.w2))
    assert names == ("routing weights omitted", "routing weights normalized to a sum of 1")
    scaled = (inputs.hidden_states * inputs.topk_weights).bfloat16()
    other_side = dataclasses.replace(omitted, hidden_states=scaled)
    (name,) = _names(setting, _layer(problem, other_side, weights.w13, weights.w2))
    assert name == "routing weights applied to the input instead of the output"


def _noise(truth, share):
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3))
    return truth + share * noise * truth.norm() / noise.norm()


# Mistakes that nobody listed.
_UNKNOWN = {
    "5 % of noise": lambda truth: _noise(truth, 0.05),
    "3 % of noise": lambda truth: _noise(truth, 0.03),
    "as much noise as signal": lambda truth: _noise(truth, 1.0),
    "5 % larger": lambda truth: truth * 1.05,
    "negated": lambda truth: -truth,
    "magnitudes": lambda truth: truth.abs(),
    "columns shifted": lambda truth: truth.roll(1, 1),
    "rows shifted": lambda truth: truth.roll(1, 0),
    "columns reversed": lambda truth: truth.flip(1),
    "every other column missing": lambda truth: truth * (torch.arange(truth.shape[1]) % 2),
    "first columns missing": lambda truth: torch.cat([torch.zeros(len(truth), 8), truth[:, 8:]], 1),
    "clamped": lambda truth: truth.clamp(-0.3 * truth.abs().max(), 0.3 * truth.abs().max()),
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("name", _UNKNOWN)
def test_an_unknown_mistake_matches_none(name):
    setting = _setting()
    assert _names(setting, _UNKNOWN[name](setting[-1])) == ()


def test_few_numbers_resemble_nothing_by_chance():
    """A mistake of 5 % where a layer was made simple; a routing weight may be as large."""
    setting = _setting(num_experts=1, num_local_experts=1, top_k=1, hidden_size=8, intermediate_size=8)
    truth = setting[-1]
    for row in range(len(truth)):
        problem, weights, inputs, _ = setting
        inputs = dataclasses.replace(inputs, **{name: value[row : row + 1] for name, value in vars(inputs).items()})
        one = problem, weights, inputs, truth[row : row + 1]
        assert not [name for name in _names(one, 1.05 * one[-1]) if not name.startswith("routing weights")]


def test_a_right_layer_matches_none():
    setting = problem, weights, inputs, truth = _setting()
    out = _layer(problem, inputs, weights.w13, weights.w2)
    assert relative_error(out, truth) <= layer_tolerance(problem, len(out))
    assert _names(setting, out) == ()


def test_causes_are_read_back_from_a_message():
    first = "error 1, bound 2" + worded(["the last 8 of 48 columns of out are wrong", "out is late"])
    assert first == "error 1, bound 2; likely causes: the last 8 of 48 columns of out are wrong, or out is late"
    assert causes_in(first) == ("the last N of N columns of out are wrong", "out is late")
    assert causes_in("x" + worded(["out is late"])) == ("out is late",)
    assert causes_in("x" + worded([])) == ("x",)
    assert split_message(first) == ("error 1, bound 2", ("the last 8 of 48 columns of out are wrong", "out is late"))
    one, other = "T=1 uniform: error 2.5e-02, bound 9e-03", "error nan, bound 1e-02"
    assert causes_in(one) == causes_in(other)
    assert causes_in(f"{other}; rows [1] of 2 are not finite") == causes_in(f"{one}; rows [0, 2] of 3 are not finite")
    assert causes_in(f"{other}; rows [1] of 2 are not finite") != causes_in(one)
