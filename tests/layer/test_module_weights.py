"""A MoELayer follows its weights, and says what it does not follow."""

from __future__ import annotations

import gc
import io
import re
import weakref

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.layer import kernel as moe_kernel
from moereg.nn import export_op as exported
from moereg.nn.module import MoELayer
from moereg.nn.state import has_shared_experts
from moereg.testing.inputs import make_weights
from moereg.weights.unpermute import same_bits
from tests.layer.small_layers import CPU
from tests.layer.test_module import KEEPS, ROUTER, layer_of, tokens

# Layers on a CPU emulate codes of activations, which is no fault of theirs.
pytestmark = pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")


def made_anew(layer: MoELayer) -> MoELayer:
    return MoELayer(layer.problem, layer.weights, router=ROUTER, router_weight=layer.router_weight)  # type: ignore[arg-type]


def test_writes_that_torch_does_not_count_are_read_when_asked() -> None:
    one, other = layer_of(), layer_of(seed=1)
    x, kernel = tokens(one), one.prepare()
    for name, value in other.weights.tensors().items():
        one._parameters[name].data.copy_(value)  # type: ignore[union-attr]
    one.router_weight = other.router_weight
    assert one.prepare(refresh=True) is kernel
    assert torch.equal(one(x), other(x))


def test_writes_that_torch_does_not_count_are_an_error_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_DEBUG", "1")
    one, other = layer_of(), layer_of(seed=1)
    x = tokens(one)
    one(x)
    with torch.no_grad():
        one._parameters["w2"].copy_(other.w2)  # type: ignore[union-attr, arg-type]
    one(x)  # Counted, and followed.
    swapped = one.w13.detach().roll(1, dims=0)  # type: ignore[operator]
    one._parameters["w13"].data.copy_(swapped)  # type: ignore[union-attr]
    text = "weights of this layer were written in a way that torch does not count"
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^{text}.*; call layer\.refresh\(\) after such writes$"):
            one(x)
    one.prepare(refresh=True)
    assert torch.equal(one(x), made_anew(one)(x))


@KEEPS
@pytest.mark.parametrize("assign", [False, True])
def test_layers_of_inference_mode_follow_a_state_dict(keep: bool, assign: bool) -> None:
    """The tensors that inference mode makes count no versions, so the old experts went on."""
    other = layer_of(seed=1)
    x = tokens(other)
    wanted = other(x)
    with torch.inference_mode():
        for one in (layer_of(keep_canonical=keep), MoELayer(other.problem, router=ROUTER, keep_canonical=keep)):
            assert not torch.equal(one(x), wanted)
            one.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
            assert torch.equal(one(x), wanted)
    if keep:
        with torch.inference_mode():
            one.bfloat16().float()
            one(x)
            one.w2.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(one(x), made_anew(one)(x))


@KEEPS
def test_a_state_dict_has_to_be_whole_for_freed_experts_too(keep: bool) -> None:
    one, other = layer_of(keep_canonical=keep), layer_of(seed=1)
    x = tokens(one)
    one(x)
    state = other.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "w13", "w2", "w13_bias", "w2_bias"'):
        one.load_state_dict({"router_weight": state["router_weight"]})
    found = one.load_state_dict({"w13": state["w13"].double()}, strict=False)
    assert sorted(found.missing_keys) == ["router_weight", "w13_bias", "w2", "w2_bias"]
    assert same_bits(one.weights.w13, other.weights.w13)
    assert same_bits(one.weights.w2, layer_of().weights.w2)
    assert torch.equal(one(x), made_anew(one)(x))
    with pytest.raises(RuntimeError, match="w2"):
        one.load_state_dict({**state, "w2": state["w2"][:4]})


def test_replaced_parameters_of_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer_of()
    problem = one.problem
    half = MoELayer(problem, router=ROUTER).half()
    monkeypatch.setattr(moe_kernel, "_may_be_captured", lambda device: True)
    x = tokens(half)
    half(x)
    assert half.prepare()._borrowed
    half.load_state_dict({name: value.half() for name, value in one.state_dict().items()}, assign=True)
    with pytest.raises(ArgumentError, match=r"write into the parameters instead of replacing them \(load_state_dict"):
        half(x)
    half.to("cpu")
    assert half(x).any()


