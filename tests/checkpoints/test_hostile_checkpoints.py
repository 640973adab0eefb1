"""Files that were made to mislead, to crash or to take all time and memory: each is one printable line of an error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moereg.checkpoints import _manifest, load_experts, moe_layers, read_problem
from moereg.checkpoints._files import CheckpointFiles
from moereg.cli import main
from moereg.errors import CheckpointError
from moereg.routing import RouterSpec
from moereg.routing.config_entries import MOST_EXPERTS
from tests.support.quantized_checkpoints import (
    BLOCK,
    CHECKPOINTS,
    GATE_0,
    changed,
)

MODULE = f"{BLOCK}.experts.0.gate_proj"
QWEN = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("config", "entry", "value"),
    [
        (QWEN, "norm_topk_prob", "false"),
        (QWEN, "norm_topk_prob", 1),
        (QWEN, "num_experts_per_tok", 1.9),
        (QWEN, "num_experts_per_tok", True),
        (QWEN, "num_experts_per_tok", "2"),
        (QWEN, "num_experts", 8.0),
        (QWEN, "num_experts", 10**7),
        (QWEN, "num_experts", 10**5000),
        (DEEPSEEK, "norm_topk_prob", 1),
        (DEEPSEEK, "n_group", "4"),
        (DEEPSEEK, "routed_scaling_factor", float("nan")),
        (DEEPSEEK, "routed_scaling_factor", float("inf")),
        (DEEPSEEK, "routed_scaling_factor", True),
        (DEEPSEEK, "routed_scaling_factor", "2.5"),
        (DEEPSEEK, "routed_scaling_factor", 10**400),
    ],
    ids=lambda value: "" if isinstance(value, dict) else "huge" if value in (10**400, 10**5000) else str(value),
)
def test_router_entries_are_what_they_say_or_refused(config: dict[str, Any], entry: str, value: Any) -> None:
    RouterSpec.from_config(config)
    with pytest.raises(CheckpointError, match=rf"^{entry} of model type '\w+' must be .*, got .*; "):
        RouterSpec.from_config({**config, entry: value})


# Ten times what published models have: Switch-C's experts, Llama 3.1 405B's layers.
@pytest.mark.parametrize(("num_experts", "num_layers"), [(20_480, 1), (8, 1_260)])
def test_models_larger_than_any_are_read(num_experts: int, num_layers: int, tmp_path: Path) -> None:
    config = {**QWEN, "num_experts": num_experts, "num_hidden_layers": num_layers}
    assert RouterSpec.from_config(config).num_experts == num_experts
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert moe_layers(tmp_path) == tuple(range(num_layers))


def test_the_first_missing_expert_ends_a_large_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(tmp_path, "fp8_block128", lambda config, tensors: config.update(num_experts=MOST_EXPERTS))
    listed: list[int] = []
    list_parts = _manifest._Experts.parts

    def listing(experts: Any, expert: int) -> Any:
        listed.append(expert)
        return list_parts(experts, expert)

    monkeypatch.setattr(_manifest._Experts, "parts", listing)
    with pytest.raises(CheckpointError, match=r"experts.2.gate_proj.weight' is missing"):
        read_problem(path, 0)
    assert listed == [0, 1, 2]


NAMED = {
    "deep": ("config.json", "[" * 100_000, "config.json must be readable JSON, got: maximum recursion depth"),
    "deep_index": ("model.safetensors.index.json", '{"weight_map":' + "[" * 100_000, "must be readable JSON"),
    "digits": ("config.json", f'{{"num_experts": 1{"0" * 5000}}}', "config.json must be readable JSON, got: Exceeds"),
    "not_utf8": ("config.json", "{}\udcff", "config.json must be readable JSON"),
    "numbered_files": ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "must map to files, got 5"),
}


@pytest.mark.parametrize("name", NAMED)
def test_json_that_is_no_config(tmp_path: Path, name: str) -> None:
    file, content, expected = NAMED[name]
    path = changed(tmp_path, "fp8_block128", lambda config, tensors: None)
    (path / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as error:
        load_experts(path, 0)
    assert expected in str(error.value)
    assert str(path) in str(error.value)


def test_a_config_of_a_size_that_none_has(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"config.json must be at most 16.* MB, got more"):
        moe_layers(tmp_path)


def _sharded(path: Path, shard: str) -> Path:
    changed(path, "fp8_block128", lambda config, tensors: None)
    names = load_file(path / "model.safetensors")
    index = {"weight_map": {name: shard if name.startswith(GATE_0) else "model.safetensors" for name in names}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    "shard",
    [
        f"{'x' * 300}.safetensors",
        "a\0b.safetensors",
        "\udc80.safetensors",
        "\x1b]0;title\x07\x1b[31m.safetensors",
        "two\nlines.safetensors",
        "\u202egnp.safetensors",
        "\x1b" * 100_000,
        "..",
        "",
    ],
    ids=["long", "nul", "surrogate", "escape", "newline", "right_to_left", "escapes", "parent", "empty"],
)
def test_a_shards_name_reaches_no_terminal(tmp_path: Path, shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = _sharded(tmp_path, shard)
    with pytest.raises(CheckpointError) as error:
        load_experts(path, 0)
    assert str(error.value).isprintable()
    assert len(str(error.value)) <= 2000
    assert main(["run", "--checkpoint", str(path), "--json", "--platform", "cpu", "--tokens", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err[-1:], err[:-1].isprintable()) == ("", "\n", True)


def test_a_directorys_name_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path / "\x1b[31mred", "fp8_block128", lambda config, tensors: None)
    assert main(["run", "--checkpoint", str(path), "--platform", "cpu", "--tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert "red, layer 0" in out
    assert (out + err).replace("\n", "").isprintable()


def test_a_home_that_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint directory must exist, got '~nosuchuser/x'"):
        load_experts("~nosuchuser/x", 0)
    assert main(["run", "--checkpoint", "~nosuchuser/x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["fp8_block128", "mxfp4"], ids=["separate", "fused"])
def test_a_shard_that_ends_earlier_than_when_it_was_opened(tmp_path: Path, name: str) -> None:
    # Large enough that the part that is cut off lies on other pages than the rest.
    large = {f"x{number}": torch.zeros(2**18) for number in range(2)}
    path = changed(tmp_path, name, lambda config, tensors: tensors.update(large))
    shard = path / "model.safetensors"
    # In a separate process, which a mapping of the file would end with SIGBUS.
    child = os.fork()
    if not child:
        try:
            load_experts(path, 0, progress=lambda done, total: os.truncate(shard, 4096))
        except CheckpointError as error:
            (path / "error").write_text(str(error))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    expected = f"{shard} (4096 bytes) must be the whole safetensors file of this checkpoint, got: "
    assert (path / "error").read_text().startswith(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_one_expert_of_a_fused_tensor_is_all_that_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """In a file with only the header and the first expert, the first expert can be read."""
    tensor = torch.arange(4 * 6 * 8, dtype=torch.uint8).view(4, 6, 8).view(dtype)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3), "w": tensor}, path)

    def is_read(row: int) -> bool:
        found = files.read("w", row)
        return found.dtype == dtype and torch.equal(found.view(torch.uint8), tensor[row].view(torch.uint8))

    with CheckpointFiles(tmp_path) as files:
        assert all(is_read(row) for row in range(4))
        path.write_bytes(path.read_bytes()[: -3 * 6 * 8])
        assert is_read(0)
        with pytest.raises(CheckpointError, match="it ended 48 bytes before"):
            files.read("w", 1)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"{",
        b"[1]",
        b"[" * 100_000,
        b'{"v":{}}',
        b'{"w":3}',
        b'{"w":{"shape":[4,6,8]}}',
        *(
            b'{"w":{"dtype":"F32","shape":[4,6,8],"data_offsets":%s}}' % found
            for found in (b"null", b"[]", b"{}", b'["a"]', b"[0.5]", b"[-99999]", b"[99999999999999999999]")
        ),
    ],
    ids=lambda header: header[-40:].decode("ascii", "replace")[:40],
)
def test_a_header_that_changes_before_it_is_read_names_the_file(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)}, path)
    with CheckpointFiles(tmp_path) as files:
        files.read("w")  # Opens it.
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))} .* its header changed while w was read"):
            files.read("w", 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"layer": None}, "layer must be an integer, got None"),
        ({"layer": "1"}, "layer must be an integer, got '1'"),
        ({"layer": True}, "layer must be an integer, got True"),
        ({"layer": 0, "num_local_experts": "2"}, "num_local_experts must be an integer, got '2'"),
        ({"layer": 0, "ep_rank": 0.5}, "ep_rank must be an integer, got 0.5"),
        ({"layer": 0, "device": "nothing"}, "device must be one that torch knows, .*, got 'nothing'"),
        ({"layer": 0, "device": ""}, "device must be one that torch knows, .*, got ''"),
        ({"layer": 0, "max_memory_fraction": float("nan")}, "max_memory_fraction must be above 0 and at most 1"),
        ({"layer": 0, "max_memory_fraction": 0.0}, "max_memory_fraction must be above 0 and at most 1, got 0.0"),
        ({"layer": 0, "max_memory_fraction": 1.5}, "max_memory_fraction must be above 0 and at most 1, got 1.5"),
        *(
            (
                {"layer": 0, "num_local_experts": count, "ep_rank": rank},
                f".* layer's 2, got num_local_experts={2 if count is None else count} and ep_rank={rank}; keep",
            )
            for count, rank in ((3, 0), (1, 2), (1, -1), (0, 0), (None, 1))
        ),
    ],
    ids=str,
)
def test_arguments_of_other_types(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        load_experts(CHECKPOINTS / "fp8_block128", **arguments)
