"""Faults of a checkpoint: each breaks a good one, and the error names the rule, the value and the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from moereg.checkpoints import load_experts, moe_layers, read_problem
from moereg.errors import CheckpointError
from tests.checkpoints.cures import CURES
from tests.checkpoints.small_checkpoint import (
    CONFIG,
    EXPERTS,
    ROUTER,
    error_pattern,
    shard_of,
    small_tensors,
    write_checkpoint,
)

Break = Callable[[Path], None]


def _config(**changes: Any) -> Break:
    """Writes the config with changes, and one file of tensors; a value of ... removes the entry."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}

    def write(path: Path) -> None:
        _remove("model.safetensors.index.json")(path)
        write_checkpoint(path, config)

    return write


def _with_tensors(changes: dict[str, torch.Tensor | None]) -> Break:
    tensors = {name: tensor for name, tensor in {**small_tensors(), **changes}.items() if tensor is not None}
    return lambda path: write_checkpoint(path, tensors=tensors, shard_of=shard_of)


def _text(file: str, content: str) -> Break:
    return lambda path: (path / file).write_text(content) and None


def _remove(*files: str) -> Break:
    def remove(path: Path) -> None:
        for file in files:
            (path / file).unlink()

    return remove


def _truncate(file: str, num_bytes: int) -> Break:
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:num_bytes]) and None


def _only(name: str) -> Break:
    def write(path: Path) -> None:
        _remove("model.safetensors.index.json")(path)
        (path / name).write_bytes(b"")

    return write


def _nothing_but(name: str) -> Break:
    def write(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        (path / name).write_bytes(b"")

    return write


def _rename_in_index(old: str, new: str) -> Break:
    def rename(path: Path) -> None:
        index = path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(old, new))

    return rename


