"""Layers in the layouts that publishers and tools write, read by moereg and dequantized by an own rule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from moereg.checkpoints import load_experts, read_problem
from moereg.errors import CheckpointError
from moereg.numerics.reference import relative_error
from moereg.quantize import dequantize_weights
from tests.checkpoints import published
from tests.checkpoints.published import (
    BLOCK,
    FP8_DYNAMIC,
    GATE_UP_DOWN,
    NUM_EXPERTS,
    QWEN,
    Layer,
    check,
    compressed,
    layer_of,
    write,
)
from tests.checkpoints.published_layers import (
    BY_PROJECTION,
    FP8_BLOCK,
    GPT_OSS,
    IN_GPT_OSS,
    IN_KIMI_K3,
    IN_LLAMA4,
    LAYERS,
    NV,
    ODD,
    kimi_k3,
    made,
    mixed,
    modelopt,
    partial,
)
from tests.checkpoints.tiny_families import FAMILIES, MODELS


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_stands_for_what_its_files_say(tmp_path: Path, name: str) -> None:
    layer = made(name)
    path = write(tmp_path, layer)
    found = load_experts(path, 0)
    assert found.problem.quant.name == LAYERS[name][0]
    assert read_problem(path, 0) == found.problem
    check(found, layer)
    torch.testing.assert_close(found.router_weight.double(), layer.router.to(found.router_weight.dtype).double())
    if found.problem.has_bias:
        ours = found.weights.w13_bias
        assert ours is not None
        gate, up = (layer.tensors.get(f"{BLOCK}.experts.1.{part}_proj.bias") for part in ("gate", "up"))
        expected = layer.tensors.get(f"{BLOCK}.experts.gate_up_proj_bias")
        both = torch.cat([expected[1, 0::2], expected[1, 1::2]]) if expected is not None else torch.cat([gate, up])
        assert torch.equal(ours[1], both)
    rank = load_experts(path, 0, num_local_experts=1, ep_rank=2)
    assert torch.equal(rank.weights.w2.view(torch.uint8), found.weights.w2[2:].view(torch.uint8))


def test_kimi_k3_routes_and_computes_as_published(tmp_path: Path) -> None:
    """Routes by hand from the model's width, and experts by hand on what their projection gives them."""
    layer = kimi_k3()
    found = load_experts(write(tmp_path, layer), 0, dtype="float32")
    problem = found.problem
    assert str(problem.activation) == "situ"
    assert (found.model_type, problem.hidden_size, found.router_weight.shape[1]) == ("kimi_linear", 96, 224)
    assert found.has_shared_experts
    assert "read a projection of H=96" in found.notices[0]
    tokens = torch.randn(19, 224)
    scores = torch.sigmoid(tokens.double() @ layer.router.T)
    bias = layer.tensors[f"{IN_KIMI_K3['block']}.gate.e_score_correction_bias"]
    expected_ids = (scores + bias).topk(2).indices.sort().values
    chosen = scores.gather(1, expected_ids)
    topk_weights, topk_ids = found.route(tokens)
    order = topk_ids.argsort()
    assert torch.equal(topk_ids.gather(1, order).long(), expected_ids)
    expected_weights = (chosen / chosen.sum(1, keepdim=True)).float()
    torch.testing.assert_close(topk_weights.gather(1, order), expected_weights, rtol=1e-5, atol=1e-6)
    latent = torch.randn(19, 96) / 4
    out = torch.zeros(19, 96, dtype=torch.float64)
    for token, (weights, ids) in enumerate(zip(topk_weights.double(), topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            gate, up = (layer.w13[expert] @ latent[token].double()).chunk(2)
            capped = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            out[token] += weight * (layer.w2[expert] @ capped)
    assert relative_error(found.make_kernel()(latent, topk_weights, topk_ids), out) < 1e-5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"activation_situ_linear_beta": None}, "situ(up_softcap=None)"),
        ({"activation_situ_beta": 2}, "situ(gate_softcap=2.0)"),
        # As Moonshot's code takes absent entries.
        (
            {"activation_situ_beta": None, "activation_situ_linear_beta": None},
            "situ(gate_softcap=1.0, up_softcap=None)",
        ),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta must be above 0, got 0.0; take the file"),
        (
            {"activation_situ_linear_beta": "25"},
            "activation_situ_linear_beta of model type 'kimi_linear' must be a num",
        ),
        ({"hidden_act": "situp"}, "unknown hidden_act 'situp' (known: gelu, gelu_pytorch_tanh, silu, situ, swish)"),
    ],
)
def test_soft_caps_of_a_config(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    layer = kimi_k3()
    layer.config["text_config"].update(changes)
    path = write(tmp_path, layer)
    if "situ(" in expected:
        assert str(read_problem(path, 0).activation) == expected
        return
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        read_problem(path, 0)


ONE_NVFP4: Final = partial(layer_of, published.nvfp4, modelopt("NVFP4", group_size=16), sizes=(80, 48))


@pytest.mark.parametrize("where", ["hf_quant_config", "both", "nested", "nameless"])
def test_modelopt_says_it_in_any_of_four_ways(tmp_path: Path, where: str) -> None:
    """Its own file; config.json without the map; the whole of its file in config.json; without a method."""
    layer = layer_of(published.nvfp4, mixed(BY_PROJECTION), sizes=(80, 48))
    own = {key: value for key, value in layer.config["quantization_config"].items() if key != "quant_method"}
    outer = {
        "hf_quant_config": None,
        "both": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        "nested": {"producer": {"name": "modelopt"}, "quantization": own, "quant_method": "modelopt"},
        "nameless": own,
    }
    layer.config["quantization_config"] = outer[where]
    if where in ("hf_quant_config", "both"):
        layer.files["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": own}
    found = load_experts(write(tmp_path, layer), 0)
    assert found.problem.quant.name == "nvfp4"
    check(found, layer)


def _scales_of(layer: Layer, name: str = "input_scale") -> list[list[float]]:
    parts = [f"{BLOCK}.experts.{{}}.{projection}.{name}" for projection in GATE_UP_DOWN]
    return [[float(layer.tensors[part.format(expert)]) for part in parts] for expert in range(NUM_EXPERTS)]


def test_a_number_may_be_all_experts(tmp_path: Path) -> None:
    """ModelOpt quantizes the input of Llama 4's fused experts by one scale."""
    layer = made("fused llama4")
    name = f"{IN_LLAMA4['block']}.experts.gate_up_proj_input_scale"
    layer.tensors[name] = layer.tensors[name][1]
    found = load_experts(write(tmp_path, layer), 0)
    assert found.weights.a13_scale is not None
    assert found.weights.a13_scale.tolist() == [float(layer.tensors[name])] * NUM_EXPERTS
    check(found, layer)


@pytest.mark.parametrize(("dtype", "limit", "is_noted"), [("float16", None, True), ("float16", 7.0, False)])
def test_float16_may_overflow(tmp_path: Path, dtype: str, limit: float | None, is_noted: bool) -> None:
    family = {**(GPT_OSS if limit else QWEN), "dtype": dtype}
    changes: dict[str, Any] = {**IN_GPT_OSS, "family": family} if limit else {"family": family}
    path = write(tmp_path, layer_of(published.per_channel, FP8_DYNAMIC, sizes=ODD, **changes))
    assert any('dtype="bfloat16"' in notice for notice in load_experts(path, 0).notices) == is_noted
    assert not load_experts(path, 0, dtype="bfloat16").notices


@pytest.mark.parametrize("value", [None, 0.0, float("inf")])
@pytest.mark.parametrize("writer", [published.nvfp4, published.nvfp4_divided], ids=["modelopt", "compressed_tensors"])
def test_an_expert_that_was_never_calibrated_takes_the_largest_scale(tmp_path: Path, writer: Any, value: Any) -> None:
    nvfp4 = compressed("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"})
    is_divided = writer is not published.nvfp4
    layer = layer_of(writer, nvfp4 if is_divided else modelopt("NVFP4"), sizes=(80, 48))
    name = "input_global_scale" if is_divided else "input_scale"
    whole = torch.tensor(_scales_of(layer, name))
    whole = 1 / whole if is_divided else whole
    for projection in ("gate_proj", "up_proj", "down_proj"):
        del layer.tensors[f"{BLOCK}.experts.1.{projection}.{name}"]
        if value is not None:
            layer.tensors[f"{BLOCK}.experts.1.{projection}.{name}"] = torch.tensor(value)
    found = load_experts(write(tmp_path, layer), 0)
    a13, a2 = found.weights.a13_scale, found.weights.a2_scale
    assert a13 is not None
    assert a2 is not None
    assert a13[[0, 2]].tolist() == whole[[0, 2], :2].amax(1).tolist()
    assert a13[1] == a13.max() == whole[[0, 2], :2].max()
    assert a2[1] == a2.max() == whole[[0, 2], 2].max()
    (note,) = found.notices
    assert note.startswith("layer 0: experts 1 have no finite positive input scale")
    check(found, layer)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("value", [None, 0.0])