def test_scales_that_are_written_into_are_checked_at_each_call() -> None:
    one = layer_of("fp8_block128")
    x = tokens(one)
    one(x)
    with torch.no_grad():
        one.w2_scale.neg_()  # type: ignore[union-attr, operator]
    for _ in range(2):
        with pytest.raises(ValueError, match="w2_scale must be finite and not negative"):
            one(x)


def test_a_program_that_is_dropped_gives_its_kernel_back() -> None:
    """The kernel stayed until another program made one."""
    one = layer_of(require={"torch"})
    x = tokens(one)
    wanted, file = one(x), io.BytesIO()
    torch.export.save(torch.export.export(one, (x,)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    before = set(exported._LAYERS)
    assert torch.equal(program(x), wanted)
    (key,) = set(exported._LAYERS) - before
    for parameter in program.parameters():
        parameter.data.zero_()
        torch.autograd.graph.increment_version(parameter)
    assert not program(x).any()
    kernel = weakref.ref(exported._LAYERS[key][0])
    del program
    gc.collect()
    assert key not in exported._LAYERS
    assert kernel() is None


def test_routes_belong_to_the_tokens_at_their_places() -> None:
    one, x = layer_of(), torch.randn(2, 3, 64)
    weights, ids = ROUTER.route(torch.randn(6, 8))
    assert torch.equal(one(x, weights, ids), one(x, weights.view(2, 3, 2), ids.view(2, 3, 2)))
    text = "topk_weights must be [2, 3, 2], as hidden_states are [2, 3, 64], or [T,K], got [3, 2, 2]; a route belongs"
    with pytest.raises(ArgumentError, match=f"^{re.escape(text)}"):
        one(x, weights.view(3, 2, 2), ids.view(3, 2, 2))
    with pytest.raises(ArgumentError, match=r"^topk_ids must be \[2, 3, 2\]"):
        one(x, weights.view(2, 3, 2), ids.view(3, 2, 2))


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [("shared_experts", True), ("shared_expert", True), ("shared_mlp", True), ("shared_expert_gate", False)],
)
def test_shared_experts_of_a_live_block_are_seen(name: str, is_shared: bool) -> None:
    block = torch.nn.Module()
    block.add_module("experts", torch.nn.Linear(2, 2))
    block.add_module(name, torch.nn.Linear(2, 2))
    assert has_shared_experts(block) is is_shared
    assert has_shared_experts(torch.nn.Sequential(block)) is is_shared
    assert not has_shared_experts(block.experts)  # type: ignore[arg-type]


def test_what_makes_no_layer_is_named() -> None:
    problem = layer_of().problem
    for run, text in (
        (lambda: MoELayer(problem, {"w13": torch.ones(1)}), "weights must be an ExpertWeights"),  # type: ignore[arg-type]
        (lambda: MoELayer(problem, device="cudax"), "device must be one that torch knows, such as cpu or cuda:0"),
        (lambda: MoELayer.from_module(None), "module must be a Module, got None; pass one such as"),  # type: ignore[arg-type]
        (lambda: MoELayer.from_module(torch.nn.Identity(), top_k=0), "top_k must be at least 1, got 0"),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(text)}"):
            run()


def test_an_expert_of_weights_in_inference_mode() -> None:
    with torch.inference_mode():
        one = layer_of()
        one.update_expert(2, make_weights(one.problem, CPU, seed=1).expert(2))
        assert same_bits(one.weights.expert(2).w13, make_weights(one.problem, CPU, seed=1).expert(2).w13)


@pytest.mark.parametrize("keep_canonical", [True, False])
def test_parametrized_weights_are_refused_before_anything_changes(keep_canonical: bool) -> None:
    layer = layer_of(keep_canonical=keep_canonical)
    weight = layer.w13
    with pytest.raises(ArgumentError, match="keeps its own parameters, got one that takes w13 away"):
        torch.nn.utils.parametrize.register_parametrization(layer, "w13", torch.nn.Identity())
    assert type(layer) is MoELayer
    assert layer.w13 is weight
