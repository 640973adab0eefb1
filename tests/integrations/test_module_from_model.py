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


@pytest.mark.few(most=1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_layer_takes_the_place_of_a_modules_experts(family: str) -> None:
    model = tiny_model(family)
    block: Any = next(module for module in model.modules() if hasattr(module, "experts"))
    experts = block.experts
    layer = MoELayer.from_module(block)
    check_layer(layer, experts)
    assert layer.problem == MoELayer.from_module(experts, top_k=layer.problem.top_k).problem
    assert not layer.has_shared_experts
    block.shared_experts = torch.nn.Linear(1, 1)
    assert MoELayer.from_module(block).has_shared_experts


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
    known = r"no MoELayer can be made of \w+: \w+|from_module takes a module with the experts of one layer"
    assert all(re.match(known, reason) for reason in reasons)
