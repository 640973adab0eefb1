"""Live models whose canonical weights were given back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

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


def test_a_saved_model_is_read_by_transformers(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("mixtral")
    expected = eager(model)
    prepare(model, free=True, progress=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(eager(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_another_implementation_gets_the_weights_back() -> None:
    model = tiny_model("mixtral")
    expected = eager(model)
    prepare(model, free=True, progress=False)
    assert model.model.layers[0].mlp.experts.down_proj is None
    assert torch.equal(eager(model), expected)
    assert model.model.layers[0].mlp.experts.down_proj.requires_grad


def test_restore_gives_them_back() -> None:
    model = tiny_model("llama4")
    expected = logits_of(model)
    prepare(model, free=True, progress=False)
    restore(model)
    assert torch.equal(logits_of(model), expected)


def test_copies_have_them_and_pickles_say_how() -> None:
    model = tiny_model("mixtral")
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


def test_what_does_not_come_back_is_kept_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    right = serving.ServedExperts.restored

    def wrong(self: serving.ServedExperts) -> Any:
        weights = right(self)
        weights.w2[0, 0, 0] += 1
        return weights

    monkeypatch.setattr(serving.ServedExperts, "restored", wrong)
    prepared = prepare(model, free=True, progress=False)
    assert prepared.layers[0].kept == "down_proj does not come back from the kernel's layout bit for bit"
    assert "(weights kept: down_proj does not" in str(prepared)
    assert model.model.layers[0].mlp.experts.down_proj is not None
