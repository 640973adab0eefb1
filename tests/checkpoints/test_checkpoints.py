"""Checkpoints against the transformers modules that they were saved from, and everything that can be wrong with one.

In the comparison of experts, routing comes from the model's own router module: it cannot share a mistake with ours.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moereg.activations import ACTIVATIONS, Activation
from moereg.checkpoints import _files, _memory, load_experts, moe_layers, read_problem
from moereg.checkpoints._models import MODEL_TYPES
from moereg.errors import CheckpointError, RequestError, TooLargeError
from moereg.memory import free_memory_bytes
from moereg.reference import reference_experts, relative_error

HIDDEN_SIZE = 32
BASE = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
DENSE = {"moe_intermediate_size": 16, "intermediate_size": 24}
DEEPSEEK = {
    **DENSE,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model, a layer of it that has experts, and the names that the published checkpoint gives its tensors."""

    config: type
    model: type
    options: dict[str, Any]
    layer: int
    released_names: tuple[str, ...]
    block: str = "mlp"
    router: str = "gate"
    activation: Activation = ACTIVATIONS["silu"]


PROJECTIONS = tuple(f"mlp.experts.7.{projection}_proj.weight" for projection in ("gate", "up", "down"))
FUSED = ("experts.gate_up_proj", "experts.down_proj")
CASES = {
    "mixtral": Case(
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 16, "num_local_experts": 8},
        layer=3,
        released_names=(
            "block_sparse_moe.gate.weight",
            *(f"block_sparse_moe.experts.7.w{index}.weight" for index in (1, 2, 3)),
        ),
    ),
    "qwen2_moe": Case(
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**DENSE, "num_experts": 8, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
        layer=1,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "qwen3_moe": Case(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**DENSE, "num_experts": 8, "mlp_only_layers": [0, 2], "norm_topk_prob": True},
        layer=3,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "olmoe": Case(
        OlmoeConfig,
        OlmoeForCausalLM,
        {"intermediate_size": 16, "num_experts": 8, "hidden_act": "gelu_pytorch_tanh"},
        layer=0,
        released_names=("mlp.gate.weight", *PROJECTIONS),
        activation=ACTIVATIONS["gelu_tanh"],
    ),
    "deepseek_v2": Case(
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
        layer=2,
        released_names=("mlp.gate.weight", *PROJECTIONS),
    ),
    "deepseek_v3": Case(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DEEPSEEK,
        layer=3,
        released_names=("mlp.gate.weight", "mlp.gate.e_score_correction_bias", *PROJECTIONS),
    ),
    "gpt_oss": Case(
        GptOssConfig,
        GptOssForCausalLM,
        # A limit that the activations reach, so that ignoring it shows.
        {"intermediate_size": 24, "num_local_experts": 8, "swiglu_limit": 1.5},
        layer=2,
        released_names=(
            "mlp.router.weight",
            "mlp.router.bias",
            *(f"mlp.{name}{suffix}" for name in FUSED for suffix in ("", "_bias")),
        ),
        router="router",
        activation=dataclasses.replace(ACTIVATIONS["swigluoai"], limit=1.5),
    ),
    "llama4_text": Case(
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "intermediate_size": 16,
            "intermediate_size_mlp": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        layer=1,
        released_names=("feed_forward.router.weight", *(f"feed_forward.{name}" for name in FUSED)),
        block="feed_forward",
        router="router",
    ),
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model and the directories that it was saved to: as released, and as transformers names its parameters."""

    model: Any
    released: Path
    fused: Path

    def block(self, case: Case) -> Any:
        return getattr(self.model.model.layers[case.layer], case.block)


Save = Callable[[str, torch.dtype], Saved]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Makes the small model of a case and saves it, once for each dtype."""
    done: dict[tuple[str, torch.dtype], Saved] = {}

    def make(name: str, dtype: torch.dtype) -> Saved:
        if (name, dtype) not in done:
            done[name, dtype] = _save(CASES[name], dtype, tmp_path_factory.mktemp(name))
        return done[name, dtype]

    return make


def _save(case: Case, dtype: torch.dtype, path: Path) -> Saved:
    generator = torch.Generator().manual_seed(0)
    model = case.model(case.config(**{**BASE, **case.options}))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Own initialization leaves biases at zero and weights too small for the activation to matter.
        if f".{case.block}." in name:
            tensor.data = torch.randn(tensor.shape, generator=generator) * (0.1 if name.endswith("bias") else 0.4)
    if isinstance(model, GptOssForCausalLM):
        # transformers 5.17 has the clamp as a constant of the module and does not read it from the config.
        for layer in model.model.layers:
            layer.mlp.experts.limit = case.activation.limit
    model = model.to(dtype).eval()
    model.set_experts_implementation("eager")
    model.save_pretrained(path / "released", max_shard_size="20KB")
    model.config.save_pretrained(path / "fused")
    save_file(dict(model.model.state_dict(prefix="model.")), path / "fused" / "model.safetensors")
    return Saved(model, path / "released", path / "fused")


def _hidden_states(dtype: torch.dtype = torch.float32, num_tokens: int = 33) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def _own_routing(saved: Saved, case: Case, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    router_out = getattr(saved.block(case), case.router)(hidden_states)
    if case.block == "feed_forward":
        # Llama 4 gives dense scores that are zero where an expert is not chosen.
        return router_out[0].topk(saved.model.config.num_experts_per_tok, dim=-1)
    return router_out[1], router_out[2]


@torch.no_grad()
def _own_experts(saved: Saved, case: Case, hidden_states: torch.Tensor) -> torch.Tensor:
    block = saved.block(case)
    if case.block == "feed_forward":
        # Only the block sorts inputs as its experts want them, so the shared expert is taken off.
        return block(hidden_states)[0] - block.shared_expert(hidden_states)
    topk_weights, topk_ids = _own_routing(saved, case, hidden_states)
    return block.experts(hidden_states, topk_ids, topk_weights)


def _dense(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(len(topk_ids), num_experts).scatter_(1, topk_ids.long(), topk_weights.float())


@pytest.mark.parametrize("layout", ["released", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_the_saved_module_computes(save: Save, name: str, layout: str) -> None:
    case, saved = CASES[name], save(name, torch.float32)
    layer = load_experts(getattr(saved, layout), case.layer)
    assert (layer.problem.activation, layer.problem.dtype, layer.model_type) == (case.activation, "float32", name)
    layer.weights.check_against(layer.problem)
    hidden_states = _hidden_states()
    out = reference_experts(layer.problem, layer.weights, hidden_states, *_own_routing(saved, case, hidden_states))
    assert relative_error(out, _own_experts(saved, case, hidden_states)) < 2e-6


def test_the_comparison_sees_swapped_halves_and_dropped_biases(save: Save) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    layer = load_experts(saved.released, case.layer)
    hidden_states = _hidden_states()
    routing = _own_routing(saved, case, hidden_states)
    expected = _own_experts(saved, case, hidden_states)
    swapped = torch.cat(layer.weights.w13.chunk(2, dim=1)[::-1], dim=1)
    unbiased = torch.zeros_like(layer.weights.w13_bias)
    for wrong in ({"w13": swapped}, {"w13_bias": unbiased}):
        weights = dataclasses.replace(layer.weights, **wrong)
        assert relative_error(reference_experts(layer.problem, weights, hidden_states, *routing), expected) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_route_equals_the_models_own_router(save: Save, name: str, dtype: torch.dtype) -> None:
    case, saved = CASES[name], save(name, dtype)
    layer = load_experts(saved.released, case.layer)
    hidden_states = _hidden_states(dtype)
    topk_weights, topk_ids = layer.route(hidden_states)
    assert (topk_weights.dtype, topk_ids.dtype) == (torch.float32, torch.int32)
    out = _dense(topk_weights, topk_ids, layer.problem.num_experts)
    expected = _dense(*_own_routing(saved, case, hidden_states), layer.problem.num_experts)
    assert torch.equal(out != 0, expected != 0)
    # transformers rounds the weights of some models to the dtype of their logits.
    tolerance = 1e-6 if dtype == torch.float32 or layer.router.fp32_logits else 2**-7
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_published_names_are_what_is_read(save: Save, name: str) -> None:
    # Guards the comparison above: transformers has to have written the published names, or they were not tested.
    saved, case = save(name, torch.float32), CASES[name]
    files = json.loads((saved.released / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f"model.layers.{case.layer}.{suffix}" for suffix in case.released_names} <= set(files)
    assert len(set(files.values())) > 2, "needs several shards"
    fused = load_file(saved.fused / "model.safetensors")
    assert f"model.layers.{case.layer}.{case.block}.experts.gate_up_proj" in fused


def test_every_known_model_type_is_tested() -> None:
    assert set(MODEL_TYPES) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_moe_layers_are_the_models(save: Save, name: str) -> None:
    case, saved = CASES[name], save(name, torch.float32)
    blocks = [getattr(layer, case.block) for layer in saved.model.model.layers]
    assert moe_layers(saved.released) == tuple(index for index, block in enumerate(blocks) if hasattr(block, "experts"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({"model_type": "llama4_text", "moe_layers": [0, 2, 9]}, (0, 2)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
    ],
)
def test_moe_layers_that_models_made_by_transformers_do_not_show(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    _write(tmp_path, config={**CONFIG, **changes})
    assert moe_layers(tmp_path) == expected


def test_16_bit_weights_arrive_bit_for_bit_and_convert_where_asked(save: Save) -> None:
    case, saved = CASES["qwen3_moe"], save("qwen3_moe", torch.bfloat16)
    layer = load_experts(saved.released, case.layer)
    own = saved.block(case).experts
    assert layer.problem.dtype == "bfloat16"
    assert torch.equal(layer.weights.w13, own.gate_up_proj)
    assert torch.equal(layer.weights.w2, own.down_proj)
    wide = load_experts(saved.released, case.layer, dtype="float32")
    assert (wide.problem.dtype, wide.router_weight.dtype) == ("float32", torch.float32)
    assert torch.equal(wide.weights.w13, own.gate_up_proj.float())
    assert wide.num_bytes == 2 * layer.num_bytes


def test_correction_bias_keeps_32_bits(tmp_path: Path, save: Save) -> None:
    # Published DeepSeek-V3 files hold it in fp32 beside bf16 weights.
    case, saved = CASES["deepseek_v3"], save("deepseek_v3", torch.bfloat16)
    tensors = load_file(saved.fused / "model.safetensors")
    name = f"model.layers.{case.layer}.mlp.gate.e_score_correction_bias"
    tensors[name] = torch.rand(8)
    _write(tmp_path, json.loads((saved.fused / "config.json").read_text()), tensors)
    layer = load_experts(tmp_path, case.layer)
    assert layer.router_weight.dtype == torch.bfloat16
    assert torch.equal(layer.correction_bias, tensors[name])


# A hand-written checkpoint for everything that does not need a model.

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "moe_intermediate_size": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "hidden_act": "silu",
}
EXPERTS = "model.layers.1.mlp.experts"
ROUTER = "model.layers.1.mlp.gate.weight"


def _tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (5, 8)}
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (4, 8)
        for expert in range(4):
            shapes[f"{block}.experts.{expert}.gate_proj.weight"] = (6, 8)
            shapes[f"{block}.experts.{expert}.up_proj.weight"] = (6, 8)
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def _shard_of(name: str) -> str:
    """Layer 1 in a file of its own for the router and for each pair of experts; the rest in another."""
    if name.startswith(EXPERTS):
        return f"experts{int(name.removeprefix(EXPERTS + '.')[0]) // 2}.safetensors"
    return "router.safetensors" if name == ROUTER else "rest.safetensors"


def _write(
    path: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    sharded: bool = False,
) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = _tensors() if tensors is None else tensors
    if not sharded:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {name: _shard_of(name) for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were opened, in order."""
    names: list[str] = []
    real = _files.safe_open

    def counting(path: Path, **options: str) -> Any:
        names.append(Path(path).name)
        return real(path, **options)

    monkeypatch.setattr(_files, "safe_open", counting)
    return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Tensors whose data was read, and which row of them."""
    calls: list[tuple[str, int | None]] = []
    real = _files.CheckpointFiles.read

    def recording(self: Any, name: str, row: int | None = None) -> torch.Tensor:
        calls.append((name, row))
        return real(self, name, row)

    monkeypatch.setattr(_files.CheckpointFiles, "read", recording)
    return calls


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    _write(tmp_path, sharded=True)
    return tmp_path


def test_only_the_layers_shards_are_opened_once_each(sharded: Path, opened: list[str]) -> None:
    (sharded / "rest.safetensors").unlink()
    layer = load_experts(sharded, 1)
    assert sorted(opened) == ["experts0.safetensors", "experts1.safetensors", "router.safetensors"]
    assert torch.equal(layer.weights.w2[3], _tensors()[f"{EXPERTS}.3.down_proj.weight"])


def test_a_rank_reads_only_its_own_experts(sharded: Path, opened: list[str]) -> None:
    whole = load_experts(sharded, 1)
    opened.clear()
    (sharded / "experts0.safetensors").unlink()
    progress: list[tuple[int, int]] = []
    rank = load_experts(sharded, 1, num_local_experts=2, ep_rank=1, progress=lambda *done: progress.append(done))
    assert sorted(opened) == ["experts1.safetensors", "router.safetensors"]
    assert progress == [(1, 2), (2, 2)]
    assert (rank.problem.num_experts, rank.problem.num_local_experts, rank.ep_rank) == (4, 2, 1)
    assert torch.equal(rank.weights.w13, whole.weights.w13[2:])
    assert torch.equal(rank.router_weight, whole.router_weight)
    rank.weights.check_against(rank.problem)
    hidden_states = torch.randn(5, 8, dtype=torch.bfloat16)
    for mine, all_experts in zip(rank.route(hidden_states), whole.route(hidden_states), strict=True):
        assert torch.equal(mine, all_experts)


def test_fused_tensors_are_read_expert_by_expert(save: Save, reads: list[tuple[str, int | None]]) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    whole = load_experts(saved.released, case.layer)
    assert all(row is not None for name, row in reads if ".experts." in name)
    reads.clear()
    rank = load_experts(saved.released, case.layer, num_local_experts=4, ep_rank=1)
    assert {row for _, row in reads} == {4, 5, 6, 7, None}
    for name, tensor in rank.weights.tensors().items():
        assert torch.equal(tensor, whole.weights.tensors()[name][4:])


def test_loaded_tensors_outlive_the_files(tmp_path: Path) -> None:
    _write(tmp_path)
    layer = load_experts(tmp_path, 1)
    before = layer.router_weight.clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(layer.router_weight, before)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model.", "language_model."])
def test_multimodal_and_headless_checkpoints(tmp_path: Path, prefix: str) -> None:
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in _tensors().items()}
    _write(tmp_path, {"model_type": "some_vision_model", "text_config": CONFIG}, tensors)
    assert moe_layers(tmp_path) == (1, 2)
    assert torch.equal(load_experts(tmp_path, 1).router_weight, _tensors()[ROUTER])


def test_read_problem_reads_no_data(sharded: Path, reads: list[tuple[str, int | None]]) -> None:
    problem = read_problem(sharded, 1, num_local_experts=2, dtype="float16", max_num_tokens=64)
    assert not reads
    assert str(problem) == "E4 H8 I6 k2 float16 unquantized silu, 2 local experts"
    assert problem.max_num_tokens == 64
    assert read_problem(sharded, 1) == load_experts(sharded, 1).problem


def test_read_problem_refuses_what_the_checkpoint_decides(sharded: Path) -> None:
    with pytest.raises(RequestError, match=r"hidden_size=16: the checkpoint decides it.*leave it out.*max_num_tokens"):
        read_problem(sharded, 1, hidden_size=16)
    with pytest.raises(ValueError, match="num_local_experts=5"):
        read_problem(sharded, 1, num_local_experts=5)


@pytest.mark.parametrize(("count", "rank"), [(5, 0), (2, 2), (2, -1), (0, 0), (None, 1)])
def test_ranks_outside_the_layer(sharded: Path, count: int | None, rank: int) -> None:
    found = 4 if count is None else count
    with pytest.raises(ValueError, match=rf"layer's 4, got num_local_experts={found} and ep_rank={rank}; keep"):
        load_experts(sharded, 1, num_local_experts=count, ep_rank=rank)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_memory_fraction_out_of_range(sharded: Path, fraction: float) -> None:
    with pytest.raises(ValueError, match=f"max_memory_fraction must be above 0 and at most 1, got {fraction}"):
        load_experts(sharded, 1, max_memory_fraction=fraction)


@pytest.mark.parametrize(
    "hidden_states",
    [torch.zeros(3, 9, dtype=torch.bfloat16), torch.zeros(3, 8), torch.zeros(1, 3, 8, dtype=torch.bfloat16)],
    ids=["size", "dtype", "rank"],
)
def test_route_checks_its_input(sharded: Path, hidden_states: torch.Tensor) -> None:
    layer = load_experts(sharded, 1)
    with pytest.raises(ValueError, match=r"must be \[T,8\] torch.bfloat16 on cpu, got \["):
        layer.route(hidden_states)


def test_route_without_tokens(sharded: Path) -> None:
    topk_weights, topk_ids = load_experts(sharded, 1).route(torch.zeros(0, 8, dtype=torch.bfloat16))
    assert topk_weights.shape == topk_ids.shape == (0, 2)


# 3 matrices of 6 x 8 in bf16 make 288 bytes an expert; 4 experts and one more while reading are 1440.
@pytest.mark.parametrize(
    ("free_bytes", "dtype", "expected"),
    [
        (
            2399,
            None,
            "needs 1.4 kB (4 experts of 288 bytes in bfloat16, and one more while reading), over 60% of the 2.4 kB "
            "free on cpu; read fewer experts (--num-local-experts 3)",
        ),
        (
            2400,
            "float32",
            "(4 experts of 576 bytes in float32, and one more while reading), over 60% of the 2.4 kB free on cpu; "
            "read fewer experts (--num-local-experts 1) or read them in 16 bits (--dtype bfloat16)",
        ),
        (500, None, "over 60% of the 500 bytes free on cpu; free memory on it or use another machine"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(
    sharded: Path,
    reads: list[tuple[str, int | None]],
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    dtype: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(_memory, "free_memory_bytes", lambda device: free_bytes)
    with pytest.raises(TooLargeError, match=re.escape(expected)) as error:
        load_experts(sharded, 1, dtype=dtype)
    assert str(error.value).startswith(f"layer 1 of {str(sharded)!r} needs ")
    assert not reads, "refused before reading"


def test_what_the_refusal_suggests_fits(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "free_memory_bytes", lambda device: 2400)
    assert load_experts(sharded, 1).problem.num_local_experts == 4
    monkeypatch.setattr(_memory, "free_memory_bytes", lambda device: 2399)
    assert load_experts(sharded, 1, num_local_experts=3).problem.num_local_experts == 3
    monkeypatch.setattr(_memory, "free_memory_bytes", lambda device: None)
    assert load_experts(sharded, 1).problem.num_local_experts == 4


def test_free_memory_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_memory_bytes(torch.device("cuda", 0)) == 123
    cpu_bytes = free_memory_bytes(torch.device("cpu"))
    assert cpu_bytes is None or cpu_bytes > 2**20
    assert free_memory_bytes(torch.device("meta")) is None


# What can be wrong with a checkpoint: each breaks a good one; the error names the rule, the value and the file.

Break = Callable[[Path], None]


def _config(**changes: Any) -> Break:
    """Writes the config with changes; a value of ... removes the entry."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    return lambda path: _write(path, config)


def _with_tensors(changes: dict[str, torch.Tensor | None]) -> Break:
    tensors = {name: tensor for name, tensor in {**_tensors(), **changes}.items() if tensor is not None}
    return lambda path: _write(path, tensors=tensors, sharded=True)


def _text(file: str, content: str) -> Break:
    return lambda path: (path / file).write_text(content) and None


def _remove(*files: str) -> Break:
    def remove(path: Path) -> None:
        for file in files:
            (path / file).unlink()

    return remove


def _truncate(file: str, num_bytes: int) -> Break:
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:num_bytes]) and None


def _only_pickles(path: Path) -> None:
    _remove("model.safetensors.index.json")(path)
    (path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")


def _rename_in_index(old: str, new: str) -> Break:
    def rename(path: Path) -> None:
        index = path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(old, new))

    return rename


GATE_0, DOWN_3 = f"{EXPERTS}.0.gate_proj.weight", f"{EXPERTS}.3.down_proj.weight"
BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "no_config": (_remove("config.json"), ("must hold config.json", "{path}", "nothing is downloaded")),
    "config_not_json": (_text("config.json", "{"), ("{path}/config.json must be readable JSON", "download")),
    "config_not_object": (_text("config.json", "[]"), ("{path}/config.json must hold a JSON object, got list",)),
    "no_model_type": (_config(model_type=...), ("{path}/config.json must hold model_type, got None",)),
    "unknown_model_type": (
        _config(model_type="qwen3_mo"),
        ("{path}/config.json", "unknown model type 'qwen3_mo', did you mean 'qwen3_moe'?", "known:", "mixtral"),
    ),
    "unknown_activation": (
        _config(hidden_act="mish"),
        ("{path}/config.json", "unknown hidden_act 'mish'", "gelu_pytorch_tanh"),
    ),
    "no_num_layers": (_config(num_hidden_layers=...), ("{path}/config.json", "num_hidden_layers", "got none")),
    "bad_size": (_config(moe_intermediate_size=0), ("{path}/config.json", "moe_intermediate_size", "got 0")),
    "size_not_number": (_config(hidden_size="wide"), ("{path}/config.json", "hidden_size", "got 'wide'")),
    "no_num_experts": (_config(num_experts=...), ("{path}/config.json", "num_experts")),
    "top_k_too_large": (_config(num_experts_per_tok=5), ("{path}/config.json", "top_k=5")),
    "dense_layers_not_list": (_config(mlp_only_layers=3), ("{path}/config.json", "mlp_only_layers", "list", "got 3")),
    "limit_not_number": (
        _config(model_type="gpt_oss", intermediate_size=6, swiglu_limit="7"),
        ("{path}/config.json", "swiglu_limit", "number", "got '7'"),
    ),
    "no_index_of_dense": (
        _config(model_type="deepseek_v2", first_k_dense_replace=...),
        ("{path}/config.json", "first_k_dense_replace", "got none"),
    ),
    "no_quant_method": (
        lambda path: _write(path, {"text_config": CONFIG, "quantization_config": {"bits": 4}}),
        ("{path}/config.json", "must name its quant_method, got None", "known: awq", "fp8"),
    ),
    "unknown_quant_method": (
        _config(quantization_config={"quant_method": "fp9"}),
        ("{path}/config.json", "unknown quant method 'fp9', did you mean 'fp8'?", "bfloat16 release"),
    ),
    "quant_config_not_object": (
        _config(quantization_config="fp8"),
        ("{path}/config.json", "quantization_config must be a JSON object, got 'fp8'"),
    ),
    "quantized_tensors_unsaid": (
        _with_tensors({DOWN_3: torch.zeros(8, 6, dtype=torch.float8_e4m3fn)}),
        (
            f"{DOWN_3} must be BF16 or F16 or F32",
            "unquantized",
            "F8_E4M3",
            "{path}/experts1.safetensors",
            "config.json",
        ),
    ),
    "scale_tensors_unsaid": (
        _with_tensors({f"{GATE_0}_scale_inv": torch.ones(1, 1)}),
        ("unquantized experts have no tensor such as", f"{GATE_0}_scale_inv", "{path}/experts0.safetensors"),
    ),
    "missing_shard": (
        _remove("experts1.safetensors"),
        ("model.safetensors.index.json names {path}/experts1.safetensors, which is missing", "download"),
    ),
    "index_not_json": (_text("model.safetensors.index.json", ""), ("{path}/model.safetensors.index.json", "JSON")),
    "index_without_map": (
        _text("model.safetensors.index.json", "{}"),
        ("{path}/model.safetensors.index.json must hold a weight_map",),
    ),
    "index_outside": (
        _rename_in_index("experts1.safetensors", "../experts1.safetensors"),
        ("must name files of its own directory, got '../experts1.safetensors'",),
    ),
    "index_of_another_file": (
        _rename_in_index("experts1.safetensors", "experts0.safetensors"),
        ("{path}/experts0.safetensors", f"{EXPERTS}.2.gate_proj.weight"),
    ),
    "truncated": (_truncate("experts1.safetensors", -1), ("{path}/experts1.safetensors (", "bytes)", "download")),
    "empty_file": (_truncate("router.safetensors", 0), ("{path}/router.safetensors (0 bytes)", "download")),
    "lfs_pointer": (
        _text("experts0.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("{path}/experts0.safetensors (", "download"),
    ),
    "missing_tensor": (
        _with_tensors({DOWN_3: None}),
        (f"tensor {DOWN_3!r} is missing from {{path}}/model.safetensors.index.json", "download"),
    ),
    "missing_router": (
        _with_tensors({ROUTER: None}),
        ("router of layer 1 is missing from '{path}'", ROUTER, "download"),
    ),
    "wrong_hidden_size": (
        _config(hidden_size=10),
        (f"{GATE_0} must be [6, 10]", "H=10", "got [6, 8] in {path}/model.safetensors"),
    ),
    "wrong_intermediate_size": (
        _config(moe_intermediate_size=7),
        (f"{GATE_0} must be [7, 8]", "I=7", "got [6, 8] in {path}/model.safetensors"),
    ),
    "too_many_experts": (
        _config(num_experts=5),
        (f"tensor '{EXPERTS}.4.gate_proj.weight' is missing from {{path}}/model.safetensors",),
    ),
    "too_few_experts": (
        _config(num_experts=3),
        (f"{ROUTER} must be [3, 8]", "E=3", "got [4, 8] in {path}/model.safetensors"),
    ),
    "mixed_dtypes": (
        _with_tensors({DOWN_3: torch.zeros(8, 6)}),
        ("must have one dtype", f"BF16 for {GATE_0} in experts0", f"F32 for {DOWN_3} in experts1", "{path}"),
    ),
    "pickles": (_only_pickles, ("only safetensors", "pytorch_model-00001-of-00002.bin", "{path}", "save_pretrained")),
    "no_weights": (_remove("model.safetensors.index.json"), ("got neither in '{path}'",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_clear_error(sharded: Path, name: str) -> None:
    break_it, expected = BROKEN[name]
    load_experts(sharded, 1)
    if name in ("wrong_hidden_size", "wrong_intermediate_size", "too_many_experts", "too_few_experts"):
        (sharded / "model.safetensors.index.json").unlink()
    break_it(sharded)
    for read in (load_experts, read_problem):
        with pytest.raises(CheckpointError) as error:
            read(sharded, 1)
        message = str(error.value)
        assert "\n" not in message
        for part in expected:
            assert part.replace("{path}", str(sharded)) in message


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, "layer 0 of {path!r} is dense, but a layer with experts is needed; those are 1-2"),
        (3, "layer must be in 0..2 for {path!r}, got 3; its layers with experts are 1-2"),
        (-1, "layer must be in 0..2 for {path!r}, got -1; its layers with experts are 1-2"),
    ],
)
def test_layers_without_experts(sharded: Path, layer: int, expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(expected.format(path=str(sharded)))):
        load_experts(sharded, layer)


def test_fused_tensors_of_other_sizes(tmp_path: Path, save: Save) -> None:
    case, saved = CASES["gpt_oss"], save("gpt_oss", torch.float32)
    tensors = load_file(saved.fused / "model.safetensors")
    name = f"model.layers.{case.layer}.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT.contiguous()
    _write(tmp_path, json.loads((saved.fused / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"{name} must be [8, 32, 48]") + r".*got \[8, 48, 32\]"):
        load_experts(tmp_path, case.layer)


def test_unreadable_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", "Qwen/Qwen3-30B-A3B"):
        with pytest.raises(CheckpointError, match="nothing is downloaded") as error:
            moe_layers(path)
        assert str(path) in str(error.value)
