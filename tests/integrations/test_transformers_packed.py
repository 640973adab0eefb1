"""Experts of live models, stored quantized behind parameters of the usual shape: storage, loading, gradients."""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moereg
from moereg.errors import ArgumentError
from moereg.integrations._experts.packed import PackedExperts, pack, stored_in
from moereg.integrations._experts.serving import served
from moereg.integrations.transformers import (
    dequantize_experts,
    prepare,
    quantize_experts,
    quantize_on_load,
    restore,
)
from moereg.quantize import quantize_weights
from moereg.weights.unpermute import same_bits
from tests.integrations.test_transformers_quantized import fp8_model
from tests.integrations.test_transformers_trained import gradients, same
from tests.support.live_models import PROMPT, close, eager, logits_of
from tests.support.tiny_models import tiny_config, tiny_model

FAMILIES: Final = ("qwen3_moe", "mixtral", "gpt_oss")
SCHEME: Final = "int4_w4a16_g32"
SCHEMES: Final = (
    SCHEME,
    "nf4",
    "fp8_block128",
    "mxfp4_w4a16",
    "nf4_dq",
    "int4_w4a16_g32_zp",
    "nvfp4_w4a16",
    "int8_w8a16",
)
NAMES: Final = ("gate_up_proj", "down_proj")


def experts_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].mlp.experts


