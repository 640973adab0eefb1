"""Experts that transformers keeps quantized: `FP8Experts`, behind its own interface, and gpt-oss in MXFP4."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts import own, serving
from moereg.integrations._experts.layouts import read_experts
from moereg.integrations.transformers import explain_model, prepare
from tests.support.no_backward import refuses_backward
from tests.support.tiny_models import tiny_config

HIDDEN, INTERMEDIATE, EXPERTS = 128, 128, 4
"""One block of fp8 scales each way for down, two for gate and up."""


# No CPU multiplies fp8; the emulation says so.
pytestmark = pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")


def fp8_model(**config: Any) -> tuple[Any, Any]:
    """A Mixtral with fp8 experts, and one with the numbers that those stand for."""
    from transformers import FineGrainedFP8Config, MixtralConfig, MixtralForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_hidden_layers": 1,
    }
    others = {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    plain = MixtralForCausalLM(MixtralConfig(**sizes, **others)).eval()
    model = MixtralForCausalLM(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    keep = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    replace_with_fp8_linear(model, modules_to_not_convert=keep, quantization_config=FineGrainedFP8Config(**config))
    experts, meant = model.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight = torch.randn_like(getattr(meant, name)) * 0.1
            block = weight.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
            scale = block.abs().amax(dim=(2, 4)) / 448
            codes = (block / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
            getattr(meant, name).copy_((codes.float() * scale[:, :, None, :, None]).flatten(3).flatten(1, 2))
            setattr(experts, name, torch.nn.Parameter(codes.flatten(3).flatten(1, 2)))
            setattr(experts, f"{name}_scale_inv", torch.nn.Parameter(scale))
    return model, plain


def test_fp8_experts_are_served_through_their_own_interface(caplog: pytest.LogCaptureFixture) -> None:
    fp8_model()  # Wraps the class, and the next model wraps it once more, as each layer of one model does.
    model, plain = fp8_model()
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "FP8Experts"
    ids = torch.tensor([[0, 1], [2, 3], [3, 1], [1, 0], [0, 2]])
    hidden, weights = torch.randn(5, HIDDEN), torch.rand(5, 2)
    with torch.no_grad():
        plain.set_experts_implementation("eager")
        expected = plain.model.layers[0].mlp.experts(hidden, ids, weights)
        prepared = prepare(model, progress=False)
        found = experts(hidden, ids, weights)
        assert prepared.layers[0].problem.quant.name == "fp8_block128"
        # Activations are rounded to fp8 too, blocks of them with a scale of their own.
        bound = 0.1 * expected.abs().max()
        assert (found - expected).abs().max() < bound
        # Codes say no dtype to compute in; a call in another one has a kernel of its own.
        assert (experts(hidden.bfloat16(), ids, weights).float() - expected).abs().max() < bound
        assert {dtype for _, dtype in serving.served(experts).kernels} == {torch.float32, torch.bfloat16}
        experts.down_proj_scale_inv.mul_(2)  # Written in place, and so followed.
        assert (experts(hidden, ids, weights) - 2 * expected).abs().max() < 2 * bound
    own.say_once.cache_clear()
    # No code of transformers' runs these on a CPU, so ours does, whoever wants gradients of its inputs.
    out = experts.requires_grad_(False)(hidden.requires_grad_(), ids, weights)
    assert (out.detach() - 2 * expected).abs().max() < 2 * bound
    refuses_backward(out)
    assert "RecursionError" not in caplog.text


def test_fp8_weights_are_kept_where_freeing_is_asked() -> None:
    model, _ = fp8_model()
    prepared = prepare(model, free=True, progress=False)
    assert prepared.layers[0].kept == "they are quantized in a layout that is not written back"
    assert model.model.layers[0].mlp.experts.down_proj is not None


@pytest.mark.parametrize(
    ("settings", "quant"),
    [
        ({}, "fp8_block128"),
        ({"weight_block_size": None}, "fp8_tensor_dynamic"),
        ({"weight_block_size": None, "activation_scheme": "static"}, "fp8_tensor_static"),
    ],
)
def test_what_fp8_settings_mean(settings: dict[str, Any], quant: str) -> None:
    experts = bare_fp8_experts(**settings)
    live = read_experts(experts)
    assert live.quant == quant
    weights = live.canonical(experts)
    assert weights.scheme.name == quant
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (EXPERTS, HIDDEN, INTERMEDIATE)
    weights.check_against(live.problem(2, torch.bfloat16))


def bare_fp8_experts(**settings: Any) -> Any:
    """`FP8Experts` full of ones."""
    from transformers import MixtralConfig
    from transformers.integrations.finegrained_fp8 import FP8Experts

    values = {"weight_block_size": (128, 128), "activation_scheme": "dynamic", "size": INTERMEDIATE, **settings}
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=values["size"], num_local_experts=EXPERTS)
    experts = FP8Experts(config, values["weight_block_size"], values["activation_scheme"])
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.ones(parameter.shape))
    return experts


def test_blocks_with_gate_and_up_rows_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"must be a multiple of 128, or one fp8 block has gate and up .* got 192"):
        read_experts(bare_fp8_experts(size=192))


def test_other_blocks_of_fp8_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"its fp8 scales are of blocks \(64, 64\), and moereg has blocks of"):
        read_experts(bare_fp8_experts(weight_block_size=(64, 64)))


def test_a_softcapped_gate_is_refused_in_fp8_too() -> None:
    experts = bare_fp8_experts()
    if not hasattr(experts, "gate_softcap"):
        pytest.skip("this transformers has no softcapped gate in fp8")
    experts.gate_softcap = experts.up_softcap = 3.0
    with pytest.raises(ArgumentError, match="its activation"):
        read_experts(experts)


class Swizzled:
    """What the other library wraps codes in: [E,K,N], in an order that its layout undoes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = SimpleNamespace(
            data=tensor.flip(0), layout=SimpleNamespace(unswizzle_data=lambda data: data.flip(0))
        )


