"""An imitation of the parts of Humming that the backend calls: its definition of a layer, in plain torch.

Weights keep the order that Humming's own transformation starts from. The indexed product follows the library's
contract: tiles of rows belong to one expert; a route's row of the input is route / top_k; padding is not written.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any

import pytest
import torch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nibbles(words: torch.Tensor, dim: int) -> torch.Tensor:
    """4-bit codes of int32 words along a dimension, the first in the low bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    spread = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & 0xF
    return spread.flatten(-2).movedim(-1, dim)


def restored(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Padded weights [E,N,K] fp32: (code - midpoint or zero point) * scale * scale of the expert."""
    words, scale = tensors["weight"], tensors["weight_scale"].float()
    if config["b_dtype"] in ("uint4", "float4e2m1"):
        stored = nibbles(words, 2)
        if config["b_dtype"] == "float4e2m1":
            values = _E2M1[(stored & 7).long()] * torch.where(stored & 8 > 0, -1.0, 1.0)
        elif config["has_zero_point"]:
            zero = nibbles(tensors["zero_point"], 1)
            values = (stored - zero.repeat_interleave(stored.shape[2] // zero.shape[2], 2)).float()
        else:
            values = (stored - 8).float()
    elif config["b_dtype"] == "uint8":
        values = words.view(torch.uint8).float() - 128
    else:
        assert config["b_dtype"] == "float8e4m3"
        values = words.view(torch.float8_e4m3fn).float()
    if config["weight_scale_type"] == "tensor":
        return values * scale[:, None, None]
    if config["weight_scale_type"] == "block":
        scale = scale.repeat_interleave(config["weight_scale_group_size_n"], 1)
    values = values * scale.repeat_interleave(values.shape[2] // scale.shape[2], 2)
    if config["weight_scale_2_type"] == "tensor":
        values = values * tensors["weight_scale_2"][:, None, None]
    return values


@dataclasses.dataclass(kw_only=True)
class Schema:
    """`HummingWeightSchema`, as far as the backend names its fields."""

    b_dtype: str
    bs_dtype: str | None
    weight_scale_group_size: int
    weight_scale_group_size_n: int
    weight_scale_type: str
    weight_scale_2_type: str
    has_zero_point: bool


@dataclasses.dataclass(frozen=True)
class Config:
    """`LayerConfig`: the schema's fields and the sizes."""

    values: tuple[tuple[str, Any], ...]
    num_experts: int

    def to_str(self) -> str:
        """As JSON."""
        return json.dumps(dict(self.values))


def _prepare_layer_config(**keywords: Any) -> Config:
    schema = dataclasses.asdict(keywords["weight_schema"])
    sizes = {name: keywords[name] for name in ("shape_n", "shape_k", "has_bias")}
    assert keywords["device"].type == "cpu"
    return Config(tuple((schema | sizes).items()), keywords["num_experts"])


def _transform(config: Config, tensors: dict[str, torch.Tensor], already_padded: bool) -> dict[str, torch.Tensor]:
    assert already_padded
    values = dict(config.values)
    assert ("zero_point" in tensors) == values["has_zero_point"]
    assert ("bias" in tensors) == values["has_bias"]
    assert ("weight_scale_2" in tensors) == (values["weight_scale_2_type"] == "tensor")
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    return tensors


def _prepare_kernels(config: str, compute: str, tuning: dict[str, Any], device: torch.device) -> torch.Tensor:
    assert json.loads(compute)["gemm_type"] == "indexed"
    number = len(_KERNELS)
    _KERNELS.append((json.loads(config), tuning["block_shape"][0]))
    return torch.tensor([0, 1 << 30, number, 0])


_KERNELS: list[tuple[dict[str, Any], int]] = []


def _launch(
    *,
    configs: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_padded: torch.Tensor,
    locks: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    **tensors: torch.Tensor | None,
) -> None:
    config, rows = _KERNELS[int(configs[2])]
    assert not locks.any()
    assert list(inputs.shape)[1:] == [config["shape_k"]]
    assert list(outputs.shape) == [len(inputs) * top_k, config["shape_n"]]
    weights = restored(config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    for tile in range(int(num_tokens_padded) // rows):
        expert = int(expert_ids[tile])
        for route in sorted_ids[tile * rows : (tile + 1) * rows].tolist():
            if route < len(outputs):
                weight = weights[expert, : config["shape_n"], : config["shape_k"]]
                value = weight @ inputs[route // top_k].float()
                if bias is not None:
                    value = value + bias[expert, : config["shape_n"]].float()
                outputs[route] = value.to(outputs.dtype)


def _heuristics(config: Config, **keywords: Any) -> dict[str, Any]:
    assert keywords["shape_m"] >= 1
    # The products of a layer may have tiles of different heights.
    return {"block_shape": (8 if dict(config.values)["shape_n"] % 3 else 16, 64, 64)}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the imitation where the backend imports Humming from, and unloads what imported another."""

    def module(name: str, **members: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    launcher = module("humming.ops", launch_kernel=_launch)
    module("humming", ops=launcher)
    module("humming.config", GemmType=types.SimpleNamespace(INDEXED=types.SimpleNamespace(value="indexed")))
    module("humming.kernel")
    module("humming.kernel.humming", HummingKernel=types.SimpleNamespace(prepare_kernels=_prepare_kernels))
    module("humming.schema", HummingWeightSchema=Schema)
    module(
        "humming.transform",
        prepare_fp16_e8m0_scale=lambda config, tensors: (config, tensors),
        prepare_layer_config=_prepare_layer_config,
        transform_humming_tensors=_transform,
    )
    module("humming.tune", get_heuristics_config=_heuristics)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delitem(sys.modules, "moereg_humming.layer", raising=False)
