"""`--checkpoint` of `moereg run`, `explain` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moereg.cli import _bench
from tests.cli.command import Call, CallJson, check_run


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
    assert (code, found["selected"], found["platform"]) == (0, "flashinfer_cutlass", "cuda:sm100")
    assert (found["problem"]["num_experts"], found["problem"]["max_num_tokens"]) == (4, 7)
    out = call(f"explain --checkpoint {checkpoint} --layer 1")[1]
    assert out.startswith(f"{checkpoint.name}, layer 1: E4 H64 I32 k2 bfloat16")
    monkeypatch.setattr("moereg.integrations.transformers.explain_model", None)
    code, found = call_json(f"explain --checkpoint {checkpoint} --platform b200")
    assert (code, found["notices"]) == (0, ["--platform b200 is cuda:sm100"])
    assert [(each["name"], each["selection"]) for each in found["layers"]] == [("layers.1", 0), ("layers.2", 0)]
    assert {each["selected"] for each in found["layers"]} == {found["selections"][0]["selected"]}


@pytest.mark.usefixtures("ceilings")
def test_bench_of_a_checkpoint_is_of_its_weights(
    call: Call, call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = []
    loaded = _bench.load_layer

    def load(path: Path, layer: int, *others: Any) -> _bench.RoutedWeights:
        layers.append(layer)
        return loaded(path, layer, *others)

    monkeypatch.setattr("moereg.cli._bench.load_layer", load)
    line = f"bench --checkpoint {checkpoint} --layer 2 --tokens 3 --rounds 1 --require torch"
    code, found = call_json(line)
    assert (code, found["problem"]["num_experts"]) == (0, 4)
    assert layers == [2]
    assert all(row["passed"] for row in found["rows"])
    assert call(line)[1].startswith(f"{checkpoint.name}, layer 2: E4")


def test_nothing_fits_a_checkpoint_and_nothing_is_read(
    call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereg.checkpoints.load_experts", None)
    code, found = call_json(f"run --checkpoint {checkpoint} --platform cpu --require triton")
    check_run(found)
    assert code == 3


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "line",
    [
        "explain --model qwen3-30b-a3b --platform h100",
        "explain --model qwen3-30b-a3b --platform h100 --require flashinfer_cutlass,flashinfer_trtllm",
        "explain --checkpoint {checkpoint} --layer 1 --reasons",
        "explain --checkpoint {checkpoint}",
        "run --checkpoint {checkpoint}",
        "quantize --checkpoint {checkpoint} --quant int4_w4a16_g32,int8_w8a16,nvfp4 --tokens 1,64",
    ],
)
def test_lines_are_as_long_as_columns_says(
    call: Call, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, line: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = call(line.format(checkpoint=checkpoint))
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    names = ("unquantized", "triton", "torch", "TorchPackedExperts", "int4_w4a16_g32", "layers.1-2")
    assert any(name in out for name in names)  # Names are not broken.
