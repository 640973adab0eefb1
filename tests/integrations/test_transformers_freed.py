"""Live models whose canonical weights were given back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from moereg.integrations._experts import serving
from moereg.integrations.transformers import prepare, restore
from tests.support.live_models import close, eager, logits_of
from tests.support.tiny_models import needs, tiny_model


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "aria", "dbrx"])
def test_state_dict_has_the_bits_of_before(family: str) -> None:
    needs(family)
    model = tiny_model(family)
    expected, saved = eager(model), {name: value.clone() for name, value in model.state_dict().items()}
    prepared = prepare(model, free=True, progress=False)
    assert not any(layer.kept for layer in prepared.layers)
    experts = sum(value.nbytes for name, value in saved.items() if "experts" in name)
    assert prepared.bytes_after <= prepared.bytes_before + 64 * len(saved)  # One copy of the experts, not two.
    assert prepared.bytes_before >= experts
    assert not any("experts" in name and "weight" not in name for name, _ in model.named_parameters())
    found = model.state_dict()
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert close(logits_of(model), expected)


def test_other_weights_are_loaded_as_ever() -> None:
    model, other = tiny_model("mixtral"), tiny_model("mixtral", seed=1)
    prepare(model, free=True, progress=False)
    model.load_state_dict(other.state_dict())
    assert close(logits_of(model), eager(other))
    prepare(model, free=True, progress=False)
    assert close(logits_of(model), eager(other))
    assert model.model.layers[0].mlp.experts.down_proj is None


@pytest.mark.parametrize("kind", ["between layers", "by name", "by memory"])
def test_tied_experts_stay_tied(kind: str, model: Any) -> None:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    if kind == "between layers":
        second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    elif kind == "by name":
        model.twin = first.down_proj
    else:
        second.down_proj = torch.nn.Parameter(first.down_proj.detach())
    expected, num_parameters = eager(model), sum(each.numel() for each in model.parameters())
    held = {name: each.data_ptr() for name, each in model.named_parameters(remove_duplicate=False)}
    prepared = prepare(model, free=True, progress=False)
    assert "in more than one place" in str(prepared.layers[0].kept)
    assert (prepared.layers[1].kept is None) == (kind == "by name")
    assert close(logits_of(model), expected)
    restore(model)
    assert sum(each.numel() for each in model.parameters()) == num_parameters
    found = {name: each.data_ptr() for name, each in model.named_parameters(remove_duplicate=False)}
    assert [name for name in held if held[name] != found[name] and "layers.1.mlp.experts" not in name] == []
    assert len(set(found.values())) == len(set(held.values()))


def test_a_module_that_stands_twice_is_freed_once(model: Any) -> None:
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    expected = eager(model)
    (layer,) = prepare(model, free=True, progress=False).layers
    assert layer.kept is None
    restore(model)
    assert model.model.layers[0].mlp.experts.down_proj is model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(eager(model), expected)


class _Plus(torch.nn.Module):
    """A parametrization that adds.

    What it computes lies where the one before was, as memory that torch gives out again often does.
    """

    def __init__(self, delta: torch.Tensor, place: torch.Tensor) -> None:
        super().__init__()
        self.delta, self.place = delta, place

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return self.place.data.copy_(weight + self.delta)


class _Adapter(torch.nn.Module):
    """Wraps experts as PEFT's LoRA of parameters does: they are parametrized during each call."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = experts
        self.delta = torch.zeros(())
        self.place = torch.empty_like(experts.down_proj.detach())

    def forward(self, *arguments: Any) -> Any:
        parametrize.register_parametrization(self.base_layer, "down_proj", _Plus(self.delta, self.place))
        try:
            return self.base_layer(*arguments)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", leave_parametrized=False)


def test_each_adapter_of_experts_is_seen() -> None:
    needs("aria")  # Its kernel has copies of the weights.
    model = tiny_model("aria")
    block = model.model.layers[0].mlp
    block.experts = _Adapter(block.experts)
    deltas = [torch.zeros(()), torch.ones(())]
    prepare(model, progress=False)
    found = []
    for block.experts.delta in deltas:
        found.append(logits_of(model))
    for block.experts.delta, logits in zip(deltas, found, strict=True):
        assert close(logits, eager(model))


def test_copies_have_them_and_pickles_say_how(model: Any) -> None:
    prepare(model, free=True, progress=False)
    expected = logits_of(model)
    copied = copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"call moereg.integrations.transformers.restore\(model\) first, or save"):
        torch.save(model, io.BytesIO())
    restore(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(logits_of(copied), expected)
    assert not torch.equal(logits_of(model), expected)


def test_what_does_not_come_back_is_kept_and_said(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    right = serving.ServedExperts.canonical_weights

    def wrong(self: serving.ServedExperts) -> Any:
        weights = right(self)
        weights.w2[0, 0, 0] += 1
        return weights

    monkeypatch.setattr(serving.ServedExperts, "canonical_weights", wrong)
    prepared = prepare(model, free=True, progress=False)
    assert prepared.layers[0].kept == "down_proj does not come back from the kernel's layout bit for bit"
    assert "(weights kept: down_proj does not" in str(prepared)
    assert model.model.layers[0].mlp.experts.down_proj is not None
