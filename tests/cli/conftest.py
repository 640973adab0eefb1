"""Fixtures that call the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moereg import cli
from moereg.tuning.roofline import Ceilings
from tests.cli.command import Call, strict_json


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def call_json(call: Call) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """As `call` with `--json`; standard output must be one object and nothing else."""

    def run(line: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = call(f"{line} --json")
        return code, strict_json(out)

    return run


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """Fixed ceilings, without measuring."""
    known = Ceilings(matmul_tflops=0.1, read_gbps=20.0, read_by="nothing")
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: known)
    return known


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE in bfloat16 with one dense layer and two of experts; tests only read it."""
    path = tmp_path_factory.mktemp("checkpoint")
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
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = torch.randn(4, 64, generator=generator)
        for expert in range(4):
            for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
                tensors[f"{block}.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator) / 8
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
