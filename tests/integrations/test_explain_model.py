"""What every layer of a saved model would get, from its config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from moereg.errors import ArgumentError
from moereg.integrations.transformers import explain_model
from tests.support.tiny_models import needs, tiny_config


def test_every_layer_for_another_machine(tmp_path: Any) -> None:
    tiny_config("mixtral").save_pretrained(tmp_path)
    layers = explain_model(tmp_path, "cuda:sm90")
    assert [layer.name for layer in layers] == [f"model.layers.{index}.mlp.experts" for index in range(2)]
    assert layers[0].problem.num_experts == 4
    assert layers[0].selection.platform.kind == "cuda"


def test_refusals_are_told_by_layer(tmp_path: Any) -> None:
    needs("inkling2")
    tiny_config("inkling2_text").save_pretrained(tmp_path)
    layers = explain_model(tmp_path)
    assert layers
    assert all(layer.problem is None and "its activation" in str(layer.refusal) for layer in layers)


def test_what_is_no_model(tmp_path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"must be a directory with config.json; give the model's own folder"):
        explain_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ArgumentError, match=r"makes no model of .*config.json"):
        explain_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ArgumentError, match="has no routed experts"):
        explain_model(tmp_path)
