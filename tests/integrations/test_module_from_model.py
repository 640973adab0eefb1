"""MoELayer of live modules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.nn.module import MoELayer
from tests.support.tiny_models import families, tiny_model


def check_layer(layer: MoELayer, experts: Any) -> None:
    """Both compute the same."""
    x, top_k = torch.randn(5, layer.problem.hidden_size), layer.problem.top_k
    ids = torch.stack([torch.randperm(layer.problem.num_experts)[:top_k] for _ in range(5)])
    weights = torch.rand(5, top_k)
    with torch.no_grad():
        wanted = experts(x, ids, weights)
    torch.testing.assert_close(layer(x, weights, ids), wanted.view(x.shape), rtol=1e-5, atol=1e-6)


def check_router(block: Any) -> None:
    """A layer computes what its block does, but for shared experts, and a norm that one family has."""
    biases = [tensor for name, tensor in (*block.named_buffers(), *block.named_parameters()) if "bias" in name]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(torch.linspace(-0.5, 0.5, bias.numel()).reshape(bias.shape))
    layer = MoELayer.from_module(block)
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in ("shared_expert", "shared_experts", "shared_mlp"):
            module.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    if hasattr(block, "post_mlp_layernorm"):
        block.post_mlp_layernorm = torch.nn.Identity()
    x = torch.randn(2, 8, layer.problem.hidden_size)
    with torch.no_grad():
        found = block(x)
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(layer(x), found.view(x.shape), rtol=1e-5, atol=1e-6)


# Types whose checkpoints are not read; and a bias that not every layer of DeepSeek-V4 has.
WITHOUT_ROUTER = {"deepseek_v4", "diffusion_gemma", "ernie4_5_vl_moe", "gemma4", "inkling", "zaya"}


@pytest.mark.few(most=1)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_a_layer_takes_the_place_of_a_modules_experts(family: str) -> None:
    model = tiny_model(family)
    block: Any = next(module for module in model.modules() if hasattr(module, "experts"))
    experts = block.experts
    layer = MoELayer.from_module(block)
    check_layer(layer, experts)
    assert layer.has_shared_experts == (family == "deepseek_v3")
    check_router(block)
    alone = MoELayer.from_module(experts, top_k=layer.problem.top_k)
    assert (alone.problem, alone.router) == (layer.problem, None)
    # Who names other experts, or a router, has another one.
    assert MoELayer.from_module(block, top_k=1).router is None
    assert not MoELayer.from_module(block, router=layer.router).router_weight.any()


def test_what_is_no_single_layer_is_refused() -> None:
    model = tiny_model("qwen3_moe")
    meta = tiny_model("qwen3_moe").to("meta")
    for module, text in (
        (model, f"from_module takes a module with the experts of one layer, got {type(model).__name__} with "),
        (torch.nn.Linear(2, 2), "from_module takes a module with the experts of one layer, got Linear with 0; pass on"),
        (
            next(module for module in meta.modules() if hasattr(module, "experts")),
            "no MoELayer can be made of Qwen3Moe",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(text)}"):
            MoELayer.from_module(module)


@pytest.mark.slow
# Muse Spark has no small model; its experts are refused.
@pytest.mark.parametrize("family", [family for family in families() if family != "muse_spark"])
def test_layers_of_every_family_or_a_reason(family: str) -> None:
    model = tiny_model(family)
    reasons: list[str] = []
    for module in model.modules():
        if not hasattr(module, "experts") or not isinstance(module.experts, torch.nn.Module):
            continue
        try:
            layer = MoELayer.from_module(module)
        except ArgumentError as error:
            reasons.append(str(error))
            continue
        assert layer.has_shared_experts == any("shared" in name for name, _ in module.named_children())
        check_layer(layer, module.experts)
        assert (layer.router is None) == (family in WITHOUT_ROUTER)
        if layer.router is not None:
            check_router(module)
    known = r"no MoELayer can be made of \w+: \w+|from_module takes a module with the experts of one layer"
    assert all(re.match(known, reason) for reason in reasons)


class Block(torch.nn.Module):
    """A layer where a decoder layer of transformers has its block, which returns hidden states alone."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.layer = MoELayer.from_module(block, gradients=("hidden_states", "topk_weights", "weights"))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden_states, output_router_logits=True)[0]


@pytest.mark.few
@pytest.mark.parametrize("way", ["eager", "checkpointed", "compiled"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_auxiliary_losses_are_those_of_transformers(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own recorder takes the logits from our calls, and its own function the loss from those."""
    from transformers.utils.output_capturing import OutputRecorder, maybe_install_capturing_hooks

    torch.manual_seed(0)
    tokens, mask = torch.randint(1, 60, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    found = []
    for is_ours in (False, True):
        model = tiny_model(family).train()
        model.set_experts_implementation("eager")
        model.router_aux_loss_coef = 3.0
        routers = []
        for decoder in model.model.layers:
            block = decoder.mlp
            if is_ours:
                decoder.mlp = Block(block)
            routers.append(decoder.mlp.layer.router_weight if is_ours else block.gate.weight)
        if is_ours:
            monkeypatch.setitem(model.model._can_record_outputs, "router_logits", OutputRecorder(MoELayer, index=1))
        if way == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if is_ours and way == "compiled":
            torch._dynamo.reset()
            maybe_install_capturing_hooks(model.model)  # Compiled code cannot.
            model.compile(backend="aot_eager", fullgraph=True)  # As a whole, since the recorder is around its layers.
        result = model(tokens, attention_mask=mask, labels=tokens, output_router_logits=True, use_cache=False)
        logits = result.router_logits
        assert [tuple(each.shape) for each in logits] == [(24, model.config.num_experts)] * len(routers)
        with_loss = torch.autograd.grad(result.loss, routers, retain_graph=True)
        alone = torch.autograd.grad(result.loss - 3.0 * result.aux_loss, routers)
        found.append((*logits, result.aux_loss, result.loss, *with_loss))
        assert all((one - other).norm() > 0.1 * one.norm() for one, other in zip(with_loss, alone, strict=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_router_logits_are_of_calls_that_the_router_routes() -> None:
    block: Any = next(module for module in tiny_model("gpt_oss").modules() if hasattr(module, "experts"))
    layer = MoELayer.from_module(block)
    x = torch.randn(2, 8, layer.problem.hidden_size)
    out, logits = layer(x, output_router_logits=True)
    assert torch.equal(out, layer(x))
    assert torch.equal(logits, block.router(x.view(16, -1))[0])
    with pytest.raises(ArgumentError, match=r"^output_router_logits are of the layer's router, got topk_ids too"):
        layer(x, *layer.route(x.view(16, -1)), output_router_logits=True)
    with pytest.raises(ArgumentError, match="this MoELayer has no router"):
        MoELayer.from_module(block.experts, top_k=2)(x, output_router_logits=True)
