"""Small quantized checkpoints and changed copies of them, for the tests that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

CHECKPOINTS: Final = Path(__file__).parents[1] / "checkpoints" / "stored"
BLOCK: Final = "model.layers.0.mlp"

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def changed(path: Path, name: str, change: Change) -> Path:
    """A copy of a checkpoint whose config and tensors were changed in place."""
    config, tensors = config_of(CHECKPOINTS / name), load_file(CHECKPOINTS / name / "model.safetensors")
    change(config, tensors)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def module_of(expert: int, projection: str) -> str:
    return f"{BLOCK}.experts.{expert}.{projection}_proj"


def with_settings(**changes: Any) -> Change:
    """Changes of quantization_config; a value of ... removes the entry."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"].update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            del config["quantization_config"][key]

    return change


def with_tensor(name: str, value: torch.Tensor | None) -> Change:
    """Puts a tensor in, or takes it out."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


def with_number(name: str, value: float) -> Change:
    """Overwrites the first number of a tensor."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return change


def with_group(part: str, **changes: Any) -> Change:
    """Changes of compressed-tensors' only group: of its `weights`, its `input_activations`, or itself."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        (group[part] if part else group).update(changes)

    return change


GATE_0, DOWN_1 = module_of(0, "gate"), module_of(1, "down")