def test_one_of_gate_and_up_is_enough_to_lack(tmp_path: Path, projection: str, value: float | None) -> None:
    layer = ONE_NVFP4()
    del layer.tensors[f"{BLOCK}.experts.1.{projection}.input_scale"]
    if value is not None:
        layer.tensors[f"{BLOCK}.experts.1.{projection}.input_scale"] = torch.tensor(value)
    found = load_experts(write(tmp_path, layer), 0)
    scales = found.weights.a13_scale
    assert scales is not None
    others = [layer.tensors[f"{BLOCK}.experts.{e}.{part}.input_scale"] for e in (0, 2) for part in GATE_UP_DOWN[:2]]
    assert scales[1] == max(others)
    (note,) = found.notices
    assert "experts 1 have no finite positive input scale; they take the layer's largest a13_scale, " in note
    assert found.weights.a2_scale is not None
    assert len(found.weights.a2_scale.unique()) == NUM_EXPERTS


def test_scales_of_gate_alone_are_scales(tmp_path: Path) -> None:
    layer = ONE_NVFP4()
    for expert in range(NUM_EXPERTS):
        del layer.tensors[f"{BLOCK}.experts.{expert}.up_proj.input_scale"]
    found = load_experts(write(tmp_path, layer), 0)
    expected = [
        float(layer.tensors[f"{BLOCK}.experts.{expert}.gate_proj.input_scale"]) for expert in range(NUM_EXPERTS)
    ]
    assert found.weights.a13_scale is not None
    assert found.weights.a13_scale.tolist() == expected
    assert not found.notices


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("value", [None, 0.0])
def test_without_any_input_scale_each_token_has_its_own(tmp_path: Path, value: float | None) -> None:
    layer = ONE_NVFP4()
    for name in [name for name in layer.tensors if name.endswith("input_scale")]:
        del layer.tensors[name]
        if value is not None:
            layer.tensors[name] = torch.tensor(value)
    found = load_experts(write(tmp_path, layer), 0)
    assert found.weights.a13_scale is None
    assert found.weights.a2_scale is None
    assert len(found.notices) == (value is not None)
    hidden_states = torch.randn(5, 80).bfloat16()
    assert found.make_kernel()(hidden_states, *found.route(hidden_states)).isfinite().all()