def packed_pair(family: str, scheme: str = SCHEME, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A quantized model, and one with the restored weights."""
    model = tiny_model(family, dtype)
    quantize_experts(model, scheme)
    plain = copy.deepcopy(model)
    dequantize_experts(plain)
    return model, plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_eager_on_restored_weights(
    scheme: str, family: str, steps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = packed_pair(family, scheme)
    plain.set_experts_implementation("eager")
    with caplog.at_level(logging.WARNING, "moereg"):
        found = gradients(model.train())
    assert same(found, gradients(plain.train()))
    # Frozen experts let gradients through: the first layer's router and the embedding have theirs.
    assert not any("experts" in name for name in found)
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"} <= found.keys()
    assert steps == ["forward"] * 2 + ["backward hidden_states topk_weights"] * 2
    assert not [record for record in caplog.records if record.name == "moereg"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_fp64(family: str) -> None:
    model, plain = packed_pair(family)
    plain.set_experts_implementation("eager")
    assert same(gradients(model.train()), {name: each.float() for name, each in gradients(plain.double()).items()})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_module_without_grad_restores_or_uses_a_prepared_kernel(family: str, steps: list[str]) -> None:
    model, plain = packed_pair(family)
    expected = eager(plain)
    assert close(logits_of(model.eval()), expected)
    assert close(logits_of(model.train()), expected)
    assert steps == ["forward"] * 4
    assert prepare(model, progress=False).layers[0].problem.quant.name == SCHEME
    steps.clear()
    assert close(logits_of(model.eval()), expected, 1e-5)
    assert steps == ["infer"] * 2
    assert same(gradients(model), gradients(plain))
    restore(model)
    assert close(logits_of(model), expected)
    # Without moereg every operation restores what it reads.
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert close(logits_of(model), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_their_names_shapes_and_dtypes(family: str) -> None:
    model, before = tiny_model(family, torch.bfloat16), tiny_model(family, torch.bfloat16)
    said = str(quantize_experts(model, SCHEME))
    kinds = [{name: (each.shape, each.dtype) for name, each in one.named_parameters()} for one in (model, before)]
    assert kinds[0] == kinds[1]
    assert [name for name, _ in model.state_dict().items()] == [name for name, _ in before.state_dict().items()]
    for layer in range(2):
        for name in NAMES:
            value = getattr(experts_of(model, layer), name)
            assert isinstance(value, PackedExperts)
            assert isinstance(value, torch.nn.Parameter)
            assert not value.requires_grad
            assert value.restored().shape == value.shape
            # Half a step of 15 in a group's range of at most 8 standard deviations of 0.2.
            assert (value.restored() - getattr(experts_of(before, layer), name)).abs().max() < 0.5 * 1.6 / 15 + 0.01
    assert said.startswith(f"experts of 2 layers in {SCHEME}: ")


class TestStorage:
    @pytest.fixture
    def packed(self) -> Any:
        model = tiny_model("gpt_oss", torch.bfloat16)
        quantize_experts(model, SCHEME)
        return experts_of(model).gate_up_proj

    def test_copies_stay_packed(self, packed: Any) -> None:
        stream = io.BytesIO()
        torch.save(packed, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        others = [
            packed.detach(),
            packed.data,
            packed.clone(),
            copy.deepcopy(packed),
            packed.to("cpu", copy=True),
            loaded,
        ]
        for other in others:
            assert type(other) is PackedExperts
            assert torch.equal(other.restored(), packed.restored())
        shared = [other.stored["w13"].data_ptr() == packed.stored["w13"].data_ptr() for other in others]
        assert shared == [True, True, False, False, False, False]

    def test_a_dtype_is_what_values_are_restored_to(self, packed: Any) -> None:
        wide = packed.float()
        assert type(wide) is PackedExperts
        assert wide.dtype == torch.float32
        assert torch.equal(wide.restored().bfloat16(), packed.restored())
        assert not torch.equal(wide.restored(), packed.restored().float())

    def test_operations_restore(self, packed: Any) -> None:
        values = packed.restored()
        assert type(packed + 1) is torch.Tensor
        assert torch.equal(packed + 1, values + 1)
        assert torch.equal(packed[2], values[2])
        assert torch.equal(packed[-1], values[-1])
        assert torch.equal(packed[:, 3], values[:, 3])
        assert torch.equal(packed.transpose(1, 2), values.transpose(1, 2))
        assert torch.empty_like(packed).shape == packed.shape

    def test_writes_are_refused(self, packed: Any) -> None:
        for write in (packed.data.add_, packed.data.mul_):
            with pytest.raises(
                ArgumentError, match=r"dequantize_experts\(model\) gives parameters that can be written"
            ):
                write(2)
        with pytest.raises(ArgumentError, match="can only be set to another one, got a plain tensor"):
            packed.data = packed.restored()

    def test_copied_values_are_quantized(self, packed: Any) -> None:
        other, values = packed.clone(), packed.restored() * 2
        other.copy_(values)
        assert torch.equal(other.restored(), pack(values, packed.form).restored())
        assert close(other.restored(), values, 0.1)
        assert not close(packed.restored(), values, 0.3)
        other.data = packed.data
        assert torch.equal(other.restored(), packed.restored())


def test_new_values_are_read(steps: list[str]) -> None:
    model, plain = packed_pair("mixtral")
    other, _ = packed_pair("mixtral")
    with torch.no_grad():
        for name in NAMES:
            getattr(experts_of(other), name).copy_(getattr(experts_of(other), name).restored() * 2)
            getattr(experts_of(plain), name).copy_(getattr(experts_of(other), name).restored())
    logits_of(model)
    before = experts_of(model).gate_up_proj
    model.load_state_dict(other.state_dict())  # In place.
    assert experts_of(model).gate_up_proj is before
    assert close(logits_of(model), eager(plain))
    again, _ = packed_pair("mixtral")
    assert not close(logits_of(again), eager(plain), 1e-3)
    for name in NAMES:  # Other tensors.
        getattr(experts_of(again), name).data = getattr(experts_of(other), name).data
    assert close(logits_of(again), eager(plain))
    (trainer,) = served(experts_of(again)).trainers.values()
    held = trainer.training_kernel().held.now
    assert held["w13"].data_ptr() == experts_of(other).gate_up_proj.stored["w13"].data_ptr()  # No copy.
    moved = model.to(torch.bfloat16)
    assert isinstance(experts_of(moved).gate_up_proj, PackedExperts)
    # Of one layer: rounding may send a token of a model to another expert.
    experts = experts_of(moved)
    hidden, ids = torch.randn(5, 32, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [3, 1], [1, 0], [0, 2]])
    found = experts(hidden, ids, torch.full((5, 2), 0.5))
    assert "infer" not in steps
    assert len(served(experts).trainers) == 1  # Of the tensors before nothing is kept.
    moved.set_experts_implementation("eager")
    assert close(found, experts(hidden, ids, torch.full((5, 2), 0.5)), 0.02)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations take or return while it is entered, and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, found)):
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
                storage = each.untyped_storage()
                self._held[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._held = {place: each for place, each in self._held.items() if not each[0].expired()}
        self.most = max(self.most, sum(num_bytes for _, num_bytes in self._held.values()))
        return found


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, scheme: str | None, **others: Any) -> Any:
    import transformers

    config = quantize_on_load(scheme) if scheme else quantize_on_load(read=moereg.load_experts)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **others)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_quantized_as_a_loaded_model_is(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.bfloat16)
    found = loaded(saved(model, tmp_path), SCHEME, dtype=torch.bfloat16)
    quantize_experts(model, SCHEME)
    for one, other in zip(found.parameters(), model.parameters(), strict=True):
        assert type(one) is type(other)
        assert one.requires_grad == other.requires_grad
        assert all(map(same_bits, stored_in(one), stored_in(other)))
    assert same(gradients(found.train()), gradients(model.train()))
    assert found.config._experts_implementation == "moereg"


def is_packed(parameter: Any) -> bool:
    return isinstance(parameter, PackedExperts)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_loading_takes_three_layers_more_than_the_packed_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    config = tiny_config(family)
    config.num_hidden_layers, config.hidden_size, config.vocab_size = 12, 128, 8
    if family == "gpt_oss":
        config.layer_types = ["full_attention"] * 12
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer = sum(each.numel() * 2 for name, each in experts_of(model).named_parameters())
    saved(model, tmp_path)
    with Live() as live:
        found = loaded(tmp_path, SCHEME, dtype=torch.bfloat16)
    size = sum(part.numel() * part.itemsize for each in found.parameters() for part in stored_in(each))
    assert live.most <= size + 3 * layer
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # Operations of other threads are not seen.
    with Live() as live:
        quantize_experts(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), SCHEME)
    assert live.most > size + 3 * layer


def test_transformers_reserves_room_for_codes_alone() -> None:
    from transformers.modeling_utils import get_total_byte_count

    from moereg.integrations._experts.loading import ExpertsQuantizer

    model = tiny_model("qwen3_moe", torch.bfloat16)
    quantizer = ExpertsQuantizer(quantize_on_load(SCHEME))
    quantizer._process_model_before_weight_loading(model)
    device = torch.device("cuda")
    found = get_total_byte_count(model, {name: device for name, _ in model.named_parameters()}, quantizer)
    experts = sum(each.numel() for each in experts_of(model).parameters()) * len(model.model.layers)
    assert found[device] == 2 * sum(each.numel() for each in model.parameters()) - experts * 1.5


@pytest.fixture
def mxfp4(tmp_path: Path) -> Iterator[Path]:
    """A gpt-oss whose checkpoint has its experts in MXFP4, as published."""
    import transformers

    config = tiny_config("gpt_oss")
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "expert" in name:
                parameter.normal_(std=0.2)
    saved(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        up, down = (tensors.pop(prefix + name).transpose(1, 2) for name in NAMES)
        w13 = torch.cat([up[:, 0::2], up[:, 1::2]], dim=1)
        weights = quantize_weights(moereg.ExpertWeights(w13=w13, w2=down.contiguous()), "mxfp4_w4a16")
        for name, codes, scales in (
            ("gate_up_proj", alternating(weights.w13), alternating(weights.w13_scale.view(torch.uint8))),
            ("down_proj", weights.w2, weights.w2_scale.view(torch.uint8)),
        ):
            tensors[f"{prefix}{name}_blocks"] = codes.unflatten(2, (-1, 16)).contiguous()
            tensors[f"{prefix}{name}_scales"] = scales
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def alternating(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2).contiguous()


def test_mxfp4_is_read_before_anything_is_swizzled(mxfp4: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    with caplog.at_level(logging.INFO, "moereg"):
        found = loaded(mxfp4, None, dtype=torch.bfloat16)
    # Of each of 4 experts 192 x 64 and 64 x 96 codes, and a scale for 32 of them.
    assert "experts of 2 layers in mxfp4_w4a16: 78.3 kB, gate and up rows put one after the other" in caplog.text
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        mxfp4, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    for layer in range(2):
        for name in NAMES:
            value = getattr(experts_of(found, layer), name)
            assert value.form.scheme.name == "mxfp4_w4a16"
            assert not value.requires_grad
            assert torch.equal(value.restored(), getattr(experts_of(plain, layer), name))
        assert torch.equal(experts_of(found, layer).gate_up_proj_bias, experts_of(plain, layer).gate_up_proj_bias)
    assert close(logits_of(found).float(), eager(plain).float(), 0.02)


@pytest.mark.parametrize(
    "scale", [{"weight_block_size": (128, 128)}, {"weight_block_size": None}], ids=["block", "tensor"]
)
def test_fp8_experts_keep_their_codes(scale: dict[str, Any]) -> None:
    model, plain = fp8_model(**scale)
    plain.config = experts_of(plain).config = copy.deepcopy(plain.config)  # Both had the same.
    codes = experts_of(model).gate_up_proj
    quantize_experts(model)
    experts = experts_of(model)
    assert [name for name, _ in experts.named_parameters()] == list(NAMES)
    assert experts.gate_up_proj.stored["w13"].data_ptr() == codes.data_ptr()
    assert experts.gate_up_proj.dtype == torch.float32
    assert torch.equal(experts.gate_up_proj.restored(), experts_of(plain).gate_up_proj)
    experts_of(plain).requires_grad_(False)
    plain.set_experts_implementation("eager")
    assert same(gradients(model.train()), gradients(plain.train()))


def test_dequantized_fp8_experts_run_transformers_code_for_plain_weights(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = fp8_model()
    plain.config = experts_of(plain).config = copy.deepcopy(plain.config)
    plain.set_experts_implementation("eager")
    quantize_experts(model)
    dequantize_experts(model)
    hidden, ids, weights = torch.randn(3, 128), torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.rand(3, 2)
    found, expected = (
        torch.func.grad(lambda x, each=each: experts_of(each)(x, ids, weights).square().sum())(hidden)
        for each in (model, plain)
    )
    assert close(found, expected)
    assert "where transformers' own grouped_mm does" in caplog.text
    model.set_experts_implementation("eager")
    assert close(experts_of(model)(hidden, ids, weights), experts_of(plain)(hidden, ids, weights))


def test_a_dequantized_model_is_saved_and_loaded(tmp_path: Path) -> None:
    import transformers

    found = loaded(saved(tiny_model("mixtral"), tmp_path / "first"), SCHEME)
    dequantize_experts(found)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved(found, tmp_path / "again"))
    assert not hasattr(again.config, "quantization_config")
    for one, other in zip(found.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def taken_from(model: Any, layer: int) -> moereg.ExpertWeights:
    """The weights of a quantized model's layer."""
    experts = experts_of(model, layer)
    return moereg.ExpertWeights(**experts.gate_up_proj.stored, **experts.down_proj.stored, quant=SCHEME)


def test_other_weights_take_their_place() -> None:
    model, other = tiny_model("gpt_oss"), tiny_model("gpt_oss", seed=1)
    quantize_experts(other, SCHEME)
    quantize_experts(model, weights=lambda layer: taken_from(other, layer))
    for layer in range(2):
        for name in NAMES:
            assert torch.equal(getattr(experts_of(model, layer), name), getattr(experts_of(other, layer), name))


class TestRefused:
    @pytest.mark.parametrize(
        ("scheme", "error"),
        [
            (None, "scheme is required for experts in 16 or 32 bits"),
            ("unquantized", "scheme must have quantized weights and no static activation scales"),
            ("fp8_tensor_static", "such as int4_w4a16_g128"),
        ],
    )
    def test_schemes(self, scheme: str | None, error: str) -> None:
        model = tiny_model("mixtral")
        with pytest.raises(ArgumentError, match=error):
            quantize_experts(model, scheme)
        assert not is_packed(experts_of(model).gate_up_proj)

    @pytest.mark.parametrize("change", ["experts", "width", "device", "unquantized"])
    def test_weights_of_another_layer(self, change: str) -> None:
        model, _ = packed_pair("mixtral")
        weights = taken_from(model, 0)
        num_experts, width, scheme, device = 4, 48, SCHEME, "cpu"
        if change == "experts":
            num_experts = 3
            weights = moereg.ExpertWeights(**{n: t[:3] for n, t in weights.tensors().items()}, quant=SCHEME)
        elif change == "width":
            width = 64
            weights = quantize_weights(
                moereg.ExpertWeights(w13=torch.randn(4, 128, 32), w2=torch.randn(4, 32, 64)), SCHEME
            )
        elif change == "device":
            device = "meta"
            weights = moereg.ExpertWeights.unchecked(
                {n: t.to("meta") for n, t in weights.tensors().items()}, weights.scheme
            )
        else:
            scheme = "unquantized"
            weights = moereg.ExpertWeights(w13=torch.randn(4, 96, 32), w2=torch.randn(4, 32, 48))
        dequantize_experts(model)
        sizes = f"{num_experts} experts with hidden size 32 and intermediate size {width} on {device}"
        with pytest.raises(ArgumentError, match=f"must be quantized, 4 experts .* got {scheme}, {sizes}; pass those"):
            quantize_experts(model, weights=lambda layer: weights)
        assert not is_packed(experts_of(model).gate_up_proj)

    def test_a_scheme_that_nothing_would_have(self) -> None:
        with pytest.raises(ArgumentError, match=f"must be None with weights, which have one, got '{SCHEME}'; leave"):
            quantize_experts(tiny_model("mixtral"), SCHEME, weights=lambda layer: pytest.fail("they are not read"))
        model, _ = fp8_model()
        with pytest.raises(ArgumentError, match=rf"quantized already \(FP8Experts\), got {SCHEME}; leave it out"):
            quantize_experts(model, SCHEME)

    def test_neither_a_scheme_nor_a_reader(self) -> None:
        with pytest.raises(ArgumentError, match="got both or none; give one"):
            quantize_on_load()

    def test_twice(self) -> None:
        model, _ = packed_pair("mixtral")
        with pytest.raises(ArgumentError, match=r"is quantized already; call dequantize_experts\(model\)"):
            quantize_experts(model, SCHEME)

    @pytest.mark.parametrize("family", ["dbrx", "llama4"])
    def test_classes_without_the_interface(self, family: str) -> None:
        with pytest.raises(ArgumentError, match="does not use transformers' experts interface"):
            quantize_experts(tiny_model(family), SCHEME)

    def test_checkpoints(self, mxfp4: Path, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"read=moereg\.load_experts for a checkpoint with quantized experts"):
            loaded(mxfp4, SCHEME)
        tensors = load_file(mxfp4 / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)
        save_file(tensors, mxfp4 / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ArgumentError, match="whose experts alone are quantized, got 'model"):
            loaded(mxfp4, None)

    def test_a_checkpoint_in_16_bits_without_a_scheme(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="needs a scheme for a checkpoint with 16-bit experts"):
            loaded(saved(tiny_model("mixtral"), tmp_path), None)

    def test_weights_that_require_gradients(self, caplog: pytest.LogCaptureFixture) -> None:
        model, _ = packed_pair("mixtral")
        experts_of(model).gate_up_proj.requires_grad_()
        with caplog.at_level(logging.WARNING, "moereg"):
            model(PROMPT, labels=PROMPT)
        assert "its parameters require gradients, and quantized experts are frozen" in caplog.text

    def test_a_quantized_model_is_not_saved_as_a_whole(self, tmp_path: Path) -> None:
        found = loaded(saved(tiny_model("mixtral"), tmp_path), SCHEME)
        with pytest.raises(ValueError, match="moereg"):
            found.save_pretrained(tmp_path / "again")
