"""Writes layers in published layouts, from random codes and scales, with an own dequantizer in fp64."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from moereg.checkpoints import CheckpointLayer
from moereg.quantize import dequantize_weights

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]
"""Tensors of a matrix by their names in its module, and what they stand for, [N,K] in fp64."""
Writer = Callable[[int, int], Stored]

E2M1: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
NUM_EXPERTS: Final = 3


def fp8(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (torch.randn(rows, columns) * 40).to(torch.float8_e4m3fn)
    return codes, codes.double()


def fp4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two codes in a byte, the even column in the low half."""
    codes = torch.randint(0, 16, (rows, columns))
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), E2M1[codes]


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] of scales for groups of equal size; the last ones may be cut."""
    by_row = scale.double().repeat_interleave(-(-rows // scale.shape[0]), 0)[:rows]
    return by_row.repeat_interleave(-(-columns // scale.shape[1]), 1)[:, :columns]


def exponents(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(117, 124, (rows, columns), dtype=torch.uint8)
    return codes, 2.0 ** (codes.double() - 127)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.01 + 0.001


def per_tensor(rows: int, columns: int, *, is_static: bool = True, shape: tuple[int, ...] = ()) -> Stored:
    codes, values = fp8(rows, columns)
    scale = positive(*shape)
    inputs = {"input_scale": positive(*shape)} if is_static else {}
    return {"weight": codes, "weight_scale": scale, **inputs}, values * scale.double().reshape(())


def per_channel(rows: int, columns: int, *, is_flat: bool = False, dtype: torch.dtype = torch.float32) -> Stored:
    codes, values = fp8(rows, columns)
    scale = positive(rows, 1).to(dtype)
    return {"weight": codes, "weight_scale": scale.flatten() if is_flat else scale}, values * scale.double()


def int8_channel(rows: int, columns: int) -> Stored:
    codes, scale = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), positive(rows)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()[:, None]


def blocks(rows: int, columns: int, *, name: str = "weight_scale_inv", is_wide: bool = False) -> Stored:
    codes, values = fp8(rows, columns)
    scale = positive(-(-rows // 128), -(-columns // 128))
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"weight": codes, name: scale[:, None, :, None] if is_wide else scale}, values * wide.double()


def mxfp8(rows: int, columns: int, *, name: str = "weight_scale") -> Stored:
    codes, values = fp8(rows, columns)
    scale, factors = exponents(rows, columns // 32)
    return {"weight": codes, name: scale}, values * spread(factors, rows, columns)


def mxfp4(rows: int, columns: int, *, weight: str = "weight", scale: str = "weight_scale", **inputs: float) -> Stored:
    packed, values = fp4(rows, columns)
    codes, factors = exponents(rows, columns // 32)
    tensors = {weight: packed, scale: codes, **{name: torch.tensor(value) for name, value in inputs.items()}}
    return tensors, values * spread(factors, rows, columns)


def mxfp4_in_floats(rows: int, columns: int) -> Stored:
    tensors, values = mxfp4(rows, columns)
    scale = 2.0 ** (tensors["weight_scale"].float() - 127)
    return {"weight": tensors["weight"].view(torch.int8), "weight_scale_inv": scale}, values


def quantizer_names(rows: int, columns: int) -> Stored:
    """As Quark exports it for transformers."""
    tensors, values = per_tensor(rows, columns)
    names = {"weight": "weight", "weight_scale": "weight_quantizer.scale", "input_scale": "input_quantizer.scale"}
    return {names[name]: tensor for name, tensor in tensors.items()}, values


def deepseek_v4(rows: int, columns: int) -> Stored:
    tensors, values = mxfp4(rows, columns)
    scale = tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": tensors["weight"].view(torch.int8), "scale": scale}, values


def nvfp4(rows: int, columns: int, *, has_inputs: bool = True) -> Stored:
    packed, values = fp4(rows, columns)
    scale = (torch.rand(rows, columns // 16) * 100 + 1).to(torch.float8_e4m3fn)
    scale_2 = positive() / 100
    inputs = {"input_scale": positive()} if has_inputs else {}
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2, **inputs}
    return tensors, values * spread(scale, rows, columns) * scale_2.double()


def nvfp4_divided(rows: int, columns: int) -> Stored:
    """As compressed-tensors and AutoRound store it: by the global scales they divide."""
    tensors, values = nvfp4(rows, columns)
    scale_2, inputs = (1 / tensors.pop(name).reshape(1) for name in ("weight_scale_2", "input_scale"))
    packed = {"weight_packed": tensors.pop("weight"), "weight_global_scale": scale_2, "input_global_scale": inputs}
    return {**packed, **tensors}, values


def words(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of eight 4-bit codes along the last dimension, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    total = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def gptq(rows: int, columns: int, *, group: int = 32, offset: int = 1, is_symmetric: bool = True) -> Stored:
    """Version 1 stores zero points less 1, version 2 as they are."""
    codes = torch.randint(0, 16, (rows, columns))
    zeros = torch.full((columns // group, rows), 8) if is_symmetric else torch.randint(1, 16, (columns // group, rows))
    scale = positive(columns // group, rows).half()
    tensors = {"qweight": words(codes).mT, "qzeros": words(zeros - offset), "scales": scale}
    return tensors, (codes - spread(zeros.mT, rows, columns)) * spread(scale.mT, rows, columns)


AWQ_ROWS: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(rows: int, columns: int, *, group: int = 32) -> Stored:
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (columns // group, rows))
    scale = positive(columns // group, rows).half()
    ordered = [each.unflatten(-1, (-1, 8))[..., AWQ_ROWS].flatten(-2) for each in (codes, zeros)]
    tensors = {"qweight": words(ordered[0]), "qzeros": words(ordered[1]), "scales": scale}
    return tensors, (codes.mT - spread(zeros.mT, rows, columns)) * spread(scale.mT, rows, columns)


def packed_int4(rows: int, columns: int, *, group: int = 32) -> Stored:
    codes, scale = torch.randint(0, 16, (rows, columns)), positive(rows, columns // group).bfloat16()
    tensors = {"weight_packed": words(codes), "weight_scale": scale}
    return tensors, (codes - 8) * spread(scale, rows, columns)


@dataclasses.dataclass
class Layer:
    """A layer as written: config.json, tensors, and what these stand for."""

    config: dict[str, Any]
    tensors: Tensors
    w13: torch.Tensor
    w2: torch.Tensor
    router: torch.Tensor
    files: dict[str, Any] = dataclasses.field(default_factory=dict)


def compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    ignore = ["lm_head", "re:.*gate$", "re:.*router.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False, "symmetric": True, **more}


FP8_DYNAMIC: Final = compressed(
    "float-quantized", arguments(8, "float", "channel"), arguments(8, "float", "token") | {"dynamic": True}
)


QWEN: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
GATE_UP_DOWN: Final = ("gate_proj", "up_proj", "down_proj")
BLOCK: Final = "model.layers.0.mlp"


def layer_of(
    writer: Writer,
    quantization: Mapping[str, Any],
    *,
    sizes: tuple[int, int] = (96, 160),
    family: Mapping[str, Any] = QWEN,
    block: str = BLOCK,
    experts: str = "experts",
    names: tuple[str, ...] = GATE_UP_DOWN,
    router: str = "gate",
    router_writer: Writer | None = None,
    has_bias: bool = False,
    intermediate: str = "moe_intermediate_size",
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Layer:
    """Each expert's projections are modules of their own."""
    hidden_size, intermediate_size = sizes
    shapes = (*((intermediate_size, hidden_size) for _ in names[1:]), (hidden_size, intermediate_size))
    tensors: Tensors = dict(extra or {})
    values: list[list[torch.Tensor]] = [[] for _ in names]
    for expert in range(NUM_EXPERTS):
        for index, (name, (rows, columns)) in enumerate(zip(names, shapes, strict=True)):
            stored, value = writer(rows, columns)
            if has_bias:
                stored["bias"] = torch.randn(rows).bfloat16()
            tensors |= {f"{block}.{experts}.{expert}.{name}.{part}": tensor for part, tensor in stored.items()}
            values[index].append(value)
    *gate_up, down = map(torch.stack, values)
    if router_writer is None:
        weight = torch.randn(NUM_EXPERTS, hidden_size).bfloat16()
        stored, routed = {"weight": weight}, weight.double()
    else:
        stored, routed = router_writer(NUM_EXPERTS, hidden_size)
    tensors |= {f"{block}.{router}.{part}": tensor for part, tensor in stored.items()}
    if has_bias:
        tensors[f"{block}.{router}.bias"] = torch.randn(NUM_EXPERTS).bfloat16()
    sized = {"hidden_size": hidden_size, intermediate: intermediate_size}
    config = {**family, **sized, "quantization_config": {**quantization}}
    return Layer(
        config, {name: tensor.contiguous() for name, tensor in tensors.items()}, torch.cat(gate_up, 1), down, routed
    )


