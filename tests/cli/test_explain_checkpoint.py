"""`moereg explain --checkpoint` of a folder with config.json alone: every layer, as transformers builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moereg.cli._explain import _range_of
from tests.cli.command import Call, CallJson
from tests.support.tiny_models import needs, tiny_config


def saved(folder: Path, model_type: str, **values: Any) -> Path:
    config = tiny_config(model_type)
    for name, value in values.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder


def test_layers_of_one_kind_share_a_line(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(f"explain --checkpoint {saved(tmp_path / 'tiny', 'mixtral', dtype='bfloat16')}")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("tiny: 2 layers with experts on cpu")
    row = " ".join(lines[3:])
    assert "model.layers.0-1.mlp.experts" in row
    assert "E4 H32 I48 k2 bfloat16 unquantized silu" in row
    assert "torch" in row


def test_names_that_differ_in_more_than_a_number_are_both_said() -> None:
    assert _range_of("layers.0.experts", "layers.0.experts") == "layers.0.experts"
    assert _range_of("layers.0.experts", "layers.47.experts") == "layers.0-47.experts"
    assert _range_of("thinker.0.experts", "talker.3.experts") == "thinker.0.experts to talker.3.experts"
    assert _range_of("layers.0.experts", "layers.3.mlp.experts") == "layers.0.experts to layers.3.mlp.experts"


def test_json_has_every_layer_and_each_selection_once(call_json: CallJson, tmp_path: Path) -> None:
    code, found = call_json(f"explain --platform cuda:sm90 --checkpoint {saved(tmp_path, 'mixtral')}")
    assert code == 0
    assert found["schema"] == 1
    assert found["checkpoint"] == str(tmp_path)
    assert [layer["name"] for layer in found["layers"]] == [f"model.layers.{index}.mlp.experts" for index in range(2)]
    assert {layer["selection"] for layer in found["layers"]} == {0}
    assert {layer["selected"] for layer in found["layers"]} == {found["selections"][0]["selected"]}
    assert found["selections"][0]["platform"] == "cuda:sm90"
    assert len(found["selections"]) == 1


def test_what_is_not_served_exits_with_3_and_the_reason(call: Call, call_json: CallJson, tmp_path: Path) -> None:
    needs("jetmoe")
    path = saved(tmp_path, "jetmoe")
    code, out, _ = call(f"explain --checkpoint {path}")
    assert code == 3
    assert "it sorts tokens by expert itself" in out
    code, found = call_json(f"explain --checkpoint {path}")
    assert code == 3
    assert found["layers"][0]["selection"] is None
    assert "it sorts tokens by expert itself" in found["layers"][0]["refusal"]


@pytest.mark.parametrize(("model_type", "text"), [("nonsense", "config.json': "), ("llama", "has no routed experts")])
def test_what_is_no_model_of_experts(call: Call, tmp_path: Path, model_type: str, text: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    code, out, err = call(f"explain --checkpoint {tmp_path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_nothing_fits_says_why(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(f"explain --deny * --checkpoint {saved(tmp_path, 'mixtral')}")
    assert code == 3
    assert "nothing fits" in out
    assert "nothing fits E4 H32 I48 k2 float32 unquantized silu:\ntorch does not fit:" in out