def mxfp4_block(config: Any) -> tuple[Any, Any]:
    """An `Mxfp4GptOssMLP` as it is after loading, and the plain block with the numbers that it stands for."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="this transformers has no MXFP4")
    if not hasattr(mxfp4, "Mxfp4GptOssMLP"):
        pytest.skip("transformers before 5.23 routes inside its MXFP4 kernels")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    torch.manual_seed(0)
    plain = GptOssMLP(config)
    experts = mxfp4.Mxfp4GptOssExperts(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.3)
        for name, rows, columns in (("gate_up_proj", 2 * 64, 64), ("down_proj", 64, 64)):
            blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (4, rows, columns // 32), dtype=torch.uint8)
            meant = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(plain.experts, name).copy_(meant)
            getattr(experts, f"{name}_bias").copy_(getattr(plain.experts, f"{name}_bias"))
            del experts._parameters[name]
            setattr(experts, name, Swizzled(blocks.flatten(2).transpose(1, 2)))
            config_of = SimpleNamespace(weight_scale=Swizzled(scales.transpose(1, 2)))
            setattr(experts, f"{name}_precision_config", config_of)
    return mxfp4.Mxfp4GptOssMLP(plain.router, experts), plain


# Another class of the same contents is known by what its kernels read.
@pytest.mark.parametrize("is_subclass", [False, True])
def test_mxfp4_experts_are_patched_at_their_block(is_subclass: bool) -> None:
    config = tiny_config("gpt_oss")
    config.hidden_size = config.intermediate_size = 64
    config._experts_implementation = "eager"
    block, plain = mxfp4_block(config)
    if is_subclass:
        block.experts.__class__ = type("OtherExperts", (type(block.experts),), {})
    hidden = torch.randn(2, 3, 64)
    model = torch.nn.Sequential(torch.nn.ModuleDict({"mlp": block}))
    prepared = prepare(model, progress=False)
    assert prepared.layers[0].problem.quant.name == "mxfp4_w4a16"
    assert serving.served(block.experts) is not None
    with torch.no_grad():
        found, logits = block(hidden)
        expected, _ = plain(hidden)
        assert torch.equal(logits, plain.router(hidden.reshape(-1, 64))[0])
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_explaining_quantized_models(tmp_path: Any) -> None:
    config = tiny_config("mixtral")
    for quantization, quant in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
        ({"quant_method": "mxfp4"}, "mxfp4_w4a16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}, "unquantized"),
    ):
        config.quantization_config = quantization
        config.save_pretrained(tmp_path)
        assert explain_model(tmp_path)[0].problem.quant.name == quant
    for kept, names in (
        ("model.layers.0.mlp.experts", ["unquantized", "fp8_block128"]),
        ("model.layers.1.mlp", ["fp8_block128", "unquantized"]),
        ("mlp.experts", ["unquantized", "unquantized"]),
        ("lm_head", ["fp8_block128", "fp8_block128"]),
    ):
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [kept]}
        config.quantization_config = fp8
        config.save_pretrained(tmp_path)
        assert [layer.problem.quant.name for layer in explain_model(tmp_path)] == names
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"quant_method must be fp8 or mxfp4.*got 'gptq'"):
        explain_model(tmp_path)
