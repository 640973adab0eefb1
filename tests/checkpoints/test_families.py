"""Every family of the installed transformers with routed experts: read like its own model, or refused with a reason."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moereg import cli
from moereg.checkpoints import CheckpointLayer, load_experts, moe_layers
from moereg.checkpoints._files import CheckpointFiles
from moereg.checkpoints._manifest import list_layer
from moereg.checkpoints._models import MODEL_TYPES, _step_reason, count_layers
from moereg.errors import ArgumentError, CheckpointError, MoeregError
from moereg.nn.module import MoELayer
from moereg.numerics.reference import relative_error
from moereg.quantize import dequantize_weights
from moereg.routing import REFUSED_MODEL_TYPES, RouterSpec
from moereg.routing.configs import ROUTED_MODEL_TYPES
from tests.checkpoints import published
from tests.checkpoints.small_checkpoint import CONFIG, write_checkpoint
from tests.checkpoints.tiny_families import (
    FAMILIES,
    SIZES,
    Family,
    find_layers,
    routed_model_types,
)
from tests.support.tiny_models import has_entry


@dataclasses.dataclass(frozen=True)
class Routed:
    """What the model's own block gave its experts, and what they made of it, scaled as the block scales it."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor
    router_inputs: tuple[torch.Tensor, ...] = ()

    def route(self, layer: CheckpointLayer) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.route(*(self.router_inputs or (self.hidden_states,)))


def run_whole(family: Family, model: Any) -> Routed:
    """Runs the model on tokens, and listens to a layer's block, its experts and what the block calls."""
    block, heard = family.block(model), {}
    tokens = torch.arange(33)[None] * 7 % 64
    handles = [
        block.register_forward_pre_hook(lambda _, values: heard.update(block=values[0])),
        block.experts.register_forward_hook(lambda _, values, out: heard.update(experts=values, out=out)),
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    hidden_states, topk_ids, topk_weights = heard["experts"]
    size = hidden_states.shape[-1]
    rows = hidden_states.reshape(-1, size)
    # A layer that takes what its experts take routes by that too.
    inputs = rows if family.block(model) is find_layers(model)[family.layer] else heard["block"].flatten(0, -2)
    is_looked_up = hasattr(getattr(block, "gate", None), "tid2eid")
    router_inputs = (inputs, tokens[0]) if is_looked_up else (inputs,)
    return Routed(rows, topk_ids, topk_weights, heard["out"].view(-1, size), router_inputs)


@torch.no_grad()
def run_block(family: Family, model: Any, dtype: torch.dtype = torch.float32) -> Routed:
    """Runs the block and listens to its experts, so that the routing is the model's own."""
    if family.is_whole:
        return run_whole(family, model)
    block, num_tokens = family.block(model), 33
    text = model.config.get_text_config()
    size = getattr(text, "hidden_size", None) or text.d_model
    hidden_states = torch.randn(1, num_tokens, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    heard: dict[str, Any] = {}

    def listen(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: torch.Tensor) -> None:
        heard.update(args=(*args, *keywords.values()), out=out)

    handle = block.experts.register_forward_hook(listen, with_kwargs=True)
    block(hidden_states)
    handle.remove()
    scaling = family.scaling(text)
    flat = hidden_states[0]
    if len(heard["args"]) == 1:  # Llama 4 hands over inputs that are weighted already, of all experts.
        scores, _ = block.router(flat)
        topk_weights, topk_ids = scores.topk(text.num_experts_per_tok, dim=-1)
        out = heard["out"].view(block.num_experts, num_tokens, -1).sum(dim=0)
        return Routed(flat, topk_ids, topk_weights, out)
    if len(heard["args"]) == 2:
        pytest.skip(f"transformers {transformers.__version__} routes inside of {type(block.experts).__name__}")
    _, topk_ids, topk_weights = heard["args"]
    return Routed(flat, topk_ids, topk_weights * scaling, heard["out"].view(num_tokens, -1) * scaling)


def by_expert(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = topk_ids.long().argsort(dim=-1)
    return topk_ids.long().gather(-1, order), topk_weights.float().gather(-1, order)


# With tensors, a router or a config like no other's; the rest take half a second each.
HARD = ("dbrx", "deepseek_v4", "ernie4_5_moe", "granitemoeshared", "laguna", "minimax_m2", "nemotron_h", "phimoe")
HARD += ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text")
ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.proj.weight", "gate.wg.weight", "router.layer.weight")
# Files of transformers with something called experts that no router of tokens feeds.
NOT_ROUTED = {"vitpose_backbone": "a data set's index chooses its experts"}
# Model types that publishers write and transformers reads as another, or takes from the file around it.
NOT_IN_TRANSFORMERS = {"kimi_k2"}
OTHER_NAMES = {"dots3_note": "dots3_note_text", "glm5_next": "glm5_next_text"}

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

# Defaults of config classes that no model can have.
NO_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma_text": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "gemma4_text": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 31},
}

EACH_FAMILY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in HARD else pytest.mark.slow) for name in FAMILIES]
)


