"""QuACK's backend on a CPU: its own kernels interpreted, QuACK's products and epilogues by a torch copy."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg.backends.cutlass_moe import QuackCodesExperts, QuackExperts
from moereg.experts import Experts
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.spec.activations import Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from moereg.testing.interpreter import patch_interpreter
from moereg.weights.layouts import deinterleave_gate_up
from tests.support import quack_copy
from tests.support.experts_run import CPU, error_of, run_experts

SM90 = Platform.from_name("cuda:sm90")
CODES = ("fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic")
OURS = ("moereg.kernels.quack", "moereg.backends._cutlass.interleaved")

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def _with_copy(folder: str) -> Iterator[None]:
    """QuACK is the copy, and so it is for modules that import it meanwhile."""

    def is_concerned(name: str) -> bool:
        return name.partition(".")[0] == "quack" or name.startswith(OURS)

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_concerned(name)}
    sys.modules.update(quack_copy.modules(folder))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if is_concerned(name)]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture(scope="module", autouse=True)
def _quack() -> Iterator[None]:
    patch_interpreter()
    with _with_copy("/folder/of/kernels"):
        yield


def class_of(quant: str) -> type[Experts]:
    return QuackExperts if quant == "unquantized" else QuackCodesExperts


def make_problem(quant: str, **changes: Any) -> MoEProblem:
    sizes = {"num_experts": 5, "hidden_size": 72, "intermediate_size": 40, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": quant, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"placement": "map", "num_local_experts": 3},
        {"num_local_experts": 3},
        {"num_local_experts": 1},
        {"top_k": 1, "apply_router_weight_on_input": True},
    ],
    ids=["all", "map", "some", "one", "weight-on-input"],
)
@pytest.mark.parametrize("quant", ["unquantized", *CODES])
def test_products_match_the_reference(quant: str, changes: dict[str, Any]) -> None:
    problem = make_problem(quant, **changes)
    assert error_of(class_of(quant), problem, SM90, 6, routing="unmapped") < layer_tolerance(problem, 6)


@pytest.mark.parametrize(
    "activation",
    [
        Activation.from_name("gelu"),
        Activation.from_name("gelu_tanh"),
        Activation.from_name("swigluoai"),
        Activation.from_name("relu2"),
        Activation("silu", alpha=1.3, beta=0.5, limit=0.75),
    ],
    ids=["gelu", "gelu_tanh", "swigluoai", "relu2", "scalars"],
)
def test_epilogues_match_the_reference(activation: Activation) -> None:
    for quant in ("unquantized", "fp8_channel_token"):
        problem = make_problem(quant, activation=activation, has_bias=True, dtype="float16", intermediate_size=8)
        assert error_of(class_of(quant), problem, SM90, 3) < layer_tolerance(problem, 3)


def test_names_tell_epilogues_apart() -> None:
    """Of functions of installed packages QuACK looks at the names alone."""
    epilogues = importlib.import_module("moereg.kernels.quack")
    functions = [
        ("silu", True, 1.0, 0.0, None),
        ("silu", True, 1.0, 0.0, 7.0),
        ("silu", True, 1.0, 0.0, 10.0),
        ("gelu", True, 1.0, 0.0, None),
        ("gelu_tanh", True, 1.0, 0.0, None),
        ("swigluoai", True, 1.702, 1.0, 7.0),
        ("relu2", False, 1.0, 0.0, None),
    ]
    # Operands are in QuACK's key beside the name.
    made = [epilogues.gate_up_epilogue(epilogues.ActivationConstant(*facts), False, False) for facts in functions]
    names = {epilogue.fn.__qualname__ for epilogue in (*made, epilogues.down_epilogue(False, False))}
    assert len(names) == len(functions) + 1
    # Code that changes changes them too.
    assert all(name.endswith(epilogues._source_digest()) for name in names)


def test_routes_to_nobody_add_nothing_whatever_their_weights_are() -> None:
    for quant in ("unquantized", "fp8_channel_token"):
        problem = make_problem(quant)
        inputs = make_inputs(problem, 3, "nowhere", CPU)
        inputs.topk_weights.fill_(float("nan"))
        found = run_experts(class_of(quant), problem, make_weights(problem, CPU), inputs, SM90)
        assert torch.equal(found, torch.zeros_like(found))


def test_more_tokens_need_no_less_workspace() -> None:
    for quant in ("unquantized", *CODES):
        problem = make_problem(quant)
        shapes = [class_of(quant)(problem, SM90).workspace_shapes(problem, tokens) for tokens in (1, 2, 7, 64, 4096)]
        for fewer, more in itertools.pairwise(shapes):
            assert all(small <= large for (small,), (large,) in zip(fewer, more, strict=True))


def test_permuted_weights_can_be_put_back() -> None:
    problem = make_problem("fp8_channel_token", has_bias=True)
    weights = make_weights(problem, CPU)
    permuted = QuackCodesExperts(problem, SM90).permute_weights(weights, problem)
    codes = permuted["w13"].view(torch.uint8)
    assert not codes[..., 72:].any()
    assert not permuted["w2"].view(torch.uint8)[..., 40:].any()
    assert torch.equal(deinterleave_gate_up(codes[..., :72]), weights.w13.view(torch.uint8))
    assert torch.equal(deinterleave_gate_up(permuted["w13_scale"], dim=-1), weights.w13_scale.squeeze(2))
    assert permuted["w13_bias"].dtype == torch.float32


def test_few_rows_take_short_tiles_and_equal_tiles_are_one_object() -> None:
    products = importlib.import_module("moereg.kernels.quack")
    for capability, has_codes in itertools.product((9, 10), (False, True)):
        few, many = (products.select_config(capability, rows, has_codes) for rows in (64, 65))
        assert few.tile_m < many.tile_m
        # QuACK's cache of launches tells configurations apart by identity.
        assert products.select_config(capability, 1, has_codes) is few
        assert products.select_config(capability, 1000, has_codes) is many
        assert few.device_capacity == many.device_capacity == capability


@pytest.mark.parametrize(("name", "capability"), [("cuda:sm90", 9), ("cuda:sm100", 10), ("cuda:sm103", 10)])
def test_the_platform_says_which_tiles(name: str, capability: int) -> None:
    problem = make_problem("unquantized")
    platform = Platform.from_name(name)
    inputs = make_inputs(problem, 2, "uniform", CPU)
    quack_copy.EpiMod.calls.clear()
    run_experts(QuackExperts, problem, make_weights(problem, CPU), inputs, platform)
    assert [config.device_capacity for config in quack_copy.EpiMod.calls] == [capability, capability]


def test_tokens_may_begin_anywhere_and_take_weights_in_fp32() -> None:
    problem = make_problem("unquantized", top_k=1, apply_router_weight_on_input=True)
    inputs, weights = make_inputs(problem, 3, "uniform", CPU), make_weights(problem, CPU)
    inputs.topk_weights.fill_(1 + 2.0**-8 - 2.0**-12)  # 1 in 16 bits.
    inputs.hidden_states.fill_(2 - 2.0**-7)
    inner = QuackExperts(problem, SM90).implementation
    call = SimpleNamespace(inputs=inputs)
    expected = (inputs.hidden_states.float() * inputs.topk_weights).bfloat16()
    assert torch.equal(inner._inputs(call, torch.empty(0)).rows, expected)
    problem = make_problem("unquantized")
    inputs = make_inputs(problem, 3, "uniform", CPU)
    expected = run_experts(QuackExperts, problem, weights, inputs, SM90)
    shifted = torch.cat([inputs.hidden_states.new_zeros(1), inputs.hidden_states.view(-1)])[1:].view(3, -1)
    inputs = dataclasses.replace(inputs, hidden_states=shifted)
    assert torch.equal(run_experts(QuackExperts, problem, weights, inputs, SM90), expected)


def test_compiling_is_announced_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    interleaved = importlib.import_module("moereg.backends._cutlass.interleaved")
    monkeypatch.setattr(interleaved, "_COMPILED", set())
    caplog.set_level(logging.INFO, logger="moereg")
    problem = make_problem("unquantized")
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 2, "uniform", CPU)
    run_experts(QuackExperts, problem, weights, inputs, SM90)
    (line,) = caplog.messages
    assert line.startswith("compiling 2 kernels of cutlass takes about 6 s; the next process finds them in /folder/of")
    run_experts(QuackExperts, problem, weights, inputs, SM90)
    run_experts(QuackExperts, dataclasses.replace(problem, top_k=3), weights, inputs, SM90)
    assert len(caplog.messages) == 1
    # Another function between the products is another kernel; the second product is the same.
    other = dataclasses.replace(problem, activation=Activation.from_name("gelu"))
    run_experts(QuackExperts, other, weights, inputs, SM90)
    assert caplog.messages[1].startswith("compiling a kernel of cutlass takes about 3 s")