def fused(
    layer: Layer,
    *,
    block: str = BLOCK,
    names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
    rename: Callable[[str, str], str] = lambda name, part: f"{name}.{part}",
    is_transposed: bool = False,
    is_interleaved: bool = False,
) -> Layer:
    """The layer with one tensor for all experts, and one for gate and up; `rename` makes names of parts."""

    def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if first.numel() == 1:
            return torch.stack([first.reshape(()), second.reshape(())])
        rows = torch.stack([first, second], 1).flatten(0, 1) if is_interleaved else torch.cat([first, second])
        return rows

    def mirrored(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mT if is_transposed and tensor.dim() > 1 else tensor

    experts = f"{block}.experts."
    tensors = {name: tensor for name, tensor in layer.tensors.items() if not name.startswith(experts)}
    parts = {
        name.removeprefix(f"{experts}0.down_proj.") for name in layer.tensors if name.startswith(f"{experts}0.down")
    }
    for part in parts:
        both = []
        for expert in range(NUM_EXPERTS):
            gate, up, down = (layer.tensors[f"{experts}{expert}.{name}.{part}"] for name in GATE_UP_DOWN)
            if part == "input_scale":  # Experts have one input.
                both.append((mirrored(torch.maximum(gate, up)), mirrored(down)))
            else:
                both.append((mirrored(bytewise(joined, gate, up)), mirrored(down)))
        for name, each in zip(names, zip(*both, strict=True), strict=True):
            stacked = bytewise(lambda *tensors: torch.stack(tensors), *each)
            tensors[f"{block}.{rename(name, part)}"] = stacked.contiguous()
    return dataclasses.replace(layer, tensors=tensors)


def bytewise(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Applies a function that only moves elements; torch concatenates no 8-bit floats."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return fn(*tensors)
    return fn(*(tensor.view(torch.uint8) for tensor in tensors)).view(dtype)


def write(path: Path, layer: Layer) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(layer.config))
    for name, content in layer.files.items():
        (path / name).write_text(json.dumps(content))
    save_file(layer.tensors, path / "model.safetensors")
    return path


def check(found: CheckpointLayer, layer: Layer) -> None:
    # compressed-tensors' global scale is divided by: one rounding in fp32.
    for ours, theirs in zip(dequantize_weights(found.weights, torch.float64), (layer.w13, layer.w2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=0)
