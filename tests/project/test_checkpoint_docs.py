"""docs/checkpoints.md: names every family, and its way by hand works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moereg.checkpoints._models import MODEL_TYPES
from moereg.numerics.reference import reference_experts, relative_error
from moereg.routing import REFUSED_MODEL_TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_the_page_names_every_family() -> None:
    read, refused = re.split("^Refused by name", PAGE, flags=re.MULTILINE)
    table = set(re.findall(r"`([\w-]+)`", "".join(line for line in read.splitlines() if line.startswith("| "))))
    assert table == set(MODEL_TYPES)
    named = set(re.findall(r"`([\w-]+)`", refused.partition("\n\n")[0]))
    # Parts of a model are refused with the whole.
    assert named == {name for name in REFUSED_MODEL_TYPES if not name.endswith("_text")}


def test_the_way_by_hand_computes_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, generator = "model.layers.0.mlp", torch.Generator().manual_seed(0)
    shapes = {f"{block}.gate.weight": (8, 32)}
    for expert in range(8):
        shapes.update({f"{block}.experts.{expert}.{name}_proj.weight": (16, 32) for name in ("gate", "up")})
        shapes[f"{block}.experts.{expert}.down_proj.weight"] = (32, 16)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (tmp_path / "path" / "to" / "checkpoint").mkdir(parents=True)
    save_file(tensors, tmp_path / "path" / "to" / "checkpoint" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    code = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/checkpoints.md", "exec"), names)
    routing = names["router"].route(names["logits"])
    expected = reference_experts(names["problem"], names["weights"], names["hidden_states"], *routing)
    assert relative_error(names["out"], expected) < 1e-6
    gate = tensors[f"{block}.experts.3.gate_proj.weight"]
    assert torch.equal(names["weights"].w13[3, :16], gate)