def test_transformers_reads_the_same_deepseek_v4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own model, saved by it, with experts replaced by published fp4; on a CPU transformers dequantizes them."""
    family = FAMILIES["deepseek_v4"]
    if not (MODELS / family.module).is_dir():
        pytest.skip("this transformers has no deepseek_v4, which came later")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    model = family.make_of(family.model_class.config_class(**{**family.config().to_dict(), **sizes}))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = sorted(name for name in tensors if ".layers.3.ffn.experts." in name)
    assert len(experts) == 8 * 3
    for name in experts:
        stored, _ = published.deepseek_v4(*tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {**FP8_BLOCK, "modules_to_not_convert": [f"model.layers.{layer}" for layer in range(3)]}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "expert_dtype": "fp4", "quantization_config": quantization})
    )
    found = load_experts(tmp_path, 3)
    assert found.problem.quant.name == "mxfp4_mxfp8"
    # Without accelerate, which it needs on GPUs alone, transformers would refuse to load.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    theirs = family.block(family.model_class.from_pretrained(tmp_path, dtype=torch.float32)).experts
    ours = dequantize_weights(found.weights, torch.float32)
    for mine, other in zip(ours, (theirs.gate_up_proj, theirs.down_proj), strict=True):
        assert mine.any()
        assert torch.equal(mine, other)


# Faults, each of any layout. The error is one line that names the tensor, what it must be, and what it is.


def _scale_name(layer: Layer) -> str:
    """The last scale of a down projection."""
    ends = (".scales", ".scale", "_scale", "_scale_inv")
    down = [name for name in layer.tensors if any(part in name for part in ("down", ".2.w2.", "output", "w2_weight"))]
    return max(name for name in down if name.endswith(ends) and "input" not in name)


def _weight_name(layer: Layer) -> str:
    names = [name for name in layer.tensors if "experts" in name or "linear" in name]
    return max(names, key=lambda name: layer.tensors[name].numel())


def _drop(layer: Layer) -> str:
    del layer.tensors[name := _scale_name(layer)]
    return f"tensor {name!r} is missing"


def _add(layer: Layer) -> str:
    name = _weight_name(layer) + "_more"
    layer.tensors[name] = torch.ones(3)
    return f"have no tensor such as {name!r}"


def _mirror(layer: Layer) -> str:
    name = _weight_name(layer)
    layer.tensors[name] = layer.tensors[name].mT.contiguous()
    return f"{name}"


def _spoil(layer: Layer) -> str:
    name = _scale_name(layer)
    tensor = layer.tensors[name].clone()
    tensor.view(-1)[-1:].copy_(torch.tensor([float("nan") if tensor.is_floating_point() else 255]).to(tensor.dtype))
    layer.tensors[name] = tensor
    return f"{name} of "


def _other_type(layer: Layer) -> str:
    name = _weight_name(layer)
    layer.tensors[name] = layer.tensors[name].to(torch.float64)
    return f"{name} must be "


FAULTS: Final = {"missing": _drop, "extra": _add, "transposed": _mirror, "nan": _spoil, "type": _other_type}
CURE: Final = {"nan": "export the checkpoint with a finite one"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_fault_is_one_line(tmp_path: Path, name: str, fault: str) -> None:
    layer = made(name)
    expected = FAULTS[fault](layer)
    path = write(tmp_path, layer)
    with pytest.raises(CheckpointError) as caught:
        load_experts(path, 0)
    message = str(caught.value)
    assert expected in message, message
    assert "\n" not in message
    assert CURE.get(fault, "; take config.json and tensors from one export") in message