def _family(name: str) -> Family:
    family = FAMILIES[name]
    if not family.is_known:
        pytest.skip(
            f"transformers {transformers.__version__} has no {family.config_name or family.module}, which came later"
        )
    return family


def _save(family: Family, model: Any, path: Path) -> tuple[Path, Path]:
    """Saves it as transformers does, with the publisher's names, and with the names that transformers uses."""
    released, live = path / "released", path / "live"
    model.save_pretrained(released, max_shard_size="60KB")
    model.config.save_pretrained(live)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, live / "model.safetensors")
    return released, live


@EACH_FAMILY
def test_a_layer_routes_and_computes_like_the_model(name: str, tmp_path: Path) -> None:
    family = _family(name)
    model = family.make()
    expected = run_block(family, model)
    own_ids, own_weights = by_expert(expected.topk_weights, expected.topk_ids)
    is_shared = any("shared" in part for part, _ in find_layers(model)[family.layer].named_parameters())
    for path in _save(family, model, tmp_path):
        layer = load_experts(path, family.layer)
        assert layer.model_type == name.partition("-")[0]
        topk_weights, topk_ids = expected.route(layer)
        ids, weights = by_expert(topk_weights, topk_ids)
        assert torch.equal(ids, own_ids)
        torch.testing.assert_close(weights, own_weights, rtol=1e-6, atol=1e-7)
        out = layer.make_kernel()(expected.hidden_states, topk_weights, topk_ids)
        error = relative_error(out, expected.out)
        print(f"family {name} {path.name} {layer.router.kind} {error:.1e}")
        assert error < 1e-6
        assert layer.has_shared_experts == is_shared
        assert bool(layer.notices) == (is_shared or family.is_whole)
    blocks = [
        [part for part, _ in layer.named_modules() if f".{part}".endswith(".experts")] for layer in find_layers(model)
    ]
    supported = [index for index, parts in enumerate(blocks) if parts]
    assert list(moe_layers(path)) == supported


# transformers rounds their scores, or what their routers read, to 16 bits before it chooses, so that more of them tie.
ROUNDED_SCORES = ("mistral4", "diffusion_gemma_text", "gemma4_text")


# Of those that compute logits in 32 bits, one.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.slow) for name in FAMILIES]
)
def test_a_layer_routes_like_the_model_in_16_bits(name: str, tmp_path: Path) -> None:
    family = _family(name)
    family.make().to(torch.bfloat16).save_pretrained(tmp_path)
    model = family.model_class.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected = run_block(family, model, torch.bfloat16)
    layer = load_experts(tmp_path, family.layer)
    weights = [part for part, _ in family.block(model).named_parameters() if part.endswith(ROUTER_WEIGHTS)]
    # Of those with logits in fp32, transformers keeps most in fp32 too, and before 5.24 a few.
    own_dtype = family.block(model).get_parameter(weights[0]).dtype
    assert layer.router_weight.dtype == (torch.float32 if layer.router.fp32_logits else own_dtype)
    own_ids, own_weights = by_expert(expected.topk_weights, expected.topk_ids)
    ids, weights = by_expert(*expected.route(layer))
    is_same = (ids == own_ids).all(dim=-1)
    assert is_same.sum() >= len(ids) - (2 if name in ROUNDED_SCORES else 0)
    # transformers rounds the weights of some models to 16 bits, and of a few their scores before; of these it does not.
    rtol, atol = (1e-6, 1e-6) if name in ("deepseek_v2", "deepseek_v3") else (2**-6, 2**-7)
    torch.testing.assert_close(weights[is_same], own_weights[is_same], rtol=rtol, atol=atol)


