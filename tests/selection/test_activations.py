"""Activations against their formulas, written out once more by hand."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from moereg.spec.activations import ACTIVATIONS, Activation

GATES = (-9.0, -1.5, 0.0, 0.75, 8.0)
UPS = (-8.5, -0.5, 0.0, 1.25, 9.0)


def by_hand(activation: Activation, gate: float, up: float) -> float:
    if activation.limit is not None:
        gate, up = min(gate, activation.limit), max(-activation.limit, min(up, activation.limit))
    if activation.up_softcap is not None:
        up = activation.up_softcap * math.tanh(up / activation.up_softcap)
    if activation.gate_softcap is not None:
        gated = activation.gate_softcap * math.tanh(gate / activation.gate_softcap) / (1 + math.exp(-gate))
    elif activation.name == "gelu":
        gated = 0.5 * gate * (1 + math.erf(gate / math.sqrt(2)))
    elif activation.name == "gelu_tanh":
        gated = 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gated = gate / (1 + math.exp(-activation.alpha * gate))
    return gated * (up + activation.beta)


@pytest.mark.parametrize(
    "activation",
    [
        *(activation for activation in ACTIVATIONS.values() if activation.gated),
        Activation("silu", limit=1.0),
        Activation("silu", alpha=1.5, beta=0.25),
        Activation("swigluoai", alpha=1.702, beta=1.0, limit=None),
        Activation("gelu", limit=2.0),
        Activation("situ", beta=0.25, limit=5.0, gate_softcap=0.75, up_softcap=1.5),
        Activation("situ", gate_softcap=4),
    ],
    ids=str,
)
def test_gated_maths(activation: Activation) -> None:
    gate = torch.tensor(GATES, dtype=torch.float64).repeat_interleave(len(UPS))
    up = torch.tensor(UPS, dtype=torch.float64).repeat(len(GATES))
    expected = torch.tensor([by_hand(activation, g, u) for g in GATES for u in UPS], dtype=torch.float64)
    found = activation(torch.cat((gate, up)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # The halves mean different things, so this cannot pass with gate and up swapped.
    assert not torch.allclose(activation(torch.cat((up, gate))), expected)


def test_relu2() -> None:
    assert ACTIVATIONS["relu2"](torch.tensor([[-2.0, 0.0, 3.0]])).tolist() == [[0.0, 0.0, 9.0]]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=str)
def test_keeps_shape_dtype_and_input(activation: Activation) -> None:
    gemm1 = torch.randn(3, 4, 8).to(torch.bfloat16)
    before = gemm1.clone()
    found = activation(gemm1)
    assert found.shape == (3, 4, 8 // activation.num_halves)
    assert found.dtype == torch.bfloat16
    assert torch.equal(gemm1, before)


def test_standard_values() -> None:
    swigluoai = ACTIVATIONS["swigluoai"]
    assert (swigluoai.alpha, swigluoai.beta, swigluoai.limit) == (1.702, 1.0, 7.0)
    assert Activation.from_name("swigluoai", limit=3.0).limit == 3.0
    situ = ACTIVATIONS["situ"]
    assert (situ.gate_softcap, situ.up_softcap, situ.limit, situ.beta) == (4.0, 25.0, None, 0.0)
    assert [name for name, activation in ACTIVATIONS.items() if not activation.gated] == ["relu2"]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"name": "silu", "gated": False}, "activation 'silu' is gated, got gated=False"),
        ({"name": "relu2"}, "activation 'relu2' is not gated, got gated=True"),
        ({"name": "silu", "limit": 0.0}, "swiglu_limit must be a positive finite number or None, got 0.0"),
        ({"name": "silu", "limit": -1}, "swiglu_limit must be a positive finite number or None, got -1"),
        ({"name": "silu", "limit": math.inf}, "swiglu_limit must be a positive finite number or None, got inf"),
        ({"name": "silu", "alpha": math.nan}, "activation alpha must be a finite number, got nan"),
        ({"name": "silu", "beta": math.inf}, "activation beta must be a finite number, got inf"),
        ({"name": "gelu", "alpha": 2.0}, "alpha is the slope inside the sigmoid, which 'gelu' does not have, got 2.0"),
        ({"name": "relu2", "gated": False, "alpha": 2.0}, "inside the sigmoid, which 'relu2' does not have, got 2.0"),
        ({"name": "relu2", "gated": False, "beta": 1.0}, "added to the up half, which 'relu2' does not have, got 1.0"),
        ({"name": "relu2", "gated": False, "limit": 1.0}, "clamps gate and up, but 'relu2' is not gated; leave it out"),
        ({"name": "situ"}, "'situ' takes a gate_softcap, got gate_softcap=None and up_softcap=None"),
        ({"name": "situ", "gate_softcap": 0.0}, "gate_softcap must be a positive finite number or None, got 0.0"),
        ({"name": "situ", "gate_softcap": math.inf}, "gate_softcap must be a positive finite number or None, got inf"),
        ({"name": "situ", "gate_softcap": 4.0, "up_softcap": -1}, "up_softcap must be a positive finite number or N"),
        ({"name": "situ", "gate_softcap": 4.0, "alpha": 2.0}, "which 'situ' does not have, got 2.0"),
        ({"name": "silu", "gate_softcap": 4.0}, "'silu' takes no soft caps, got gate_softcap=4.0 and up_softcap=None"),
        ({"name": "silu", "up_softcap": 25}, "'silu' takes no soft caps, got gate_softcap=None and up_softcap=25.0"),
    ],
)
def test_bad_values_are_refused(keywords: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Activation(**keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("silu", ACTIVATIONS["silu"]),
        ("swigluoai", ACTIVATIONS["swigluoai"]),
        ("silu(limit=10.0)", Activation("silu", limit=10)),
        ("silu(alpha=1e-05, beta=-0.5)", Activation("silu", alpha=1e-5, beta=-0.5)),
        ("swigluoai(limit=None)", Activation("swigluoai", alpha=1.702, beta=1.0)),
        ("relu2", ACTIVATIONS["relu2"]),
        ("situ", ACTIVATIONS["situ"]),
        ("situ(limit=7.0, gate_softcap=1.0)", Activation("situ", limit=7, gate_softcap=1, up_softcap=25)),
        ("situ(up_softcap=None)", Activation("situ", gate_softcap=4)),
    ],
)
def test_text_round_trip(text: str, value: Activation) -> None:
    assert Activation.from_name(text) == value
    assert str(value) == text


@pytest.mark.parametrize(
    "text",
    ["silu(limit)", "silu(limit=10.0", "silu(limit=10.0)x", "silu(gain=2.0)", "silu(limit=1.2.3)", "situ(cap=1)"],
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a name with scalars|could not convert"):
        Activation.from_name(text)


@pytest.mark.parametrize("scalar", ["limit", "alpha", "beta", "gate_softcap", "up_softcap"])
def test_scalars_that_no_tensor_takes_are_refused(scalar):
    standard = ACTIVATIONS["situ" if "softcap" in scalar else "swigluoai"]
    value = dataclasses.replace(standard, **{scalar: 3e38})
    for dtype in (torch.float32, torch.bfloat16):
        value(torch.ones(1, 4, dtype=dtype))
    with pytest.raises(ValueError, match=rf"{scalar} must be .*, got 1e\+308"):
        dataclasses.replace(standard, **{scalar: 1e308})
