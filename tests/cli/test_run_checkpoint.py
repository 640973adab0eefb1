"""`--checkpoint` of `moereg run`, `explain` and `bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moereg.cli import _layer
from moereg.tuning.roofline import Ceilings
from tests.cli.command import Call, CallJson, check_run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Qwen3-MoE with one dense layer and two of experts."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "hidden_act": "silu",
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (4, 64)
        for expert in range(4):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{block}.experts.{expert}.{name}.weight"] = (32, 64)
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = (64, 32)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("line", ["", "--layer 2 --dtype float32", "--num-local-experts 2 --tokens 5 --deterministic"])
def test_run_on_a_checkpoint(call_json: CallJson, checkpoint: Path, line: str) -> None:
    code, found = call_json(f"run --checkpoint {checkpoint} {line}")
    check_run(found)
    assert (code, found["passed"]) == (0, True)
    assert found["problem"]["num_experts"] == 4
    assert found["problem"]["dtype"] == ("float32" if "float32" in line else "bfloat16")
    assert found["problem"]["num_local_experts"] == (2 if "local" in line else 4)


def test_explain_of_a_checkpoint_reads_headers_alone(
    call: Call, call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereg.checkpoints.load_experts", None)
    code, found = call_json(f"explain --checkpoint {checkpoint} --layer 2 --platform b200 --tokens 7")
    assert (code, found["selected"], found["platform"]) == (0, "triton", "cuda:sm100")
    assert (found["problem"]["num_experts"], found["problem"]["max_num_tokens"]) == (4, 7)
    out = call(f"explain --checkpoint {checkpoint}")[1]
    assert out.startswith(f"{checkpoint.name}, layer 1: E4 H64 I32 k2 bfloat16")


def test_bench_of_a_checkpoint_is_of_its_weights(
    call: Call, call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Ceilings(matmul_tflops=0.1, read_gbps=20.0, read_by="nothing")
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: known)
    layers = []
    loaded = _layer.load_layer

    def load(path: Path, layer: int, *others: Any) -> _layer.RoutedWeights:
        layers.append(layer)
        return loaded(path, layer, *others)

    monkeypatch.setattr("moereg.cli._bench.load_layer", load)
    line = f"bench --checkpoint {checkpoint} --layer 2 --tokens 3 --rounds 1 --require torch"
    code, found = call_json(line)
    assert (code, found["problem"]["num_experts"]) == (0, 4)
    assert layers == [2]
    assert all(row["passed"] for row in found["rows"])
    assert call(line)[1].startswith(f"{checkpoint.name}, layer 2: E4")


def test_a_checkpoint_is_named(call: Call, checkpoint: Path) -> None:
    code, out, _ = call(f"run --checkpoint {checkpoint}")
    assert code == 0
    assert f"{checkpoint.name}, layer 1" in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--layer 0", "layer 0"),
        ("--layer 9", "got 9"),
        ("--num-local-experts 5", "num_local_experts"),
        ("--dtype int8", "unknown dtype"),
        ("--quant mxfp8", "--quant cannot be combined"),
    ],
)
def test_bad_input_with_a_checkpoint(call: Call, checkpoint: Path, line: str, expected: str) -> None:
    code, out, err = call(f"run --checkpoint {checkpoint} {line}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_nothing_fits_a_checkpoint_and_nothing_is_read(
    call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereg.checkpoints.load_experts", None)
    code, found = call_json(f"run --checkpoint {checkpoint} --platform cpu --require triton")
    check_run(found)
    assert code == 3