@pytest.mark.parametrize(("name", "num_experts"), [("deepseek_v4", 256), ("lfm2_moe", 32), ("mistral4", 128)])
def test_scores_that_a_model_rounds_choose_its_experts(name: str, num_experts: int) -> None:
    """Scores in fp32 chose others for 7 %, 3 % and 0.1 % of tokens."""
    family = dataclasses.replace(
        _family(name),
        options={**FAMILIES[name].options, **dict.fromkeys(EXPERT_COUNTS, num_experts), "n_group": 1, "topk_group": 1},
    )
    model = family.make().to(torch.bfloat16)
    block = family.block(model)
    router = block.gate
    spec = RouterSpec.from_config({**model.config.to_dict(), "model_type": name})
    assert spec.rounds_scores
    generator = torch.Generator().manual_seed(0)
    owner = block if name == "lfm2_moe" else router
    bias = None
    for buffer in ("expert_bias", "e_score_correction_bias"):
        if hasattr(owner, buffer):  # In fp32, as `from_pretrained` keeps it.
            bias = torch.randn(num_experts, generator=generator) / 8
            setattr(owner, buffer, bias)
    hidden_states = torch.randn(512, router.weight.shape[1], generator=generator).bfloat16()
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator) / 8)
        _, weights, ids = router(hidden_states, *([bias] if name == "lfm2_moe" else []))
        ours, our_ids = spec.route(torch.nn.functional.linear(hidden_states, router.weight), bias)
    (our_ids, ours), (ids, weights) = by_expert(ours, our_ids), by_expert(weights.float(), ids)
    # Of scores that are equal once they are rounded, one topk may take another than the other.
    is_same = (our_ids == ids).all(dim=-1)
    assert is_same.sum() >= (len(ids) if bias is not None else 0.99 * len(ids))
    torch.testing.assert_close(ours[is_same], weights[is_same], rtol=2**-6, atol=2**-7)


def test_every_class_of_transformers_with_routed_experts_is_a_family_or_refused() -> None:
    unknown = {}
    for module, class_name in routed_model_types().items():
        kinds = {kind.model_type for kind in _configs_of(module)}
        if module not in NOT_ROUTED and not kinds & {*ROUTED_MODEL_TYPES, *REFUSED_MODEL_TYPES}:
            unknown[module] = class_name
    assert not unknown, f"give these a row of MODEL_TYPES and a router, or a reason in REFUSED_MODEL_TYPES: {unknown}"


def _configs_of(module: str) -> list[Any]:
    found = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return [kind for kind in vars(found).values() if isinstance(kind, type) and hasattr(kind, "model_type")]


def test_every_family_has_a_router_and_a_test() -> None:
    tested = {name.partition("-")[0] for name in FAMILIES}
    assert set(MODEL_TYPES) == set(ROUTED_MODEL_TYPES) == tested | NOT_IN_TRANSFORMERS | set(OTHER_NAMES)
    assert not set(MODEL_TYPES) & set(REFUSED_MODEL_TYPES)
    for name, other in OTHER_NAMES.items():
        assert MODEL_TYPES[name] == MODEL_TYPES[other]


@pytest.mark.parametrize("model_type", sorted(REFUSED_MODEL_TYPES))
def test_a_refused_family_says_why_and_the_way_out(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 2}))
    for read in (lambda: load_experts(tmp_path, 1), lambda: RouterSpec.from_config({"model_type": model_type})):
        with pytest.raises(MoeregError) as caught:
            read()
        message = str(caught.value)
        assert f"model type {model_type!r} is not read: {REFUSED_MODEL_TYPES[model_type]}; give" in message
        assert "docs/checkpoints.md" in message
        # Reading it as another type would give wrong numbers, so none is named.
        assert not any(f"'{other}'" in message for other in MODEL_TYPES)


