"""What errors about files tell their reader to do, done to the file that raised them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from moereg.checkpoints import load_experts
from moereg.errors import CheckpointError
from tests.checkpoints import published
from tests.checkpoints.cures import CURES, Case
from tests.checkpoints.published import BLOCK, FP8_DYNAMIC, Layer, check, layer_of, write
from tests.checkpoints.published_layers import made, modelopt
from tests.checkpoints.small_checkpoint import EXPERTS
from tests.checkpoints.test_published_formats import FAULTS

GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


Break = Callable[[Layer], object]


def settings(**changes: Any) -> Break:
    return lambda layer: layer.config["quantization_config"].update(changes)


def config(**changes: Any) -> Break:
    return lambda layer: layer.config.update(changes)


def tensor(name: str, value: Callable[[torch.Tensor], torch.Tensor | None]) -> Break:
    def change(layer: Layer) -> None:
        replaced = value(layer.tensors.pop(f"{BLOCK}.{name}"))
        if replaced is not None:
            layer.tensors[f"{BLOCK}.{name}"] = replaced

    return change


def _mixes_experts(layer: Layer) -> None:
    """Expert 1 in 16 bits, as the map says."""
    layers = layer.config["quantization_config"]["quantized_layers"]
    for index, name in enumerate(published.GATE_UP_DOWN):
        module = f"{BLOCK}.experts.1.{name}"
        del layers[module]
        for part in [part for part in layer.tensors if part.startswith(module)]:
            del layer.tensors[part]
        layer.tensors[f"{module}.weight"] = (*layer.w13[1].chunk(2), layer.w2[1])[index].bfloat16().contiguous()


def _mixes_projections(layer: Layer) -> None:
    """Every down matrix in 16 bits, as the map says, so that no rank has experts of one format."""
    for expert in range(published.NUM_EXPERTS):
        module = f"{BLOCK}.experts.{expert}.down_proj"
        del layer.config["quantization_config"]["quantized_layers"][module]
        for part in [part for part in layer.tensors if part.startswith(module)]:
            del layer.tensors[part]
        layer.tensors[f"{module}.weight"] = layer.w2[expert].bfloat16().contiguous()


def _takes_the_map(layer: Layer) -> None:
    layer.config["quantization_config"]["quantized_layers"] = {}


def _ordered(layer: Layer) -> None:
    layer.tensors[f"{BLOCK}.experts.1.down_proj.g_idx"] = torch.arange(160, dtype=torch.int32) % 5


def _strategy(layer: Layer) -> None:
    group = layer.config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] = {**group["weights"], "strategy": "tensor"}
    group["input_activations"] = None


def _gptq() -> Layer:
    return layer_of(published.gptq, GPTQ)


def _compressed() -> Layer:
    return layer_of(published.per_channel, copy.deepcopy(FP8_DYNAMIC), sizes=(37, 23))


def _static() -> Layer:
    return layer_of(published.per_tensor, modelopt("FP8"), sizes=(37, 23))


def _plain(rows: int, columns: int) -> published.Stored:
    weight = torch.randn(rows, columns).bfloat16()
    return {"weight": weight}, weight.double()


def _bf16() -> Layer:
    layer = layer_of(_plain, {}, sizes=(37, 23))
    layer.tensors |= {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in layer.tensors.items()}
    layer.config = {**layer.config, "num_hidden_layers": 2}
    return layer


def _asymmetric(layer: Layer) -> None:
    layer.config["quantization_config"]["global_quant_config"]["weight"]["symmetric"] = False


def _quark(layer: Layer, dtype: str) -> None:
    layer.config["quantization_config"]["global_quant_config"]["weight"]["dtype"] = dtype


SCALE: Final = "experts.1.down_proj.weight_scale"
REFUSALS: Final[dict[str, tuple[Callable[[], Layer], Break, str]]] = {
    "method": (_gptq, settings(quant_method="hqq"), "'hqq' is not read"),
    "no method": (_gptq, settings(quant_method=None), "must name its quant_method"),
    "bits": (_gptq, settings(bits=8), "bits of quant method gptq must be 4, got 8"),
    "group": (_gptq, settings(group_size=64), "got 96 columns in groups of 64"),
    "order": (_gptq, _ordered, "columns that are ordered by activation"),
    "version": (_gptq, settings(checkpoint_format="marlin"), "checkpoint_format of quant method gptq"),
    "gptq_v2": (_gptq, settings(checkpoint_format="gptq_v2"), "zero points must be 8"),
    "pattern": (_gptq, settings(quant_method="awq", zero_point=True, modules_to_not_convert=["a("]), "got 'a('"),
    "rotation": (lambda: made("auto_round auto_gptq"), settings(rotation_config={"type": "hadamard"}), "rotate"),
    "packing": (lambda: made("auto_round auto_gptq"), settings(packing_format="mlx"), "packing_format of auto-round"),
    "round bits": (lambda: made("auto_round auto_awq"), settings(bits=2), "bits of quant method awq must be 4, got 2"),
    "algorithm": (lambda: made("modelopt_fp8"), settings(quant_algo="NVFP4_AWQ"), "pre_quant_scale"),
    "unknown algorithm": (lambda: made("modelopt_fp8"), settings(quant_algo="INT2"), "'INT2' is unknown"),
    "fp4 group": (lambda: made("modelopt_mxfp4"), settings(group_size=64), "must be 32, got 64"),
    "mixed experts": (lambda: made("mixed"), _mixes_experts, "must all be stored in one format"),
    "mixed projections": (lambda: made("mixed"), _mixes_projections, "; dequantize the others and give"),
    "no map": (lambda: made("mixed"), _takes_the_map, "quantized_layers must say what MIXED_PRECISION mixes"),
    "quark type": (lambda: made("quark ptpc"), lambda layer: _quark(layer, "int4"), "dtype must be in"),
    "quark pair": (lambda: made("quark fp8"), lambda layer: _quark(layer, "int8"), "quark activations must be"),
    "quark zeros": (lambda: made("quark ptpc"), _asymmetric, "quark weights must be of a kind"),
    "fp8 blocks": (lambda: made("fp8 with its router"), settings(weight_block_size=[64, 64]), "got [64, 64]"),
    "static blocks": (lambda: made("fp8 with its router"), settings(activation_scheme="static"), "must be dynamic"),
    "expert_dtype": (lambda: made("fused fp4"), settings(expert_dtype="fp6"), "must be in ['fp8', 'fp4'], got 'fp6'"),
    "static scale": (_static, tensor("experts.1.down_proj.input_scale", torch.zeros_like), "finite and positive"),
    "no static scale": (_static, tensor("experts.1.down_proj.input_scale", lambda _: None), "is missing"),
    "nan scale": (_static, tensor(SCALE, lambda scale: scale * float("nan")), "finite and not negative"),
    "nan input": (
        lambda: layer_of(published.nvfp4, modelopt("NVFP4"), sizes=(80, 48)),
        tensor("experts.1.down_proj.input_scale", lambda scale: scale * float("nan")),
        "finite and positive, got nan",
    ),
    "zero divisor": (
        lambda: made("auto_round nv"),
        tensor("experts.1.down_proj.weight_global_scale", torch.zeros_like),
        "since they divide, got 0.0",
    ),
    "no router": (_bf16, tensor("gate.weight", lambda _: None), "the router of layer 0 is missing"),
    "two dtypes": (_bf16, tensor("experts.1.down_proj.weight", torch.Tensor.float), "must have one dtype"),
    "type": (_bf16, config(model_type=None), "must hold model_type, got None"),
    "other type": (_bf16, config(model_type="qwen9"), "unknown model type 'qwen9'"),
    "router": (_bf16, config(norm_topk_prob="yes"), "norm_topk_prob"),
    "ignored entry": (_bf16, config(scoring_func="sigmoid"), "must be in ['softmax'], got 'sigmoid'"),
    "activation": (_bf16, config(hidden_act="mish"), "unknown hidden_act 'mish'"),
    "top_k": (_bf16, config(num_experts_per_tok=4), "top_k must be in 1..num_experts, got top_k=4"),
    "groups": (lambda: made("divided granite"), settings(config_groups=None), "needs config_groups"),
    "strategy": (_compressed, _strategy, "float8 tensor weights with 16-bit"),
    "size": (_bf16, config(hidden_size=38), "must be [23, 38]"),
    "experts": (_bf16, config(num_experts=4), "is missing"),
    "dense": (_bf16, config(mlp_only_layers=[0]), "is dense, but"),
    **{f"a fault: {fault}": (lambda: made("mixed"), FAULTS[fault], "") for fault in FAULTS},
}


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_an_error_tells_to_do_works(tmp_path: Path, name: str) -> None:
    make, break_it, expected = REFUSALS[name]
    torch.manual_seed(0)
    good = make()
    check(load_experts(write(tmp_path, good), 0), good)
    broken = copy.deepcopy(good)
    break_it(broken)
    write(tmp_path, broken)
    with pytest.raises(CheckpointError) as caught:
        load_experts(tmp_path, 0)
    message = str(caught.value)
    assert expected in message, message
    cures = [cure for words, cure in CURES.items() if words in message]
    assert cures, message
    for cure in cures:
        write(tmp_path, broken)
        cure(Case(good, broken, tmp_path, message))


def _remove(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors[f"{EXPERTS}.3.down_proj.weight"]
    save_file(tensors, file)


@pytest.mark.parametrize("break_it", [_remove, _truncate, _without_a_tensor])
def test_a_file_that_lacks_what_the_index_names_is_downloaded_again(sharded: Path, break_it: Any) -> None:
    file = sharded / "experts1.safetensors"
    good = file.read_bytes()
    break_it(file)
    with pytest.raises(CheckpointError, match=r"experts1\.safetensors.*; download that file") as caught:
        load_experts(sharded, 1)
    assert "one export" not in str(caught.value)
    file.write_bytes(good)
    load_experts(sharded, 1)
