"""MoEProblem: its refusals, its text, and its dispatcher through JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from moereg.errors import UnknownNameError
from moereg.spec.activations import Activation
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme

SIZES = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 96, "top_k": 2}
COUNTS = ("num_experts", "hidden_size", "intermediate_size", "top_k", "num_local_experts", "max_num_tokens")
FLAGS = (
    *("has_bias", "apply_router_weight_on_input", "graph_capture", "deterministic", "batch_invariant"),
    "exact_activations",
)


def make_problem(**changes: Any) -> MoEProblem:
    return MoEProblem(**{**SIZES, **changes})


def test_defaults() -> None:
    assert make_problem().to_dict() == {
        **SIZES,
        "dtype": "bfloat16",
        "quant": "unquantized",
        "activation": "silu",
        "activation_format": "standard",
        "num_local_experts": 8,
        "placement": "contiguous",
        **dict.fromkeys(set(FLAGS) - {"batch_invariant"}, False),
    }


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "must be at least 1, got 0"),
        (-3, "must be at least 1, got -3"),
        (2.0, "must be an integer, got 2.0"),
        (True, "must be an integer, got True"),
        ("8", "must be an integer, got '8'"),
    ],
)
def test_counts_are_checked(field: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} {text}$"):
        make_problem(**{"num_local_experts": 8, field: value})


@pytest.mark.parametrize("field", FLAGS)
def test_flags_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be True or False, got 'no'$"):
        make_problem(**{field: "no"})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_k": 9}, "be at most num_experts: a token takes each expert once at most, got top_k=9, num_experts=8"),
        ({"num_local_experts": 9}, "must be at most num_experts, got num_local_experts=9, num_experts=8"),
        ({"apply_router_weight_on_input": True}, "requires top_k = 1: an input has one routing weight, got top_k=2"),
        ({"gradients": "weights"}, "of names (hidden_states, topk_weights, weights, adapters), got 'weights'"),
        ({"gradients": {"weights"}, "quant": "nvfp4"}, "gradients of weights require unquantized weights, got nvfp4"),
        ({"gradients": {"topk_weights"}, "activation_format": "batched"}, "'batched' with gradients of topk_weights"),
        ({"gradients": {"weights", "topk_weights"}, "adapter_rank": 8}, "8 with gradients of (topk_weights, weights)"),
        ({"gradients": {"adapters"}}, "gradients of adapters require their largest rank, got adapter_rank=0"),
        ({"gradients": {"adapters"}, "adapter_rank": -1}, "adapter_rank must be at least 0, got -1"),
        ({"activation": None}, "activation must be a name or an Activation, got None"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make_problem(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float61"}, "unknown dtype 'float61', did you mean 'float16'? (known: bfloat16, float16, float32)"),
        ({"dtype": torch.int8}, "unknown dtype 'int8' (known: bfloat16, float16, float32)"),
        ({"placement": "round_robin"}, "unknown placement 'round_robin' (known: contiguous, map)"),
        ({"activation_format": "Batched"}, "format 'Batched', did you mean 'batched'? (known: batched, standard)"),
        ({"gradients": ["weight"]}, "did you mean 'weights'? (known: adapters, hidden_states, topk_weights, weights)"),
        ({"activation": "silo"}, "'silo', did you mean 'silu'? (known: gelu, gelu_tanh, relu2, silu, situ, swigluoai)"),
    ],
)
def test_unknown_names_list_the_nearest(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnknownNameError) as raised:
        make_problem(**changes)
    assert text in str(raised.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16, "torch.bfloat16"])
def test_dtype_spellings_are_one_value(dtype: Any) -> None:
    assert make_problem(dtype=dtype) == make_problem()
    assert hash(make_problem(dtype=dtype)) == hash(make_problem())
    assert make_problem(dtype=dtype).torch_dtype is torch.bfloat16


CUSTOM_SCHEME = QuantScheme(
    "int4_w4a8_g128_zp", QuantFormat("uint4", (1, 128), symmetric=False), QuantFormat("float8_e4m3fn", (1, -1))
)
PROBLEMS = [
    make_problem(),
    make_problem(dtype="fp16", quant="nvfp4", activation="swigluoai", has_bias=True, exact_activations=True),
    make_problem(activation=Activation("silu", limit=10)),
    make_problem(activation=Activation("swigluoai", alpha=1e-07, beta=-2, limit=None)),
    make_problem(activation=Activation("situ", gate_softcap=3, up_softcap=None)),
    make_problem(quant=CUSTOM_SCHEME),
    make_problem(quant=QuantScheme("weights_only", QuantFormat("int8", (1, -1)))),
    make_problem(num_local_experts=4, placement="map", activation_format="batched", max_num_tokens=17),
    make_problem(top_k=1, apply_router_weight_on_input=True, graph_capture=True, deterministic=True),
    make_problem(gradients=["weights", "hidden_states"]),
    make_problem(gradients=["adapters"], adapter_rank=8, quant="int8_w8a16"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_json_round_trip(problem: MoEProblem) -> None:
    values, text = problem.to_dict(), json.dumps(problem.to_dict())
    assert MoEProblem.from_dict(json.loads(text)) == MoEProblem.from_dict(values) == problem
    assert json.dumps(values) == text, "an argument is left alone"
    assert MoEProblem(**{**values, "quant": problem.quant}) == problem


def test_equal_problems_read_the_same() -> None:
    one, other = (make_problem(activation=Activation("silu", limit=limit)) for limit in (7, 7.0))
    assert one == other
    assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())


def test_text_names_what_is_unusual() -> None:
    assert str(make_problem()) == "E8 H64 I96 k2 bfloat16 unquantized silu"
    problem = make_problem(has_bias=True, num_local_experts=4, placement="map", activation_format="batched")
    assert str(problem).endswith("silu, has_bias, batched, 4 local experts, placement map")
    assert problem.is_expert_parallel
    assert not make_problem().is_expert_parallel
    assert str(make_problem(gradients={"weights", "topk_weights"})).endswith(
        "silu, gradients of topk_weights and weights"
    )
    assert str(make_problem(gradients={"adapters"}, adapter_rank=8)).endswith("gradients of adapters, adapter rank 8")


def test_a_layer_without_gradients_says_nothing_of_them() -> None:
    plain = make_problem(gradients=())
    assert plain == make_problem()
    assert "gradients" not in plain.to_dict()
    assert "gradients" not in repr(plain) + str(plain)
    assert "adapter" not in repr(plain) + str(plain) + str(plain.to_dict())
    trained = make_problem(gradients=("weights", "hidden_states", "weights"))
    assert trained.to_dict()["gradients"] == ["hidden_states", "weights"]
    assert repr(trained).endswith("max_num_tokens=None, gradients=['hidden_states', 'weights'])")
    assert "adapter" not in repr(trained) + str(trained.to_dict())
    adapted = make_problem(gradients=["adapters"], adapter_rank=8)
    assert adapted.to_dict()["adapter_rank"] == 8
    assert repr(adapted).endswith("gradients=['adapters'], adapter_rank=8)")
