"""The bench of moereg-cpu beside other people's kernels, its peers and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benches import bench_cpu_kernels, cpu_page, cpu_peers, stored
from benches.bench_torch_cpu import TOLERANCE, Shape
from moereg.bench.inputs import random_call, random_weights
from moereg.numerics.reference import reference_experts, relative_error
from moereg.spec.problem import MoEProblem

TINY = Shape("tiny", num_experts=4, hidden_size=128, intermediate_size=64, top_k=2)


@pytest.mark.peers
@pytest.mark.parametrize("name", cpu_peers.PEERS)
def test_a_peer_runs_the_layer(name: str, isolated_registry: Any) -> None:
    problem = MoEProblem(num_experts=16, hidden_size=512, intermediate_size=384, top_k=4, dtype="bfloat16")
    weights = random_weights(problem, torch.Generator().manual_seed(1), torch.device("cpu"))
    try:
        run = cpu_peers.PEERS[name](problem, weights, 1)
    except cpu_peers.MissingPeer as missing:
        pytest.skip(f"{name}: {missing}")
    for num_tokens in (1, 9):
        call = random_call(problem, num_tokens, "uniform", torch.Generator().manual_seed(2))
        expected = reference_experts(problem, weights, *call)
        assert relative_error(run(*call), expected) <= TOLERANCE["bfloat16"]
        assert relative_error(run(call.hidden_states, call.topk_weights * 1.05, call.topk_ids), expected) > 0.02


def row(scheme: str = "unquantized", num_tokens: int = 1, **times_us: float) -> dict[str, Any]:
    times = {name.replace("_", "-") if name == "moereg_cpu" else name: time for name, time in times_us.items()}
    common = {
        "layer": "mixtral",
        "threads": 1,
        "read_gbps": 20.0,
        "weights_gbps": 15.0,
        "notes": {"openvino": "absent"},
    }
    return {**common, "scheme": scheme, "num_tokens": num_tokens, "times_us": times}


def test_the_page_says_how_rows_stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_page, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError):
        cpu_page.kernels_table()
    facts = {"schema": 1, "device": "CPU", "instruction_set": "AVX2", "versions": {"torch": "2"}, "commit": "abc"}
    rows = [
        row(moereg_cpu=1000.0, torch=500.0, vllm=1210.0, eager=3000.0),
        row(num_tokens=4, moereg_cpu=2000.0, torch=900.0, vllm=2000.0, eager=2100.0),
        row(num_tokens=64, moereg_cpu=4000.0, torch=900.0, vllm=8000.0, eager=3000.0),
        row(scheme="int4_w4a16_g128", moereg_cpu=300.0, bfloat16=1000.0),
    ]
    document = {**facts, "date": "2026-01-01", "rows": rows}
    (tmp_path / "kernels_cpu_here.json").write_text(json.dumps(document))
    summary, every = cpu_page.kernels_table(), cpu_page.kernels_rows_table()
    assert "| CPU, AVX2, 1 thread | 1.10 | 0.75 | 0.75 | 0.75 | - | 0.30 | - | - |" in summary
    assert "no openvino: absent" in summary
    lost, tied, won = (line for line in every.splitlines() if line.startswith("| mixtral |") and "int4" not in line)
    assert lost == "| mixtral | 64 | 4.00 | 0.90 | 3.00 (eager) | 0.75 | lost |"
    assert tied.endswith("| 2.00 (vllm) | 1.00 | tied |")
    assert won.endswith("| 1.21 (vllm) | 1.21 | won |")
    assert "| mixtral | int4_w4a16_g128 | 1 | 0.30 | 0.30 |" in every


def test_rows_are_added_to_a_file_of_the_same_facts_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert stored.earlier_rows_of(None, {}, ()) == stored.earlier_rows_of(path, {}, ()) == []
    path.write_text(json.dumps({"commit": "abc", "date": "then", "rows": [1]}))
    assert stored.earlier_rows_of(path, {"commit": "abc", "date": "now"}, ("commit",)) == [1]
    with pytest.raises(ValueError, match=r"same commit, and that of .* is 'abc', here 'def'; name another file"):
        stored.earlier_rows_of(path, {"commit": "def"}, ("commit",))


def test_the_bench_measures_a_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    pytest.importorskip("moereg_cpu", reason="moereg-cpu is not on the path; make test-cpu builds it and puts it there")

    def missing(*_: Any) -> Any:
        raise cpu_peers.MissingPeer("not installed")

    def wrong(*_: Any) -> Any:
        return lambda hidden_states, *routes: hidden_states

    monkeypatch.setattr(bench_cpu_kernels, "LAYERS", (TINY,))
    monkeypatch.setattr(bench_cpu_kernels, "PEERS", {"absent": missing, "wrong": wrong})
    monkeypatch.setattr(bench_cpu_kernels, "READ_BYTES", 1 << 22)
    path = tmp_path / "rows.json"
    schemes = ["unquantized", "int4_w4a16_g128"]
    common = ["--schemes", *schemes, "--threads", "1", "--rounds", "1", "--json", str(path)]
    assert bench_cpu_kernels.main(["--tokens", "1", *common]) == 0
    assert bench_cpu_kernels.main(["--tokens", "1", "5", *common]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert sorted((one["scheme"], one["num_tokens"]) for one in rows) == [(s, t) for s in schemes[::-1] for t in (1, 5)]
    quantized = next(one for one in rows if one["scheme"] != "unquantized")
    assert set(quantized["times_us"]) == {"moereg-cpu", "bfloat16"}
    assert all(time > 0 for one in rows for time in one["times_us"].values())
    plain = next(one for one in rows if one["scheme"] == "unquantized")
    assert set(plain["times_us"]) == {"moereg-cpu", "torch", "eager", "grouped_mm"}
    assert plain["notes"]["absent"] == "not installed"
    assert plain["notes"]["wrong"].startswith("wrong: error ")
    # One token has two experts, with three matrices of 128 x 64 each.
    one_token = next(one for one in rows if one["scheme"] == "unquantized" and one["num_tokens"] == 1)
    assert one_token["weights_gbps"] == pytest.approx(2 * 3 * 128 * 64 * 2 / one_token["times_us"]["moereg-cpu"] / 1e3)
    assert "absent: not installed" in capsys.readouterr().out


@pytest.mark.peers
def test_vllms_kernel_passes_the_kit(isolated_registry: Any) -> None:
    from moereg.cli import main

    if not cpu_peers.FOLDER.is_dir():
        pytest.skip("vLLM's kernels for CPUs are not installed; make test-peers installs them")
    assert main(["verify", str(Path(cpu_peers.__file__).with_name("vllm_cpu.py"))]) == 0
