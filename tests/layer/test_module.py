"""MoELayer: a module with canonical parameters, wherever torch takes one, that follows what is written into them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from moereg.checkpoints import load_experts
from moereg.errors import ArgumentError, LayoutNotInvertibleError
from moereg.layer.factory import make_kernel
from moereg.nn import export_op as exported
from moereg.nn.module import MoELayer
from moereg.nn.state import has_shared_experts
from moereg.numerics.reference import relative_error
from moereg.platforms import platform_of
from moereg.routing import RouterSpec
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights
from moereg.weights.unpermute import same_bits
from tests.checkpoints.small_checkpoint import write_checkpoint
from tests.layer.small_layers import CPU, copied, problem_of
from tests.support.no_backward import refuses_backward

# Layers on a CPU emulate codes of activations, which is no fault of theirs.
pytestmark = pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")

ROUTER = RouterSpec(kind="softmax_topk", num_experts=8, top_k=2, renormalize=True)
SCHEMES = ("unquantized", "fp8_block128", "int4_w4a16_g32_zp", "fp8_tensor_static", "mxfp4_w4a16")
KEEPS = pytest.mark.parametrize("keep", [True, False], ids=["kept", "freed"])


def layer_of(quant: str = "unquantized", seed: int = 0, **changes: Any) -> MoELayer:
    dtype = "float32" if quant == "unquantized" else "bfloat16"
    problem = problem_of(hidden_size=64, intermediate_size=32, quant=quant, dtype=dtype, has_bias=True)
    generator = torch.Generator().manual_seed(seed)
    router_weight = torch.randn(8, 64, generator=generator).to(problem.torch_dtype)
    weights = make_weights(problem, CPU, seed)
    return MoELayer(problem, weights, router=ROUTER, router_weight=router_weight, **changes)


def tokens(layer: MoELayer, *sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (2, 3)), 64, generator=torch.Generator().manual_seed(5)).to(layer.problem.torch_dtype)


def held(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    return weights.tensors()


@KEEPS
@pytest.mark.parametrize("quant", ["unquantized", "fp8_tensor_static"])
def test_a_layer_is_its_kernel_and_router(quant: str, keep: bool) -> None:
    layer = layer_of(quant, keep_canonical=keep)
    weights = make_weights(layer.problem, CPU)
    x = tokens(layer)
    assert layer.router_weight is not None
    topk_weights, topk_ids = ROUTER.route(x.view(-1, 64) @ layer.router_weight.T)
    wanted = make_kernel(layer.problem, weights)(x.view(-1, 64), topk_weights, topk_ids).view(2, 3, 64)
    assert torch.equal(layer(x), wanted)
    assert torch.equal(layer(x, topk_weights.view(2, 3, 2), topk_ids.view(2, 3, 2)), wanted)
    assert torch.equal(layer(x.transpose(0, 1)), wanted.transpose(0, 1))
    wide = torch.cat([x, x], dim=-1).view(6, 128)
    assert torch.equal(layer(wide[:, :64]), wanted.view(6, 64))
    assert layer(x[:0]).shape == (0, 3, 64)
    assert layer(x[0, 0]).shape == (64,)
    # Models hand routing weights over in their own dtype.
    for dtype in (torch.bfloat16, torch.float16):
        rounded = topk_weights.to(dtype)
        assert torch.equal(layer(x, rounded, topk_ids), layer(x, rounded.float(), topk_ids))
    assert (dict(layer.named_parameters()).keys() == {"router_weight"}) is not keep
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert all(same_bits(value, held(weights)[name]) for name, value in held(layer.weights).items())


@KEEPS
@pytest.mark.parametrize("quant", SCHEMES)
def test_state_dict_is_canonical_and_comes_back(quant: str, keep: bool) -> None:
    layer, other = layer_of(quant, keep_canonical=keep), layer_of(quant, seed=1, keep_canonical=keep)
    x = tokens(layer)
    wanted = layer(x)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    weights = make_weights(layer.problem, CPU)
    assert all(same_bits(state[name], value) for name, value in held(weights).items())
    assert state.keys() == {*held(weights), "router_weight"}
    kernel = other.prepare()
    assert not torch.equal(other(x), wanted)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(other(x), wanted)
    assert other.prepare() is kernel, "captured graphs read the old kernel"
    empty = MoELayer(layer.problem, router=ROUTER, keep_canonical=keep, device="meta")
    with pytest.raises(ArgumentError, match="are on meta and hold nothing"):
        empty.prepare()
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(x), wanted)


@KEEPS
@pytest.mark.parametrize("quant", ["unquantized", "fp8_block128"])
def test_copies_and_pickles_run_alone(quant: str, keep: bool) -> None:
    layer = layer_of(quant, keep_canonical=keep)
    x = tokens(layer)
    wanted = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    model = torch.nn.Sequential(torch.nn.Identity(), layer, torch.nn.ReLU())
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False), copy.deepcopy(model)[1]):
        assert torch.equal(twin(x), wanted)
        twin.load_state_dict(layer_of(quant, seed=1).state_dict())
        assert not torch.equal(twin(x), wanted)
        assert torch.equal(layer(x), wanted)
    assert torch.equal(model(x), wanted.relu())


@KEEPS
@pytest.mark.parametrize("quant", ["unquantized", "fp8_block128", "int4_w4a16_g32_zp"])
def test_dtypes_change_what_is_computed_in_and_no_codes(quant: str, keep: bool) -> None:
    layer = layer_of(quant, keep_canonical=keep)
    before = copy.deepcopy(held(layer.weights))
    wanted = layer(tokens(layer))
    layer.half()
    assert layer.problem.dtype == "float16"
    for name, value in held(layer.weights).items():
        if quant == "unquantized" or name.endswith("bias"):
            assert torch.equal(value, before[name].half())
        else:
            assert same_bits(value, before[name]), name
    assert relative_error(layer(tokens(layer)).float(), wanted.float()) < 0.05
    with pytest.raises(ArgumentError, match=r"^a MoELayer computes in bfloat16, float16, float32, got torch\.float64$"):
        layer.double()
    assert layer.to("cpu").problem.dtype == "float16"
    moved = layer.to("meta")
    with pytest.raises(ArgumentError, match="are on meta and hold nothing"):
        moved(tokens(layer))


def test_a_correction_bias_keeps_its_bits_and_a_router_bias_takes_the_dtype_of_logits() -> None:
    """Rounded to 16 bits, all of these corrections are equal."""
    problem = layer_of().problem
    router = RouterSpec(kind="grouped_sigmoid_topk", num_experts=8, top_k=2, has_correction_bias=True, fp32_logits=True)
    correction, bias = 1 + torch.arange(8) * 2.0**-12, torch.zeros(8)
    biases = {"router_weight": torch.zeros(8, 64), "correction_bias": correction, "router_bias": bias}
    layer = MoELayer(problem, make_weights(problem, CPU), router=router, **biases).to(torch.bfloat16)  # type: ignore[arg-type]
    assert layer.correction_bias is not None
    assert layer.router_bias is not None
    assert layer.router_bias.dtype == torch.bfloat16
    assert torch.equal(layer.correction_bias, correction)
    assert layer.route(tokens(layer, 3))[1].sort().values.tolist() == [[6, 7]] * 3


@KEEPS
@pytest.mark.parametrize("quant", ["unquantized", "int4_w4a16_g32_zp"])
def test_an_expert_is_replaced_in_parameters_and_kernel(quant: str, keep: bool) -> None:
    layer, others = layer_of(quant, keep_canonical=keep), make_weights(layer_of(quant).problem, CPU, seed=1)
    x = tokens(layer)
    kernel = layer.prepare()
    layer.update_expert(3, others.expert(3))
    with pytest.MonkeyPatch.context() as patched:  # The next call reads no other expert again.
        patched.setattr(type(kernel), "reload", None)
        assert layer.prepare() is kernel
    for expert in range(8):
        source = others if expert == 3 else make_weights(layer.problem, CPU)
        found = layer.weights.expert(expert).tensors()
        assert all(same_bits(value, source.expert(expert).tensors()[name]) for name, value in found.items())
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))


@KEEPS
def test_compiled_and_exported_layers(keep: bool) -> None:
    torch._dynamo.reset()
    layer, before = layer_of(keep_canonical=keep), set(exported._LAYERS)
    x = tokens(layer)
    # The kernel is made when compiled code runs.
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    found = compiled(x)
    assert torch.equal(found, layer(x))
    other = layer_of(seed=1)
    wanted = other(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(compiled(tokens(layer, 5)), layer(tokens(layer, 5)))
    if keep:
        # Compiled code ran the layer itself, not a copy of it with weights of its own as exported code does.
        assert set(exported._LAYERS) <= before
    for strict in (False, True):
        program = torch.export.export(layer, (x,), strict=strict)
        assert torch.equal(program.module()(x), wanted)


@KEEPS
@pytest.mark.parametrize("compiles", [False, True])
def test_inputs_and_parameters_that_require_gradients(compiles: bool, keep: bool) -> None:
    layer = layer_of(keep_canonical=keep)
    x = tokens(layer).view(6, 64)
    wanted = layer(x)
    assert not wanted.requires_grad
    trained = [torch.nn.Sequential(torch.nn.LayerNorm(64), layer)]  # As a model with frozen experts has it.
    if keep:
        trained += [layer_of().requires_grad_(), layer_of(), layer_of()]
        trained[-2].w2.requires_grad_()
        trained[-1].router_weight.requires_grad_()
    for model in trained:
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        normed = model[0](x) if isinstance(model, torch.nn.Sequential) else x
        assert torch.equal(called(x).detach(), layer(normed).detach())
        refuses_backward(called(x))
        with torch.no_grad():
            assert not called(x).requires_grad


def test_a_program_is_exported_with_inputs_that_require_gradients() -> None:
    layer = layer_of()
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(64), layer), tokens(layer)
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict).module()
        assert torch.equal(program(x).detach(), model(x).detach())


def test_an_exported_program_holds_its_weights() -> None:
    """It found its layer by a number that means nothing to another process."""
    layer, other = layer_of(), layer_of(seed=1)
    x = tokens(layer)
    wanted = layer(x)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    del layer
    file.seek(0)
    program = torch.export.load(file).module()
    made: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported, "_IN_PLACE", {})
        patch.setattr(
            exported,
            "make_kernel",
            lambda *arguments, **keywords: made.append(1) or make_kernel(*arguments, **keywords),
        )
        for _ in range(2):
            assert torch.equal(program(x), wanted)
        program.load_state_dict(other.state_dict())
        assert torch.equal(program(x), other(x))
    assert len(made) == 1


@pytest.mark.parametrize("placement", ["contiguous", "map"])
def test_ranks_sum_to_the_whole(placement: str) -> None:
    whole = layer_of()
    x = tokens(whole)
    problem = dataclasses.replace(whole.problem, num_local_experts=4, placement=placement)
    router = {"router": ROUTER, "router_weight": whole.router_weight}
    parts = []
    for rank in (0, 1):
        mine = {name: value[4 * rank : 4 * rank + 4].clone() for name, value in held(whole.weights).items()}
        place: dict[str, Any] = {"ep_rank": rank}
        if placement == "map":
            local = torch.arange(8, dtype=torch.int32) - 4 * rank
            place = {"expert_map": torch.where((local >= 0) & (local < 4), local, -1)}
        parts.append(MoELayer(problem, ExpertWeights(**mine), **router, **place))
    torch.testing.assert_close(sum(part(x) for part in parts), whole(x))
    assert "expert_map" not in parts[0].state_dict()


def test_what_cannot_be_read_back_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, expert: int) -> None:
        raise LayoutNotInvertibleError("folded")

    layer = layer_of(keep_canonical=False)
    monkeypatch.setattr("moereg.weights.permuted.PermutedWeights.to_canonical", refuse)
    with pytest.raises(LayoutNotInvertibleError, match="folded"):
        layer(tokens(layer))
    assert layer.w13 is not None


def test_bad_calls_are_refused() -> None:
    layer = layer_of()
    problem, x = layer.problem, tokens(layer)
    bare = MoELayer(problem, copied(layer.weights))
    weights, ids = torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.int32)
    wrong = dataclasses.replace(ROUTER, top_k=3)
    for run, text in (
        (lambda: layer(torch.tensor(1.0)), "hidden_states must be [..., 64], got []"),
        (lambda: bare(x), "this MoELayer has no router; pass topk_weights and topk_ids, or make it with router=..."),
        (lambda: layer(x, weights), "topk_weights and topk_ids go together; pass both, or none for the layer's router"),
        (lambda: layer(x[..., :32]), "hidden_states must be [..., 64], got [2, 3, 32]"),
        (lambda: layer(x, weights[:, :1], ids), "topk_weights must be [..., 2], got [6, 1]"),
        (lambda: layer(x, ids, weights), "topk_weights come before topk_ids, got them the other way round; exchange"),
        (lambda: layer(x.half()), "hidden_states must be float32, got float16; convert it"),
        (lambda: layer(None), "hidden_states must be a Tensor"),
        (lambda: MoELayer(problem, router_weight=torch.zeros(8, 64)), "router_weight needs router=..., which says how"),
        (lambda: MoELayer(problem, router=wrong), "router must be of the problem, E8 H64 I32 k2 "),
        (
            lambda: MoELayer(problem, router=ROUTER, router_weight=torch.zeros(8, 32)),
            "router_weight must be [8, 64] torch.float32, got [8, 32] torch.float32; convert it",
        ),
        (
            lambda: MoELayer(problem, router=ROUTER, correction_bias=torch.zeros(8)),
            "this router takes no correction_bias; leave it out, or say has_correction_bias=True",
        ),
        (lambda: MoELayer(problem, make_weights(problem_of(), CPU)), "w13 must be [8, 64, 64] for "),
        (lambda: MoELayer(problem, {"w13": torch.ones(1)}), "weights must be an ExpertWeights"),  # type: ignore[arg-type]
        (lambda: MoELayer(problem, device="cudax"), "device must be one that torch knows, such as cpu or cuda:0"),
        (lambda: MoELayer.from_module(None), "module must be a Module, got None; pass one such as"),  # type: ignore[arg-type]
        (lambda: MoELayer.from_module(torch.nn.Identity(), top_k=0), "top_k must be at least 1, got 0"),
        (lambda: platform_of(torch.device("meta")), "the layer is on meta, and this machine is cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            run()


def test_a_layer_is_shown_on_one_line() -> None:
    layer = layer_of()
    assert repr(layer).startswith("MoELayer(E8 H64 I32 k2 float32 unquantized silu, has_bias, softmax_topk, no kernel")
    layer.prepare()
    assert repr(layer).endswith(", softmax_topk, torch)")


@pytest.mark.parametrize("quant", SCHEMES)
def test_zeros_wait_for_a_state_dict(quant: str) -> None:
    layer = MoELayer(layer_of(quant).problem, router=ROUTER)
    assert not layer(tokens(layer)).any()


def test_a_layer_of_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    layer, loaded = MoELayer.from_checkpoint(tmp_path, 1, dtype="float32"), load_experts(tmp_path, 1, dtype="float32")
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), loaded.make_kernel()(x, *loaded.route(x)))
    half = MoELayer.from_checkpoint(tmp_path, 1, dtype="float32", num_local_experts=2, ep_rank=1, keep_canonical=False)
    rest = MoELayer.from_checkpoint(tmp_path, 1, dtype="float32", num_local_experts=2)
    torch.testing.assert_close(half(x) + rest(x), layer(x))
    assert not layer.has_shared_experts
    assert repr(loaded) == (
        "CheckpointLayer(qwen3_moe layer 1, E4 H8 I6 k2 float32 unquantized silu, softmax_topk, 2.4 kB on cpu)"
    )


def made_anew(layer: MoELayer) -> MoELayer:
    return MoELayer(layer.problem, layer.weights, router=ROUTER, router_weight=layer.router_weight)  # type: ignore[arg-type]


def test_writes_that_torch_does_not_count_are_an_error_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_DEBUG", "1")
    one, other = layer_of(), layer_of(seed=1)
    x = tokens(one)
    one.prepare()
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
        # Kernels that share the parameters' memory see such writes anyway; copies follow what is counted.
        assert not any(tensor.is_inference() for tensor in (one.w13, one.w2))  # type: ignore[union-attr]


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
    one = layer_of("int8_w8a16", require={"torch"})
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


def test_an_expert_of_weights_in_inference_mode() -> None:
    with torch.inference_mode():
        one = layer_of()
        one.update_expert(2, make_weights(one.problem, CPU, seed=1).expert(2))
        assert same_bits(one.weights.expert(2).w13, make_weights(one.problem, CPU, seed=1).expert(2).w13)


@pytest.mark.parametrize("keep_canonical", [True, False])
def test_parametrized_weights_are_refused_before_anything_changes(keep_canonical: bool) -> None:
    layer = layer_of(keep_canonical=keep_canonical)
    weight = layer.w13
    text = "keeps its own parameters, got one that takes w13 away, as pruning and parametrizations do; write the numb"
    with pytest.raises(ArgumentError, match=text):
        torch.nn.utils.parametrize.register_parametrization(layer, "w13", torch.nn.Identity())
    with pytest.raises(ArgumentError, match=text):
        prune.l1_unstructured(layer, "w13", 0.5)
    assert type(layer) is MoELayer
    assert layer.w13 is weight
    assert layer.state_dict().keys() == layer_of().state_dict().keys()