GATE_0, DOWN_3 = f"{EXPERTS}.0.gate_proj.weight", f"{EXPERTS}.3.down_proj.weight"
# The change, and words of the error in their order, with anything between them.
# fmt: off
BROKEN: Final[tuple[tuple[Break, str], ...]] = (
    (_remove("config.json"), "must hold config.json ... {path} ... nothing is downloaded"),
    (_text("config.json", "{"), "{path}/config.json must be readable JSON ... take it from"),
    (_text("config.json", "[]"), "{path}/config.json must hold a JSON object, got list"),
    (_config(model_type=...), "{path}/config.json must hold model_type, got None"),
    (_config(model_type="qwen3_mo"),
        "{path}/config.json ... unknown model type 'qwen3_mo'; do not put another type's name ... ExpertWeights"),
    (_config(hidden_act="mish"),
        "{path}/config.json ... unknown hidden_act 'mish' (known: gelu, ... gelu_pytorch_tanh ... own code"),
    (_config(model_type="gpt_oss", intermediate_size=6, swiglu_limit=0.0),
        "{path}/config.json ... swiglu_limit must be above 0, got 0.0; take the file"),
    (_config(hidden_act="relu"), "unknown hidden_act 'relu' (known: gelu,"),
    (_config(num_hidden_layers=...), "{path}/config.json ... num_hidden_layers ... got none"),
    (_config(moe_intermediate_size=0), "{path}/config.json ... moe_intermediate_size ... got 0"),
    (_config(hidden_size="wide"), "{path}/config.json ... hidden_size ... got 'wide'"),
    (_config(num_experts=...), "{path}/config.json ... num_experts"),
    (_config(num_experts_per_tok=5), "{path}/config.json ... top_k=5"),
    (_config(mlp_only_layers=3), "{path}/config.json ... mlp_only_layers ... list ... got 3"),
    (_config(model_type="gpt_oss", intermediate_size=6, swiglu_limit="7"),
        "{path}/config.json ... swiglu_limit ... number ... got '7'"),
    (_config(model_type="zaya"),
        "{path}/config.json ... model type 'zaya' is not read: its router is an MLP ... docs/checkpoints.md"),
    (_config(model_type="deepseek_v2", norm_topk_prob=False, first_k_dense_replace=-1),
        "{path}/config.json ... first_k_dense_replace ... got -1"),
    (_config(model_type="glm4_moe_lite", mlp_layer_types=["dense", "sparse"]),
        "{path}/config.json ... mlp_layer_types must name each of 3 layers sparse or dense, got 2 names"),
    (_config(model_type="laguna", mlp_layer_types=["dense", "sparse", "moe"]),
        "{path}/config.json ... mlp_layer_types must name each of 3 layers sparse or dense, got 'moe'"),
    (_config(model_type="minimax_m2", norm_topk_prob=True, intermediate_size=6, scoring_func="softmax"),
        "{path}/config.json ... scoring_func of model type 'minimax_m2' must be in ['sigmoid'], got 'softmax'"),
    (lambda path: write_checkpoint(path, {"text_config": CONFIG, "quantization_config": {"bits": 4}}),
        "{path}/config.json ... must name its quant_method, got None ... known: auto-round, awq ... fp8"),
    (_config(quantization_config={"quant_method": "fp9"}),
        "{path}/config.json ... quant method 'fp9' is not read (read: ... fp8 ... ); use a release in"),
    (_config(quantization_config="fp8"), "{path}/config.json ... quantization_config must be a JSON object, got 'fp8'"),
    (_with_tensors({DOWN_3: torch.zeros(8, 6, dtype=torch.float8_e4m3fn)}),
        f"{DOWN_3} must be BF16 or F16 or F32 ... unquantized ... F8_E4M3 in {{path}}/experts1.safetensors; take"),
    (_with_tensors({f"{GATE_0}_scale_inv": torch.ones(1, 1)}),
        f"unquantized experts have no tensor such as ... {GATE_0}_scale_inv ... {{path}}/experts0.safetensors"),
    (_remove("experts1.safetensors"),
        "model.safetensors.index.json names {path}/experts1.safetensors, which is missing ... download"),
    (_text("model.safetensors.index.json", ""), "{path}/model.safetensors.index.json ... JSON"),
    (_text("model.safetensors.index.json", "{}"), "{path}/model.safetensors.index.json must hold a weight_map"),
    (_rename_in_index("experts1.safetensors", "../experts1.safetensors"),
        "must name files of its own directory, got '../experts1.safetensors'"),
    (_rename_in_index("experts1.safetensors", "experts0.safetensors"),
        f"{{path}}/experts0.safetensors ... {EXPERTS}.2.gate_proj.weight"),
    (_truncate("experts1.safetensors", -1), "{path}/experts1.safetensors ( ... bytes) ... download"),
    (_truncate("router.safetensors", 0), "{path}/router.safetensors (0 bytes) ... download"),
    (_text("experts0.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "{path}/experts0.safetensors ( ... download"),
    (_with_tensors({DOWN_3: None}),
        f"tensor {DOWN_3!r} is missing from {{path}}/model.safetensors.index.json; take config.json"),
    (_with_tensors({ROUTER: None}), f"router of layer 1 is missing from '{{path}}' ... {ROUTER}; take config.json"),
    (_config(hidden_size=10), f"{GATE_0} must be [6, 10] ... H=10 ... got [6, 8] in {{path}}/model.safetensors"),
    (_config(moe_intermediate_size=7), f"{GATE_0} must be [7, 8] ... I=7 ... got [6, 8] in {{path}}/model.safetensors"),
    (_config(num_experts=5), f"tensor '{EXPERTS}.4.gate_proj.weight' is missing from {{path}}/model.safetensors"),
    (_config(num_experts=3), f"{ROUTER} must be [3, 8] ... E=3 ... got [4, 8] in {{path}}/model.safetensors"),
    (_with_tensors({DOWN_3: torch.zeros(8, 6)}),
        f"{{path}} ... must have one dtype ... BF16 for {GATE_0} in experts0 ... F32 for {DOWN_3} in experts1"),
    (_only("pytorch_model-00001-of-00002.bin"),
        "only safetensors ... pytorch_model-00001-of-00002.bin ... {path} ... save_pretrained"),
    (_only("model-Q4_K_M.gguf"), "only safetensors ... got model-Q4_K_M.gguf ... {path} ... ; use the release"),
    (_nothing_but("model-Q4_K_M.gguf"), "only safetensors ... got model-Q4_K_M.gguf ... {path} ... ; use the release"),
    (_remove("model.safetensors.index.json"), "got neither in '{path}'"),
)
# fmt: on


@pytest.mark.parametrize("row", range(len(BROKEN)))
def test_a_broken_checkpoint_is_one_clear_error(sharded: Path, row: int) -> None:
    break_it, expected = BROKEN[row]
    load_experts(sharded, 1)
    break_it(sharded)
    for read in (load_experts, read_problem):
        with pytest.raises(CheckpointError, match=error_pattern(expected, sharded)) as error:
            read(sharded, 1)
        assert "\n" not in str(error.value)
        assert any(cure in str(error.value) for cure in CURES)


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


@pytest.mark.parametrize("read", [moe_layers, read_problem, load_experts], ids=lambda read: read.__name__)
@pytest.mark.parametrize("name", ["nothing", "a_file", "a_link", "a_file/inside"])
def test_what_is_no_directory_is_one_error_that_names_it(name: str, read: Any, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("{}")
    (tmp_path / "a_link").symlink_to(tmp_path / "nowhere")
    path = tmp_path / name
    with pytest.raises(CheckpointError, match=error_pattern("{path} ... nothing is downloaded", path)) as error:
        read(path, *(() if read is moe_layers else (0,)))
    assert "\n" not in str(error.value)