class _Recording(dict[str, Any]):
    """A config that remembers what was asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def _facts(model_type: str, config: Mapping[str, Any]) -> list[Any]:
    """What a config says of router, layers with experts and activation."""
    row = MODEL_TYPES[model_type]
    router = RouterSpec.from_config(config)
    return [router, sorted(row.moe_layers(config, count_layers(config))), row.activation(config)]


@pytest.mark.parametrize("model_type", sorted({name.partition("-")[0] for name in FAMILIES}))
def test_an_absent_entry_has_the_default_of_its_own_family(model_type: str) -> None:
    # All entries have their defaults here, so that leaving one out must change nothing.
    name = next(name for name in FAMILIES if name.partition("-")[0] == model_type)
    full = {**_family(name).config_class().to_dict(), **NO_DEFAULTS.get(model_type, {})}
    full["model_type"] = model_type
    config = _Recording(full)
    expected = _facts(model_type, config)
    asked = sorted(config.asked & {name for name, value in full.items() if value is not None} - {"model_type"})
    assert asked
    for entry in asked:
        rest = {name: value for name, value in full.items() if name != entry}
        # The kinds of layers follow from other entries where they are absent.
        message = ""
        try:
            found = _facts(model_type, rest)
        except CheckpointError as error:
            message, found = str(error), expected
        assert found == expected, entry
        # Sizes and lists of layers are never guessed.
        assert not message or "got none" in message or "got neither" in message, entry


# fmt: off
PUBLISHED_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "first_k_dense_replace": 1,
    "hidden_act": "silu", "moe_layer_freq": 1, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
    "seq_aux": True, "ep_size": 1, "torch_dtype": "bfloat16",
}
# fmt: on
"""Of moonshotai/Kimi-K2-Instruct, without the sizes."""


@pytest.mark.parametrize("is_nested", [False, True], ids=["k2", "k2.5"])
def test_kimi_k2_is_read_by_its_published_config(tmp_path: Path, is_nested: bool) -> None:
    options = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
    family = dataclasses.replace(FAMILIES["deepseek_v3"], options=options)
    model = family.make()
    expected = run_block(family, model)
    tensors = _released(family, model, tmp_path)
    saved = model.config.to_dict()
    sizes = ("num_hidden_layers", "hidden_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    config = {**PUBLISHED_K2, **{name: saved[name] for name in sizes}}
    if is_nested:
        config = {"model_type": "kimi_k25", "text_config": config}
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, config, tensors)
    layer = load_experts(tmp_path, family.layer)
    assert layer.model_type == "kimi_k2"
    own = by_expert(expected.topk_weights, expected.topk_ids)
    ids, weights = by_expert(*layer.route(expected.hidden_states))
    assert torch.equal(ids, own[0])
    torch.testing.assert_close(weights, own[1], rtol=1e-6, atol=1e-7)


def _released(family: Family, model: Any, path: Path) -> dict[str, torch.Tensor]:
    released, _ = _save(family, model, path)
    return {name: tensor for file in released.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("sizes", [(8, 6), (8, 4), (8, 8)], ids=["different", "H=2I", "H=I"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["saved", "released"])
def test_fused_experts_are_read_transposed_or_not(tmp_path: Path, sizes: tuple[int, int], is_transposed: bool) -> None:
    hidden, intermediate = sizes
    gate_up, down = torch.randn(4, 2 * intermediate, hidden), torch.randn(4, hidden, intermediate)
    block = "model.language_model.layers.0.mlp"
    fused = {f"{block}.experts.gate_up_proj": gate_up, f"{block}.experts.down_proj": down}
    tensors = {name: (tensor.mT if is_transposed else tensor).contiguous() for name, tensor in fused.items()}
    config = {
        **CONFIG,
        "model_type": "qwen3_vl_moe_text",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "mlp_only_layers": [],
    }
    nested = {"model_type": "qwen3_vl_moe", "text_config": config}
    write_checkpoint(tmp_path, nested, {**tensors, f"{block}.gate.weight": torch.randn(4, hidden)})
    layer = load_experts(tmp_path, 0)
    assert torch.equal(layer.weights.w13, gate_up)
    assert torch.equal(layer.weights.w2, down)
    # Qwen3-VL always renormalizes, and published files need not say it.
    assert layer.router.renormalize


@EACH_FAMILY
def test_experts_that_llm_compressor_divided_are_read(name: str, tmp_path: Path) -> None:
    """It gives each expert of any family its own modules, with the same names and quantized."""
    family = _family(name)
    tensors = _released(family, family.make(), tmp_path)
    plain = load_experts(tmp_path / "released", family.layer).problem
    with CheckpointFiles(tmp_path / "released") as files:
        manifest = list_layer(files, family.layer)
    for part in {part.name for parts in manifest.parts for part in parts}:
        del tensors[part]
    routers = MODEL_TYPES[manifest.model_type].routers
    router = manifest.router_parts[0].name
    block = next(router.removesuffix(f"{part}.weight") for part in routers if router.endswith(f"{part}.weight"))
    names = published.GATE_UP_DOWN[-1 - plain.activation.num_halves :]
    expected: list[list[torch.Tensor]] = []
    for expert in range(plain.num_experts):
        expected.append([])
        for projection in names:
            shape = (plain.intermediate_size, plain.hidden_size)
            stored, value = published.per_channel(*(shape[::-1] if projection == "down_proj" else shape))
            stored |= {"bias": torch.randn(value.shape[0])} if plain.has_bias else {}
            tensors |= {f"{block}experts.{expert}.{projection}.{part}": tensor for part, tensor in stored.items()}
            expected[-1].append(value)
    config = json.loads((tmp_path / "released" / "config.json").read_text())
    config["quantization_config"] = published.FP8_DYNAMIC
    divided = tmp_path / "divided"
    divided.mkdir()
    write_checkpoint(divided, config, tensors)
    found = load_experts(divided, family.layer)
    assert found.problem.quant.name == "fp8_channel_token"
    w13, w2 = dequantize_weights(found.weights, torch.float64)
    torch.testing.assert_close(w13, torch.stack([torch.cat(each[:-1]) for each in expected]), rtol=1e-9, atol=0)
    torch.testing.assert_close(w2, torch.stack([each[-1] for each in expected]), rtol=1e-9, atol=0)


CONFUSED = {
    # The config that is taken by mistake, the tensors' family, and what gives it away.
    "minimax_m2 as mixtral": ("mixtral", "minimax_m2", "e_score_correction_bias"),
    "deepseek_v3 as deepseek_v2": ("deepseek_v2", "deepseek_v3", "e_score_correction_bias"),
    "qwen2_moe as qwen3_moe": ("qwen3_moe", "qwen2_moe", "shared_expert"),
    "mixtral as minimax_m2": ("minimax_m2", "mixtral", "e_score_correction_bias' is missing"),
    "mixtral as qwen3_moe": ("qwen3_moe", "mixtral", "the router of layer 3 is missing"),
    "gpt_oss as aria": ("aria_text", "gpt_oss", "have no tensor such as"),
    "axk1 as ernie4_5_moe": ("ernie4_5_moe", "axk1", "moe_statics.e_score_correction_bias' is missing"),
    "ernie4_5_moe as axk1": ("axk1", "ernie4_5_moe", "gate.e_score_correction_bias' is missing"),
    "deepseek_v2 as qwen2_moe": ("qwen2_moe", "deepseek_v2", "have no tensor such as 'model.layers.3.mlp.shared_exp"),
    "qwen2_moe as flint": ("flint", "qwen2_moe", "have no tensor such as 'model.layers.3.mlp.shared_expert_gate.w"),
    "flint as qwen2_moe": ("qwen2_moe", "flint", "'qwen2_moe' have shared_expert_gate beside their shared experts"),
    "flint as cohere2_moe": ("cohere2_moe", "flint", "have no tensor such as 'model.layers.3.mlp.shared_expert."),
}


@pytest.mark.parametrize("name", CONFUSED)
def test_the_config_of_another_family_is_refused(tmp_path: Path, name: str) -> None:
    model_type, tensors_of, expected = CONFUSED[name]
    family = _family(tensors_of)
    tensors = _released(family, family.make(), tmp_path)
    config = {**_family(model_type).config().to_dict(), "model_type": model_type, "mlp_only_layers": []}
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        load_experts(tmp_path, 3)
    assert "take config.json and tensors from one export" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input .* in [False], got"),
        ("axk2", {"n_group": 4}, "n_group .* must be in [1, 0], got 4"),
        ("minimax_m2", {"norm_topk_prob": False}, "norm_topk_prob .* must be in [True], got False"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 3, 3]}, "moe_topk .* must be a whole number of at least 1, got [2, 2"),
        (
            "dbrx",
            {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "moe_normalize_expert_weights": 2.0}},
            "got 2.0",
        ),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "in ['softmax', 'sigmoid'], got 'tanh'"),
        ("phimoe", {"num_experts_per_tok": 3}, "sparsemixer chooses two experts, got top_k=3"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "in ['sigmoid'], got 'softmax'"),
    ],
)
def test_a_router_with_a_setting_that_is_not_known(name: str, changes: dict[str, Any], expected: str) -> None:
    config = {**_family(name).config().to_dict(), "model_type": name, **changes}
    with pytest.raises(ValueError, match=re.escape(expected).replace(re.escape(" .* "), " .* ")):
        RouterSpec.from_config(config)


@pytest.mark.parametrize(
    ("name", "layer", "changes", "reason"),
    [
        ("step3p5", 1, {"swiglu_limits": [0.0, 7.0, 0.0, 0.0]}, "its experts clamp silu(gate)"),
    ],
)
def test_a_layer_that_is_not_read_says_why(
    tmp_path: Path, name: str, layer: int, changes: dict[str, Any], reason: str
) -> None:
    config = {**_family(name).config().to_dict(), "model_type": name, **changes}
    write_checkpoint(tmp_path, config, {"model.embed_tokens.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=re.escape(reason) + r".*; give moereg.make_kernel your own"):
        load_experts(tmp_path, layer)
    assert layer in moe_layers(tmp_path)


# What a list says of layers beyond its end is not known.
@pytest.mark.parametrize(
    ("limits", "refused"),
    [(None, ()), ([], ()), ([0.0] * 4, ()), ([0.0, 0.0, 0.0, 7.0], (3,)), ([7.0, 0.0], (0, 2, 3)), ("7", ())],
)
def test_layers_of_step_that_clamp_are_refused(limits: Any, refused: tuple[int, ...]) -> None:
    reasons = [_step_reason({"swiglu_limits": limits}, layer) for layer in range(4)]
    assert tuple(layer for layer, reason in enumerate(reasons) if reason is not None) == refused


def test_run_says_that_shared_experts_are_not_in_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = FAMILIES["deepseek_v3"]
    released, _ = _save(family, family.make(), tmp_path)
    assert cli.main(["run", "--checkpoint", str(released), "--layer", "3", "--tokens", "4"]) == 0
    assert "note: layer 3 also has shared experts, which are not in it" in " ".join(capsys.readouterr().out.split())


# Bits, names and layers with experts of single models.

PROJECTIONS = tuple(f"mlp.experts.7.{projection}_proj.weight" for projection in ("gate", "up", "down"))
PUBLISHED = {
    "mixtral": [
        f"block_sparse_moe.{name}.weight" for name in ("gate", *(f"experts.7.w{index}" for index in (1, 2, 3)))
    ],
    **{name: ["mlp.gate.weight", *PROJECTIONS] for name in ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")},
    "deepseek_v3": ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", *PROJECTIONS],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_are_what_is_saved(name: str, tmp_path: Path) -> None:
    """Guards the comparisons of families: transformers has to write the published names, or they were not tested."""
    family = FAMILIES[name]
    family.make().save_pretrained(tmp_path, max_shard_size="20KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f"model.layers.{family.layer}.{suffix}" for suffix in PUBLISHED[name]} <= set(files)
    assert len(set(files.values())) > 2, "needs several shards"


def saved(name: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A family's model, which was saved with the names that transformers uses while it runs."""
    model = FAMILIES[name].make().to(dtype)
    model.config.save_pretrained(path)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    return model


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"model_type": "llama4_text", "moe_layers": [0, 2, 9]}, (0, 2)),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, (1,)),
        ({"model_type": "step3p5", "num_hidden_layers": 5}, (3, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
        ({"model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1}, (1,)),
        # As transformers counts: layers whose number from 1 is a multiple of the interval, between two bounds.
        *(
            ({"model_type": "ernie4_5_moe", "num_hidden_layers": 7, "moe_layer_interval": interval, **bounds}, layers)
            for interval, bounds, layers in (
                (1, {"moe_layer_start_index": 2, "moe_layer_end_index": 4}, (2, 3, 4)),
                (2, {}, (1, 3, 5)),
                (2, {"moe_layer_start_index": 2, "moe_layer_end_index": 9}, (3, 5)),
                (3, {"moe_layer_start_index": 0, "moe_layer_end_index": 4}, (2,)),
            )
        ),
    ],
)
def test_moe_layers_that_models_made_by_transformers_do_not_show(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_checkpoint(tmp_path, config={**CONFIG, **changes})
    assert moe_layers(tmp_path) == expected


def test_16_bit_weights_arrive_bit_for_bit_and_convert_where_asked(tmp_path: Path) -> None:
    own = FAMILIES["qwen3_moe"].block(saved("qwen3_moe", tmp_path, torch.bfloat16)).experts
    layer, wide = load_experts(tmp_path, 3, dtype="bfloat16"), load_experts(tmp_path, 3, dtype="float32")
    assert layer.problem.dtype == "bfloat16"
    assert torch.equal(layer.weights.w13, own.gate_up_proj)
    assert torch.equal(layer.weights.w2, own.down_proj)
    assert (wide.problem.dtype, wide.router_weight.dtype) == ("float32", torch.float32)
    assert torch.equal(wide.weights.w13, own.gate_up_proj.float())
    assert wide.num_bytes == 2 * layer.num_bytes


def test_correction_bias_keeps_32_bits(tmp_path: Path) -> None:
    # Published DeepSeek-V3 files hold it in fp32 beside bf16 weights.
    saved("deepseek_v3", tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = tensors["model.layers.3.mlp.gate.e_score_correction_bias"] = torch.rand(8)
    # So does the router's weight, which some files have in fp32 too.
    weight = tensors["model.layers.3.mlp.gate.weight"] = torch.rand(8, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_experts(tmp_path, 3)
    assert torch.equal(layer.router_weight, weight)
    assert torch.equal(layer.correction_bias, bias)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.is_whole])
def test_a_layer_whose_router_reads_more_says_so_and_is_run_by_the_commands(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = _family(name)
    family.make().save_pretrained(tmp_path)
    layer = load_experts(tmp_path, family.layer)
    assert re.search(
        r"route (also takes|takes the block's H=48)|experts and route read what .*norm_2 puts", layer.notices[0]
    )
    for command in ("run", "explain"):
        assert cli.main([command, "--checkpoint", str(tmp_path), "--layer", str(family.layer), "--tokens", "5"]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert layer.notices[0].removeprefix(f"layer {family.layer}: ")[:30] in found
    module = MoELayer.from_loaded(layer)
    assert module.router is None
    if layer.router.has_expert_scale:
        with pytest.raises(ArgumentError, match="takes no expert_scale; leave router out, and name experts in calls"):
            MoELayer(layer.problem, router=layer.router)
    hidden_states = torch.randn(5, layer.problem.hidden_size)
    routes = layer.sample_routes(hidden_states)
    torch.testing.assert_close(module(hidden_states, *routes), layer.make_kernel()(hidden_states, *routes))
    table = layer.expert_table
    wrong = None if table is None else torch.zeros(4, dtype=torch.long)
    if table is None:
        wrong = torch.zeros(5, dtype=torch.long)
    with pytest.raises(
        ArgumentError, match=r"token_ids must be (None|\[5\]) where .* chooses experts, got \[[45]\]; pass"
    ):
        layer.route(torch.randn(5, layer.router_weight.shape[1]), wrong)


def test_an_expert_that_a_table_names_twice_is_weighed_like_the_model(tmp_path: Path) -> None:
    family = _family("deepseek_v4-hash")
    model = family.make()
    table = family.block(model).gate.tid2eid
    table.copy_(torch.tensor([[5, 2, 5]]).expand_as(table))
    model.save_pretrained(tmp_path)
    expected = run_block(family, model)
    ids, weights = by_expert(*expected.route(load_experts(tmp_path, family.layer)))
    own_ids, own_weights = by_expert(expected.topk_weights, expected.topk_ids)
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(weights, own_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "expected"),
    [
        (
            "deepseek_v4-hash",
            "ffn.gate.tid2eid",
            lambda table: table + 1,
            "tid2eid must name experts 0..7, got 1..8; take",
        ),
        (
            "deepseek_v4-hash",
            "ffn.gate.tid2eid",
            lambda table: table - 1,
            "tid2eid must name experts 0..7, got -1..6; t",
        ),
        ("deepseek_v4-hash", "ffn.gate.tid2eid", lambda table: table[:, :2], "tid2eid must be [64, 3] or [1, 64, 3]"),
        ("deepseek_v4-hash", "ffn.gate.tid2eid", None, "tid2eid' is missing"),
        (
            "gemma4_text",
            "pre_feedforward_layernorm_2.weight",
            lambda norm: norm * 0,
            "must have no zeros, got some; give",
        ),
        ("gemma4_text", "router.per_expert_scale", lambda scale: scale[:4], "per_expert_scale must be [8] or [1, 8]"),
        ("gemma4_text", "router.scale", None, "router.scale' is missing"),
        ("nemotron_h-latent", "mixer.gate.weight", lambda weight: weight[:, :24], "gate.weight must be [8, 48] where"),
        (
            "nemotron_h-latent",
            "mixer.experts.0.up_proj.weight",
            lambda weight: weight[:, :20],
            "must be [16, 24] where",
        ),
    ],
)
def test_tensors_of_routers_that_do_not_fit(name: str, tensor: str, change: Any, expected: str, tmp_path: Path) -> None:
    family = _family(name)
    tensors = _released(family, family.make(), tmp_path)
    (full,) = (found for found in tensors if found.endswith(f"layers.{family.layer}.{tensor}"))
    if change is None:
        del tensors[full]
    else:
        tensors[full] = change(tensors[full]).contiguous()
    broken = tmp_path / "broken"
    broken.mkdir()
    write_checkpoint(broken, json.loads((tmp_path / "released" / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load_experts(broken, family.layer)


def test_fused_tensors_are_read_expert_by_expert(tmp_path: Path, reads: list[tuple[str, int | None]]) -> None:
    saved("gpt_oss", tmp_path)
    whole = load_experts(tmp_path, 3)
    assert all(row is not None for name, row in reads if ".experts." in name)
    reads.clear()
    rank = load_experts(tmp_path, 3, num_local_experts=4, ep_rank=1)
    assert {row for _, row in reads} == {4, 5, 6, 7, None}
    for name, tensor in rank.weights.tensors().items():
        assert torch.equal(tensor, whole.weights.tensors()[name][4:])


# Language models inside of multimodal ones, whose publishers name and transpose tensors in their own ways.

# The family of the language model, and the class around it.
WHOLE = {
    "aria_text": "AriaForConditionalGeneration",
    "deepseek_ocr2_text": "DeepseekOcr2ForConditionalGeneration",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "minimax_m3_vl_text": "MiniMaxM3SparseForConditionalGeneration",
    "mistral_large4_text": "MistralLarge4ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "step3p5": "Step3p7ForConditionalGeneration",
}
OTHER_PARTS: dict[str, Any] = {
    **SIZES,
    "depth": 1,
    "num_layers": 1,
    "layers": 1,
    "width": SIZES["hidden_size"],
    "heads": 4,
    "num_heads": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "projection_dim": 16,
}
"""Sizes of what is not the language model."""


def _small_config(kind: Any, text_config: Any) -> Any:
    default = kind()
    parts = {}
    for name in kind.sub_configs or {}:
        part = getattr(default, name, None)
        if name == "text_config":
            parts[name] = text_config
        elif part is not None:
            parts[name] = _small_config(type(part), None)
    sizes = {name: value for name, value in OTHER_PARTS.items() if has_entry(default, name)}
    # Some parts list what each of their layers is, and others take no size but their own.
    for left_out in ((), ("num_hidden_layers",), tuple(sizes)):
        try:
            return kind(**{name: value for name, value in sizes.items() if name not in left_out}, **parts)
        except (ValueError, TypeError) as error:
            failure = error
    raise failure


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_language_model_of_a_saved_multimodal_one(name: str, tmp_path: Path) -> None:
    family = dataclasses.replace(_family(name), model=WHOLE[name])
    model = family.make_of(_small_config(family.model_class.config_class, FAMILIES[name].config()))
    expected = run_block(family, model)
    model.save_pretrained(tmp_path)
    layer = load_experts(tmp_path, family.layer)
    assert layer.model_type == name
    assert family.layer in moe_layers(tmp_path)
    own_ids, own_weights = by_expert(expected.topk_weights, expected.topk_ids)
    ids, weights = by_expert(*layer.route(expected.hidden_states))
    assert torch.equal(ids, own_ids)
    torch.testing.assert_close(weights, own_weights, rtol=1e-6, atol=1e-7)
    out = layer.make_kernel()(expected.hidden_states, *layer.route(expected.hidden_states))
    assert relative_error(out, expected.out) < 1e-6


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
@pytest.mark.parametrize("prefix", ["language_model.backbone.layers.", "llm.model.layers."])
def test_nemotron_h_inside_of_another_model(tmp_path: Path, prefix: str, key: str) -> None:
    text = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*",
        "hidden_size": 8,
        "moe_intermediate_size": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    block = f"{prefix}1.mixer"
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (4, 8), f"{block}.gate.e_score_correction_bias": (4,)}
    for expert in range(4):
        shapes[f"{block}.experts.{expert}.up_proj.weight"] = (6, 8)
        shapes[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_checkpoint(tmp_path, {"model_type": "nemotron_h_omni", key: text}, tensors)
    layer = load_experts(tmp_path, 1)
    assert moe_layers(tmp_path) == (1,)
    assert torch.equal(layer.router_weight, tensors[f"{block}.gate.weight"])
    assert torch.equal(layer.weights.w2[3], tensors[f"{block}.experts.3.down_proj.weight"])
