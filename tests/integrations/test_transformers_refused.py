"""Live modules that are not served, each with its reason, and gates by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from moereg.errors import ArgumentError, UnsupportedProblemError
from moereg.integrations._experts import blocks, serving
from moereg.integrations._experts.activation import recognize
from moereg.integrations._experts.memory import check_can_free
from moereg.integrations.transformers import prepare
from moereg.spec.activations import Activation
from tests.support.live_models import logits_of
from tests.support.tiny_models import tiny_model


class Hook:
    offload = True


class Hooks:
    hooks = (Hook(),)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda model, experts: model.to("meta"),
            "its weights are on meta, where they have no values; load them first",
        ),
        (
            lambda model, experts: setattr(experts, "down_proj", torch.nn.Parameter(experts.down_proj.to("meta"))),
            r"\(model.layers.1.mlp.experts\): its weights are on meta",
        ),
        (lambda model, experts: setattr(experts, "_hf_hook", Hook()), "offloaded and come and go with each call; load"),
        (lambda model, experts: setattr(experts, "_hf_hook", Hooks()), "offloaded and come and go with each call"),
        (lambda model, experts: model.double(), "gate_up_proj must be bfloat16, float16, float32, got float64"),
    ],
    ids=["on meta", "one on meta", "offloaded", "offloaded among hooks", "double"],
)
def test_weights_that_no_kernel_can_have(model: Any, change: Callable[[Any, Any], object], text: str) -> None:
    change(model, model.model.layers[1].mlp.experts)
    with pytest.raises(ArgumentError, match=text):
        prepare(model, progress=False)
    assert serving.served(model.model.layers[0].mlp.experts) is None  # Nothing was changed.


def test_what_no_backend_fits_names_its_layer_and_the_required_backend_alone() -> None:
    with pytest.raises(UnsupportedProblemError) as raised:
        prepare(tiny_model("mixtral"), progress=False, require="triton")
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("model.layers.0.mlp.experts: no backend fits E4")
    assert "without the request, torch would do" in first
    assert [line for line in lines if not line.startswith(("  triton (", "way out: "))] == []


def test_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    experts = tiny_model("mixtral").model.layers[0].mlp.experts
    experts.config._experts_implementation = "moereg"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(experts.gate_up_proj.detach(), mesh, [Shard(0)])
        experts.gate_up_proj = torch.nn.Parameter(sharded)
        with (
            torch.no_grad(),
            pytest.raises(ArgumentError, match=r"sharded over devices \(a DTensor\); give each rank whole"),
        ):
            experts(torch.randn(1, 32), torch.tensor([[0, 1]]), torch.rand(1, 2))
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_without_experts() -> None:
    with pytest.raises(ArgumentError, match="Linear has no routed experts that moereg knows"):
        prepare(torch.nn.Linear(2, 2), progress=False)
    with pytest.raises(ArgumentError, match=r"model must be a torch.nn.Module, got 3"):
        prepare(3)  # type: ignore[arg-type]


def test_an_activation_that_ours_does_not_express(model: Any) -> None:
    model.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(ArgumentError, match=r"its activation \(ReLU, gated\) is none that moereg computes \(silu"):
        prepare(model, progress=False)
    model.set_experts_implementation("moereg")
    with pytest.raises(ArgumentError, match=r"its activation.*set_experts_implementation\('eager'\) runs it"):
        logits_of(model)


def test_a_class_without_the_interface_is_named() -> None:
    class FooExperts(torch.nn.Module):
        pass

    model = torch.nn.Sequential(FooExperts())
    with pytest.raises(ArgumentError, match=r"FooExperts \(0\): it does not use transformers' experts interface"):
        prepare(model, progress=False)


@pytest.mark.parametrize(
    ("limit", "alpha", "activation"),
    [
        (None, None, Activation("silu")),
        (7.0, None, Activation("silu", limit=7.0)),
        (3.5, 1.702, Activation("swigluoai", alpha=1.702, beta=1.0, limit=3.5)),
        # Beyond what a probe of fixed numbers would reach.
        (40.0, None, Activation("silu", limit=40.0)),
        (1e4, None, Activation("silu", limit=1e4)),
        (40.0, 1.702, Activation("swigluoai", alpha=1.702, beta=1.0, limit=40.0)),
    ],
)
def test_a_gate_is_recognized_by_what_it_computes(
    limit: float | None, alpha: float | None, activation: Activation
) -> None:
    module = torch.nn.Module()
    module.limit, module.swiglu_alpha = limit, alpha
    assert recognize(module, activation, is_gated=True) == activation
    # A clamp after the gate is another function, where a clamp before it would be taken for it by name; not where SiLU
    # has become the identity.
    if limit is not None and limit < 40 and alpha is None:

        def clamped_after(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

        with pytest.raises(ArgumentError, match="is none that moereg computes"):
            recognize(module, clamped_after, is_gated=True)


@pytest.mark.parametrize("place", ["block", "router", "module.config", "block.config", "config", "text", "ffn"])
@pytest.mark.parametrize(
    "name", ["top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"]
)
def test_the_number_of_experts_per_token_is_found_wherever_it_is(name: str, place: str) -> None:
    model = torch.nn.Module()
    model.block = torch.nn.Module()
    model.block.experts, model.block.router = torch.nn.Module(), torch.nn.Module()
    for wrong in (True, 0, -1, "3", None):
        setattr(model.block, name, wrong)
    assert blocks._top_k(model, "block.experts") is None
    holder = SimpleNamespace(**{name: 3})
    owner = {"module.config": model.block.experts, "block.config": model.block}.get(place, model)
    if place in ("block", "router"):
        setattr(model.block if place == "block" else model.block.router, name, 3)
    elif place in ("text", "ffn"):
        owner.config = SimpleNamespace(**{f"{place}_config": holder})
    else:
        owner.config = holder
    assert blocks._top_k(model, "block.experts") == 3


@pytest.mark.parametrize("num_children", [0, 1, 2, 3])
def test_experts_with_one_computed_weight_are_not_freed(num_children: int) -> None:
    for place in range(num_children + 1):
        module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(num_children)))
        module.weight = torch.nn.Parameter(torch.zeros(2))
        check_can_free(module, "experts")
        with pytest.raises(ArgumentError, match=r"got block\.base_layer, which an adapter wraps"):
            check_can_free(module, "block.base_layer")
        owner = [module, *module][place]
        parametrize.register_parametrization(owner, "weight", torch.nn.Identity())
        with pytest.raises(ArgumentError, match="got experts, whose weights are parametrized; leave free out"):
            check_can_free(module, "experts")
